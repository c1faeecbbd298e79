"""Wrong arguments are named, with what was expected and given, before anything is written."""

import re

import pytest
import torch
from torch import nn

import preact_kernels as pk
from preact_kernels.ops import dispatch as backends
from tests.cases import ConvCase, conv_inputs, device_of, random_block, random_stage
from tests.oracle import assert_same_bits, check, plain_copy

pytestmark = pytest.mark.backends("cpu")  # arguments are checked above the backends

CASE = ConvCase("typical", (2, 8, 5, 6), 12, padding=1, conv_bias=True, residual=True)


def wrong_bn_relu():
    """Changes to correct arguments of `bn_relu`, the error, and its message."""
    meta = torch.ones(8, device="meta")
    floats = "float32, float64, bfloat16 or float16"
    return {
        "x_is_a_list": ({"x": [1.0]}, TypeError, "x: expected a torch.Tensor, got list"),
        "x_is_none": ({"x": None}, TypeError, "x: expected a torch.Tensor, got NoneType"),
        "x_of_integers": (
            {"x": torch.ones(2, 8, 5, 6, dtype=torch.int64)},
            TypeError,
            f"x: expected dtype {floats}, got int64",
        ),
        "x_of_three_dimensions": (
            {"x": torch.randn(8, 5, 6)},
            ValueError,
            "x: expected 4 dimensions [N, C, H, W], got shape [8, 5, 6]",
        ),
        "x_of_five_dimensions": (
            {"x": torch.randn(2, 8, 5, 6, 1)},
            ValueError,
            "x: expected 4 dimensions [N, C, H, W], got shape [2, 8, 5, 6, 1]",
        ),
        "one_value_a_channel": (
            {"x": torch.randn(1, 8, 1, 1), "residual": None, "conv_weight": torch.ones(4, 8, 1, 1)},
            ValueError,
            "expected more than 1 value per channel when training, got input size "
            "torch.Size([1, 8, 1, 1])",
        ),
        **{
            f"{name}_of_other_channels": (
                {name: torch.ones(7)},
                ValueError,
                f"{name}: expected shape [8] to match the channels of x, got [7]",
            )
            for name in ("bn_weight", "bn_bias", "running_mean", "running_var")
        },
        **{
            f"{name}_in_another_dtype": (
                {name: torch.ones(8).double()},
                TypeError,
                f"{name}: expected dtype float32 to match x, got float64",
            )
            for name in ("bn_weight", "bn_bias", "running_mean", "running_var")
        },
        **{
            f"{name}_on_another_device": (
                {name: meta},
                ValueError,
                f"{name}: expected device cpu to match x, got meta",
            )
            for name in ("bn_weight", "bn_bias", "running_mean", "running_var")
        },
        "bn_weight_is_a_matrix": (
            {"bn_weight": torch.ones(8, 1)},
            ValueError,
            "bn_weight: expected shape [8] to match the channels of x, got [8, 1]",
        ),
        "bn_weight_is_a_number": (
            {"bn_weight": 1.0},
            TypeError,
            "bn_weight: expected a torch.Tensor, got float",
        ),
        "running_mean_alone": (
            {"running_var": None},
            ValueError,
            "running_var: expected a tensor beside the other running statistic, got None",
        ),
        "running_var_alone": (
            {"running_mean": None},
            ValueError,
            "running_mean: expected a tensor beside the other running statistic, got None",
        ),
        "evaluation_without_statistics": (
            {"running_mean": None, "running_var": None, "training": False},
            ValueError,
            "running_mean: expected a tensor in evaluation mode, got None",
        ),
        "training_is_a_number": (
            {"training": 1},
            TypeError,
            "training: expected a bool, got int",
        ),
        "momentum_is_none": (
            {"momentum": None},
            TypeError,
            "momentum: expected a number, got NoneType",
        ),
        "momentum_is_nan": (
            {"momentum": float("nan")},
            ValueError,
            "momentum: expected a number, got nan",
        ),
        "x_without_channels": (
            {"x": torch.empty(2, 0, 5, 6)},
            ValueError,
            "x: expected at least 1 channel, got shape [2, 0, 5, 6]",
        ),
        "eps_is_a_string": ({"eps": "1e-5"}, TypeError, "eps: expected a number, got str"),
        "eps_is_negative": ({"eps": -1e-5}, ValueError, "eps: expected "),
        "eps_is_zero": ({"eps": 0.0}, ValueError, "eps: expected "),
        "eps_is_nan": ({"eps": float("nan")}, ValueError, "eps: expected "),
    }


