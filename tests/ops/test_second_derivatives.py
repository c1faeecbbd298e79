"""Second derivatives equal finite differences, and gradients do not depend on strides.

`test_double_backward.py` compares second derivatives with those of plain PyTorch.
"""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.kernels.reference.activations import activate
from preact_kernels.ops.activation import activation_of
from tests.cases import random_block
from tests.oracle import plain_copy

pytestmark = pytest.mark.backends("cpu")

ACTIVATIONS = (
    *("relu", "leaky_relu", "identity", "relu6", "silu", "gelu", "gelu_tanh", "elu", "hardswish"),
    *("mish", "softplus", "sigmoid", "tanh"),
)
KINKS = torch.tensor([-3.0, 0.0, 3.0, 6.0])  # of all of these
SIZES = {1: (5,), 2: (2, 3), 3: (2, 1, 3)}
CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = {"1d": (1, False)}
LAYOUTS |= {f"{d}d, {n}": (d, n == "last") for d in (2, 3) for n in ("first", "last")}
NORMS = ("batch", "batch, eval", "group", "instance")


def running(x):
    """Running statistics."""
    numbers = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
    return numbers * 0.1, numbers * 0.5


def plain(norm, activation, x, weight, bias, scale=None, shift=None, **conv):
    """A unit in PyTorch's operators, which `pk.fuse` runs fused."""
    if norm == "group":
        h = F.group_norm(x, 2, weight, bias)
    elif norm == "instance":
        h = F.instance_norm(x, None, None, weight, bias)
    elif norm == "batch":
        h = F.batch_norm(x, None, None, weight, bias, True)
    else:
        h = F.batch_norm(x, *running(x), weight, bias)
    if scale is not None:
        ones = [1] * (x.dim() - 2)
        h = h * (1 + scale.view(*scale.shape, *ones)) + shift.view(*shift.shape, *ones)
    h = ACTIVATED.get(activation, partial(activate, activation=activation_of(activation)))(h)
    if not conv:
        return h
    h = CONVOLUTIONS[x.dim()](h, conv["conv_weight"], conv["conv_bias"], padding=1)
    return h + conv["residual"] if "residual" in conv else h


# As programs write them: `activate` computes these in other operators.
ACTIVATED = {"leaky_relu": F.leaky_relu, "identity": lambda x: x, "softplus": F.softplus}


def fused(*arguments, **inputs):
    with pk.fuse():
        return plain(*arguments, **inputs)


def public(norm, activation, x, **inputs):
    """The same by the public functions."""
    if "conv_weight" in inputs:
        inputs["padding"] = 1
    is_unit = "conv_weight" in inputs
    if norm == "group":
        run = pk.group_norm_act_conv if is_unit else pk.group_norm_act
        return run(x, 2, activation=activation, **inputs)
    inputs |= {"training": norm == "batch"}
    if norm != "batch":
        inputs |= dict(zip(("running_mean", "running_var"), running(x), strict=True))
    run = pk.batch_norm_act_conv if is_unit else pk.batch_norm_act
    return run(x, activation=activation, **inputs)


def in_format(t, channels_last):
    return t.contiguous(memory_format=FORMATS[t.dim()]) if channels_last else t


def unit_inputs(kind, norm, shape, channels_last=False, has_rows=False):
    """Inputs for which the activation is far from kinks."""
    n, c, *size = shape

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64)

    while True:
        inputs = {"x": in_format(draw(*shape), channels_last), "weight": draw(c), "bias": draw(c)}
        if has_rows:
            inputs |= {"scale": draw(n, c), "shift": draw(n, c)}
        if (plain(norm, "identity", **inputs)[..., None] - KINKS).abs().min() > 1e-3:
            break
    if kind != "act":
        conv_weight = in_format(draw(c, c, *[3] * len(size)), channels_last)
        inputs |= {"conv_weight": conv_weight, "conv_bias": draw(c)}
    if kind == "residual":
        inputs["residual"] = in_format(draw(*shape), channels_last)
    return inputs


def assert_second_derivatives(norm, activation, inputs):
    tensors = [t.requires_grad_() for t in inputs.values()]
    for function in (fused,) if norm == "instance" else (fused, public):

        def run(*tensors, function=function):
            return function(norm, activation, **dict(zip(inputs, tensors, strict=True)))

        assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


