"""Cases and checks of the fused convolutions for narrow channels of the CUDA library.

The budget is that of `tests/oracle.py`: twice eager's own error and one rounding. Eager and
the float64 truth are PyTorch's own operators and autograd: `F.batch_norm`, `F.relu`, `F.conv2d`
and casts. With a float32 residual stream or float32 weights, eager computes
`F.conv2d(F.relu(bn(x)).to(half), conv_weight.to(half)) + residual`.

In float32 the kernels round the operands of a convolution to TF32, as PyTorch may do on a GPU. So
eager rounds them too (to nearest, the more accurate way of convolutions on a GPU); the truth rounds
nothing.
"""

import itertools
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels import cuda, reference
from preact_kernels.kernels.contract import (
    AffineStep,
    Conv,
    Epilogue,
    Gradient,
    Inputs,
    Kernels,
    Norm,
    Unit,
    Wanted,
)
from testbed.cuda_on_host import serve_cpu
from tests.cases import device_of, unit_of
from tests.conftest import IS_CUDA_ON_HOST
from tests.oracle import assert_within_budget

DEVICE = device_of("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5
on_host = pytest.mark.skipif(not IS_CUDA_ON_HOST, reason="multiprocessors are chosen on the host")


class Case(NamedTuple):
    """A convolution with stride 1 that keeps the image's size."""

    images: int
    height: int
    width: int
    in_channels: int
    out_channels: int
    side: int

    def __str__(self):
        n, h, w, c, k, side = self
        return f"{side}x{side}_{n}x{h}x{w}_{c}_to_{k}"


TYPICAL = (Case(3, 5, 7, 64, 16, 1), Case(2, 17, 9, 16, 16, 3))
# Every channel class of the kernels, partial tiles, images of one pixel.
QUICK = (
    *TYPICAL,
    Case(1, 6, 7, 64, 256, 1),
    Case(3, 1, 1, 256, 64, 1),
    Case(2, 5, 5, 48, 80, 1),
    Case(5, 1, 1, 16, 16, 3),
    Case(1, 8, 33, 32, 32, 3),
    Case(2, 7, 7, 64, 64, 3),
)
SLOW = (
    Case(2, 15, 10, 16, 64, 1),
    Case(4, 9, 9, 128, 128, 1),
    Case(3, 7, 9, 240, 64, 1),
    Case(1, 33, 65, 16, 16, 3),
    Case(3, 16, 16, 32, 32, 3),
    Case(1, 17, 1, 64, 64, 3),
    Case(2, 9, 33, 64, 64, 3),
)


def has_kernel(case: Case, dtype: torch.dtype) -> bool:
    """Whether a fused kernel serves a case of this file."""
    return dtype != torch.float32 or case.side == 1 or case.in_channels <= 32


def is_slow(case: Case, dtype: torch.dtype) -> bool:
    """Kernels in float16 differ from those in bfloat16 in conversions and in one instruction."""
    return case in SLOW or (dtype == torch.float16 and case not in TYPICAL)


def cases_and_dtypes(*cases, dtypes=DTYPES):
    """Parametrises a test by the cases and dtypes that have a kernel."""
    return pytest.mark.parametrize(
        ("case", "dtype"),
        [
            pytest.param(c, d, id=f"{c}-{dtype_name(d)}", marks=[pytest.mark.slow] * is_slow(c, d))
            for c, d in itertools.product(cases, dtypes)
            if has_kernel(c, d)
        ],
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


typical = pytest.mark.parametrize("case", TYPICAL, ids=str)


def set_schedule(seed: int = 0, multiprocessors: int = 2) -> None:
    if IS_CUDA_ON_HOST:
        serve_cpu.set_schedule(seed, multiprocessors)


def nhwc(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def kernels():
    return cuda.kernels()


def conv(case: Case) -> Conv:
    padding = case.side // 2
    return Conv((1, 1), (padding, padding), (1, 1), 1)


def random_norm(channels: int, eps: float = EPS) -> Norm:
    return Norm(
        mean=torch.randn(channels, device=DEVICE) / 3,
        var=torch.rand(channels, device=DEVICE) + 0.5,
        weight=torch.randn(channels, device=DEVICE),
        bias=torch.randn(channels, device=DEVICE) / 2,
        eps=eps,
    )


def images(n: int, c: int, case: Case, dtype: torch.dtype) -> Tensor:
    return nhwc(torch.randn(n, c, case.height, case.width, device=DEVICE).to(dtype))


class Forward(NamedTuple):
    """The tensors that `norm_act_conv_forward` takes."""

    x: Tensor
    norm: Norm
    conv_weight: Tensor
    residual: Tensor | None


class Backward(NamedTuple):
    """The tensors that `norm_act_conv_backward` takes."""

    dy: Gradient
    x: Tensor
    norm: Norm
    conv_weight: Tensor


def forward_inputs(case: Case, dtype: torch.dtype, has_residual: bool = True) -> Forward:
    n, _, _, c, k, side = case
    weight = torch.randn(k, c, side, side, device=DEVICE) / (c * side**2) ** 0.5
    residual = images(n, k, case, dtype) if has_residual else None
    return Forward(images(n, c, case, dtype), random_norm(c), weight.to(dtype), residual)


def backward_inputs(case: Case, dtype: torch.dtype, step: str = "skip") -> Backward:
    """Tensors with a deferred step that is "none", "evaluation", "z" (without skip) or "skip"."""
    n, h, w, _, k, _ = case
    x, norm, conv_weight, _ = forward_inputs(case, dtype)
    g, z, skip = (images(n, k, case, dtype) for _ in range(3))
    if step == "none":
        return Backward(Gradient(g), x, norm, conv_weight)
    sums = torch.randn(2, k, device=DEVICE) * (n * h * w) ** 0.5
    inv_count = 0.0 if step == "evaluation" else 1 / (n * h * w)
    norm_of_z = random_norm(k, 1e-3)
    deferred = AffineStep(skip if step == "skip" else None, z, norm_of_z, sums, inv_count)
    return Backward(Gradient(g, deferred), x, norm, conv_weight)


def mapped(inputs, change):
    """The same named tuple, with `change` applied to every tensor."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, tuple):
        return type(inputs)(*(mapped(t, change) for t in inputs))
    return inputs


def unit(case: Case, inputs: Forward | Backward, dtype: torch.dtype | None = None) -> Unit:
    """The unit that takes `inputs`; its products are in `dtype`, by default the weight's."""
    if isinstance(inputs, Forward):
        y = inputs.residual
    else:
        y = inputs.dy.g if inputs.dy.step is None else inputs.dy.step.x
    y_dtype = None if y is None else y.dtype
    return unit_of(inputs.conv_weight, conv(case), dtype, inputs.x.dtype, y_dtype)


def call(
    backend: Kernels,
    case: Case,
    inputs: Forward | Backward,
    options: bool | Wanted,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The results by name, except None.

    `options` says whether statistics are wanted, or which gradients.
    """
    given = unit(case, inputs, dtype)
    tensors = Inputs(inputs.x, inputs.norm, inputs.conv_weight)
    if isinstance(inputs, Backward):
        found = backend.norm_act_conv_backward(given, inputs.dy, tensors, options)._asdict()
        assert not found.pop("activated")
    else:
        epilogue = Epilogue(None, inputs.residual, options)
        y, statistics = backend.norm_act_conv_forward(given, tensors, epilogue)
        found = {"y": y, **(statistics._asdict() if statistics else {})}
    return {n: t for n, t in found.items() if t is not None}


LOW_NAN = 0x7F800001  # infinity without the low bits, which TF32 drops


def as_tf32(t: Tensor) -> Tensor:
    """Rounds float32 to TF32, to nearest, ties away from zero. `t` has no NaN."""
    if t.dtype != torch.float32:
        return t
    bits = t.contiguous().view(torch.int32)
    is_infinite = (bits & 0x7FFFFFFF) == 0x7F800000
    return torch.where(is_infinite, bits, (bits + 0x1000) & ~0x1FFF).view(torch.float32).view_as(t)


class RoundedOperands(torch.utils._python_dispatch.TorchDispatchMode):
    """Rounds the operands of float32 convolutions to TF32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution_backward.default:
            args = (*(as_tf32(t) for t in args[:3]), *args[3:])
        elif function is torch.ops.aten.convolution.default:
            args = (*(as_tf32(t) for t in args[:2]), *args[2:])
        return function(*args, **kwargs or {})


def whole_gradient(gradient: Gradient) -> Tensor:
    """`[skip +] A*g + B*x + C`, in the dtype of `x`; `g` itself without a step."""
    g, step = gradient
    if step is None:
        return g
    skip, x, norm, sums, inv_count = step
    mean, weight, sum_g, sum_product = (
        t.view(-1, 1, 1) for t in (norm.mean, norm.weight, *(sums * inv_count))
    )
    rstd = torch.rsqrt(norm.var + norm.eps).view(-1, 1, 1)
    dx = weight * rstd * (g - sum_g - (x - mean) * rstd * sum_product)
    return (dx if skip is None else dx + skip).to(x.dtype)


def eager(
    case: Case, inputs: Forward | Backward, options: bool | Wanted, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The results of `call` in PyTorch's own operators and autograd, with products in `dtype`."""
    norm, padding = inputs.norm, conv(case).padding
    bn_weight, bn_bias, conv_weight = (
        t.detach().requires_grad_() for t in (norm.weight, norm.bias, inputs.conv_weight)
    )
    p = F.batch_norm(inputs.x, norm.mean, norm.var, bn_weight, bn_bias, eps=norm.eps)
    y = F.conv2d(F.relu(p).to(dtype), conv_weight.to(dtype), padding=padding)
    if isinstance(inputs, Forward):
        y = y.detach() if inputs.residual is None else y.detach() + inputs.residual
        return {"y": y} | (reference.bn_stats(y)._asdict() if options else {})
    dy = whole_gradient(inputs.dy)
    leaves = p, bn_bias, bn_weight, conv_weight
    g, sum_g, sum_product, dconv_weight = torch.autograd.grad(y, leaves, dy.to(dtype))
    found = {"g": g, "sums": torch.stack([sum_g, sum_product])} if options.input else {}
    found |= {"conv_weight": dconv_weight} if options.weight else {}
    return found | ({"dy": dy} if options.dy else {})


def reversed_batch(inputs):
    return mapped(inputs, lambda t: nhwc(t.flip(0)) if t.dim() == 4 else t)


def moved(inputs):
    """`inputs` with activations that begin one element past an aligned address."""

    def move(t):
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return memory[1:].view(t.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2).copy_(t)

    return mapped(inputs, lambda t: move(t) if t.dim() == 4 else t)


ALL = Wanted(True, True, True)


def check_case(
    case: Case,
    inputs: Forward | Backward,
    options: bool | Wanted,
    backend: Kernels | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Asserts the budget for every result, and that it has the dtype of eager's.

    The dtype of `g` may also be `dtype`, as in a fused kernel: eager's `g` has its values. Returns
    the results. The arguments are those of `call`.
    """
    weight = inputs.conv_weight
    dtype = dtype or weight.dtype
    found = call(backend or kernels(), case, inputs, options, dtype)
    truth = eager(case, mapped(inputs, Tensor.double), options, torch.float64)
    errors = dict.fromkeys(truth, 0.0)
    for order in (lambda t: t, reversed_batch):
        with RoundedOperands() if dtype == torch.float32 else nullcontext():
            run = eager(case, order(inputs)._replace(conv_weight=weight), options, dtype)
        if order is reversed_batch:
            run |= {n: run[n].flip(0) for n in ("y", "g", "dy") if n in run}
        if "g" in found and found["g"].dtype == dtype:
            run["g"] = run["g"].to(dtype)
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in run.items()}
        for name in truth:
            error = float((run[name].double() - truth[name]).norm())
            errors[name] = max(errors[name], error)
    if "mean" in found:  # the statistics of the stored y
        truth |= reference.bn_stats(found["y"].double())._asdict()
        plain = reference.bn_stats(found["y"])._asdict()
        errors |= {n: float((t.double() - truth[n]).norm()) for n, t in plain.items()}
    assert_within_budget(found, truth, errors)
    return found


def launches(run) -> list[str]:
    """The names of the kernels that `run()` launches; they do not run."""
    found = []
    with serve_cpu.without_running(lambda launch: found.append(launch.name)):
        run()
    return found
