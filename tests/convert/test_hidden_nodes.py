"""Units in memory modes "rebuild" and "checkpoint": hooks see only what they do not keep."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import preact_kernels as pk
from preact_kernels.conversion import execution, recomputation
from preact_kernels.conversion.policy import POLICIES
from tests.convert.test_memory_modes import MODES, Alive, C, Net, counted_backward, images
from tests.convert.test_recomputation import assert_equal

pytestmark = pytest.mark.backends("cpu")


def units(net, x):
    for i in range(4):
        x = net.unit(i, x)
    return x


def post_activation(net, x):
    for i in range(4):
        x = F.relu(net.norms[i](net.convs[i](x)) + x)
    return x


def keep_products(monkeypatch, memory="rebuild"):
    """Lets convolutions run once."""
    changed = POLICIES[memory]._replace(work=6.0, widening=6.0)
    monkeypatch.setitem(POLICIES, memory, changed)


def converted(forward, memory="rebuild"):
    torch.manual_seed(0)
    net = Net(forward).to(memory_format=torch.channels_last)
    return pk.convert(net, memory=memory)


def gradients(net):
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("forward", [units, post_activation])
def test_hooks_see_no_vectors_of_units(monkeypatch, forward):
    seen = []
    unpacked = recomputation._unpacked
    monkeypatch.setattr(recomputation, "_unpacked", lambda s: (seen.append(s), unpacked(s))[1])
    net = converted(forward, "checkpoint")
    net(images(torch.randn, torch.channels_last)).sum().backward()
    assert any(isinstance(s, recomputation._Saved) for s in seen)
    # The convolutions alone save an image and a parameter by hooks.
    vectors = [s for s in seen if isinstance(s, recomputation._Unchanged) and s.tensor.dim() == 1]
    assert not vectors


@pytest.mark.parametrize("forward", [units, post_activation])
def test_what_is_kept_is_freed_in_the_backward(monkeypatch, forward):
    keep_products(monkeypatch)
    net, x = converted(forward), images(torch.randn, torch.channels_last).detach()
    with Alive():
        net(x).sum().backward()  # the first call leaves frames to the garbage collector
    during = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: during.append(alive.bytes()))
    gc.disable()
    try:
        with Alive(x, *net.parameters(), *net.buffers()) as alive:
            loss = net(x).sum()
        kept = alive.bytes()
        loss.backward()
        assert kept > 4 * x.nbytes
        assert alive.bytes() <= loss.nbytes
        assert during[len(during) // 2] < 0.8 * kept, during
    finally:
        gc.enable()


def test_kept_inputs_of_units_are_found_again(monkeypatch):
    """Nothing but the node of the unit, whose result is not computed again, holds the value."""

    def forward(net, x):
        y = net.unit(0, x).cumsum(2)
        return y, net.convs[1](F.hardswish(x * 2))

    keep_products(monkeypatch)
    net, x = converted(forward), images(torch.randn, torch.channels_last)
    assert pk.saved_bytes(net, x) < 2.5 * x.nbytes
    with Alive(x, *net.parameters(), *net.buffers()) as alive:
        ys = net(x)
    assert alive.bytes() - sum(y.nbytes for y in ys) < 2.5 * x.nbytes


def test_an_exception_frees_the_graph(monkeypatch):
    net, x = converted(units), images(torch.randn, torch.channels_last)
    calls = []

    def failing(*arguments):
        calls.append(arguments[0])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return work_of(*arguments)

    work_of = execution.work_of
    monkeypatch.setattr(execution, "work_of", failing)
    with Alive(x, *net.parameters(), *net.buffers()) as alive, pytest.raises(KeyboardInterrupt):
        net(x)
    calls.clear()
    monkeypatch.undo()
    for _ in range(3):
        gc.collect()
    assert alive.bytes() == 0


@pytest.mark.parametrize("memory", MODES)
def test_values_that_only_others_read_may_change(memory):
    def forward(net, x):
        p = net.convs[0](F.relu(net.norms[0](x)))
        x = net.convs[1](x)
        for _ in range(4):
            x = net.convs[2](F.hardswish(x + p))
        return x, p

    found = []
    torch.manual_seed(0)
    plain = Net(forward).double()
    x = images(torch.randn).detach().double()
    for net in (plain, pk.convert(copy.deepcopy(plain), memory=memory)):
        y, p = net(x)
        with torch.no_grad():
            p.add_(1)
        y.sin().sum().backward()
        found.append(gradients(net))
    torch.testing.assert_close(*found)


def test_computed_weights_are_no_distance():
    """The weights have more bytes than four images."""
    net = nn.Sequential()
    for _ in range(8):
        conv = parametrizations.weight_norm(nn.Conv2d(64, 64, 3, padding=1))
        net.extend([nn.BatchNorm2d(64), nn.ReLU(), conv])
    x = torch.randn(2, 64, 8, 8).requires_grad_()
    store, again = (pk.convert(copy.deepcopy(net), memory=m) for m in ("store", "checkpoint"))
    assert pk.saved_bytes(store, x) - pk.saved_bytes(again, x) >= 6 * x.nbytes


def test_images_without_a_batch_axis():
    def forward(net, x):
        for conv in net.convs:
            x = conv(F.hardswish(x))
        return x

    net = pk.convert(Net(forward), memory="rebuild")
    x = torch.randn(1, C, 32, 32)
    assert pk.saved_bytes(net, x[0]) <= pk.saved_bytes(net, x)


class Added(nn.Module):
    """A learned image that PyTorch does not save."""

    def __init__(self, forward):
        super().__init__()
        self.own = forward
        self.image, self.norm = nn.Parameter(torch.randn(2, C, 16, 16)), nn.BatchNorm2d(C)
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x):
        return self.own(self, x)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: net.conv(F.hardswish(net.norm(x) + net.image)),
        lambda net, x: net.conv(F.relu(net.norm(x) + net.image)),
    ],
)
def test_a_parameter_that_is_not_saved_may_change(memory, forward):
    found = []
    plain = Added(forward).double()
    x = torch.randn(2, C, 16, 16).double()
    for net in (plain, pk.convert(copy.deepcopy(plain), memory=memory)):
        y = net(x)
        with torch.no_grad():
            net.image.add_(1)
        y.sin().sum().backward()
        found.append(gradients(net))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("memory", MODES)
def test_weights_are_not_copied(memory):
    """Weights of 1x1 convolutions are as small as vectors per image."""

    def forward(net, x):
        for norm, conv in zip(net.wide_norms, net.square, strict=True):
            x = x + F.silu(norm(conv(x)))
        return x

    def functional(net, x):
        for conv in net.square:
            x = F.silu(F.conv2d(F.silu(x), conv.weight) * 2)
        return x

    for own in (forward, functional):
        net = Net(own)
        net.stem = nn.Conv2d(C, 4 * C, 1)
        net.square = nn.ModuleList(nn.Conv2d(4 * C, 4 * C, 1) for _ in range(4))
        pk.convert(net, memory=memory)
        x = torch.randn(2, C, 4, 4)
        kept = pk.saved_bytes(net, x)
        with Alive(x, *net.parameters(), *net.buffers()) as alive:
            y = net(x)
        assert alive.bytes() <= kept + y.nbytes + 4096


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("forward", [units, post_activation])
def test_statistics_of_the_first_forward(memory, forward):
    """A training forward before the backward of an evaluation forward changes nothing."""
    x = images(torch.randn, torch.channels_last)
    found = []
    for is_between in (False, True):
        net = converted(forward, memory).eval()
        y = net(x)
        if is_between:
            net.train()(x * 3 + 1)
        y.sin().sum().backward()
        found.append(gradients(net))
    assert_equal(*found)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("forward", [units, post_activation])
def test_a_backward_outside_of_autocast(memory, forward):
    x = images(torch.randn, torch.channels_last)
    found = []
    for mode in ("store", memory):
        net = converted(forward, mode)
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        y.float().sin().sum().backward()
        found.append(gradients(net))
    assert_equal(*found)


def test_a_cheap_value_with_late_readers_is_kept(monkeypatch):
    """The first unit saves the pooled image, and every concatenation reads it again."""

    def forward(net, x):
        pooled = F.avg_pool2d(x, 2)
        h = net.unit(0, pooled)
        for i in range(8):
            h = torch.cat([pooled, pooled, pooled, h], 1)
            h = net.narrow[i](F.relu(net.wide_norms[i](h))).cumsum(2)
        return h

    keep_products(monkeypatch)
    assert counted_backward(forward, "rebuild", layers=8)["avg_pool2d"] <= 3
