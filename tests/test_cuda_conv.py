"""The fused convolutions for narrow channels of the CUDA library, on the host or on a GPU.

In half precision the budget is that of `tests/oracle.py`. In float32 the kernels multiply operands
that were rounded to TF32, as eager does on a GPU where it may; so eager here rounds its operands to
TF32 (to nearest, the tighter of what convolutions on a GPU do), and the truth is float64 of what
was given, unrounded: the budget stays twice eager's own error and one rounding of float32.
"""

import itertools
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import preact_kernels as pk
from preact_kernels.kernels import cuda, reference
from tests.cases import device_of, in_dtype, random_stage
from tests.conftest import IS_CUDA_ON_HOST
from tests.cuda_on_host import build, serve_cpu
from tests.oracle import assert_same_bits, assert_within_budget, evaluate
from tests.test_preact_stage import recorded_calls

if serve_cpu.missing():
    pytest.skip(f"backend cuda: {serve_cpu.missing()}", allow_module_level=True)

DEVICE = device_of("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Case(NamedTuple):
    """A convolution with stride 1 that keeps the image's size."""

    images: int
    height: int
    width: int
    in_channels: int
    out_channels: int
    side: int

    def __str__(self):
        n, h, w, c, k, side = self
        return f"{side}x{side}_{n}x{h}x{w}_{c}_to_{k}"


# Pixels that do not fill tiles, several tiles a block, images narrower and wider than a tile.
TYPICAL = (Case(3, 5, 7, 64, 16, 1), Case(2, 17, 9, 16, 16, 3))
QUICK = (
    *TYPICAL,
    Case(2, 15, 10, 16, 64, 1),
    Case(1, 3, 5, 128, 32, 1),
    Case(2, 7, 7, 32, 128, 1),
    Case(1, 6, 7, 64, 256, 1),
    Case(3, 1, 1, 256, 64, 1),
    Case(2, 5, 5, 48, 80, 1),
    Case(5, 1, 1, 16, 16, 3),
    Case(1, 3, 33, 16, 16, 3),
    Case(2, 3, 5, 32, 32, 3),
    Case(1, 8, 33, 32, 32, 3),
    Case(2, 8, 8, 64, 64, 3),
    Case(2, 7, 7, 64, 64, 3),
)
SLOW = (
    Case(1, 1, 1, 16, 16, 1),
    Case(2, 33, 31, 16, 16, 1),
    Case(9, 8, 8, 256, 64, 1),
    Case(4, 9, 9, 128, 128, 1),
    Case(3, 7, 9, 240, 64, 1),
    Case(1, 33, 65, 16, 16, 3),
    Case(3, 16, 16, 32, 32, 3),
    Case(1, 1, 17, 32, 32, 3),
    Case(1, 17, 1, 64, 64, 3),
    Case(2, 9, 33, 64, 64, 3),
    Case(1, 1, 1, 64, 64, 3),
)
every_case = pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=str
)
typical = pytest.mark.parametrize("case", TYPICAL, ids=str)
every_dtype = pytest.mark.parametrize(
    "dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@pytest.fixture(autouse=True)
def schedule(monkeypatch):
    """TF32 is allowed, and a run is one of the first schedule."""
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: True)
    set_schedule()
    yield
    set_schedule()


def set_schedule(seed: int = 0, multiprocessors: int = 2) -> None:
    if IS_CUDA_ON_HOST:
        serve_cpu.set_schedule(seed, multiprocessors)


