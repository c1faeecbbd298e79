"""The versions of torch that are served, and its private names that are used."""

import contextlib

import torch

OLDEST_TORCH = (2, 11)  # as in pyproject.toml

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    raise ImportError(
        f"preact_kernels needs torch {'.'.join(map(str, OLDEST_TORCH))} or later, "
        f"got torch {torch.__version__}"
    )


def end_allocation_to_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Ends allocation to the memory pool of a CUDA graph capture that broke, and frees the pool."""
    with contextlib.suppress(RuntimeError):  # where the capture had ended it
        torch._C._cuda_endAllocateToPool(device_index, pool)
        torch._C._cuda_releasePool(device_index, pool)
