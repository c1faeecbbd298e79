"""Custom autograd functions and nested checkpoints inside of converted models."""

import contextlib
import copy
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import preact_kernels as pk
from preact_kernels.conversion import named_activations
from tests.convert.models import MODES, Block
from tests.convert.random_model_parts import Same, raises_value_error, triple

pytestmark = pytest.mark.backends("cpu")


def assert_same_step(plain, converted, x, call=lambda net, x: net(x), has_buffers=True):
    """Outputs, gradients and buffers of two steps are equal in float64."""
    found = []
    for net in (plain, converted):
        net.double().zero_grad()
        for _ in range(2):
            leaf = x.double().requires_grad_()
            y = call(net, leaf * 1)
            y.square().sum().backward()
        tensors = [y, leaf.grad, *(p.grad for p in net.parameters())]
        found.append(tensors + list(net.buffers()) if has_buffers else tensors)
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


# Nested checkpoints.


class Checkpoints(nn.Module):
    """Checkpoints its second block: the module, or the functions that it calls."""

    def __init__(self, use_reentrant, calls_module):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.use_reentrant, self.calls_module = use_reentrant, calls_module

    def run(self, x):
        block = self.blocks[1]
        return block(x) if self.calls_module else block.conv(F.relu(block.bn(x)))

    def forward(self, x):
        h = checkpoint(self.run, self.blocks[0](x), use_reentrant=self.use_reentrant)
        return self.blocks[2](h) + x


