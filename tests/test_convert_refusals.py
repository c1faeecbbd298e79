"""What `convert` does not fuse is reported, and stays right."""

import copy
import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from bench import foreign_models as foreign
from tests.foreign_cases import MODES, Block, Chain, small
from tests.oracle import evaluate

pytestmark = pytest.mark.backends("cpu", slow=("reference", "triton"))


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
