"""Variables that a function does not read again do not prevent fusion."""

import asyncio
import copy
import sys
import weakref

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.conversion.liveness import Reference, unread
from tests.convert.models import Block

pytestmark = [
    pytest.mark.backends("cpu"),
    pytest.mark.skipif(sys.gettrace() is not None, reason="a trace function reads variables"),
]


def asked(references):
    return unread([r() for r in references])


def references(*tensors):
    return [Reference(t) for t in tensors]


FUNCTIONS = []


def finds(expected):
    """Adds a function; `expected`: which of the given tensors it does not read again."""
    return lambda function: FUNCTIONS.append((function, expected)) or function


@finds([True, False])
def reads_one_of_two(x):
    a, b = x + 1, x + 2
    found = asked(references(a, b))
    return b, found


@finds([False, False])
def reads_behind_a_branch(x):
    a, b = x + 1, x + 2
    found = asked(references(a, b))
    if x.sum() > 0:
        return b, found
    return a, found


@finds([False, True])
def reads_in_a_handler(x):
    a, b = x + 1, x + 2
    found = asked(references(a, b))
    try:
        x.sum()
    except ValueError:
        return a, found
    return x, found


@finds([True, False] * 2)
def writes_before_it_reads(x):
    found = []
    for i in range(2):
        a = x + i
        b = a * 2
        found += asked(references(a, b))
    return b, found


@finds([False, True])
def reads_in_the_next_round(x):
    a = x
    for i in range(2):
        b = a + i
        a = x + 1
        found = asked(references(a, b))
    return x, found


@finds([False, True])
def shares_with_a_function(x):
    a, b = x + 1, x + 2

    def read():
        return a

    return read, asked(references(a, b))


@finds([False, True])
def keeps_in_a_list(x):
    a, b = x + 1, x + 2
    kept = [a]
    return kept, asked(references(a, b))


@finds([False, False])
def reads_all(x):
    a, b = x + 1, x + 2
    found = asked(references(a, b))
    return locals().keys(), found


@finds([False, True])
def keeps_a_weak_reference(x):
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


@finds([False, True])
def reads_behind_an_async_loop(x):
    return asyncio.run(_reads_behind_an_async_loop(x))


def _variables():
    return sys._getframe(1).f_locals


@finds([False])
def keeps_its_variables(x):
    a = x + 1
    kept = _variables()
    found = asked(references(a))
    assert kept["a"] is a and kept["x"] is x
    return kept, found


@finds([False, False])
def reads_variables_of_the_caller(x):
    def read(code):
        variables = sys._getframe(1).f_locals
        return eval(code, {"asked": asked, "references": references}, variables)

    a, b = x + 1, x + 2  # noqa: F841
    return b, read("asked(references(a, b))")


@finds([False, False])
def is_profiled(x):
    a, b = x + 1, x + 2
    try:
        sys.setprofile(lambda *_: None)
        found = asked(references(a, b))
    finally:
        sys.setprofile(None)
    return b, found


@pytest.mark.parametrize(
    ("function", "expected"), FUNCTIONS, ids=lambda v: getattr(v, "__name__", "_")
)
def test_variables_that_are_not_read_again(function, expected):
    found = function(torch.ones(2))
    assert (found if isinstance(found, list) else found[1]) == expected
    assert function(torch.ones(2)) is not None  # variables do not change


class Raises(Block):
    def forward(self, x):
        a = self.bn(x)
        b = F.relu(a)
        c = self.conv(b)
        d = c.mean()
        raise ValueError(d.item())


def test_a_debugger_may_read_what_the_program_does_not():
    plain = Raises().double()
    x, found = torch.randn(2, 4, 6, 6).double(), []
    for model in (plain, pk.convert(copy.deepcopy(plain))):
        with pytest.raises(ValueError, match=r"\d") as error:
            model(x)
        frame = error.traceback[-1].frame
        found.append([frame.f_locals[name] for name in "abcd"] + list(model.buffers()))
    assert pk.conversion_report(model)[0].into == "BN-ReLU-Conv"
    torch.testing.assert_close(found[1], found[0])


class CallsAModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        return module(x)


class OpensARegion(Block):
    """Its function calls a module, which opens a region in the forward of the function."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        a = self.bn(x)
        b = F.relu(a)
        c = self.conv(b)
        return CallsAModule.apply(c, self.inner)


def test_an_inner_region_does_not_prevent_fusion():
    plain = OpensARegion().double()
    x, found = torch.randn(2, 4, 6, 6).double(), []
    for model in (plain, pk.convert(copy.deepcopy(plain))):
        found.append([model(x).detach(), *model.buffers()])
    sites = pk.conversion_report(model)
    assert [site.into for site in sites] == ["BN-ReLU-Conv", "BN-ReLU-Conv"]
    torch.testing.assert_close(found[1], found[0])
