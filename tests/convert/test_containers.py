"""Lists, tuples, dictionaries and objects of any class that hold deferred tensors."""

import collections
import copy
import dataclasses
import types

import pytest
import torch
from torch import nn
from torch.fx.immutable_collections import immutable_list
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

import preact_kernels as pk
from tests.convert.models import Block
from tests.convert.random_model_parts import SaveAndSquare, TensorList

pytestmark = pytest.mark.backends("cpu")

square = SaveAndSquare.apply


def refuse(*args, **kwargs):
    raise AssertionError("a method of the user's class runs")


class Refusing:
    """Methods that no function of PyTorch calls."""

    @classmethod
    def of(cls, items):
        """Returns a container without its constructor."""
        base = next(k for k in (list, tuple, dict) if issubclass(cls, k))
        if base is tuple:
            return tuple.__new__(cls, items)
        value = base.__new__(cls)
        (base.extend if base is list else base.update)(value, items)
        return value

    __init__ = __iter__ = __getitem__ = __setitem__ = items = keys = values = refuse


class Features(Refusing, list):
    """A list."""


class Row(Refusing, tuple):
    """A tuple."""


class Named(collections.namedtuple("Named", "first second")):
    """A named tuple with a constructor of its own."""

    def __new__(cls, first):
        refuse()


class Entries(Refusing, dict):
    """A dictionary."""


SEQUENCES = {
    "list": Features.of,
    "named tuple": lambda tensors: tuple.__new__(Named, tensors),
    "return type": torch.return_types.max,
    "list of fx": immutable_list,
}


def in_place(tensors):
    torch._foreach_mul_(tensors, 3.0)
    return torch.cat(torch._foreach_add_(tensors, 1.0), 1)


FUNCTIONS = {
    "stack": lambda tensors: torch.stack(tensors).sum(0),
    "cat": lambda tensors: torch.cat(tensors, dim=0),
    "cat of channels": lambda tensors: torch.cat(tensors, 1),
    "foreach in place": in_place,
}


def results(make, function, is_held, is_fused):
    """Calls `function` on two results of a block; returns its result and gradients."""
    torch.manual_seed(0)
    block, x = Block().double(), torch.randn(2, 4, 5, 5).double().requires_grad_()
    with pk.fuse() if is_fused else torch.enable_grad():
        h, g = block(x), F.group_norm(x, 2)
        held = [square(t) for t in (h, g)] if is_held else []
        y = function(make((h, g)))
    loss, own = sum(t.sum() for t in (*held, y * y)), (x, *block.parameters())
    gradients = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
    return [y, *gradients, *block.buffers()]


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)
def test_functions_take_sequences_of_any_class(make, is_held):
    for name, function in FUNCTIONS.items():
        if is_held and name == "foreach in place":
            continue  # changes what `square` saved
        found = (results(make, function, is_held, is_fused) for is_fused in (True, False))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@dataclasses.dataclass
class Batch:
    """An object of the program."""

    images: torch.Tensor

    def tensors(self):
        return (self.images,)


def doubled(value):
    """A function of the program that other classes of tensors can override."""
    tensors = value.tensors() if isinstance(value, Batch) else tuple(dict.values(value))
    if has_torch_function(tensors):
        return handle_torch_function(doubled, tensors, value)
    return F.relu(tensors[0]) * 2


OBJECTS = {
    "object": lambda tensors: Batch(tensors[0]),
    "dictionary": lambda tensors: Entries.of({"images": tensors[0]}),
}


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_functions_of_the_program_take_objects_of_any_class(make, is_held):
    found = (results(make, doubled, is_held, is_fused) for is_fused in (True, False))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_list_that_contains_itself_may_be_copied_beside_a_pending_norm():
    block, x = Block(), torch.randn(2, 4, 5, 5)
    own = TensorList()
    own.append(own)
    with pk.fuse():
        h = block.bn(x)
        _, copied = copy.deepcopy([own, x])
        torch.testing.assert_close(copied, x)
        assert type(h) is not torch.Tensor


CHANGES = {
    "list": lambda h: torch._foreach_mul_([h], 3.0),
    "index": lambda h: h.__setitem__(0, 0.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_custom_function_of_what_changed_while_it_was_held_raises_in_backward(change):
    """Its gradient would be that of the tensor before the change."""
    block, x = Block(), torch.randn(2, 4, 5, 5, requires_grad=True)
    with pk.fuse():
        h = block.bn(x)
        held = square(h)
        h.mean()
        if type(h) is torch.Tensor:
            pytest.skip("this torch holds no deferred tensor")
        change(h)
        y = SaveAndSquare.apply(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del held


class Output(collections.OrderedDict):
    """A dictionary whose values are attributes too, as in transformers."""

    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__.update(values)


OUTPUTS = {
    "list": lambda t: Features.of([t]),
    "named tuple": lambda t: tuple.__new__(Named, (t, None)),
    "return type": lambda t: torch.return_types.max((t, None)),
    "dictionary": lambda t: Entries.of({"t": t}),
    "dictionary with attributes": lambda t: Output(t=t),
    "namespace": lambda t: types.SimpleNamespace(t=t),
    "nested": lambda t: TensorList([{"t": Row.of([Batch(t)])}]),
}


def parts(value):
    """Returns the tensors in an output, and the classes of its containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    found = [type(value)]
    for base, items in ((list, list.__iter__), (tuple, tuple.__iter__), (dict, dict.values)):
        if isinstance(value, base):
            found += [p for item in items(value) for p in parts(item)]
    return found + [p for v in getattr(value, "__dict__", {}).values() for p in parts(v)]


class Returns(Block):
    """Returns its result, which an autograd function may hold, in a container."""

    def __init__(self, make, is_held):
        super().__init__()
        self.make, self.is_held = [make], is_held

    def forward(self, x):
        h = super().forward(x)
        self.held = square(h) if self.is_held else None
        return self.make[0](h)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_of_any_class_hold_plain_tensors(make, is_held):
    """The model returns plain tensors, and hooks of its children see plain tensors."""
    model, x = nn.Sequential(Returns(make, is_held)), torch.randn(2, 4, 5, 5)
    expected, seen = parts(copy.deepcopy(model)(x)), []
    if not is_held:
        model[0].register_forward_hook(lambda module, args, output: seen.append(parts(output)))
    for found in (parts(pk.convert(model)(x)), *seen):
        assert [type(p) for p in found] == [type(p) for p in expected]
        assert [p for p in found if type(p) is type] == [p for p in expected if type(p) is type]
        tensors = [[p for p in both if type(p) is torch.Tensor] for both in (found, expected)]
        assert tensors[0]
        torch.testing.assert_close(*tensors)
    assert is_held or seen
