"""Converted models train, evaluate and behave as the plain ones."""

import copy
import io
import pickle
import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from bench import foreign_models as foreign
from preact_kernels.conversion import convert as conversion
from preact_kernels.conversion import fused_module
from preact_kernels.conversion.fused_module import installed_plan
from tests.oracle import assert_same_bits, assert_within_budget, evaluate, unit_roundoff

pytestmark = pytest.mark.backends("cpu", slow=("reference", "triton"))

MODES = ("store", "rebuild", "checkpoint")


def stochastic_depth():
    blocks = [foreign.BranchBlock(8, 8, 1, foreign.DropPath(0.5))]
    blocks += [foreign.BranchBlock(32, 8, 1, foreign.DropPath(0.5)) for _ in range(2)]
    return foreign.network_of(*blocks)


def squeeze_and_excitation():
    blocks = [foreign.BranchBlock(8, 8, 1, foreign.SqueezeExcite(32))]
    blocks += [foreign.BranchBlock(32, 8, 1, foreign.SqueezeExcite(32)) for _ in range(2)]
    return foreign.network_of(*blocks)


def attention_between():
    blocks = [foreign.FunctionalBottleneck(8, 8), foreign.Attention(32)]
    return foreign.network_of(*blocks, foreign.FunctionalBottleneck(32, 8))


def biased_wide():
    return foreign.network_of(foreign.BiasedWideBlock(8, 32), foreign.BiasedWideBlock(32, 32))


# Builder, size of the images, batch norms, and how many of them are fused.
SMALL = {
    "functional-basic": (lambda: foreign.FunctionalNet(planes=8), 16, 16, 16),
    "functional-bottleneck": (
        lambda: foreign.FunctionalNet(foreign.FunctionalBottleneck, (2, 3), 8),
        16,
        15,
        15,
    ),
    "wide": (lambda: foreign.WideResNet(16, 1), 16, 13, 13),
    "biased-wide": (biased_wide, 8, 5, 5),
    "dense": (lambda: foreign.DenseNet(22, 6), 16, 21, 21),
    "deep": (lambda: foreign.DeepNet(29, 8), 16, 28, 28),
    "squeeze-and-excitation": (squeeze_and_excitation, 8, 10, 10),
    "stochastic-depth": (stochastic_depth, 8, 10, 10),
    "attention": (attention_between, 8, 7, 7),
}
PUBLISHED = {
    "preact-resnet-18": (lambda: foreign.FunctionalNet(), 16, 16, 16),
    "wrn-28-10": (lambda: foreign.WideResNet(28, 10), 8, 25, 25),
    "densenet-bc-100-12": (lambda: foreign.DenseNet(100, 12), 8, 99, 99),
    "deep-1001": (lambda: foreign.DeepNet(1001), 8, 1000, 1000),
    "timm-resnetv2-50": (lambda: foreign.timm_model("resnetv2_50"), 64, 49, 49),
    "timm-resnetv2-101": (lambda: foreign.timm_model("resnetv2_101"), 64, 100, 100),
    "timm-densenet-121": (lambda: foreign.timm_model("densenet121"), 64, 121, 121),
    "timm-wide-resnet-50-2": (lambda: foreign.timm_model("wide_resnet50_2"), 64, 53, 33),
    "torchvision-densenet-121": (lambda: foreign.torchvision_models().densenet121(), 64, 121, 121),
    "torchvision-resnet-50": (lambda: foreign.torchvision_models().resnet50(), 64, 53, 33),
}
MODELS = SMALL | PUBLISHED


def built(name):
    """A model with a random state far from its defaults, and a batch of images for it."""
    build, size, *_ = MODELS[name]
    torch.manual_seed(1)
    try:
        model = build()
    except ImportError as error:
        pytest.skip(f"not installed: {error.name}")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return model, torch.randn(4, 3, size, size)