def nhwc(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def conv(case: Case) -> tuple:
    padding = case.side // 2
    return (1, 1), (padding, padding), (1, 1), 1


def forward_inputs(case: Case, dtype: torch.dtype, has_residual: bool = True) -> dict:
    """What `bn_relu_conv_forward` takes, up to the residual."""
    n, h, w, c, k, side = case
    return {
        "x": nhwc(torch.randn(n, c, h, w, device=DEVICE).to(dtype)),
        "mean": torch.randn(c, device=DEVICE) / 3,
        "var": torch.rand(c, device=DEVICE) + 0.5,
        "bn_weight": torch.randn(c, device=DEVICE),
        "bn_bias": torch.randn(c, device=DEVICE) / 2,
        "eps": EPS,
        "conv_weight": (torch.randn(k, c, side, side, device=DEVICE) / (c * side**2) ** 0.5).to(
            dtype
        ),
        "conv_bias": None,
        "residual": nhwc(torch.randn(n, k, h, w, device=DEVICE).to(dtype))
        if has_residual
        else None,
    }


def backward_inputs(case: Case, dtype: torch.dtype, fold: str = "skip") -> dict:
    """What `bn_relu_conv_backward` takes, up to the weight.

    Args:
        case: shape.
        dtype: of activations and weight.
        fold: "none", "evaluation", "z" (without skip) or "skip".
    """
    n, h, w, _, k, _ = case
    given = forward_inputs(case, dtype)
    del given["conv_bias"], given["residual"]
    dy, z, skip = (nhwc(torch.randn(n, k, h, w, device=DEVICE).to(dtype)) for _ in range(3))
    names = ("skip", "z", "z_mean", "z_var", "z_weight", "z_eps", "z_sums", "z_inv_count")
    if fold == "none":
        return {"dy": dy, **dict.fromkeys(names), "z_eps": 0.0, "z_inv_count": 0.0, **given}
    values = (
        skip if fold == "skip" else None,
        z,
        torch.randn(k, device=DEVICE) / 3,
        torch.rand(k, device=DEVICE) + 0.5,
        torch.randn(k, device=DEVICE),
        1e-3,
        torch.randn(2, k, device=DEVICE) * (n * h * w) ** 0.5,
        0.0 if fold == "evaluation" else 1 / (n * h * w),
    )
    return {"dy": dy, **dict(zip(names, values, strict=True)), **given}


def mapped(inputs: dict, change) -> dict:
    return {n: change(t) if isinstance(t, Tensor) else t for n, t in inputs.items()}


def as_tf32(t: Tensor) -> Tensor:
    """To nearest."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).view_as(t)


class RoundedOperands(torch.utils._python_dispatch.TorchDispatchMode):
    """Convolutions of float32 see operands that are rounded to TF32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution_backward.default:
            args = (*(as_tf32(t) for t in args[:3]), *args[3:])
        elif function is torch.ops.aten.convolution.default:
            args = (*(as_tf32(t) for t in args[:2]), *args[2:])
        return function(*args, **kwargs or {})


def eager(function, inputs: dict, *rest):
    """The reference in the dtype of the inputs."""
    if inputs["x"].dtype != torch.float32:
        return function(*inputs.values(), *rest)
    with RoundedOperands():
        return function(*inputs.values(), *rest)


BATCHED = ("x", "residual", "dy", "z", "skip")


def reversed_batch(inputs: dict) -> dict:
    return {n: nhwc(t.flip(0)) if n in BATCHED and t is not None else t for n, t in inputs.items()}


FORWARD = ("y", "mean", "var")
BACKWARD = ("g", "conv_weight", "sums", "dz")


def check(function: str, names: tuple, inputs: dict, *rest, empty: tuple = ()) -> dict:
    """Asserts the budget for every result, which has the dtype of eager's; returns the results."""
    found = dict(zip(names, getattr(cuda, function)(*inputs.values(), *rest), strict=True))
    plain = getattr(reference, function)
    truth = dict(zip(names, plain(*mapped(inputs, Tensor.double).values(), *rest), strict=True))
    errors = dict.fromkeys(names, 0.0)
    for order in (lambda t: t, reversed_batch):
        run = dict(zip(names, eager(plain, order(inputs), *rest), strict=True))
        if "y" in run:  # of each other's batch
            run |= {n: run[n].flip(0) for n in ("y",) if order is reversed_batch}
        elif order is reversed_batch:
            run |= {n: run[n].flip(0) for n in ("g", "dz") if run[n].numel()}
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in run.items()}
        for name in names:
            error = (run[name].double() - truth[name]).norm() if run[name].numel() else 0
            errors[name] = max(errors[name], float(error))
    assert {n for n in names if not found[n].numel()} == set(empty)
    if "y" in found and "mean" not in empty:  # statistics are of y as stored
        stored = found["y"].double()
        truth |= dict(zip(("mean", "var"), reference.bn_stats(stored), strict=True))
        plain = dict(zip(("mean", "var"), reference.bn_stats(found["y"]), strict=True))
        errors |= {n: float((t.double() - truth[n]).norm()) for n, t in plain.items()}
    assert_within_budget(found, truth, errors)
    return found


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_forward")
@every_dtype
@every_case
def test_forward_and_statistics_keep_the_budget(case, dtype):
    check("bn_relu_conv_forward", FORWARD, forward_inputs(case, dtype), *conv(case), True)


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_backward")
@every_dtype
@every_case
def test_backward_of_a_folded_gradient_keeps_the_budget(case, dtype):
    inputs = backward_inputs(case, dtype)
    check("bn_relu_conv_backward", BACKWARD, inputs, *conv(case), True, True, True)


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_forward")
@typical
@pytest.mark.parametrize(("residual", "stats"), [(False, False), (False, True), (True, False)])
def test_forward_with_and_without_residual_and_statistics(case, residual, stats):
    inputs = forward_inputs(case, torch.bfloat16, residual)
    empty = () if stats else ("mean", "var")
    check("bn_relu_conv_forward", FORWARD, inputs, *conv(case), stats, empty=empty)


