"""The arguments of a unit, as functions, modules and converted models give them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from preact_kernels.activations import RELU, Activation
from preact_kernels.kernels.dropout import Mask
from preact_kernels.norms import NormArguments
from preact_kernels.ops import checks


class ConvArguments(NamedTuple):
    """The arguments of a convolution, as for `F.conv1d`, `F.conv2d` and `F.conv3d`."""

    weight: Tensor
    bias: Tensor | None
    stride: int | tuple[int, ...]
    padding: int | tuple[int, ...] | str
    dilation: int | tuple[int, ...]
    groups: int


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    """PyTorch's convolution of 1, 2 or 3 dimensions; `numbers` as in `ConvArguments`."""
    return (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3](x, weight, bias, *numbers)


class ScaleShift(NamedTuple):
    """A scale and a shift per image after a norm: `h * (1 + scale) + shift`.

    Alternatively a factor and a shift, `h * factor + shift`. Tensors are `[N, C]` or
    `[N, C, 1, ...]`.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    factor: Tensor | None = None

    @property
    def has_any(self) -> bool:
        """Whether any tensor is given."""
        return any(t is not None for t in self)

    def check(self, x: Tensor) -> None:
        """Raises unless all tensors match the images `x`."""
        for name, t in zip(self._fields, self, strict=True):
            if t is None:
                continue
            checks.check_like(name, t, "x", x)
            n, c = x.shape[:2]
            if t.dim() not in (2, x.dim()) or t.shape != (n, c, *[1] * (t.dim() - 2)):
                expected = f"[{n}, {c}]"
                if x.dim() > 2:
                    expected += f" or {[n, c, *[1] * (x.dim() - 2)]}"
                raise ValueError(
                    f"{name}: expected shape {expected} to match x, got {list(t.shape)}"
                )
            checks.check_parameter_dtype(name, t, x.dtype)

    def promoted(self, x: Tensor) -> Tensor:
        """Casts `x` to PyTorch's dtype of `norm(x) * (1 + scale) + shift`."""
        dtype = x.dtype
        for t in self:
            if t is not None:
                dtype = torch.promote_types(dtype, t.dtype)
        return x.to(dtype)

    def of(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Multiplies weight and bias by the scale and adds the shift, which gives `[N, C]`."""
        scale, shift, factor = (None if t is None else t.flatten(1).to(weight.dtype) for t in self)
        if scale is not None:
            factor = 1 + scale
        if factor is not None:
            weight, bias = weight * factor, bias * factor
        if shift is not None:
            bias = bias + shift
        return weight.contiguous(), bias.contiguous()

    def plain(self, h: Tensor) -> Tensor:
        """`h * (1 + scale) + shift` in PyTorch's operators."""
        return modulate(h, *self) if self.has_any else h


NO_SCALE_SHIFT = ScaleShift()


def scale_shift_of(scale: Tensor | None, shift: Tensor | None) -> ScaleShift:
    """Returns `NO_SCALE_SHIFT` itself if both are None."""
    return NO_SCALE_SHIFT if scale is None and shift is None else ScaleShift(scale, shift)


class UnitArguments(NamedTuple):
    """The arguments of a unit, `conv(dropout(act(norm(x) * (1 + scale) + shift)))`."""

    norm: NormArguments
    activation: Activation = RELU
    conv: ConvArguments | None = None  # None: the unit ends with the activation
    scale_shift: ScaleShift = NO_SCALE_SHIFT
    dropout: float = 0.0  # probability of dropping an element of the activation
    mask: Mask | None = None  # mask of dropout, if it is drawn already

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that the unit reads or updates besides its input."""
        of_conv = () if self.conv is None else self.conv[:2]
        return (*self.norm[:4], *of_conv, *self.scale_shift)


@fx.wrap  # branches on shapes, unknown in a symbolic trace
def modulate(
    h: Tensor, scale: Tensor | None, shift: Tensor | None, factor: Tensor | None = None
) -> Tensor:
    """`h * (1 + scale) + shift`, or `h * factor + shift`."""
    shape = (*h.shape[:2], *[1] * (h.dim() - 2))
    if factor is not None:
        h = h * factor.reshape(shape)
    if scale is not None:
        h = h * (1 + scale.reshape(shape))
    return h if shift is None else h + shift.reshape(shape)


def add_residual(y: Tensor, residual: Tensor | None) -> Tensor:
    """`y + residual`, or `y` without a residual."""
    return y if residual is None else y + residual