def trained(model, x, steps=3):
    """What some steps of training leave: outputs, the whole gradient, parameters and buffers."""
    model, x = copy.deepcopy(model), x.to(next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    results = {}
    for step in range(steps):
        torch.manual_seed(step)  # of stochastic depth
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        results[f"y{step}"] = y.detach()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results[f"gradient{step}"] = torch.cat(gradients)
        optimizer.step()
    results["parameters"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    buffers = [b.flatten() for b in model.buffers() if b.is_floating_point()]
    results["running"] = torch.cat(buffers)
    with torch.no_grad():
        results["evaluated"] = model.eval()(x)
    return results


def assert_trains_alike(converted, plain, x, steps=3):
    """The budget of `oracle.py` for several steps, in float32 and in float64.

    Errors of a deep network grow in proportion to the unit roundoff: those of float64 are judged
    by eager's errors in float32.
    """
    truth = trained(copy.deepcopy(plain).double(), x, steps)
    orders = [x, x.contiguous(memory_format=torch.channels_last)]
    eager = [trained(plain, order, steps) for order in orders]
    errors = {n: max(float((e[n] - t).norm()) for e in eager) for n, t in truth.items()}
    assert_within_budget(trained(converted, x, steps), truth, errors)
    ratio = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    growth = (x.numel() / x.shape[1]) ** 0.5  # see oracle.py
    errors = {n: ratio * growth * e for n, e in errors.items()}
    wide = copy.deepcopy(converted).double()
    assert_within_budget(trained(wide, x, steps), truth, errors)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("name", SMALL)
def test_small_models_train_alike(name, memory, backend):
    model, x = built(name)
    converted = pk.convert(copy.deepcopy(model), memory=memory)
    assert_trains_alike(converted, model, x)


LARGE = ("deep-1001", "wrn-28-10", "timm-resnetv2-101", "timm-wide-resnet-50-2")


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("memory", ["store", pytest.param("rebuild", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in PUBLISHED]
)
def test_published_models_train_alike(name, memory, backend):
    model, x = built(name)
    converted = pk.convert(copy.deepcopy(model), memory=memory)
    # More steps part from each other: the signs of inputs of ReLUs near zero differ.
    assert_trains_alike(converted, model, x[:2], steps=1)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("name", MODELS)
def test_sites_are_found(name):
    _, _, count, fused = MODELS[name]
    model, _ = built(name)
    before = pk.conversion_report(model)
    assert [s.fused for s in before] == [False] * count
    report = pk.conversion_report(pk.convert(model))
    names = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert [s.name for s in report] == names
    assert (len(report), len(report.fused)) == (count, fused)
    for site in report:
        assert bool(site.reason) != site.fused, site
        assert site.name in str(report)


PRE_ACTIVATION = {
    "functional-basic": lambda: foreign.FunctionalNet(planes=8),
    "functional-bottleneck": lambda: foreign.FunctionalNet(foreign.FunctionalBottleneck, (6, 6), 8),
    "wide": lambda: foreign.WideResNet(16, 1),
    "dense": lambda: foreign.DenseNet(40, 12),
    "deep": lambda: foreign.DeepNet(110, 8),
}


@pytest.mark.parametrize("build", PRE_ACTIVATION.values(), ids=PRE_ACTIVATION)
def test_pre_activation_models_keep_half_of_the_bytes(build):
    model, x = build(), torch.randn(4, 3, 16, 16)
    kept = pk.saved_bytes(model, x)
    assert pk.saved_bytes(pk.convert(model), x) <= 0.55 * kept


@pytest.mark.parametrize("name", ["functional-bottleneck", "deep"])
def test_memory_modes_keep_less(name):
    model, x = PRE_ACTIVATION[name](), torch.randn(4, 3, 16, 16)
    kept = {mode: pk.saved_bytes(pk.convert(model, memory=mode), x) for mode in MODES}
    assert kept["rebuild"] < 0.6 * kept["store"]
    assert kept["checkpoint"] < 0.4 * kept["store"]
    assert pk.saved_bytes(pk.convert(model), x) == kept["store"]


# Around the model.


def small():
    """A network with a run of blocks and a batch norm at its end, and images."""
    return built("functional-bottleneck")


def results(model, x):
    """One step in training mode, of a copy."""
    return evaluate(model, {"x": x})


def test_parameters_stay_the_same_objects_in_the_same_order():
    model, x = small()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    buffers = list(model.buffers())
    optimizer = torch.optim.SGD(parameters, 0.1)
    assert pk.convert(model) is model
    assert list(model.state_dict()) == keys
    for before, after in ((parameters, model.parameters()), (buffers, model.buffers())):
        assert all(a is b for a, b in zip(before, after, strict=True))
    before = [p.clone() for p in parameters]
    model(x).sum().backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_state_loads_both_ways():
    (model, x), (other, _) = small(), small()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) / 10)
    pk.convert(model).load_state_dict(other.state_dict(), strict=True)
    expected = results(pk.convert(copy.deepcopy(other)), x)
    assert_same_bits(results(model, x), expected)
    other.load_state_dict(model.state_dict(), strict=True)


def test_classes_are_subclasses_and_come_back():
    model, x = small()
    plain, before = results(model, x), [(n, type(m)) for n, m in model.named_modules()]
    text = repr(model)
    pk.convert(model)
    for (_, kind), module in zip(before, model.modules(), strict=True):
        assert isinstance(module, kind)
    assert type(model.layer1) is not nn.Sequential
    assert pk.revert(model) is model
    assert [(n, type(m)) for n, m in model.named_modules()] == before
    assert repr(model) == text
    assert not any("preact" in name for m in model.modules() for name in vars(m))
    assert_same_bits(results(model, x), plain)
    assert not pk.conversion_report(model).fused


def test_converting_twice_changes_nothing():
    model, x = small()
    pk.convert(model)
    kinds, before = [type(m) for m in model.modules()], results(model, x)
    report = list(pk.conversion_report(model))
    pk.convert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert list(pk.conversion_report(model)) == report
    assert_same_bits(results(model, x), before)


def test_a_conversion_that_fails_leaves_the_model_untouched(monkeypatch):
    model, _ = small()
    kinds = [type(m) for m in model.modules()]
    install, calls = conversion.install, []

    def fail_at_third(module, plan):
        calls.append(module)
        if len(calls) == 3:
            raise RuntimeError("planted")
        install(module, plan)

    monkeypatch.setattr(conversion, "install", fail_at_third)
    with pytest.raises(RuntimeError, match="planted"):
        pk.convert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert not pk.conversion_report(model).fused


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: reloaded(m)],
    ids=["deepcopy", "pickle", "save"],
)
def test_copies_stay_converted_and_are_independent(copied, memory):
    model, x = small()
    pk.convert(model, memory=memory)
    other = copied(model)
    assert len(pk.conversion_report(other).fused) == len(pk.conversion_report(model).fused)
    assert pk.saved_bytes(other, x) == pk.saved_bytes(model, x)
    assert_same_bits(results(other, x), results(model, x))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert all(p.abs().sum() > 0 for p in model.linear.parameters())
    assert not other(x).any()


