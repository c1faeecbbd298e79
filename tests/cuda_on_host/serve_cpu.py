"""Makes the CUDA library, compiled for the host, a backend for CPU tensors in this process.

It goes by its own name, `cuda`; `"auto"` never selects it.
"""

import ctypes
import functools
import os
import shutil

import torch

import preact_kernels as pk
from preact_kernels.kernels import cuda
from preact_kernels.ops import dispatch as backends
from tests.cuda_on_host import build


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, compiled where that is still to be done, as torch ops and for `set_schedule`."""
    path = build.build("kernels", sanitize=bool(os.environ.get("PK_SANITIZE")))
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


def set_schedule(seed: int = 0, multiprocessors: int = 2, resident_blocks: int = 4) -> None:
    """Chooses a schedule, and what launches are told.

    Args:
        seed: draws the order of threads and blocks.
        multiprocessors: that launches count.
        resident_blocks: that run at once.
    """
    library().cuda_on_host_set(ctypes.c_uint64(seed), multiprocessors, resident_blocks)


def missing() -> str:
    """Why the backend `cuda` cannot be tested here; empty where it can."""
    if "cuda" in pk.available_backends():
        return ""
    return cuda.load_error() if torch.cuda.is_available() else "neither a GPU nor a C++ compiler"


@functools.cache
def install() -> bool:
    """Whether `cuda` runs on the host from now on: where there is no GPU, but a compiler.

    With a GPU it never does: where the library is missing, its tests are skipped and say so.
    """
    if torch.cuda.is_available() or shutil.which(build.CXX[0]) is None:
        return False
    library()
    backends.BACKENDS = tuple(
        row._replace(device_types=("cpu",), load_error=lambda: "", only_by_name=True)
        if row.name == "cuda"
        else row
        for row in backends.BACKENDS
    )
    backends._by_name = {row.name: row for row in backends.BACKENDS}
    return True
