"""`group_norm_act` and `batch_norm_act` equal plain PyTorch on every backend."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk
from tests.cases import (
    ACTIVATIONS,
    INF,
    NAN,
    NORM_CASES,
    NormCase,
    enough,
    every_activation,
    every_modulation,
    norm_inputs,
    plain_norm_act,
    served_by_vectors,
)
from tests.oracle import assert_same_bits, check, evaluate, same_bits

# The quick suite has others of both GPU backends in tests/kernels.
on_kernels = pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
every_kernel = pytest.mark.backends("cpu", "triton", slow=("reference", "cuda"))

GROUPS = NormCase((3, 16, 6, 5), 4)
BATCH = NormCase((3, 16, 6, 5))
# A norm, and arguments besides those of the case.
NORMS = {
    "group": (GROUPS, {}),
    "instance": (GROUPS._replace(num_groups=16), {}),
    "layer": (GROUPS._replace(num_groups=1), {}),
    "batch": (BATCH, {}),
    "batch_in_evaluation": (BATCH, {"training": False}),
}
every_norm = pytest.mark.parametrize("norm", NORMS)


def check_norm(case, inputs, activation="silu", frozen=(), **arguments):
    fused = partial(case.norm_act, activation=ACTIVATIONS[activation][0], **arguments)
    plain = partial(plain_norm_act, activation=activation, **case.norm | arguments)
    return check(fused, plain, inputs, frozen=frozen)


@on_kernels
@pytest.mark.covering(1)
@pytest.mark.parametrize("case", NORM_CASES, ids=str)
@every_modulation
def test_norms_and_running_statistics(case, modulation, dtype):
    problems = [norm_inputs(case, dtype, modulation) for _ in range(enough(case.x))]
    check_norm(case, problems)


@on_kernels
@pytest.mark.covering(1)
@every_activation
@every_norm
@every_modulation
def test_activations_and_modulations_of_each_norm(norm, activation, modulation, dtype):
    case, arguments = NORMS[norm]
    problems = [norm_inputs(case, dtype, modulation) for _ in range(4)]
    check_norm(case, problems, activation, **arguments)


# Beside half precision: the dtype of the parameters, and which rows are in float32.
DTYPES = {
    "parameters_in_half": ({"params_dtype": torch.bfloat16}, ()),
    "float32_scale": ({}, ("scale",)),
    "float32_scale_and_shift": ({"params_dtype": torch.bfloat16}, ("scale", "shift")),
}


@on_kernels
@pytest.mark.parametrize(("options", "wide"), DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", [GROUPS, BATCH], ids=str)
@pytest.mark.covering(1, cpu=2)
def test_bfloat16_is_promoted_as_in_pytorch(case, options, wide, backend):
    problems = [norm_inputs(case, torch.bfloat16, wide, **options) for _ in range(4)]
    for inputs in problems:
        inputs |= {name: inputs[name].float() for name in wide}
    results = check_norm(case, problems)
    assert results["y"].dtype == (torch.float32 if wide else torch.bfloat16)


@on_kernels
@pytest.mark.covering(1)
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "scale", "shift"])
@every_norm
def test_a_single_wanted_gradient_has_the_same_bits_and_comes_alone(norm, wanted, backend):
    case, arguments = NORMS[norm]
    inputs = norm_inputs(case, modulation=("scale", "shift"))
    call = partial(case.norm_act, activation="silu", **arguments)
    expected = evaluate(call, inputs)
    expected |= {n: None for n in expected if n.startswith("d") and n != f"d{wanted}"}
    assert_same_bits(evaluate(call, inputs, frozen=[n for n in inputs if n != wanted]), expected)


@on_kernels
@every_norm
def test_large_means(norm, backend):
    case, arguments = NORMS[norm]
    check_norm(case, norm_inputs(case, mean_over_std=1000), **arguments)


@every_kernel
@pytest.mark.parametrize("value", [0.0, 3.0, -1e4, 0.1, 1e-30])
@pytest.mark.parametrize("case", [NormCase((2, 16, 29, 23), 4), NormCase((2, 17, 29, 23), 17)])
@pytest.mark.covering(1)
def test_constant_groups_are_zero_before_weight_and_bias(case, value, backend):
    inputs = norm_inputs(case)
    inputs["x"][1, : case.x[1] // case.num_groups] = value
    inputs["bias"] = torch.full_like(inputs["bias"], 0.5)
    y = case.norm_act(**inputs, activation="identity", eps=1e-12)
    assert (y[1, : case.x[1] // case.num_groups] == 0.5).all()


@every_kernel
@pytest.mark.parametrize("case", [NormCase((2, 6, 1, 1), 6), NormCase((3, 4), 4)], ids=str)
def test_one_value_per_group_is_zero_before_weight_and_bias(case, backend):
    inputs = norm_inputs(case)
    y = case.norm_act(**inputs, activation="identity", eps=1e-12)
    assert same_bits(y, inputs["bias"].view(-1, *[1] * (y.dim() - 2)).expand(y.shape).clone())
    if backend == "cpu":
        # dx is what rounding leaves of zero: one of few values may be near zero in eager by luck.
        check_norm(case, [norm_inputs(case) for _ in range(enough(case.x))])


@pytest.mark.backends("cpu")
@every_modulation
@every_norm
@pytest.mark.parametrize("shape", [(0, 16, 6, 5), (0, 16), (0, 16, 7), (2, 16, 0, 5)], ids=str)
@pytest.mark.covering(1)
def test_an_empty_batch_is_as_in_eager(shape, norm, modulation, backend):
    case, arguments = NORMS[norm]
    case = case._replace(x=shape)
    results = check_norm(case, norm_inputs(case, modulation=modulation), **arguments)
    assert results["y"].shape == shape


@on_kernels
def test_activations_of_numbers_at_the_limits_are_as_in_pytorch(backend):
    for activation in ACTIVATIONS:
        check_activation_at_the_limits(activation)


def check_activation_at_the_limits(activation):
    """With statistics, weight and bias that change no number but -0."""
    largest = torch.finfo(torch.float32).max
    values = [0.0, 1e-45, 1e-38, 1e-8, 1.0, 3.0, 6.0, 10.0, 20.0, 21.0, 89.0, 104.0, largest, INF]
    values = [sign * v for v in values for sign in (1, -1)] + [0.5, -0.5, -2.0, NAN]
    values = served_by_vectors(activation, values)
    inputs = {
        "x": torch.tensor(values).view(1, 1, 1, -1).repeat(1, 8, 1, 1),
        "running_mean": torch.zeros(8),
        "running_var": torch.full((8,), 0.75),
    }
    arguments = {"training": False, "eps": 0.25}
    fused = partial(pk.batch_norm_act, activation=ACTIVATIONS[activation][0], **arguments)
    plain = partial(plain_norm_act, activation=activation, **arguments)
    dy = torch.linspace(0.5, 1.5, inputs["x"].numel()).view(inputs["x"].shape)
    found, expected = evaluate(fused, inputs, dy), evaluate(plain, inputs, dy)
    if activation in ("relu6", "elu", "elu_2", "hardswish"):  # a vector of PyTorch, or its rest
        for results in (found, expected):
            results["dx"][..., -1] = 0
    is_exact = activation.startswith(("relu", "leaky_relu", "identity"))
    tolerances = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
    for name in ("y", "dx"):
        a, b = found[name], expected[name]
        message = partial("{}, {}: {}".format, activation, name)
        torch.testing.assert_close(a, b, equal_nan=True, **tolerances, msg=message)
        if is_exact:
            is_equal = torch.equal(a.signbit() | a.isnan(), b.signbit() | b.isnan())
            assert is_equal, (activation, name)


@pytest.mark.backends("cpu", "triton", "cuda", slow=("reference",))
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.covering(1)
def test_what_is_not_finite_stays_in_its_group(activation, value, backend):
    inputs = norm_inputs(GROUPS, modulation=("scale", "shift"))
    inputs["x"][1, 5, 2, 3] = value
    call = partial(GROUPS.norm_act, activation=activation)
    plain = partial(plain_norm_act, activation=activation, **GROUPS.norm)
    found, expected = evaluate(call, inputs), evaluate(plain, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    for name in ("y", "dx"):
        infected = ~found[name].isfinite()
        infected[1, 4:8] = False
        assert not infected.any()


@pytest.mark.backends("cpu", "triton", slow=("cuda",))  # PyTorch rounds its last elements apart
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "leaky_relu"])
@pytest.mark.parametrize("case", [NormCase((3, 16, 6, 5), 4), NormCase((3, 17, 11, 9), 17)])
@pytest.mark.covering(1)
def test_an_image_has_the_same_bits_whatever_its_batch(case, activation, dtype, backend):
    inputs = norm_inputs(case, dtype, ("scale", "shift"))
    call = partial(case.norm_act, activation=activation)
    per_image = ("x", "scale", "shift")
    dy = torch.randn(case.x).to(dtype)
    whole = evaluate(call, inputs, dy)
    for i in range(len(inputs["x"])):
        one = {n: t[i : i + 1] if n in per_image else t for n, t in inputs.items()}
        found = evaluate(call, one, dy[i : i + 1])
        for name in ("y", *(f"d{n}" for n in per_image)):
            assert same_bits(found[name], whole[name][i : i + 1]), (name, i)


@pytest.mark.backends("cpu", slow=("reference",))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("call", "activation"),
    [
        *(("channels_last", "relu"), ("contiguous", "relu"), ("conv", "relu")),
        *(("channels_last", "leaky_relu_0.25"), ("contiguous", "relu6")),
    ],
)
def test_gradients_depend_on_the_sign_of_the_rounded_pre_activation(
    call, activation, dtype, backend
):
    """p is x times the least number of the dtype: half of it rounds to zero.

    The expected gradients are those of a CPU, which are exact: on a GPU PyTorch rounds partial sums
    of the weight's gradient to the dtype of x.
    """
    eps, channels = torch.finfo(dtype).eps, 16
    least = torch.finfo(dtype).tiny * eps
    values = torch.tensor([0.25, 0.5, 0.5 + eps, 0.75, 1, 1.5, 0, -0.25, -0.5, -0.5 - eps, -1, -2])
    x = values.view(1, 1, 3, 4).expand(2, channels, 3, 4).to(dtype)
    format = torch.contiguous_format if call == "contiguous" else torch.channels_last
    dy = torch.full_like(x, eps * eps / least, memory_format=format)
    norm = torch.full((channels,), least), torch.zeros(channels)
    statistics = torch.zeros(channels), torch.full((channels,), 0.75)

    def gradients(function, device):
        leaves = x.contiguous(memory_format=format), *norm
        leaves = [leaf.to(device).detach().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(function(*leaves), leaves, dy.to(device))

    def fused(x, weight, bias):
        options = {"activation": ACTIVATIONS[activation][0], "training": False, "eps": 0.25}
        if call == "conv":
            options["conv_weight"] = torch.eye(channels, dtype=dtype)[..., None, None]
            return pk.batch_norm_act_conv(x, weight, bias, *statistics, **options)
        return pk.batch_norm_act(x, weight, bias, *statistics, **options)

    def plain(x, weight, bias):
        p = F.batch_norm(x, *(t.cpu() for t in statistics), weight, bias, eps=0.25)
        return ACTIVATIONS[activation][1](p)

    for found, expected in zip(gradients(fused, x.device), gradients(plain, "cpu"), strict=True):
        assert same_bits(found.cpu(), expected)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("slope", [0.0, -0.0])
def test_the_sign_of_a_slope_of_zero_is_that_of_this_call(slope, backend):
    x, activation = torch.randn(2, 4, 5, 6), ("leaky_relu", slope)
    pk.group_norm_act(x, 2, activation=("leaky_relu", -slope))  # what passes once is remembered
    expected = F.leaky_relu(F.group_norm(x, 2), slope)
    assert torch.equal(pk.group_norm_act(x, 2, activation=activation).signbit(), expected.signbit())