def reloaded(model):
    """`model`, saved and loaded."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", ["functional-basic", "attention"])
def test_deepcopy_does_not_trace(monkeypatch, name):
    model, x = built(name)
    pk.convert(model)

    def fail(*args):
        pytest.fail("traced")

    monkeypatch.setattr(fused_module, "trace", fail)
    other = copy.deepcopy(model)
    assert pk.saved_bytes(other, x) == pk.saved_bytes(model, x)
    assert torch.equal(other(x), model(x))
    plans = [installed_plan(m) for m in other.modules() if installed_plan(m)]
    own = {id(m) for m in other.modules()}
    assert plans
    assert all(id(i.module) in own for plan in plans for i in plan.inlined)


class Flagged(nn.Module):
    """A block whose forward asks for an attribute."""

    def __init__(self, c=4):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(c), nn.Conv2d(c, c, 1)
        self.scale = 1

    def forward(self, x):
        return self.conv(F.relu(self.bn(x))) * self.scale


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, reloaded])
def test_copies_notice_changes_of_their_own_attributes(copied):
    model, x = pk.convert(Flagged()), torch.randn(2, 4, 3, 3)
    other = copied(model)
    other.scale = 3
    torch.testing.assert_close(other(x), 3 * model(x))
    model.scale = 5
    torch.testing.assert_close(5 * other(x), 3 * model(x))


class WithSlots(Flagged):
    """A module whose pickled state is a tuple."""

    def __getstate__(self):
        return (self.__dict__.copy(), {"slots": 1})

    def __setstate__(self, state):
        own, slots = state
        assert slots == {"slots": 1}
        super().__setstate__(own)


class CopiesItself(Flagged):
    """A module that makes its copies itself."""

    def __deepcopy__(self, memo):
        other = type(self)()
        other.load_state_dict(self.state_dict())
        return other


@pytest.mark.parametrize("kind", [WithSlots, CopiesItself])
@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded])
def test_copies_of_modules_with_states_of_their_own(kind, copied):
    model, x = pk.convert(kind()), torch.randn(2, 4, 3, 3)
    other = copied(model)
    assert isinstance(other, kind)
    assert_same_bits(results(other, x), results(model, x))
    if kind is WithSlots:
        assert pk.saved_bytes(other, x) == pk.saved_bytes(model, x)


class TwoUnits(Flagged):
    """A block that is traced as a whole."""

    def __init__(self):
        super().__init__()
        self.bn2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv2(F.relu(self.bn2(torch.tanh(super().forward(x)))))


class WithSharedNorm(nn.Module):
    """Parts with a batch norm in common; not traced as a whole."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(TwoUnits() for _ in range(2))
        self.parts[1].bn = self.parts[0].bn

    def forward(self, x):
        return self.parts[int(x.sum() > 0)](x)


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded])
def test_copies_leave_shared_modules_alone(copied):
    model = pk.convert(WithSharedNorm())
    other = copied(model)
    fused = [s.name for s in pk.conversion_report(model).fused]
    assert fused == ["parts.0.bn2", "parts.1.bn2"]
    assert [s.name for s in pk.conversion_report(other).fused] == fused


