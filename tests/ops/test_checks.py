"""Wrong arguments are named, with what was expected and given, before anything is written."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.activations import ACTIVATIONS, Activation
from preact_kernels.kernels.layout import nhwc
from preact_kernels.norms import BatchNorm, GroupNorm, LayerNorm
from preact_kernels.ops import block_arguments, checks
from preact_kernels.ops import dispatch as backends
from preact_kernels.ops.arguments import ConvArguments, ScaleShift, UnitArguments
from preact_kernels.ops.block_arguments import BlockArguments, StageContext, checked_block
from preact_kernels.ops.checks import Passed, described
from preact_kernels.ops.unit import checked_unit
from tests.cases import (
    NAN,
    ConvCase,
    NormCase,
    NormConvCase,
    conv_inputs,
    norm_conv_inputs,
    random_block,
    random_stage,
)
from tests.oracle import assert_same_bits, check, plain_copy

FLOATS = "float32, float64, bfloat16 or float16"
MULTIPLE = "out_channels to be a positive multiple of groups"
PAIR = "an int or a pair of ints"
ACTIVATION = "a name, or a name and its parameter"
ACTIVATION_NAMES = ", ".join(map(repr, ACTIVATIONS))
META = {"device": "meta"}
WITHOUT_STATISTICS = {"running_var": None, "training": False}
X, WEIGHT, META_WEIGHT = torch.ones(2, 8, 5, 6), torch.ones(12, 8, 3, 3), torch.ones(12, **META)

CASE = ConvCase("typical", (2, 8, 5, 6), 12, padding=1, conv_bias=True, residual=True)
GROUPS = NormConvCase(NormCase(CASE.x, 4), 12, conv_bias=True, residual=True)
OF_BATCH = {**conv_inputs(CASE), **CASE.conv, "training": True}
OF_GROUPS = {**norm_conv_inputs(GROUPS), **GROUPS.conv, "num_groups": 4}
OF_NORM = {name: OF_BATCH[f"bn_{name}"] for name in ("weight", "bias")} | {"x": X}
# Valid arguments of each function.
VALID = {
    pk.bn_relu_conv2d: OF_BATCH,
    pk.group_norm_act_conv: OF_GROUPS,
    pk.bn_relu: {n: OF_BATCH[n] for n in ("x", "bn_weight", "bn_bias", "training")},
    pk.batch_norm_act: OF_NORM | {"training": True},
    pk.batch_norm_act_conv: OF_NORM | {"conv_weight": WEIGHT, "training": True},
    pk.group_norm_act: OF_NORM | {"num_groups": 4},
    pk.residual_add: {"x": X, "branch": X},
}


def wrong(function, error, name, value, expected, **others):
    """The case of an argument that is refused, with what the message says is expected."""
    message = f"{name}: expected {expected}"
    change = {name: value, **others}
    return pytest.param(function, change, error, message, id=f"{function.__name__}, {message}")


of_batch, of_groups = partial(wrong, pk.bn_relu_conv2d), partial(wrong, pk.group_norm_act_conv)
WRONG = [
    # The input.
    of_batch(TypeError, "x", [1.0], "a torch.Tensor, got list"),
    of_batch(TypeError, "x", X.long(), f"dtype {FLOATS}, got int64"),
    of_batch(TypeError, "x", X.to_sparse(), "a strided tensor, got layout sparse"),
    of_batch(ValueError, "x", X[0], "4 dimensions [N, C, H, W], got shape [8, 5, 6]"),
    of_batch(ValueError, "x", X[:, :0], "at least 1 channel, got shape [2, 0, 5, 6]"),
    of_batch(
        ValueError,
        "x",
        X[:1, :, :1, :1],
        "more than 1 value per channel when training, got input size torch.Size([1, 8, 1, 1])",
    ),
    of_batch(ValueError, "x", torch.ones(2, 8, 3, 9), "a padded height of at least 9", dilation=4),
    of_groups(ValueError, "x", torch.ones(8), "2 to 5 dimensions [N, C, ...], got shape [8]"),
    of_groups(ValueError, "x", X[..., 0, 0], "3 to 5 dimensions [N, C, ...], got shape [2, 8]"),
    of_groups(ValueError, "x", X[:1, :, :1, :1], "more than 1 value per group", num_groups=8),
    # The norm.
    *(
        of_batch(ValueError, n, torch.ones(7), "shape [8] to match the channels of x, got [7]")
        for n in ("bn_weight", "bn_bias", "running_mean", "running_var")
    ),
    of_batch(ValueError, "bn_weight", torch.ones(8, 1), "shape [8] to match the channels of x"),
    of_batch(TypeError, "bn_bias", 1.0, "a torch.Tensor, got float"),
    of_batch(TypeError, "bn_bias", torch.ones(8).half(), "dtype float32 to match x, got float16"),
    of_batch(ValueError, "bn_bias", torch.ones(8, **META), "device cpu to match x, got meta"),
    of_batch(ValueError, "running_var", torch.ones(1).expand(8), "elements that share no memory"),
    of_batch(ValueError, "running_mean", torch.ones(8, requires_grad=True), "a tensor that req"),
    of_batch(
        ValueError,
        "running_var",
        torch.ones(8, requires_grad=True),
        "a tensor that requires no gradient",
        training=False,
    ),
    of_batch(TypeError, "running_mean", torch.zeros(8).half(), "dtype float32 to match x, got"),
    of_batch(ValueError, "running_var", None, "a tensor, like the other running statistic, got"),
    of_batch(ValueError, "running_mean", None, "a tensor, like the other running statistic, got"),
    of_batch(ValueError, "running_mean", None, "a tensor in evaluation mode", **WITHOUT_STATISTICS),
    of_batch(TypeError, "training", 1, "a bool, got int"),
    of_batch(TypeError, "momentum", None, "a number, got NoneType"),
    of_batch(ValueError, "momentum", NAN, "a number, got nan"),
    of_batch(TypeError, "eps", "1e-5", "a number, got str"),
    of_batch(ValueError, "eps", -1e-5, "at least 0, got -1e-05"),
    of_batch(ValueError, "eps", 0.0, "a positive number when training, got 0"),
    of_groups(ValueError, "eps", -1e-5, "at least 0, got -1e-05"),
    of_groups(ValueError, "weight", torch.ones(4), "shape [8] to match the channels of x, got"),
    of_groups(ValueError, "num_groups", 3, "a divisor of the channels 8 of x, got 3"),
    of_groups(ValueError, "num_groups", 0, "at least 1, got 0"),
    of_groups(TypeError, "num_groups", 4.0, "an int, got float"),
    # The activation, scale and shift, dropout.
    of_groups(ValueError, "activation", "swish", f"one of {ACTIVATION_NAMES}, got 'swish'"),
    of_groups(TypeError, "activation", None, f"{ACTIVATION}, got NoneType"),
    of_groups(TypeError, "activation", ("elu",), f"{ACTIVATION}, got tuple"),
    of_groups(ValueError, "activation", ("silu", 2.0), "no parameter of 'silu', got 2.0"),
    of_groups(TypeError, "activation", ("elu", "1"), "a number, got str"),
    of_groups(ValueError, "activation", ("softplus", 0.0), "a finite number other than 0"),
    *(
        of_groups(ValueError, "scale", t, f"shape [2, 8] or [2, 8, 1, 1] to match x, got {shape}")
        for shape in ([8], [1, 8], [2, 8, 5, 6], [2, 8, 1], [2, 1, 1, 1])
        for t in (torch.ones(shape),)
    ),
    of_groups(TypeError, "scale", 1.0, "a torch.Tensor, got float"),
    of_groups(TypeError, "shift", torch.ones(2, 8).half(), "dtype float32 to match x, got float16"),
    of_groups(ValueError, "scale", torch.ones(2, 8, **META), "device cpu to match x, got meta"),
    of_groups(ValueError, "dropout", 1.5, "a probability in [0, 1], got 1.5"),
    of_groups(ValueError, "dropout", NAN, "a number, got nan"),
    # The convolution.
    of_batch(TypeError, "conv_weight", None, "a torch.Tensor, got NoneType"),
    of_batch(ValueError, "conv_weight", WEIGHT[:, :4], "in_channels 8 to match x, got 4"),
    of_batch(ValueError, "conv_weight", WEIGHT[..., 0, 0], "4 dimensions [out_channels, in"),
    of_batch(TypeError, "conv_weight", WEIGHT.double(), "dtype float32 to match x, got float64"),
    of_batch(ValueError, "conv_weight", META_WEIGHT, "device cpu to match x, got meta"),
    of_batch(ValueError, "conv_weight", WEIGHT[:0], f"{MULTIPLE} 1, got 0"),
    of_batch(ValueError, "conv_weight", WEIGHT[:6, :2], f"{MULTIPLE} 4, got 6", groups=4),
    of_batch(ValueError, "conv_weight", WEIGHT[:, :, :0], "a kernel of at least 1x1, got [0, 3]"),
    of_batch(ValueError, "conv_weight", WEIGHT, "in_channels 8 / 2 groups to match x", groups=2),
    of_batch(ValueError, "groups", 0, "at least 1, got 0"),
    of_batch(TypeError, "groups", 1.0, "an int, got float"),
    of_batch(ValueError, "conv_bias", torch.ones(8), "shape [12] to match conv_weight, got [8]"),
    of_batch(TypeError, "conv_bias", torch.ones(12).half(), "dtype float32 to match conv_weight"),
    of_batch(ValueError, "conv_bias", torch.ones(12, **META), "device cpu to match x, got meta"),
    of_batch(ValueError, "stride", (1, -2), "at least 1, got (1, -2)"),
    of_batch(TypeError, "stride", 1.5, f"{PAIR}, got 1.5"),
    of_batch(TypeError, "stride", (1, 1, 1), f"{PAIR}, got (1, 1, 1)"),
    of_batch(TypeError, "stride", (1.0, 1.0), f"{PAIR}, got (1.0, 1.0)"),
    of_batch(TypeError, "padding", (1, True), f"{PAIR}, got (1, True)"),
    of_batch(ValueError, "dilation", (0, 1), "at least 1, got (0, 1)"),
    of_batch(ValueError, "padding", -1, "at least 0, got -1"),
    of_batch(ValueError, "padding", (1, 2**31), "less than 2**31, got (1, 2147483648)"),
    of_batch(ValueError, "padding", "full", "'valid', 'same', an int or a pair, got 'full'"),
    of_batch(ValueError, "padding", "same", "stride 1 with 'same', got stride [2, 2]", stride=2),
    of_batch(ValueError, "residual", X, "shape [2, 12, 5, 6] to match the output"),
    of_batch(TypeError, "residual", 1.0, "a torch.Tensor, got float"),
    of_batch(ValueError, "residual", META_WEIGHT, "device cpu to match x, got meta"),
    # Other functions with the same checks.
    wrong(pk.bn_relu, ValueError, "x", X[0], "4 dimensions [N, C, H, W], got shape [8, 5, 6]"),
    *(
        wrong(f, ValueError, "weight", torch.ones(4), "shape [8] to match the channels of x, got")
        for f in (pk.batch_norm_act, pk.batch_norm_act_conv, pk.group_norm_act)
    ),
    *(
        wrong(f, ValueError, "activation", "swish", f"one of {ACTIVATION_NAMES}, got 'swish'")
        for f in (pk.batch_norm_act, pk.batch_norm_act_conv, pk.group_norm_act)
    ),
    wrong(pk.batch_norm_act, TypeError, "x", [1.0], "a torch.Tensor, got list"),
    wrong(pk.batch_norm_act, TypeError, "x", X.long(), "dtype float32"),
    wrong(pk.batch_norm_act, ValueError, "shift", torch.ones(8), "shape [2, 8] or [2, 8, 1, 1]"),
    wrong(pk.batch_norm_act_conv, ValueError, "shift", X, "shape [2, 8] or [2, 8, 1, 1]"),
    wrong(pk.batch_norm_act_conv, TypeError, "dropout", None, "a number, got NoneType"),
    wrong(pk.residual_add, TypeError, "x", 1.0, "a torch.Tensor, got float"),
    wrong(pk.residual_add, ValueError, "x", torch.ones(2, 3), "4 dimensions [N, C, H, W]"),
    wrong(pk.residual_add, ValueError, "branch", X[..., :1], "shape [2, 8, 5, 6] to match"),
    wrong(pk.residual_add, ValueError, "branch", X.to("meta"), "device cpu to match x, got meta"),
]


def assert_refused(error, message, function, buffers):
    """The error is of that very type, and the buffers stay as they were."""
    before = {name: t.clone() for name, t in buffers.items()}
    with pytest.raises(error, match=re.escape(message)) as raised:
        function()
    assert raised.type is error
    assert raised.value.__context__ is None
    assert_same_bits(buffers, before)


@pytest.mark.parametrize(("function", "change", "error", "message"), WRONG)
def test_a_function_names_what_is_wrong(function, change, error, message):
    valid = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in VALID[function].items()}
    function(**valid)  # what passes once is remembered
    given = valid | change
    names = ("running_mean", "running_var")
    buffers = {n: given[n] for n in names if isinstance(given.get(n), torch.Tensor)}
    assert_refused(error, message, partial(function, **given), buffers)


@pytest.mark.parametrize("name", ["x", "bn_weight", "running_var", "conv_weight"])
@pytest.mark.parametrize("left", [0, -1])
def test_a_storage_that_was_freed_or_cut_is_refused_though_the_call_passed_before(name, left):
    """Here, for the backends that are PyTorch's operators: these read beyond it."""
    inputs = {n: t.clone() for n, t in conv_inputs(CASE).items() if n != "residual"}
    arguments = {**inputs, **CASE.conv, "training": True}
    pk.bn_relu_conv2d(**arguments)  # what passes once is remembered
    count = inputs[name].nbytes
    inputs[name].untyped_storage().resize_(left % count)
    with pytest.raises(ValueError, match=f"^{name}: expected a storage of {count} bytes, got "):
        pk.bn_relu_conv2d(**arguments)


