"""What is particular to the CUDA kernels: vectors, grids, schedules, addresses, norms with rows.

Without a GPU they run on the host (`testbed/cuda_on_host/`), by the same sources.
"""

import itertools
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cuda, reference
from preact_kernels.kernels.contract import Gradient, Inputs, Norm, Wanted
from testbed.cuda_on_host import build, serve_cpu
from tests.cases import device_of, unit_of
from tests.kernels.cuda_conv_cases import (
    Case,
    backward_inputs,
    conv,
    kernels,
    on_host,
    set_schedule,
)
from tests.kernels.op_cases import NORM_OPS, OPS, arguments, check_ops, random_images, run
from tests.oracle import assert_same_bits, unit_roundoff

if serve_cpu.missing():
    pytest.skip(f"backend cuda: {serve_cpu.missing()}", allow_module_level=True)

DEVICE = torch.device(device_of("cuda"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_ROWS = "mean var weight bias"
# Channels: one; vectors of one, two, four and all numbers; more than a block takes at a time.
# The last number is how many elements memory is off from where it is aligned.
CASES = (
    (torch.float32, (3, 1, 5, 7), 0),
    (torch.bfloat16, (2, 17, 5, 4), 0),
    (torch.float32, (2, 100, 3, 5), 0),
    (torch.float16, (2, 100, 3, 5), 0),
    (torch.bfloat16, (3, 16, 9, 11), 0),
    (torch.float16, (3, 16, 9, 11), 0),
    (torch.float32, (2, 64, 5, 3), 0),
    (torch.bfloat16, (1, 520, 2, 3), 0),
    (torch.float32, (2, 16, 3, 5), 1),
    (torch.bfloat16, (2, 16, 3, 5), 1),
    (torch.float16, (2, 16, 3, 5), 4),
    (torch.bfloat16, (2, 22, 5, 3), 0),
    (torch.float16, (2, 24, 5, 3), 2),
    (torch.float32, (2, 6, 5, 3), 0),
)
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_cuda(poisoned_memory):
    with pk.use_backend("cuda"), DEVICE:
        yield
    set_schedule()


@pytest.mark.parametrize(("dtype", "shape", "offset"), CASES, ids=str)
def test_every_op_equals_its_specification(dtype, shape, offset):
    for inv_count in (None, 0.0):
        check_ops(arguments(shape, dtype, inv_count, offset))


@on_host
@pytest.mark.parametrize(
    ("ops", "rows", "activation", "multiprocessors"),
    [
        (OPS, "", "relu", 1),
        (OPS, "", "relu", 40),
        (NORM_OPS, "", "silu", 8),
        (NORM_OPS, ALL_ROWS, "silu", 8),
    ],
)
def test_blocks_in_any_order_give_the_same_bits(ops, rows, activation, multiprocessors):
    given = arguments((3, 44, 29, 25), torch.bfloat16, None, 0, rows, activation)
    serve_cpu.set_schedule(0, multiprocessors)
    expected = check_ops(given, ops)
    serve_cpu.set_schedule(1, multiprocessors)
    for op in ops:
        found = run(kernels(), op, given)
        assert_same_bits(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("at", [0, 77])
def test_an_outlier_costs_no_accuracy_wherever_it_is(at):
    x = random_images((2, 16, 64, 64), torch.float32)
    x.permute(0, 2, 3, 1).reshape(-1, 16)[at] = 1000.0  # a view of memory stored NHWC
    assert (x == 1000).sum() == 16
    mean, var = kernels().bn_stats(x)
    true_var, true_mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    allowed = (2 * 64 * 64) ** 0.5 * unit_roundoff(torch.float32)
    assert (mean - true_mean).norm() <= allowed * true_mean.norm()
    assert (var - true_var).norm() <= allowed * true_var.norm()


def test_what_the_kernels_cannot_read_is_refused():
    given = arguments((2, 16, 3, 5), torch.float32)
    with pytest.raises(RuntimeError, match="x: expected dtype float32, bfloat16 or float16"):
        kernels().bn_stats(given.x.double())
    with pytest.raises(RuntimeError, match="x: expected memory dense in NHWC order"):
        kernels().bn_stats(given.x.contiguous())
    with pytest.raises(RuntimeError, match="branch: expected the dtype of x"):
        kernels().residual_add_forward(given.x, given.x.half(), False)
    with pytest.raises(RuntimeError, match=r"mean: expected shape \[16\], got \[8\]"):
        kernels().norm_act_forward(given.x, given.norm._replace(mean=given.norm.mean[:8]))


@pytest.mark.parametrize("rows", ["", ALL_ROWS])
def test_a_residual_and_y_may_be_off_alignment_while_x_is_aligned(rows):
    given = arguments((2, 16, 3, 5), torch.bfloat16, rows=rows)
    off = random_images((2, 16, 3, 5), torch.bfloat16, 1).relu_()
    assert off.data_ptr() % 16

    def results(t):
        y = kernels().norm_act_forward(given.x, given.norm, t)
        g, _ = kernels().norm_act_backward(given.dy, given.x, given.norm, True, t)
        return {"y": y, "g": g}

    assert_same_bits(results(off), results(off.clone()))


def test_no_gradient_passes_where_an_activation_is_constant_even_if_dy_is_infinite():
    x = torch.tensor([-7.0, -1.0] * 32).view(1, 1, 1, -1)
    zero, one = torch.zeros(1), torch.ones(1)
    for name in ("relu", "relu6"):
        norm = Norm(zero, one, one.view(1, 1), zero, 0.0, name)  # with a row
        g, _ = kernels().norm_act_backward(torch.full_like(x, torch.inf), x, norm, True)
        assert not g.any()


@on_host
def test_more_images_than_a_grid_may_have_take_several_launches():
    shape = (65535 + 3, 4, 1, 2)
    found = []
    with serve_cpu.without_running(
        lambda launch: found.append((launch.name, launch.thread_blocks))
    ):
        given = arguments(shape, torch.float32, None, 0, "weight", "silu")
        for op in NORM_OPS:
            run(kernels(), op, given)
        kernels().group_stats(given.x, 2)
    images = [(name, blocks[2]) for name, blocks in found if name != "fill_zeros"]
    names = "norm_act_forward", "norm_act_backward_mask", "norm_input_gradient", "group_stats"
    assert set(images) == set(itertools.product(names, (65535, 3)))


@on_host
def test_an_image_has_the_same_bits_whatever_number_of_blocks_adds_it_up():
    set_schedule(0, 8)
    given = arguments((7, 20, 41, 61), torch.float32, None, 0, ALL_ROWS, "silu")
    found, blocks, parts = {}, {}, {}
    for images, part in ((1, given.image(6)), (7, given)):
        _, sums = kernels().norm_act_backward(*part[:3], True)
        mean, var = kernels().group_stats(part.x, 2)
        found[images] = {"sums": sums[:, -1], "mean": mean[-1], "var": var[-1]}

        def note(launch, images=images):
            blocks[images, launch.name] = launch.thread_blocks[0]
            parts[images, launch.name] = launch.params[32:36]  # ImageRows::parts

        with serve_cpu.without_running(note):
            kernels().norm_act_backward(*part[:3], True)
            kernels().group_stats(part.x, 2)
    for name in ("norm_act_backward_mask", "group_stats"):
        assert 1 < blocks[7, name] < blocks[1, name]
        assert int.from_bytes(parts[7, name], "little") == blocks[1, name]
        assert parts[7, name] == parts[1, name]
    assert_same_bits(found[7], found[1])


# Thread blocks per multiprocessor of the kernels of images, by __launch_bounds__.
RESIDENT = {
    "norm_act_forward": 3,
    "norm_act_backward_mask": 2,
    "norm_input_gradient": 2,
    "group_stats": 2,
}


@on_host
@pytest.mark.parametrize("images", [1, 3, 8, 50, 100, 128, 300])
def test_the_last_wave_of_thread_blocks_is_not_a_few_of_many(images):
    multiprocessors, found = 132, []
    set_schedule(0, multiprocessors)
    with serve_cpu.without_running(
        lambda launch: found.append((launch.name, math.prod(launch.thread_blocks)))
    ):
        given = arguments((images, 128, 40, 40), torch.bfloat16, None, 0, ALL_ROWS, "silu")
        kernels().group_stats(given.x, 32)
        kernels().norm_act_forward(given.x, given.norm)
        kernels().norm_act_recompute(given.dy, given.x, given.norm)
        kernels().norm_input_gradient(given.gradient_without_skip, True)
    launched = {name: blocks for name, blocks in found if name != "fill_zeros"}
    assert launched.keys() == RESIDENT.keys()
    for name, blocks in launched.items():
        waves = blocks / (multiprocessors * RESIDENT[name])
        assert waves <= 1 or waves / math.ceil(waves) > 0.7, (name, blocks)


CASE = Case(3, 5, 7, 64, 16, 1)


def test_a_fused_convolution_takes_the_gradient_of_a_norm_with_rows():
    given = backward_inputs(CASE, torch.bfloat16)
    step = given.dy.step
    n, k = step.x.shape[:2]
    norm = step.norm._replace(mean=torch.randn(n, k) / 3, weight=torch.randn(n, k))
    step = step._replace(norm=norm, sums=torch.randn(2, n, k), inv_count=1 / 35)
    dy = Gradient(given.dy.g, step)
    unit = unit_of(given.conv_weight, conv(CASE), torch.bfloat16, torch.bfloat16)
    assert not kernels().refusal(unit)
    inputs = Inputs(given.x, given.norm, given.conv_weight)
    whole = kernels().norm_input_gradient(dy)
    expected = kernels().norm_act_conv_backward(unit, Gradient(whole), inputs, Wanted(True, True))
    found = kernels().norm_act_conv_backward(unit, dy, inputs, Wanted(True, True, True))
    assert not (found.activated or expected.activated)
    own = dict(zip(found._fields, found[:4], strict=False))
    assert_same_bits(own, dict(zip(found._fields, (*expected[:3], whole), strict=False)))


def test_a_fused_convolution_refuses_rows_and_other_activations():
    x, weight = random_images((2, 16, 3, 5), torch.bfloat16), torch.randn(16, 16, 1, 1).bfloat16()
    ops = torch.ops.preact_kernels_cuda
    for rows, activation in (("", "silu"), ("weight", "relu")):
        norm = arguments((2, 16, 3, 5), torch.bfloat16, rows=rows, activation=activation).norm
        with pytest.raises(RuntimeError, match="activation: expected relu without rows"):
            ops.norm_act_conv_forward(x, *norm, weight, [1, 1], None, None, False, torch.bfloat16)


HEADER = Path(build.ROOT, "csrc/host/tensors.h").read_text()
(OF_TORCH_2_11,) = re.findall(r'fail\(kDevice, " (out of memory\..*)"\);', HEADER)


@pytest.mark.parametrize(
    ("message", "takes_work", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", False, torch.OutOfMemoryError),
        (  # of `backend:cudaMallocAsync`
            "Allocation on device 0 would exceed allowed memory. (out of memory)",
            False,
            torch.OutOfMemoryError,
        ),
        (f"CUDA {OF_TORCH_2_11}", True, torch.OutOfMemoryError),
        (f"CUDA {OF_TORCH_2_11}", False, RuntimeError),  # torch does not say what failed
        ("x: expected a CUDA tensor", True, RuntimeError),
    ],
)
def test_an_op_that_runs_out_of_memory_raises_the_error_of_pytorch(
    message, takes_work, expected, monkeypatch
):
    def op(x):
        raise RuntimeError(message)

    monkeypatch.setattr(cuda, "_takes_work", lambda: takes_work)
    ops = cuda.LibraryOps(types.SimpleNamespace(op=types.SimpleNamespace(default=op)))
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            ops.op.default(1)
        assert type(raised.value) is expected and str(raised.value) == message


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    cuda.architecture_refusal.cache_clear()
    refusal = cuda.architecture_refusal(torch.device("cuda"))
    cuda.architecture_refusal.cache_clear()
    assert refusal == "expected a GPU of compute capability 8.0 or later, got 7.5"


def test_a_machine_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.load_error() == "no NVIDIA GPU"
    assert cuda.library_error() == ""


@on_host
@pytest.mark.slow
@pytest.mark.skipif("PK_SANITIZE" in os.environ, reason="is what runs")
def test_under_the_sanitizer_the_tests_of_the_kernels_pass():
    build.build("kernels", sanitize=True)
    folder = Path(__file__).parent
    files = [__file__, *folder.glob("test_cuda_conv*.py"), folder / "test_gpu_conv.py"]
    command = ["-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m"]
    process = subprocess.run(
        [sys.executable, *command, "not slow and not not_under_sanitizer", *map(str, files)],
        cwd=build.ROOT,
        env={**os.environ, **build.sanitizer_environment(), "PK_SANITIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]


@needs_gpu
@pytest.mark.not_under_sanitizer
def test_a_launch_that_fails_is_an_error_of_that_call_alone():
    too_many = random_images((1, 65535 * 8 + 9, 1, 2), torch.float32)
    with pytest.raises(RuntimeError, match="bn_stats"):
        kernels().bn_stats(too_many)
    kernels().bn_stats(random_images((2, 16, 3, 5), torch.float32))


@needs_gpu
@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_blocks_at_once_give_the_same_bits_every_time(dtype):
    given = arguments((64, 64, 32, 32), dtype)
    expected = check_ops(given)
    for _ in range(20):
        for op in OPS:
            found = run(kernels(), op, given)
            assert_same_bits(found, {name: expected[name] for name in found})


@needs_gpu
@pytest.mark.not_under_sanitizer
def test_tensors_of_more_than_two_to_the_31_elements_are_addressed_right():
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    x = torch.empty(2**17 + 3, 16, 32, 32, dtype=torch.bfloat16, memory_format=torch.channels_last)
    x.normal_()
    zero, one = torch.zeros(16), torch.ones(16)
    y = kernels().norm_act_forward(x, Norm(zero, one, one, zero, 0.0))
    for part in (slice(0, 5), slice(-5, None)):
        assert torch.equal(y[part], x[part].relu())
    mean, var = kernels().bn_stats(x)
    assert (mean.abs() < 1e-3).all() and ((var - 1).abs() < 1e-3).all()


@needs_gpu
@pytest.mark.not_under_sanitizer
def test_the_last_of_many_images_are_computed():
    given = arguments((65535 + 3, 4, 1, 2), torch.float32, None, 0, ALL_ROWS, "silu")
    check_ops(given, NORM_OPS)
    found, expected = (k.group_stats(given.x, 2) for k in (kernels(), reference))
    for t, right in zip(found, expected, strict=True):
        torch.testing.assert_close(t, right)
