"""Memory modes "rebuild" and "checkpoint" of converted models: what the backward computes again."""

import copy
import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from preact_kernels.conversion import policy, recomputation
from preact_kernels.ops import node

pytestmark = pytest.mark.backends("cpu")

CHANNELS = 4
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class Block(nn.Module):
    """Norm, activation, convolution; a shift per image; the same with dropout; residual."""

    def __init__(self, norm, dims=2, drops=(0.0, 0.1), units=2, has_shift=False):
        super().__init__()
        conv = _CONVOLUTIONS[dims - 1]
        self.norms = nn.ModuleList(norm() for _ in range(units))
        self.convs = nn.ModuleList(conv(CHANNELS, CHANNELS, 3, padding=1) for _ in range(units))
        self.shift = nn.Parameter(torch.randn(2, CHANNELS, *[1] * dims)) if has_shift else None
        self.drops = drops

    def forward(self, x):
        h = x
        for i, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            h = F.silu(norm(h))
            if drop := self.drops[i % 2]:
                h = F.dropout(h, drop, self.training)
            h = conv(h)
            if i == 0 and self.shift is not None:
                h = h + self.shift
        return (x + h) / 1.4


class Network(nn.Module):
    def __init__(self, norm, count=3, dims=2, **options):
        super().__init__()
        blocks = [Block(norm, dims, **options) for _ in range(count)]
        self.stem = _CONVOLUTIONS[dims - 1](CHANNELS, CHANNELS, 1)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def group_norm():
    return nn.GroupNorm(2, CHANNELS)


def converted(network, memory):
    return pk.convert(copy.deepcopy(network), memory=memory)


