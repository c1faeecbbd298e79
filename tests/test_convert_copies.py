"""Copies and pickles of converted models."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.conversion import fused_module
from tests.foreign_cases import MODES, built, results, small
from tests.oracle import assert_same_bits

pytestmark = pytest.mark.backends("cpu", slow=("reference", "triton"))


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


def test_a_converted_model_is_freed_at_once():
    model, _ = small()
    freed = weakref.ref(pk.convert(model))
    gc.collect()  # what tracing left
    gc.disable()
    try:
        del model
        assert freed() is None
    finally:
        gc.enable()


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


class CopiesWhatItHas(Flagged):
    """A module that copies its attributes, and does not tell."""

    def __deepcopy__(self, memo):
        other = type(self).__new__(type(self))
        other.__dict__.update({n: copy.deepcopy(v, memo) for n, v in vars(self).items()})
        return other


class Rebuilt(Flagged):
    """A module that is made by a function of its class and its attributes."""

    def __reduce_ex__(self, protocol):
        return rebuilt, (type(self), self.__dict__)


def rebuilt(kind, attributes):
    other = kind.__new__(kind)
    other.__dict__.update(attributes)
    return other


class WithObjects(Flagged):
    """A module whose attributes are equal to no copy of them."""

    def __init__(self):
        super().__init__()
        self.act = functools.partial(F.relu, inplace=False)
        self.config = [object()]

    def forward(self, x):
        return self.act(super().forward(x))


@pytest.mark.parametrize(
    "kind",
    [WithSlots, CopiesItself, CopiesWhatItHas, Rebuilt, WithObjects],
    ids=lambda k: k.__name__,
)
@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded])
def test_copies_of_modules_with_states_of_their_own(kind, copied):
    model, x = pk.convert(kind()), torch.randn(2, 4, 3, 3)
    other = copied(model)
    assert isinstance(other, kind)
    assert_same_bits(results(other, x), results(model, x))
    if kind not in (CopiesItself, Rebuilt):
        assert pk.saved_bytes(other, x) == pk.saved_bytes(model, x)
    if kind is Rebuilt:
        assert not pk.conversion_report(other).fused


class WithParent(Flagged):
    """A block that knows the model around it."""

    def __init__(self):
        super().__init__()
        self.parents = []


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded])
def test_copies_of_parts_that_refer_to_their_parents(copied):
    model = nn.Sequential(WithParent(), nn.BatchNorm2d(4), nn.ReLU())
    model[0].parents.append(model)
    part = copied(pk.convert(model)[0])
    other, x = part.parents[0], torch.randn(2, 4, 3, 3)
    assert other[0] is part
    torch.testing.assert_close(other(x), model(x))


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