def test_a_storage_that_was_cut_under_a_slice_is_refused_though_a_slice_passed_before():
    whole, cut = (torch.randn(2, 16, 8, 6)[:, 3:9, 2:7] for _ in range(2))
    cut.untyped_storage().resize_(2200)  # enough bytes for as many elements, but not for the last
    pk.group_norm_act(whole, 2)
    with pytest.raises(ValueError, match=r"^x: expected a storage of \d+ bytes, got 2200"):
        pk.group_norm_act(cut, 2)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("bn1.weight", "bn_weight"),
        ("bn2.running_var", "running_var"),
        ("conv2.weight", "conv_weight"),
    ],
)
@pytest.mark.parametrize("channels", [10, 16])  # PyTorch's convolutions, and fused ones
def test_a_block_and_a_stage_refuse_a_storage_that_was_freed(channels, name, argument, backend):
    for wrap in (lambda block: block, lambda block: pk.PreActStage([block, block])):
        block = pk.PreActBasicBlock(channels, channels)
        model, x = wrap(block), torch.randn(2, channels, 5, 4)
        with pk.use_backend(backend):
            model(x)
            block.state_dict()[name].untyped_storage().resize_(0)
            with pytest.raises(ValueError, match=f"^{argument}: expected a storage of "):
                model(x)