def trained(network, x):
    """Returns the output of a step, all gradients, and the buffers."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    y = network(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in network.parameters()), *network.buffers()]


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_saves(network, most, x):
    """Asserts that "checkpoint" gives the bits of "store" and saves at most a share of it."""
    store, again = converted(network, "store"), converted(network, "checkpoint")
    assert_equal(trained(again, x), trained(store, x))
    assert pk.saved_bytes(again, x) <= most * pk.saved_bytes(store, x)


NORMS = {
    "group": lambda dims: nn.GroupNorm(2, CHANNELS),
    "batch": lambda dims: _BATCH_NORMS[dims - 1](CHANNELS),
    "cumulative batch": lambda dims: _BATCH_NORMS[dims - 1](CHANNELS, momentum=None),
    "instance": lambda dims: _INSTANCE_NORMS[dims - 1](CHANNELS, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_only_the_inputs_of_blocks_are_saved(name):
    sizes = {1: (64,), 2: (8, 8), 3: (4, 4, 4)}
    for (dims, size), training in itertools.product(sizes.items(), (True, False)):
        network = Network(partial(NORMS[name], dims), dims=dims, has_shift=True).train(training)
        assert_saves(network, 0.65, torch.randn(2, CHANNELS, *size))


def test_memory_formats_and_autocast():
    x = torch.randn(2, CHANNELS, 8, 8).contiguous(memory_format=torch.channels_last)
    network = Network(group_norm).to(memory_format=torch.channels_last)
    assert_saves(network, 0.65, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_saves(network, 0.75, x)
    assert_saves(network.bfloat16(), 0.75, x.bfloat16())


@pytest.mark.parametrize(("span", "anchors"), [(24, 0), (4, 1), (2, 3)])
def test_a_backward_holds_no_more_than_the_span(monkeypatch, span, anchors):
    """Of 9 units in a row, the first input is kept, and then one in `span`."""
    changed = policy.POLICIES["checkpoint"]._replace(span=span)
    monkeypatch.setitem(policy.POLICIES, "checkpoint", changed)
    network = Network(group_norm, count=1, drops=(0.0, 0.0), units=9)
    x = torch.randn(2, CHANNELS, 16, 16)
    assert_saves(network, (1.1 + anchors) / 10, x)
    assert pk.saved_bytes(converted(network, "checkpoint"), x) >= (1 + anchors) * x.nbytes


def test_norm_and_activation_before_other_functions():
    class Upsampling(Block):
        def forward(self, x):
            h = self.convs[0](F.interpolate(F.silu(self.norms[0](x)), scale_factor=2))
            h = F.avg_pool2d(F.silu(self.norms[1](h)), 2)
            return x + self.convs[1](h)

    # Saved by "store": x, the pooled activation, and three tensors of four times their size.
    assert_saves(Upsampling(group_norm), 1.1 / 14, torch.randn(2, CHANNELS, 16, 16))


def test_inner_units_run_once_more(monkeypatch):
    calls = []
    run = node.UnitCall.result

    def counted(call, x, norm, conv_weight, *rest):
        calls.append(conv_weight.data_ptr())
        return run(call, x, norm, conv_weight, *rest)

    monkeypatch.setattr(node.UnitCall, "result", counted)
    network = converted(Network(group_norm, units=3, drops=(0.0, 0.0)), "checkpoint")
    trained(network, torch.randn(2, CHANNELS, 8, 8))
    convs = [conv for block in network.blocks for conv in block.convs]
    counts = [calls.count(conv.weight.data_ptr()) for conv in convs]
    # One result is an anchor, and nothing saves the last one.
    assert sorted(counts) == [1] * 2 + [2] * 7 and counts[-1] == 1


def test_second_derivatives_and_a_second_backward():
    network = Network(group_norm, count=2, drops=(0.0, 0.0)).double()
    x = torch.randn(2, CHANNELS, 5, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for memory in ("store", "checkpoint"):
        model = converted(network, memory)
        loss = model(x).pow(3).sum()
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(dx, again)
        again.square().sum().backward(inputs=list(model.parameters()))
        found.append([dx, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found)


def test_vmap_of_a_backward():
    network = Network(group_norm, count=2, has_shift=True).double()
    x = torch.randn(2, CHANNELS, 5, 6).double()
    found = []
    for memory in ("store", "checkpoint"):
        torch.manual_seed(1)
        model = converted(network, memory)
        inputs = x.detach().requires_grad_(), *model.parameters()
        y = model(inputs[0])
        backward = torch.func.vmap(partial(torch.autograd.grad, y, inputs))
        found.append(backward(torch.stack([y.detach().cos(), y.detach().sin()])))
    assert_equal(*found)


@pytest.mark.parametrize("what", ["weight of norm", "weight of convolution", "input"])
def test_a_change_in_place_before_the_backward_raises(what):
    network = converted(Network(group_norm, count=1), "checkpoint")
    x = torch.randn(2, CHANNELS, 8, 8).contiguous(memory_format=torch.channels_last)
    block = network.blocks[0]
    stem = network.stem(x)
    y = pk.convert(block, memory="checkpoint")(stem)
    changed = {
        "weight of norm": block.norms[0].weight,
        "weight of convolution": block.convs[0].weight,
        "input": stem,
    }[what]
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward(inputs=[block.convs[1].weight])


def test_a_freed_parameter_raises():
    block = pk.convert(Block(group_norm), memory="checkpoint")
    y = block(torch.randn(2, CHANNELS, 8, 8, requires_grad=True))
    block.convs[0].weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="freed between forward and backward"):
        y.sum().backward(inputs=[block.convs[1].weight])


def test_inner_tensors_that_are_read_twice():
    class Twice(Block):
        def forward(self, x):
            h = self.convs[0](F.silu(self.norms[0](x)))
            return x + self.convs[1](F.silu(self.norms[1](h))) + h * 0.5

    network, x = Twice(group_norm), torch.randn(2, CHANNELS, 8, 8)
    store, again = converted(network, "store"), converted(network, "checkpoint")
    assert_equal(trained(again, x), trained(store, x))
    assert pk.saved_bytes(again, x) < 0.6 * pk.saved_bytes(store, x)


def test_reading_what_is_saved_updates_no_statistics():
    network = Block(lambda: nn.BatchNorm2d(CHANNELS))
    x = torch.randn(2, CHANNELS, 8, 8, requires_grad=True)
    model = converted(network, "checkpoint")
    y = model(x)
    before = [b.clone() for b in model.buffers()]
    waiting, saved = [y.grad_fn], []
    while waiting:
        node = waiting.pop()
        waiting += [n for n, _ in node.next_functions if n is not None]
        saved += getattr(node, "saved_tensors", ())
    assert any(t is not None and t.shape == x.shape and t is not x for t in saved)
    assert_equal(before, list(model.buffers()))


class Branching(Block):
    """Two convolutions read the first activation, and a chain of units follows one of them."""

    def forward(self, x):
        first, *rest = zip(self.norms, self.convs, strict=True)
        a = F.silu(first[0](x))
        h = first[1](a)
        for norm, conv in rest:
            h = conv(F.silu(norm(h)))
        return h + F.conv2d(a, first[1].weight, padding=1)


@pytest.mark.parametrize("network", [Network(group_norm), Branching(group_norm, units=3)])
def test_blocks_under_a_checkpoint(network):
    x = torch.randn(2, CHANNELS, 8, 8)
    expected = trained(converted(network, "store"), x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = converted(network, "checkpoint")

        def forward(self, x):
            return checkpoint(self.network, x, use_reentrant=False)

    assert_equal(trained(Outer(), x), expected)


def test_backwards_at_once_under_a_checkpoint():
    network = converted(Branching(group_norm, units=3), "checkpoint")
    y = checkpoint(network, torch.randn(2, CHANNELS, 8, 8), use_reentrant=False).sum()
    weight = network.convs[0].weight
    (expected,) = torch.autograd.grad(y, weight, retain_graph=True)
    inner = []

    def differentiate(_):
        if not inner:
            inner.append(None)
            inner[0] = torch.autograd.grad(y, weight, retain_graph=True)[0]

    network.norms[2].weight.register_hook(differentiate)
    parameters = [weight, network.norms[2].weight]
    found = torch.autograd.grad(y, parameters, retain_graph=True)
    assert_equal([found[0], inner[0]], [expected, expected])


def test_values_of_a_backward_that_ends_early_are_freed():
    """The last norm reads what the others compute; those run no backward."""
    network = converted(Network(group_norm, count=1, units=3, drops=(0.0, 0.0)), "checkpoint")
    y = network(torch.randn(2, CHANNELS, 8, 8))
    weight = network.blocks[0].norms[2].weight
    (once,) = torch.autograd.grad(y.sum(), weight, retain_graph=True)
    found = [o for o in gc.get_objects() if type(o) is recomputation.Recomputation]
    assert found and not any(o._passes for o in found)
    (twice,) = torch.autograd.grad(y.sum(), weight, retain_graph=True)
    assert torch.equal(once, twice)


def test_hooks_that_move_what_is_saved_free_the_inputs_of_blocks():
    block = pk.convert(Block(group_norm, drops=(0.0, 0.0)), memory="checkpoint")
    inputs = [torch.randn(2, CHANNELS, 8, 8) for _ in range(2)]
    inputs[1] = inputs[1].contiguous(memory_format=torch.channels_last)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    for x in inputs:
        x = x.requires_grad_() * 1.0
        with hooks:
            y = block(x)
        reference = weakref.ref(x)
        del x
        assert reference() is None
        y.sum().backward()


def test_what_hooks_unpack_is_freed_before_the_backward_ends():
    block = converted(Branching(group_norm, units=3), "checkpoint")
    shape, unpacked, alive = (2, CHANNELS, 8, 8), [], []

    def unpack(t):
        t = t.clone()
        if t.shape == shape:
            unpacked.append(weakref.ref(t))
        return t

    x = torch.randn(shape, requires_grad=True)
    h = x * 1.0
    h.register_hook(lambda _: alive.append(sum(r() is not None for r in unpacked)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
        y = block(h)
    for _ in range(2):
        y.square().sum().backward(retain_graph=True)
    assert unpacked and alive == [0, 0]


def test_without_hooks_of_saved_tensors_everything_is_saved():
    network, x = Network(group_norm), torch.randn(2, CHANNELS, 8, 8)
    expected = trained(converted(network, "store"), x)
    model = converted(network, "checkpoint")
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        assert_equal(trained(model, x), expected)
