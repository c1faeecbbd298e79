"""Gradients of gradients are those of plain PyTorch."""

from functools import partial

import pytest
import torch
from torch.autograd import gradgradcheck

import preact_kernels as pk
from tests.cases import (
    ConvCase,
    batch_norm_inputs,
    conv_inputs,
    plain_bn_relu,
    plain_bn_relu_conv2d,
    random_block,
    random_stage,
)
from tests.oracle import check, plain_copy

# A double backward runs PyTorch's operators; a backend runs the forward alone.
pytestmark = pytest.mark.backends("cpu")

CASE = ConvCase("small", (2, 3, 3, 4), 4, padding=1, stride=(1, 2), conv_bias=True, residual=True)
both_modes = pytest.mark.parametrize("training", [True, False])


class GradientPenalty(torch.nn.Module):
    """Squares of all first gradients of a function: its gradient is a double backward."""

    def __init__(self, module=None, function=None):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, **inputs):
        function = self.module or self.function
        trained = [] if self.module is None else list(self.module.parameters())
        wanted = [t for t in (*inputs.values(), *trained) if t is not None and t.requires_grad]
        y = function(**inputs)
        grads = torch.autograd.grad(
            y, wanted, torch.sin(3 * y.detach()), create_graph=True, allow_unused=True
        )
        return sum((g * g).sum() for g in grads if g is not None)


def check_penalty(fused, plain, make_inputs, **options):
    """Several problems: a penalty is one number, and its error one draw."""
    problems = [make_inputs() for _ in range(8)]
    if isinstance(fused, torch.nn.Module):
        fused, plain = GradientPenalty(fused), GradientPenalty(plain)
    else:
        fused, plain = GradientPenalty(function=fused), GradientPenalty(function=plain)
    check(fused, plain, problems, **options)


@both_modes
def test_gradient_penalty_of_bn_relu(training, wide_dtype):
    fused, plain = (partial(f, training=training) for f in (pk.bn_relu, plain_bn_relu))
    check_penalty(fused, plain, lambda: batch_norm_inputs((4, 16, 5, 6), wide_dtype))


@pytest.mark.covering(2)
@both_modes
@pytest.mark.parametrize("frozen", [(), ("x",), ("conv_weight", "conv_bias"), ("residual",)])
def test_gradient_penalty_of_bn_relu_conv2d(frozen, training, wide_dtype):
    arguments = {"training": training, **CASE.conv}
    fused, plain = (partial(f, **arguments) for f in (pk.bn_relu_conv2d, plain_bn_relu_conv2d))
    check_penalty(fused, plain, lambda: conv_inputs(CASE, wide_dtype), frozen=frozen)


@pytest.mark.covering(2)
@both_modes
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_gradient_penalty_of_a_stage(memory, training, wide_dtype):
    stage = random_stage("basic", memory=memory).to(wide_dtype).train(training)
    images = partial(torch.randn, 2, 10, 4, 5)
    check_penalty(stage, plain_copy(stage), lambda: {"x": images().to(wide_dtype)})


@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize("count", [1, 3])
def test_gradient_penalty_behind_frozen_blocks(count, memory):
    stage = random_stage("basic", memory=memory).double()
    frozen = ["x", *(n for n, _ in stage.named_parameters() if int(n[0]) < count)]
    images = partial(torch.randn, 2, 10, 4, 5, dtype=torch.float64)
    check_penalty(stage, plain_copy(stage), lambda: {"x": images()}, frozen=frozen)


@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_gradient_penalty_behind_frozen_units_of_a_block(kind, memory):
    width = 4 if kind == "basic" else 1
    blocks = [random_block(kind, 4, width) for _ in range(3)]
    stage = pk.PreActStage(blocks, memory).double()
    frozen = ["x", *(n for n, _ in stage.named_parameters() if n[0] == "0")]
    frozen += [f"1.{n}" for n in ("bn1.weight", "bn1.bias", "conv1.weight")]
    images = partial(torch.randn, 2, 4, 4, 5, dtype=torch.float64)
    check_penalty(stage, plain_copy(stage), lambda: {"x": images()}, frozen=frozen)


def test_gradient_penalty_of_a_stage_whose_block_occurs_twice(backend):
    block = random_block("basic", 4, 4)
    stage = pk.PreActStage([block, block]).double()
    check_penalty(stage, plain_copy(stage), lambda: {"x": torch.randn(2, 4, 3, 4).double()})


def test_gradient_penalty_with_a_trained_residual_alone(backend):
    inputs = conv_inputs(CASE, torch.float64)
    frozen = [name for name in inputs if name != "residual"]
    fused, plain = (
        partial(f, training=True, **CASE.conv) for f in (pk.bn_relu_conv2d, plain_bn_relu_conv2d)
    )
    assert not gradient_of_residual(plain, inputs, frozen).requires_grad
    assert not gradient_of_residual(fused, inputs, frozen).requires_grad


def gradient_of_residual(function, inputs, frozen):
    inputs = {
        n: None if t is None else t.clone().requires_grad_(n not in frozen and "running" not in n)
        for n, t in inputs.items()
    }
    y = function(**inputs)
    (gradient,) = torch.autograd.grad(y, inputs["residual"], torch.ones_like(y), create_graph=True)
    assert torch.equal(gradient, torch.ones_like(y))
    return gradient


@both_modes
def test_numerical_second_derivatives_of_bn_relu_conv2d(training, backend):
    inputs = conv_inputs(CASE, torch.float64)
    names = ("x", "conv_weight", "bn_weight", "bn_bias", "conv_bias", "residual")
    mean, var = inputs["running_mean"], inputs["running_var"]

    def function(*tensors):
        return pk.bn_relu_conv2d(
            **dict(zip(names, tensors, strict=True)),
            running_mean=mean.clone(),
            running_var=var.clone(),
            training=training,
            **CASE.conv,
        )

    assert gradgradcheck(function, [inputs[n].requires_grad_() for n in names], fast_mode=True)


def test_numerical_second_derivatives_of_residual_add(backend):
    pair = [torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert gradgradcheck(lambda x, branch: pk.residual_add(x, branch) ** 2, pair)


def test_first_gradients_are_the_same_whether_or_not_they_are_recorded(backend):
    stage = random_stage("basic").double()
    x = torch.randn(2, 10, 4, 5, dtype=torch.float64, requires_grad=True)
    wanted = (x, *stage.parameters())
    plain = torch.autograd.grad(stage(x).sum(), wanted)
    recorded = torch.autograd.grad(stage(x).sum(), wanted, create_graph=True)
    for a, b in zip(plain, recorded, strict=True):
        torch.testing.assert_close(a, b)


def test_a_residual_alone_has_a_second_derivative(backend):
    residual = torch.randn(2, 6, 5, 4, requires_grad=True)
    y = pk.bn_relu_conv2d(
        torch.randn(2, 6, 5, 4),
        torch.randn(6, 6, 1, 1),
        None,
        None,
        residual=residual,
        training=True,
    )
    (first,) = torch.autograd.grad(y.square().sum(), residual, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), residual)
    assert torch.equal(second, torch.full_like(residual, 2))
