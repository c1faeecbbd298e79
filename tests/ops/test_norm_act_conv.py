"""`group_norm_act_conv` and `batch_norm_act_conv` equal plain PyTorch on every backend."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import preact_kernels as pk
from preact_kernels.kernels import layout
from preact_kernels.ops import dispatch
from tests.cases import (
    ACTIVATIONS,
    INF,
    MODULATIONS,
    NAN,
    NORM_CONV_CASES,
    Autocast,
    CalledOps,
    NormCase,
    NormConvCase,
    enough,
    every_activation,
    every_modulation,
    norm_conv_inputs,
    recorded_calls,
)
from tests.oracle import assert_same_bits, check, evaluate

on_kernels = pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))

GROUPS = NormConvCase(NormCase((3, 16, 6, 5), 4), 32, conv_bias=True, residual=True)
BATCH = GROUPS._replace(norm=NormCase((3, 16, 6, 5)))
# A unit, and arguments besides those of the case.
NORMS = {
    "group": (GROUPS, {}),
    "instance": (GROUPS._replace(norm=NormCase((3, 16, 6, 5), 16)), {}),
    "batch": (BATCH, {}),
    "batch_in_evaluation": (BATCH, {"training": False}),
}
every_norm = pytest.mark.parametrize("norm", NORMS)


def check_unit(case, problems, activation="silu", frozen=(), **arguments):
    fused = partial(case.fused, activation=ACTIVATIONS[activation][0], **arguments)
    plain = partial(case.plain, activation=activation, **arguments)
    return check(fused, plain, problems, frozen=frozen)


@on_kernels
@pytest.mark.covering(1)
@pytest.mark.parametrize("case", NORM_CONV_CASES.values(), ids=NORM_CONV_CASES)
@pytest.mark.parametrize("modulation", [(), ("scale", "shift")], ids=["", "modulated"])
def test_convolutions_and_running_statistics(case, modulation, dtype):
    problems = [norm_conv_inputs(case, dtype, modulation) for _ in range(enough(case.norm.x))]
    check_unit(case, problems)


@on_kernels
@pytest.mark.covering(1)
@every_activation
@pytest.mark.parametrize("kernel", [1, 3])
@every_modulation
@every_norm
def test_activations_and_modulations_of_each_norm(
    norm, modulation, kernel, activation, training_dtype
):
    case, arguments = NORMS[norm]
    case = case._replace(kernel=kernel, padding=kernel // 2)
    problems = [norm_conv_inputs(case, training_dtype, modulation) for _ in range(4)]
    check_unit(case, problems, activation, **arguments)


@pytest.mark.backends("cpu")
@every_norm
def test_a_unit_says_whether_its_norm_has_rows(norm, backend, monkeypatch):
    case, arguments = NORMS[norm]
    for modulation in MODULATIONS.values():
        inputs = norm_conv_inputs(case, modulation=modulation)
        kernels = dispatch.kernels_for(inputs["x"])
        with monkeypatch.context() as patch:
            calls = recorded_calls(kernels, "norm_act_conv_forward", patch)
            case.fused(**inputs, **arguments)
        ((unit, given, *_),) = calls
        assert unit.has_rows == given.norm.has_rows == (case is not BATCH or bool(modulation))


@on_kernels
@pytest.mark.parametrize("name", ["3x3", "1d", "3d", "batch"])
@pytest.mark.covering(1, cpu=1)
def test_a_float32_convolution_behind_bfloat16(name, backend):
    case = NORM_CONV_CASES[name]
    options = {"conv_dtype": torch.float32}
    problems = [norm_conv_inputs(case, torch.bfloat16, **options) for _ in range(8)]
    results = check_unit(case, problems)
    assert results["y"].dtype == torch.bfloat16 and results["dconv_weight"].dtype == torch.float32


HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
# Dtypes of x and of the residual; `None` for x: float32 under autocast.
MIXED = [(None, FLOAT), (HALF, FLOAT), (FLOAT, HALF), (HALF, torch.float16), (FLOAT, DOUBLE)]


def mixed_inputs(case, x_dtype, residual_dtype):
    inputs = norm_conv_inputs(case._replace(residual=True), x_dtype or FLOAT)
    inputs["residual"] = (64 + inputs["residual"]).to(residual_dtype)  # rounding it shows
    return inputs


@pytest.mark.backends("cpu", slow=("reference",))
@pytest.mark.parametrize(("x_dtype", "residual_dtype"), MIXED, ids=str)
def test_a_residual_of_another_dtype_is_added_to_the_rounded_result(
    x_dtype, residual_dtype, backend
):
    names = "1x1", "1d", "3d", "channels_10_to_17", "batch", "same_even"
    for name, dropout in itertools.product(names, (0.0, 0.5)):
        check_added_residual(name, dropout, x_dtype, residual_dtype)


def check_added_residual(name, dropout, x_dtype, residual_dtype):
    # No bias: its gradient sums a dy that is not rounded.
    case = NORM_CONV_CASES[name]._replace(conv_bias=False)
    call = seeded(partial(case.fused, activation="silu", dropout=dropout))
    inputs = mixed_inputs(case, x_dtype, residual_dtype)

    def apart(residual, **inputs):
        return call(**inputs) + residual

    found, expected = (
        evaluate(f if x_dtype else Autocast(function=f), inputs) for f in (call, apart)
    )
    assert found["y"].dtype == torch.promote_types(x_dtype or HALF, residual_dtype)
    assert_same_bits(found, expected)


@on_kernels
@pytest.mark.covering(1)
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "conv_weight", "conv_bias", "residual"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@every_norm
def test_a_single_wanted_gradient_has_the_same_bits_and_comes_alone(norm, dropout, wanted, backend):
    case, arguments = NORMS[norm]
    if norm != "batch_in_evaluation":
        arguments = {"dropout": dropout}
    call = seeded(partial(case.fused, activation="silu", **arguments))
    inputs = norm_conv_inputs(case, modulation=("scale",))
    expected = evaluate(call, inputs)
    expected |= {n: None for n in expected if n.startswith("d") and n != f"d{wanted}"}
    assert_same_bits(evaluate(call, inputs, frozen=[n for n in inputs if n != wanted]), expected)


def seeded(function, seed=5):
    """The function of the same random numbers at every call."""

    def call(**inputs):
        torch.manual_seed(seed)
        return function(**inputs)

    return call


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["3x3", "channels_17_to_3", "same_even", "1d", "3d", "batch"])
@pytest.mark.parametrize("p", [0.3, 0.5])
@pytest.mark.parametrize("format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_draws_the_random_numbers_of_pytorch(name, p, format, dtype, backend):
    case = NORM_CONV_CASES[name]
    inputs = norm_conv_inputs(case, dtype, ("shift",))
    if inputs["x"].dim() == 4:
        inputs["x"] = inputs["x"].contiguous(memory_format=getattr(torch, format))
    inputs["conv_weight"].abs_()
    found, expected = (
        evaluate(seeded(partial(f, activation=a, dropout=p)), inputs)
        for f, a in ((case.fused, "sigmoid"), (case.plain, "sigmoid"))
    )
    if dtype == torch.bfloat16:  # in which gradients of parameters are far from exact
        found, expected = ({n: r[n] for n in ("y", "dx")} for r in (found, expected))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    state = torch.get_rng_state()
    evaluate(seeded(partial(case.plain, activation="silu", dropout=p)), inputs)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("name", ["3x3", "same_even"])
def test_dropout_of_everything_leaves_the_bias(name, backend):
    case = NORM_CONV_CASES[name]._replace(conv_bias=True, residual=False)
    inputs = norm_conv_inputs(case)
    results = evaluate(partial(case.fused, activation="silu", dropout=1), inputs)
    assert torch.equal(results["y"], inputs["conv_bias"].view(-1, 1, 1).expand(results["y"].shape))
    assert not any(results[n].any() for n in ("dx", "dweight", "dbias", "dconv_weight"))


@pytest.mark.backends("cpu")
def test_dropout_of_a_batch_norm_acts_in_training_mode_alone(backend):
    inputs = norm_conv_inputs(BATCH)
    expected = evaluate(partial(BATCH.fused, training=False), inputs)
    state = torch.get_rng_state()
    assert_same_bits(evaluate(partial(BATCH.fused, training=False, dropout=0.5), inputs), expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.backends("cpu")
@every_norm
@pytest.mark.parametrize("shape", [(0, 16, 6, 5), (0, 16, 7), (0, 16, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.covering(1)
def test_an_empty_batch_is_as_in_eager(shape, norm, dropout, backend):
    case, arguments = NORMS[norm]
    case = case._replace(norm=case.norm._replace(x=shape))
    results = check_unit(case, norm_conv_inputs(case), dropout=dropout, **arguments)
    assert results["y"].shape == (0, 32, *shape[2:])


@on_kernels
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["3x3", "1d", "3d"])
@pytest.mark.covering(1)
def test_what_is_not_finite_stays_in_its_image(name, value, backend):
    case = NORM_CONV_CASES[name]
    inputs = norm_conv_inputs(case)
    inputs["x"][1, 3] = value
    results = evaluate(partial(case.fused, activation="silu"), inputs)
    assert results["y"][0].isfinite().all() and results["dx"][0].isfinite().all()
    assert not results["y"][1].isfinite().all() and not results["dx"][1].isfinite().all()


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (2, 8, 3, 4, 5)])
def test_hooks_of_saved_tensors_may_change_the_memory_format(shape, backend):
    x = layout.nhwc(torch.randn(shape)).requires_grad_()
    weight = torch.randn(8, 8, *[3] * (len(shape) - 2))

    def gradients():
        y = pk.group_norm_act_conv(x, 2, activation="silu", conv_weight=weight, padding=1)
        z = pk.group_norm_act(x, 2, activation="silu")
        (dx,) = torch.autograd.grad(y.square().sum() + z.square().sum(), x)
        return dx

    def in_nchw(t):
        return t.clone(memory_format=torch.contiguous_format)

    with dispatch.use_backend(backend):
        expected = gradients()
        with torch.autograd.graph.saved_tensors_hooks(in_nchw, lambda t: t):
            found = gradients()
    assert torch.equal(found, expected)


@pytest.mark.backends("cpu")
def test_a_backward_computes_no_more_than_is_wanted(backend):
    module = pk.BNReLUConv2d(16, 16, 3, padding=1, bias=True)
    module.requires_grad_(False)
    module.conv.bias.requires_grad_()
    y = module(torch.randn(2, 16, 5, 4))
    with CalledOps() as called:
        y.sum().backward()
    assert not {name for name in called.names if name.startswith("preact_kernels")}

    conv = nn.Conv2d(16, 16, 3, groups=2)  # PyTorch's
    module = pk.NormActConv(nn.BatchNorm2d(16), "relu", conv).eval().requires_grad_(False)
    x = torch.randn(2, 16, 5, 4, requires_grad=True)
    y = module(x)
    with CalledOps() as called:
        y.sum().backward()
    own = {name for name in called.names if name.startswith("preact_kernels_cpu::norm")}
    assert own == {"preact_kernels_cpu::norm_act_backward_input"}  # no sums
