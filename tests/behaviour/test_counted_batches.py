"""Every forward updates running statistics, except the recomputations of a checkpoint.

The truth is plain PyTorch without checkpoints, which would count a batch again.
"""

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import preact_kernels as pk
from testbed.published_models import FunctionalBottleneck
from tests.cases import EVERY_MODULE
from tests.oracle import plain_copy

pytestmark = pytest.mark.backends("cpu")  # what runs a forward is above the backends


class RunsInBackward(torch.autograd.Function):
    """Calls `run(x)`; the backward calls `around(run, x)` and differentiates it.

    Reversible blocks do so.
    """

    @staticmethod
    def forward(ctx, x, run, around):
        ctx.run, ctx.around = run, around
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.around(ctx.run, x)
        y.backward(dy)  # a reentrant checkpoint refuses `torch.autograd.grad`
        return x.grad, None, None


def direct(function, x):
    return function(x)


REENTRANT = partial(checkpoint, use_reentrant=True)
NOT_REENTRANT = partial(checkpoint, use_reentrant=False)


def nested(function, x):
    return NOT_REENTRANT(partial(REENTRANT, partial(NOT_REENTRANT, function)), x)


def without_early_stop(function, x):
    with set_checkpoint_early_stop(False):
        return NOT_REENTRANT(function, x)


class Own(nn.Module):
    """Runs a module by `RunsInBackward`, which `outside` calls; `inside` is for the backward."""

    def __init__(self, module, outside=direct, inside=direct):
        super().__init__()
        self.module, self.outside, self.inside = module, outside, inside

    def forward(self, x):
        return self.outside(lambda t: RunsInBackward.apply(t, self.module, self.inside), x)


MODULES = {
    **{n: EVERY_MODULE[n] for n in ("bn_relu_conv", "batch_norm_act_conv", "rebuilt_stage")},
    "converted": lambda: pk.convert(FunctionalBottleneck(10, 4)),
    # No activation follows: it runs plain.
    "converted_norm": lambda: pk.convert(nn.Sequential(nn.BatchNorm2d(10), nn.SELU())),
    "converted_instance_norm": lambda: pk.convert(
        nn.Sequential(
            nn.InstanceNorm2d(10, affine=True, track_running_stats=True),
            nn.ReLU(),
            nn.Conv2d(10, 10, 3),
        )
    ),
}
WRAPPINGS = {
    "alone": {},
    "in_a_checkpoint": {"outside": NOT_REENTRANT},
    "in_nested_checkpoints": {"outside": nested},
    "around_a_checkpoint": {"inside": NOT_REENTRANT},
    "around_a_reentrant_checkpoint": {"inside": REENTRANT},
    "between_checkpoints": {"outside": REENTRANT, "inside": without_early_stop},
}


def results(module, x, backwards=1):
    x = x.clone().requires_grad_()
    y = module(x)
    for index in range(backwards):
        y.square().sum().backward(retain_graph=index < backwards - 1)
    named = {f"d{n}": p.grad for n, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **named, **dict(module.named_buffers())}


def pair(name):
    """Returns a module and the plain one."""
    module = MODULES[name]().double()
    return module, plain_copy(module)


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.covering(1)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", MODULES)
def test_a_forward_in_a_backward_counts_and_a_recomputation_does_not(name, wrapping, backend):
    module, other = pair(name)
    x = torch.randn(3, 10, 7, 6, dtype=torch.float64)
    found = results(Own(module, **WRAPPINGS[wrapping]), x)
    assert_equal(found, results(Own(other), x))


def test_each_backward_counts(backend):
    module, other = pair("converted")
    x = torch.randn(3, 10, 7, 6, dtype=torch.float64)
    found = results(Own(module, outside=NOT_REENTRANT), x, backwards=2)
    assert_equal(found, results(Own(other), x, backwards=2))
    assert {int(t) for n, t in found.items() if n.endswith("num_batches_tracked")} == {3}


def test_threads_know_their_own_recomputations(backend):
    """Another thread runs a forward while this one recomputes."""
    module, other = pair("converted")
    beside, beside_plain = copy.deepcopy(module), copy.deepcopy(other)
    x = torch.randn(3, 10, 7, 6, dtype=torch.float64)

    def starts_a_thread(t):
        thread = threading.Thread(target=beside, args=(t.detach(),))
        thread.start()
        thread.join()
        return module(t)

    y = NOT_REENTRANT(starts_a_thread, x.clone().requires_grad_())
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    other(x)
    for _ in range(2):
        beside_plain(x)
    assert_equal(dict(module.named_buffers()), dict(other.named_buffers()))
    assert_equal(dict(beside.named_buffers()), dict(beside_plain.named_buffers()))