def test_training_and_evaluation_mode():
    model = foreign.WideResNet(16, 1, dropout=0.3)
    x = torch.randn(4, 3, 16, 16)
    converted = pk.convert(copy.deepcopy(model))
    for _ in range(2):
        for training in (True, False):
            model.train(training), converted.train(training)
            torch.manual_seed(5)
            expected = model(x)
            torch.manual_seed(5)
            torch.testing.assert_close(converted(x), expected)
    converted.blocks[1].train()  # some modules in training mode
    model.blocks[1].train()
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(converted(x), expected)


def test_hooks_added_later_run():
    model, x = small()
    plain = copy.deepcopy(model)
    pk.convert(model)
    names = ["layer1", "layer2.1", "layer2.0.bn2", "layer1.0.conv3", "layer2.0.shortcut", "linear"]
    seen = {}
    for m in (model, plain):
        for name in names:
            m.get_submodule(name).register_forward_hook(
                lambda module, args, y, key=(m is model, name): seen.__setitem__(
                    key, y.detach().clone()
                )
            )
    torch.testing.assert_close(model(x), plain(x))
    for name in names:
        torch.testing.assert_close(seen[True, name], seen[False, name])


def test_hooks_on_a_relu_run():
    model, x = built("wide")
    pk.convert(model)
    seen = []
    model.blocks[0][0].relu2.register_forward_hook(lambda *args: seen.append(args))
    model(x)
    assert len(seen) == 1


def test_modules_replaced_later_are_called():
    model, x = small()
    pk.convert(model)
    plain = pk.revert(copy.deepcopy(model))
    for m in (model, plain):
        torch.manual_seed(3)
        m.layer1[1] = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.Tanh())
        m.layer2[1].bn2 = nn.InstanceNorm2d(16)
        m.layer2[2].conv1 = nn.Conv2d(64, 16, 1, bias=True)
        m.linear = nn.Identity()
    torch.testing.assert_close(model(x), plain(x))


def test_attributes_changed_later_count():
    model = foreign.WideResNet(16, 1)
    x = torch.randn(4, 3, 16, 16)
    plain = copy.deepcopy(model)
    pk.convert(model)
    for m in (model, plain):
        for stage in m.blocks:
            for block in stage:
                block.dropout = 0.4
    torch.manual_seed(2)
    expected = plain(x)
    torch.manual_seed(2)
    torch.testing.assert_close(model(x), expected)


def test_frozen_batch_norms():
    model, x = small()
    plain = copy.deepcopy(model)
    pk.convert(model)
    for m in (model, plain):
        m.layer1.eval()
        m.layer1.requires_grad_(False)
    expected = results(plain, x)
    for name, value in results(model, x).items():
        torch.testing.assert_close(value, expected[name], msg=name, rtol=1e-3, atol=1e-4)


