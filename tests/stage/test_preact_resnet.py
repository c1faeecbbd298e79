"""The networks: their shapes, their keys, and training steps beside plain PyTorch."""

import copy

import pytest
import torch

import preact_kernels as pk
from tests.oracle import assert_same_bits, check, plain_copy, same_bits

IMAGENET = {"variant": "imagenet", "num_classes": 1000}
WIDE_STEM = {"variant": "cifar-wide-stem"}
on_cpu = pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
# depth, options, blocks of each stage, parameters in millions
NETWORKS = (
    (110, {}, (18, 18, 18), 1.7),
    (110, {"block": "bottleneck"}, (12, 12, 12), 1.15),
    (164, {}, (18, 18, 18), 1.7),
    (28, {"width": 10}, (4, 4, 4), 36.5),
    (18, IMAGENET, (2, 2, 2, 2), 11.7),
    (34, IMAGENET, (3, 4, 6, 3), 21.8),
    (101, IMAGENET, (3, 4, 23, 3), 44.5),
    (152, IMAGENET, (3, 8, 36, 3), 60.2),
    (200, IMAGENET, (3, 24, 36, 3), 64.7),
    (50, {**IMAGENET, "groups": 32, "base_width": 4}, (3, 4, 6, 3), 25.0),
    (18, WIDE_STEM, (2, 2, 2, 2), 11.2),
)


def network_on_meta(*args, **options):
    with torch.device("meta"):
        return pk.preact_resnet(*args, **options)


@pytest.mark.parametrize(("depth", "options", "counts", "millions"), NETWORKS)
def test_blocks_parameters_and_convolutions(depth, options, counts, millions):
    network = network_on_meta(depth, **options)
    assert tuple(len(stage) for stage in network.stages) == counts
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    convolutions = [
        name
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Conv2d) and not name.endswith("shortcut")
    ]
    # WideResNets count the convolution of the first projection too: 6n + 4.
    assert len(convolutions) + 1 == depth - 2 * (options.get("width", 1) > 1)


@pytest.mark.parametrize(
    ("depth", "options", "sizes"),
    [
        (29, {}, [(64, 32), (128, 16), (256, 8)]),
        (16, {"width": 2}, [(32, 32), (64, 16), (128, 8)]),
        (50, {"variant": "imagenet"}, [(256, 8), (512, 4), (1024, 2), (2048, 1)]),
        (18, WIDE_STEM, [(64, 32), (128, 16), (256, 8), (512, 4)]),
    ],
)
def test_channels_and_pixels_behind_every_stage_of_a_network_on_meta(depth, options, sizes):
    network = network_on_meta(depth, **options)
    found = []
    for stage in network.stages:
        stage.register_forward_hook(lambda m, args, y: found.append((y.shape[1], *y.shape[2:])))
    y = network(torch.empty(2, 3, 32, 32, device="meta"))
    assert found == [(channels, size, size) for channels, size in sizes]
    assert y.shape == (2, 10)


@pytest.mark.parametrize(("stride_on", "strides"), [("conv1", (2, 1)), ("conv2", (1, 2))])
def test_stride_and_projection_sit_where_they_are_asked_for(stride_on, strides):
    for index, stage in enumerate(network_on_meta(29, stride_on=stride_on).stages):
        assert [hasattr(block, "shortcut") for block in stage] == [True, False, False]
        found = (stage[0].conv1.stride[0], stage[0].conv2.stride[0])
        assert found == (strides if index else (1, 1))