def wrong_conv():
    """Likewise for what `bn_relu_conv2d` takes besides."""
    weight = torch.ones(12, 8, 3, 3)

    def is_pair(name, value):
        return {name: value}, TypeError, f"{name}: expected an int or a pair of ints, got {value!r}"

    return {
        "conv_weight_is_none": (
            {"conv_weight": None},
            TypeError,
            "conv_weight: expected a torch.Tensor, got NoneType",
        ),
        "conv_weight_of_other_channels": (
            {"conv_weight": torch.ones(12, 4, 3, 3)},
            ValueError,
            "conv_weight: expected in_channels 8 to match x, got 4",
        ),
        "conv_weight_of_two_dimensions": (
            {"conv_weight": torch.ones(12, 8)},
            ValueError,
            "conv_weight: expected 4 dimensions [out_channels, in_channels / groups, R, S], "
            "got shape [12, 8]",
        ),
        "conv_weight_in_another_dtype": (
            {"conv_weight": weight.double()},
            TypeError,
            "conv_weight: expected dtype float32 to match x, got float64",
        ),
        "conv_weight_on_another_device": (
            {"conv_weight": weight.to("meta")},
            ValueError,
            "conv_weight: expected device cpu to match x, got meta",
        ),
        "conv_weight_of_no_outputs": (
            {"conv_weight": torch.ones(0, 8, 3, 3), "conv_bias": None},
            ValueError,
            "conv_weight: expected out_channels to be a positive multiple of groups 1, got 0",
        ),
        "an_empty_kernel": (
            {"conv_weight": torch.ones(12, 8, 0, 3)},
            ValueError,
            "conv_weight: expected a kernel of at least 1x1, got [0, 3]",
        ),
        "groups_beside_a_full_weight": (
            {"groups": 2},
            ValueError,
            "conv_weight: expected in_channels 8 / 2 groups to match x, got 8",
        ),
        "outputs_no_multiple_of_groups": (
            {"groups": 4, "conv_weight": torch.ones(6, 2, 3, 3), "conv_bias": None},
            ValueError,
            "conv_weight: expected out_channels to be a positive multiple of groups 4, got 6",
        ),
        "groups_of_zero": ({"groups": 0}, ValueError, "groups: expected at least 1, got 0"),
        "groups_is_negative": ({"groups": -1}, ValueError, "groups: expected at least 1, got -1"),
        "groups_is_a_float": ({"groups": 1.0}, TypeError, "groups: expected an int, got float"),
        "conv_bias_of_other_outputs": (
            {"conv_bias": torch.ones(8)},
            ValueError,
            "conv_bias: expected shape [12] to match conv_weight, got [8]",
        ),
        "conv_bias_in_another_dtype": (
            {"conv_bias": torch.ones(12).bfloat16()},
            TypeError,
            "conv_bias: expected dtype float32 to match conv_weight, got bfloat16",
        ),
        "conv_bias_on_another_device": (
            {"conv_bias": torch.ones(12, device="meta")},
            ValueError,
            "conv_bias: expected device cpu to match x, got meta",
        ),
        "stride_of_zero": ({"stride": 0}, ValueError, "stride: expected at least 1, got 0"),
        "stride_is_negative": (
            {"stride": (1, -2)},
            ValueError,
            "stride: expected at least 1, got (1, -2)",
        ),
        "stride_is_a_float": is_pair("stride", 1.5),
        "stride_of_three": is_pair("stride", (1, 1, 1)),
        "stride_is_a_bool": is_pair("stride", True),
        "dilation_of_zero": (
            {"dilation": (0, 1)},
            ValueError,
            "dilation: expected at least 1, got (0, 1)",
        ),
        "dilation_is_a_string": is_pair("dilation", "2"),
        "padding_is_negative": (
            {"padding": -1},
            ValueError,
            "padding: expected at least 0, got -1",
        ),
        "padding_is_unknown": (
            {"padding": "full"},
            ValueError,
            "padding: expected 'valid', 'same', an int or a pair, got 'full'",
        ),
        "same_padding_of_a_strided_convolution": (
            {"padding": "same", "stride": 2},
            ValueError,
            "padding: expected stride 1 beside 'same', got stride [2, 2]",
        ),
        "an_image_smaller_than_the_kernel": (
            {"dilation": 4, "padding": 1, "residual": None},
            ValueError,
            "x: expected a padded height of at least 9 for the kernel, got 7",
        ),
        "residual_of_another_shape": (
            {"residual": torch.ones(2, 12, 5, 5)},
            ValueError,
            "residual: expected shape [2, 12, 5, 6] to match the output, got [2, 12, 5, 5]",
        ),
        "residual_that_would_broadcast": (
            {"residual": torch.ones(1, 12, 1, 1)},
            ValueError,
            "residual: expected shape [2, 12, 5, 6] to match the output, got [1, 12, 1, 1]",
        ),
        "residual_is_a_number": (
            {"residual": 1.0},
            TypeError,
            "residual: expected a torch.Tensor, got float",
        ),
        "residual_on_another_device": (
            {"residual": torch.ones(2, 12, 5, 6, device="meta")},
            ValueError,
            "residual: expected device cpu to match x, got meta",
        ),
    }