def test_a_weight_that_was_freed_before_the_backward_is_refused():
    module = pk.BNReLUConv2d(10, 10, 3, padding=1)
    y = module(torch.randn(2, 10, 5, 4, requires_grad=True))
    module.conv.weight.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^conv_weight: expected a storage of "):
        y.sum().backward()


@pytest.mark.parametrize(("dims", "expected"), [(3, "an int or a tuple of one"), (5, "three ints")])
def test_a_stride_of_other_dimensions_is_refused(dims, expected):
    case = GROUPS._replace(norm=NormCase((2, 8, 5, 6, 7)[:dims], 4), residual=False)
    inputs = {**norm_conv_inputs(case), **case.conv, "num_groups": 4, "stride": (1, 1)}
    with pytest.raises(TypeError, match=rf"stride: expected .*{expected}, got \(1, 1\)"):
        pk.group_norm_act_conv(**inputs)


MODULES = {
    "bn_relu": lambda: pk.BNReLU2d(8),
    "bn_relu_conv": lambda: pk.BNReLUConv2d(8, 4, 3),
    "block": lambda: random_block("bottleneck", 8, 4),
    "stage": lambda: pk.PreActStage([random_block("basic", 8, 8), random_block("basic", 8, 8)]),
    "checkpointed": lambda: pk.PreActStage([random_block("basic", 8, 8)], memory="checkpoint"),
}
every_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
WRONG_INPUTS = (
    (TypeError, [1.0]),
    (TypeError, torch.ones(2, 8, 5, 6, dtype=torch.int64)),
    (ValueError, torch.randn(2, 7, 5, 6)),
    (ValueError, torch.randn(8, 5, 6)),
    (TypeError, torch.randn(2, 8, 5, 6).double()),
    (ValueError, torch.randn(2, 8, 5, 6, device="meta")),
    (ValueError, torch.randn(1, 8, 1, 1)),
)


