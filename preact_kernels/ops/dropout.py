"""Dropout between activation and convolution: PyTorch's own mask, kept as one bit an element."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels import layout
from preact_kernels.ops import checks

# Eight bytes of 0 or 1 as one integer: the product has their bits in its highest byte, in order.
_GATHER = 0x0102040810204080
# A byte of bits eight times, and in each of them one bit.
_REPEAT, _SELECT = 0x0101010101010101, 0x8040201008040201 - 2**64
if sys.byteorder == "big":
    raise ImportError("preact_kernels needs a little-endian machine")


def check_dropout(p: Any) -> None:
    """Checks for a probability."""
    checks.check_number("dropout", p)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: expected a probability in [0, 1], got {p}")


class Mask(NamedTuple):
    """Which elements of an activation dropout keeps, and what it multiplies them by."""

    bits: Tensor  # uint8, of the elements in NHWC order
    factor: float

    def noise(self, x: Tensor) -> Tensor:
        """The factor where dropout keeps, else 0: shaped like `x`, in its dtype and in NHWC."""
        kept = ((self.bits.to(torch.int64) * _REPEAT) & _SELECT).view(torch.uint8) != 0
        noise = kept[: x.numel()].to(x.dtype).mul_(self.factor)
        return noise.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


def drawn(
    shape: Sequence[int], x: Tensor, channels_last: bool, p: float, in_place: bool = False
) -> Mask:
    """The mask of `F.dropout` for an activation; draws the same random numbers.

    Args:
        shape: of the activation, `[N, C, ...]`.
        x: has its device and dtype.
        channels_last: its memory format in plain PyTorch.
        p: probability of dropping an element, more than 0.
        in_place: whether the program drops in place, which draws other numbers on CUDA.
    """
    ones = torch.ones(shape, dtype=x.dtype, device=x.device)
    kept = F.dropout(layout.nhwc(ones) if channels_last else ones, p, True, in_place) != 0
    flat = kept.permute(0, *range(2, kept.dim()), 1).reshape(-1)
    flat = F.pad(flat.view(torch.uint8), (0, -flat.numel() % 8))
    bits = ((flat.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)
    return Mask(bits, 1 / (1 - p) if p < 1 else 0.0)
