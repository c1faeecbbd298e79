"""Any strides in, and out the memory format that PyTorch gives."""

import itertools
from functools import partial

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import layout as layout_of
from tests.cases import (
    ConvCase,
    NormCase,
    NormConvCase,
    batch_norm_inputs,
    conv_inputs,
    norm_conv_inputs,
    norm_inputs,
    plain_bn_relu,
    plain_bn_relu_conv2d,
    plain_norm_act,
    random_stage,
)
from tests.oracle import assert_same_bits, evaluate, plain_copy, same_bits

pytestmark = pytest.mark.backends("cpu")  # strides are dealt with above the backends

SHAPE = (3, 16, 6, 5)
CASE = ConvCase("typical", SHAPE, 16, padding=1, conv_bias=True, residual=True)
GROUPS = NormConvCase(NormCase(SHAPE, 4), 16, conv_bias=True, residual=True)


def channels_last(t):
    return t.contiguous(memory_format=torch.channels_last)


def with_gaps(t, axis):
    """Every other element along an axis of a larger tensor: no dimension is dense."""
    larger = torch.full([n * 2 if i == axis else n for i, n in enumerate(t.shape)], torch.nan)
    larger = larger.to(t)
    larger.movedim(axis, 0)[::2] = t.movedim(axis, 0)
    return larger.movedim(axis, 0)[::2].movedim(0, axis)


# Each gives a tensor of the same values with other strides.
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": channels_last,
    "transposed_image": lambda t: t.mT.contiguous().mT,
    "batch_innermost": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "every_other_channel": lambda t: with_gaps(t, 1),
    "every_other_column": lambda t: with_gaps(t, 3),
    "channels_last_slice_of_channels": lambda t: channels_last(torch.cat([t, t.neg()], 1))[
        :, : t.shape[1]
    ],
    "channels_last_slice_of_rows": lambda t: channels_last(torch.cat([t.neg(), t], 2))[
        :, :, t.shape[2] :
    ],
    "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}
EXPANDED = {
    "one_number": lambda t: t[:1, :1, :1, :1].expand(t.shape),
    "one_channel": lambda t: t[:, :1].expand(t.shape),
    "one_pixel": lambda t: t[:, :, :1, :1].expand(t.shape),
    "channels_last_one_image": lambda t: channels_last(t[:1]).expand(t.shape),
}
every_layout = pytest.mark.parametrize(
    "layout", (LAYOUTS | EXPANDED).values(), ids=LAYOUTS | EXPANDED
)

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
    "group_norm_act": (
        partial(GROUPS.norm.norm_act, activation="silu"),
        partial(plain_norm_act, activation="silu", **GROUPS.norm.norm),
        partial(norm_inputs, GROUPS.norm, modulation=("scale", "shift")),
    ),
    "group_norm_act_conv": (
        partial(GROUPS.fused, activation="silu"),
        partial(GROUPS.plain, activation="silu"),
        partial(norm_conv_inputs, GROUPS),
    ),
    "residual_add": (
        pk.residual_add,
        lambda x, branch: x + branch,
        lambda: {"x": torch.randn(SHAPE), "branch": torch.randn(SHAPE)},
    ),
}
every_op = pytest.mark.parametrize(("fused", "plain", "inputs"), OPS.values(), ids=OPS)


def with_layout(function, layout, name):
    """`function` of an input laid out anew within it, so that its gradient comes back in place."""
    return lambda **inputs: function(**inputs | {name: layout(inputs[name])})


def densely(t):
    """`t` without gaps, in the memory format that PyTorch gives results of it."""
    return channels_last(t) if layout_of.is_channels_last(t) else t.contiguous()


@every_op
@every_layout
@pytest.mark.covering(1)
def test_strides_of_the_inputs_change_no_bit(layout, fused, plain, inputs, backend):
    inputs = inputs()
    for name in {"x", "residual", "branch"} & inputs.keys():
        # Sums over NCHW and over NHWC may differ in their last bits.
        dense = with_layout(fused, lambda t: densely(layout(t)), name)
        strided = with_layout(fused, layout, name)
        assert_same_bits(evaluate(strided, inputs), evaluate(dense, inputs))


