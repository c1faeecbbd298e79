"""Blocks and networks of the study: formulas, what runs fused, initialisation, errors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.study.blocks import (
    ACTIVATIONS,
    NORMS,
    PLACEMENTS,
    SHORTCUTS,
    BlockOptions,
    ResidualBlock,
    StochasticDepth,
)
from preact_kernels.study.networks import study_network

pytestmark = pytest.mark.backends("cpu")


def random_block(*sizes, is_bottleneck=False, **options):
    block = ResidualBlock(*sizes, BlockOptions(**options), is_bottleneck=is_bottleneck)
    for module in block.modules():  # as after training
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return block.double()


def images(channels=8, size=6):
    return torch.randn(4, channels, size, size, dtype=torch.float64)


def assert_is_formula(block, x, formula):
    torch.manual_seed(1)
    expected = formula(block, x)
    torch.manual_seed(1)
    assert torch.equal(block(x), expected)


def body(b, x):
    return b.conv2(F.relu(b.norm1(b.conv1(x))))


def projected(b, x):
    return b.projection_norm(b.projection(x))


PLACEMENT_FORMULAS = {
    "original": lambda b, x: F.relu(projected(b, x) + b.norm2(body(b, x))),
    "bn-after-addition": lambda b, x: F.relu(b.norm2(b.projection(x) + body(b, x))),
    "relu-before-addition": lambda b, x: projected(b, x) + F.relu(b.norm2(body(b, x))),
    "relu-only-preactivation": lambda b, x: projected(b, x.relu()) + b.norm2(body(b, x.relu())),
}


@pytest.mark.parametrize("name", PLACEMENT_FORMULAS)
def test_a_placement_is_its_formula(name):
    """A projection reads the input of conv1; it has a norm if the branch ends with one."""
    block = random_block(8, 16, 2, placement=name)
    assert_is_formula(block, images(), PLACEMENT_FORMULAS[name])


def gate(b, x):
    return torch.sigmoid(F.conv2d(x, b.gate.conv.weight, torch.full((8,), -3.0).double()))


SHORTCUT_FORMULAS = {
    "identity": lambda b, x, f: x + f,
    "constant-scaling": lambda b, x, f: 0.5 * x + f,
    "exclusive-gating": lambda b, x, f: (1 - gate(b, x)) * x + gate(b, x) * f,
    "shortcut-only-gating": lambda b, x, f: (1 - gate(b, x)) * x + f,
    "conv1x1": lambda b, x, f: projected(b, x) + f,
    "dropout": lambda b, x, f: F.dropout(x, 0.5) + f,
}


@pytest.mark.parametrize("name", SHORTCUTS)
def test_a_shortcut_is_its_formula(name):
    block = random_block(8, 8, 1, placement="original", shortcut=name, gate_bias=-3.0)
    formula = SHORTCUT_FORMULAS[name]
    assert_is_formula(block, images(), lambda b, x: F.relu(formula(b, x, b.norm2(body(b, x)))))


def test_the_other_options_of_a_block_are_their_formulas():
    """Dropout comes before the last convolution; the branch ends with se, then its scale."""
    options = {"activation": "silu", "dropout": 0.5, "se": True, "residual_scale": 0.25}
    options |= {"shortcut": "constant-scaling", "shortcut_scale": 0.75, "branch_scale": 0.5}
    block = random_block(32, 32, 1, **options)

    def formula(b, x):
        h = F.dropout(F.silu(b.norm2(b.conv1(F.silu(b.norm1(x))))), 0.5)
        s = b.conv2(h).mean((2, 3), keepdim=True)
        weights = b.se.expand(b.se.reduce(s).relu()).sigmoid()
        return 0.75 * x + 0.5 * (0.25 * (b.conv2(h) * weights))

    assert_is_formula(block, images(32), formula)
    assert (block.se.reduce.out_channels, block.se.expand.out_channels) == (2, 32)
    x = images()
    assert torch.equal(ACTIVATIONS["gelu"]()(x), F.gelu(x))


def test_full_preactivation_is_the_block_of_the_package():
    expected = pk.PreActBottleneck(8, 8, 2).double()
    expected.fused = False
    block, x = random_block(8, 8, 2, is_bottleneck=True), images()
    state = block.state_dict().items()
    names = [k.replace("norm", "bn").replace("projection", "shortcut") for k, _ in state]
    expected.load_state_dict(dict(zip(names, (v for _, v in state), strict=True)))
    assert torch.equal(block(x), expected(x))


NETWORKS = {
    **{name: {"placement": name} for name in PLACEMENTS if name != "full-preactivation"},
    "scaled": {"shortcut": "constant-scaling"},
    "gated": {"shortcut": "exclusive-gating"},
    "gelu and projections": {"activation": "gelu", "shortcut": "conv1x1"},
    "branches": {"width": 2, "dropout": 0.3, "se": True, "residual_scale": 0.5, "survival": 0.5},
}


@pytest.mark.parametrize("options", NETWORKS.values(), ids=NETWORKS)
def test_a_network_gives_the_same_fused_and_plain(options, backend):
    x, target = images(3, 8), torch.arange(4)
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        network = study_network(8, **options, fused=fused).double()
        torch.manual_seed(1)
        with pk.use_backend(backend):
            loss = F.cross_entropy(network(x), target)
            loss.backward()
        gradients = [p.grad for p in network.parameters()]
        found.append([loss.detach(), *gradients, *network.buffers()])
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


def test_what_runs_fused_is_printed():
    # A block is conv1, norm1-ReLU-conv2, norm2-add-ReLU; the norms of two projections run plain.
    assert "19 of 21 norms fused: " in str(study_network(20, placement="original"))
    assert "7 of 7 norms fused: " in str(study_network(8, norm="layer"))
    assert "plain PyTorch" in str(study_network(8, placement="original", fused=False))
    assert "fused=False" in str(study_network(8, fused=False))


def test_a_network_of_default_blocks_is_a_preact_resnet():
    network = study_network(29, memory="rebuild")
    assert isinstance(network, pk.PreActResNet)
    assert network.stages[0].memory == "rebuild"


# Layers


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("group", lambda x: F.group_norm(x, 3)),  # groups of 16 channels
        ("layer", lambda x: F.group_norm(x, 1)),
        ("rms", lambda x: x / (x.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()),
    ],
)
def test_a_norm_is_its_formula(name, formula):
    norm, x = NORMS[name](48).double(), images(48)
    nn.init.uniform_(norm.weight)
    torch.testing.assert_close(norm(x), formula(x) * norm.weight[:, None, None])


def test_stochastic_depth_drops_whole_images_more_often_with_depth():
    layer, x = StochasticDepth(0.75), torch.ones(4000, 2, 3, 3)
    y = layer(x)
    assert y.flatten(1).unique(dim=1).shape == (4000, 1)
    torch.testing.assert_close(y.unique(), torch.tensor([0, 1 / 0.75]))
    assert abs(float(y.mean()) - 1) < 0.05
    assert torch.equal(layer.eval()(x), x)
    network = study_network(20, survival=0.1, fused=False)
    found = [m.survival for m in network.modules() if isinstance(m, StochasticDepth)]
    assert found == pytest.approx([1 - 0.1 * i for i in range(1, 10)])


# Networks


def test_other_families_take_other_blocks():
    options = {"placement": "original", "fused": False}
    wide = {"groups": 4, "base_width": 32, "stride_on": "conv1"}
    with torch.device("meta"):
        network = study_network(50, 7, variant="imagenet", **wide, **options)
        small = study_network(18, variant="cifar-wide-stem", width=2, **options)
        bottlenecks = study_network(20, block="bottleneck", **options)
        sizes = []
        for found, classes, size in ((network, 7, 64), (small, 10, 32)):
            found.stages.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[-1]))
            assert found(torch.empty(2, 3, size, size)).shape == (2, classes)
    assert sizes == [16, 32]
    assert small.stages[0][0].conv1.out_channels == 2 * 64
    assert bottlenecks.stages[0][0].conv_count == 3
    block = network.stages[1][0]
    assert block.conv2.groups == 4
    assert [c.out_channels for c in (block.conv1, block.conv2, block.conv3)] == [256, 256, 512]
    assert [c.stride[0] for c in (block.conv1, block.conv2, block.projection)] == [2, 1, 2]


def test_norm_and_activation_stand_between_stem_and_classifier_once():
    for name in PLACEMENTS:
        before = PLACEMENTS[name].before
        network = study_network(8, placement=name, survival=0.5, fused=False)
        layers = (network.stem_norm, network.stem_act, network.norm, network.act)
        in_blocks = ("norm" in before, "act" in before)
        expected = [*in_blocks, *(not found for found in in_blocks)]
        assert [isinstance(layer, nn.Identity) for layer in layers] == expected, name


def test_convolutions_are_initialised_by_fan_out_or_orthogonal():
    network = study_network(29, placement="original", fused=False)
    for weight in (network.stages[2][1].conv1.weight, network.stages[2][1].conv3.weight):
        assert weight.std().item() == pytest.approx((2 / weight.shape[0]) ** 0.5, rel=0.05)
    assert not network.fc.bias.any()
    weight = study_network(8, init="orthogonal").stages[0][0].conv1.weight.flatten(1)
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(16), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["original", "bn-after-addition", "full-preactivation"])
def test_zero_branch_networks_begin_as_their_shortcuts_and_train(name):
    network = study_network(14, placement=name, init="zero-branch", fused=False)
    inputs = {}
    block = network.stages[0][1]
    block.register_forward_hook(lambda m, args, y: inputs.update(x=args[0], y=y))
    network(torch.randn(4, 3, 8, 8)).square().sum().backward()
    x = inputs["x"]
    if name == "bn-after-addition":
        x = F.relu(F.batch_norm(x, None, None, training=True))
    torch.testing.assert_close(inputs["y"], x)
    last = getattr(block, "last_norm", None) or block.conv2
    assert last.weight.grad.abs().max() > 0


def test_wrong_options_are_named():
    known = {"placement": PLACEMENTS, "shortcut": SHORTCUTS, "norm": NORMS}
    known |= {"activation": ACTIVATIONS, "init": ("he", "orthogonal", "zero-branch")}
    unknown = [
        ({name: "no"}, f"{name}: expected one of {', '.join(map(repr, values))}, got 'no'")
        for name, values in known.items()
    ]
    for options, message in (
        *unknown,
        ({"placements": "original"}, "placements: unknown; expected one of placement, "),
        ({"gate_bias": "-6"}, "gate_bias: expected a number, got str"),
        ({"se": 1}, "se: expected a bool, got int"),
        ({"dropout": 1.0}, "dropout: expected at least 0 and below 1, got 1.0"),
        ({"survival": 0.0}, "survival: expected above 0 and at most 1, got 0.0"),
        ({"groups": 2}, "groups: expected 1 with basic blocks, got 2"),
        ({"depth": 29, "base_width": 1}, "base_width: expected at least 4 for 16 chan"),
        ({"se": True, "memory": "rebuild"}, "memory: expected 'store' with options"),
        ({"residual_scale": 0.0, "init": "zero-branch"}, "init: .* multiplied by zero"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            study_network(**{"depth": 20, **options})
