"""Compiles kernels with faults that the report of `tests/kernels/compile_triton.py` must find.

`python -m tests.kernels.planted_triton` prints what it finds, a line for each.
"""

import torch
import triton
import triton.language as tl

from preact_kernels.kernels.triton.configurations import ConvTiles
from preact_kernels.kernels.triton.launch import wait_for_predecessors
from tests.kernels.compile_triton import Launch, Task, faults, row


@triton.jit
def product_kernel(x, weight, y, pixels, C: tl.constexpr, TILES: tl.constexpr):
    """y = x @ weight; a pipeline of as many stages as `TILES` says."""
    wait_for_predecessors()
    channel = tl.arange(0, C)
    w = tl.load(weight + channel[:, None] * C + channel[None, :])
    for tile in tl.range(tl.program_id(0), pixels // 64, 8, num_stages=TILES.num_stages):
        at = (tile * 64 + tl.arange(0, 64))[:, None] * C + channel[None, :]
        a = tl.maximum(tl.load(x + at), 0.0).to(tl.bfloat16)
        tl.store(y + at, tl.dot(a, w).to(tl.bfloat16))


@triton.jit
def early_kernel(x, weight, y, pixels, C: tl.constexpr, TILES: tl.constexpr):
    """Reads what the kernel before it may still write, 2 bytes at a time."""
    at = tl.arange(0, 64)[:, None] * C + tl.arange(0, C)[None, :]
    tile = tl.load(x + at * pixels)
    wait_for_predecessors()
    tl.store(y + at, tile)


@triton.jit
def spilling_kernel(x, weight, y, pixels, C: tl.constexpr, TILES: tl.constexpr):
    """Holds more in registers than there are."""
    wait_for_predecessors()
    at = tl.arange(0, 256)[:, None] * C + tl.arange(0, C)[None, :]
    tile = tl.load(x + at).to(tl.float32)
    total = tl.zeros([256, C], tl.float32)
    for _ in range(pixels):
        total = tl.exp(total + tile) * tile
    tl.store(y + at, (total + tile).to(tl.bfloat16))


def main() -> None:
    x = torch.empty(128, 64, dtype=torch.bfloat16, device="meta")
    rows = []
    for kernel, stages, warps in (
        (product_kernel, 2, 4),
        (product_kernel, 40, 4),
        (early_kernel, 1, 4),
        (spilling_kernel, 1, 1),
    ):
        constants = {"C": 64, "TILES": ConvTiles(64, 64, 64, warps, stages, resident=1)}
        rows.append(row(Launch(Task(90, x.dtype, None), kernel, (x, x, x, 1000), constants, warps)))
    print("\n".join(faults(rows)))
    stack_bytes = rows[-1].stack_bytes
    print([bool(faults(rows[-1:], allowed)) for allowed in (stack_bytes - 1, stack_bytes)])


if __name__ == "__main__":
    main()
