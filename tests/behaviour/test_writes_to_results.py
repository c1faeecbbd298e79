"""What a fused operation returns may be changed in place, as in plain PyTorch."""

import copy
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preact_kernels as pk
from tests.cases import plain_norm_act, plain_norm_act_conv
from tests.convert.random_model_parts import GroupNorm

pytestmark = pytest.mark.backends("cpu")

WRITES = {
    "nothing": lambda h: h,
    "mul_": lambda h: h.mul_(pattern(h) + 0.5),
    "clamp_": lambda h: h.clamp_(-0.4, 0.4),
    "masked_fill_": lambda h: h.masked_fill_(pattern(h) > 0.5, 0.3),
    "slice": lambda h: h[:, 1:].fill_(0.5),
    "dropout that drops nothing": lambda h: F.dropout(h, 0.0, True, True),
    "dropout": lambda h: F.dropout(h, 0.4, True, True),
    "leaky_relu": lambda h: F.leaky_relu(h, 0.2, True),
    "add_": lambda h: h.add_(pattern(h)),
    "view": lambda h: h.transpose(1, 2).mul_(2),
    "detach_": lambda h: h.detach_(),
}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
SIZES = {1: (7,), 2: (4, 5), 3: (3, 2, 4)}
NORMS = {
    "batch": lambda dims: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](4),
    "batch, relu": lambda dims: NORMS["batch"](dims),
    "group": lambda dims: GroupNorm(2, 4),
    "instance": lambda dims: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1](4),
}
LAYOUTS = {
    "1d": (1, False),
    "2d": (2, False),
    "2d, last": (2, True),
    "3d": (3, False),
    "3d, last": (3, True),
}
KINDS = ("norm", "in place", "act", "pool", "conv", "residual")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def pattern(h):
    """Numbers from 0 to 1, which have no gradient."""
    return torch.arange(h.numel(), dtype=h.dtype).mul_(0.37).frac_().view(h.shape)


class Observed(NamedTuple):
    """The outcome of a step."""

    is_view: bool | None  # whether the result that was changed was a view
    error: str
    tensors: list[Tensor | None]


def observed(forward, x, write, is_cloned=False) -> Observed:
    """Runs a step of `forward(x, changed)`, which applies `changed` to a result.

    `changed` writes to its argument, or to a copy if `is_cloned`.
    """
    found: list[bool] = []

    def changed(h):
        found.append(h._is_view())
        h = h.clone() if is_cloned else h
        write(h)
        return h

    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    where, tensors = "forward", []
    try:
        y = forward(x, changed)
        tensors, where = [y], "backward"
        if y.requires_grad:
            (y * pattern(y)).sum().backward()
        tensors.append(x.grad)
        where = ""
    except RuntimeError as error:
        where = f"{where}: {type(error).__name__}"
    return Observed(found[0] if found else None, where, tensors)


def assert_alike(plain, fused, x, write, name):
    """Asserts that a step gives what it gives in plain PyTorch.

    If the plain backward raises, because a write changed what was saved, the fused one raises too,
    or gives what a write to a copy gives.
    """
    expected = observed(plain, x, write)
    found = observed(fused, x, write)
    assert found.is_view == expected.is_view, f"{name}: view"
    if expected.error.startswith("backward"):
        if found.error:
            return
        expected = observed(plain, x, write, is_cloned=True)
    assert found.error == expected.error, name
    for index, (a, b) in enumerate(zip(found.tensors, expected.tensors, strict=True)):
        assert (a is None) == (b is None), (name, index)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=f"{name}, tensor {index}")


class Net(nn.Module):
    """A unit or a part of one, a write, and another unit."""

    def __init__(self, kind, dims, norm, writes_inside=True):
        super().__init__()
        conv = CONVOLUTIONS[dims - 1]
        self.kind, self.pool = kind, POOLS[dims - 1]
        self.activation = F.relu if norm.endswith("relu") else F.silu
        self.norm, self.norm2 = NORMS[norm](dims), NORMS[norm](dims)
        self.conv, self.conv2 = (conv(4, 4, 3, padding=1) for _ in range(2))
        self.writes_inside = writes_inside

    def forward(self, x, write):
        if not self.writes_inside:
            return self.first(x)
        h = write(self.first(self.conv2(x)))
        return self.conv2(self.activation(self.norm2(h)))

    def first(self, x):
        if self.kind == "norm":
            return self.norm(x)
        if self.kind == "in place":
            return self.activation(self.norm(x), inplace=True)
        h = self.activation(self.norm(x))
        if self.kind == "act":
            return h
        if self.kind == "pool":
            return self.pool(h, 2)
        return self.conv(h) if self.kind == "conv" else x + self.conv(h)


def images(dims, channels_last):
    x = torch.randn(2, 4, *SIZES[dims], dtype=torch.float64)
    return x.contiguous(memory_format=FORMATS[dims + 2]) if channels_last else x


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_writes_in_and_behind_a_converted_model(kind, layout, norm, memory, is_inside, backend):
    dims, channels_last = LAYOUTS[layout]
    net = Net(kind, dims, norm, is_inside).double()
    x = images(dims, channels_last)
    if channels_last:
        net.to(memory_format=FORMATS[x.dim()])
    fused = pk.convert(copy.deepcopy(net), memory=memory)

    def step(model, x, changed):
        y = model(x, changed)
        return y if is_inside else changed(y)

    for name, write in WRITES.items():
        assert_alike(partial(step, net), partial(step, fused), x, write, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_group", [False, True], ids=["batch", "group"])
@pytest.mark.parametrize("kind", ["act", "conv", "residual"])
def test_writes_to_results_of_functions(kind, is_group, layout, backend):
    dims, channels_last = LAYOUTS[layout]
    x = images(dims, channels_last)
    options = {"weight": torch.rand(4).double(), "bias": torch.randn(4).double()}
    options |= {"num_groups": 2} if is_group else {"training": True}
    plain, fused = plain_norm_act, pk.group_norm_act if is_group else pk.batch_norm_act
    if kind != "act":
        conv_weight = torch.randn(4, 4, *[3] * dims).double()
        if channels_last:
            conv_weight = conv_weight.contiguous(memory_format=FORMATS[x.dim()])
        options |= {"conv_weight": conv_weight, "padding": 1}
        plain = plain_norm_act_conv
        fused = pk.group_norm_act_conv if is_group else pk.batch_norm_act_conv

    def step(function, x, changed):
        h = x * 1.5
        residual = {"residual": h} if kind == "residual" else {}
        y = function(h, activation="silu", **options, **residual)
        if channels_last and function is plain_norm_act_conv:
            # PyTorch's convolution of volumes in float64 changes the memory format.
            y = y.contiguous(memory_format=FORMATS[x.dim()])
        return changed(y)

    for name, write in WRITES.items():
        assert_alike(partial(step, plain), partial(step, fused), x, write, name)
