"""Tests of the Triton kernels for any activation, and for norms with a row for each image."""

import pytest
import torch

import preact_kernels as pk
from tests.cases import device_of, gradient_on_gpu, served_by_vectors, unit_of
from tests.oracle import assert_same_bits, unit_roundoff

if "triton" not in pk.available_backends():
    pytest.skip("neither a GPU nor the interpreter of Triton", allow_module_level=True)

from preact_kernels.kernels import reference
from preact_kernels.kernels import triton as kernels
from preact_kernels.kernels.contract import (
    ACTIVATIONS,
    Activation,
    AffineStep,
    Conv,
    Gradient,
    Inputs,
    Norm,
    Wanted,
)
from preact_kernels.kernels.reference.activations import activate, activation_gradient
from tests.kernels.compile_triton import replace

PARAMETERS = {"leaky_relu": 0.2, "elu": 1.3, "softplus": 1.5}
CHANNELS_LAST = torch.channels_last
inf, nan = torch.inf, torch.nan


@pytest.fixture(autouse=True)
def on_triton(poisoned_memory):
    with torch.device(device_of("triton")):
        yield


def activation_named(name):
    return Activation(name, PARAMETERS.get(name, 0.0))


def unit_norm(activation):
    """A norm that leaves p = x, with the sign of zero."""
    zero, one = torch.zeros(1), torch.ones(1)
    return Norm(zero, one, one, -zero, 0.0, *activation)


def value_and_gradient(p, activation):
    """act(p) and act'(p) by the Triton kernels."""
    x, norm = p.view(1, 1, -1, 1), unit_norm(activation)
    g, _ = kernels.norm_act_backward(torch.ones_like(x), x, norm, with_g=True)
    return kernels.norm_act_forward(x, norm).flatten(), g.flatten()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_accurate_to_a_few_units_in_the_last_place(name):
    activation = activation_named(name)
    check_special_values(activation)
    small = torch.logspace(-30, 0, 500)
    p = torch.cat([torch.linspace(-30, 30, 3000), torch.randn(1500), small, -small])
    p = p[(p != 0) & ((p.abs() - 3).abs() > 1e-5)]  # kinks of relu and hardswish
    wide = p.double()
    truths = (
        activate(wide, activation),
        activation_gradient(torch.ones_like(wide), wide, activation),
    )
    # gelu of a negative p is a difference of numbers near p.
    scales = wide.abs().clamp(max=1), torch.ones_like(wide)
    for found, truth, scale in zip(value_and_gradient(p, activation), truths, scales, strict=True):
        error = (found - truth).abs() / torch.maximum(truth.abs(), scale)
        assert error.max() <= 8 * unit_roundoff(torch.float32)


def check_special_values(activation):
    """NaN, infinities, kinks and zeros give what PyTorch gives."""
    special = [0.0, 1e-40, 3.0, 6.0, 13.0, 20.0, 88.5, 89.0, 104.0, 1e4, 1e20, 3e38, inf]
    special = served_by_vectors(activation.name, [*special, *(-v for v in special), nan, 1.0])
    # Repeated: the end of a vector is not computed as the rest is by PyTorch on a CPU.
    p = torch.tensor(special).repeat(64)
    expected = activate(p, activation), gradient_on_gpu(torch.ones_like(p), p, activation)
    for found, plain in zip(value_and_gradient(p, activation), expected, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6, equal_nan=True)
    zeros = torch.tensor([0.0, -0.0]).repeat(32)
    found, _ = value_and_gradient(zeros, activation)
    # PyTorch's gelu of -0.0 on a CPU is 0.0, and -0.0 on a GPU; its relu6 the other way round.
    if activation.name not in ("relu", "gelu", "relu6"):
        assert torch.equal(found.signbit(), activate(zeros, activation).signbit())


def image_like(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).contiguous(memory_format=CHANNELS_LAST)


def norm_with(rows, images, channels, name="silu"):
    """A norm whose mean, variance, weight and bias are `[N, C]` where `rows` says so."""
    mean, var, weight, bias = (
        torch.randn((images, channels) if has_rows else (channels,)) for has_rows in rows
    )
    return Norm(mean, var.exp(), weight, bias, 1e-5, *activation_named(name))


def results(k, x, dy, skip, norm):
    """The results of all functions of a backend that take a norm, by name."""
    y = k.norm_act_forward(x, norm)
    g, sums = k.norm_act_backward(dy, x, norm, True)
    none, same_sums = k.norm_act_backward(dy, x, norm, False)
    assert none is None
    found = {"y": y, "g": g, "sums": sums, "sums without g": same_sums}
    generator = torch.Generator().manual_seed(2)
    pooled = torch.randn(sums.shape, generator=generator, device="cpu").to(sums)
    step = AffineStep(None, x, norm, pooled, 0.3)
    for name, known in {
        "": step,
        " with skip": step._replace(skip=skip),
        " in evaluation mode": step._replace(inv_count=0.0),
    }.items():
        found[f"dx{name}"] = k.norm_input_gradient(Gradient(dy, known))
    plain = step._replace(norm=norm._replace(bias=None))
    assert torch.equal(k.norm_input_gradient(Gradient(dy, plain)), found["dx"])
    for inv_count in (0.3, 0.0):
        known = step._replace(inv_count=inv_count)
        found[f"dx of dy {inv_count}"] = k.norm_input_gradient(Gradient(dy, known), True)
    return found