@every_module
def test_modules_refuse_a_wrong_input_and_keep_their_statistics(module):
    module = module()
    module(torch.randn(2, 8, 5, 6))  # what passes once is remembered
    for error, x in WRONG_INPUTS:
        assert_refused(error, "expected", lambda x=x: module(x), dict(module.named_buffers()))


def conv(channels, **options):
    return nn.Conv2d(8, channels, 3, **{"padding": 1, "bias": False, **options})


# What is changed of a block of 8 channels, to which value, and the error of its next call.
BLOCKS = (
    ("bn2", nn.BatchNorm2d(4), ValueError, "x: expected 4 channels to match the block's batch"),
    *(
        (f"bn2.{name}", torch.ones(4), ValueError, "x: expected 4 channels to match")
        for name in ("running_mean", "running_var")
    ),
    ("bn2", nn.BatchNorm2d(8).double(), TypeError, "bn_weight: expected dtype float32 to match x"),
    ("bn2.bias", torch.ones(8).double(), TypeError, "bn_bias: expected dtype float32 to match x"),
    ("bn2.running_var", torch.ones(8).half(), TypeError, "running_var: expected dtype float32 to"),
    ("bn2.running_mean", torch.ones(8).int(), TypeError, "running_mean: expected dtype float32, "),
    ("bn2.bias", torch.ones(8, device="meta"), ValueError, "x: expected device meta to match the"),
    ("bn2.eps", 0.0, ValueError, "eps: expected a positive number when training, got 0"),
    ("bn2.momentum", NAN, ValueError, "momentum: expected a number, got nan"),
    ("bn2.momentum", "0.1", TypeError, "momentum: expected a number, got str"),
    ("conv2", conv(4), ValueError, "x: expected a shortcut of shape [2, 4, 8, 6], got [2, 8, 8, "),
    ("conv2", conv(8, padding=0), ValueError, "x: expected a shortcut of shape [2, 8, 6, 4]"),
    ("conv2", conv(8).double(), TypeError, "conv_weight: expected dtype float32 to match x"),
    ("conv2", conv(8, device="meta"), ValueError, "x: expected device meta to match the block"),
    ("conv2.groups", 2, ValueError, "conv_weight: expected in_channels 8 / 2 groups to match x"),
    # PyTorch broadcasts a branch of one pixel.
    ("conv1.stride", (8, 8), ValueError, "x: expected a shortcut of shape [2, 8, 1, 1], got"),
    ("conv1.dilation", (5, 5), ValueError, "x: expected a padded height of at least 11 for the"),
    ("shortcut", nn.Conv2d(8, 4, 1, bias=False), ValueError, "x: expected a shortcut of shape"),
    ("shortcut", nn.Conv2d(8, 8, 1, bias=False).double(), TypeError, "conv_weight: expected dtype"),
    ("shortcut.stride", (2, 2), ValueError, "x: expected a shortcut of shape [2, 8, 8, 6], got"),
)


