"""Fused convolutions of both GPU backends, above all with a float32 stream or float32 weights.

The budget is that of tests/kernels/cuda_conv_cases.py.
"""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.kernels import cuda, reference
from preact_kernels.kernels.contract import Conv, Epilogue, Gradient, Inputs, Norm, Wanted
from preact_kernels.ops import dispatch
from tests.cases import (
    Autocast,
    in_dtype,
    random_block,
    rebuilt,
    recorded_calls,
    unit_of,
)
from tests.kernels import cuda_conv_cases as cuda_conv
from tests.kernels.cuda_conv_cases import (
    ALL,
    DEVICE,
    TYPICAL,
    Backward,
    Case,
    Forward,
    backward_inputs,
    call,
    forward_inputs,
    moved,
    nhwc,
    set_schedule,
    unit,
)
from tests.oracle import (
    assert_same_bits,
    check,
    evaluate,
    plain_copy,
    unit_roundoff,
    weight_gradient_inside_the_image,
)

pytestmark = [
    pytest.mark.backends("cuda", "triton"),
    pytest.mark.usefixtures("backend", "first_schedule"),
]
quick_on_cuda = pytest.mark.backends("cuda", slow=("triton",))
CHANNELS = {"basic": 16, "bottleneck": 64}  # their 3x3 convolutions have 16 channels


class NoConvolution(TorchDispatchMode):
    """Fails on PyTorch's convolutions."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "convolution" not in function._schema.name
        return function(*args, **kwargs or {})


HALVES = (torch.bfloat16, torch.float16)
# The side of the unit that is float32.
either_side = pytest.mark.parametrize("side", ["input", "output"])


def with_stream(inputs: Forward | Backward, side: str) -> Forward | Backward:
    """`inputs` in float32 on one side, with values that half precision does not have.

    The residual is so large that rounding it, or the sum, exceeds the budget.
    """

    def wide(t):
        noise = torch.rand_like(t, dtype=torch.float32) - 0.5
        return nhwc(t.float() * (1 + noise / 1000))

    if side == "input":
        inputs = inputs._replace(x=wide(inputs.x))
        return inputs._replace(residual=None) if isinstance(inputs, Forward) else inputs
    if isinstance(inputs, Forward):
        return inputs._replace(residual=64 * wide(inputs.residual))
    g, step = inputs.dy
    if step is None:
        return inputs._replace(dy=Gradient(wide(g)))
    skip = None if step.skip is None else wide(step.skip)
    return inputs._replace(dy=Gradient(g, step._replace(x=wide(step.x), skip=skip)))


def kernels():
    """The kernels of the backend under test."""
    return dispatch.select(dispatch.current(), torch.device(DEVICE).type, torch.bfloat16)


class Fused:
    """The kernels of a backend, which fail on PyTorch's convolutions."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        def call(*args):
            with NoConvolution():
                return getattr(self.backend, name)(*args)

        return call


def check_case(case: Case, inputs: Forward | Backward, options):
    return cuda_conv.check_case(case, inputs, options, Fused(kernels()))


@pytest.mark.covering(2, triton=1)
@cuda_conv.cases_and_dtypes(
    *TYPICAL, Case(1, 6, 7, 64, 256, 1), Case(2, 3, 5, 32, 32, 3), Case(2, 7, 7, 64, 64, 3),
    dtypes=HALVES,
)  # fmt: skip
@either_side
def test_both_directions_keep_the_budget(case, dtype, side):
    inputs = with_stream(forward_inputs(case, dtype), side)
    found = check_case(case, inputs, True)
    assert found["y"].dtype == (torch.float32 if side == "output" else dtype)
    inputs = with_stream(backward_inputs(case, dtype), side)
    found = check_case(case, inputs, ALL)
    assert found["g"].dtype == dtype
    assert found["dy"].dtype == (torch.float32 if side == "output" else dtype)


@pytest.mark.covering(2, triton=1)
@either_side
@pytest.mark.parametrize(
    ("case", "step", "wanted"),
    [
        (TYPICAL[1], "none", (True, True)),
        (TYPICAL[0], "evaluation", (True, False)),
        (TYPICAL[1], "z", (False, True)),
        (TYPICAL[0], "skip", (True, True)),
    ],
    ids=str,
)
def test_every_deferred_step_keeps_the_budget(case, side, step, wanted):
    set_schedule(multiprocessors=1)  # read by the CUDA library alone
    inputs = with_stream(backward_inputs(case, torch.bfloat16, step), side)
    check_case(case, inputs, Wanted(*wanted, dy=step != "none"))