@pytest.mark.covering(2)
@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["act", "conv", "residual"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", NORMS)
def test_second_derivatives(norm, layout, kind, batch, has_rows, backend):
    dims, channels_last = LAYOUTS[layout]
    shape = batch, 4, *SIZES[dims]
    inputs = unit_inputs(kind, norm, shape, channels_last, has_rows)
    assert_second_derivatives(norm, "silu", inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_of_every_activation(activation, backend):
    for batch, kind in itertools.product((1, 2), ("act", "conv")):
        inputs = unit_inputs(kind, "batch", (batch, 3, 2, 3), batch == 1)
        assert_second_derivatives("batch", activation, inputs)


class WithStrides(torch.autograd.Function):
    """Returns its input; the gradient gets other strides."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.change(dy), None


def strided(order, odd=None):
    """Returns a function that stores a tensor in another order of axes.

    Args:
        order: takes the dimensions; returns the axes from the outermost one.
        odd: stride of all axes of size 1.
    """

    def change(t):
        axes = tuple(order(t.dim()))
        dense = t.detach().permute(axes).contiguous()
        strides = [0] * t.dim()
        for axis, stride in zip(axes, dense.stride(), strict=True):
            strides[axis] = odd if odd is not None and t.shape[axis] == 1 else stride
        return dense.as_strided(t.shape, strides)

    return change


def last(dims):
    return 0, *range(2, dims), 1


STRIDES = {
    "first": strided(range),
    "last": strided(last),
    "first, odd": strided(range, 1),
    "last, odd": strided(last, 1),
    "last, large": strided(last, 1000),
    "transposed": strided(lambda dims: range(dims - 1, -1, -1)),
    "slice": lambda t: F.pad(t.detach(), (1, 2))[..., 1:-2],
}
SHAPES = ((1, 4, 3, 5), (2, 1, 3, 5), (1, 4, 1, 5), (1, 4, 3, 1), (2, 4, 1, 3), (1, 4, 6))
SHAPES += ((1, 4, 2, 3, 2), (1, 4, 1, 3, 1), (2, 1, 2, 3, 2))


@pytest.mark.covering(2)
@pytest.mark.parametrize("x_strides", STRIDES)
@pytest.mark.parametrize("kind", ["act", "residual"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_and_second_gradients_of_any_strides(shape, norm, kind, x_strides, backend):
    if norm == "group" and shape[1] == 1:
        shape = (shape[0], 2, *shape[2:])
    inputs = unit_inputs(kind, norm, shape)

    def gradients(function, x_change, dy_change, second):
        own = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
        own["x"] = x_change(own["x"]).requires_grad_()
        y = WithStrides.apply(function(norm, "silu", **own), dy_change)
        dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).sin().view(y.shape)
        found = torch.autograd.grad(y, list(own.values()), dy, create_graph=second)
        if second:
            sum(g.square().sum() for g in found).backward()
            found = [*found, *(t.grad for t in own.values())]
        return found

    functions = (fused,) if norm == "instance" else (fused, public)
    for second in (False, True):
        expected = gradients(plain, STRIDES["first"], STRIDES["first"], second)
        for function, name in itertools.product(functions, STRIDES):
            strides = STRIDES[x_strides], STRIDES[name]
            found = gradients(function, *strides, second)
            where = f"{function.__name__}, dy {name}, second {second}"
            if function is fused and x_strides in ("transposed", "slice"):
                # It may run plain, and PyTorch's instance norm is wrong for some strides.
                assert is_close(found, expected) or is_close(
                    found, gradients(plain, *strides, second)
                ), where
            else:
                assert is_close(found, expected), where


def is_close(found, expected):
    """Whether tensors are equal up to rounding, and the same are None."""
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-8, atol=1e-10))
        for a, b in zip(found, expected, strict=True)
    )


def modules():
    """Modules between convolutions, by name."""

    def conv():
        return nn.Conv2d(4, 4, 3, padding=1)

    units = [pk.NormActConv(nn.BatchNorm2d(4), nn.ReLU(), conv()) for _ in range(2)]
    found = {
        "unit": units[0],
        "units": nn.Sequential(*units),
        "group": pk.NormActConv(nn.GroupNorm(2, 4), nn.SiLU(), conv()),
        "act": pk.NormAct(nn.BatchNorm2d(4), nn.SiLU()),
        "stage": pk.PreActStage([random_block("basic", 4, 4) for _ in range(2)]),
    }
    return {n: nn.Sequential(conv(), m, conv()).double() for n, m in found.items()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("name", modules())
def test_the_same_second_gradients_are_none(name, is_converted, training, backend):
    net = modules()[name].train(training)
    plain = plain_copy(net).train(training)
    net = pk.convert(copy.deepcopy(plain)) if is_converted else net
    x = torch.randn(2, 4, 3, 4, dtype=torch.float64)

    def gradients(net, wanted):
        net.zero_grad()
        own = {"x": x.clone().requires_grad_(), **dict(net.named_parameters())}
        first = torch.autograd.grad(
            net(own["x"]).sum(), [own[n] for n in wanted], create_graph=True, allow_unused=True
        )
        found = [None if g is None else g.requires_grad for g in first]
        sum(g.square().sum() for g in first if g is not None).backward()
        return found, {n: t.grad is None for n, t in own.items()}

    for wanted in (["x"], ["0.weight"], [n for n, _ in net.named_parameters()]):
        assert gradients(net, wanted) == gradients(plain, wanted), wanted


def test_an_instance_norm_that_runs_plain_behind_a_unit():
    """The second derivative of PyTorch's own may be wrong for one image in channels_last."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.BatchNorm2d(4)
            self.norm2 = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

        def forward(self, x):
            return F.selu(self.norm2(F.silu(self.norm1(x)) * 2))

    net, found = Net().double().eval(), []
    x = torch.randn(1, 4, 5, 6, dtype=torch.float64)
    dy = torch.randn_like(x)
    for model in (copy.deepcopy(net), pk.convert(net)):
        parameters = [*model.parameters()]
        first = torch.autograd.grad(model(x), parameters, dy, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), parameters))
    torch.testing.assert_close(*found)
