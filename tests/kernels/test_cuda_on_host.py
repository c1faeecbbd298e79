"""The harness that runs CUDA kernels on the host finds the mistakes that it is there for."""

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from preact_kernels.ops import dispatch as backends
from testbed.cuda_on_host import build, serve_cpu

if shutil.which(build.CXX[0]) is None:
    pytest.skip(f"no C++ compiler: {build.CXX[0]} not found", allow_module_level=True)

SEEDS = range(20)
COUNT = 64
ENTRIES = (
    "reverse", "stray", "divergent", "copy", "overwrite", "vectors", "count", "last_thread_block",
    "all_thread_blocks", "empty_grid", "chain", "plain_chain",
)  # fmt: skip


@pytest.fixture(scope="module")
def planted():
    library = ctypes.CDLL(str(build.build("planted")))
    for name in ENTRIES:
        getattr(library, name).restype = ctypes.c_char_p
    return library


def run(library, name, variant=0, seed=0, count=COUNT, resident_thread_blocks=4, multiprocessors=2):
    """The output of a planted kernel on random numbers, those numbers, and the message."""
    values = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    out = np.full(count, np.nan, np.float32)
    library.cuda_on_host_set(ctypes.c_uint64(seed), multiprocessors, resident_thread_blocks)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (values, out))
    return out, values, getattr(library, name)(*pointers, variant).decode()


def test_every_schedule_of_a_right_kernel_gives_its_result(planted):
    for seed in SEEDS:
        out, values, message = run(planted, "reverse", 0, seed, 4 * COUNT)
        assert not message, seed
        right = values.reshape(4, COUNT)[:, ::-1].ravel()
        np.testing.assert_array_equal(out, right, f"seed {seed}")


def test_a_missing_barrier_shows_in_every_schedule(planted):
    for seed in SEEDS:
        out, values, _ = run(planted, "reverse", 1, seed, 4 * COUNT)
        right = values.reshape(4, COUNT)[:, ::-1].ravel()
        is_nan = np.isnan(out)
        assert 0 < is_nan.sum() < out.size, seed  # shared memory before it was written
        np.testing.assert_array_equal(out[~is_nan], right[~is_nan], f"seed {seed}")


def test_threads_that_do_not_meet_are_errors(planted):
    messages = (
        "",
        "a barrier that some threads do not reach",
        "threads at different barriers",
        "threads wait for others that never come|lanes of a warp apart",
        "threads wait for others that never come: __shfl_xor_sync",
    )
    for seed, (variant, message) in itertools.product(SEEDS, enumerate(messages)):
        found = run(planted, "divergent", variant, seed)[2]
        assert re.search(message, found) and bool(found) == bool(message), (variant, seed)
    out, values, _ = run(planted, "divergent")  # adds up each warp
    sums = values.reshape(2, 32).astype(np.float64).sum(1)
    np.testing.assert_allclose(out.reshape(2, 32), sums[:, None].repeat(32, 1), rtol=1e-5)


def test_asynchronous_copies_land_at_the_wait_and_zeros_where_not_valid(planted):
    out, values, message = run(planted, "copy")
    assert not message
    values[4:8] = 0
    np.testing.assert_array_equal(out, values)
    for variant in (1, 2, 3):
        assert np.isnan(run(planted, "copy", variant)[0]).all(), variant
    for variant in (4, 5):
        assert "copy: cp_async_16: not aligned" in run(planted, "copy", variant)[2], variant


def test_a_copy_over_what_others_still_read_shows_in_some_schedule(planted):
    """With an odd seed copies land at once."""
    for variant in (0, 1):
        found = [run(planted, "overwrite", variant, seed)[:2] for seed in SEEDS]
        right = [bool((out == 2 * values[::-1]).all()) for out, values in found]
        assert all(right) == (variant == 0), right


def test_a_vector_that_is_not_aligned_is_an_error_that_names_the_line(planted):
    out, values, message = run(planted, "vectors")
    assert not message
    np.testing.assert_array_equal(out, values)
    lines = (build.HERE / "planted.cpp").read_text().splitlines()
    for variant, text in enumerate(("const float4 four =", ") = four;"), start=1):
        (line,) = (number for number, found in enumerate(lines, 1) if text in found)
        message = run(planted, "vectors", variant)[2]
        assert re.fullmatch(
            rf"vectors: .*planted\.cpp:{line}: an access of '.*float4' that is not aligned to 16 "
            r"bytes \(thread \d+\)",
            message,
        ), message


MEETINGS = {
    "count": lambda values: np.full(1, 8),
    "last_thread_block": lambda values: np.add.accumulate(values[:8]),
}


def right_schedules(library, name, variant):
    """The seeds with which thread blocks that meet give the right result."""
    found = []
    for seed in SEEDS:
        out, values, message = run(library, name, variant, seed, resident_thread_blocks=8)
        assert not message
        right = MEETINGS[name](values)
        found += [seed] * np.array_equal(out[: right.size], right)
    return found


