"""Units and networks of the study: formulas, what runs fused, initialisation, errors."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.study.networks import study_network
from preact_kernels.study.units import (
    NORMS,
    PLACEMENTS,
    SHORTCUTS,
    ResidualUnit,
    RMSNorm2d,
    SqueezeExcitation,
    StochasticDepth,
    UnitOptions,
)

pytestmark = pytest.mark.backends("cpu")
KINDS = pytest.mark.parametrize("is_bottleneck", [False, True], ids=["basic", "bottleneck"])


def unit(in_channels=8, channels=8, stride=1, *, is_bottleneck=False, **options):
    made = ResidualUnit(
        in_channels, channels, stride, UnitOptions(**options), is_bottleneck=is_bottleneck
    )
    for module in made.modules():  # as after training
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return made.double()


def images(channels=8, size=6):
    return torch.randn(4, channels, size, size, dtype=torch.float64)


FORMULAS = {
    "original": lambda u, x: F.relu(x + u.norm2(u.conv2(F.relu(u.norm1(u.conv1(x)))))),
    "bn-after-addition": lambda u, x: F.relu(u.norm2(x + u.conv2(F.relu(u.norm1(u.conv1(x)))))),
    "relu-before-addition": lambda u, x: x + F.relu(u.norm2(u.conv2(F.relu(u.norm1(u.conv1(x)))))),
    "relu-only-preactivation": lambda u, x: (
        x + u.norm2(u.conv2(F.relu(u.norm1(u.conv1(F.relu(x))))))
    ),
    "full-preactivation": lambda u, x: x + u.conv2(F.relu(u.norm2(u.conv1(F.relu(u.norm1(x)))))),
}


def test_every_placement_has_a_formula():
    assert FORMULAS.keys() == PLACEMENTS.keys()


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_is_its_formula(name):
    u, x = unit(placement=name), images()
    assert torch.equal(u(x), FORMULAS[name](u, x))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_projection_ends_as_the_branch_does(name):
    """It reads what conv1 reads, and has a norm where the branch ends with one."""
    u, x = unit(8, 16, 2, placement=name), images()
    read = {"full-preactivation": lambda: F.relu(u.norm1(x)), "relu-only-preactivation": x.relu}
    shortcut = u.projection(read.get(name, lambda: x)())
    if name not in ("bn-after-addition", "full-preactivation"):
        shortcut = u.projection_norm(shortcut)
    # The formula of the branch alone: that of the unit, with a shortcut of zeros.
    a = {"full-preactivation": lambda: F.relu(u.norm1(x)), "relu-only-preactivation": x.relu}
    h = u.conv1(a.get(name, lambda: x)())
    h = u.conv2(F.relu((u.norm2 if name == "full-preactivation" else u.norm1)(h)))
    if name in ("original", "relu-only-preactivation", "relu-before-addition"):
        h = u.norm2(h)
    if name == "relu-before-addition":
        h = h.relu()
    y = shortcut + h
    y = {"original": lambda: y.relu(), "bn-after-addition": lambda: u.norm2(y).relu()}.get(
        name, lambda: y
    )()
    assert torch.equal(u(x), y)


def gate(u, x):
    return torch.sigmoid(F.conv2d(x, u.gate.conv.weight, u.gate.conv.bias))


SHORTCUT_FORMULAS = {
    "identity": lambda u, x, f: x + f,
    "constant-scaling": lambda u, x, f: 0.5 * x + f,
    "exclusive-gating": lambda u, x, f: (1 - gate(u, x)) * x + gate(u, x) * f,
    "shortcut-only-gating": lambda u, x, f: (1 - gate(u, x)) * x + f,
    "conv1x1": lambda u, x, f: u.projection_norm(u.projection(x)) + f,
    "dropout": lambda u, x, f: F.dropout(x, 0.5) + f,
}


@pytest.mark.parametrize("name", SHORTCUTS)
def test_a_shortcut_is_its_formula(name):
    u, x = unit(placement="original", shortcut=name), images()
    f = u.norm2(u.conv2(F.relu(u.norm1(u.conv1(x)))))
    torch.manual_seed(1)
    expected = F.relu(SHORTCUT_FORMULAS[name](u, x, f))
    torch.manual_seed(1)
    assert torch.equal(u(x), expected)


def test_gates_and_scales_start_as_the_options_say():
    u = unit(shortcut="exclusive-gating", gate_bias=-3.0)
    assert torch.equal(u.gate.conv.bias, torch.full((8,), -3.0, dtype=torch.float64))
    u, x = unit(shortcut="constant-scaling", shortcut_scale=0.25, branch_scale=0.75), images()
    f = u.conv2(F.relu(u.norm2(u.conv1(F.relu(u.norm1(x))))))
    torch.testing.assert_close(u(x), 0.25 * x + 0.75 * f)


@KINDS
def test_full_preactivation_is_the_block_of_the_package(is_bottleneck):
    block = (pk.PreActBottleneck if is_bottleneck else pk.PreActBasicBlock)(8, 8, 2).double()
    block.fused = False
    u = unit(8, 8, 2, is_bottleneck=is_bottleneck)
    names = {"norm": "bn", "projection": "shortcut"}
    state = u.state_dict()
    for old, new in names.items():
        state = {k.replace(old, new): v for k, v in state.items()}
    block.load_state_dict(state)
    x = images()
    assert torch.equal(u(x), block(x))


# Fused against plain


def gradients(network, x, target):
    loss = F.cross_entropy(network(x), target)
    loss.backward()
    return loss.detach(), [p.grad for p in network.parameters()]


NETWORKS = {
    **{name: {"placement": name} for name in PLACEMENTS if name != "full-preactivation"},
    **{name: {"shortcut": name} for name in SHORTCUTS if name != "identity"},
    "wide with dropout": {"width": 2, "dropout": 0.3},
    "se": {"se": True},
    "residual scale": {"residual_scale": 0.5},
    "stochastic depth": {"survival": 0.5},
    "group norm": {"norm": "group"},
    "gelu": {"activation": "gelu"},
}


@pytest.mark.parametrize("options", NETWORKS.values(), ids=NETWORKS)
def test_a_network_gives_the_same_fused_and_plain(options, backend):
    x, target = images(3, 8), torch.arange(4)
    found = []
    with pk.use_backend(backend):
        for fused in (True, False):
            torch.manual_seed(0)
            network = study_network(8, **options, fused=fused).double()
            torch.manual_seed(1)
            loss, grads = gradients(network, x, target)
            found.append((loss, *grads, *network.buffers()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_conv_bn_relu_bodies_run_fused_inside():
    network = study_network(20, placement="original")
    report = {site.name: site.fused for site in pk.conversion_report(network)}
    assert all(report[f"stages.0.{i}.norm1"] for i in range(3))  # conv1, norm1-ReLU-conv2, norm2
    assert not any(report[f"stages.0.{i}.norm2"] for i in range(3))
    assert "10 of 21 batch norms fused: " in str(network)


def test_what_runs_plain_is_printed():
    assert "plain PyTorch: no batch norm" in str(study_network(8, norm="layer"))
    assert "plain PyTorch" in str(study_network(8, placement="original", fused=False))
    assert "fused=False" in str(study_network(8, fused=False))


def test_a_plain_full_preactivation_network_is_that_of_the_package():
    network = study_network(29, memory="rebuild")
    assert isinstance(network, pk.PreActResNet)
    assert network.stages[0].memory == "rebuild"


# Layers


def test_rms_norm_is_its_formula():
    norm, x = RMSNorm2d(3).double(), images(3)
    nn.init.uniform_(norm.weight)
    rms = (x.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), x / rms * norm.weight[:, None, None])


def test_squeeze_and_excitation_is_its_formula():
    se, x = SqueezeExcitation(32).double(), images(32)
    s = x.mean((2, 3))
    s = F.relu(F.linear(s, se.reduce.weight[:, :, 0, 0], se.reduce.bias))
    s = torch.sigmoid(F.linear(s, se.expand.weight[:, :, 0, 0], se.expand.bias))
    torch.testing.assert_close(se(x), x * s[:, :, None, None])
    assert se.reduce.out_channels == 2


def test_stochastic_depth_drops_whole_images_and_keeps_the_mean():
    layer, x = StochasticDepth(0.75), torch.ones(4000, 2, 3, 3)
    y = layer(x)
    assert y.flatten(1).unique(dim=1).shape == (4000, 1)
    torch.testing.assert_close(y.unique(), torch.tensor([0, 1 / 0.75]))
    assert abs(float(y.mean()) - 1) < 0.05
    assert torch.equal(layer.eval()(x), x)


def test_survival_falls_linearly_with_the_blocks():
    network = study_network(20, survival=0.1)
    found = [m.survival for m in network.modules() if isinstance(m, StochasticDepth)]
    assert found == pytest.approx([1 - 0.1 * i for i in range(1, 10)])


def test_dropout_stands_ahead_of_the_last_convolution():
    u, x = unit(dropout=0.5), images()
    torch.manual_seed(1)
    h = F.dropout(F.relu(u.norm2(u.conv1(F.relu(u.norm1(x))))), 0.5)
    torch.manual_seed(1)
    assert torch.equal(u(x), x + u.conv2(h))


def test_a_residual_scale_of_zero_begins_with_the_shortcuts():
    u, x = unit(residual_scale=0.0), images()
    assert torch.equal(u(x), x)
    u(x).square().sum().backward()
    assert u.residual_scale.grad != 0


def test_squeeze_and_excitation_ends_the_branch():
    u, x = unit(16, 16, se=True), images(16)
    f = u.conv2(F.relu(u.norm2(u.conv1(F.relu(u.norm1(x))))))
    assert torch.equal(u(x), x + u.se(f))


@pytest.mark.parametrize(("name", "groups"), [("group", 3), ("layer", 1)], ids=["group", "layer"])
def test_group_and_layer_norm_are_their_formulas(name, groups):
    """Groups of 16 channels, or one of all, over the channels and pixels of an image."""
    norm, x = NORMS[name](48).double(), images(48)
    split = x.view(4, groups, -1)
    std, mean = torch.std_mean(split, 2, correction=0, keepdim=True)
    torch.testing.assert_close(norm(x), ((split - mean) / std).view_as(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "function"), [("gelu", F.gelu), ("silu", F.silu)])
def test_activations_are_their_functions(name, function):
    u, x = unit(activation=name), images()
    assert torch.equal(u(x), x + u.conv2(function(u.norm2(u.conv1(function(u.norm1(x)))))))


def test_bottlenecks_take_groups_width_and_the_place_of_the_stride():
    options = {"groups": 4, "base_width": 32, "stride_on": "conv1", "variant": "imagenet"}
    network = study_network(50, placement="original", fused=False, **options)
    block = network.stages[1][0]
    assert block.conv2.groups == 4
    assert [c.out_channels for c in (block.conv1, block.conv2, block.conv3)] == [256, 256, 512]
    assert [c.stride[0] for c in (block.conv1, block.conv2, block.projection)] == [2, 1, 2]


# Networks


def conv_weights(network):
    return sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Conv2d))


def test_parameters_of_published_networks():
    wide = study_network(28, width=10, block="basic", dropout=0.3, fused=False)
    assert sum(p.numel() for p in wide.parameters()) == 36_479_194  # arXiv 1605.07146: 36.5 M
    resnext = study_network(50, 1000, variant="imagenet", groups=32, base_width=4, fused=False)
    assert conv_weights(resnext) == 22_911_680  # those of torchvision's resnext50_32x4d
    se = study_network(50, 1000, variant="imagenet", se=True, fused=False)
    se_weights = sum(2 * n * c * (c // 16) for n, c in ((3, 256), (4, 512), (6, 1024), (3, 2048)))
    plain = study_network(50, 1000, variant="imagenet", fused=False)
    assert conv_weights(se) - conv_weights(plain) == se_weights


@pytest.mark.parametrize("variant", ["imagenet", "cifar-wide-stem"])
def test_other_families_take_other_units(variant):
    network = study_network(18, 7, variant=variant, placement="original", fused=False)
    assert network(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    assert isinstance(network.pool, nn.MaxPool2d) == (variant == "imagenet")


@pytest.mark.parametrize("name", PLACEMENTS)
def test_norm_and_activation_stand_between_stem_and_classifier_once(name):
    before = PLACEMENTS[name].before
    if name == "full-preactivation":
        return  # a PreActResNet
    network = study_network(8, placement=name, fused=False)
    for kind, stem, head in (
        ("norm", network.stem_norm, network.norm),
        ("act", network.stem_act, network.act),
    ):
        assert isinstance(stem, nn.Identity) == (kind in before)
        assert isinstance(head, nn.Identity) == (kind not in before)


def test_he_initialisation_is_by_fan_out():
    network = study_network(29, placement="original", fused=False)
    for weight in (network.stages[2][1].conv1.weight, network.stages[2][1].conv3.weight):
        assert weight.std().item() == pytest.approx((2 / weight.shape[0]) ** 0.5, rel=0.05)
    assert not network.fc.bias.any()


def test_orthogonal_initialisation():
    network = study_network(8, init="orthogonal")
    weight = network.stages[0][0].conv1.weight.flatten(1)
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(16), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in PLACEMENTS if n != "relu-before-addition"])
def test_zero_branch_networks_begin_as_their_shortcuts_and_train(name):
    torch.manual_seed(0)
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


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "post"}, "placement: expected one of 'original'.*'full-preactivation', got"),
        ({"shortcut": "gate"}, "shortcut: expected one of 'identity'.*'dropout', got 'gate'"),
        ({"norm": "instance"}, "norm: expected one of 'batch'.*'rms', got 'instance'"),
        ({"activation": "tanh"}, "activation: expected one of 'relu', 'gelu', 'silu', got 'tanh'"),
        ({"init": "xavier"}, "init: expected one of 'he', 'orthogonal', 'zero-branch', got"),
        ({"dropout": 1.0}, "dropout: expected at least 0 and below 1, got 1.0"),
        ({"survival": 0.0}, "survival: expected above 0 and at most 1, got 0.0"),
        ({"se": True, "memory": "rebuild"}, "memory: expected 'store' beside options of units"),
        ({"se": True, "anchor_every": 2}, "anchor_every: expected None beside options of units"),
        (
            {"residual_scale": 0.0, "init": "zero-branch"},
            "init: expected 'he' or 'orthogonal' beside branches that are multiplied by zero",
        ),
        (
            {"depth": 29, "base_width": 1, "placement": "original"},
            "base_width: expected at least 4 for 16 channels, got 1",
        ),
        ({"groups": 2}, "groups: expected 1 beside basic blocks, got 2"),
        (
            {"placement": "relu-before-addition", "init": "zero-branch"},
            "init: expected 'he' or 'orthogonal' beside placement 'relu-before-addition'",
        ),
    ],
)
def test_wrong_values_name_what_is_known(options, message):
    with pytest.raises(ValueError, match=message):
        study_network(**{"depth": 20, **options})


def test_wrong_types_and_unknown_options():
    with pytest.raises(TypeError, match="gate_bias: expected a number, got str"):
        study_network(20, gate_bias="-6")
    with pytest.raises(TypeError, match=r"placements: unknown; expected one of placement, short"):
        study_network(20, placements="original")
    with pytest.raises(TypeError, match="se: expected a bool, got int"):
        study_network(20, se=1)


def test_a_network_can_be_copied():
    network = study_network(8, placement="original")
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(copy.deepcopy(network).eval()(x), network.eval()(x))
