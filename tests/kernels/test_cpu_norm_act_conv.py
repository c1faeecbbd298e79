"""The fused convolutions of the CPU library with any activation and norms with rows."""

import pytest
import torch

from preact_kernels.activations import DEFAULTS, Activation
from preact_kernels.kernels import cpu, reference
from preact_kernels.kernels.contract import (
    AffineStep,
    Conv,
    Epilogue,
    Gradient,
    Inputs,
    Norm,
    Wanted,
)
from tests.cases import INF, NAN, unit_of
from tests.oracle import same_bits, unit_roundoff

pytestmark = [
    pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"),
    pytest.mark.usefixtures("poisoned_memory"),
]

# [N, C, H, W], K, kernel, stride. A strip has two of nine small images. The last two are
# weight-stationary.
CONVS = {
    "3x3, strips of whole images": ((9, 16, 6, 7), 32, 3, 1),
    "3x3, strips of an image": ((2, 32, 33, 20), 16, 3, 1),
    "3x3, minimal filtering": ((9, 64, 4, 6), 48, 3, 1),
    "3x3, stride 2": ((9, 16, 9, 10), 48, 3, 2),
    "5x3": ((2, 16, 5, 8), 16, (5, 3), 1),
    "1x1": ((3, 48, 19, 17), 16, 1, 1),
    "1x1, few pixels": ((5, 16, 1, 3), 32, 1, 1),
    "1x1, stride 2": ((2, 32, 9, 8), 16, 1, 2),
    "3x3, large weight": ((3, 128, 5, 4), 96, 3, 1),
    "1x1, large weight": ((3, 352, 5, 4), 352, 1, 1),
}
# Whether statistics, weight and bias have rows.
F, T = False, True
ROWS = (F, F, F), (T, T, T), (T, F, F), (F, T, T)
DTYPES = torch.float32, torch.bfloat16, torch.float16
ACTIVATIONS_TAKEN = (
    *(Activation("relu"), Activation("silu"), Activation("leaky_relu", 0.2), Activation("gelu")),
    Activation("elu", 1.0),
)


def nhwc(t):
    return t.contiguous(memory_format=torch.channels_last)


def problem(conv, dtype, activation, rows):
    """A unit, its inputs, and an epilogue."""
    shape, out_channels, kernel, stride = conv
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    x = nhwc(torch.randn(shape) + 0.5).to(dtype)
    tables = [torch.rand(shape[:2] if r else shape[1:2]) + 0.5 for r in (rows[0], *rows)]
    weight = (
        torch.randn(out_channels, shape[1], *kernel) / (shape[1] * kernel[0] * kernel[1]) ** 0.5
    ).to(dtype)
    padding = kernel[0] // 2, kernel[1] // 2
    unit = unit_of(weight, Conv((stride, stride), padding, (1, 1), 1))
    unit = unit._replace(activation=activation, has_rows=any(rows))
    return unit, Inputs(x, Norm(*tables, 1e-3, *activation), weight)


def in_double(t):
    if isinstance(t, torch.Tensor):
        return t.double()
    if isinstance(t, tuple):
        values = [in_double(v) for v in t]
        return type(t)(*values) if hasattr(t, "_fields") else tuple(values)
    return torch.float64 if isinstance(t, torch.dtype) else t


def assert_near(ours, truth, *, roundings=1):
    """Within a few roundings of the type, and those of sums in float32."""
    assert ours.shape == truth.shape
    u = roundings * unit_roundoff(ours.dtype) + 64 * unit_roundoff(torch.float32)
    assert (ours.double() - truth).norm() <= u * truth.norm()


@pytest.mark.parametrize("conv", CONVS.values(), ids=CONVS)
def test_forward_and_backward(conv, monkeypatch):
    """Large weights are fused too, also where PyTorch's convolution is faster."""
    monkeypatch.setattr(cpu.CPUKernels, "_is_faster", lambda *_: True)
    first = [*CONVS.values()].index(conv)  # every pair of a dtype and rows occurs
    for index, rows in enumerate(ROWS, first):
        activation = ACTIVATIONS_TAKEN[index % len(ACTIVATIONS_TAKEN)]
        check_forward_and_backward(conv, rows, activation, DTYPES[index % len(DTYPES)])


