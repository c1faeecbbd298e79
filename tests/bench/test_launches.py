"""The launches of a training step: kernels, units, bytes and measured times."""

import dataclasses
import math
import os
import runpy
import shutil
import subprocess
import sys

import pytest
import torch

from bench import dry_run, launches, measure
from bench.dry_run import BACKWARD, FORWARD, Launch, Part, StageLaunches
from bench.instructions import Count
from bench.launches import Kernel, arguments, kernels_in, main, recorded, rows_of
from bench.records import LAUNCHES, LaunchRow, put, read
from preact_kernels.kernels import cuda, libraries
from testbed import cuda_programs
from testbed.cuda_on_host import build

KERNELS_OF_UNITS = ("F1", "F2", "F3", "B1", "B2", "B3")

if shutil.which(build.CXX[0]) is None:
    pytest.skip(f"no C++ compiler: {build.CXX[0]} not found", allow_module_level=True)


def rows_of_command(backend, *options, folder):
    """Runs the command in another process; returns the rows that it writes."""
    if backend == "triton":
        pytest.importorskip("triton")
    path = folder / "launches.csv"
    command = [sys.executable, "-m", "bench.launches", "--backend", backend, "--csv", str(path)]
    # Triton's interpreter has no launches.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return read(path, LaunchRow)


def cuda_rows(*options):
    """Returns the rows of the CUDA backend, without counts of instructions."""
    stages = recorded(arguments([*options, "--no-instructions"]))
    return [row for s in stages for row in rows_of(s, [None] * len(s.launches))]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_block_has_its_launches_and_bytes(backend, tmp_path):
    options = "--network", "resnet-164", "--batch", "128"
    if backend == "cuda":  # in this process
        rows = cuda_rows(*options)
    else:
        rows = rows_of_command(backend, *options, "--no-instructions", folder=tmp_path)
    unit_rows = [r for r in rows if r.kernel[:2] in KERNELS_OF_UNITS]
    for stage in "123":
        own = [r for r in unit_rows if r.stage == stage]
        # 16 or more of 17 blocks have each launch, and 9 or fewer end a group.
        count = sum(round(row.launches_per_block - 0.1) for row in own)
        assert count == {"cuda": 6, "triton": 7}[backend]
        assert {row.kernel[:2] for row in own} == set(KERNELS_OF_UNITS)
    assert all(r.dependent > 0.9 for r in unit_rows if r.stage in "123")
    # The running statistics of a stage are updated as on a GPU, once and outside of all blocks.
    operators = {r.kernel.split()[-1] for r in rows if "aten::" in r.kernel}
    convolutions = {"aten::convolution", "aten::convolution_backward"}
    assert operators - convolutions <= {"aten::new_zeros"}
    first = [r for r in unit_rows if r.stage == "1"]
    # In multiples of the inner channels, as in bench/floors.py; the last of 17 blocks has no
    # deferred affine step. Triton also stores and reads a gradient.
    expected = 32 + 2 * (backend == "triton")
    forward, backward = (
        sum(row.units_per_block for row in first if row.direction == direction)
        for direction in (FORWARD, BACKWARD)
    )
    assert 16 < forward < 16.2
    assert expected - 6 / 17 < backward < expected + 3


def test_what_runs_again_is_listed():
    recomputed = {"store": set(), "rebuild": {"B3"}, "checkpoint": {"B1", "B2", "B3"}}
    for memory, expected in recomputed.items():
        rows = cuda_rows("--network", "resnet-47", "--batch", "2", "--memory", memory)
        own = {r.kernel for r in rows if (r.stage, r.direction) == ("2", BACKWARD)}
        assert {k[:2] for k in own if "norm_act_conv_forward" in k} == expected, memory


def test_networks_with_convolutions_of_pytorch_run_none_of_them():
    rows = cuda_rows("--network", "imagenet-resnet-50", "--batch", "64")
    names = {row.kernel.split()[-1] for row in rows}
    assert {"aten::convolution", "aten::convolution_backward", "norm_act_backward_mask"} < names
    assert all(row.bytes_per_block > 0 for row in rows)