BN_RELU, CONV = wrong_bn_relu(), wrong_conv()


def assert_refused(function, arguments, error, message):
    """The error is of that very type, and running statistics stay as they were."""
    kept = [arguments[n] for n in ("running_mean", "running_var")]
    kept = [(t, t.clone()) for t in kept if isinstance(t, torch.Tensor) and not t.is_meta]
    with pytest.raises(error, match=re.escape(message)) as raised:
        function(**arguments)
    assert raised.type is error
    assert all(torch.equal(t, before) for t, before in kept)


@pytest.mark.parametrize(("change", "error", "message"), BN_RELU.values(), ids=BN_RELU)
def test_bn_relu_names_what_is_wrong(change, error, message, backend):
    names = ("x", "bn_weight", "bn_bias", "running_mean", "running_var")
    inputs = {n: t for n, t in conv_inputs(CASE).items() if n in names}
    change = {n: v for n, v in change.items() if n not in ("residual", "conv_weight")}
    assert_refused(pk.bn_relu, {**inputs, "training": True, **change}, error, message)


# One of each argument of a batch norm, to see that the same checks are made.
ALSO_WRONG = {
    name: BN_RELU[name]
    for name in (
        "x_is_none",
        "one_value_a_channel",
        "bn_weight_of_other_channels",
        "bn_bias_of_other_channels",
        "running_mean_of_other_channels",
        "running_var_of_other_channels",
        "training_is_a_number",
        "momentum_is_none",
        "eps_is_zero",
    )
}


@pytest.mark.parametrize(
    ("change", "error", "message"), (CONV | ALSO_WRONG).values(), ids=CONV | ALSO_WRONG
)
def test_bn_relu_conv2d_names_what_is_wrong(change, error, message, backend):
    arguments = {**conv_inputs(CASE), **CASE.conv, "training": True, **change}
    assert_refused(pk.bn_relu_conv2d, arguments, error, message)


@pytest.mark.parametrize(
    ("x", "branch", "error", "message"),
    [
        (1.0, torch.ones(1, 1, 1, 1), TypeError, "x: expected a torch.Tensor, got float"),
        (torch.ones(1, 1, 1, 1), None, TypeError, "branch: expected a torch.Tensor, got NoneType"),
        (torch.ones(2, 2), torch.ones(2, 2), ValueError, "x: expected 4 dimensions [N, C, H, W]"),
        (
            torch.ones(2, 3, 4, 5),
            torch.ones(2, 3, 1, 1),
            ValueError,
            "branch: expected shape [2, 3, 4, 5] to match",
        ),
        (
            torch.ones(2, 3, 4, 5),
            torch.ones(2, 3, 4, 5, device="meta"),
            ValueError,
            "branch: expected device cpu to match x, got meta",
        ),
        (
            torch.ones(2, 3, 4, 5, dtype=torch.int32),
            torch.ones(2, 3, 4, 5),
            TypeError,
            "x: expected dtype float32, float64, bfloat16 or float16, got int32",
        ),
    ],
)
def test_residual_add_names_what_is_wrong(x, branch, error, message, backend):
    with pytest.raises(error, match=re.escape(message)):
        pk.residual_add(x, branch)