@pytest.mark.parametrize(("name", "value", "error", "message"), BLOCKS)
def test_a_block_names_what_was_made_wrong_of_it(name, value, error, message):
    block, x = random_block("basic", 8, 8), torch.randn(2, 8, 8, 6)
    child, _, attribute = name.rpartition(".")
    if "shortcut" in name:
        block.shortcut = nn.Conv2d(8, 8, 1, bias=False)
    block(x)  # what passes once is remembered
    child = block.get_submodule(child)
    if isinstance(value, torch.Tensor) and attribute in child._parameters:
        del child._parameters[attribute]  # a tensor in its place, which PyTorch also reads
    setattr(child, attribute, value)
    assert_refused(error, message, lambda: block(x), dict(block.named_buffers()))


def block_call(norm=(), conv=(), context=(), **call):
    """Arguments of `checked_block`: a block of one unit of 8 channels, with these changes."""
    tensors = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), torch.ones(8))
    numbers = {"training": True, "momentum": 0.1, "batch_count": torch.tensor(0)}
    bn = BatchNorm(**tensors)._replace(**{**numbers, **dict(norm)})
    pairs = (1, 1), (1, 1), (1, 1)
    weight = ConvArguments(torch.ones(8, 8, 3, 3), None, *pairs, 1)._replace(**dict(conv))
    activation = Activation(call.get("activation", "relu"))
    units = [UnitArguments(bn, activation, weight)] * call.get("units", 1)
    projection = weight if call.get("is_projected") else None
    block = BlockArguments(units, projection, call.get("is_residual", True))
    stage = StageContext(torch.device("cpu"), torch.float32, torch.float32, False)
    shape, dtype = call.get("shape", (2, 8, 5, 6)), call.get("x_dtype", torch.float32)
    return block, shape, dtype, stage._replace(**dict(context))


def cut(t, bytes_left):
    """A view whose storage is cut."""
    t.untyped_storage().resize_(bytes_left)
    return t


