"""Packing of convolution weights: kernels read `[K, R, S, C]` in the dtype of the products.

Weights stored like this are read in place. Weights in the default layout, and float32 weights for
products in half precision, are copied, once for a run of blocks.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.launch import (
    INTERPRETED,
    PreparedLaunches,
    aligned_rows,
    all_aligned,
    ceil_div,
    launch_kernel,
    wait_for_predecessors,
)

_WEIGHTS_PER_LAUNCH = 64  # pointers are launch arguments, which take about 4 KB at most


@triton.jit(
    do_not_specialize=["C", "S", "taps", "size", "row", *(f"stride_{axis}" for axis in "kcrs")]
)
def pack_weights_kernel(
    weights,
    packed,
    C,
    S,
    taps,
    size,
    row,
    stride_k,
    stride_c,
    stride_r,
    stride_s,
    WEIGHTS: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
):
    """Copies a tuple of weights `[K, C, R, S]` with the given strides to `packed`.

    `packed` is `[weights, K, R, S, C]`, with `row` elements from one weight to the next. `size` is
    K * taps * C. Grid: tiles of elements, weights.
    """
    wait_for_predecessors()
    index = tl.program_id(1)
    weight = weights[0]
    for i in tl.static_range(1, WEIGHTS):
        weight = tl.where(index == i, weights[i], weight)
    element = tl.program_id(0) * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
    is_element = element < size
    c, tap, k = element % C, element // C % taps, element // (C * taps)
    at = k * stride_k + c * stride_c + tap // S * stride_r + tap % S * stride_s
    value = tl.load(weight + at, mask=is_element, other=0.0)
    value = value.to(packed.dtype.element_ty)
    tl.store(packed + index.to(tl.int64) * row + element, value, mask=is_element)


def is_packed(conv_weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels can read a weight in place."""
    is_dense = conv_weight.is_contiguous(memory_format=torch.channels_last)
    return is_dense and conv_weight.dtype == dtype


def pack_weights(
    conv_weights: Sequence[Tensor], dtype: torch.dtype, prepared: PreparedLaunches | None = None
) -> list[Tensor]:
    """Copies weights of one shape and dtype to `[K, R, S, C]`. A program owns a tile of a weight.

    For `prepared` see `launch_kernel`; use one per shape and dtypes.
    """
    conv_weights = all_aligned(conv_weights)
    if len({w.stride() for w in conv_weights}) > 1:
        conv_weights = [w.contiguous() for w in conv_weights]
    first, count = conv_weights[0], len(conv_weights)
    K, C, R, S = first.shape
    rows = aligned_rows(first, count, first.numel(), dtype)
    row = rows.stride(0)
    slots = 1 if count == 1 else _WEIGHTS_PER_LAUNCH  # launches with equal slots share a kernel
    tile = 2**14 if INTERPRETED else 1024
    for begin in range(0, count, slots):
        part = conv_weights[begin : begin + slots]
        filled = *part, *itertools.repeat(first, slots - len(part))
        launch_kernel(
            pack_weights_kernel,
            (ceil_div(first.numel(), tile), len(part), 1),
            (filled, rows[begin:], C, S, R * S, first.numel(), row, *first.stride()),
            {"WEIGHTS": slots, "TILE_ELEMENTS": tile},
            4,
            prepared,
            slots,
        )
    return list(rows.view(count, K, R, S, C).unbind())


def packed_weight(conv_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Packs one weight, unless kernels can read it in place."""
    return conv_weight if is_packed(conv_weight, dtype) else pack_weights([conv_weight], dtype)[0]
