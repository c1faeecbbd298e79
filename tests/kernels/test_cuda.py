"""What is particular to the CUDA kernels: vectors, grids, schedules, partial sums, addresses.

Without a GPU they run on the host (`tests/kernels/cuda_on_host/`), by the same sources.
"""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import preact_kernels as pk
from preact_kernels.kernels import cuda, reference
from preact_kernels.kernels.contract import Fold, Norm, Output
from tests.cases import device_of
from tests.kernels.cuda_on_host import build, serve_cpu
from tests.oracle import assert_within_budget, unit_roundoff

if serve_cpu.missing():
    pytest.skip(f"backend cuda: {serve_cpu.missing()}", allow_module_level=True)

IS_CUDA_ON_HOST = serve_cpu.install()
DEVICE = torch.device(device_of("cuda"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Channels: one; vectors of no dtype; of float32 alone; of all; more than a block takes at a time.
SHAPES = (
    (3, 1, 5, 7),
    (2, 17, 5, 4),
    (2, 100, 3, 5),
    (3, 16, 9, 11),
    (2, 64, 5, 3),
    (1, 520, 2, 3),
)
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
on_host = pytest.mark.skipif(not IS_CUDA_ON_HOST, reason="schedules are chosen on the host alone")


@pytest.fixture(autouse=True)
def on_cuda(poisoned_memory):
    with pk.use_backend("cuda"), DEVICE:
        yield
    if IS_CUDA_ON_HOST:
        serve_cpu.set_schedule()


def kernels():
    return cuda.kernels()


def activation(shape, dtype, offset=0):
    """Random numbers stored NHWC, `offset` elements behind where memory is aligned."""
    n, c, h, w = shape
    memory = torch.randn(n * c * h * w + offset).to(dtype)[offset:]
    return memory.view(n, h, w, c).permute(0, 3, 1, 2)


class Given(NamedTuple):
    """Arguments of every op, each of its own random numbers."""

    x: Tensor
    dy: Tensor
    norm: Norm
    fold: Fold

    def to(self, dtype):
        """The same in another dtype."""
        norm, fold = (
            type(part)(*(v.to(dtype) if isinstance(v, Tensor) else v for v in part))
            for part in (self.norm, self.fold)
        )
        return Given(self.x.to(dtype), self.dy.to(dtype), norm, fold._replace(norm=norm))


def arguments(shape, dtype, inv_count=None, offset=0):
    channels = shape[1]
    count = shape[0] * shape[2] * shape[3]
    x, dy, skip = (activation(shape, dtype, offset) for _ in range(3))
    norm = Norm(
        mean=torch.randn(channels) / 2,
        var=torch.rand(channels) + 0.5,
        weight=torch.randn(channels),
        bias=torch.randn(channels) / 2,
        eps=1e-5,
    )
    sums = torch.randn(2, channels) * count**0.5
    inv_count = 1 / count if inv_count is None else inv_count
    return Given(x, dy, norm, Fold(skip, x, norm, sums, inv_count))


OPS = {
    "bn_stats": lambda k, given: k.bn_stats(given.x),
    "bn_relu_forward": lambda k, given: k.bn_relu_forward(given.x, given.norm),
    "bn_relu_backward_sums": lambda k, given: k.bn_relu_backward_sums(*given[:3]),
    "bn_relu_backward_mask": lambda k, given: k.bn_relu_backward_mask(*given[:3]),
    "bn_relu_backward_input": lambda k, given: k.bn_relu_backward_input(
        *given[:3], given.fold.sums, given.fold.inv_count
    ),
    "bn_input_gradient": lambda k, given: k.bn_input_gradient(given.dy, given.fold),
    "residual_add_forward": lambda k, given: k.residual_add_forward(given.x, given.dy, True),
}


def run(kernels, op, given):
    """The results of `op`, numbered."""
    found = OPS[op](kernels, given)
    if isinstance(found, Output):
        found = (found.y, *found.statistics)
    return dict(enumerate(found if isinstance(found, tuple) else (found,)))


def check_op(op, given):
    """As `tests.oracle.check`, of one op and its specification."""
    wide = given.to(torch.float64)
    found, truth = run(kernels(), op, given), run(reference, op, wide)
    # On a kink of the ReLU the mask of float64 is not that of rounded numbers: take the sums and
    # the gradient of what the op's own specification masks, in float64.
    if "backward" in op:
        masked = reference.bn_relu._masked(given.dy, given.x, given.norm).double()
        sums = reference.bn_relu._sums(masked, wide.x, wide.norm)
        dx = reference.bn_input_gradient(masked, wide.fold._replace(skip=None))
        truth = {"sums": (sums,), "mask": (masked, sums), "input": (dx,)}[op.rpartition("_")[2]]
        truth = dict(enumerate(truth))
    eager = run(reference, op, given)
    errors = {k: float((eager[k].double() - truth[k].double()).norm()) for k in truth}
    assert_within_budget(found, truth, errors)
    return found


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_op_equals_its_specification(op, dtype, shape):
    check_op(op, arguments(shape, dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["bn_relu_backward_input", "bn_input_gradient"])
def test_input_gradients_in_evaluation_mode_equal_their_specification(op, dtype, shape):
    check_op(op, arguments(shape, dtype, 0.0))


@pytest.mark.covering(2)
@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_memory_that_is_not_aligned_is_read_right(op, dtype, offset):
    check_op(op, arguments((2, 16, 3, 5), dtype, offset=offset))


@pytest.mark.covering(2)
@on_host
@pytest.mark.parametrize("multiprocessors", [1, 3, 40])
@pytest.mark.parametrize("op", OPS)
def test_any_number_of_blocks_in_any_order_gives_the_same_bits(op, multiprocessors):
    given = arguments((4, 48, 17, 9), torch.bfloat16)
    serve_cpu.set_schedule(0, multiprocessors)
    expected = check_op(op, given)
    for seed in range(1, 6):
        serve_cpu.set_schedule(seed, multiprocessors)
        found = run(kernels(), op, given)
        assert all(torch.equal(found[k], expected[k]) for k in expected)


def test_without_a_residual_gradient_nothing_is_added():
    given = arguments((2, 16, 3, 5), torch.float32)
    added = kernels().bn_input_gradient(given.dy, given.fold)
    plain = kernels().bn_input_gradient(given.dy, given.fold._replace(skip=None))
    torch.testing.assert_close(added, plain + given.fold.skip)


def test_without_statistics_the_sum_comes_alone():
    x, branch = (activation((2, 16, 3, 5), torch.bfloat16) for _ in range(2))
    y, statistics = kernels().residual_add_forward(x, branch, False)
    assert torch.equal(y, x + branch)
    assert statistics is None


def test_in_evaluation_mode_what_is_not_finite_in_x_does_not_spread():
    given = arguments((2, 16, 3, 5), torch.float32, 0.0)
    given.x[0, 3] = float("inf")
    dx = kernels().bn_input_gradient(given.dy, given.fold)
    assert dx.isfinite().all()


@pytest.mark.parametrize("weight", [0.0, 1e-9])  # of which float16 makes zero
def test_no_gradient_passes_where_the_rounded_pre_activation_is_zero(weight):
    given = arguments((2, 16, 3, 5), torch.float16, 0.0)
    norm = given.norm._replace(weight=torch.full((16,), weight), bias=torch.zeros(16))
    given = given._replace(norm=norm, fold=given.fold._replace(norm=norm))
    g, sums = run(kernels(), "bn_relu_backward_mask", given).values()
    dx = run(kernels(), "bn_relu_backward_input", given)[0]
    assert not g.any() and not sums.any() and not dx.any()


@pytest.mark.parametrize("at", [0, 8191, 77])
def test_an_outlier_costs_no_accuracy_wherever_it_is(at):
    x = activation((2, 16, 64, 64), torch.float32)
    x.permute(0, 2, 3, 1).reshape(-1, 16)[at] = 1000.0  # a view of memory stored NHWC
    assert (x == 1000).sum() == 16
    mean, var = kernels().bn_stats(x)
    true_var, true_mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    allowed = (2 * 64 * 64) ** 0.5 * unit_roundoff(torch.float32)
    assert (mean - true_mean).norm() <= allowed * true_mean.norm()
    assert (var - true_var).norm() <= allowed * true_var.norm()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_the_mean_of_what_is_not_finite_is_that_of_pytorch(value):
    x = activation((2, 17, 9, 8), torch.float32)
    x[1, 3, 4, 4] = value
    mean, var = kernels().bn_stats(x)
    true_mean, true_var = reference.bn_stats(x)
    torch.testing.assert_close(mean, true_mean, equal_nan=True)
    assert torch.equal(var.isfinite(), true_var.isfinite())


@pytest.mark.parametrize("value", [3.0, 0.1, -1e4])
def test_the_mean_of_a_constant_is_that_constant(value):
    x = torch.full((5, 3, 19, 17), value).contiguous(memory_format=torch.channels_last)
    mean, var = kernels().bn_stats(x)
    assert torch.equal(mean, torch.full((3,), value))
    assert (var.sqrt() <= 1e-7 * abs(value)).all()


def test_what_the_kernels_cannot_read_is_refused():
    given = arguments((2, 16, 3, 5), torch.float32)
    with pytest.raises(RuntimeError, match="x: expected dtype float32, bfloat16 or float16"):
        kernels().bn_stats(given.x.double())
    with pytest.raises(RuntimeError, match="x: expected memory dense in NHWC order"):
        kernels().bn_stats(given.x.contiguous())
    with pytest.raises(RuntimeError, match="branch: expected the dtype of x"):
        kernels().residual_add_forward(given.x, given.x.half(), False)
    with pytest.raises(RuntimeError, match="mean: expected 16 values, got 8"):
        kernels().bn_relu_forward(given.x, given.norm._replace(mean=given.norm.mean[:8]))


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    cuda.architecture_refusal.cache_clear()
    refusal = cuda.architecture_refusal(torch.device("cuda"))
    cuda.architecture_refusal.cache_clear()
    assert refusal == "expected a GPU of compute capability 8.0 or later, got 7.5"


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=build.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.not_under_sanitizer
def test_without_a_gpu_the_named_backend_is_refused_and_auto_goes_on():
    code = """
import torch
import preact_kernels as pk
pk.bn_relu(torch.randn(2, 4, 3, 3), None, None, training=True)
try:
    pk.set_backend("cuda")
except pk.BackendError as error:
    print(error)
"""
    process = run_python(code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert "backend 'cuda' is not available here (no NVIDIA GPU)" in process.stdout, process.stderr


@on_host
@pytest.mark.slow
@pytest.mark.skipif("PK_SANITIZE" in os.environ, reason="is what runs")
def test_under_the_sanitizer_the_tests_of_this_file_pass():
    build.build("kernels", sanitize=True)
    arguments = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    arguments += ["-m", "not not_under_sanitizer"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
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
    too_many = activation((1, 65535 * 8 + 9, 1, 2), torch.float32)
    with pytest.raises(RuntimeError, match="bn_stats"):
        kernels().bn_stats(too_many)
    kernels().bn_stats(activation((2, 16, 3, 5), torch.float32))


@needs_gpu
@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize("op", OPS)
def test_triton_and_cuda_agree_within_the_budget(op):
    triton = pytest.importorskip("preact_kernels.kernels.triton")
    for shape in (*SHAPES, (128, 16, 32, 32), (16, 256, 32, 32)):
        for dtype in DTYPES:
            given = arguments(shape, dtype)
            found, other = run(kernels(), op, given), run(triton, op, given)
            eager = run(reference, op, given)
            errors = {k: float((eager[k].double() - other[k].double()).norm()) for k in other}
            assert_within_budget(found, other, errors)


@needs_gpu
@pytest.mark.not_under_sanitizer
def test_many_blocks_at_once_give_the_same_bits_every_time():
    for op in OPS:
        given = arguments((64, 64, 32, 32), torch.bfloat16)
        expected = run(kernels(), op, given)
        for _ in range(20):
            found = run(kernels(), op, given)
            assert all(torch.equal(found[k], expected[k]) for k in expected)


@needs_gpu
@pytest.mark.not_under_sanitizer
def test_tensors_of_more_than_two_to_the_31_elements_are_addressed_right():
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    x = torch.empty(2**17 + 3, 16, 32, 32, dtype=torch.bfloat16, memory_format=torch.channels_last)
    x.normal_()
    zero, one = torch.zeros(16), torch.ones(16)
    y = kernels().bn_relu_forward(x, Norm(zero, one, one, zero, 0.0))
    for part in (slice(0, 5), slice(-5, None)):
        assert torch.equal(y[part], x[part].relu())
    mean, var = kernels().bn_stats(x)
    assert (mean.abs() < 1e-3).all() and ((var - 1).abs() < 1e-3).all()