def in_dtype(tensors, dtype):
    return [t.to(dtype) for t in tensors]


@pytest.mark.parametrize(
    ("shape", "rows", "name", "dtype"),
    [
        ((3, 10, 7, 5), (1, 1, 0, 0), "silu", torch.float32),  # group norm
        ((2, 128, 9, 16), (1, 1, 1, 1), "silu", torch.bfloat16),  # several programs an image
        ((2, 17, 11, 3), (0, 0, 0, 1), "relu", torch.float32),  # batch norm with a shift
        ((2, 17, 11, 3), (0, 1, 1, 0), "mish", torch.float16),
        ((5, 3, 1, 1), (1, 0, 1, 1), "relu", torch.float32),
        ((2, 130, 4, 3), (0, 0, 0, 0), "leaky_relu", torch.float32),
        ((2, 16, 9, 16), (0, 0, 0, 0), "gelu", torch.bfloat16),
    ],
)
def test_any_activation_and_rows_keep_the_budget(shape, rows, name, dtype):
    tensors = [image_like(*shape, dtype=dtype) for _ in range(3)]
    norm = norm_with(rows, *shape[:2], name)
    truth_norm = Norm(*in_dtype(norm[:4], torch.double), *norm[4:])
    truth = results(reference, *in_dtype(tensors, torch.double), truth_norm)
    eager = [results(reference, *tensors, norm)]
    flipped = results(reference, *(t.flip(2) for t in tensors), norm)
    eager.append({n: t.flip(2) if t.dim() == 4 else t for n, t in flipped.items()})
    for key, found in results(kernels, *tensors, norm).items():
        assert found.dtype == eager[0][key].dtype
        assert found.shape == truth[key].shape
        assert found.dim() != 4 or found.is_contiguous(memory_format=CHANNELS_LAST)
        for i in range(2) if "sums" in key else (...,):
            exact = truth[key][i]
            error, *allowed = (
                (t.double() - exact).norm() for t in (found[i], *(e[key][i] for e in eager))
            )
            rounding = unit_roundoff(found.dtype) * exact.norm()
            assert error <= 2 * max(allowed) + rounding, key


@pytest.mark.parametrize("rows", [(0, 0, 0, 0), (1, 1, 1, 1)])
def test_pixels_beyond_an_image_take_no_part_in_sums(rows):
    """There, and only there, p is so large that its gradient is not a number."""
    size = (2, 3) if any(rows) else (3,)
    mean, one = torch.full(size, 1e20), torch.ones(size)
    norm = Norm(mean, one, one, one, 0.0, "gelu_tanh")
    x, dy = torch.full((2, 3, 5, 1), 1e20), image_like(2, 3, 5, 1)
    g, sums = kernels.norm_act_backward(dy, x.contiguous(memory_format=CHANNELS_LAST), norm, True)
    torch.testing.assert_close(sums[0], g.sum((2, 3) if any(rows) else (0, 2, 3)))


def of_images(images, x, dy, skip, norm):
    """All results for some of the images, and their statistics."""
    x, dy, skip = (t[images].contiguous(memory_format=CHANNELS_LAST) for t in (x, dy, skip))
    own = Norm(*(t[images].contiguous() for t in norm[:4]), *norm[4:])
    step = AffineStep(skip, x, own, torch.stack([own.mean, own.bias]), 0.3)
    g, sums = kernels.norm_act_backward(dy, x, own, True)
    return {
        "y": kernels.norm_act_forward(x, own),
        "g": g,
        "sums": sums.transpose(0, 1),
        "dx": kernels.norm_input_gradient(Gradient(dy, step)),
        **kernels.group_stats(x, 2)._asdict(),
    }


@pytest.mark.parametrize("shape", [(3, 34, 13, 15), (2, 128, 3, 70)])
def test_an_image_has_the_same_bits_alone_and_beside_nan(shape):
    images = shape[0]
    tensors = [image_like(*shape) for _ in range(3)]
    norm = norm_with((1, 1, 1, 1), images, shape[1])
    expected = of_images(slice(images), *tensors, norm)
    alone = of_images(slice(1, 2), *tensors, norm)
    for t in tensors:
        t[0] = nan
    for t in norm[:4]:
        t[0] = inf
    spoiled = of_images(slice(images), *tensors, norm)
    assert_same_bits(alone, {n: t[1:2] for n, t in expected.items()})
    assert_same_bits(
        {n: t[1:] for n, t in spoiled.items()}, {n: t[1:] for n, t in expected.items()}
    )


