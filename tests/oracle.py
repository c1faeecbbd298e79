"""Assertions of the budget: `preact_kernels.accuracy.oracle` says how far a result may be off."""

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.accuracy import cases
from preact_kernels.accuracy.oracle import (
    Judgement,
    Results,
    compare,
    evaluate,
    judge,
    off_kinks,
    same_bits,
)
from preact_kernels.accuracy.oracle import ReLUInputs as ReLUInputs
from preact_kernels.accuracy.oracle import distance as distance
from preact_kernels.accuracy.oracle import eager_errors as eager_errors
from preact_kernels.accuracy.oracle import evaluate_all as evaluate_all
from preact_kernels.accuracy.oracle import gradient_like as gradient_like
from preact_kernels.accuracy.oracle import stacked as stacked
from preact_kernels.accuracy.oracle import unit_roundoff as unit_roundoff
from preact_kernels.ops import dispatch
from preact_kernels.ops.checks import geometry
from tests.cases import conv2d_inside_the_image, plain_bn_relu_conv2d, unit_of


def assert_within_budget(fused: Results, truth: Results, errors: Mapping[str, float]) -> None:
    """Every tensor of `fused` is as near to the truth as `errors`, eager's own, allow."""
    assert fused.keys() == truth.keys()
    assert_no_fault(judge(fused, truth, errors))


def assert_no_fault(judgements: Mapping[str, Judgement]) -> None:
    """Every result keeps the budget."""
    faults = [j.fault for j in judgements.values() if j.fault]
    assert not faults, "\n".join(faults)


def check(
    fused: Callable[..., Tensor] | nn.Module,
    plain: Callable[..., Tensor] | nn.Module,
    inputs: Mapping[str, Tensor | None] | Sequence[Mapping[str, Tensor | None]],
    draws: int = 3,
    **options,
) -> Results:
    """Asserts that `fused` has the dtypes of `plain` and keeps the budget; returns its results.

    Args:
        fused: under test.
        plain: the same in plain PyTorch.
        inputs: as in `evaluate`, among them `x`; or several of the same shapes, judged together.
        draws: how many incoming gradients for one set of inputs.
        **options: as in `evaluate`.
    """
    if isinstance(inputs, Mapping):
        all_inputs = [off_kinks(plain, inputs, **options)] * draws
    else:
        all_inputs = [off_kinks(plain, i, **options) for i in inputs]
    comparison = compare(fused, plain, all_inputs, **options)
    assert_no_fault(comparison.judgements)
    return comparison.runs[0]


def check_conv(
    inputs, frozen: Sequence[str] = (), conv2d: Callable = F.conv2d, **arguments
) -> Results:
    """`check` of `pk.bn_relu_conv2d`."""
    fused = functools.partial(pk.bn_relu_conv2d, **arguments)
    plain = functools.partial(plain_bn_relu_conv2d, conv2d=conv2d, **arguments)
    return check(fused, plain, inputs, frozen=frozen)


def is_fused(inputs, *, stride=1, padding=0, dilation=1, groups=1, **_) -> bool:
    """Whether the convolution of a `pk.bn_relu_conv2d` is the backend's, and not PyTorch's."""
    x, weight = inputs["x"], inputs["conv_weight"]
    conv = geometry(weight.shape[2:], stride, padding, dilation, groups)
    pixels = x.numel() // x.shape[1]
    return not dispatch.kernels_for(x).refusal(unit_of(weight, conv), pixels)


# Where a tap lies outside of the image these multiply by zero instead of leaving it out.
_MULTIPLIES_THE_PADDING = ("triton",)


def assert_finite_as_in_eager(
    inputs: Mapping[str, Tensor | None], dy: Tensor | None = None, **arguments
) -> None:
    """`pk.bn_relu_conv2d` has numbers that are not finite where plain PyTorch has them.

    A fused convolution leaves out taps outside of the image, whatever PyTorch's does here.
    """
    fused = evaluate(functools.partial(pk.bn_relu_conv2d, **arguments), inputs, dy)
    conv2d = conv2d_inside_the_image if is_fused(inputs, **arguments) else F.conv2d
    plain = functools.partial(plain_bn_relu_conv2d, conv2d=conv2d, **arguments)
    plain = evaluate(plain, inputs, dy)
    padding = arguments["padding"] if dispatch.current() in _MULTIPLIES_THE_PADDING else 0
    for name, expected in plain.items():
        off = fused[name].isfinite() != expected.isfinite()
        if padding:
            off &= ~_may_be_infected(name, expected, padding) | ~expected.isfinite()
        assert not off.any(), f"{name}: {int(off.sum())} of {off.numel()}"


def _may_be_infected(name: str, expected: Tensor, padding: int) -> Tensor:
    """Where zero times what is not finite may add to eager's NaN.

    At the border of images; and in all taps of a weight one of which eager has lost.
    """
    allowed = torch.zeros_like(expected, dtype=torch.bool)
    if name in ("y", "dx"):
        allowed[..., :padding] = allowed[..., -padding:] = True
        allowed[..., :padding, :] = allowed[..., -padding:, :] = True
    elif name == "dconv_weight":
        allowed |= ~expected.isfinite().flatten(2).all(2)[:, :, None, None]
    return allowed


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy of a fused or converted module that runs plain `torch.nn` calls."""
    return cases.plain_copy(pk.revert(copy.deepcopy(module)))


def assert_same_bits(results: Results, expected: Results) -> None:
    """Every tensor equals its counterpart in dtype, shape and every bit: see `same_bits`."""
    assert results.keys() == expected.keys()
    wrong = [
        name
        for name, value in results.items()
        if (value is None) != (expected[name] is None)
        or (value is not None and not same_bits(value, expected[name]))
    ]
    assert not wrong, f"other bits in {', '.join(wrong)}"


def weight_gradient_inside_the_image(activation: Tensor, dy: Tensor) -> Tensor:
    """The weight's gradient of a 3x3 convolution in which no tap reads the padding."""
    height, width = dy.shape[2:]
    gradient = dy.new_empty(dy.shape[1], activation.shape[1], 3, 3)
    for r, s in itertools.product(range(3), repeat=2):
        a = activation[:, :, max(r - 1, 0) : height + r - 1, max(s - 1, 0) : width + s - 1]
        d = dy[:, :, max(1 - r, 0) : height + 1 - r, max(1 - s, 0) : width + 1 - s]
        gradient[:, :, r, s] = torch.einsum("nkhw,nchw->kc", d, a)
    return gradient