@quick_on_cuda
@either_side
def test_neither_schedules_nor_where_tensors_begin_change_a_bit(side):
    case = TYPICAL[1]
    given = with_stream(forward_inputs(case, torch.bfloat16), side)
    arriving = with_stream(backward_inputs(case, torch.bfloat16), side)
    expected = call(kernels(), case, given, True), call(kernels(), case, arriving, ALL)
    set_schedule(1)
    assert_same_bits(call(kernels(), case, moved(given), True), expected[0])
    assert_same_bits(call(kernels(), case, moved(arriving), ALL), expected[1])


def test_units_of_other_dtypes_are_left_to_pytorch():
    f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
    served = {  # dtypes of the products, x, y and the weight
        (bf16, bf16, bf16, bf16): True,
        (bf16, bf16, bf16, f32): True,
        (f16, f32, f16, f32): True,
        (bf16, bf16, f32, bf16): True,
        (bf16, f32, f32, bf16): False,
        (bf16, f16, bf16, bf16): False,
        (bf16, bf16, f64, bf16): False,
        (bf16, bf16, bf16, f16): False,
        (f32, f32, f32, f32): True,
        (f32, f32, f32, bf16): False,
        (f32, bf16, f32, f32): False,
        (f64, f64, f64, f64): False,
    }

    def is_served(dtype, x_dtype, y_dtype, weight_dtype):
        weight = torch.empty(16, 16, 1, 1, dtype=weight_dtype, device=DEVICE)
        geometry = Conv((1, 1), (0, 0), (1, 1), 1)
        return not kernels().refusal(unit_of(weight, geometry, dtype, x_dtype, y_dtype))

    assert {dtypes: is_served(*dtypes) for dtypes in served} == served


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("side", [1, 3])
def test_the_library_refuses_the_dtypes_that_are_not_served(side, monkeypatch):
    refusal = cuda.CUDAKernels.refusal
    monkeypatch.setattr(cuda.CUDAKernels, "refusal", lambda *_: "")
    case = Case(1, 2, 3, 16, 16, side)
    given = forward_inputs(case, torch.float32)
    for x_dtype, y_dtype, dtype, weight_dtype in itertools.product(cuda_conv.DTYPES, repeat=4):
        x, weight, y = given.x.to(x_dtype), given.conv_weight.to(weight_dtype), nhwc(given.residual)
        y = y.to(y_dtype)
        for inputs, options in (
            (Forward(x, given.norm, weight, y), False),
            (Backward(Gradient(y), x, given.norm, weight), Wanted(True, True)),
        ):
            is_served = not refusal(cuda.kernels(), unit(case, inputs, dtype))
            message = "^(x|dtype|conv_weight|residual, g, step_x): expected (the dtype|that) of "
            with nullcontext() if is_served else pytest.raises(RuntimeError, match=message):
                call(cuda.kernels(), case, inputs, options, dtype)


def bare_stage(kind: str, count: int, **options) -> pk.PreActStage:
    """Blocks without projections, in bfloat16 with a float32 stream."""
    blocks = [random_block(kind, CHANNELS[kind], 16) for _ in range(count)]
    stage = pk.PreActStage(blocks, residual_dtype=torch.float32, **options)
    return in_dtype(stage, torch.bfloat16).to(DEVICE)


@pytest.mark.covering(1)
@quick_on_cuda
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@pytest.mark.parametrize("half", HALVES, ids=cuda_conv.dtype_name)
def test_a_rebuilt_input_is_off_by_two_roundings_of_float32(kind, half, monkeypatch):
    """The forward rounds y, the rebuild x; it subtracts what was added, to the bit."""
    stage = in_dtype(bare_stage(kind, 2, memory="rebuild"), half)
    x = torch.randn(3, CHANNELS[kind], 7, 6, device=DEVICE)
    with NoConvolution():
        (found,) = rebuilt(stage, x, monkeypatch)
        with torch.no_grad():
            expected = stage[0](x)
            y = stage[1](expected)
    assert found.dtype == expected.dtype == torch.float32
    allowed = unit_roundoff(torch.float32) * (y.double().abs() + found.double().abs())
    assert ((found.double() - expected.double()).abs() <= 1.001 * allowed).all()


@quick_on_cuda
@pytest.mark.parametrize(
    ("kind", "memory"),
    [("bottleneck", "rebuild"), pytest.param("basic", "checkpoint", marks=pytest.mark.slow)],
)
def test_runs_around_a_projection_equal_the_plain_blocks(kind, memory, monkeypatch):
    """The basic projection block's first unit is not fused: its `g` is float32."""
    width, wider = (8, 16) if kind == "bottleneck" else (32, 32)
    blocks = [
        random_block(kind, 32, width),
        random_block(kind, 32, wider, 2),
        random_block(kind, 64 if kind == "bottleneck" else 32, wider),
    ]
    stage = in_dtype(pk.PreActStage(blocks, memory, residual_dtype=torch.float32), torch.bfloat16)
    stage = stage.to(DEVICE)
    problems = [{"x": torch.randn(4, 32, 7, 6, device=DEVICE)} for _ in range(4)]
    calls = recorded_calls(kernels(), "block_run_backward", monkeypatch)
    check(stage, plain_copy(stage), problems)
    assert calls