def test_wide_addresses_change_no_bit_of_images(monkeypatch):
    tensors, norm = [image_like(2, 10, 9, 17) for _ in range(3)], norm_with((1, 1, 0, 1), 2, 10)
    expected = results(kernels, *tensors, norm), kernels.group_stats(tensors[0], 5)
    replace(monkeypatch, "needs_int64", lambda *_: True)
    assert_same_bits(results(kernels, *tensors, norm), expected[0])
    assert_same_bits(kernels.group_stats(tensors[0], 5)._asdict(), expected[1]._asdict())


@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 12, 9, 5), 4), ((2, 130, 3, 41), 1), ((3, 17, 1, 1), 1)]
)
@pytest.mark.parametrize("mean", [0, 1000])
def test_statistics_of_groups(shape, groups, mean):
    x = (image_like(*shape) + mean).contiguous(memory_format=CHANNELS_LAST)
    found, truth = kernels.group_stats(x, groups), reference.group_stats(x.double(), groups)
    assert found.mean.shape == found.var.shape == shape[:2]
    largest = unit_roundoff(torch.float32) * truth.mean.abs()
    assert ((found.mean - truth.mean).abs() <= largest + 1e-7).all()
    torch.testing.assert_close(found.var.double(), truth.var, rtol=4e-7, atol=0)


@pytest.mark.parametrize("value", [0.1, -1e4, 1e30, 1e-40])
def test_the_statistics_of_a_constant_group_are_exact(value):
    x = image_like(2, 6, 33, 41)
    x[1, 2:4] = value
    mean, var = kernels.group_stats(x, 3)
    assert (mean[1, 2:4] == value).all()
    assert (var[1, 2:4] == 0).all()
    assert (var[1, 4:] > 0.5).all()


def test_a_layer_norm_of_images_is_right():
    """The pooled sums of a step are the same for all channels."""

    def gradients(backend):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with pk.use_backend(backend):
            y = pk.group_norm_act(inputs[0], 1, inputs[1], activation="silu")
        return dict(zip(("x", "weight"), torch.autograd.grad(y, inputs, dy), strict=True))

    x, dy, weight = torch.randn(2, 10, 5, 7), torch.randn(2, 10, 5, 7), torch.randn(10)
    torch.testing.assert_close(gradients("triton"), gradients("reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["leaky_relu", "identity"])
@pytest.mark.parametrize(("kernel", "in_one_pass"), [(1, True), (3, False)])
def test_fused_convolutions_of_other_activations(name, kernel, in_one_pass, monkeypatch):
    replace(monkeypatch, "costs_less_apart", lambda *_: not in_one_pass)
    activation = activation_named(name)
    weight = torch.randn(20, 10, kernel, kernel)
    geometry = Conv((1, 1), (kernel // 2, kernel // 2), (1, 1), 1)
    unit = unit_of(weight, geometry, torch.float32)._replace(activation=activation)
    assert kernels.serves(unit)
    assert not kernels.serves(unit._replace(activation=Activation("silu")))
    assert not kernels.serves(unit._replace(has_rows=True))
    x, dy = image_like(2, 10, 9, 5), image_like(2, 20, 9, 5)
    inputs = Inputs(x, norm_with((0, 0, 0, 0), 2, 10, name), weight)

    def results_of(k, unit, inputs, dy):
        gradients = k.norm_act_conv_backward(unit, Gradient(dy), inputs, Wanted(True, True))
        return {"y": k.norm_act_conv_forward(unit, inputs).y, **gradients._asdict()}

    wide = Inputs(
        x.double(),
        Norm(*in_dtype(inputs.norm[:4], torch.double), *inputs.norm[4:]),
        weight.double(),
    )
    truth = results_of(
        reference,
        unit_of(wide.conv_weight, geometry, torch.double)._replace(activation=activation),
        wide,
        dy.double(),
    )
    eager = results_of(reference, unit, inputs, dy)
    for key, found in results_of(kernels, unit, inputs, dy).items():
        if found is not None:
            error, allowed = ((t.double() - truth[key]).norm() for t in (found, eager[key]))
            rounding = unit_roundoff(found.dtype) * truth[key].norm()
            assert error <= 2 * allowed + rounding, key


def test_nan_stays_in_its_group():
    x = image_like(2, 6, 5, 7)
    expected = kernels.group_stats(x, 3)
    x[1, 3, 2, 2] = nan
    is_spoiled = torch.zeros(2, 6, dtype=torch.bool)
    is_spoiled[1, 2:4] = True
    for found, plain in zip(kernels.group_stats(x, 3), expected, strict=True):
        assert torch.equal(found.isnan(), is_spoiled)
        assert torch.equal(found[~is_spoiled], plain[~is_spoiled])