def around(levels, use_reentrant, net, x):
    """Calls `net` inside of nested checkpoints."""
    if levels == 0:
        return net(x)
    return checkpoint(
        partial(around, levels - 1, use_reentrant, net), x, use_reentrant=use_reentrant
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_checkpoint_around_a_model_that_checkpoints(inner, outer, levels, memory):
    for calls_module in (False, True):
        plain = Checkpoints(inner, calls_module)
        converted = pk.convert(copy.deepcopy(plain), memory=memory)
        x, call = torch.randn(2, 4, 6, 6), partial(around, levels, outer)
        assert_same_step(plain, converted, x, call, has_buffers=False)
        fused = pk.conversion_report(converted).fused
        assert len(fused) == 2 + calls_module


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_a_selective_checkpoint_of_norms_that_run_plain(policy):
    """It refuses operators that the forward did not call."""

    def save(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_RECOMPUTE if op._schema.is_mutable else policy

    # The norm is recorded and runs plain, or it is not recorded: its input has unusual strides.
    plain, x = nn.Sequential(nn.BatchNorm2d(4), nn.SELU()), torch.randn(2, 4, 6, 6)
    for stride in (1, 2):
        converted = pk.convert(copy.deepcopy(plain))
        contexts = partial(create_selective_checkpoint_contexts, save)

        def call(net, t, stride=stride, contexts=contexts, converted=converted):
            t = t[:, :, ::stride]
            if net is converted:
                return checkpoint(net, t, use_reentrant=False, context_fn=contexts)
            return net(t)

        assert_same_step(copy.deepcopy(plain), converted, x, call)


# Functions that free or replace their inputs.


class Reversible(torch.autograd.Function):
    """`y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`; the backward computes x from y.

    `free` frees a tensor that the forward no longer needs.
    """

    @staticmethod
    def forward(ctx, x, f, g, free, *parameters):
        x1, x2 = (t.contiguous() for t in x.chunk(2, dim=1))
        y1 = x1 + f(x2)
        y2 = x2 + g(y1)
        y = torch.cat((y1, y2), dim=1)
        for t in (x1, x2, y1, y2):
            free(t)
        ctx.save_for_backward(y)
        ctx.f, ctx.g, ctx.parameters = f, g, parameters
        return y

    @staticmethod
    def backward(ctx, dy):
        y1, y2 = (t.contiguous() for t in ctx.saved_tensors[0].chunk(2, dim=1))
        with torch.no_grad():
            x2 = y2 - ctx.g(y1)
            x1 = y1 - ctx.f(x2)
        with torch.enable_grad():
            x1, x2 = x1.requires_grad_(), x2.requires_grad_()
            y1 = x1 + ctx.f(x2)
            y = torch.cat((y1, x2 + ctx.g(y1)), dim=1)
        inputs = (x1, x2, *ctx.parameters)
        dx1, dx2, *found = torch.autograd.grad(y, inputs, dy)
        return torch.cat((dx1, dx2), dim=1), None, None, None, *found


@torch.no_grad()
def replace(t):
    t.set_(torch.zeros_like(t))


FREES = {
    "empty": lambda t: t.set_(),
    "empty storage": lambda t: t.untyped_storage().resize_(0),
    "empty data": lambda t: setattr(t, "data", torch.empty(0)),
    "replace": replace,
}


class ReversibleNet(nn.Module):
    def __init__(self, free, calls_module=True):
        super().__init__()
        self.stem, self.head = Block(), Block()
        self.stem.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.head.bn, self.head.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)
        self.parts = nn.ModuleList(Block() for _ in range(4))
        self.free, self.calls_module = free, calls_module

    def run(self, block, x):
        return block(x) if self.calls_module else block.conv(F.relu(block.bn(x)))

    def forward(self, x):
        h = self.stem(x)
        for f, g in zip(self.parts[::2], self.parts[1::2], strict=True):
            parameters = *f.parameters(), *g.parameters()
            functions = partial(self.run, f), partial(self.run, g)
            h = Reversible.apply(h, *functions, self.free, *parameters)
        return self.head(h)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("free", FREES.values(), ids=FREES)
def test_reversible_blocks_that_free_what_they_computed(free, memory):
    for calls_module in (True, False):
        plain = ReversibleNet(free, calls_module)
        converted = pk.convert(copy.deepcopy(plain), memory=memory)
        assert_same_step(plain, converted, torch.randn(2, 4, 6, 6))
        assert len(pk.conversion_report(converted).fused) == (6 if calls_module else 2)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                x = torch.randn(2, 4, 6, 6).double()
                torch.testing.assert_close(converted(x), plain(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("enables_grad", [False, True])
def test_what_a_function_computes_is_plain(enables_grad):
    """A function may pass what its forward computes to code that no region sees."""
    block, seen = Block(), []

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad() if enables_grad else contextlib.nullcontext():
                y = F.relu(block.bn(x.detach()))
            seen.append(type(y))
            return y.detach()

        @staticmethod
        def backward(ctx, dy):
            return dy

    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    for mode in (contextlib.nullcontext(), torch.inference_mode(), torch.no_grad()):
        with mode, pk.fuse():
            triple(Inner.apply(x))
    assert seen == [torch.Tensor] * 3


def test_instance_norms_of_one_image_before_a_function():
    """PyTorch's derivative of one image is wrong for a gradient in channels_last."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.InstanceNorm2d(4, affine=True)
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, k, padding=k // 2) for k in (1, 1, 3))

        def forward(self, x):
            a = F.silu(self.norm(self.convs[0](x)))
            return Same.apply(self.convs[1](a) + self.convs[2](a))

    plain, x = Net(), torch.randn(1, 4, 4, 4)
    converted = pk.convert(copy.deepcopy(plain))
    assert_same_step(plain, converted, x)
    assert pk.conversion_report(converted).fused


def test_functions_of_other_threads_change_nothing():
    block, x = Block(), torch.randn(2, 4, 6, 6, requires_grad=True)
    with pk.fuse():
        h = F.relu(block.bn(x))
        thread = threading.Thread(target=lambda: triple(x.detach().requires_grad_()))
        thread.start()
        thread.join()
        assert type(h) is not torch.Tensor
        y = block.conv(h)
    torch.testing.assert_close(y, block(x))


def test_what_a_backward_computes_again_must_not_be_freed():
    block, x = Block(), torch.randn(2, 4, 6, 6)
    with pk.fuse():
        a = block(x)
        y = triple(torch.cat((a, x), dim=1))
        a.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed before it was computed again"):
        y.sum().backward()


def test_an_input_that_is_replaced_in_inference_mode_is_refused():
    """Such tensors have no version, and no region sees `set_`."""
    block, x = Block(), torch.randn(2, 4, 6, 6)
    with pytest.raises(RuntimeError, match="modified by an inplace"), torch.inference_mode():
        x = x * 1
        with pk.fuse():
            y = block(x) + x
            x.set_(torch.zeros_like(x))
            y.sum()


class InferenceInside(Block):
    def forward(self, x):
        with torch.inference_mode():
            return super().forward(x)


def test_inference_mode_inside_of_a_forward_is_no_custom_function():
    net = pk.convert(InferenceInside())
    net(torch.randn(2, 4, 6, 6))
    assert len(pk.conversion_report(net).fused) == 1


class Failing(torch.autograd.Function):
    forward = staticmethod(lambda ctx, t: t * 2)
    backward = staticmethod(lambda ctx, dy: raises_value_error(dy))


def test_a_backward_that_fails_leaves_no_values_to_the_next_one():
    regions = []

    class FailsInBackward(Block):
        def forward(self, x):
            regions.append(named_activations.regions.entered[-1])
            return triple(super().forward(Failing.apply(x)))

    net = pk.convert(FailsInBackward())
    loss = net(torch.randn(2, 4, 6, 6, requires_grad=True)).sum()
    region = regions.pop()
    seen = []
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward(retain_graph=True)
        (found,) = region.recomputed.values()
        seen.append([weakref.ref(t) for t in found.values()])
    del found
    assert seen[0] and all(reference() is None for reference in seen[0])
    assert all(reference() is not None for reference in seen[1])