def check_forward_and_backward(conv, rows, activation, dtype):
    unit, inputs = problem(conv, dtype, activation, rows)
    kernels = cpu.kernels()
    assert not kernels.refusal(unit, inputs.x.numel() // inputs.x.shape[1])
    true_unit, true_inputs = in_double(unit), in_double(inputs)

    y = kernels.norm_act_conv_forward(unit, inputs).y
    bias, residual = torch.randn(y.shape[1]).to(dtype), nhwc(torch.randn(y.shape)).to(dtype)
    epilogue = Epilogue(bias, residual, True)
    found = kernels.norm_act_conv_forward(unit, inputs, epilogue)
    true = reference.kernels().norm_act_conv_forward(true_unit, true_inputs, in_double(epilogue))
    # p, act(p) and y are rounded.
    assert_near(found.y, true.y, roundings=3)
    of_stored = reference.bn_stats(found.y.double())
    assert_near(found.statistics.mean, of_stored.mean)
    assert_near(found.statistics.var, of_stored.var)

    dy = Gradient(nhwc(torch.randn(y.shape)).to(dtype))
    for step in (None, with_step(dy, rows)):
        dy = step or dy
        wanted = Wanted(True, True, step is not None)
        ours = kernels.norm_act_conv_backward(unit, dy, inputs, wanted)
        truth = reference.kernels().norm_act_conv_backward(
            true_unit, in_double(dy), true_inputs, wanted
        )
        assert_near(ours.g, truth.g, roundings=4)
        assert_near(ours.conv_weight, truth.conv_weight, roundings=4)
        assert ours.sums.shape == truth.sums.shape
        if dtype == torch.float32:  # sums of g as stored
            assert_near(ours.sums, truth.sums)
        if step is not None:
            assert_near(ours.dy, truth.dy)
        else:
            no_weight = kernels.norm_act_conv_backward(unit, dy, inputs, Wanted(True, False))
            no_input = kernels.norm_act_conv_backward(unit, dy, inputs, Wanted(False, True))
            assert same_bits(no_weight.g, ours.g) and same_bits(no_weight.sums, ours.sums)
            assert_near(no_input.conv_weight, truth.conv_weight, roundings=4)


def with_step(dy, rows):
    """The same g with a step whose norm has the rows of the inputs'."""
    g = dy.g
    x, skip = (nhwc(torch.randn(g.shape)).to(g.dtype) for _ in range(2))
    tables = [torch.rand(g.shape[:2] if r else g.shape[1:2]) + 0.5 for r in (rows[0], *rows[:2])]
    norm = Norm(*tables, None, 1e-3)
    sums = torch.randn(2, *(g.shape[:2] if any(rows) else g.shape[1:2]))
    return Gradient(g, AffineStep(skip, x, norm, sums, 0.01))


@pytest.mark.parametrize("conv", [CONVS["3x3, strips of whole images"], CONVS["1x1"]], ids=str)
def test_a_row_depends_on_its_image(conv):
    """Statistics that are not finite spoil their image alone."""
    rows = (True, True, True)
    unit, inputs = problem(conv, torch.float32, Activation("silu"), rows)
    clean = cpu.kernels().norm_act_conv_forward(unit, inputs).y
    inputs.norm.mean[1, 3] = NAN
    inputs.norm.bias[1, 4] = INF
    y = cpu.kernels().norm_act_conv_forward(unit, inputs).y
    assert y[1].isnan().all()
    others = [i for i in range(len(y)) if i != 1]
    assert same_bits(y[others], clean[others])
    dy = Gradient(torch.ones_like(y))
    found = cpu.kernels().norm_act_conv_backward(unit, dy, inputs, Wanted(True, True))
    assert found.g[1, 3].isnan().all() and found.g[others].isfinite().all()
    assert found.sums[:, 1, 3].isnan().all() and found.sums[:, others].isfinite().all()


def test_every_activation_in_the_prologue_and_in_the_input_gradient():
    for activation in DEFAULTS.values():
        for conv in (CONVS["3x3, strips of an image"], CONVS["1x1"]):
            unit, inputs = problem(conv, torch.float32, activation, (True,) * 3)
            true_unit, true_inputs = in_double(unit), in_double(inputs)
            kernels = cpu.kernels()
            y = kernels.norm_act_conv_forward(unit, inputs).y
            assert_near(y, reference.kernels().norm_act_conv_forward(true_unit, true_inputs).y)
            dy, wanted = Gradient(torch.randn_like(y)), Wanted(True, True)
            ours = kernels.norm_act_conv_backward(unit, dy, inputs, wanted)
            truth = reference.kernels().norm_act_conv_backward(
                true_unit, in_double(dy), true_inputs, wanted
            )
            for result, true in zip(ours[:3], truth[:3], strict=True):
                assert_near(result, true)
