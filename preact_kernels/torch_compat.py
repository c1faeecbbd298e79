"""The oldest torch that works, and private functions of torch."""

import contextlib
import re

import torch

OLDEST_TORCH = (2, 11)  # as in pyproject.toml

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH:
    raise ImportError(
        f"preact_kernels needs torch {'.'.join(map(str, OLDEST_TORCH))} or later, "
        f"got torch {torch.__version__}"
    )


def end_allocation_to_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Ends allocation to the memory pool of a CUDA graph capture that broke, and frees the pool."""
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # where the capture had done it
            end(device_index, pool)
