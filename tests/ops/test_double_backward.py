"""Gradients of gradients are those of plain PyTorch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from tests.cases import (
    ACTIVATIONS,
    ConvCase,
    NormCase,
    NormConvCase,
    conv_inputs,
    every_activation,
    every_modulation,
    norm_conv_inputs,
    norm_inputs,
    plain_bn_relu_conv2d,
    plain_norm_act,
    random_block,
    randomised,
)
from tests.oracle import check, evaluate, plain_copy

# A double backward runs PyTorch's operators; a backend runs the forward alone.
pytestmark = pytest.mark.backends("cpu")

CASE = ConvCase("small", (2, 3, 3, 4), 4, padding=1, stride=(1, 2), conv_bias=True, residual=True)
both_modes = pytest.mark.parametrize("training", [True, False])


class GradientPenalty(torch.nn.Module):
    """Squares of all first gradients of a function: its gradient is a double backward."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, **inputs):
        wanted = [t for t in (*inputs.values(), *self.parameters()) if t is not None]
        wanted = [t for t in wanted if t.requires_grad]
        y = self.function(**inputs)
        grads = torch.autograd.grad(
            y, wanted, torch.sin(3 * y.detach()), create_graph=True, allow_unused=True
        )
        return sum((g * g).sum() for g in grads if g is not None)


def check_penalty(fused, plain, make_inputs, frozen=(), **arguments):
    """Several problems in float64: a penalty is one number, and its error one draw."""
    if arguments:
        fused, plain = (partial(f, **arguments) for f in (fused, plain))
    problems = [make_inputs() for _ in range(4)]
    prefix = "function." if isinstance(fused, torch.nn.Module) else ""
    frozen = [n if n == "x" else prefix + n for n in frozen]
    check(GradientPenalty(fused), GradientPenalty(plain), problems, frozen=frozen)


def check_penalty_of_stage(stage, frozen=()):
    stage = stage.double()
    channels = stage[0].bn1.num_features
    images = partial(torch.randn, 2, channels, 3, 4, dtype=torch.float64)
    check_penalty(stage, plain_copy(stage), lambda: {"x": images()}, frozen)


@pytest.mark.covering(1)
@both_modes
@pytest.mark.parametrize("frozen", [(), ("x",), ("conv_weight", "conv_bias"), ("residual",)])
def test_gradient_penalty_of_bn_relu_conv2d(frozen, training, backend):
    inputs = partial(conv_inputs, CASE, torch.float64)
    arguments = {"training": training, **CASE.conv}
    check_penalty(pk.bn_relu_conv2d, plain_bn_relu_conv2d, inputs, frozen, **arguments)


NORMS = {
    "group": (NormCase((2, 8, 3, 4), 4), {}),
    "group_of_sequences": (NormCase((2, 8, 5), 2), {}),
    "batch": (NormCase((3, 8, 3, 4)), {}),
    "batch_in_evaluation": (NormCase((3, 8, 3, 4)), {"training": False}),
}
every_norm = pytest.mark.parametrize(("norm", "options"), NORMS.values(), ids=NORMS)


@every_norm
@every_modulation
@every_activation
@pytest.mark.covering(1)
def test_gradient_penalty_of_norm_act(norm, options, modulation, activation, backend):
    fused = partial(norm.norm_act, activation=ACTIVATIONS[activation][0], **options)
    plain = partial(plain_norm_act, activation=activation, **norm.norm | options)
    check_penalty(fused, plain, partial(norm_inputs, norm, torch.float64, modulation))


@pytest.mark.covering(1)
@every_norm
@pytest.mark.parametrize("modulation", [(), ("scale", "shift")], ids=["", "modulated"])
@pytest.mark.parametrize("frozen", [(), ("x",), ("conv_weight", "conv_bias"), ("weight", "scale")])
def test_gradient_penalty_of_norm_act_conv(frozen, modulation, norm, options, backend):
    case = NormConvCase(norm, 4, stride=2, conv_bias=True, residual=True)
    arguments = {"activation": "tanh", **options}
    inputs = partial(norm_conv_inputs, case, torch.float64, modulation)
    check_penalty(case.fused, case.plain, inputs, frozen, **arguments)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("norm", [NormCase((2, 8, 3, 4), 4), NormCase((2, 8, 3, 2, 2))], ids=str)
def test_gradient_penalty_beside_a_residual_of_another_dtype(norm, dtypes, backend):
    x_dtype, residual_dtype = (getattr(torch, name) for name in dtypes)
    case = NormConvCase(norm, 4, conv_bias=True, residual=True)
    problems = [norm_conv_inputs(case, x_dtype) for _ in range(4)]
    problems = [{**i, "residual": i["residual"].to(residual_dtype)} for i in problems]
    fused, plain = (
        GradientPenalty(partial(f, activation="tanh")) for f in (case.fused, case.plain)
    )
    check(fused, plain, problems)