@pytest.mark.backends("cpu", "triton", "cuda")  # whose kernels read weights of any strides
@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("name", ["channels_last", "every_other_channel"])
def test_strides_of_the_weight_change_no_bit(name, kernel, backend):
    case = CASE._replace(x=(1, 16, 3, 4), kernel=kernel, padding=kernel // 2)
    inputs, call = conv_inputs(case), partial(pk.bn_relu_conv2d, training=True, **case.conv)
    expected = evaluate(call, inputs)
    assert_same_bits(evaluate(with_layout(call, LAYOUTS[name], "conv_weight"), inputs), expected)


@pytest.mark.covering(1)
@every_op
@every_layout
def test_strides_of_the_incoming_gradient_change_no_bit(layout, fused, plain, inputs, backend):
    inputs = inputs()
    expected = evaluate(fused, inputs, lay_out=lambda dy: layout(dy).contiguous())
    assert_same_bits(evaluate(fused, inputs, lay_out=layout), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", ["store", "checkpoint"])
@every_layout
def test_strides_around_a_stage_change_no_bit(layout, memory, backend):
    stage, inputs = random_stage("basic", memory=memory), {"x": torch.randn(3, 10, 7, 6)}
    expected = evaluate(stage, inputs, lay_out=lambda dy: layout(dy).contiguous())
    assert_same_bits(evaluate(stage, inputs, lay_out=layout), expected)
    x = layout(inputs["x"])
    assert_same_bits({"y": stage(x)}, {"y": stage(x.contiguous())})


def memory_formats(t):
    """Several where dimensions of size one leave it open."""
    formats = torch.contiguous_format, torch.channels_last
    return [f for f in formats if t.is_contiguous(memory_format=f)]


both_formats = pytest.mark.parametrize("format", ["contiguous", "channels_last"])


def strides(t):
    """The strides of the axes of more than one element."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


OTHER_LAYOUTS = {
    **LAYOUTS,
    "channels_last_3d": lambda t: (
        t.contiguous(memory_format=torch.channels_last_3d) if t.dim() == 5 else t
    ),
}
SIZES = (SHAPE, (3, 16, 1, 1), (1, 16, 6, 5), (3, 1, 6, 5), (4, 16), (3, 16, 7), (3, 16, 1))
SIZES += ((2, 16, 3, 4, 5), (2, 16, 1, 1, 1), (2, 1, 3, 4, 5))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_of_any_norm_have_the_strides_of_eager(size, backend):
    modulations = (), ("scale", "shift")
    for num_groups, name, modulation in itertools.product((1, None), OTHER_LAYOUTS, modulations):
        case = NormConvCase(NormCase(size, num_groups), 8)
        if len(size) != 4 and name not in ("contiguous", "channels_last_3d"):
            continue
        inputs = norm_inputs(case.norm, modulation=modulation)
        inputs["x"] = OTHER_LAYOUTS[name](inputs["x"])
        y = case.norm.norm_act(**inputs, activation="silu")
        expected = plain_norm_act(**inputs, **case.norm.norm, activation="silu")
        assert strides(y) == strides(expected), (name, modulation)
        if len(size) == 2:
            continue
        weight = torch.randn(8, size[1], *case.kernel_size)
        for format in ("contiguous", "channels_last", "channels_last_3d"):
            if (format, len(size)) in (("channels_last", 3), ("channels_last", 5)):
                continue
            inputs["conv_weight"] = OTHER_LAYOUTS[format](weight)
            y, expected = case.fused(**inputs), case.plain(**inputs)
            assert strides(y) == strides(expected), (name, modulation, format)


@both_formats
@pytest.mark.parametrize("weights", ["contiguous_format", "channels_last"])
def test_a_stage_returns_the_memory_format_of_eager(weights, format, backend):
    stage = random_stage("basic").to(memory_format=getattr(torch, weights))
    x = LAYOUTS[format](torch.randn(3, 10, 7, 6))
    assert memory_formats(stage(x)) == memory_formats(plain_copy(stage)(x))


@every_op
@both_formats
def test_results_have_the_memory_format_of_eager(format, fused, plain, inputs, backend):
    inputs = {n: t for n, t in inputs().items() if t is not None}
    found = []
    for function in (fused, plain):
        leaves = {
            n: LAYOUTS[format](t).clone().requires_grad_() if t.dim() == 4 else t.clone()
            for n, t in inputs.items()
        }
        y = function(**leaves)
        y.backward(torch.randn_like(y))
        results = {n: t.grad for n, t in leaves.items() if t.requires_grad} | {"y": y}
        found.append({n: memory_formats(t) for n, t in results.items()})
    assert found[0] == found[1]


def test_inputs_and_incoming_gradients_are_left_as_they_were(backend):
    inputs = {
        n: t.clone().requires_grad_(not n.startswith("running"))
        for n, t in conv_inputs(CASE).items()
    }
    before = {n: t.detach().clone() for n, t in inputs.items() if t.requires_grad}
    y = pk.bn_relu_conv2d(**inputs, training=True, **CASE.conv)
    dy = torch.randn_like(y)
    dy_before = dy.clone()
    y.backward(dy)
    assert_same_bits({n: inputs[n].detach() for n in before}, before)
    assert same_bits(dy, dy_before)