def test_replicas_of_data_parallel_use_their_own_parameters():
    model, x = small()
    pk.convert(model).eval()
    zeros = foreign.replicated(model, torch.zeros_like)
    same = foreign.replicated(model, torch.clone)
    with torch.no_grad():
        assert not zeros(x).any()
        assert_same_bits({"y": same(x)}, {"y": model(x)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, x = small()
    plain, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    pk.convert(model).to(dtype)
    assert model(x).dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("name", SMALL)
def test_autocast_gives_the_same_dtypes(name):
    model, x = built(name)
    plain = copy.deepcopy(model)
    pk.convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        y = model(x)
        torch.manual_seed(0)
        expected = plain(x)
    assert y.dtype == expected.dtype
    y.float().sum().backward()
    assert (y.float() - expected.float()).norm() < 0.5 * expected.float().norm()


# What is not converted.


class Block(nn.Module):
    """Batch norm, ReLU and convolution, and what a subclass makes of them."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(F.relu(self.bn(x)))


class OtherActivation(Block):
    def forward(self, x):
        return self.conv(F.gelu(self.bn(x)))


class UsedTwice(Block):
    def forward(self, x):
        h = self.bn(x)
        return self.conv(F.relu(h)) + h


class NoReLU(Block):
    def forward(self, x):
        return self.conv(self.bn(x))


class CalledTwice(Block):
    def forward(self, x):
        return self.conv(F.relu(self.bn(self.conv(F.relu(self.bn(x))))))


class ControlFlow(Block):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class PythonRandomness(Block):
    def forward(self, x):
        return super().forward(x) * (0.5 if random.random() < 2 else 1)


class TensorRandomness(Block):
    def forward(self, x):
        return super().forward(x) * torch.rand(1).add(1).clamp(1, 1)


class WithoutGradient(Block):
    def forward(self, x):
        with torch.no_grad():
            x = self.conv(F.relu(self.bn(x)))
        return x + x.mean().requires_grad_()


class Checkpointed(Block):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class ReentrantCheckpoint(Block):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)


class ConstantTensor(Block):
    def __init__(self):
        super().__init__()
        self.scale = [torch.full((1,), 2.0)]

    def forward(self, x):
        return super().forward(x) * self.scale[0]


class Autocast(Block):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class AsksForState(Block):
    def forward(self, x):
        return super().forward(x) * (1 if torch.is_grad_enabled() else 0)


class Seeds(Block):
    def forward(self, x):
        torch.manual_seed(7)
        return F.dropout(super().forward(x), 0.5)


class CatchesErrors(Block):
    def forward(self, x):
        try:
            is_large = bool(x.max() > 1e9)
        except Exception:
            is_large = True
        return super().forward(x) * (0 if is_large else 1)


class Records(Block):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape)
        return super().forward(x)


class SetsAttribute(Block):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class ChangedInPlace(Block):
    def forward(self, x):
        h = self.bn(x)
        x.add_(0.5)
        return self.conv(F.relu(h)) + x


class Chain(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def with_hook():
    block = Block()
    block.bn.register_forward_hook(lambda *args: None)
    return block


def with_two_names():
    block = Block()
    block.other = block.bn
    return block


UNFUSED = {
    OtherActivation: "no ReLU follows .gelu",
    UsedTwice: "output is used more than once",
    NoReLU: "no ReLU follows",
    CalledTwice: "more than once",
    ControlFlow: "control flow",
    PythonRandomness: "random numbers",
    TensorRandomness: "tensors that are no inputs",
    WithoutGradient: "no_grad",
    Checkpointed: "checkpointing|tensors that are no inputs|calls torch",
    ReentrantCheckpoint: "custom autograd function|checkpointing",
    ConstantTensor: "neither a parameter nor a buffer",
    SetsAttribute: "sets attributes",
    Autocast: "under autocast",
    AsksForState: "calls torch.is_grad_enabled",
    Seeds: "calls torch.manual_seed",
    CatchesErrors: "catches the errors",
    Records: "sets attributes",
    with_hook: "has hooks",
    with_two_names: "more than once",
}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize("build", UNFUSED, ids=lambda b: b.__name__)
def test_what_is_not_fused_is_reported_and_right(build, inside):
    model = build()
    if inside:
        model = Chain(Block(), model)
    plain = copy.deepcopy(model)
    kind = type(model.get_submodule("1" if inside else ""))
    pk.convert(model)
    sites = {s.name: s for s in pk.conversion_report(model)}
    site = sites["1.bn" if inside else "bn"]
    assert not site.fused
    assert re.search(UNFUSED[build], site.reason), site.reason
    assert type(model.get_submodule("1" if inside else "")) is kind
    if inside:
        assert sites["0.bn"].fused
    x = torch.rand(2, 4, 6, 6) + 0.5
    y, expected = (evaluate(m, {"x": x}) for m in (model, plain))
    for name, value in expected.items():
        torch.testing.assert_close(y[name], value, msg=name)


class CallsBase(Block):
    def forward(self, x):
        return super(self.__class__, self).forward(x)  # an endless recursion in a subclass


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
def test_a_forward_that_reads_its_class_keeps_it(inside):
    model = Chain(Block(), CallsBase()) if inside else CallsBase()
    x = torch.randn(2, 4, 6, 6)
    expected = model.eval()(x)
    pk.convert(model)
    assert type(model[1] if inside else model) is CallsBase
    torch.testing.assert_close(model(x), expected)
    if not inside:
        assert "__class__" in pk.conversion_report(model)[0].reason


def test_an_input_that_changes_in_place_is_read_before():
    model = ChangedInPlace().eval()
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        expected = model(x.clone())
        (site,) = pk.conversion_report(pk.convert(model))
        assert not site.fused
        assert "changed in place" in site.reason
        assert torch.equal(model(x), expected)


def test_uninitialised_modules_are_reported():
    model = nn.Sequential(nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(4, 3))
    (site,) = pk.conversion_report(pk.convert(model))
    assert not site.fused
    assert "unknown" in site.reason
    assert model(torch.randn(2, 3, 5, 5)).shape == (2, 4, 3, 3)
    assert pk.conversion_report(pk.convert(model)).fused  # now it has a shape


def test_images_without_a_batch_raise_as_in_eager():
    model, _ = small()
    plain = copy.deepcopy(model)
    pk.convert(model)
    for m in (model, plain):
        with pytest.raises(ValueError, match=r"4 dimensions|4D"):
            m(torch.randn(3, 16, 16))


class AsksForType(Block):
    """Takes a tensor, a tuple of them, or an object that holds one."""

    def forward(self, x):
        x = x.tensors if hasattr(x, "tensors") else x
        x = x if torch.is_tensor(x) else x[0]
        return super().forward(x if isinstance(x, torch.Tensor) else x[0])


class Broadcast(Block):
    def forward(self, x):
        return self.conv(F.relu(self.bn(x))) + x.mean((2, 3), keepdim=True)


class Padded(Block):
    def forward(self, x):
        return self.conv(F.pad(F.relu(self.bn(x)), (2, 2, 1, 1)))


class UnevenlyPadded(Block):
    def forward(self, x):
        return self.conv(F.pad(F.relu(self.bn(x)), (2, 1, 1, 1)))


class Tapped(nn.Module):
    """Returns what is between two blocks of a run, and changes the last output in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(foreign.FunctionalBlock(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.blocks[1](self.blocks[0](x))
        z = self.blocks[2](y)
        z.mul_(2)
        return z + 3 * y


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("build", [AsksForType, Broadcast, Padded, UnevenlyPadded, Tapped])
def test_variants_are_right(build, memory):
    model = build()
    plain = copy.deepcopy(model)
    assert pk.conversion_report(pk.convert(model, memory=memory)).fused
    x = torch.randn(2, 4, 6, 6)
    y, expected = (evaluate(m, {"x": x}) for m in (model, plain))
    for name, value in expected.items():
        torch.testing.assert_close(y[name], value, msg=name, rtol=1e-4, atol=1e-5)


def test_padding_is_absorbed():
    (site,) = pk.conversion_report(pk.convert(Padded()))
    assert site.into == "BN-ReLU-Conv"


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got int"):
        pk.convert(3)
    with pytest.raises(ValueError, match="memory: expected 'store'"):
        pk.convert(nn.Identity(), memory="all")
    for function in (pk.revert, pk.conversion_report):
        with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
            function(None)


@pytest.mark.parametrize("name", ["functional-bottleneck", "deep", "dense"])
def test_memory_of_converted_models_is_planned(name):
    model, x = PRE_ACTIVATION[name](), torch.randn(4, 3, 16, 16)
    kept = pk.saved_bytes(pk.convert(model), x)
    for share in (1.0, 0.8, 0.7):
        plan = pk.plan_memory(model, x, int(share * kept))
        plan.apply(model)
        assert pk.saved_bytes(model, x) == plan.predicted_bytes <= share * kept
    assert pk.saved_bytes(copy.deepcopy(model), x) == plan.predicted_bytes
    with pytest.raises(ValueError, match="expected the stages"):
        plan.apply(pk.preact_resnet(20))


@pytest.mark.parametrize("name", ["functional-bottleneck", "wide", "biased-wide", "dense", "deep"])
def test_converted_models_compile_into_one_graph(name):
    torch._dynamo.reset()
    model, x = built(name)
    pk.convert(model)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    loss = compiled(x).square().sum()
    loss.backward()
    expected = model(x).square().sum()
    expected.backward()
    assert torch.equal(loss, expected)
    for p, q in zip(compiled.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Images(nn.Module):
    """Returns images, and views of images, which have other strides."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(foreign.FunctionalBlock(8, 8), foreign.FunctionalBlock(8, 8))
        self.scale = foreign.SqueezeExcite(8)

    def forward(self, x):
        h = self.stem(x)
        y = F.max_pool2d(self.blocks(h), 2)
        z = self.scale(torch.cat([y, y + 1], 1)[:, 8:])
        return h, y, z, y.flatten(2), x.transpose(2, 3), self.viewed(y)

    def viewed(self, y):
        return y.permute(0, 2, 3, 1)


class ImagesOfAnySize(Images):
    """The same, and cannot be traced as a whole."""

    def viewed(self, y):
        assert y.shape[2] > 1
        return y.permute(0, 2, 3, 1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("build", [Images, ImagesOfAnySize])
def test_results_have_the_memory_format_of_plain_pytorch(memory_format, build):
    model = build()
    plain = copy.deepcopy(model)
    pk.convert(model)
    x = torch.randn(2, 3, 8, 6).contiguous(memory_format=memory_format)
    for m in (model, plain):
        m.to(memory_format=memory_format)
    for found, expected in zip(model(x), plain(x), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


class Gated(Images):
    """Images times gates, which change in place behind an `nn.Identity`."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Identity(), nn.ReLU(inplace=True))
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
        h = self.blocks(self.stem(x))
        h = h * self.gate(h.mean((2, 3), keepdim=True)).expand_as(h)
        return F.relu(self.bn(h))


class Copies(TorchDispatchMode):
    """Counts copies of images into other memory formats."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.clone.default and args[0].dim() == 4
        return function(*args, **(kwargs or {}))


def test_nchw_models_run_in_channels_last_inside():
    model, x = Gated(), torch.randn(2, 3, 8, 6)
    plain = copy.deepcopy(model)
    pk.convert(model)
    with Copies() as copies:
        y = model(x)
    assert copies.count == 2  # of the input and of the result
    torch.testing.assert_close(y, plain(x))


class ChangesOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(foreign.FunctionalBlock(4, 4) for _ in range(3)))

    def forward(self, x):
        y = self.blocks(x)
        y.mul_(2)
        return y


@pytest.mark.parametrize("memory", MODES)
def test_the_output_of_a_run_may_change_in_place(memory):
    model = ChangesOutput().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    pk.convert(model, memory=memory)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    for m in (model, plain):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


class ChangesInput(Block):
    def forward(self, x):
        x.mul_(2)
        return self.conv(F.relu(self.bn(x)))


def test_a_forward_that_changes_its_input_changes_it():
    model = ChangesInput()
    plain = copy.deepcopy(model)
    assert pk.conversion_report(pk.convert(model)).fused
    x = torch.randn(2, 4, 6, 6)
    own = x.clone()
    torch.testing.assert_close(model(own), plain(x))
    assert torch.equal(own, x)


@pytest.mark.parametrize("name", ["functional-bottleneck", "dense", "deep"])
def test_tracers_see_plain_operators(name):
    model, x = built(name)
    model.eval()
    expected = model(x)
    pk.convert(model)
    exported = torch.export.export(model, (x,))
    assert not any("preact" in str(node.target) for node in exported.graph.nodes)
    traced = (
        exported.module(),
        torch.fx.symbolic_trace(model),
        torch.jit.trace(model, x),
        torch.vmap(model.__call__, in_dims=0),
    )
    for call in traced[:3]:
        assert_same_bits({"y": call(x)}, {"y": expected})
    torch.testing.assert_close(traced[3](x[None])[0], expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_functional_transforms():
    model, x = built("functional-basic")
    model.double().eval()
    plain, x = copy.deepcopy(model), x.double()
    pk.convert(model)

    def per_sample(m):
        def loss(parameters, image):
            y = torch.func.functional_call(m, parameters, (image[None],))
            return y.square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(m.named_parameters()), x)

    found, expected = per_sample(model), per_sample(plain)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


class ClampsResult(Block):
    def forward(self, x):
        y = super().forward(x)
        y.clamp_(max=0.1)
        return y


class ScalesView(Block):
    def forward(self, x):
        y = super().forward(x)
        y[:, :2].mul_(3)
        return y


class DropsInPlace(Block):
    def forward(self, x):
        y = super().forward(x)
        F.dropout(y, 0.5, self.training, True)
        return y


class ChangesViewOfInput(Block):
    def forward(self, x):
        x = x * 1
        x.flatten(2).mul_(2)
        return super().forward(x)


class ScalesAfterView(Block):
    def forward(self, x):
        y = super().forward(x)
        rows = y.flatten(1)
        y.mul_(3)
        return y.sum() + rows


class TakesIndices(Block):
    def forward(self, x):
        y, indices = F.max_pool2d(super().forward(x), 2, return_indices=True)
        return y + indices


class Taps(Block):
    def forward(self, x):
        h = super().forward(x)
        return h, h.mean((2, 3))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "build",
    [
        ClampsResult,
        ScalesView,
        DropsInPlace,
        ChangesViewOfInput,
        ScalesAfterView,
        TakesIndices,
    ],
)
def test_in_place_changes_after_fused_calls_are_seen(build, memory_format):
    model = build().to(memory_format=memory_format)
    plain = copy.deepcopy(model)
    assert pk.conversion_report(pk.convert(model)).fused
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=memory_format)
    found = []
    for m in (model, plain):
        torch.manual_seed(0)
        y = m(x.clone())
        y.square().sum().backward()
        found.append([y, *(p.grad for p in m.parameters()), *m.buffers()])
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def test_results_stay_in_the_graph_of_later_results():
    model = pk.convert(Taps())
    h, y = model(torch.randn(2, 4, 6, 6))
    (gradient,) = torch.autograd.grad(y.sum(), h)
    torch.testing.assert_close(gradient, torch.full_like(h, 1 / 36))


class WithParts(Block):
    """Reads attributes of several kinds."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.act = torch.relu
        self.layers = nn.Sequential(nn.Identity())
        self.parts = nn.ModuleList([nn.Identity()])
        self.pool = nn.MaxPool2d(1)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mask", None)
        self.first, self.second = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())

    def forward(self, x):
        y = self.layers(self.act(super().forward(x))) * self.scale
        for part in self.parts:
            y = part(y)
        if self.mask is not None:
            y = y * self.mask
        if self.pool is not None:
            y = self.pool(y)
        y = F.dropout(y, self.drop.p, self.drop.training)
        return self.first(y) if self.training else self.second(y)


CHANGES = {
    "append": lambda m: m.layers.append(nn.Tanh()),
    "append-to-list": lambda m: m.parts.append(nn.Tanh()),
    "class-attribute": lambda m: setattr(m, "scale", 0.5),
    "callable": lambda m: setattr(m, "act", torch.tanh),
    "buffer": lambda m: m.register_buffer("mask", torch.full((1,), 0.5)),
    "no-child": lambda m: setattr(m, "pool", None),
    "mode-of-a-child": lambda m: m.eval().drop.train(),
    "hook-in-evaluation": lambda m: m.eval().second.register_forward_hook(lambda *a: a[2] * 0),
    "forward": lambda m: setattr(m, "forward", lambda x: x * 2),
}


@pytest.mark.parametrize("again", [False, True], ids=["", "converted-again"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_later_changes_have_the_effect_of_plain_pytorch(change, again):
    model = WithParts()
    plain = copy.deepcopy(model)
    assert pk.conversion_report(pk.convert(model)).fused
    for m in (model, plain):
        change(m)
    if again:
        pk.convert(model)
    x = torch.randn(2, 4, 6, 6)
    torch.manual_seed(0)
    expected = plain(x)
    torch.manual_seed(0)
    torch.testing.assert_close(model(x), expected)


class TwoFaced(Block):
    def __init_subclass__(cls, *, kind, **kwargs):
        super().__init_subclass__(**kwargs)


def test_unusual_classes_are_left_alone():
    model = pk.convert(nn.Sequential(TwoFaced()))
    assert type(model[0]) is TwoFaced
    assert model(torch.randn(2, 4, 6, 6)).shape == (2, 4, 6, 6)


def test_a_child_that_catches_errors_stays_a_call_in_a_traced_parent():
    model = Chain(Block(), CatchesErrors(), nn.BatchNorm2d(4), nn.ReLU())
    report = {s.name: s for s in pk.conversion_report(pk.convert(model))}
    assert report["2"].fused
    assert "catches the errors" in report["1.bn"].reason


def test_scripts_are_those_of_the_plain_model():
    model = pk.convert(Block()).eval()
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    child = nn.Sequential(Block(), torch.jit.script(nn.Dropout(0.5)))
    pk.convert(child).eval()
    assert not child[1].training
