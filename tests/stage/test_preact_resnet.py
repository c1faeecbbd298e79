"""The networks: their shapes, their keys, and training steps beside plain PyTorch."""

import copy

import pytest
import torch

import preact_kernels as pk
from tests.oracle import assert_same_bits, check, plain_copy, same_bits

# depth, options, blocks of each stage, parameters in millions
NETWORKS = (
    (20, {}, (3, 3, 3), None),
    (29, {}, (3, 3, 3), None),
    (47, {}, (5, 5, 5), None),
    (56, {}, (9, 9, 9), None),
    (110, {}, (18, 18, 18), 1.7),
    (110, {"block": "bottleneck"}, (12, 12, 12), 1.15),
    (164, {}, (18, 18, 18), 1.7),
    (164, {"block": "basic"}, (27, 27, 27), 2.6),
    (1001, {}, (111, 111, 111), 10.3),
    (28, {"width": 10}, (4, 4, 4), 36.5),
    (16, {"width": 4}, (2, 2, 2), 2.7),
    (18, {"variant": "imagenet", "num_classes": 1000}, (2, 2, 2, 2), 11.7),
    (34, {"variant": "imagenet", "num_classes": 1000}, (3, 4, 6, 3), 21.8),
    (50, {"variant": "imagenet", "num_classes": 1000}, (3, 4, 6, 3), 25.5),
    (101, {"variant": "imagenet", "num_classes": 1000}, (3, 4, 23, 3), 44.5),
    (152, {"variant": "imagenet", "num_classes": 1000}, (3, 8, 36, 3), 60.2),
    (200, {"variant": "imagenet", "num_classes": 1000}, (3, 24, 36, 3), 64.7),
    (
        50,
        {"variant": "imagenet", "num_classes": 1000, "groups": 32, "base_width": 4},
        (3, 4, 6, 3),
        25.0,
    ),
    (18, {"variant": "cifar-wide-stem"}, (2, 2, 2, 2), 11.2),
    (152, {"variant": "cifar-wide-stem"}, (3, 8, 36, 3), 58.1),
)


def network_on_meta(*args, **options):
    with torch.device("meta"):
        return pk.preact_resnet(*args, **options)


def parameters_of(network):
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(("depth", "options", "counts", "millions"), NETWORKS)
def test_blocks_parameters_and_convolutions(depth, options, counts, millions):
    network = network_on_meta(depth, **options)
    assert tuple(len(stage) for stage in network.stages) == counts
    if millions is not None:
        assert parameters_of(network) / 1e6 == pytest.approx(millions, abs=0.06)
    convolutions = [
        name
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Conv2d) and not name.endswith("shortcut")
    ]
    # WideResNets count the convolution of the first projection too: 6n + 4.
    assert len(convolutions) + 1 == depth - 2 * (options.get("width", 1) > 1)


def test_1001_layers_are_333_blocks_of_bottlenecks():
    network = network_on_meta(1001)
    blocks = [m for m in network.modules() if isinstance(m, pk.PreActBottleneck)]
    assert len(blocks) == 333
    assert round(parameters_of(network) / 1e6, 1) == 10.3
    shapes = {tuple(s[-1].conv3.weight.shape) for s in network.stages}
    assert shapes == {(64, 16, 1, 1), (128, 32, 1, 1), (256, 64, 1, 1)}


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("depth", "options", "sizes"),
    [
        (29, {}, [(64, 32), (128, 16), (256, 8)]),
        (20, {}, [(16, 32), (32, 16), (64, 8)]),
        (16, {"width": 2}, [(32, 32), (64, 16), (128, 8)]),
        (50, {"variant": "imagenet"}, [(256, 8), (512, 4), (1024, 2), (2048, 1)]),
        (18, {"variant": "cifar-wide-stem"}, [(64, 32), (128, 16), (256, 8), (512, 4)]),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_channels_and_pixels_behind_every_stage(depth, options, sizes, fused):
    network = pk.preact_resnet(depth, fused=fused, **options).eval()
    found = []
    for stage in network.stages:
        stage.register_forward_hook(lambda m, args, y: found.append((y.shape[1], *y.shape[2:])))
    with torch.no_grad():
        y = network(torch.randn(2, 3, 32, 32))
    assert found == [(channels, size, size) for channels, size in sizes]
    assert y.shape == (2, 10)


def test_shapes_can_be_asked_of_the_meta_device():
    assert network_on_meta(29)(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(20, pk.PreActBasicBlock), (110, pk.PreActBasicBlock), (164, pk.PreActBottleneck)],
)
def test_depths_that_fit_both_blocks_take_the_papers(depth, expected):
    block = network_on_meta(depth).stages[0][0]
    assert type(block) is expected


