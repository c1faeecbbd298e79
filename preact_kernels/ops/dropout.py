"""Dropout between activation and convolution: PyTorch's mask, saved as one bit per element."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import Kernels
from preact_kernels.kernels.dropout import Mask
from preact_kernels.ops import checks


def check_dropout(p: Any) -> None:
    """Checks for a probability."""
    checks.check_number("dropout", p)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: expected a probability in [0, 1], got {p}")


def drawn(
    kernels: Kernels,
    shape: Sequence[int],
    x: Tensor,
    channels_last: bool,
    p: float,
    in_place: bool = False,
) -> Mask:
    """Draws the mask of `F.dropout` for an activation, with the same random numbers.

    Args:
        kernels: the backend, which packs the mask.
        shape: shape of the activation, `[N, C, ...]`.
        x: a tensor with the device and dtype of the activation.
        channels_last: memory format of the activation in plain PyTorch.
        p: probability of dropping an element, more than 0.
        in_place: whether dropout is in place, which draws different numbers on CUDA.
    """
    strides = layout.strides(shape, channels_last)
    kept = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    if x.is_cpu and p < 1 and kept.numel():
        kept.bernoulli_(1 - p)  # as F.dropout does
    else:
        kept = F.dropout(kept.fill_(1), p, True, in_place)
    bits = kernels.dropout_bits(kept.movedim(1, -1).contiguous())
    return Mask(bits, 1 / (1 - p) if p < 1 else 0.0)