@both_modes
def test_gradient_penalty_of_an_instance_norm_with_running_statistics(training, backend):
    norm = torch.nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    module = randomised(pk.NormAct(norm, "gelu")).double().train(training)
    images = partial(torch.randn, 3, 6, 4, 5, dtype=torch.float64)
    check_penalty(module, plain_copy(module), lambda: {"x": images()})


def test_gradient_penalty_behind_dropout(backend):
    case = NormConvCase(NormCase((2, 8, 3, 3, 4), 4), 4)
    inputs = norm_conv_inputs(case, torch.float64)
    found = []
    for function in (case.fused, case.plain):
        torch.manual_seed(7)
        penalty = GradientPenalty(partial(function, activation="silu", dropout=0.5))
        found.append(evaluate(penalty, inputs))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def starts(*prefixes):
    return lambda name: name.startswith(prefixes)


NOTHING = starts("-")
TWO_BLOCKS = starts("x", "0.", "1.")
A_BLOCK_AND_A_UNIT = starts("x", "0.", "1.bn1.", "1.conv1.")


@pytest.mark.covering(1)
@both_modes
@pytest.mark.parametrize(
    "memory_and_frozen",
    [
        *(("store", frozen) for frozen in (NOTHING, TWO_BLOCKS, A_BLOCK_AND_A_UNIT)),
        *(("rebuild", frozen) for frozen in (TWO_BLOCKS, A_BLOCK_AND_A_UNIT)),
        ("checkpoint", A_BLOCK_AND_A_UNIT),
    ],
)
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_gradient_penalty_of_a_stage(kind, memory_and_frozen, training, backend):
    memory, frozen = memory_and_frozen
    width = 4 if kind == "basic" else 1
    blocks = [random_block(kind, 6, width)]
    blocks += [random_block(kind, 4, width) for _ in range(2)]
    stage = pk.PreActStage(blocks, memory).train(training)
    names = ["x", *(name for name, _ in stage.named_parameters())]
    check_penalty_of_stage(stage, list(filter(frozen, names)))


def test_gradient_penalty_of_a_stage_whose_block_occurs_twice(backend):
    block = random_block("basic", 4, 4)
    check_penalty_of_stage(pk.PreActStage([block, block]))


def test_a_residual_alone_has_a_second_derivative(backend):
    inputs = conv_inputs(CASE)
    residual = inputs["residual"].requires_grad_()
    y = pk.bn_relu_conv2d(**inputs, training=True, **CASE.conv)
    (first,) = torch.autograd.grad(y.square().sum(), residual, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), residual)
    assert torch.equal(second, torch.full_like(residual, 2))


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
CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
BATCH_NORMS = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE_NORMS = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


def unit(norm, kind, channels, dims):
    """A module with SiLU."""
    if norm == "group":
        norm = nn.GroupNorm(min(2, channels), channels)
    elif norm == "instance":
        norm = INSTANCE_NORMS[dims](channels, affine=True)
    else:
        norm = BATCH_NORMS[dims](channels).train(norm == "batch")
    if kind == "act":
        module = pk.NormAct(norm, nn.SiLU())
    else:
        conv = CONVOLUTIONS[dims](channels, channels, 3, padding=1)
        module = pk.NormActConv(norm, nn.SiLU(), conv)
    return randomised(module).double()


@pytest.mark.covering(2)
@pytest.mark.parametrize("x_strides", STRIDES)
@pytest.mark.parametrize("kind", ["act", "residual"])
@pytest.mark.parametrize("norm", ["batch", "batch, eval", "group", "instance"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_and_second_gradients_of_any_strides(shape, norm, kind, x_strides, backend):
    module = unit(norm, kind, shape[1], len(shape))
    inputs = {"x": torch.randn(shape, dtype=torch.float64)}
    if kind == "residual":
        inputs["residual"] = torch.randn(shape, dtype=torch.float64)

    def gradients(module, x_strides, dy_strides, second):
        own = {n: t.clone() for n, t in inputs.items()}
        own["x"] = STRIDES[x_strides](own["x"])
        wanted = [t.requires_grad_() for t in own.values()] + [*module.parameters()]
        y = WithStrides.apply(module(**own), STRIDES[dy_strides])
        dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).sin().view(y.shape)
        found = torch.autograd.grad(y, wanted, dy, create_graph=second)
        if second:
            penalty = sum(g.square().sum() for g in found)
            found += torch.autograd.grad(penalty, wanted, allow_unused=True)
        return found

    for second in (False, True):
        expected = gradients(plain_copy(module), "first", "first", second)
        for name in STRIDES:
            found = gradients(module, x_strides, name, second)
            message = f"dy {name}, second {second}: {{}}".format
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10, msg=message)


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


@both_modes
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
    """PyTorch's own second derivative may be wrong for one image in channels_last."""

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