@pytest.mark.parametrize(("stride_on", "strides"), [("conv1", (2, 1)), ("conv2", (1, 2))])
def test_stride_sits_where_it_is_asked_for(stride_on, strides):
    block = network_on_meta(29, stride_on=stride_on).stages[1][0]
    assert (block.conv1.stride[0], block.conv2.stride[0]) == strides


def test_only_the_first_block_of_a_stage_has_a_projection():
    network = network_on_meta(47)
    for stage in network.stages:
        assert [hasattr(block, "shortcut") for block in stage] == [True] + [False] * 4


ERRORS = (
    ((21,), {}, ValueError, r"depth: expected .*nearest are 20 and 26, got 21"),
    ((1000,), {}, ValueError, r"depth: expected .*nearest are 998 and 1001, got 1000"),
    ((29,), {"block": "basic"}, ValueError, r"nearest are 26 and 32, got 29"),
    ((32,), {"block": "bottleneck"}, ValueError, r"nearest are 29 and 38, got 32"),
    ((19,), {"variant": "imagenet"}, ValueError, r"depth: expected one of 18, 34, .*, got 19"),
    ((200,), {"variant": "cifar-wide-stem"}, ValueError, r"depth: expected one of 18, .*got 200"),
    ((50,), {"variant": "imagenet", "block": "basic"}, ValueError, "block: expected 'bottleneck'"),
    ((20,), {"variant": "mnist"}, ValueError, r"variant: expected one of 'cifar', .*got 'mnist'"),
    ((20,), {"block": "wide"}, ValueError, r"block: expected one of .*got 'wide'"),
    ((29,), {"stride_on": "conv3"}, ValueError, r"stride_on: expected one of .*got 'conv3'"),
    ((20,), {"memory": "all"}, ValueError, r"memory: expected .*got 'all'"),
    ((20,), {"width": 0}, ValueError, r"width: expected at least 1, got 0"),
    ((20,), {"groups": 2}, ValueError, r"groups: expected 1 beside basic blocks, got 2"),
    ((29,), {"base_width": 0}, ValueError, r"base_width: expected at least 1, got 0"),
    ((20, 0), {}, ValueError, r"num_classes: expected at least 1, got 0"),
    ((-7,), {}, ValueError, r"depth: expected at least 1, got -7"),
    (("20",), {}, TypeError, r"depth: expected an int, got str"),
    ((20.0,), {}, TypeError, r"depth: expected an int, got float"),
    ((20,), {"segments": 2}, ValueError, r"segments: expected None beside memory 'store', got 2"),
    ((20,), {"memory": "checkpoint", "segments": 0}, ValueError, r"segments: expected 1 to 3"),
    ((20,), {"memory": "checkpoint", "fused": False}, ValueError, r"memory: expected 'store'"),
    ((20,), {"anchor_every": 4}, ValueError, r"anchor_every: expected None beside memory 'store'"),
    ((20,), {"memory": "rebuild", "anchor_every": 4}, ValueError, r"anchor_every: expected 1 to 3"),
    ((20,), {"residual_dtype": torch.bfloat16}, ValueError, r"residual_dtype: expected torch.fl"),
)


