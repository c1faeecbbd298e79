"""Dropout with a mask of one bit per element, in NHWC order."""

import sys
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Eight bytes of 0 or 1, read as one integer and multiplied by this, have their bits in the highest
# byte of the product, in order.
_GATHER = 0x0102040810204080
# To unpack a byte: repeat it eight times, then select another bit of each copy.
_REPEAT, _SELECT = 0x0101010101010101, 0x8040201008040201 - 2**64
if sys.byteorder == "big":
    raise ImportError("preact_kernels needs a little-endian machine")


class Mask(NamedTuple):
    """Which elements of an activation dropout keeps, and their scale."""

    bits: Tensor  # uint8: `Kernels.dropout_bits` of the elements in NHWC order
    factor: float

    def noise(self, x: Tensor) -> Tensor:
        """The factor where dropout keeps, else 0; in the shape and dtype of `x`, in NHWC order."""
        kept = ((self.bits.to(torch.int64) * _REPEAT) & _SELECT).view(torch.uint8) != 0
        noise = kept[: x.numel()].to(x.dtype).mul_(self.factor)
        return noise.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


def dropout_bits(drawn: Tensor) -> Tensor:
    """`Kernels.dropout_bits` in PyTorch's operations, for every device."""
    kept = drawn.reshape(-1) != 0
    kept = F.pad(kept.view(torch.uint8), (0, -kept.numel() % 8))
    return ((kept.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def dropout(values: Tensor, mask: Mask) -> Tensor:
    """`Kernels.dropout` in PyTorch's operations, for every device."""
    return values.mul_(mask.noise(values))