ERRORS = (
    (ValueError, (21,), {}, r"depth: expected .*nearest are 20 and 26, got 21"),
    (ValueError, (29,), {"block": "basic"}, r"nearest are 26 and 32, got 29"),
    (ValueError, (32,), {"block": "bottleneck"}, r"nearest are 29 and 38, got 32"),
    (ValueError, (19,), {"variant": "imagenet"}, r"depth: expected one of 18, 34, .*, got 19"),
    (ValueError, (200,), WIDE_STEM, r"depth: expected one of 18, .*got 200"),
    (ValueError, (50,), {"variant": "imagenet", "block": "basic"}, "block: expected 'bottleneck'"),
    (ValueError, (20,), {"variant": "mnist"}, r"variant: expected one of 'cifar', .*got 'mnist'"),
    (ValueError, (20,), {"block": "wide"}, r"block: expected one of .*got 'wide'"),
    (ValueError, (29,), {"stride_on": "conv3"}, r"stride_on: expected one of .*got 'conv3'"),
    (ValueError, (20,), {"width": 0}, r"width: expected at least 1, got 0"),
    (ValueError, (20,), {"groups": 2}, r"groups: expected 1 with basic blocks, got 2"),
    (ValueError, (29,), {"base_width": 0}, r"base_width: expected at least 1, got 0"),
    (ValueError, (20, 0), {}, r"num_classes: expected at least 1, got 0"),
    (ValueError, (-7,), {}, r"depth: expected at least 1, got -7"),
    (TypeError, (20.0,), {}, r"depth: expected an int, got float"),
    (ValueError, (20,), {"memory": "all", "fused": False}, r"memory: expected .*got 'all'"),
    (ValueError, (20,), {"memory": "checkpoint", "fused": False}, r"memory: expected 'store'"),
    (ValueError, (20,), {"memory": "checkpoint", "segments": 4}, r"segments: expected 1 to 3"),
    (ValueError, (20,), {"memory": "rebuild", "anchor_every": 4}, r"anchor_every: expected 1 to 3"),
    (ValueError, (20,), {"residual_dtype": torch.half, "fused": False}, r"residual_dtype: expect"),
)


@pytest.mark.parametrize(("error", "args", "options", "message"), ERRORS)
def test_wrong_arguments_are_named(error, args, options, message):
    with pytest.raises(error, match=message):
        network_on_meta(*args, **options)


def test_segments_and_anchors_may_exceed_the_blocks_of_a_short_stage():
    options = {"variant": "imagenet", "memory": "checkpoint", "segments": 6, "anchor_every": 5}
    stages = network_on_meta(50, **options).stages
    assert [stage.segments for stage in stages] == [3, 4, 6, 3]
    assert [stage.anchor_every for stage in stages] == [3, 4, 5, 3]


VARIANTS = ((29, {"stride_on": "conv1"}), (16, {"width": 2}), (18, IMAGENET), (18, WIDE_STEM))


@pytest.mark.parametrize(("depth", "options"), VARIANTS)
def test_state_dict_loads_both_ways_and_a_seed_gives_the_same_values(depth, options):
    networks = []
    for fused in (True, False):
        torch.manual_seed(5)
        networks.append(pk.preact_resnet(depth, fused=fused, **options))
    fused, plain = networks
    assert_same_bits(fused.state_dict(), plain.state_dict())
    assert list(fused.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(fused.state_dict(), strict=True)
    fused.load_state_dict(plain.state_dict(), strict=True)


def test_initial_values_are_he_by_fan_out():
    network = pk.preact_resnet(29)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Conv2d) and module.weight.numel() > 5000:
            fan_out = module.weight[:, 0].numel()
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1), name
        elif isinstance(module, torch.nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


@on_cpu
@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize("depth", [20, 29])
def test_logits_and_all_gradients_equal_the_plain_network(depth, memory, wide_dtype):
    network = pk.preact_resnet(depth, memory=memory).to(wide_dtype)
    x = torch.randn(4, 3, 16, 16).to(wide_dtype)
    check(network, plain_copy(network), {"x": x}, draws=1)


@on_cpu
def test_a_network_of_grouped_bottlenecks_equals_the_plain_one(backend):
    network = pk.preact_resnet(29, groups=4, base_width=32)
    check(network, plain_copy(network), {"x": torch.randn(2, 3, 8, 8)}, draws=1)


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