@pytest.mark.parametrize(("args", "options", "error", "message"), ERRORS)
def test_wrong_arguments_are_named(args, options, error, message):
    with pytest.raises(error, match=message):
        network_on_meta(*args, **options)


def test_segments_and_anchors_may_exceed_the_blocks_of_a_short_stage():
    options = {"variant": "imagenet", "memory": "checkpoint", "segments": 6, "anchor_every": 5}
    stages = network_on_meta(50, **options).stages
    assert [stage.segments for stage in stages] == [3, 4, 6, 3]
    assert [stage.anchor_every for stage in stages] == [3, 4, 5, 3]


VARIANTS = (
    (29, {}),
    (20, {"stride_on": "conv1"}),
    (16, {"width": 2}),
    (18, {"variant": "imagenet"}),
    (18, {"variant": "cifar-wide-stem"}),
)


@pytest.mark.parametrize(("depth", "options"), VARIANTS)
def test_state_dict_loads_both_ways_and_a_seed_gives_the_same_values(depth, options):
    networks = []
    for fused in (True, False):
        torch.manual_seed(5)
        networks.append(pk.preact_resnet(depth, fused=fused, **options))
    fused, plain = networks
    assert_same_bits(fused.state_dict(), plain.state_dict())
    assert list(fused.state_dict()) == list(plain.state_dict())
    other = pk.preact_resnet(depth, **options).state_dict()
    plain.load_state_dict(other, strict=True)
    fused.load_state_dict(plain.state_dict(), strict=True)
    assert_same_bits(fused.state_dict(), other)


def test_initial_values_are_he_by_fan_out():
    network = pk.preact_resnet(29)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Conv2d) and module.weight.numel() > 5000:
            fan_out = module.weight[:, 0].numel()
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1), name
        elif isinstance(module, torch.nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


@pytest.mark.covering(2)
@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.parametrize(
    "options",
    [{}, {"memory": "rebuild"}, {"memory": "checkpoint"}],
    ids=["store", "rebuild", "checkpoint"],
)
@pytest.mark.parametrize("depth", [20, 29])
def test_logits_and_all_gradients_equal_the_plain_network(depth, options, wide_dtype):
    network = pk.preact_resnet(depth, **options).to(wide_dtype)
    x = torch.randn(4, 3, 16, 16).to(wide_dtype)
    check(network, plain_copy(network), {"x": x}, draws=1)


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_a_grouped_network_equals_the_plain_one(backend):
    network = pk.preact_resnet(29, groups=4, base_width=32)
    check(network, plain_copy(network), {"x": torch.randn(2, 3, 8, 8)}, draws=1)


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.parametrize("variant", ["imagenet", "cifar-wide-stem"])
def test_four_stage_networks_equal_the_plain_ones(variant, backend):
    network = pk.preact_resnet(18, variant=variant)
    size = 64 if variant == "imagenet" else 16
    check(network, plain_copy(network), {"x": torch.randn(2, 3, size, size)}, draws=1)


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_evaluation_after_training_equals_the_plain_network(wide_dtype):
    network = pk.preact_resnet(20).to(wide_dtype)
    for _ in range(3):
        network(torch.randn(4, 3, 16, 16).to(wide_dtype))
    network.eval()
    check(network, plain_copy(network), {"x": torch.randn(4, 3, 16, 16).to(wide_dtype)}, draws=1)


def test_plain_networks_are_made_of_plain_modules():
    network = pk.preact_resnet(20, fused=False)
    assert all(type(stage) is torch.nn.Sequential for stage in network.stages)
    x = torch.randn(2, 3, 8, 8)
    fused = copy.deepcopy(network)
    seen = []
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.Conv2d):
            module.register_forward_hook(lambda m, args, y: seen.append(m))
    hooked = network(x)
    assert len(seen) == 1 + 2 * 18 + 2 + 1
    assert same_bits(hooked, fused(x))