@pytest.mark.covering(2)
@typical
@pytest.mark.parametrize("fold", ["none", "evaluation", "z", "skip"])
@pytest.mark.parametrize("needs", [*itertools.product([False, True], repeat=3)], ids=str)
def test_every_combination_of_flags(case, fold, needs):
    needs_g, needs_conv_weight, needs_dz = needs
    if fold == "none" and needs_dz:
        pytest.skip("there is no dz")
    inputs = backward_inputs(case, torch.bfloat16, fold)
    empty = ["g", "sums"] * (not needs_g) + ["conv_weight"] * (not needs_conv_weight)
    empty += ["dz"] * (not needs_dz)
    check("bn_relu_conv_backward", BACKWARD, inputs, *conv(case), *needs, empty=tuple(empty))


@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_schedules_change_no_bit(side, seed):
    case = Case(3, 9, 17, 32, 32, side)
    given = forward_inputs(case, torch.bfloat16)
    arriving = backward_inputs(case, torch.bfloat16)

    def results():
        y = cuda.bn_relu_conv_forward(*given.values(), *conv(case), True)
        dx = cuda.bn_relu_conv_backward(*arriving.values(), *conv(case), True, True, True)
        return dict(zip(FORWARD + BACKWARD, (*y, *dx), strict=True))

    expected = results()
    set_schedule(seed)
    assert_same_bits(results(), expected)


@typical
@pytest.mark.parametrize("multiprocessors", [1, 7])
def test_any_number_of_multiprocessors(case, multiprocessors):
    set_schedule(multiprocessors=multiprocessors)
    dtype = torch.bfloat16
    check("bn_relu_conv_forward", FORWARD, forward_inputs(case, dtype), *conv(case), True)
    arriving = backward_inputs(case, dtype)
    check("bn_relu_conv_backward", BACKWARD, arriving, *conv(case), True, True, True)


@every_dtype
@pytest.mark.parametrize("case", [Case(2, 4, 5, 16, 32, 1), Case(2, 5, 4, 16, 16, 3)], ids=str)
def test_weights_stored_nhwc_and_tensors_that_begin_anywhere(case, dtype):
    def moved(t):
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return memory[1:].view(t.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2).copy_(t)

    for names, inputs, rest in (
        (FORWARD, forward_inputs(case, dtype), (True,)),
        (BACKWARD, backward_inputs(case, dtype), (True, True, True)),
    ):
        function = "bn_relu_conv_forward" if names is FORWARD else "bn_relu_conv_backward"
        expected = check(function, names, inputs, *conv(case), *rest)
        for change in (nhwc, moved):
            other = inputs | {"conv_weight": change(inputs["conv_weight"])}
            if change is moved:
                other |= {n: moved(other[n]) for n in BATCHED if n in other}
            found = getattr(cuda, function)(*other.values(), *conv(case), *rest)
            assert_same_bits(dict(zip(names, found, strict=True)), expected)


