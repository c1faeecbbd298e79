"""Cases and checks of the fused convolutions for narrow channels of the CUDA library.

In half precision the budget is that of `tests/oracle.py`. In float32 the kernels multiply operands
that were rounded to TF32, as eager does on a GPU where it may; so eager here rounds its operands to
TF32 (to nearest, the tighter of what convolutions on a GPU do), and the truth is float64 of what
was given, unrounded: the budget stays twice eager's own error and one rounding of float32.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from preact_kernels.kernels import cuda, reference
from preact_kernels.kernels.contract import Conv, Epilogue, Fold, Norm, Wanted
from tests.cases import device_of
from tests.conftest import IS_CUDA_ON_HOST
from tests.kernels.cuda_on_host import serve_cpu
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
# Each channel class of the kernels, tiles that are not full, images of one pixel.
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
    """All that have a kernel."""
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
    """The tensors that `bn_relu_conv_forward` takes."""

    x: Tensor
    norm: Norm
    conv_weight: Tensor
    residual: Tensor | None


class Backward(NamedTuple):
    """The tensors that `bn_relu_conv_backward` takes."""

    dy: Tensor
    fold: Fold | None
    x: Tensor
    norm: Norm
    conv_weight: Tensor


def forward_inputs(case: Case, dtype: torch.dtype, has_residual: bool = True) -> Forward:
    n, _, _, c, k, side = case
    weight = torch.randn(k, c, side, side, device=DEVICE) / (c * side**2) ** 0.5
    residual = images(n, k, case, dtype) if has_residual else None
    return Forward(images(n, c, case, dtype), random_norm(c), weight.to(dtype), residual)


def backward_inputs(case: Case, dtype: torch.dtype, fold: str = "skip") -> Backward:
    """Tensors with a fold that is "none", "evaluation", "z" (without skip) or "skip"."""
    n, h, w, _, k, _ = case
    x, norm, conv_weight, _ = forward_inputs(case, dtype)
    dy, z, skip = (images(n, k, case, dtype) for _ in range(3))
    if fold == "none":
        return Backward(dy, None, x, norm, conv_weight)
    sums = torch.randn(2, k, device=DEVICE) * (n * h * w) ** 0.5
    inv_count = 0.0 if fold == "evaluation" else 1 / (n * h * w)
    folded = Fold(skip if fold == "skip" else None, z, random_norm(k, 1e-3), sums, inv_count)
    return Backward(dy, folded, x, norm, conv_weight)


def mapped(inputs, change):
    """The same named tuple, with `change` of every tensor inside."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, tuple):
        return type(inputs)(*(mapped(t, change) for t in inputs))
    return inputs


def call(backend, case: Case, inputs: Forward | Backward, options) -> dict[str, Tensor]:
    """The results by name, without those that are None.

    Args:
        backend: `Kernels`.
        case: shape.
        inputs: tensors.
        options: whether statistics are wanted, or a `Wanted`.
    """
    if isinstance(inputs, Backward):
        found = backend.bn_relu_conv_backward(*inputs, conv(case), options)._asdict()
    else:
        x, norm, weight, residual = inputs
        y, statistics = backend.bn_relu_conv_forward(
            x, norm, weight, conv(case), Epilogue(None, residual, options)
        )
        found = {"y": y, **(statistics._asdict() if statistics else {})}
    return {n: t for n, t in found.items() if t is not None}


LOW_NAN = 0x7F800001  # infinite without the low bits that TF32 does not have


def as_tf32(t: Tensor) -> Tensor:
    """To nearest, ties away from zero, of what is no NaN."""
    bits = t.contiguous().view(torch.int32)
    is_infinite = (bits & 0x7FFFFFFF) == 0x7F800000
    return torch.where(is_infinite, bits, (bits + 0x1000) & ~0x1FFF).view(torch.float32).view_as(t)


class RoundedOperands(torch.utils._python_dispatch.TorchDispatchMode):
    """Convolutions of float32 see operands that are rounded to TF32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution_backward.default:
            args = (*(as_tf32(t) for t in args[:3]), *args[3:])
        elif function is torch.ops.aten.convolution.default:
            args = (*(as_tf32(t) for t in args[:2]), *args[2:])
        return function(*args, **kwargs or {})


def eager(case: Case, inputs: Forward | Backward, options) -> dict[str, Tensor]:
    """The reference in the dtype of the inputs."""
    if inputs.x.dtype != torch.float32:
        return call(reference, case, inputs, options)
    with RoundedOperands():
        return call(reference, case, inputs, options)


def reversed_batch(inputs):
    return mapped(inputs, lambda t: nhwc(t.flip(0)) if t.dim() == 4 else t)


def moved(inputs):
    """Activations that begin one element behind where memory is aligned."""

    def move(t):
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return memory[1:].view(t.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2).copy_(t)

    return mapped(inputs, lambda t: move(t) if t.dim() == 4 else t)


ALL = Wanted(True, True, True)


def check_case(case: Case, inputs: Forward | Backward, options) -> dict[str, Tensor]:
    """Asserts the budget for every result, which has the dtype of eager's; returns the results."""
    found = call(kernels(), case, inputs, options)
    truth = call(reference, case, mapped(inputs, Tensor.double), options)
    errors = dict.fromkeys(truth, 0.0)
    weight = inputs.conv_weight
    for order in (lambda t: t, reversed_batch):
        run = eager(case, order(inputs)._replace(conv_weight=weight), options)
        if order is reversed_batch:
            run |= {n: run[n].flip(0) for n in ("y", "g", "dy") if n in run}
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in run.items()}
        for name in truth:
            error = float((run[name].double() - truth[name]).norm())
            errors[name] = max(errors[name], error)
    if "mean" in found:  # statistics are of y as stored
        truth |= reference.bn_stats(found["y"].double())._asdict()
        plain = reference.bn_stats(found["y"])._asdict()
        errors |= {n: float((t.double() - truth[n]).norm()) for n, t in plain.items()}
    assert_within_budget(found, truth, errors)
    return found


def launches(run) -> list[str]:
    """The names of what `run()` launches, which does not run."""
    found = []
    with serve_cpu.without_running(lambda launch: found.append(launch.name)):
        run()
    return found