def test_thread_blocks_that_meet_rightly_give_the_result_in_every_schedule(planted):
    for name in MEETINGS:
        assert right_schedules(planted, name, 0) == list(SEEDS), name


def test_thread_blocks_that_meet_wrongly_show_in_some_schedules(planted):
    for wrong in (("count", 1), ("last_thread_block", 1), ("last_thread_block", 2)):
        assert len(right_schedules(planted, *wrong)) < len(SEEDS), wrong


def test_a_refused_launch_is_an_error_that_names_the_kernel(planted):
    assert planted.empty_grid().decode() == "empty: invalid configuration: thread blocks of a grid"


def right_cooperative_schedules(library, variant, resident_thread_blocks):
    """The seeds with which eight thread blocks that wait for each other give the right result."""
    found = []
    for seed in SEEDS:
        options = {"resident_thread_blocks": resident_thread_blocks, "multiprocessors": 8}
        out, values, message = run(library, "all_thread_blocks", variant, seed, **options)
        assert not message
        found += [seed] * bool((out[:8] == np.add.accumulate(values[:8])[-1]).all())
    return found


@pytest.mark.parametrize("resident_thread_blocks", [1, 4, 8])
def test_all_thread_blocks_of_a_cooperative_launch_run_at_once(planted, resident_thread_blocks):
    """However few thread blocks of other launches do; else they would wait for ever."""
    assert right_cooperative_schedules(planted, 0, resident_thread_blocks) == list(SEEDS)
    for variant in (1, 2):
        right = right_cooperative_schedules(planted, variant, resident_thread_blocks)
        assert len(right) < len(SEEDS), variant


def test_a_cooperative_launch_of_more_thread_blocks_than_multiprocessors_is_refused(planted):
    message = run(planted, "all_thread_blocks", multiprocessors=7)[2]
    assert (
        message == "all_thread_blocks: invalid configuration: thread blocks that are not resident"
    )


CHAIN = 8 * COUNT


@pytest.mark.parametrize(("variant", "early"), [(0, None), (1, np.nan), (2, np.nan), (3, 2)])
def test_what_a_dependent_launch_does_early_comes_before_the_launch_ahead(planted, variant, early):
    """By one thread block, which starts early; `early` is its out / in."""
    for seed, resident_thread_blocks in itertools.product(SEEDS, (1, 4)):
        out, values, message = run(planted, "chain", variant, seed, CHAIN, resident_thread_blocks)
        assert not message
        is_right = (out == 6 * values).reshape(8, COUNT)
        if early is None:
            assert is_right.all()
            continue
        assert (~is_right).all(1).sum() == (~is_right).any(1).sum() == 1
        wrong = out.reshape(8, COUNT)[~is_right]
        np.testing.assert_array_equal(wrong, early * values.reshape(8, COUNT)[~is_right])


def test_a_launch_that_is_not_dependent_does_nothing_early(planted):
    for variant in range(7):
        out, values, message = run(planted, "plain_chain", variant, count=CHAIN)
        assert not message
        np.testing.assert_array_equal(out, 6 * values, f"variant {variant}")


def test_a_dependent_launch_that_does_not_wait_is_an_error(planted):
    no_wait = "a dependent launch with a thread that does not call wait_for_predecessors"
    early = r"let_dependents_start before wait_for_predecessors \(thread \d+\)"
    for seed, (variant, message) in itertools.product(
        SEEDS, ((4, no_wait), (5, no_wait), (6, early))
    ):
        found = run(planted, "chain", variant, seed, CHAIN)[2]
        assert re.fullmatch(f"third: {message}", found), (variant, seed)


# Without torch, which takes seconds to import there.
STRAY = """
import ctypes, sys
import numpy as np
arrays = np.ones(64, np.float32), np.empty(64, np.float32)
pointers = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
ctypes.CDLL(sys.argv[1]).stray(*pointers, int(sys.argv[2]))
assert (arrays[1] == 1).all()
"""


@pytest.mark.parametrize("variant", range(4))
def test_a_stray_access_is_caught_by_the_sanitizer(variant):
    library = build.build("planted", sanitize=True)
    process = subprocess.run(
        [sys.executable, "-c", STRAY, str(library), str(variant)],
        env=os.environ | build.sanitizer_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if variant == 0:
        assert process.returncode == 0, process.stderr
    else:
        assert process.returncode != 0
        assert "AddressSanitizer: heap-buffer-overflow" in process.stderr
        assert "stray_kernel" in process.stderr


def test_on_a_gpu_machine_the_host_does_not_take_the_place_of_the_library(monkeypatch):
    before = backends.BACKENDS
    with monkeypatch.context() as patches:
        patches.setattr(backends, "BACKENDS", before)
        patches.setattr(torch.cuda, "is_available", lambda: True)
        assert not serve_cpu.install.__wrapped__()  # calls it again: its result is cached
        assert backends.BACKENDS is before