@quick_on_cuda
def test_a_block_with_a_projection_is_fused(monkeypatch):
    """The gradient of the projection's output is float32 and rounded as in autograd."""
    stage = pk.PreActStage([random_block("bottleneck", 16, 16)], residual_dtype=torch.float32)
    stage = in_dtype(stage, torch.bfloat16).to(DEVICE)
    problems = [{"x": torch.randn(4, 16, 5, 7, device=DEVICE)} for _ in range(4)]
    calls = recorded_calls(kernels(), "norm_act_conv_backward", monkeypatch)
    with NoConvolution():
        evaluate(stage, problems[0])
    projected = [dy.g.dtype for unit, dy, *_ in calls if unit.weight_shape[:2] == (64, 16)]
    assert projected == [torch.float32, torch.bfloat16]  # the last unit's, and the projection's
    check(stage, plain_copy(stage), problems)


def between_streams(
    case: Case, half: torch.dtype
) -> tuple[tuple[Forward, bool], tuple[Backward, Wanted]]:
    """Inputs and options for both directions, with x and y in float32.

    The mean of x is so large that rounding it exceeds the budget.
    """
    given, arriving = forward_inputs(case, half), backward_inputs(case, half)
    residual = with_stream(given, "output").residual
    given = with_stream(given, "input")._replace(residual=residual)
    arriving = with_stream(with_stream(arriving, "input"), "output")
    for inputs in (given, arriving):
        inputs.x.add_(64)
        inputs.norm.mean.add_(64)
    return (given, True), (arriving, ALL)


@pytest.mark.parametrize(
    ("channels", "half", "weight_dtype"),
    [
        (32, torch.bfloat16, torch.bfloat16),  # fused; the residual is added apart
        (272, torch.bfloat16, torch.bfloat16),  # too many channels: around PyTorch's convolution
        (272, torch.float16, torch.float32),
    ],
    ids=str,
)
def test_a_lone_unit_between_tensors_of_the_stream(channels, half, weight_dtype):
    case = Case(2, 5, 7, channels, 32, 1)
    for inputs, options in between_streams(case, half):
        weight = torch.randn_like(inputs.conv_weight, dtype=weight_dtype) / 16
        inputs = inputs._replace(conv_weight=weight)
        backend = Fused(kernels()) if channels == 32 else kernels()
        found = cuda_conv.check_case(case, inputs, options, backend, half)
        assert found.get("y", found.get("dy")).dtype == torch.float32


@pytest.mark.covering(1, triton=0)
@pytest.mark.parametrize("case", TYPICAL, ids=str)
@pytest.mark.parametrize("half", HALVES, ids=cuda_conv.dtype_name)
@pytest.mark.parametrize("stream", [None, "input", "output"])
def test_float32_weights_are_rounded_on_the_way(case, half, stream):
    for inputs, options in ((forward_inputs(case, half), True), (backward_inputs(case, half), ALL)):
        given = with_stream(inputs, stream) if stream else inputs
        wide = torch.randn_like(inputs.conv_weight, dtype=torch.float32)
        expected = call(kernels(), case, given._replace(conv_weight=wide.to(half)), options)
        for weight in (wide, nhwc(wide)):
            found = call(kernels(), case, given._replace(conv_weight=weight), options, half)
            if "conv_weight" in found:
                assert found["conv_weight"].dtype == torch.float32
                found["conv_weight"] = found["conv_weight"].to(half)
            assert_same_bits(found, expected)


def in_one_pass_on_triton(monkeypatch, in_one_pass):
    """Whether one kernel of Triton computes the gradients of x and of the weight."""
    if dispatch.current() == "triton":
        from tests.kernels.compile_triton import replace

        replace(monkeypatch, "costs_less_apart", lambda *_: not in_one_pass)


