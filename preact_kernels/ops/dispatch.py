"""Choice of the backend: the table of backends, by name, or `"auto"`."""

import contextlib
import functools
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels.kernels import cpu, cuda, reference
from preact_kernels.kernels.contract import FLOATS, HALVES, Kernels, Unit
from preact_kernels.ops import checks, schema
from preact_kernels.torch_compat import (
    PASSES_CONTEXTS,
    FakeTensor,
    FunctionalTensor,
    backward_id,
    is_foreign_thread,
    value_of_backward,
)


class BackendError(RuntimeError):
    """The selected backend cannot serve the call; the message names the argument."""


class Backend(NamedTuple):
    """A backend: its functions, and the devices and dtypes that they serve."""

    name: str
    kernels: Callable[[], Kernels]
    device_types: tuple[str, ...]  # empty: any
    dtypes: tuple[torch.dtype, ...]
    load_error: Callable[[], str]  # why it is not available, or an empty string
    only_by_name: bool = False  # "auto" skips it
    library_error: Callable[[], str] = lambda: ""  # errors that reinstalling can fix
    yields: Callable[[], bool] = lambda: False  # "auto" prefers later backends
    is_experimental: bool = False  # the test suite has not passed on its device

    def is_available(self) -> bool:
        return not self.load_error()


# Values of TRITON_INTERPRET that Triton takes as true.
_TRUE = ("1", "true", "on", "yes", "y")
_IS_TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


def _triton_load_error() -> str:
    refusal = "" if _IS_TRITON_INTERPRETED else cuda.gpu_refusal()
    if refusal:
        return refusal
    if not importlib.util.find_spec("triton"):
        return "triton is not installed"
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not (_IS_TRITON_INTERPRETED or has_compiler):
        return "triton finds no C compiler; install gcc or set CC"
    return ""


def _triton_library_error() -> str:
    return "" if cuda.gpu_refusal() else _triton_load_error()


def _triton_kernels() -> Kernels:
    from preact_kernels.kernels import triton

    return triton.kernels()


_SINGLE_AND_HALF = (torch.float32, *HALVES)
_TRITON_DEVICE = "cpu" if _IS_TRITON_INTERPRETED else "cuda"

# The backend that "auto" prefers on a GPU, by compute capability; others use the entry of the next
# lower one. Measured on 9.0 (bench/results), and assumed for 8.0, 8.7 and 10.0. On 8.6, 8.9 and
# 12.0, tiles of "cuda" for 3x3 convolutions do not fit in shared memory. With several GPUs, the
# current one at the first call decides for all.
FASTEST_ON_GPU = {
    (8, 0): "cuda",
    (8, 6): "triton",
    (8, 7): "cuda",
    (8, 9): "triton",
    (9, 0): "cuda",
    (10, 0): "cuda",
    (12, 0): "triton",
}


def fastest_on_gpu(capability: tuple[int, int]) -> str:
    """The backend that "auto" prefers on a GPU of this compute capability, 8.0 or later."""
    return FASTEST_ON_GPU[max(known for known in FASTEST_ON_GPU if known <= capability)]


def _prefers_triton() -> bool:
    if cuda.gpu_refusal():
        return False
    return fastest_on_gpu(torch.cuda.get_device_capability()) == "triton"


# In order of preference: "auto" selects the first that is available and serves the call.
BACKENDS = (
    Backend("cpu", cpu.kernels, ("cpu",), FLOATS, cpu.load_error, library_error=cpu.load_error),
    Backend(
        "cuda",
        cuda.kernels,
        ("cuda",),
        _SINGLE_AND_HALF,
        cuda.load_error,
        library_error=cuda.library_error,
        yields=_prefers_triton,
        is_experimental=True,
    ),
    Backend(
        "triton",
        _triton_kernels,
        (_TRITON_DEVICE,),
        _SINGLE_AND_HALF,
        _triton_load_error,
        library_error=_triton_library_error,
        only_by_name=_IS_TRITON_INTERPRETED,
        is_experimental=not _IS_TRITON_INTERPRETED,
    ),
    Backend("reference", reference.kernels, (), FLOATS, lambda: ""),
)

_by_name = {backend.name: backend for backend in BACKENDS}
_default = "auto"  # of `set_backend`
# Of `use_backend`; None: the default. A new thread begins with None, an asyncio task with the value
# of the code that created it, a thread of autograd with the value of the code that called it.
_in_context: ContextVar[str | None] = ContextVar("preact_kernels_backend", default=None)
# Backends of the `use_backend`s that have not ended, in all threads, in order. Threads of autograd
# that do not know the code that called them take the last one.
_entered: dict[object, str] = {}


def available_backends() -> tuple[str, ...]:
    """Names of the backends that this machine can run, `"reference"` first.

    Returns:
        For example `("reference", "cpu")`, or `("reference", "triton", "cuda", "cpu")` with a GPU.
    """
    return tuple(b.name for b in reversed(BACKENDS) if b.is_available())


