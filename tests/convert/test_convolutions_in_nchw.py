"""Convolutions that PyTorch may compute wrongly in NHWC on a CPU run in NCHW.

Values of half precision are not compared: plain PyTorch may compute them wrongly in NCHW, too.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.kernels import layout

pytestmark = pytest.mark.backends("cpu")

# Dtype, shapes of image and weight, stride, padding and groups. In NHWC with PyTorch 2.13, on some
# processor, each had a wrong output or gradient, or did not end.
WRONG_IN_NHWC = [
    (torch.float32, (32, 4, 32, 32), (8, 4, 1, 1), 2, 0, 1),
    (torch.float32, (2, 1, 5, 5), (2, 1, 4, 4), (1, 2), 0, 1),
    (torch.float32, (8, 5, 7, 7, 7), (3, 5, 7, 7, 7), 2, 3, 1),
    (torch.float32, (2, 8, 7, 7, 7), (16, 4, 7, 7, 7), 2, 3, 2),
    (torch.bfloat16, (2, 2, 8, 5), (32, 1, 4, 4), (1, 3), (2, 0), 2),
    (torch.bfloat16, (3, 8, 8, 1), (16, 8, 3, 3), 2, 1, 1),
    (torch.bfloat16, (2, 64, 8, 1), (64, 32, 3, 3), 2, 1, 2),
    (torch.bfloat16, (4, 4, 4, 4, 8), (2, 4, 5, 5, 5), 2, (2, 1, 2), 1),
    (torch.bfloat16, (1, 8, 2, 4, 3), (32, 4, 3, 3, 3), 1, 1, 2),
]


class Formats(TorchDispatchMode):
    """Counts strided and 3-D convolutions, and finds those of channels_last images or weights."""

    def __init__(self):
        super().__init__()
        self.count, self.in_nhwc = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        is_conv = "convolution" in name
        if is_conv and (args[0].dim() == 5 or max(args[3 + ("backward" in name)]) > 1):
            self.count += 1
            tensors = [t for t in args[:3] if isinstance(t, torch.Tensor) and t.dim() > 3]
            self.in_nhwc += [(name, t.shape) for t in tensors if layout.is_channels_last(t)]
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """A norm, an activation and a convolution; perhaps an operation between them."""

    def __init__(self, case, is_fused):
        super().__init__()
        dtype, shape, weight_shape, *self.settings = case
        self.conv = (F.conv2d, F.conv3d)[len(shape) - 4]
        self.norm, self.is_fused = nn.GroupNorm(1, shape[1]), is_fused
        self.weight = nn.Parameter(torch.randn(weight_shape) / weight_shape[1])
        self.to(dtype)

    def forward(self, x):
        stride, padding, groups = self.settings
        h = F.silu(self.norm(x))
        h = h if self.is_fused else h * 0.5
        return self.conv(h, self.weight, None, stride, padding, 1, groups)


def step(net, x):
    x = x.detach().requires_grad_()
    y = net(x)
    y.backward(torch.ones_like(y))
    return [t.double() for t in (y, x.grad, net.weight.grad)]


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("case", WRONG_IN_NHWC, ids=lambda case: f"{str(case[0])[6:]}-{case[1]}")
def test_convolutions_that_may_be_wrong_run_in_nchw(case, is_fused):
    dtype, shape, *_ = case
    net, x = Net(case, is_fused), torch.randn(shape).to(dtype)
    expected = step(copy.deepcopy(net).double(), x.double())
    formats = [torch.contiguous_format]
    if is_fused:  # there, PyTorch's own may be wrong
        formats.append(layout.CHANNELS_LAST[x.dim()])
    for memory_format in formats:
        own = pk.convert(copy.deepcopy(net).to(memory_format=memory_format))
        with Formats() as found:
            results = step(own, x.contiguous(memory_format=memory_format))
        assert not found.in_nhwc
        is_served = is_fused and dtype == torch.float32 and x.dim() == 4
        # Units compute the gradients of input and weight apart.
        assert found.count == 2 + is_fused or is_served  # by a fused kernel, or without a stride
        if dtype == torch.float32:
            for result, value in zip(results, expected, strict=True):
                assert (result - value).norm() <= 1e-5 * value.norm()


@pytest.mark.parametrize("case", WRONG_IN_NHWC[:3], ids=lambda case: str(case[1]))
def test_they_run_again_in_nchw(case):
    class Sine(Net):
        def forward(self, x):
            return torch.sin(super().forward(x))

    net, x = Sine(case, is_fused=False), torch.randn(case[1])
    expected = step(copy.deepcopy(net).double(), x.double())
    own = pk.convert(net, memory="checkpoint")
    with Formats() as found:
        results = step(own, x)
    assert found.count == 3  # forward, again, backward
    assert not found.in_nhwc
    for result, value in zip(results, expected, strict=True):
        assert (result - value).norm() <= 1e-5 * value.norm()


def strided(dtype=torch.float32, channels=32, groups=1, kernel=3):
    return dtype, (2, channels, 9, 9), (32, channels // groups, kernel, kernel), 2, 1, groups


@pytest.mark.parametrize(
    "case",
    [
        strided(),
        strided(channels=4),
        strided(groups=32),
        strided(kernel=1),
        strided(torch.bfloat16),
    ],
    ids=str,
)
def test_other_convolutions_run_in_nhwc(case):
    dtype, shape, *_ = case
    net, x = pk.convert(Net(case, is_fused=False)), torch.randn(shape).to(dtype)
    with Formats() as found:
        step(net, x)
    assert len(found.in_nhwc) >= 2