def test_kernels_issue_the_instructions_that_are_counted(monkeypatch):
    def counts(library, symbols, capability):
        warp_us = Count(once=7020, tile=0)  # 1 us for each warp
        found = {symbol: warp_us for symbol in symbols if "bn_stats" in symbol}
        tiles = Count(once=0, tile=7020)
        return found | {symbol: tiles for symbol in symbols if "norm_act_conv" in symbol}

    monkeypatch.setattr(dry_run, "counts", counts)
    step = "--network", "resnet-29", "--batch", "2"
    (stage, *_) = recorded(arguments(step))
    for launch in stage.launches:
        if launch.name == "bn_stats" or "norm_act_conv" in launch.name:
            blocks = math.prod(map(int, launch.grid.split("x")))
            tiles = -(-launch.tiles // blocks) if launch.tiles else 1
            rounds = -(-blocks // 132)
            assert launch.issue_us == pytest.approx(rounds * tiles * launch.threads / 32)
        else:
            assert launch.issue_us is None, launch


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_convolutions_issue_as_many_instructions_as_are_compiled(backend, tmp_path):
    if cuda_programs.cuobjdump() is None:
        pytest.skip("cuobjdump is not installed")
    library = libraries.PACKAGE / cuda.LIBRARY
    if backend == "cuda" and not (library.exists() and b"sm_90" in library.read_bytes()):
        pytest.skip("there is no CUDA library for sm_90")
    rows = rows_of_command(backend, "--network", "resnet-29", "--batch", "128", folder=tmp_path)
    convs = [r for r in rows if "norm_act_conv" in r.kernel and "projection" not in r.stage]
    assert len(convs) >= 18
    for row in convs:
        assert 1 < row.issue_us_per_block / row.launches_per_block < 30, row


def test_a_library_of_other_sources_is_stale(tmp_path):
    shutil.copytree(measure.ROOT / "csrc", tmp_path / "csrc")
    library = tmp_path / "library.so"
    setup_file = runpy.run_path(str(measure.ROOT / "setup.py"))
    sources, headers = setup_file["find_cuda_files"](tmp_path)
    library.write_bytes(b"\0" + setup_file["digest"](sources + headers, tmp_path).encode() + b"\0")
    assert not dry_run.is_stale(library, tmp_path)
    for name, expected in (("csrc/cpu/kernels.h", False), ("csrc/cuda/bn_stats.cu", True)):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        assert dry_run.is_stale(library, tmp_path) == expected


def placed(name, bytes_moved=0, *, is_dependent=False):
    return Launch(name, "1", 256, 0, is_dependent, bytes_moved, 0, FORWARD, name)


def test_rows_add_up_to_the_launches():
    runs = [placed("sum_partials", 4_100_000)._replace(issue_us=1.5) for _ in range(8)]
    last = placed("bn_stats", 16, is_dependent=True)._replace(direction=BACKWARD)
    stage = StageLaunches([Part("1", 4, 8, 368.0)], [*runs, last])
    first, last = rows_of(stage, [1.0] * 8 + [6.0])
    assert (first.launches_per_block, first.bytes_per_block) == (2, 8_200_000)
    assert first.units_per_block == 8_200_000 / 8
    assert (first.measured_us_per_block, last.measured_us_per_block) == (2, 1.5)
    assert first.least_us_per_block == pytest.approx(2 * 2.0)  # bytes and gaps
    assert last.least_us_per_block == pytest.approx(0.7 / 4, rel=1e-3)
    assert (first.dependent, last.dependent) == (0, 1)
    assert (first.issue_us_per_block, last.issue_us_per_block) == (3, None)


def test_the_file_has_the_rows_of_the_table_beside_those_of_other_steps(tmp_path, capsys):
    path = tmp_path / f"cuda{LAUNCHES}"
    options = "--network", "resnet-29", "--batch", "2", "--csv", str(path), "--no-instructions"
    main(options)
    (row, *_) = written = read(path, LaunchRow)
    other = dataclasses.replace(row, backend="triton")
    put(path, dataclasses.replace(row, kernel="F1 of old"), other)
    capsys.readouterr()
    main(options)
    first, *rows = read(path, LaunchRow)
    assert (first, rows) == (other, written)
    total = round(sum(row.launches_per_block * row.blocks for row in rows))
    least_ms = sum(row.least_us_per_block * row.blocks for row in rows) / 1e3
    printed = capsys.readouterr().out
    for text in (f"{total} launches", f"lower bound {least_ms:.1f} ms", "floor 46.0 units"):
        assert text in printed


SPANS = [("a", 0.0, 4.0), ("b", 3.0, 9.0), ("c", 5.0, 8.0), ("d", 10.0, 12.0)]


def test_a_kernel_takes_from_the_end_of_the_one_ahead_in_equal_replays():
    again = [(name, begin + 100, end + 100) for name, begin, end in reversed(SPANS)]
    expected = [Kernel("a", 4), Kernel("c", 4), Kernel("b", 1), Kernel("d", 3)]
    for missed in ([], SPANS[:3], [("x", *span) for _, *span in SPANS]):
        assert kernels_in([again, missed, SPANS]) == expected
    with pytest.raises(RuntimeError, match="other kernels in some replays"):
        kernels_in([again, SPANS[:3]])
    after_pause = [*SPANS, ("e", 912.0, 915.0), ("f", 916.0, 918.0)]  # of the profiler
    assert kernels_in([after_pause])[-2:] == [Kernel("e", 3 + launches.PAUSE_US), Kernel("f", 3)]


def test_measured_kernels_are_those_that_were_recorded():
    profiled = [
        Kernel("void preact_kernels::cuda::bn_stats_kernel<float, 4>(Params)", 1.0),
        Kernel("void at::native::vectorized_elementwise_kernel<4, F>(int)", 2.0),
        Kernel("Memset (Device)", 3.0),
        Kernel("norm_act_conv_forward_kernel", 4.0),
    ]
    names = "bn_stats", "aten::zeros", "fill_zeros", "norm_act_conv_forward"
    stats, zeros, fill, conv = (placed(name) for name in names)
    known = {"bn_stats", "norm_act_conv_forward", "norm_act_conv_forward_rare"}

    def times_of(*launches_of_step):
        return launches.times_of(launches_of_step, profiled, known)

    assert times_of(stats, zeros, fill, conv) == [1.0, None, None, 4.0]
    variant = conv._replace(name="norm_act_conv_forward_rare")  # a variant of the same kernel
    assert times_of(stats, variant) == [1.0, 4.0]
    with pytest.raises(RuntimeError, match="kernel 1: expected None, the GPU ran norm_act_conv"):
        times_of(stats, zeros, fill)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_gpu_measures_what_was_recorded(backend, tmp_path):
    rows = rows_of_command(backend, "--network", "resnet-29", folder=tmp_path)
    for row in rows:
        is_own = "aten::" not in row.kernel and "fill" not in row.kernel
        assert (row.measured_us_per_block is not None) == is_own, row.kernel


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(build, "CXX", ["no-such-compiler"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no no-such-compiler"):
        main(["--backend", "cuda"])