def _validated(name: str) -> str:
    if name != "auto" and name not in _by_name:
        known = ", ".join(repr(n) for n in ("auto", *_by_name))
        raise ValueError(f"backend: expected one of {known}, got {name!r}")
    if name != "auto" and not _by_name[name].is_available():
        usable = ", ".join(repr(n) for n in available_backends())
        reason = _by_name[name].load_error()
        raise BackendError(
            f"backend {name!r} is not available here ({reason}); available: {usable}"
        )
    return name


def set_backend(name: str) -> None:
    """Selects the backend of all following calls; `"auto"` selects the fastest for each call.

    The selection holds in all threads. Inside of `use_backend` it holds until the end of the block.

    Args:
        name: one of `available_backends()`, or `"auto"`.

    Raises:
        ValueError: no backend has that name.
        BackendError: the backend cannot run on this machine.
    """
    global _default
    name = _validated(name)
    # Dynamo traces no context variables.
    if torch.compiler.is_compiling() or _in_context.get() is None:
        _default = name
    else:
        _in_context.set(name)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Context manager that selects the backend of all calls inside.

    The backward of a call runs on the backend that ran its forward. Other threads and asyncio tasks
    that run at the same time keep theirs. A task that is created inside begins with this backend, a
    thread with the backend of `set_backend`. A backward that is called inside has this backend in
    all of its threads; docs/backends.md names exceptions. Inside of a compiled function this has no
    effect: use it around the call.

    Args:
        name: one of `available_backends()`, or `"auto"`.

    Raises:
        ValueError: no backend has that name.
        BackendError: the backend cannot run on this machine.
    """
    name = _validated(name)
    if torch.compiler.is_compiling():
        yield
        return
    previous, own = _in_context.get(), object()
    _in_context.set(name)
    _entered[own] = name
    try:
        yield
    finally:
        del _entered[own]
        _in_context.set(previous)  # not by a token: a generator may end in another context


def _refusal(
    backend: Backend, device_type: str, dtype: torch.dtype, arguments: tuple[str, str] = ("x", "x")
) -> str | None:
    """Why a backend does not serve a device and a dtype; `arguments` names the two."""
    if backend.device_types and device_type not in backend.device_types:
        served = " or ".join(backend.device_types)
        return f"{arguments[0]}: expected a tensor on {served}, got {device_type}"
    if dtype not in backend.dtypes:
        names = ", ".join(map(checks.dtype_name, backend.dtypes))
        return f"{arguments[1]}: expected dtype {names}, got {checks.dtype_name(dtype)}"
    return None


def _serving(
    name: str, device_type: str, dtype: torch.dtype, arguments: tuple[str, str] = ("x", "x")
) -> Backend:
    """The backend for a device and a dtype; `name` is "auto" or the backend's.

    Raises:
        BackendError: the selected backend cannot serve the device or the dtype.
    """
    if name != "auto":
        refusal = _refusal(_by_name[name], device_type, dtype, arguments)
        if refusal:
            raise BackendError(f"backend {name!r} cannot serve this call: {refusal}")
        return _by_name[name]
    serving = [b for b in BACKENDS if not (b.only_by_name or _refusal(b, device_type, dtype))]
    missing: list[Backend] = []
    for backend in sorted(serving, key=lambda b: (b.name == "reference", b.yields())):
        if backend.is_available():
            if backend.name == "reference":  # far slower than the others
                for other in missing:
                    _warn_of_missing_library(other)
            return backend
        missing.append(backend)
    raise BackendError(f"no backend serves dtype {dtype} on {device_type}")


_BUILD = "`pip install -v --no-build-isolation --force-reinstall --no-deps .` in the sources"
_REMEDIES = {
    "cpu": f" Install a wheel, or run {_BUILD}.",
    "cuda": f" Where nvcc is installed, run {_BUILD}.",
}


@functools.cache
def _warn_of_missing_library(backend: Backend) -> None:
    """Warns once that a compiled library would have served a call."""
    if error := backend.library_error():
        warnings.warn(
            f"preact_kernels: the backend {backend.name!r} is not available ({error}), and a "
            f"slower one runs instead.{_REMEDIES.get(backend.name, '')}",
            stacklevel=2,
        )


CHECK = "python -m preact_kernels check"


@functools.cache
def warn_of_experimental(name: str) -> None:
    """Warns once that a backend is experimental."""
    warnings.warn(
        f"preact_kernels: the backend {name!r} is experimental: not all of its tests have run on a "
        f"GPU. `{CHECK}` compares its kernels with float64 on this machine.",
        stacklevel=2,
    )


@functools.lru_cache(maxsize=256)
def select(name: str, device_type: str, dtype: torch.dtype) -> Kernels:
    """The functions of the backend that `_serving` selects."""
    backend = _serving(name, device_type, dtype)
    if backend.is_experimental:
        warn_of_experimental(backend.name)
    return backend.kernels()


def experimental_backend(device_type: str, dtype: torch.dtype) -> str:
    """The name of the backend for a device and a dtype if it is experimental, or ""."""
    try:
        backend = _serving(current(), device_type, dtype)
    except BackendError:
        return ""
    return backend.name if backend.is_experimental else ""


def _traced_refusal(unit: Unit, pixels: int | None) -> str:
    """`Kernels.refusal` of the backend that will run a traced op."""
    return conv_refusal(current(), unit, pixels)


def conv_refusal(name: str, unit: Unit, pixels: int | None) -> str:
    """`Kernels.refusal` of a backend, or of the one that "auto" selects.

    Raises:
        BackendError: the backend cannot serve the device or the dtype.
    """
    if unit.device.type == "meta":
        return schema.FAKES.refusal(unit, pixels)
    return select(name, unit.device.type, unit.dtype).refusal(unit, pixels)


_registered = schema.RegisteredKernels(_traced_refusal)
_TRACED = (FakeTensor, FunctionalTensor)


def kernels_for(x: Tensor) -> Kernels:
    """The kernels that serve `x`: a backend's, or the registered ops while tracing.

    Raises:
        BackendError: the selected backend cannot serve the device or the dtype.
    """
    if torch.compiler.is_compiling() or isinstance(x, _TRACED) or x.is_meta:
        return _registered
    name = current()
    if x.numel() == 0:  # a process of a group may have no samples
        if name != "auto":  # refuses what it would refuse with samples
            _serving(name, x.device.type, x.dtype)
        return reference.kernels()
    return select(name, x.device.type, x.dtype)


schema.register(kernels_for)


class Choice(str):
    """A backend and a convolution, such as `"cpu: PyTorch convolution"`.

    Attributes:
        reason: why the convolution is not fused, or an empty string.
    """

    reason: str

    def __new__(cls, text: str, reason: str = "") -> "Choice":
        choice = super().__new__(cls, text)
        choice.reason = reason
        return choice


def backend_for(
    conv_weight: Tensor,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Choice:
    """Returns which backend runs a BN-ReLU-Conv unit, and whether its convolution is fused.

    The convolution has no bias. Even if the result says "fused", large weights run in PyTorch's
    convolution for some sizes of x; see docs/backends.md.

    Args:
        conv_weight: `[K, C / groups, R, S]`; its values are not read.
        stride: stride of the convolution, pixels.
        padding: zeros on each side, pixels; or `"same"`, `"valid"`.
        dilation: dilation of the convolution, pixels.
        groups: number of groups of the convolution.
        dtype: dtype of the activations; None takes the dtype of `conv_weight`.
        device: device of the activations; None takes the device of `conv_weight`.

    Returns:
        For example `"cpu: fused convolution"` or `"cpu: PyTorch convolution"`. In the second case
        only batch norm and ReLU are fused, and the attribute `reason` of the string says why, for
        example `"groups: the fused convolution serves 1, got 2"`. Otherwise it is empty.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
        BackendError: the selected backend cannot serve the dtype or the device.
    """
    checks.check_metadata("conv_weight", conv_weight)
    checks.check_conv_weight(conv_weight, groups)
    conv = checks.geometry(conv_weight.shape[2:], stride, padding, dilation, groups)
    try:
        device = torch.device(conv_weight.device if device is None else device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected a device, got {device!r}") from None
    dtype = conv_weight.dtype if dtype is None else dtype
    if dtype not in FLOATS:
        names = ", ".join(map(checks.dtype_name, FLOATS))
        raise TypeError(f"dtype: expected {names} or None, got {dtype!r}")
    backend = _serving(current(), device.type, dtype, ("device", "dtype"))
    if conv is None:
        reason = (
            "padding: the fused convolution serves as many pixels on both sides of an axis, "
            f"got {padding!r}"
        )
    else:
        unit = Unit(
            conv_weight.shape,
            conv,
            device,
            dtype=dtype,
            x_dtype=dtype,
            y_dtype=dtype,
            weight_dtype=dtype,
        )
        reason = backend.kernels().refusal(unit)
    kind = "PyTorch" if reason else "fused"
    return Choice(f"{backend.name}: {kind} convolution", reason)


def current() -> str:
    """The selected backend: "auto" or a name."""
    name = _in_context.get()
    if name is None and backward_id() != -1:
        if PASSES_CONTEXTS:
            name = value_of_backward(_in_context)
        elif is_foreign_thread() and (entered := list(_entered.values())):
            name = entered[-1]
    return name or _default


def _from_environment() -> None:
    name = os.environ.get("PREACT_KERNELS_BACKEND")
    if name:
        try:
            set_backend(name)
        except (ValueError, BackendError) as error:
            raise type(error)(f"PREACT_KERNELS_BACKEND: {error}") from None


_from_environment()
