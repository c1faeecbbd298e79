"""Unusual forwards in converted models: which run fused, and why others do not; all are equal."""

import copy
import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from tests.convert import published_models as foreign
from tests.convert.foreign_cases import MODES, Block, Chain, report_of, small
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
        return super().forward(x) if x.mean() < 1e6 else x


class PythonRandomness(Block):
    def forward(self, x):
        return super().forward(x) * random.random()


class TensorRandomness(Block):
    def forward(self, x):
        return super().forward(x) * torch.rand(1)


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
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                y = super().forward(x)
            return y * 2


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


class CallsBase(Block):
    def forward(self, x):
        return super(self.__class__, self).forward(x)  # endless recursion in a subclass


class TakesOptions(Block):
    """Subclasses need an option."""

    def __init_subclass__(cls, *, kind, **kwargs):
        super().__init_subclass__(**kwargs)


def with_hook():
    block = Block()
    block.bn.register_forward_hook(lambda *args: None)
    return block


def with_two_names():
    block = Block()
    block.other = block.bn
    return block


FUSED = [
    CalledTwice,
    ControlFlow,
    PythonRandomness,
    TensorRandomness,
    WithoutGradient,
    ReentrantCheckpoint,
    ConstantTensor,
    Autocast,
    AsksForState,
    Seeds,
    CatchesErrors,
    Records,
    SetsAttribute,
    CallsBase,
    TakesOptions,
    with_two_names,
]

# Builder, and the reason in the report.
UNFUSED = {
    OtherActivation: r"^read by gelu \(test_unfused.py:\d+\)$",
    UsedTwice: "^its output is used more than once$",
    NoReLU: r"^no ReLU follows \(conv2d\)$",
    Checkpointed: "checkpoint",
    with_hook: "^the batch norm has hooks$",
}

alone_and_inside = pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])


def observed(model, x):
    """One step in training mode, of a copy, and a random number of PyTorch and Python after it."""
    torch.manual_seed(0)
    random.seed(0)
    found = evaluate(model, {"x": x})
    return found | {"random": torch.rand(()), "Python's": torch.tensor(random.random())}


def assert_runs_as_in_plain_pytorch(model, inside):
    """Compares one step; returns the site of the model's batch norm."""
    if inside:
        model = Chain(Block(), model, nn.BatchNorm2d(4), nn.ReLU())
    plain, x = copy.deepcopy(model), torch.rand(2, 4, 6, 6) + 0.5
    pk.convert(model)
    sites = {s.name: s for s in report_of(model, x.clone().requires_grad_())}
    if inside:
        assert sites["0.bn"].fused and sites["2"].fused
    found, expected = observed(model, x), observed(plain, x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    assert found["y"].stride() == expected["y"].stride()
    return sites["1.bn" if inside else "bn"]


@alone_and_inside
@pytest.mark.parametrize("build", FUSED, ids=lambda b: b.__name__)
def test_unusual_forwards_run_fused_and_right(build, inside):
    assert assert_runs_as_in_plain_pytorch(build(), inside).into == "BN-ReLU-Conv"


@alone_and_inside
@pytest.mark.parametrize("build", UNFUSED, ids=lambda b: b.__name__)
def test_what_is_not_fused_is_reported_and_right(build, inside):
    site = assert_runs_as_in_plain_pytorch(build(), inside)
    assert not site.fused
    assert re.search(UNFUSED[build], site.reason), site.reason


class ConvertedInCheckpoint(nn.Module):
    def __init__(self, block, use_reentrant):
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(
            self.block, x * 1, use_reentrant=self.use_reentrant
        )


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("build", [Block, NoReLU])
def test_converted_modules_that_a_checkpoint_calls_run_fused(build, use_reentrant):
    """Their running statistics follow the batch once, also where nothing fuses."""
    model, x = ConvertedInCheckpoint(build(), use_reentrant), torch.randn(2, 4, 6, 6)
    plain = copy.deepcopy(model)
    (site,) = report_of(pk.convert(model), x.requires_grad_())
    assert site.fused is (build is Block)
    found, expected = evaluate(model, {"x": x}), evaluate(plain.block, {"x": x})
    for name, value in expected.items():
        found_name = name if name in found else re.sub("^(d?)", r"\1block.", name)
        torch.testing.assert_close(found[found_name], value, msg=name)


class ChangedInPlace(Block):
    def forward(self, x):
        h = self.bn(x)
        x.add_(0.5)
        return self.conv(F.relu(h)) + x


def test_an_input_that_changes_in_place_is_read_before():
    model = ChangedInPlace().eval()
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        expected = model(x.clone())
        assert torch.equal(pk.convert(model)(x), expected)
    (site,) = pk.conversion_report(model)
    assert not site.fused
    assert "read by add_" in site.reason


def lazy():
    return nn.Sequential(nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(4, 3))


def test_lazy_modules_run_fused_once_they_have_shapes():
    model, plain, x = pk.convert(lazy()), lazy(), torch.randn(2, 3, 5, 5)
    (site,) = pk.conversion_report(model)
    assert not site.fused
    assert "not called" in site.reason
    found = []
    for m in (model, plain):
        torch.manual_seed(1)  # the first call draws the weights
        found.append([m(x), m(x), *m.buffers()])
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected)
    assert pk.conversion_report(model).fused


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


class TwoBranches(nn.Module):
    """The sum of two units, as in blocks whose projection has a batch norm of its own."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        return self.branches[0](x) + self.branches[1](x)


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
@pytest.mark.parametrize(
    "build", [AsksForType, Broadcast, Padded, UnevenlyPadded, TwoBranches, Tapped]
)
def test_variants_are_right(build, memory):
    model, x = build(), torch.randn(2, 4, 6, 6)
    plain = copy.deepcopy(model)
    assert report_of(pk.convert(model, memory=memory), x).fused
    y, expected = (evaluate(m, {"x": x}) for m in (model, plain))
    for name, value in expected.items():
        torch.testing.assert_close(y[name], value, msg=name, rtol=1e-4, atol=1e-5)


def test_symmetric_padding_is_absorbed():
    for model, expected in ((Padded(), "BN-ReLU-Conv"), (UnevenlyPadded(), "BN-ReLU")):
        (site,) = report_of(pk.convert(model), torch.randn(2, 4, 6, 6))
        assert site.into == expected
