"""`NormAct` and `NormActConv` equal their children called in turn."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import preact_kernels as pk
from preact_kernels.activations import ACTIVATION_MODULES, activation_of_module
from tests.cases import modulate, randomised
from tests.oracle import assert_same_bits, check, evaluate

pytestmark = pytest.mark.backends("cpu")  # modules are above the backends


class Plain(nn.Module):
    """What a module equals, of its children."""

    def __init__(self, module, act=None):
        super().__init__()
        self.norm, self.act, self.conv = module.norm, act or module.act, None
        if hasattr(module, "conv"):
            self.conv = module.conv
        self.training = module.training

    def forward(self, x, residual=None, scale=None, shift=None):
        a = self.act(modulate(self.norm(x), scale, shift))
        if self.conv is None:
            return a
        y = self.conv(a)
        return y if residual is None else y + residual


# By name: a norm for 8 channels, and the shape of its input.
NORMS = {
    "group": (lambda: nn.GroupNorm(4, 8), (3, 8, 5, 6)),
    "group_not_affine": (lambda: nn.GroupNorm(2, 8, eps=1e-2, affine=False), (3, 8, 7)),
    "batch1d_features": (lambda: nn.BatchNorm1d(8), (9, 8)),
    "batch1d": (lambda: nn.BatchNorm1d(8, momentum=None), (3, 8, 7)),
    "batch2d": (lambda: nn.BatchNorm2d(8, momentum=0.5), (3, 8, 5, 6)),
    "batch2d_untracked": (lambda: nn.BatchNorm2d(8, track_running_stats=False), (3, 8, 5, 6)),
    "batch3d": (lambda: nn.BatchNorm3d(8, affine=False), (3, 8, 2, 3, 4)),
    "sync": (lambda: nn.SyncBatchNorm(8), (3, 8, 5, 6)),
    "instance1d": (lambda: nn.InstanceNorm1d(8), (3, 8, 7)),
    "instance2d": (lambda: nn.InstanceNorm2d(8, affine=True), (3, 8, 5, 6)),
    "instance2d_tracked": (
        lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        (3, 8, 5, 6),
    ),
    "instance3d_tracked": (
        lambda: nn.InstanceNorm3d(8, momentum=0.3, track_running_stats=True),
        (3, 8, 2, 3, 4),
    ),
    "layer1d": (lambda: nn.LayerNorm([8, 7], elementwise_affine=False), (3, 8, 7)),
    "layer2d": (lambda: nn.LayerNorm([8, 5, 6], 1e-3, elementwise_affine=False), (3, 8, 5, 6)),
}


def inputs_of(shape, **residual):
    x = torch.randn(shape) + 1
    scale, shift = torch.randn(shape[0], 8) / 2, torch.randn(shape[0], 8)
    return {"x": x, "scale": scale, "shift": shift, **residual}


CONVS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


@pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=NORMS)
def test_units_equal_their_children(make, shape, backend):
    for training in (True, False):
        check_units(make, shape, training)


def check_units(make, shape, training):
    module = randomised(pk.NormAct(make(), nn.SiLU())).train(training)
    check(module, Plain(module), inputs_of(shape))
    check(module, Plain(module), {"x": torch.randn(shape)})
    if len(shape) == 2:
        return
    conv = CONVS[len(shape)](8, 6, 3, padding=1, groups=2)
    module = randomised(pk.NormActConv(make(), nn.GELU(), conv)).train(training)
    check(module, Plain(module), inputs_of(shape, residual=torch.randn(shape[0], 6, *shape[2:])))


@pytest.mark.parametrize("make", [partial(nn.GroupNorm, 4, 8), partial(nn.BatchNorm2d, 8)])
def test_dropout_follows_the_mode_of_the_module(make, backend):
    module = pk.NormActConv(make(), "silu", nn.Conv2d(8, 6, 3), dropout=0.5)
    x = torch.randn(3, 8, 5, 6)
    for training in (True, False):
        module.train(training)
        module.norm.train(not training)  # a frozen norm, for example
        results = []
        for fused in (True, False):
            module.fused = fused
            torch.manual_seed(3)
            results.append(evaluate(copy.deepcopy(module), {"x": x}))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        a = F.silu(copy.deepcopy(module.norm)(x))
        torch.manual_seed(3)
        expected = module.conv(F.dropout(a, 0.5, training))
        torch.testing.assert_close(results[0]["y"], expected, rtol=1e-4, atol=1e-5)


def test_modules_of_pytorch_are_read_as_activations(backend):
    x = torch.randn(3, 8, 5, 6) * 3
    others = nn.ReLU(inplace=True), nn.LeakyReLU(0.25), nn.GELU("tanh"), nn.ELU(2.0), nn.Softplus(4)
    for act in (*(kind() for kind in ACTIVATION_MODULES), *others):
        assert activation_of_module(act) is not None
        module = pk.NormAct(nn.GroupNorm(4, 8), act)
        torch.testing.assert_close(module(x), act(module.norm(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "act",
    [
        nn.Softplus(threshold=1.0),
        nn.LeakyReLU(torch.tensor(0.5)),
        type("SiLU", (nn.SiLU,), {"forward": lambda self, x: x.sin()})(),
    ],
)
def test_other_activations_are_called(act, backend):
    assert activation_of_module(act) is None
    module = pk.NormAct(nn.GroupNorm(4, 8), act)
    x = torch.randn(3, 8, 5, 6)
    assert torch.equal(module(x), act(module.norm(x)))


def doubled(module, args, y):
    return y * 2


CHANGES = {
    "hook_of_norm": lambda m: m.norm.register_forward_hook(doubled),
    "hook_of_activation": lambda m: m.act.register_forward_hook(doubled),
    "hook_of_convolution": lambda m: m.conv.register_forward_hook(doubled),
    "subclass_of_norm": lambda m: setattr(
        m.norm, "__class__", type("Doubled", (type(m.norm),), {"forward": lambda s, x: x * 2})
    ),
    "attribute_of_activation": lambda m: setattr(m.act, "forward", torch.sin),
    "other_activation": lambda m: setattr(m, "act", nn.Softshrink()),
    "layer_norm_with_weight": lambda m: setattr(m, "norm", nn.LayerNorm([8, 5, 6])),
    "circular_padding": lambda m: setattr(m.conv, "padding_mode", "circular"),
    "weight_norm": lambda m: parametrizations.weight_norm(m.conv),
    "not_fused": lambda m: setattr(m, "fused", False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_children_are_called(change, backend, monkeypatch):
    monkeypatch.setattr(pk.modules.norm_act_conv, "run_unit", None)
    module = pk.NormActConv(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 6, 3, padding=1))
    change(module)
    x = torch.randn(3, 8, 5, 6)
    assert torch.equal(module(x), Plain(module)(x))


def test_attributes_are_read_at_each_call(backend):
    module = pk.NormAct(nn.GroupNorm(4, 8), nn.LeakyReLU(0.25))
    x = torch.randn(3, 8, 5, 6)
    module(x)
    module.act.negative_slope, module.norm.eps = 0.5, 0.1
    module.norm.num_groups = 2
    check(module, Plain(module), {"x": x})


def test_group_norms_of_half_precision_take_float32_parameters_without_kernels_too(backend):
    """On a GPU PyTorch's group norm refuses them."""
    module = randomised(pk.NormAct(nn.GroupNorm(4, 8), nn.SiLU()))
    plain = copy.deepcopy(module)
    plain.fused = False
    problems = [{"x": torch.randn(3, 8, 5, 6).bfloat16()} for _ in range(4)]
    check(module, plain, problems)
    x = problems[0]["x"]
    torch.testing.assert_close(torch.jit.trace(module, x)(x), plain(x))  # TorchScript may fuse


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal(copied, backend):
    conv = nn.Conv2d(8, 6, 3)
    for activation in (nn.SiLU(), ("leaky_relu", 0.25)):
        module = randomised(pk.NormActConv(nn.BatchNorm2d(8), activation, conv, dropout=0.5)).eval()
        other, x = copied(module), torch.randn(3, 8, 5, 6)
        assert torch.equal(module(x), other(x))
        assert repr(module) == repr(other)


