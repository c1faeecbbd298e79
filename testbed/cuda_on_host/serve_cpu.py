"""Makes the CUDA library, compiled for the host, a backend for CPU tensors in this process.

The backend is called `cuda`; `"auto"` never selects it.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import preact_kernels as pk
from preact_kernels.kernels import cuda
from preact_kernels.ops import dispatch as backends
from testbed.cuda_on_host import build


@functools.cache
def library() -> ctypes.CDLL:
    """Builds the library if something changed, registers its ops, and returns it for ctypes."""
    path = build.build("kernels", sanitize=bool(os.environ.get("PK_SANITIZE")))
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


def set_schedule(seed: int = 0, multiprocessors: int = 2, resident_thread_blocks: int = 4) -> None:
    """Chooses a schedule.

    Args:
        seed: draws the order of threads and thread blocks.
        multiprocessors: the number of multiprocessors that launches see.
        resident_thread_blocks: the number of thread blocks that run at once.
    """
    library().cuda_on_host_set(ctypes.c_uint64(seed), multiprocessors, resident_thread_blocks)


def set_most_shared_bytes(count: int = 227 * 1024) -> None:
    """Sets the most shared memory of a thread block: 227 KiB on 9.0, 163 on 8.0, 99 on 8.6."""
    library().cuda_on_host_limit_shared(ctypes.c_size_t(count))


class Launch(NamedTuple):
    """The arguments of a launch, or of a fill, which has no thread blocks or threads."""

    name: str
    thread_blocks: tuple[int, int, int]
    threads: int  # per thread block
    shared_bytes: int  # per thread block
    is_dependent: bool  # may begin before the launch ahead has ended
    filled_bytes: int  # 0 for a launch
    params: bytes
    kernel: int | None  # the address, for `symbol_of`; None for a fill
    tiles: int  # tiles that the thread blocks share; 0 for a kernel without tiles


class _Launch(ctypes.Structure):
    """`Launch` of grid.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("thread_blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_size_t),
        ("filled_bytes", ctypes.c_size_t),
        ("is_dependent", ctypes.c_bool),
        ("kernel", ctypes.c_void_p),
        ("tiles", ctypes.c_int),
        ("is_cooperative", ctypes.c_bool),
    )


@functools.cache
def _symbols() -> dict[int, str]:
    """Returns the names of the library's functions, by address."""
    path = build.build("kernels", sanitize=bool(os.environ.get("PK_SANITIZE")))
    lines = subprocess.check_output(["nm", "--defined-only", str(path)], text=True).splitlines()
    found = {name: int(at, 16) for at, kind, name in map(str.split, lines) if kind in "tTW"}
    known = "cuda_on_host_listen"
    base = ctypes.cast(getattr(library(), known), ctypes.c_void_p).value - found[known]
    return {base + at: name for name, at in found.items()}


def symbol_of(kernel: int) -> str:
    """Returns the mangled name of a kernel, which `nm` of binutils lists."""
    return _symbols()[kernel]


@contextlib.contextmanager
def without_running(listener: Callable[[Launch], None]) -> Iterator[None]:
    """Calls `listener` in place of every launch and fill inside the context.

    New tensors have unique addresses, and no memory until something is written to them.
    """

    @ctypes.CFUNCTYPE(None, ctypes.POINTER(_Launch))
    def listen(pointer):
        launch = pointer.contents
        x, y, z = launch.threads
        params = ctypes.string_at(launch.params, launch.params_bytes)
        filled_bytes = launch.filled_bytes
        thread_blocks, threads = tuple(launch.thread_blocks), x * y * z
        if filled_bytes:
            thread_blocks, threads = (0, 0, 0), 0
        listener(
            Launch(
                launch.name.decode(),
                thread_blocks,
                threads,
                launch.shared_bytes,
                launch.is_dependent,
                filled_bytes,
                params,
                launch.kernel,
                launch.tiles,
            )
        )

    library().cuda_on_host_listen(listen)
    library().cuda_on_host_reserve(True)
    try:
        yield
    finally:
        library().cuda_on_host_reserve(False)
        library().cuda_on_host_listen(None)


def tensor_at(address: int) -> range | None:
    """Returns the addresses of the tensor of `without_running` at an address, or None."""
    begin, end = ctypes.c_void_p(), ctypes.c_void_p()
    find = library().cuda_on_host_tensor_at
    find.restype = ctypes.c_bool
    if not find(ctypes.c_void_p(address), ctypes.byref(begin), ctypes.byref(end)):
        return None
    return range(begin.value, end.value)


def peak_bytes() -> int:
    """Returns the most bytes of tensors alive at a time since the last call, beyond those then.

    Counts tensors that are created inside of `without_running`.
    """
    count = library().cuda_on_host_peak_bytes
    count.restype = ctypes.c_size_t
    return count()


def missing() -> str:
    """Returns why the backend `cuda` cannot be tested here, or an empty text."""
    if "cuda" in pk.available_backends():
        return ""
    return cuda.load_error() if torch.cuda.is_available() else "neither a GPU nor a C++ compiler"


@functools.cache
def install() -> bool:
    """Makes `cuda` run on the host if there is a compiler and no GPU; returns whether it does.

    With a GPU, tests run the library on it, or are skipped if the library is missing.
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
