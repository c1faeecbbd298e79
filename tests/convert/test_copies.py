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
from tests.convert.foreign_cases import MODES, results, small
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
    assert pk.saved_bytes(other, x) == pk.saved_bytes(model, x)
    assert list(pk.conversion_report(other)) == list(pk.conversion_report(model))
    assert pk.conversion_report(other).fused
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


@pytest.mark.parametrize("has_run", [False, True])
def test_a_converted_model_is_freed_at_once(has_run):
    model, x = small()
    modules = list(map(weakref.ref, pk.convert(model).modules()))
    if has_run:
        model(x)
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(m() for m in modules)
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


class Counted(Flagged):
    """A block that counts the calls of the forward of its class."""

    calls = 0

    def forward(self, x):
        Counted.calls += 1
        return super().forward(x)


def test_nothing_but_a_call_runs_the_forward():
    model = pk.convert(nn.Sequential(Counted()))
    for m in (model, copy.deepcopy(model), reloaded(model)):
        pk.conversion_report(m)
        pk.convert(m, memory="rebuild")
        pk.revert(m)
    assert Counted.calls == 0


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
    torch.testing.assert_close(other(x), model(x))
    is_converted = kind is not CopiesItself or copied is reloaded
    assert bool(pk.conversion_report(other).fused) is is_converted
    if is_converted:
        assert pk.saved_bytes(other, x) == pk.saved_bytes(model, x)


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


class WithSharedNorm(nn.Module):
    """Parts with a batch norm in common."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Flagged() for _ in range(2))
        self.parts[1].bn = self.parts[0].bn

    def forward(self, x):
        return self.parts[1](torch.tanh(self.parts[0](x)))


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded])
def test_copies_share_what_the_model_shares(copied):
    model, x = pk.convert(WithSharedNorm()), torch.randn(2, 4, 3, 3)
    other = copied(model)
    assert other.parts[0].bn is other.parts[1].bn
    assert_same_bits(results(other, x), results(model, x))
    for m in (model, other):
        m(x)
        assert [s.name for s in pk.conversion_report(m).fused] == ["parts.0.bn"]
        assert other.parts[0].bn.num_batches_tracked == (0 if m is model else 2)
