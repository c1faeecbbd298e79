"""Memory modes give plain PyTorch's gradients if tensors that plain PyTorch saves nowhere change.

`source` returns a tensor that nothing saves and that is a quarter of the bytes of what is computed
from it, so the memory modes keep it in place of that.
"""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

import preact_kernels as pk

pytestmark = pytest.mark.backends("cpu")


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.own, self.norm = forward, nn.BatchNorm2d(4)
        self.register_buffer("center", torch.zeros(1, 4, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.wide = nn.Conv2d(4, 16, 1)

    def forward(self, x):
        return self.own(self, x)


def source(net, x):
    return torch.cumsum(net.norm(x), 1)


def up(y):
    return F.interpolate(y, scale_factor=2)


def after(net, x):
    y = source(net, x)
    s = torch.sigmoid(up(y))
    y.mul_(2)
    return torch.sin(s)


def before_it_is_saved(net, x):
    y = source(net, x)
    z = up(y)
    y.mul_(2)
    return torch.sin(torch.sigmoid(z))


def the_result(net, x):
    z = up(source(net, x))
    z.mul_(2)
    return torch.sin(z)


def without_gradients(net, x):
    y = source(net, x)
    s = torch.sigmoid(up(y))
    with torch.no_grad():
        y.clamp_(-0.1, 0.1)
    return torch.sin(s)


def through_data(net, x):
    y = source(net, x)
    y.add_(1)
    s = torch.sigmoid(up(y))
    y.data.mul_(2)
    return torch.sin(s)


def through_numpy(net, x):
    y = source(net, x)
    array = y.detach().numpy()
    s = torch.sigmoid(up(y))
    array *= 2
    return torch.sin(s)


def through_a_part(net, x):
    y = source(net, x)
    s = torch.sigmoid(up(y))
    y.view(2, 4, 64)[:, :2].add_(1)
    return torch.sin(s)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        y.mul_(2)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def in_a_function(net, x):
    y = source(net, x)
    s = torch.sigmoid(up(y))
    Doubled.apply(y)
    return torch.sin(s)


def a_list_of_padding(net, x):
    sizes = [8, 8, 8, 8]
    s = torch.sigmoid(F.pad(source(net, x), sizes))
    sizes[:] = [9, 7, 7, 9]
    return torch.sin(s)


def a_list_of_indices(net, x):
    indices = [1, 0, 2, 3] * 2
    s = torch.sigmoid(source(net, x)[:, indices])
    indices.reverse()
    return torch.sin(s)


def an_array_of_indices(net, x):
    indices = np.array([1, 0, 2, 3] * 2)
    s = torch.sigmoid(source(net, x)[:, indices])
    indices[:] = indices[::-1].copy()
    return torch.sin(s)


def the_end_of_a_slice(net, x):
    begin = torch.tensor(0)
    s = torch.sigmoid(source(net, x)[:, [0, 1, 2, 3] * 3, begin : begin + 6])
    begin += 1
    return torch.sin(s)


def a_list_of_tensors(net, x):
    t = torch.sin(source(net, x))
    pieces = [t, torch.sin(t)]
    s = torch.sigmoid(torch.cat(pieces, 1))
    pieces.reverse()
    return torch.sin(s)


def a_buffer(net, x):
    s = torch.sigmoid(up(source(net, x)) - net.center)
    net.center.mul_(0.9).add_(s.detach().mean((0, 2, 3), keepdim=True))
    return torch.sin(s)


def a_parameter(net, x):
    s = torch.sigmoid(up(source(net, x)) + net.shift)
    with torch.no_grad():
        net.shift.add_(1)
    return torch.sin(s)


def a_bias(net, x):
    s = torch.sin(net.wide(F.relu(net.norm(x))))
    with torch.no_grad():
        net.wide.bias.add_(1)
    return s


FORWARDS = (
    *(after, before_it_is_saved, the_result, without_gradients, through_data, through_numpy),
    *(through_a_part, in_a_function, a_list_of_padding, a_list_of_indices, an_array_of_indices),
    *(the_end_of_a_slice, a_list_of_tensors, a_buffer, a_parameter, a_bias),
)


def gradient(net, x, hooks, change=None):
    x = x.clone().requires_grad_()
    with hooks():
        y = net(x)
    if change is not None:
        y, changed = y
        change(changed)
    y.square().sum().backward()
    return x.grad


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, save_on_cpu])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_changes_in_the_forward(forward, hooks):
    net, x = Net(forward).double(), torch.randn(2, 4, 8, 8).double()
    expected = gradient(copy.deepcopy(net), x, hooks)
    for memory in ("rebuild", "checkpoint"):
        own = pk.convert(copy.deepcopy(net), memory=memory)
        torch.testing.assert_close(gradient(own, x, hooks), expected)


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, save_on_cpu])
@pytest.mark.parametrize("change", [lambda y: y.mul_(2), lambda y: y.data.mul_(2)])
def test_changes_of_an_output(change, hooks):
    def forward(net, x):
        y = source(net, x)
        return torch.sin(torch.sigmoid(up(y))), y

    net, x = Net(forward).double(), torch.randn(2, 4, 8, 8).double()
    expected = gradient(copy.deepcopy(net), x, hooks, change)
    for memory in ("rebuild", "checkpoint"):
        own = pk.convert(copy.deepcopy(net), memory=memory)
        torch.testing.assert_close(gradient(own, x, hooks, change), expected)