def test_children_are_shared_and_make_the_keys():
    norm, act, conv = nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 6, 3)
    module = pk.NormActConv(norm, act, conv)
    assert (module.norm, module.act, module.conv) == (norm, act, conv)
    prefixes = {name.partition(".")[0] for name in module.state_dict()}
    assert prefixes == {"norm", "conv"}
    assert "silu" in repr(pk.NormAct(norm, "silu")) and "act" not in dict(
        pk.NormAct(norm, "silu").named_children()
    )


GROUP, CONV = nn.GroupNorm(4, 8), nn.Conv2d(8, 6, 3)
X = torch.randn(3, 8, 5, 6)
WRONG_CHILDREN = (
    (TypeError, "norm: expected one of nn.GroupNorm", (nn.ReLU(), "relu", CONV)),
    (ValueError, "norm: expected an nn.LayerNorm without elementwise_affine", (nn.LayerNorm(8),)),
    (TypeError, "activation: expected a name, or one of nn.ReLU", (GROUP, nn.Conv2d(8, 8, 1))),
    (ValueError, "activation: expected one of 'relu', 'leaky_relu'", (GROUP, "swish")),
    (TypeError, "conv: expected an nn.Conv1d, nn.Conv2d or", (GROUP, "relu", nn.Linear(8, 8))),
    (ValueError, "conv: expected in_channels 8 to match norm", (GROUP, "relu", nn.Conv2d(4, 8, 1))),
    (
        ValueError,
        "conv: expected the dimensions of BatchNorm1d, got Conv2d",
        (nn.BatchNorm1d(8), "relu", CONV),
    ),
    (ValueError, "dropout: expected a probability in [0, 1], got 2", (GROUP, "relu", CONV, 2)),
    (TypeError, "dropout: expected a number, got str", (GROUP, "relu", CONV, "0.5")),
)


