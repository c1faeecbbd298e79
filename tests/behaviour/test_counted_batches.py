"""Every forward updates running statistics, except the recomputations of a checkpoint.

The truth is plain PyTorch without checkpoints, which would count a batch again.
"""

import copy
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import preact_kernels as pk
from testbed.published_models import FunctionalBottleneck
from tests.cases import EVERY_MODULE, randomised
from tests.oracle import plain_copy

pytestmark = pytest.mark.backends("cpu")  # what runs a forward is above the backends


class RunsInBackward(torch.autograd.Function):
    """Calls `run(x)`; the backward calls it again and differentiates it, as reversible blocks do.

    `around` calls the function in the backward.
    """

    @staticmethod
    def forward(ctx, x, run, around, *parameters):
        ctx.run, ctx.around, ctx.parameters = run, around, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.around(ctx.run, x)
        if ctx.around is direct:
            dx, *found = torch.autograd.grad(y, (x, *ctx.parameters), dy)
        else:  # a reentrant checkpoint refuses `grad`
            before = [p.grad for p in ctx.parameters]
            for p in ctx.parameters:
                p.grad = None
            y.backward(dy)
            dx, found = x.grad, [p.grad for p in ctx.parameters]
            for p, gradient in zip(ctx.parameters, before, strict=True):
                p.grad = gradient
        return dx, None, None, *found


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
    """Runs a module by `RunsInBackward`.

    Args:
        module: the module.
        outside: calls the autograd function.
        inside: calls the module in its backward.
    """

    def __init__(self, module, outside=direct, inside=direct):
        super().__init__()
        self.module, self.outside, self.inside = module, outside, inside

    def forward(self, x):
        def call(t):
            return RunsInBackward.apply(t, self.module, self.inside, *self.module.parameters())

        return self.outside(call, x)


class Function(nn.Module):
    """`pk.bn_relu`, or the plain expression."""

    def __init__(self, is_plain=False):
        super().__init__()
        self.bn, self.is_plain = randomised(nn.BatchNorm2d(10)), is_plain

    def forward(self, x):
        bn = self.bn
        running = bn.running_mean, bn.running_var
        if self.is_plain:
            return F.relu(F.batch_norm(x, *running, bn.weight, bn.bias, self.training))
        return pk.bn_relu(x, bn.weight, bn.bias, *running, training=self.training)


MODULES = {
    "function": Function,
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


def plain(module):
    return Function(is_plain=True).double() if isinstance(module, Function) else plain_copy(module)


def pair(name):
    """Returns a module and the plain one."""
    module = MODULES[name]().double()
    other = plain(module)
    other.load_state_dict(module.state_dict())
    return module, other


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


def test_a_converted_model_runs_such_a_function(backend):
    plain = Own(nn.Sequential(nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 10, 3))).double()
    x = torch.randn(3, 10, 7, 6, dtype=torch.float64)
    converted = pk.convert(Own(copy.deepcopy(plain.module), outside=REENTRANT))
    found = results(converted, x)
    assert pk.conversion_report(converted).fused
    assert_equal(found, results(plain, x))


@pytest.mark.not_under_sanitizer
def test_a_synchronised_batch_norm_counts_likewise(tmp_path, backend):
    layers = nn.SyncBatchNorm(10), nn.ReLU(), nn.Conv2d(10, 10, 3)
    other = nn.Sequential(nn.BatchNorm2d(10), *layers[1:]).double()
    x = torch.randn(3, 10, 7, 6, dtype=torch.float64)
    dist.init_process_group("gloo", f"file://{tmp_path}/address", rank=0, world_size=1)
    try:
        for wrapping in ("alone", "in_a_checkpoint"):
            module = nn.Sequential(*copy.deepcopy(layers)).double()
            module.load_state_dict(other.state_dict())
            found = results(Own(pk.convert(module), **WRAPPINGS[wrapping]), x)
            assert pk.conversion_report(module).fused
            assert_equal(found, results(Own(copy.deepcopy(other)), x))
    finally:
        dist.destroy_process_group()
