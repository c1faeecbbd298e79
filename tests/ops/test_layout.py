"""Any strides in, and out the memory format that PyTorch gives."""

from functools import partial

import pytest
import torch

import preact_kernels as pk
from tests.cases import (
    ConvCase,
    batch_norm_inputs,
    conv_inputs,
    plain_bn_relu,
    plain_bn_relu_conv2d,
    random_block,
    random_stage,
)
from tests.oracle import assert_same_bits, evaluate, plain_copy, same_bits

pytestmark = pytest.mark.backends("cpu")  # strides are dealt with above the backends

SHAPE = (3, 16, 6, 5)
CASE = ConvCase("typical", SHAPE, 16, padding=1, conv_bias=True, residual=True)


def widened(t, axis):
    """Every other element along an axis of a larger tensor: no dimension is dense."""
    larger = torch.full([n * 2 if i == axis else n for i, n in enumerate(t.shape)], torch.nan)
    larger = larger.to(t)
    larger.movedim(axis, 0)[::2] = t.movedim(axis, 0)
    return larger.movedim(axis, 0)[::2].movedim(0, axis)


# Each gives a tensor of the same values with other strides.
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed_image": lambda t: t.mT.contiguous().mT,
    "batch_innermost": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "every_other_image": lambda t: widened(t, 0),
    "every_other_channel": lambda t: widened(t, 1),
    "every_other_row": lambda t: widened(t, 2),
    "every_other_column": lambda t: widened(t, 3),
    "channels_last_slice_of_channels": lambda t: torch.cat([t, t.neg()], 1).contiguous(
        memory_format=torch.channels_last
    )[:, : t.shape[1]],
    "channels_last_slice_of_rows": lambda t: torch.cat([t.neg(), t], 2).contiguous(
        memory_format=torch.channels_last
    )[:, :, t.shape[2] :],
    "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "contiguous_copy_of_a_channels_last_view": lambda t: (
        t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    ),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

EXPANDED = {
    "one_number": lambda t: t[:1, :1, :1, :1].expand(t.shape),
    "one_image": lambda t: t[:1].expand(t.shape),
    "one_channel": lambda t: t[:, :1].expand(t.shape),
    "one_row": lambda t: t[:, :, :1].expand(t.shape),
    "one_pixel": lambda t: t[:, :, :1, :1].expand(t.shape),
    "channels_last_one_image": lambda t: (
        t[:1].contiguous(memory_format=torch.channels_last).expand(t.shape)
    ),
}

OPS = {
    "bn_relu": (
        partial(pk.bn_relu, training=True),
        partial(plain_bn_relu, training=True),
        partial(batch_norm_inputs, SHAPE),
    ),
    "bn_relu_conv2d": (
        partial(pk.bn_relu_conv2d, training=True, **CASE.conv),
        partial(plain_bn_relu_conv2d, training=True, **CASE.conv),
        partial(conv_inputs, CASE),
    ),
    "residual_add": (
        pk.residual_add,
        torch.add,
        lambda: {"x": torch.randn(SHAPE), "branch": torch.randn(SHAPE)},
    ),
}
every_op = pytest.mark.parametrize(("fused", "plain", "inputs"), OPS.values(), ids=OPS)


def with_layout(function, layout, names):
    """`function` of inputs laid out anew within it, so that gradients come back in place."""

    def called(**inputs):
        laid_out = {n: layout(t) if n in names and t is not None else t for n, t in inputs.items()}
        for name in laid_out:
            if name in names and laid_out[name] is not None:
                assert same_bits(laid_out[name], inputs[name])
        return function(**laid_out)

    return called


@pytest.mark.covering(1)
@every_op
@every_layout
def test_strides_of_the_inputs_change_no_bit(layout, fused, plain, inputs, backend):
    inputs = inputs()
    expected = evaluate(fused, inputs)
    for name in ("x", "residual", "branch"):
        if inputs.get(name) is not None:
            assert_same_bits(evaluate(with_layout(fused, layout, [name]), inputs), expected)