MODULES = {
    "bn_relu": lambda: pk.BNReLU2d(8),
    "bn_relu_conv": lambda: pk.BNReLUConv2d(8, 4, 3),
    "block": lambda: random_block("bottleneck", 8, 4),
    "stage": lambda: pk.PreActStage([random_block("basic", 8, 8), random_block("basic", 8, 8)]),
    "checkpointed": lambda: pk.PreActStage([random_block("basic", 8, 8)], memory="checkpoint"),
}
WRONG_INPUTS = {
    "list": ([1.0], TypeError),
    "integers": (torch.ones(2, 8, 5, 6, dtype=torch.int64), TypeError),
    "channels": (torch.randn(2, 7, 5, 6), ValueError),
    "dimensions": (torch.randn(8, 5, 6), ValueError),
    "dtype": (torch.randn(2, 8, 5, 6).double(), TypeError),
    "meta": (torch.randn(2, 8, 5, 6, device="meta"), ValueError),
    "one_value": (torch.randn(1, 8, 1, 1), ValueError),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize(("x", "error"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_modules_refuse_a_wrong_input_and_keep_their_statistics(module, x, error, backend):
    module = module()
    before = {n: t.clone() for n, t in module.named_buffers()}
    with pytest.raises(error) as raised:
        module(x)
    assert raised.type is error
    assert_same_bits(dict(module.named_buffers()), before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("child", ["bn1", "bn2"])
def test_a_batch_norm_of_other_channels_in_a_block_is_refused(child, training, backend):
    block = random_block("basic", 8, 8)
    setattr(block, child, nn.BatchNorm2d(4))
    block.train(training)
    with pytest.raises(ValueError, match=r"expected .*got"):
        block(torch.randn(2, 8, 5, 6))


@pytest.mark.parametrize("name", ["conv2", "shortcut"])
def test_a_shortcut_of_other_channels_than_the_branch_is_refused(name, backend):
    block = random_block("basic", 8, 6)
    conv = getattr(block, name)
    conv.weight = nn.Parameter(conv.weight[:4].detach())
    with pytest.raises(
        ValueError, match=r"expected a shortcut of shape \[2, \d, 5, 6\], got \[2, \d, 5, 6\]"
    ):
        block(torch.randn(2, 8, 5, 6))


def test_a_stride_that_leaves_a_branch_of_one_pixel_is_refused(backend):
    block = random_block("basic", 8, 8).eval()
    block.conv1.stride = (8, 8)  # PyTorch broadcasts the branch
    with pytest.raises(ValueError, match=r"expected a shortcut of shape \[2, 8, 1, 1\], got"):
        block(torch.randn(2, 8, 8, 8))


def test_a_kernel_larger_than_the_images_of_a_block_is_refused(backend):
    block = random_block("basic", 8, 8)
    block.conv2.padding = (0, 0)
    with pytest.raises(ValueError, match="x: expected a padded height of at least 3"):
        block(torch.randn(2, 8, 2, 6))


@pytest.mark.parametrize("momentum", [float("nan"), "0.1"])
def test_a_momentum_that_is_no_number_is_refused_in_a_block(momentum, backend):
    block = random_block("basic", 8, 8)
    before = {n: b.clone() for n, b in block.named_buffers()}
    block.bn2.momentum = momentum
    with pytest.raises((TypeError, ValueError), match="momentum: expected a number, got"):
        block(torch.randn(2, 8, 5, 6))
    assert_same_bits(dict(block.named_buffers()), before)


@pytest.mark.parametrize("momentum", [True, False, 1])
@pytest.mark.parametrize(
    "build", [lambda: pk.BNReLUConv2d(8, 8, 3), lambda: random_block("basic", 8, 8)]
)
def test_a_bool_is_a_momentum_as_in_pytorch(build, momentum, backend):
    module = build()
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = momentum
    check(module, plain_copy(module), {"x": torch.randn(2, 8, 5, 6)})


@pytest.mark.parametrize("numbers", [(1, 1, 1), ((1,), (1,), (1,)), (2, 1, 1)])
def test_strides_of_a_block_may_be_given_as_in_pytorch(numbers, backend):
    block = random_block("basic", 8, 8, 2)
    block.conv2.stride, block.conv2.padding, block.conv2.dilation = 1, *numbers[1:]
    block.shortcut.stride = block.conv1.stride = numbers[0]
    check(block, plain_copy(block), {"x": torch.randn(2, 8, 5, 6)})


def test_a_batch_norm_in_another_dtype_in_a_block_is_refused(backend):
    block = random_block("basic", 8, 8)
    block.bn2.double()
    with pytest.raises(TypeError, match=r"expected dtype float32.*got float64"):
        block(torch.randn(2, 8, 5, 6))


@pytest.mark.parametrize("module", [MODULES["bn_relu"], MODULES["bn_relu_conv"]])
def test_running_statistics_stay_when_a_kernel_fails(module, backend, monkeypatch):
    module = module()
    before = {n: t.clone() for n, t in module.named_buffers()}
    kernels = backends.select(backend, device_of(backend), torch.float32)

    def fails(*args, **options):
        raise MemoryError

    monkeypatch.setattr(kernels, "bn_relu_forward", fails)
    monkeypatch.setattr(kernels, "bn_relu_conv_forward", fails)
    with pytest.raises(MemoryError):
        module(torch.randn(2, 8, 5, 6))
    assert_same_bits(dict(module.named_buffers()), before)


@pytest.mark.backends("reference", "cpu")
@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_do_not_fit_are_refused_and_stay(training, backend):
    module = pk.BNReLU2d(32, affine=False).train(training)
    before = {n: t.clone() for n, t in module.named_buffers()}
    with pytest.raises(ValueError, match=r"running_mean: expected shape \[1\] to match"):
        module(torch.randn(2, 1, 5, 6))
    assert_same_bits(dict(module.named_buffers()), before)


def test_half_precision_parameters_beside_a_float32_input_are_refused():
    with pytest.raises(TypeError, match="bn_weight: expected dtype float32 to match x, got bfl"):
        pk.BNReLU2d(8).bfloat16()(torch.randn(2, 8, 5, 6))


@pytest.fixture
def narrow_reference(monkeypatch):
    """A backend that serves float32 alone, chosen by name."""
    row = backends._by_name["reference"]._replace(dtypes=(torch.float32,))
    monkeypatch.setitem(backends._by_name, "reference", row)
    backends._serving.cache_clear()
    with pk.use_backend("reference"):
        yield
    backends._serving.cache_clear()


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_a_backend_that_cannot_serve_writes_nothing(module, narrow_reference):
    module = module().half()
    before = {n: t.clone() for n, t in module.named_buffers()}
    with pytest.raises(
        pk.BackendError, match=r"'reference'.*x: expected dtype float32, got float16"
    ):
        module(torch.randn(2, 8, 5, 6).half())
    assert_same_bits(dict(module.named_buffers()), before)


CONSTRUCTORS = {
    "no_blocks": (lambda: pk.PreActStage([]), ValueError, "blocks: expected at least one block"),
    "not_a_block": (
        lambda: pk.PreActStage([nn.ReLU()]),
        TypeError,
        "blocks: expected pre-activation blocks, got ReLU at index 0",
    ),
    "memory": (
        lambda: random_stage(memory="disk"),
        ValueError,
        "memory: expected 'store' or 'rebuild' or 'checkpoint', got 'disk'",
    ),
    "segments_beside_store": (
        lambda: random_stage(segments=2),
        ValueError,
        "segments: expected None beside memory 'store', got 2",
    ),
    "too_many_segments": (
        lambda: random_stage(memory="checkpoint", segments=5),
        ValueError,
        "segments: expected 1 to 4 (the number of blocks), got 5",
    ),
    "segments_is_a_float": (
        lambda: random_stage(memory="checkpoint", segments=2.0),
        TypeError,
        "segments: expected an int or None, got float",
    ),
    "anchors_beside_store": (
        lambda: random_stage(anchor_every=2),
        ValueError,
        "anchor_every: expected None beside memory 'store', got 2",
    ),
    "no_blocks_an_anchor": (
        lambda: random_stage(memory="rebuild", anchor_every=0),
        ValueError,
        "anchor_every: expected 1 to 4 (the number of blocks), got 0",
    ),
    "segments_beside_rebuild": (
        lambda: random_stage(memory="rebuild", segments=2),
        ValueError,
        "segments: expected None beside memory 'rebuild', got 2",
    ),
    "anchor_every_is_a_bool": (
        lambda: random_stage(memory="rebuild", anchor_every=True),
        TypeError,
        "anchor_every: expected an int or None, got bool",
    ),
    "residual_dtype_is_a_string": (
        lambda: random_stage(residual_dtype="float32"),
        TypeError,
        "residual_dtype: expected a torch.dtype or None, got str",
    ),
    "residual_dtype_in_half_precision": (
        lambda: random_stage(residual_dtype=torch.bfloat16),
        ValueError,
        "residual_dtype: expected torch.float32 or None, got torch.bfloat16",
    ),
    "channels_of_zero": (
        lambda: pk.PreActBasicBlock(8, 0),
        ValueError,
        "channels: expected at least 1, got 0",
    ),
    "channels_is_a_float": (
        lambda: pk.PreActBottleneck(8, 4.0),
        TypeError,
        "channels: expected an int, got float",
    ),
    "stride_of_zero": (
        lambda: pk.PreActBottleneck(8, 4, 0),
        ValueError,
        "stride: expected at least 1, got 0",
    ),
    "stride_is_negative": (
        lambda: pk.PreActBasicBlock(8, 4, -2),
        ValueError,
        "stride: expected at least 1, got -2",
    ),
    "stride_on": (
        lambda: pk.PreActBottleneck(8, 4, 2, stride_on="conv3"),
        ValueError,
        "stride_on: expected 'conv1' or 'conv2', got 'conv3'",
    ),
    "no_features": (lambda: pk.BNReLU2d(0), ValueError, "num_features: expected at least 1, got 0"),
    "in_channels_of_zero": (
        lambda: pk.BNReLUConv2d(0, 4, 3),
        ValueError,
        "in_channels: expected at least 1, got 0",
    ),
    "out_channels_of_zero": (
        lambda: pk.BNReLUConv2d(4, 0, 3),
        ValueError,
        "out_channels: expected at least 1, got 0",
    ),
    "in_channels_is_a_bool": (
        lambda: pk.BNReLUConv2d(True, 4, 3),
        TypeError,
        "in_channels: expected an int, got bool",
    ),
    "kernel_size_of_zero": (
        lambda: pk.BNReLUConv2d(4, 4, 0),
        ValueError,
        "kernel_size: expected at least 1, got 0",
    ),
    "kernel_size_of_one_number": (
        lambda: pk.BNReLUConv2d(4, 4, (3,)),
        TypeError,
        "kernel_size: expected an int or a pair of ints, got (3,)",
    ),
    "unit_stride_of_zero": (
        lambda: pk.BNReLUConv2d(4, 4, 3, 0),
        ValueError,
        "stride: expected at least 1, got 0",
    ),
    "padding_is_negative": (
        lambda: pk.BNReLUConv2d(4, 4, 3, padding=(0, -1)),
        ValueError,
        "padding: expected at least 0, got (0, -1)",
    ),
    "dilation_of_zero": (
        lambda: pk.BNReLUConv2d(4, 4, 3, dilation=0),
        ValueError,
        "dilation: expected at least 1, got 0",
    ),
    "groups_of_zero": (
        lambda: pk.BNReLUConv2d(4, 4, 3, groups=0),
        ValueError,
        "groups: expected at least 1, got 0",
    ),
    "eps_of_a_unit_is_nan": (
        lambda: pk.BNReLUConv2d(4, 4, 3, eps=float("nan")),
        ValueError,
        "eps: expected a number, got nan",
    ),
    "momentum_of_a_unit_is_nan": (
        lambda: pk.BNReLU2d(4, momentum=float("nan")),
        ValueError,
        "momentum: expected a number, got nan",
    ),
    "momentum_of_a_unit_is_a_string": (
        lambda: pk.BNReLU2d(4, momentum="0.1"),
        TypeError,
        "momentum: expected a number, got str",
    ),
    "from_modules_without_a_batch_norm": (
        lambda: pk.BNReLUConv2d.from_modules(nn.ReLU(), nn.Conv2d(8, 4, 1)),
        TypeError,
        "bn: expected an nn.BatchNorm2d, got ReLU",
    ),
    "from_modules_without_a_convolution": (
        lambda: pk.BNReLUConv2d.from_modules(nn.BatchNorm2d(8), nn.Conv1d(8, 4, 1)),
        TypeError,
        "conv: expected an nn.Conv2d, got Conv1d",
    ),
    "from_modules_of_other_channels": (
        lambda: pk.BNReLUConv2d.from_modules(nn.BatchNorm2d(8), nn.Conv2d(4, 8, 1)),
        ValueError,
        "conv: expected in_channels 8 to match bn, got 4",
    ),
}


@pytest.mark.parametrize(("construct", "error", "message"), CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_constructors_name_what_is_wrong(construct, error, message):
    with pytest.raises(error, match=re.escape(message)):
        construct()
