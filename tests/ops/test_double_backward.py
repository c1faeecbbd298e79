"""Gradients of gradients are those of plain PyTorch."""

from functools import partial

import pytest
import torch

import preact_kernels as pk
from tests.cases import (
    ConvCase,
    NormCase,
    NormConvCase,
    batch_norm_inputs,
    conv_inputs,
    every_modulation,
    norm_conv_inputs,
    norm_inputs,
    plain_bn_relu,
    plain_bn_relu_conv2d,
    plain_norm_act,
    random_block,
    randomised,
)
from tests.oracle import check, evaluate, plain_copy

# A double backward runs PyTorch's operators; a backend runs the forward alone.
pytestmark = pytest.mark.backends("cpu")

CASE = ConvCase("small", (2, 3, 3, 4), 4, padding=1, stride=(1, 2), conv_bias=True, residual=True)
every_memory = pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
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


def plain_add(x, branch):
    return x + branch


def check_penalty_of_stage(stage, frozen=()):
    stage = stage.double()
    channels = stage[0].bn1.num_features
    images = partial(torch.randn, 2, channels, 3, 4, dtype=torch.float64)
    check_penalty(stage, plain_copy(stage), lambda: {"x": images()}, frozen)


@both_modes
def test_gradient_penalty_of_bn_relu(training, backend):
    inputs = partial(batch_norm_inputs, (4, 16, 5, 6), torch.float64)
    check_penalty(pk.bn_relu, plain_bn_relu, inputs, training=training)


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
@pytest.mark.covering(1)
def test_gradient_penalty_of_norm_act(norm, options, modulation, backend):
    arguments = {**norm.norm, "activation": "silu", **options}
    inputs = partial(norm_inputs, norm, torch.float64, modulation)
    check_penalty(norm.norm_act, plain_norm_act, inputs, **arguments)


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


# Blocks behind frozen ones, and behind frozen units of a block.
FROZEN = {
    "nothing": starts("-"),
    "two_blocks": starts("x", "0.", "1."),
    "a_block_and_a_unit": starts("x", "0.", "1.bn1.", "1.conv1."),
}


@pytest.mark.covering(2)
@both_modes
@every_memory
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_gradient_penalty_of_a_stage(kind, frozen, memory, training, backend):
    width = 4 if kind == "basic" else 1
    blocks = [random_block(kind, 6, width)]
    blocks += [random_block(kind, 4, width) for _ in range(2)]
    stage = pk.PreActStage(blocks, memory).train(training)
    names = ["x", *(name for name, _ in stage.named_parameters())]
    check_penalty_of_stage(stage, list(filter(frozen, names)))


def test_gradient_penalty_of_a_stage_whose_block_occurs_twice(backend):
    block = random_block("basic", 4, 4)
    check_penalty_of_stage(pk.PreActStage([block, block]))


def test_gradient_penalty_of_residual_add(backend):
    def inputs():
        return {n: torch.randn(2, 3, 2, 2, dtype=torch.float64) for n in ("x", "branch")}

    def squares(add, **inputs):
        return add(**inputs).square()

    check_penalty(partial(squares, pk.residual_add), partial(squares, plain_add), inputs)


def test_a_residual_alone_has_a_second_derivative(backend):
    inputs = conv_inputs(CASE)
    residual = inputs["residual"].requires_grad_()
    y = pk.bn_relu_conv2d(**inputs, training=True, **CASE.conv)
    (first,) = torch.autograd.grad(y.square().sum(), residual, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), residual)
    assert torch.equal(second, torch.full_like(residual, 2))