@pytest.mark.backends("cpu", "triton", "cuda")  # whose kernels read weights of any strides
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("name", ["channels_last", "transposed_image", "every_other_channel"])
def test_strides_of_the_weight_change_no_bit(name, kernel, backend):
    case = CASE._replace(kernel=kernel, padding=kernel // 2)
    inputs, call = conv_inputs(case), partial(pk.bn_relu_conv2d, training=True, **case.conv)
    expected = evaluate(call, inputs)
    assert_same_bits(evaluate(with_layout(call, LAYOUTS[name], ["conv_weight"]), inputs), expected)


@pytest.mark.covering(1)
@every_op
@pytest.mark.parametrize("layout", (LAYOUTS | EXPANDED).values(), ids=LAYOUTS | EXPANDED)
def test_strides_of_the_incoming_gradient_change_no_bit(layout, fused, plain, inputs, backend):
    inputs = inputs()
    expected = evaluate(fused, inputs, lay_out=lambda dy: layout(dy).contiguous())
    assert_same_bits(evaluate(fused, inputs, lay_out=layout), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", ["store", "checkpoint"])
@pytest.mark.parametrize("layout", (LAYOUTS | EXPANDED).values(), ids=LAYOUTS | EXPANDED)
def test_strides_around_a_stage_change_no_bit(layout, memory, backend):
    stage, inputs = random_stage(memory=memory), {"x": torch.randn(3, 10, 7, 6)}
    expected = evaluate(stage, inputs, lay_out=lambda dy: layout(dy).contiguous())
    assert_same_bits(evaluate(stage, inputs, lay_out=layout), expected)
    x = layout(inputs["x"])
    assert_same_bits({"y": stage(x)}, {"y": stage(x.contiguous())})


@pytest.mark.covering(1)
@every_op
@pytest.mark.parametrize("layout", EXPANDED.values(), ids=EXPANDED)
def test_expanded_inputs_are_read_as_their_copies(layout, fused, plain, inputs, backend):
    inputs = inputs()
    x = layout(inputs.pop("x"))
    y = fused(x=x, **{n: None if t is None else t.clone() for n, t in inputs.items()})
    assert_same_bits({"y": y}, {"y": fused(x=x.contiguous(), **inputs)})


def test_expanded_residuals_are_read_as_their_copies(backend):
    inputs = conv_inputs(CASE)
    residual = EXPANDED["one_pixel"](inputs.pop("residual"))
    call = partial(pk.bn_relu_conv2d, training=False, **CASE.conv, **inputs)
    assert same_bits(call(residual=residual), call(residual=residual.contiguous()))


def memory_formats(t):
    """Several where dimensions of size one leave it open."""
    formats = torch.contiguous_format, torch.channels_last
    return [f for f in formats if t.is_contiguous(memory_format=f)]


SIZES = [
    SHAPE,
    (3, 16, 1, 1),
    (1, 16, 6, 5),
    (3, 1, 6, 5),
    (1, 1, 1, 1),
    (3, 16, 1, 5),
    (2, 1, 1, 4),
]
both_formats = pytest.mark.parametrize("format", ["contiguous", "channels_last"])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS[name]
        for name in (
            "contiguous",
            "channels_last",
            "transposed_image",
            "batch_innermost",
            "every_other_channel",
            "channels_last_slice_of_channels",
        )
    ],
)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))
def test_bn_relu_returns_the_memory_format_of_eager(size, layout, backend):
    inputs = batch_norm_inputs(size)
    inputs["x"] = layout(inputs["x"])
    y = pk.bn_relu(**inputs, training=False)
    assert memory_formats(y) == memory_formats(plain_bn_relu(**inputs, training=False))


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS[n]
        for n in ("contiguous", "channels_last", "transposed_image", "every_other_channel")
    ],
)
@both_formats
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))
def test_bn_relu_conv2d_returns_the_memory_format_of_eager(size, kernel, format, layout, backend):
    inputs = conv_inputs(ConvCase("", size, 8, kernel, padding=kernel // 2))
    inputs |= {
        "x": layout(inputs["x"]),
        "conv_weight": LAYOUTS[format](inputs["conv_weight"]),
        "training": False,
        "padding": kernel // 2,
    }
    y, expected = pk.bn_relu_conv2d(**inputs), plain_bn_relu_conv2d(**inputs)
    assert memory_formats(y) == memory_formats(expected)


@both_formats
@pytest.mark.parametrize("module", [random_block, random_stage])
def test_blocks_and_stages_return_the_memory_format_of_eager(module, format, backend):
    module = module("basic", 10, 12) if module is random_block else module()
    x = LAYOUTS[format](torch.randn(3, 10, 7, 6))
    assert memory_formats(module(x)) == memory_formats(plain_copy(module)(x))


@every_op
@both_formats
def test_gradients_have_the_memory_format_of_eager(format, fused, plain, inputs, backend):
    inputs = {n: t for n, t in inputs().items() if t is not None}
    found = []
    for function in (fused, plain):
        leaves = {
            n: LAYOUTS[format](t).clone().requires_grad_() if t.dim() == 4 else t.clone()
            for n, t in inputs.items()
        }
        y = function(*leaves.values()) if function is torch.add else function(**leaves)
        y.backward(torch.randn_like(y))
        found.append({n: memory_formats(t.grad) for n, t in leaves.items() if t.requires_grad})
    assert found[0] == found[1]


def test_inputs_and_incoming_gradients_are_left_as_they_were(backend):
    inputs = {n: t.clone() for n, t in conv_inputs(CASE).items()}
    before = {n: t.clone() for n, t in inputs.items()}
    for t in inputs.values():
        t.requires_grad_("running" not in "".join(n for n, v in inputs.items() if v is t))
    y = pk.bn_relu_conv2d(**inputs, training=True, **CASE.conv)
    dy = torch.randn_like(y)
    dy_before = dy.clone()
    y.backward(dy)
    names = [n for n in inputs if "running" not in n]
    assert_same_bits({n: inputs[n].detach() for n in names}, {n: before[n] for n in names})
    assert same_bits(dy, dy_before)
