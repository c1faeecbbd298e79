"""On a CPU, units run convolutions of single small volumes in oneDNN; PyTorch's own are slow."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from tests.oracle import check

pytestmark = pytest.mark.backends("cpu")

# Shapes of image and weight, stride, padding and dilation.
SERVED = [
    ((1, 16, 9, 10, 11), (8, 16, 3, 3, 3), 1, 1, 1),
    ((1, 24, 12, 13, 14), (32, 24, 3, 3, 3), 2, 1, 1),
    ((1, 24, 12, 14, 17), (5, 24, 3, 1, 2), (1, 2, 1), (2, 0, 1), (2, 1, 1)),
]
WITHOUT_ONEDNN = [
    ((1, 16, 3, 3, 3), (8, 16, 3, 3, 3), 1, 1, 1),  # few products
    ((1, 96, 4, 4, 4), (192, 96, 3, 3, 3), 2, 1, 1),  # more weights than oneDNN is fast for
    ((1, 64, 12, 12, 12), (64, 64, 1, 1, 1), 1, 0, 1),
    ((1, 8, 9, 14, 14), (8, 8, 1, 5, 5), 1, (0, 2, 2), 1),  # there PyTorch runs oneDNN
]


class Unit(nn.Module):
    def __init__(self, case):
        super().__init__()
        _, (k, c, *kernel), *geometry = case
        self.norm = nn.BatchNorm3d(c)
        self.conv = nn.Conv3d(c, k, kernel, *geometry)

    def forward(self, x):
        return self.conv(torch.relu(self.norm(x)))


def step(net, x):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = net(x)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape))
    return y.detach(), x.grad


class Convolutions(TorchDispatchMode):
    """Records whether each convolution and its gradients are sent to oneDNN."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in func.name():
            self.found.append("mkldnn" in func.name() or args[0].layout == torch._mkldnn)
        return func(*args, **(kwargs or {}))


def chosen(net, x):
    """The results of a step, and whether its convolutions were sent to oneDNN."""
    with Convolutions() as convolutions:
        results = step(net, x)
    assert len(convolutions.found) == 3
    assert len(set(convolutions.found)) == 1
    return results, convolutions.found[0]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", SERVED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_values_and_gradients(case, channels_last):
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    net = Unit(case).to(memory_format=memory_format)
    inputs = [(torch.randn(case[0]) + 1).to(memory_format=memory_format) for _ in range(3)]
    own = pk.convert(copy.deepcopy(net))
    check(own, net, [{"x": x} for x in inputs])
    found, is_chosen = chosen(own, inputs[0])
    assert is_chosen and "1 of 1" in str(pk.conversion_report(own))
    assert [t.stride() for t in found] == [t.stride() for t in step(net, inputs[0])]


@pytest.mark.parametrize("case", WITHOUT_ONEDNN, ids=lambda case: f"{case[0]}-{case[1]}")
def test_other_volumes_run_as_in_pytorch(case):
    net, x = pk.convert(Unit(case)), torch.randn(case[0])
    assert not chosen(net, x)[1]


def test_they_run_as_in_pytorch_if_onednn_is_disabled():
    net, x = pk.convert(Unit(SERVED[0])), torch.randn(SERVED[0][0])
    assert chosen(net, x)[1]
    with torch.backends.mkldnn.flags(enabled=False):
        assert not chosen(net, x)[1]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert net(x).shape == (1, 8, 9, 10, 11)
    assert not chosen(net.double(), x.double())[1]
