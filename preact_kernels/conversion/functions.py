"""Tables of PyTorch functions that only read metadata, or that write to their arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels import torch_compat

# Functions that read no values.
METADATA_FUNCTIONS: tuple[Callable, ...] = (
    Tensor.__len__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.is_signed,
    Tensor.ndimension,
    Tensor.nelement,
    Tensor.numel,
    Tensor.size,
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn"),
            *("is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xla"),
            *("itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
        )
    ),
)

# Functions that expose the memory of a tensor, which other code may then change.
_EXPOSING = {"__array__", "__dlpack__", "data_ptr", "numpy", "storage", "untyped_storage"}
_IN_PLACE_NAMES = {
    *("__delitem__", "__set__", "__setitem__"),
    *(f"__i{n}__" for n in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")),
    *(f"__i{n}__" for n in ("and", "or", "xor", "lshift", "rshift", "matmul")),
}
_DATA = vars(torch._C.TensorBase)["data"].__get__
# Functions that update running statistics.
_UPDATING = {
    F.batch_norm,
    F.instance_norm,
    torch.batch_norm,
    torch.instance_norm,
    torch.native_batch_norm,
}


def exposes(func: Callable) -> bool:
    """Whether a function gives access to memory that then changes without a new version."""
    return func == _DATA or getattr(func, "__name__", "") in _EXPOSING


def is_write(func: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether a call may change an argument in place."""
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    always, position = _known(func)
    return always or (position is not None and len(args) > position and bool(args[position]))


@functools.lru_cache(maxsize=4096)
def _known(func: Any) -> tuple[bool, int | None]:
    """Returns whether `func` always writes, and the position of its argument `inplace`."""
    name = getattr(func, "__name__", "")
    writes = (
        name in _IN_PLACE_NAMES
        or name in _EXPOSING
        or func in _UPDATING
        or (name.endswith("_") and not name.endswith("__"))
        or torch_compat.is_mutable_operator(func)
    )
    if writes or not inspect.isfunction(func):
        return writes, None
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return False, None
    return False, names.index("inplace") if "inplace" in names else None