@pytest.mark.parametrize(("error", "message", "arguments"), WRONG_CHILDREN)
def test_wrong_children_are_named(error, message, arguments):
    defaults = (GROUP, None, CONV)
    arguments = (*arguments, *defaults[len(arguments) :])
    with pytest.raises(error, match=re.escape(message)):
        pk.NormActConv(*arguments)


WRONG_INPUTS = (
    (TypeError, "x: expected a torch.Tensor, got list", {"x": [1.0]}),
    (ValueError, "norm.weight: expected shape [4] to match", {"x": X[:, :4]}),
    (ValueError, "x: expected 4 dimensions [N, C, H, W], got shape [8, 5, 6]", {"x": X[0]}),
    (ValueError, "scale: expected shape [3, 8] or [3, 8, 1, 1]", {"scale": torch.ones(8)}),
    (ValueError, "residual: expected shape [3, 6, 3, 4]", {"residual": X}),
)


@pytest.mark.parametrize(("error", "message", "change"), WRONG_INPUTS)
@pytest.mark.parametrize("norm", [GROUP, nn.BatchNorm2d(8), nn.InstanceNorm2d(8, affine=True)])
@pytest.mark.covering(1)
def test_wrong_inputs_are_named_and_leave_the_statistics(norm, error, message, change):
    module = pk.NormActConv(norm, "relu", CONV)
    module(X)
    before = copy.deepcopy(dict(module.named_buffers()))
    with pytest.raises(error, match=re.escape(message)):
        module(**{"x": X, **change})
    assert_same_bits(dict(module.named_buffers()), before)


@pytest.mark.parametrize(
    ("norm", "shape", "message"),
    [
        (nn.BatchNorm1d(8), (3, 8, 5, 6), "x: expected 3 dimensions [N, C, L]"),
        (nn.InstanceNorm2d(8), (8, 5, 6), "x: expected 4 dimensions [N, C, H, W]"),
        (nn.InstanceNorm2d(8), (3, 8, 1, 1), "x: expected more than 1 spatial element"),
        (nn.LayerNorm([8, 5], elementwise_affine=False), (3, 8, 6), "x: expected images of shape"),
    ],
)
def test_inputs_that_a_norm_does_not_take_are_refused(norm, shape, message, backend):
    with pytest.raises(ValueError, match=re.escape(message)):
        pk.NormAct(norm, "relu")(torch.randn(shape))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.float16, torch.float64])
def test_a_unit_saves_its_input_and_a_bit_for_each_element(dropout, dtype, residual_dtype, backend):
    conv = nn.Conv2d(8, 6, 3).to(dtype)
    x = torch.randn(4, 8, 16, 16).to(dtype).requires_grad_()
    residual = None
    if residual_dtype is not None:
        residual = torch.randn(4, 6, 14, 14).to(residual_dtype).requires_grad_()
    for norm in (nn.GroupNorm(4, 8), nn.BatchNorm2d(8)):
        module = pk.NormActConv(norm, nn.SiLU(), conv, dropout=dropout)
        module.forward = partial(module.forward, residual=residual)
        vectors = (2 * 4 if isinstance(norm, nn.GroupNorm) else 2) * 8 * 4  # mean and variance
        bits = x.numel() // 8 if dropout else 0
        assert pk.saved_bytes(module, x) == x.numel() * x.element_size() + bits + vectors