ONE_VALUE = {"shape": (1, 8, 1, 1)}
SMALLER = {"conv": {"padding": (0, 0)}}
IN_HALF = {"stream_dtype": torch.half, "dtype": torch.half}
# Two calls that differ in one property: what is remembered of the first is not the second's.
PAIRS = {
    "training": (ONE_VALUE | {"norm": {"training": False}}, ONE_VALUE),
    "momentum": ({}, {"norm": {"momentum": NAN}}),
    "type of momentum": ({}, {"norm": {"momentum": complex(0.1)}}),
    "eps": ({}, {"norm": {"eps": 0.0}}),
    "type of eps": ({}, {"norm": {"eps": complex(1e-5)}}),
    "counter": (
        {"norm": {"momentum": None}},
        {"norm": {"momentum": None, "batch_count": None}},
    ),
    "no weight": ({}, {"norm": {"weight": None}}),
    "which vector is missing": ({"norm": {"running_mean": None}}, {"norm": {"bias": None}}),
    "dtype of statistics": ({}, {"norm": {"running_var": torch.ones(8).int()}}),
    "any dtype of statistics": (
        {"norm": {"running_var": torch.ones(8).half(), "has_any_statistics_dtype": True}},
        {"norm": {"running_var": torch.ones(8).half()}},
    ),
    "device of a bias": ({}, {"norm": {"bias": torch.ones(8, device="meta")}}),
    "gaps": ({}, {"norm": {"weight": cut(torch.ones(16)[::2], 32)}}),
    "number of values": ({}, {"norm": {"bias": torch.ones(8)[:7]}}),
    "storage": ({}, {"norm": {"bias": cut(torch.ones(24)[12:20], 64)}}),
    "shape of a weight": ({}, {"conv": {"weight": torch.ones(8, 8, 1, 9)}}),
    "strides": ({}, {"conv": {"weight": nhwc(torch.ones(8, 8, 3, 3))}}),
    "dtype of a weight": ({}, {"conv": {"weight": torch.ones(8, 8, 3, 3).int()}}),
    "device of a weight": ({}, {"conv": {"weight": torch.ones(8, 8, 3, 3, device="meta")}}),
    "stride": ({}, {"conv": {"stride": (2, 2)}}),
    "padding": ({}, SMALLER),
    "dilation": ({}, {"conv": {"dilation": (2, 2)}}),
    "groups": ({}, {"conv": {"groups": 2}}),
    "type of groups": ({}, {"conv": {"groups": True}}),
    "shape": ({}, {"shape": (2, 7, 5, 6)}),
    "dtype of the input": ({}, {"x_dtype": torch.half}),
    "dtypes of the stage": ({}, {"context": IN_HALF}),
    "shortcut": (
        {"conv": {"padding": (0, 0)}, "is_residual": False},
        {"conv": {"padding": (0, 0)}},
    ),
    "units": ({}, {"units": 2}),
    "activation": ({}, {"activation": "silu"}),
    "projection": ({}, {"is_projected": True}),
}


@pytest.mark.parametrize(("first", "second"), PAIRS.values(), ids=PAIRS)
def test_a_block_is_checked_again_if_a_property_differs(first, second, monkeypatch):
    def result(call):
        try:
            return checked_block(*block_call(**call))._replace(key=None)
        except (TypeError, ValueError) as error:
            return type(error), str(error)

    before, found = result(first), result(second)
    monkeypatch.setattr(block_arguments, "_read", None)  # not callable: nothing is remembered
    assert found == result(second) != before


def unit_call(norm=(), conv=(), unit=(), autocast=None, kind=BatchNorm, **call):
    """The result of `checked_unit` for a unit of 8 channels with these changes, or its error."""
    tensors = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), torch.ones(8))
    bn = kind(**tensors)._replace(**{"training": True, "momentum": 0.1, **dict(norm)})
    pairs = (1, 1), (1, 1), (1, 1)
    weight = ConvArguments(torch.ones(8, 8, 3, 3), None, *pairs, 1)._replace(**dict(conv))
    given = UnitArguments(bn, conv=weight)._replace(**dict(unit))
    call = {"x": torch.ones(2, 8, 5, 6), **call}
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        try:
            return checked_unit(call.pop("x"), given, **call)
        except (TypeError, ValueError) as error:
            return type(error), str(error)


