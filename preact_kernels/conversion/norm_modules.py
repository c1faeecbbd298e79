"""Finds modules that are norms, and modules that call one."""

import dis
import functools
import inspect
import types
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from preact_kernels.norms import NORMS

_LISTED = [norm for norm in NORMS if norm.is_listed]
_NORMS = (
    *(nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm),
    *(kind for norm in _LISTED for kind in norm.modules),
)
_FUNCTIONS = {function.__name__ for norm in _LISTED for function in norm.calls}


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm that can run fused, possibly with an activation (timm).

    These are PyTorch's norms, and modules without children that call a norm and have only
    one-dimensional parameters.
    """
    if isinstance(module, _NORMS):
        return True
    if module._modules or not _calls_norm(module):
        return False
    own = [p for p in module._parameters.values() if p is not None]
    return bool(own) and all(not is_lazy(p) and p.dim() == 1 for p in own)


def contains_norm(module: nn.Module) -> bool:
    """Whether a module or one of its submodules is a norm or calls one."""
    return any(is_norm(m) or _calls_norm(m) for m in module.modules())


def _calls_norm(module: nn.Module) -> bool:
    kind: Any = type(module)
    return _class_calls_norm(kind)


@functools.lru_cache(maxsize=1024)
def _class_calls_norm(kind: type[nn.Module]) -> bool:
    """Whether a forward reads a norm function, such as `F.group_norm`."""
    forwards = [c.__dict__["forward"] for c in kind.__mro__ if "forward" in c.__dict__]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in forwards if callable(f)]
    return any(c is not None and _reads_norm(c) for c in codes)


def _reads_norm(code: types.CodeType) -> bool:
    """Whether code reads a norm function as a global or attribute of a global, not of `self`."""
    if _FUNCTIONS.isdisjoint(code.co_names):
        return False
    is_global = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            is_global = True
        elif not name.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            is_global = False
        if is_global and instruction.argval in _FUNCTIONS:
            return True
    return False