@typical
def test_nan_passes_through(case):
    dtype = torch.bfloat16
    given, arriving = forward_inputs(case, dtype), backward_inputs(case, dtype)
    middle = (0, 3, case.height // 2, case.width // 2)
    for inputs in (given, arriving):
        inputs["x"][middle] = torch.nan
    y, _, _ = cuda.bn_relu_conv_forward(*given.values(), *conv(case), False)
    expected, _, _ = reference.bn_relu_conv_forward(*given.values(), *conv(case), False)
    assert expected.isnan().any()
    assert torch.equal(y.isnan(), expected.isnan())
    found = cuda.bn_relu_conv_backward(*arriving.values(), *conv(case), True, True, False)
    expected = reference.bn_relu_conv_backward(*arriving.values(), *conv(case), True, True, False)
    g, dconv_weight, sums, _ = expected
    assert not g.isnan().any()  # a NaN lets the gradient pass, and does not join it
    assert dconv_weight.isnan().any()
    assert sums.isnan().any()
    for a, b in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    torch.testing.assert_close(found[0][middle], g[middle], rtol=0.02, atol=0)


@typical
@pytest.mark.parametrize("value", [3.0, -1e4])
def test_statistics_of_constant_channels_are_exact(case, value):
    inputs = forward_inputs(case, torch.float32)
    inputs["conv_weight"].zero_()
    inputs["residual"].fill_(value)
    _, mean, var = cuda.bn_relu_conv_forward(*inputs.values(), *conv(case), True)
    assert torch.equal(mean, torch.full_like(mean, value))
    assert torch.equal(var, torch.zeros_like(var))


@typical
def test_statistics_of_large_means_keep_the_budget(case):
    inputs = forward_inputs(case, torch.float32)
    inputs["residual"] += 1000
    check("bn_relu_conv_forward", FORWARD, inputs, *conv(case), True)


@pytest.mark.calls(
    "preact_kernels_cuda::preact_stage_forward", "preact_kernels_cuda::preact_stage_backward"
)
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory", ["store", "rebuild"])
def test_a_run_of_blocks_in_one_call_gives_the_bits_of_its_units(
    kind, training, memory, monkeypatch
):
    stage = random_stage(kind, 16, memory=memory)
    stage = in_dtype(stage, torch.bfloat16).train(training).to(DEVICE)
    inputs = {"x": torch.randn(3, 10, 7, 6, device=DEVICE).bfloat16()}
    names = ("preact_stage_forward", "preact_stage_backward")
    with pk.use_backend("cuda"):
        with pytest.MonkeyPatch.context() as units:
            units.setattr(cuda, "serves_preact_stage", lambda *_: False)
            expected = evaluate(stage, inputs)
        calls = [recorded_calls(cuda, name, monkeypatch) for name in names]
        assert_same_bits(evaluate(stage, inputs), expected)
    assert [len(c) for c in calls] == [1, 1]


SERVED = {
    (16, 64, 1, 1): True,
    (64, 256, 1, 1): True,
    (128, 128, 1, 1): True,
    (256, 256, 1, 1): False,  # a weight's gradient that no block can hold
    (24, 16, 1, 1): False,
    (16, 8, 1, 1): False,
    (16, 272, 1, 1): False,
    (16, 16, 3, 3): True,
    (64, 64, 3, 3): True,
    (16, 32, 3, 3): False,
    (48, 48, 3, 3): False,
    (16, 16, 5, 5): False,
    (16, 16, 1, 3): False,
}


@pytest.mark.covering(1)
@every_dtype
@pytest.mark.parametrize("shape", SERVED, ids=str)
def test_which_weights_are_served(shape, dtype):
    weight = torch.empty(shape, dtype=dtype, device=DEVICE)
    padding = [side // 2 for side in shape[2:]]
    is_served = cuda.serves_bn_relu_conv(weight, [1, 1], padding, [1, 1], 1)
    if IS_CUDA_ON_HOST or dtype != torch.float32:  # else a question of shared memory
        assert is_served == SERVED[shape]
    for stride, dilation, groups in (([2, 2], [1, 1], 1), ([1, 1], [1, 1], 2)):
        assert not cuda.serves_bn_relu_conv(weight, stride, padding, dilation, groups)
    assert not cuda.serves_bn_relu_conv(weight, [1, 1], [p + 1 for p in padding], [1, 1], 1)


def test_float32_is_served_only_where_tf32_is_allowed(monkeypatch):
    weight = torch.empty(16, 64, 1, 1, device=DEVICE)
    arguments = ([1, 1], [0, 0], [1, 1], 1)
    assert cuda.serves_bn_relu_conv(weight, *arguments)
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: False)
    assert not cuda.serves_bn_relu_conv(weight, *arguments)
    assert cuda.serves_bn_relu_conv(weight.bfloat16(), *arguments)


def test_the_library_names_what_it_does_not_take():
    inputs = forward_inputs(Case(1, 2, 2, 16, 16, 1), torch.bfloat16)
    del inputs["conv_bias"]
    forward = torch.ops.preact_kernels_cuda.bn_relu_conv_forward
    for change, message in (
        ({"conv_weight": inputs["conv_weight"][:8]}, "conv_weight: expected 16, 32, ... or 256"),
        ({"conv_weight": inputs["conv_weight"].float()}, "conv_weight: expected the dtype of x"),
        ({"residual": inputs["residual"][:, :8]}, "residual: expected"),
        ({"mean": inputs["mean"][:8]}, "mean: expected 16 values, got 8"),
    ):
        with pytest.raises(RuntimeError, match=message):
            forward(*(inputs | change).values(), True)


@pytest.mark.slow
@pytest.mark.skipif(not IS_CUDA_ON_HOST, reason="on a GPU, compute-sanitizer is what there is")
@pytest.mark.skipif("PK_SANITIZE" in os.environ, reason="is what runs")
def test_under_the_sanitizer_the_quick_tests_of_this_file_pass():
    build.build("kernels", sanitize=True)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m"]
    process = subprocess.run(
        [sys.executable, *command, "not slow", __file__],
        cwd=build.ROOT,
        env={**os.environ, **build.sanitizer_environment(), "PK_SANITIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
