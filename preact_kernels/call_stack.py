"""Finds frames of Python's call stack by the code that they run, with the reason for each.

`Region` also reads `f_back` of the frame that entered it: None once that frame has returned.
"""

import sys
import types
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from preact_kernels import torch_compat

# Names in functions that may read all their variables, or all variables of their callers.
_READERS = frozenset(("locals", "vars", "dir", "eval", "exec"))
_READERS_OF_CALLERS = frozenset(("f_locals", "_getframe", "currentframe"))
_OPTIMIZED = 1  # CO_OPTIMIZED: code of a function, without a dictionary of variables


def caller_of(code: types.CodeType) -> types.FrameType | None:
    """Returns the frame that called the innermost running function with this code.

    Hooks of a module ask for the frame that runs it: once that has returned, an interrupt has
    skipped the hooks that end the call. Rules ask for the caller of the function that they record.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_back


def is_running(frame: types.FrameType | None) -> bool:
    """Whether this thread runs a frame: not after an interrupt, and not on another thread."""
    current: types.FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def module_of(frame: types.FrameType | None) -> nn.Module | None:
    """Returns the module with the innermost `forward` from `frame` up.

    A norm without parameters of its own is known only by its call.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            module = frame.f_locals.get(code.co_varnames[0])
            return module if isinstance(module, nn.Module) else None
        frame = frame.f_back
    return None


def self_in(frame: types.FrameType | None, codes: Container[types.CodeType]) -> Any:
    """Returns `self` of a frame that runs a method with one of these codes, or None."""
    return None if frame is None or frame.f_code not in codes else frame.f_locals["self"]


def frames_between(
    code: types.CodeType, outer: types.FrameType | None
) -> Iterator[types.FrameType]:
    """Yields the callers of a function that are below `outer` and read variables only by name.

    Their variables may hold deferred tensors that no code reads again.
    """
    frame = caller_of(code)
    while frame is not None and frame is not outer:
        names = frame.f_code.co_names
        if not _READERS_OF_CALLERS.isdisjoint(names):
            return
        if frame.f_code.co_flags & _OPTIMIZED and _READERS.isdisjoint(names):
            yield frame
        frame = frame.f_back


def line_outside(folders: tuple[str, ...]) -> tuple[str, int] | None:
    """Returns file and line of the innermost running code outside of folders, for the report."""
    frame = caller_of(line_outside.__code__)
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def is_read_by_checkpoint(code: types.CodeType) -> bool:
    """Whether code of `torch.utils.checkpoint` called the function with this code.

    PyTorch does not tell which function reads the device of a tensor.
    """
    frame = caller_of(code)
    return frame is not None and frame.f_globals is torch_compat.CHECKPOINT_GLOBALS


def is_recomputing() -> bool:
    """Whether `torch.utils.checkpoint` is running a forward again on this thread, in a backward.

    False in other forwards inside a backward, such as in custom autograd functions. PyTorch has no
    flag for it.
    """
    if not torch_compat.is_in_backward():
        return False
    frame: types.FrameType | None = sys._getframe()
    called = None  # code that `frame` called
    while frame is not None:
        code = frame.f_code
        if code in torch_compat.RECOMPUTATIONS:
            return True
        # A reentrant checkpoint runs the forward again, then its backward.
        is_reentrant = code is torch_compat.REENTRANT_RECOMPUTATION
        if is_reentrant and called is not torch.autograd.backward.__code__:
            return True
        called, frame = code, frame.f_back
    return False
