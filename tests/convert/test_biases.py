"""On a GPU, a convolution's bias has no kernel: the next norm or the residual addition adds it.

Without a GPU, the kernels for GPUs run in Triton's interpreter and on the host.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.ops import dispatch
from tests.oracle import assert_within_budget, stacked

pytestmark = [
    pytest.mark.backends("triton", "cuda"),
    pytest.mark.usefixtures("backend"),
]


class AddedBiases(TorchDispatchMode):
    """Counts convolutions that add a bias."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name() == "aten::convolution" and args[2] is not None
        return function(*args, **kwargs or {})


KEPT = []


class Unit(nn.Module):
    """Group norm, SiLU and a convolution with a bias."""

    def __init__(self, channels=8, groups=2, **options):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, **options)
        with torch.no_grad():
            self.conv.bias.normal_(std=3)
            self.norm.weight.normal_()

    def forward(self, x):
        return self.conv(F.silu(self.norm(x)))


class Block(nn.Module):
    """A residual block of units: the first bias goes to a norm, the last to the addition."""

    def __init__(self, read=lambda h: None, **options):
        super().__init__()
        self.first, self.second, self.last = Unit(**options), Unit(groups=8), Unit(groups=1)
        self.read = read

    def forward(self, x):
        h = self.first(x)
        self.read(h)
        return x + self.last(self.second(h))


def results(block, x, power=1):
    x = x.detach().requires_grad_()
    y = block(x)
    inputs = [x, *block.parameters()]
    dx, *rest = torch.autograd.grad((y**2).mean(), inputs, create_graph=power > 1)
    if power > 1:
        dx, *rest = torch.autograd.grad((dx**2).mean() * 100, inputs)
    names = ["x", *(name for name, _ in block.named_parameters())]
    return {"y": y, **dict(zip(names, (dx, *rest), strict=True))}


def check(block, dtype=torch.float32, power=1, **options):
    """Compares a converted block with float64; returns the biases that convolutions add."""
    block = block.to(dtype)
    own, wide = pk.convert(copy.deepcopy(block), **options), copy.deepcopy(block).double()
    found, truth, eager, counts = [], [], [], set()
    for _ in range(4):
        x = torch.randn(2, 8, 6, 5).to(dtype).contiguous(memory_format=torch.channels_last)
        with AddedBiases() as added:
            found.append(results(own, x, power))
        counts.add(added.count)
        truth.append(results(wide, x.double(), power))
        eager.append(results(block, x, power))
    found, truth, eager = map(stacked, (found, truth, eager))
    errors = {n: float((t.double() - truth[n]).norm()) for n, t in eager.items()}
    assert_within_budget({n: t.detach() for n, t in found.items()}, truth, errors)
    (count,) = counts
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_no_convolution_adds_a_bias(dtype, memory):
    assert check(Block(), dtype, memory=memory) == 0


class BetweenNorms(nn.Module):
    """A convolution with a bias before a norm that reads or updates running statistics."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm = Unit(), norm
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.conv(F.silu(self.norm(self.first(x))))


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)],
    ids=lambda norm: type(norm).__name__,
)
def test_running_statistics_contain_the_bias(norm):
    plain = BetweenNorms(copy.deepcopy(norm))
    own, x = pk.convert(copy.deepcopy(plain)), torch.randn(4, 8, 6, 5)
    torch.testing.assert_close(own(x), plain(x))
    for (name, found), expected in zip(own.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    torch.testing.assert_close(own.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(
    "options",
    [{"padding": "same", "kernel_size": 2}, {"padding": (1, 1), "stride": 2}, {"groups": 2}],
    ids=str,
)
def test_other_convolutions(options):
    options = {"kernel_size": 3, "padding": 1} | options

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(2))
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, **options) for _ in range(2))

        def forward(self, x):
            for norm, conv in zip(self.norms, self.convs, strict=True):
                x = conv(F.silu(norm(x)))
            return x

    check(Net())


def test_a_result_that_a_norm_and_an_addition_read_has_its_bias():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Unit(), Unit(groups=1)

        def forward(self, x):
            h = self.first(x)
            return h + self.last(h)

    assert check(Net()) == 1


def test_an_empty_batch():
    block, x = Block(), torch.randn(0, 8, 6, 5)
    assert pk.convert(copy.deepcopy(block))(x).shape == x.shape


def test_gradients_of_gradients_know_the_bias():
    check(Block(), power=2)


@pytest.mark.parametrize(
    "read",
    [torch.Tensor.sum, torch.Tensor.numpy, torch.relu, KEPT.append],
    ids=["sum", "numpy", "relu", "kept"],
)
def test_a_result_that_something_else_reads_has_its_bias(read):
    KEPT.clear()
    block = Block(lambda h: read(h.detach() if read is torch.Tensor.numpy else h))
    assert check(block) == 1


def test_a_later_attempt_after_an_error_adds_the_bias(monkeypatch):
    block = Block()
    x = torch.randn(2, 8, 6, 5)
    kernels, errors = dispatch.kernels_for(x), iter([MemoryError("no memory")])
    forward = kernels.norm_act_forward

    def fails_once(x, norm, *rest):
        if norm.mean.unique().numel() > 4:  # the second norm, by its groups
            for error in errors:
                raise error
        return forward(x, norm, *rest)

    expected = block.last(block.first(x))
    monkeypatch.setattr(kernels, "norm_act_forward", fails_once)
    with pk.fuse():
        h = block.last(block.first(x))
        with pytest.raises(MemoryError):
            h.sum()
        h = h * 1
    assert next(errors, None) is None
    torch.testing.assert_close(h, expected)