HALF = torch.ones(8).half()
ROWS = torch.ones(2, 8)
OF_ONE_GROUP = {
    "x": nhwc(torch.ones(2, 8, 5, 6)),
    "unit": {"conv": None},
    "norm": dict.fromkeys(("weight", "bias", "running_mean", "running_var")) | {"groups": 1},
}
# Two calls that differ in one property.
UNIT_PAIRS = {
    "shape": ({}, {"x": torch.ones(2, 7, 5, 6)}),
    "strides": ({}, {"x": nhwc(torch.ones(2, 8, 5, 6))}),
    "dtype": ({}, {"x": torch.ones(2, 8, 5, 6).int()}),
    "device": ({}, {"x": torch.ones(2, 8, 5, 6, device="meta")}),
    "residual": ({}, {"residual": torch.ones(2, 8, 5, 5)}),
    "class of the norm": (OF_ONE_GROUP | {"kind": GroupNorm}, OF_ONE_GROUP | {"kind": LayerNorm}),
    "weight": ({}, {"norm": {"weight": torch.ones(7)}}),
    "running_var": ({}, {"norm": {"running_var": None}}),
    "training": ({}, {"norm": {"training": False}}),
    "momentum": ({}, {"norm": {"momentum": NAN}}),
    "type of eps": ({"norm": {"eps": 0.5}}, {"norm": {"eps": complex(0.5)}}),
    "process group": ({}, {"norm": {"process_group": object()}}),
    "counter": (
        {"norm": {"momentum": None, "batch_count": torch.tensor(0)}},
        {"norm": {"momentum": None}},
    ),
    "any dtype of statistics": (
        {"norm": {"running_var": HALF, "has_any_statistics_dtype": True}},
        {"norm": {"running_var": HALF}},
    ),
    "activation": ({}, {"unit": {"activation": Activation("silu")}}),
    "parameter": (
        {"unit": {"activation": Activation("elu", 1.0)}},
        {"unit": {"activation": Activation("elu", 2.0)}},
    ),
    "no convolution": ({}, {"unit": {"conv": None}}),
    "bias": ({}, {"conv": {"bias": torch.ones(7)}}),
    "stride": ({}, {"conv": {"stride": (2, 2)}}),
    "type of a stride": ({"conv": {"stride": 1}}, {"conv": {"stride": 1.0}}),
    "groups": ({}, {"conv": {"groups": 2}}),
    "scale": ({}, {"unit": {"scale_shift": ScaleShift(scale=torch.ones(2, 7))}}),
    "shift": ({}, {"unit": {"scale_shift": ScaleShift(shift=ROWS)}}),
    "factor": ({}, {"unit": {"scale_shift": ScaleShift(factor=ROWS)}}),
    "dims": ({}, {"dims": 3}),
    "memory format": ({}, {"channels_last": True}),
    "autocast": ({}, {"autocast": torch.bfloat16}),
    "dtype of autocast": ({"autocast": torch.bfloat16}, {"autocast": torch.float16}),
}


@pytest.mark.parametrize(("first", "second"), UNIT_PAIRS.values(), ids=UNIT_PAIRS)
def test_a_unit_is_checked_again_if_a_property_differs(first, second, monkeypatch):
    before, found = unit_call(**first), unit_call(**second)
    monkeypatch.setattr(checks, "described", None)  # not callable: nothing is remembered
    assert found == unit_call(**second) != before


@pytest.mark.parametrize("training", [True, False])
def test_buffers_of_other_channels_beside_one_channel_are_refused(training):
    module, x = pk.BNReLU2d(32, affine=False).train(training), torch.randn(2, 1, 5, 6)
    message = "running_mean: expected shape [1] to match"
    assert_refused(ValueError, message, lambda: module(x), dict(module.named_buffers()))


@pytest.mark.parametrize("stride", [2, (2,)])
def test_a_stride_of_a_block_may_be_given_as_in_pytorch(stride):
    block = random_block("basic", 8, 8, 2)
    block.shortcut.stride = block.conv1.stride = stride
    check(block, plain_copy(block), {"x": torch.randn(2, 8, 5, 6)})


def test_every_argument_is_part_of_what_checks_are_remembered_by():
    norm, conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    bn = BatchNorm(*tensors, True, 0.1, 1e-5, None, norm.num_batches_tracked, False)
    arguments = ConvArguments(conv.weight, conv.bias, (1, 1), (0, 0), (1, 1), 1)
    for given in (bn, arguments):
        keys = {tuple(described(given))}
        for name, value in given._asdict().items():
            if name == "process_group":
                with pytest.raises(TypeError):
                    described(given._replace(process_group=object()))
                continue
            other = value.double() if isinstance(value, torch.Tensor) else "other"
            keys.add(tuple(described(given._replace(**{name: other}))))
        assert len(keys) == 1 + len(given) - ("process_group" in given._fields)
    for equal in ((1.0, 1), (True, 1), 1):
        assert described([equal]) != described([(1, 1)])
    assert described([True]) != described([1])
    for value in ([1, 1], np.int64(1)):
        with pytest.raises(TypeError):
            described([value])


def test_results_of_checks_do_not_fill_the_memory():
    passed = Passed()
    for key in range(3 * Passed.MOST):
        assert passed.add(key, "result") == "result"
        assert passed.get(key) == "result"
        assert len(passed) <= Passed.MOST


KERNELS = backends.select("auto", "cpu", torch.float32)


@pytest.mark.parametrize(
    ("module", "functions", "name"),
    [
        (pk.BNReLU2d(8), KERNELS, "norm_act_forward"),
        (pk.BNReLUConv2d(8, 4, 3), KERNELS, "norm_act_conv_forward"),
        (pk.BNReLUConv2d(8, 4, 2, padding="same"), F, "conv2d"),
    ],
)
def test_running_statistics_stay_when_a_kernel_fails(module, functions, name, monkeypatch):
    def fails(*args, **options):
        raise MemoryError("full")

    monkeypatch.setattr(functions, name, fails)
    x = torch.randn(2, 8, 5, 6)
    assert_refused(MemoryError, "full", lambda: module(x), dict(module.named_buffers()))