@cuda_conv.cases_and_dtypes(
    *(Case(2, 9, 5, 16, 16, 3), Case(1, 8, 16, 32, 32, 3), Case(1, 9, 5, 64, 64, 3)),
    dtypes=(torch.bfloat16, torch.float32),
)
def test_padding_takes_no_part_in_the_gradient_of_the_weight(case, dtype, monkeypatch):
    in_one_pass_on_triton(monkeypatch, True)
    inputs = backward_inputs(case, dtype, "none")
    inputs.norm.weight.abs_()
    for tensor, channel in ((inputs.x, 3), (inputs.dy.g, 7)):
        tensor[-1, channel, 0, 0] = torch.inf
        tensor[0, channel + 2, -1, -1] = torch.nan
    found = call(kernels(), case, inputs, Wanted(True, True))["conv_weight"]
    wide = cuda_conv.mapped(inputs, torch.Tensor.double)
    a = reference.norm_act_forward(wide.x, wide.norm)
    expected = weight_gradient_inside_the_image(a, wide.dy.g)
    for name in ("isnan", "isinf", "isfinite"):
        selected = getattr(expected, name)()
        assert selected.any()
        assert torch.equal(getattr(found, name)(), selected), name


@pytest.mark.parametrize(
    ("dtype", "x_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
    ],
    ids=["bfloat16", "float16", "float32_stream"],
)
@pytest.mark.parametrize("in_one_pass", [True, False])
def test_relu_is_that_of_the_rounded_pre_activation(in_one_pass, dtype, x_dtype, monkeypatch):
    """p = x * norm.weight underflows, overflows, lies halfway between numbers, and is NaN."""
    in_one_pass_on_triton(monkeypatch, in_one_pass)
    eps, least, largest = (getattr(torch.finfo(dtype), n) for n in ("eps", "tiny", "max"))
    least *= eps
    values = [0.25, 0.5, 0.5 + eps, 0.75, 1, 1.5, 3, 0, -0.0, -0.25, -0.5, -0.5 - eps, -1, -2]
    scales = [least, -least, 1 + eps / 2, 1 + 3 * eps / 2, -1, 1 / 3, largest, 1]
    x = torch.tensor([*values, 7, -7]).repeat(16, 1)
    x[14, 3], x[15, 4], x[15, 5] = torch.nan, torch.inf, -torch.inf
    x = x.view(1, 16, 4, 4).to(x_dtype, memory_format=torch.channels_last)
    weight = torch.eye(16, dtype=dtype)[..., None, None]
    unit = unit_of(weight, Conv((1, 1), (0, 0), (1, 1), 1), dtype, x_dtype, dtype)
    zero, one = torch.zeros(16), torch.ones(16)
    inputs = Inputs(x, Norm(zero, one, torch.tensor(2 * scales), zero, 0.0), weight)

    p = (x.float() * inputs.norm.weight.view(16, 1, 1)).to(x_dtype)
    a = torch.where(p <= 0, 0.0, p).to(dtype).double().flatten(2)[0]  # [channels, pixels]
    y = kernels().norm_act_conv_forward(unit, inputs, Epilogue()).y
    expected = weight.double().flatten(1) @ a
    equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    equal(y.double().flatten(2)[0], expected)

    def gradients(dy):
        dy = Gradient(dy.to(dtype).contiguous(memory_format=torch.channels_last))
        return kernels().norm_act_conv_backward(unit, dy, inputs, Wanted(input=True, weight=True))

    if dispatch.current() == "cuda":  # masks by the sign of the rounded operand
        p = p.to(dtype)
    equal(gradients(torch.ones_like(x)).g.float(), torch.where(p <= 0, 0.0, 1.0))
    # Pixel k has a gradient in output channel k alone: no sum over pixels is rounded.
    found = gradients(torch.eye(16).view(1, 16, 4, 4)).conv_weight
    equal(found.double().flatten(1), torch.eye(16).double() @ a.t())


class Casts(TorchDispatchMode):
    """Counts casts of weights and weight gradients, by shape."""

    def __init__(self, weights):
        super().__init__()
        self.shapes, self.count = {w.shape for w in weights}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += 1
        return function(*args, **kwargs or {})


@pytest.mark.covering(1, triton=0)
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize(
    ("x_dtype", "stream"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, None)],
)
def test_autocast_casts_no_weight_where_convolutions_are_fused(x_dtype, stream, memory):
    blocks = [random_block("bottleneck", 64, 16) for _ in range(2)]
    stage = Autocast(pk.PreActStage(blocks, memory, residual_dtype=stream)).to(DEVICE)
    weights = [p for p in stage.parameters() if p.dim() == 4]
    inputs = {"x": torch.randn(3, 64, 7, 6, device=DEVICE).to(x_dtype)}
    with Casts(weights) as of_fused:
        found = evaluate(stage, inputs)
    with Casts(weights) as of_plain:
        evaluate(plain_copy(stage), inputs)
    assert of_fused.count == 0
    assert of_plain.count >= 2 * len(weights)
    expected = evaluate(in_dtype(copy.deepcopy(stage), torch.bfloat16), inputs)
    for name in (f"d{name}" for name, _ in stage.named_parameters()):
        assert found[name].dtype == torch.float32
        found[name] = found[name].to(expected[name].dtype)
    assert_same_bits(found, expected)
