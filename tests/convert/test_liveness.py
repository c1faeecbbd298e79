"""Variables that a function reads no more do not keep their tensors from running fused."""

import asyncio
import copy
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.conversion.liveness import Reference, unread

pytestmark = [
    pytest.mark.backends("cpu"),
    pytest.mark.skipif(sys.gettrace() is not None, reason="a trace function reads variables"),
]


def asked(references):
    return unread([r() for r in references])


def references(*tensors):
    return [Reference(t) for t in tensors]


def reads_one_of_two(x):
    a, b = x + 1, x + 2
    found = asked(references(a, b))
    return b, found


def reads_behind_a_branch(x):
    a, b = x + 1, x + 2
    found = asked(references(a, b))
    if x.sum() > 0:
        return b, found
    return a, found


def reads_in_a_handler(x):
    a, b = x + 1, x + 2
    found = asked(references(a, b))
    try:
        x.sum()
    except ValueError:
        return a, found
    return x, found


def reads_in_a_finally(x):
    a, b = x + 1, x + 2
    try:
        return asked(references(a, b))
    finally:
        a.sum()


def writes_before_it_reads(x):
    found = []
    for i in range(2):
        a = x + i
        b = a * 2
        found += asked(references(a, b))
    return b, found


def reads_in_the_next_round(x):
    a = x
    for i in range(2):
        b = a + i
        a = x + 1
        found = asked(references(a, b))
    return x, found


def shares_with_a_function(x):
    a, b = x + 1, x + 2

    def read():
        return a

    return read, asked(references(a, b))


def keeps_in_a_list(x):
    a, b = x + 1, x + 2
    kept = [a]
    return kept, asked(references(a, b))


def reads_all(x):
    a, b = x + 1, x + 2
    found = asked(references(a, b))
    return locals().keys(), found


def keeps_a_weak_reference(x):
    a, b = x + 1, x + 2
    kept = weakref.WeakSet([a])
    return kept, asked(references(a, b))


def saves_for_backward(x):
    a, b = x + 1, x + 2
    return (a * x.clone().requires_grad_()), asked(references(a, b))


def shares_a_plain_weak_reference(x):
    a, b = x + 1, x + 2
    kept = weakref.ref(a)
    return kept, asked(references(a, b))


async def _numbers():
    for i in range(2):
        yield i


async def _reads_behind_an_async_loop(x):
    a, b = x + 1, x + 2
    found = []
    async for i in _numbers():
        found = asked(references(a, b))
        b = x + i
    return a, found


def reads_behind_an_async_loop(x):
    return asyncio.run(_reads_behind_an_async_loop(x))


def _variables():
    return sys._getframe(1).f_locals


def keeps_its_variables(x):
    a = x + 1
    kept = _variables()
    found = asked(references(a))
    assert kept["a"] is a and kept["x"] is x
    return kept, found


def reads_variables_of_the_caller(x):
    def read(code):
        variables = sys._getframe(1).f_locals
        return eval(code, {"asked": asked, "references": references}, variables)

    a, b = x + 1, x + 2  # noqa: F841
    return b, read("asked(references(a, b))")


def is_profiled(x):
    a, b = x + 1, x + 2
    try:
        sys.setprofile(lambda *_: None)
        found = asked(references(a, b))
    finally:
        sys.setprofile(None)
    return b, found


FUNCTIONS = [
    (shares_a_plain_weak_reference, [False, True]),
    (reads_behind_an_async_loop, [False, True]),
    (keeps_its_variables, [False]),
    (reads_variables_of_the_caller, [False, False]),
    (is_profiled, [False, False]),
    (reads_one_of_two, [True, False]),
    (reads_behind_a_branch, [False, False]),
    (reads_in_a_handler, [False, True]),
    (reads_in_a_finally, [False, True]),
    (writes_before_it_reads, [True, False] * 2),
    (reads_in_the_next_round, [False, True]),
    (shares_with_a_function, [False, True]),
    (keeps_in_a_list, [False, True]),
    (reads_all, [False, False]),
    (keeps_a_weak_reference, [False, True]),
    (saves_for_backward, [False, True]),
]


@pytest.mark.parametrize(
    ("function", "expected"), FUNCTIONS, ids=lambda v: getattr(v, "__name__", "")
)
def test_variables_that_are_not_read_again(function, expected):
    found = function(torch.ones(2))
    assert (found if isinstance(found, list) else found[1]) == expected
    assert function(torch.ones(2)) is not None  # variables stay what they are


def test_variables_stay_what_they_are():
    def function(x):
        a, b = x + 1, x + 2
        asked(references(a))
        return a, b

    a, b = function(torch.ones(2))
    assert a.tolist() == [2, 2] and b.tolist() == [3, 3]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, bias=False)


class NamesAll(Net):
    def forward(self, x):
        a = self.bn1(x)
        b = F.relu(a)
        c = self.conv1(b)
        d = self.bn2(c)
        e = F.relu(d)
        f = self.conv2(e)
        return f.mean((2, 3))


class Gated(Net):
    def forward(self, x):
        a = F.relu(self.bn1(x))
        b = self.conv1(a)
        c = F.relu(self.bn2(b))
        d = self.conv2(c)
        return d * torch.sigmoid(d.mean((2, 3), keepdim=True)) + x


class ReadsAgain(Net):
    def forward(self, x):
        a = F.relu(self.bn1(x))
        b = self.conv1(a)
        gate = torch.sigmoid(b.mean((2, 3), keepdim=True))
        return b * gate + self.conv2(a)


class ReturnsFeatures(Net):
    def forward(self, x):
        a = F.relu(self.bn1(x))
        b = self.conv1(a)
        return b.mean((2, 3)), a


class Raises(Net):
    def forward(self, x):
        a = self.bn1(x)
        b = F.relu(a)
        c = self.conv1(b)
        d = c.mean()
        raise ValueError(d.item())


def images():
    return torch.randn(4, 8, 10, 10, dtype=torch.float64)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("kind", "share", "into"),
    [
        (NamesAll, 0.51, "BN-ReLU-Conv, 2 in a row"),
        (Gated, 0.61, "BN-ReLU-Conv, 2 in a row"),
        (ReadsAgain, 1.01, "BN-ReLU"),
        (ReturnsFeatures, 1.01, "BN-ReLU"),
    ],
)
def test_forwards_that_name_what_they_compute(kind, share, into, memory_format):
    plain = kind().double().to(memory_format=memory_format)
    converted = pk.convert(copy.deepcopy(plain))
    x = images().contiguous(memory_format=memory_format)
    assert pk.saved_bytes(converted, x) <= share * pk.saved_bytes(plain, x)
    assert pk.conversion_report(converted)[0].into == into
    results = []
    for model in (plain, converted):
        outputs = model(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = outputs[0].square().sum()
        wanted = (*outputs[1:], *model.parameters())
        results.append([*outputs, *torch.autograd.grad(loss, wanted, allow_unused=True)])
        results[-1] += model.buffers()
    for value, expected in zip(*results, strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            torch.testing.assert_close(value, expected)


def test_a_debugger_may_read_what_the_program_does_not():
    plain = Raises().double()
    x, found = images(), []
    for model in (plain, pk.convert(copy.deepcopy(plain))):
        with pytest.raises(ValueError, match=r"\d") as error:
            model(x)
        frame = error.traceback[-1].frame
        found.append([frame.f_locals[name] for name in "abcd"] + list(model.buffers()))
    assert pk.conversion_report(model)[0].into == "BN-ReLU-Conv"
    for value, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(value, expected)