@pytest.fixture
def narrow_reference(monkeypatch):
    """A backend that serves float32 alone, chosen by name."""
    row = backends._by_name["reference"]._replace(dtypes=(torch.float32,))
    monkeypatch.setitem(backends._by_name, "reference", row)
    backends.select.cache_clear()
    with pk.use_backend("reference"):
        yield
    backends.select.cache_clear()


@every_module
def test_a_backend_that_cannot_serve_writes_nothing(module, narrow_reference):
    module, x = module().half(), torch.randn(2, 8, 5, 6).half()
    message = "x: expected dtype float32, got float16"
    assert_refused(pk.BackendError, message, lambda: module(x), dict(module.named_buffers()))


unit, from_modules = pk.BNReLUConv2d, pk.BNReLUConv2d.from_modules
bottleneck = partial(pk.PreActBottleneck, 8)
NORM, CONV = nn.BatchNorm2d(8), nn.Conv2d(4, 8, 1)


def stage(memory="store", **options):
    return random_stage(memory=memory, **options)


CONSTRUCTORS = (
    (ValueError, lambda: pk.PreActStage([]), "blocks: expected at least one block, got none"),
    (TypeError, lambda: pk.PreActStage([nn.ReLU()]), "blocks: expected pre-activation blocks, got"),
    (ValueError, lambda: stage("disk"), "memory: expected 'store' or 'rebuild' or 'checkpoint'"),
    (ValueError, lambda: stage(segments=2), "segments: expected None with memory 'store'"),
    (ValueError, lambda: stage("rebuild", segments=2), "segments: expected None with memory"),
    (ValueError, lambda: stage(anchor_every=2), "anchor_every: expected None with memory"),
    (ValueError, lambda: stage("checkpoint", segments=5), "segments: expected 1 to 4"),
    (ValueError, lambda: stage("rebuild", anchor_every=0), "anchor_every: expected 1 to 4"),
    (TypeError, lambda: stage("checkpoint", segments=2.0), "segments: expected an int or None"),
    (TypeError, lambda: stage("rebuild", anchor_every=True), "anchor_every: expected an int or"),
    (TypeError, lambda: stage(residual_dtype="half"), "residual_dtype: expected a torch.dtype"),
    (ValueError, lambda: stage(residual_dtype=torch.half), "residual_dtype: expected torch.float"),
    (ValueError, lambda: pk.PreActBasicBlock(8, 0), "channels: expected at least 1, got 0"),
    (ValueError, lambda: pk.PreActBasicBlock(8, 4, -2), "stride: expected at least 1, got -2"),
    (TypeError, lambda: bottleneck(4.0), "channels: expected an int, got float"),
    (ValueError, lambda: bottleneck(4, 0), "stride: expected at least 1, got 0"),
    (ValueError, lambda: bottleneck(4, 2, stride_on="conv3"), "stride_on: expected 'conv1' or"),
    (ValueError, lambda: pk.BNReLU2d(0), "num_features: expected at least 1, got 0"),
    (TypeError, lambda: pk.BNReLU2d(4, momentum="0.1"), "momentum: expected a number, got str"),
    (ValueError, lambda: unit(0, 4, 3), "in_channels: expected at least 1, got 0"),
    (TypeError, lambda: unit(4, True, 3), "out_channels: expected an int, got bool"),
    (ValueError, lambda: unit(4, 4, 0), "kernel_size: expected at least 1, got 0"),
    (TypeError, lambda: unit(4, 4, (3,)), f"kernel_size: expected {PAIR}, got (3,)"),
    (ValueError, lambda: unit(4, 4, 3, 0), "stride: expected at least 1, got 0"),
    (ValueError, lambda: unit(4, 4, 3, groups=0), "groups: expected at least 1, got 0"),
    (ValueError, lambda: unit(4, 6, 3, groups=4), "groups: expected a divisor of in_channels 4"),
    (ValueError, lambda: unit(4, 4, 3, eps=NAN), "eps: expected a number, got nan"),
    (TypeError, lambda: from_modules(nn.ReLU(), CONV), "bn: expected an nn.BatchNorm2d, got ReLU"),
    (TypeError, lambda: from_modules(NORM, nn.ReLU()), "conv: expected an nn.Conv2d, got ReLU"),
    (ValueError, lambda: from_modules(NORM, CONV), "conv: expected in_channels 8 to match bn"),
)


@pytest.mark.parametrize(("error", "construct", "message"), CONSTRUCTORS)
def test_constructors_name_what_is_wrong(error, construct, message):
    assert_refused(error, message, construct, {})
