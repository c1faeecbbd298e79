"""Which backend serves a call: a table, a choice by name, and `"auto"`."""

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from preact_kernels.kernels import cuda, native


class BackendError(RuntimeError):
    """The backend that was named cannot serve the call; the message says which argument it is."""


class Backend(NamedTuple):
    """One row of the table: where its functions are, and what they serve."""

    name: str
    module: str
    device_types: tuple[str, ...]  # empty: any
    dtypes: tuple[torch.dtype, ...]
    is_available: Callable[[], bool]
    only_by_name: bool = False  # "auto" passes it by
    obstacle: Callable[[], str] = lambda: ""  # why it is not available


# As Triton reads it.
_IS_TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in (
    "1", "true", "on", "yes", "y",
)  # fmt: skip


def _triton_is_available() -> bool:
    """Whether Triton is installed, and has a GPU that it serves or its interpreter to run in."""
    if not _IS_TRITON_INTERPRETED:
        if not torch.cuda.is_available() or torch.version.hip is not None:
            return False
        if torch.cuda.get_device_capability() < (8, 0):
            return False
    return importlib.util.find_spec("triton") is not None


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# In order of preference: "auto" takes the first that is available and serves the call.
BACKENDS = (
    Backend(
        "cpu",
        "preact_kernels.kernels.native",
        ("cpu",),
        (torch.float32, torch.bfloat16, torch.float64),
        native.cpu_is_available,
        obstacle=native.cpu_load_error,
    ),
    Backend(
        "triton",
        "preact_kernels.kernels.triton",
        ("cpu",) if _IS_TRITON_INTERPRETED else ("cuda",),
        (torch.float32, torch.bfloat16, torch.float16),
        _triton_is_available,
        only_by_name=_IS_TRITON_INTERPRETED,
    ),
    # Behind Triton until the two have been measured side by side on a GPU: it is what serves where
    # Triton is not installed.
    Backend(
        "cuda",
        "preact_kernels.kernels.cuda",
        ("cuda",),
        (torch.float32, torch.bfloat16, torch.float16),
        cuda.is_available,
        obstacle=cuda.load_error,
    ),
    Backend("reference", "preact_kernels.kernels.reference", (), _FLOATS, lambda: True),
)

_by_name = {backend.name: backend for backend in BACKENDS}
_current = "auto"


def available_backends() -> tuple[str, ...]:
    """Names of the backends that this machine can run, the specification first.

    Returns:
        For example `("reference", "cpu")`, or `("reference", "cuda", "triton", "cpu")` with a GPU.
    """
    return tuple(b.name for b in reversed(BACKENDS) if b.is_available())


def _validated(name: str) -> str:
    if name != "auto" and name not in _by_name:
        known = ", ".join(repr(n) for n in ("auto", *_by_name))
        raise ValueError(f"backend: expected one of {known}, got {name!r}")
    if name != "auto" and not _by_name[name].is_available():
        usable = ", ".join(repr(n) for n in available_backends())
        obstacle = _by_name[name].obstacle()
        reason = f" ({obstacle})" if obstacle else ""
        raise BackendError(f"backend {name!r} is not available here{reason}; available: {usable}")
    return name


def set_backend(name: str) -> None:
    """Sends every following call to the backend `name`; `"auto"` takes the fastest that serves it.

    Args:
        name: one of `available_backends()`, or `"auto"`.

    Raises:
        ValueError: no backend has that name.
        BackendError: the backend is known and cannot run on this machine.
    """
    global _current
    _current = _validated(name)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context, sends every call to the backend `name`.

    The backward of a call runs on the backend that ran its forward.

    Args:
        name: one of `available_backends()`, or `"auto"`.

    Raises:
        ValueError: no backend has that name.
        BackendError: the backend is known and cannot run on this machine.
    """
    global _current
    previous, _current = _current, _validated(name)
    try:
        yield
    finally:
        _current = previous


def _refusal(backend: Backend, device_type: str, dtype: torch.dtype) -> str | None:
    if backend.device_types and device_type not in backend.device_types:
        return f"x: expected a tensor on {' or '.join(backend.device_types)}, got {device_type}"
    if dtype not in backend.dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in backend.dtypes)
        return f"x: expected dtype {names}, got {str(dtype).removeprefix('torch.')}"
    return None


@functools.lru_cache(maxsize=256)
def select(name: str, device_type: str, dtype: torch.dtype) -> ModuleType:
    """The module of kernels for `name` ("auto" or a backend's), a device and a dtype.

    Raises:
        BackendError: the backend that was named cannot serve the device or the dtype.
    """
    if name != "auto":
        refusal = _refusal(_by_name[name], device_type, dtype)
        if refusal:
            raise BackendError(f"backend {name!r} cannot serve this call: {refusal}")
        return importlib.import_module(_by_name[name].module)
    for backend in BACKENDS:
        if backend.only_by_name or _refusal(backend, device_type, dtype):
            continue
        if backend.is_available():
            return importlib.import_module(backend.module)
    raise BackendError(f"no backend serves dtype {dtype} on {device_type}")


def current() -> str:
    """The name in force: "auto" or a backend's."""
    return _current


def _from_environment() -> None:
    name = os.environ.get("PREACT_KERNELS_BACKEND")
    if name:
        try:
            set_backend(name)
        except (ValueError, BackendError) as error:
            raise type(error)(f"PREACT_KERNELS_BACKEND: {error}") from None


_from_environment()
