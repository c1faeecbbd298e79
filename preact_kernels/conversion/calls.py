"""Calls of converted modules: hooks open a region before the outermost call and close it after."""

import contextlib
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from preact_kernels import call_stack, torch_compat
from preact_kernels.activations import Activation
from preact_kernels.conversion import rules, user_modules
from preact_kernels.conversion.containers import replaced, tensors
from preact_kernels.conversion.deferred import Deferred, compute
from preact_kernels.conversion.garbage import raise_threshold, restore_threshold
from preact_kernels.conversion.named_activations import ActivationForward
from preact_kernels.conversion.norm_modules import is_norm
from preact_kernels.conversion.owners import Owners
from preact_kernels.conversion.region import Region
from preact_kernels.conversion.replay import Tapes
from preact_kernels.conversion.report import Outcome
from preact_kernels.conversion.tape import is_constant
from preact_kernels.conversion.user_modules import Conversion, ReplacedForward
from preact_kernels.ops import dispatch

# Outcomes of the last call of each norm.
outcomes: weakref.WeakKeyDictionary[nn.Module, list[Outcome]] = weakref.WeakKeyDictionary()
# `Owners` by the module that opened a region.
_owners: weakref.WeakKeyDictionary[nn.Module, Owners] = weakref.WeakKeyDictionary()
_tapes: weakref.WeakKeyDictionary[nn.Module, Tapes] = weakref.WeakKeyDictionary()
_unfused: "weakref.WeakKeyDictionary[nn.Module, _Unfused]" = weakref.WeakKeyDictionary()


class _Call(NamedTuple):
    """A converted module that is running."""

    module: nn.Module
    region: Region
    is_outermost: bool  # whether it opened the region
    frame: types.FrameType | None  # frame that called the module
    outer_memory: str  # memory mode to restore
    handles: list[Any]  # each undoes a change of a child by `remove()`
    plain_key: Any = None  # of the call, if it opened the region; see `_Unfused`


class _Calls(threading.local):
    """The converted modules that are running on this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []
        # The module that runs plain, since nothing in it runs fused, and the frame that called it.
        self.plain: tuple[nn.Module, Any] | None = None


class _Unfused:
    """Which calls of a model ran nothing fused, so that later ones need no region.

    A call is tried again now and then, since a forward may depend on what `_plain_key` leaves out.
    """

    FIRST, LAST = 64, 512  # calls that run plain before one is tried again; twice as many later
    KEYS = 16

    def __init__(self) -> None:
        self.may_run_plain = False  # whether the last call ran nothing fused
        # By key: how many calls still run plain, and how many after the next one that is tried.
        self._calls: dict[Any, tuple[int, int]] = {}

    def runs_plain(self, key: Any) -> bool:
        """Whether to run a call plain; counts it."""
        left, following = self._calls.get(key, (0, 0))
        if left:
            self._calls[key] = left - 1, following
        return left > 0

    def note(self, key: Any, has_fused: bool) -> None:
        """Notes whether a call ran anything fused; None for the key: it had none."""
        self.may_run_plain = not has_fused
        if key is None:
            return
        if has_fused:
            self._calls.pop(key, None)
        elif key in self._calls or len(self._calls) < self.KEYS:
            _, count = self._calls.get(key, (0, self.FIRST))
            self._calls[key] = count, min(2 * count, self.LAST)


def _plain_key(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Describes a call for `_Unfused`: its arguments, the modes, and all modules; None: it cannot.

    Modules count with their class, flag `training`, conversion, hooks and frozen parameters.
    """
    key: list[Any] = [*kwargs]
    for value in (*args, *kwargs.values()):
        if type(value) is torch.Tensor and value.layout == torch.strided:
            key.append((value.shape, value.stride(), value.dtype, value.device))
            key.append(value.requires_grad)
        elif is_constant(value):
            key.append(repr(value))
        else:
            return None
    waiting, seen = [module], {id(module)}  # faster than `module.modules()`, which makes names
    while waiting:
        m = waiting.pop()
        training = getattr(m, "training", None)  # a frozen ScriptModule has none
        key += (id(m), type(m), training, id(user_modules.conversion_of(m)))
        if torch_compat.has_module_hook(m):
            key.append("hooks")
        for p in m._parameters.values():
            key.append(p is None or p.requires_grad)
        for child in m._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    key += (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dispatch.current())
    key.append(torch_compat.is_any_autocast_enabled())
    return tuple(key)


_NO_MODES = 0, None, False, -1  # as `torch_compat.current_modes`
_calls = _Calls()


def _may_be_in_checkpoint() -> bool:
    """Whether a call may be the forward or the recomputation of a checkpoint."""
    return torch_compat.current_modes() != _NO_MODES or torch_compat.is_in_backward()


def is_inert() -> bool:
    """Whether PyTorch traces or transforms the running code, or global module hooks exist."""
    return (
        torch.jit.is_tracing()
        or torch_compat.is_exporting()
        or torch_compat.is_transformed()
        or torch_compat.has_global_module_hook()
        or torch_compat.has_function_mode(Region)
    )


def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Runs before each forward of a converted module; the outermost module opens a region."""
    if torch.compiler.is_compiling() or not user_modules.has_leave_hook(module):
        return
    if _calls.plain is not None:
        if call_stack.is_running(_calls.plain[1]):
            return
        _calls.plain = None  # an interrupt skipped `leave`
    abandon_interrupted()
    stack, frame = _calls.stack, call_stack.caller_of(enter.__code__)
    conversion, plain_key = user_modules.conversion_of(module), None
    is_outermost = not stack or not stack[-1].region.is_recording()
    if not is_outermost:
        region = stack[-1].region
    elif is_inert():
        return
    else:
        conversion = conversion or Conversion()
        if conversion.memory == "store" and not _may_be_in_checkpoint():
            unfused = _unfused.setdefault(module, _Unfused())
            plain_key = _plain_key(module, args, kwargs) if unfused.may_run_plain else None
            if plain_key is not None and unfused.runs_plain(plain_key):
                _calls.plain = module, frame
                return
        owners = _owners.get(module)
        if owners is None:
            owners = _owners[module] = Owners(module)
        owners.start()
        region = Region(
            conversion.memory,
            owners,
            conversion.run_stage,
            conversion.extra_types,
            activations=conversion.activations,
        )
        if not torch_compat.is_in_backward():  # not in a checkpoint's recomputation
            key = conversion.activations, conversion.extra_types, torch.get_num_threads()
            has_hooks = torch_compat.top_saved_tensor_hooks() is not None
            tapes = _tapes.setdefault(module, Tapes())
            region.replay = tapes.start(region, (*key, region.is_distributed, has_hooks))
        region.__enter__()
        region.frame = frame
    handles = _hook_children(module, region.activations.modules)
    if region.is_distributed:
        for norm in module._modules.values():
            if type(norm) is nn.SyncBatchNorm:
                handles.append(ReplacedForward(norm, rules.SyncForward(region, norm)))
    stack.append(_Call(module, region, is_outermost, frame, region.memory, handles, plain_key))
    if is_outermost:
        raise_threshold()
    if conversion is not None:
        region.memory = conversion.memory
        region.saves_less |= conversion.memory != "store"
    if not is_outermost and _has_other_hooks(module):
        _make_plain((*args, *kwargs.values()), "a hook")


def leave(module: nn.Module, args: tuple, output: Any) -> Any:
    """Runs after each forward of a converted module, also if it raised."""
    stack = _calls.stack
    if _calls.plain is not None and _calls.plain[0] is module:
        _calls.plain = None
        return None
    if torch.compiler.is_compiling() or not stack:
        return None
    if stack[-1].module is not module and all(c.module is not module for c in stack):
        return None
    # A checkpoint ends its recomputation with an exception once it has all saved tensors.
    is_stopped = output is None and call_stack.is_recomputing()
    while stack[-1].module is not module:
        _close(stack.pop(), is_stopped)
    call = stack.pop()
    _close(call, is_stopped, has_returned=output is not None)
    if not call.is_outermost and _has_other_hooks(module):
        _make_plain(output, "a hook")
    if call.is_outermost or isinstance(output, Deferred):
        plain = _with_values(output)
        return None if plain is output else plain
    return None


def _with_values(output: Any) -> Any:
    """Replaces deferred tensors that could not become plain tensors by their values."""
    return replaced(lambda t: t.preact_node.result if isinstance(t, Deferred) else t, output)


def _close(call: _Call, is_stopped: bool = False, has_returned: bool = False) -> None:
    try:
        _end(call, is_stopped, has_returned)
    finally:
        if call.is_outermost:
            restore_threshold()


def _end(call: _Call, is_stopped: bool, has_returned: bool) -> None:
    for handle in call.handles:
        handle.remove()
    call.region.memory = call.outer_memory
    if not call.is_outermost:
        return
    call.region.__exit__(None, None, None)
    call.region.frame = None
    if is_stopped:
        call.region.replay = None
        return
    conversion = user_modules.conversion_of(call.module)
    try:
        call.region.finish("the end of the model")
        if call.region.replay is not None and has_returned:
            call.region.replay.commit()
        if has_returned and call.module in _unfused:
            has_fused = call.region.saves_less or any(o.into for _, o in call.region.outcomes)
            _unfused[call.module].note(call.plain_key, has_fused)
        if conversion is not None and conversion.note_work is not None:
            conversion.note_work(call.region.recomputation.work)
    finally:
        call.region.replay = None  # they refer to each other
        found: dict[nn.Module, list[Outcome]] = {}
        for module, outcome in call.region.outcomes:
            if module is not None:
                found.setdefault(module, []).append(outcome)
        outcomes.update(found)


def forget(module: nn.Module) -> None:
    """Drops what was remembered of the regions that a module opened."""
    _owners.pop(module, None)
    _tapes.pop(module, None)
    _unfused.pop(module, None)
    restore_threshold()  # in a forward: the hook that ends the call is gone


def _hook_children(module: nn.Module, activations: Mapping[type, Activation]) -> list[Any]:
    """Adds hooks to children that need ordinary tensors, and replaces named activations.

    Inputs and results of children with backward hooks are computed, as the hooks pass them to C++.
    Children that are compiled, have fast paths or must run plain run outside of the region.
    """
    handles: list[Any] = []
    waiting, seen = list(module._modules.values()), set()
    while waiting:
        child = waiting.pop()
        if child is None or (not activations and user_modules.is_ordinary_leaf(child)):
            continue
        if id(child) in seen:
            continue
        seen.add(id(child))
        if child._compiled_call_impl is not None:
            user_modules.replace_compiled_call(child, _suspend, _resume)
        if activations and type(child) in activations:
            handles.append(ReplacedForward(child, ActivationForward(child)))
        if user_modules.is_marked(child):
            if user_modules.is_converted(child):
                user_modules.put_hooks_first(child)
            else:
                handles += _outside(child)
            continue
        if child._backward_hooks or child._backward_pre_hooks:
            handles += user_modules.add_first_hooks(child, _compute_inputs, _compute_result)
        children = child._modules
        if children and (
            isinstance(child, _WITH_FAST_PATHS) or torch_compat.is_compiled_module(child)
        ):
            handles += _outside(child)
        elif children and child._compiled_call_impl is None:
            waiting += children.values()
    return handles


def _outside(child: nn.Module) -> list[Any]:
    """Adds hooks that make a child run outside of the region."""
    return user_modules.add_last_hooks(child, _suspend, _resume)


# While functions are overridden, these modules skip fast paths that give other values for padding.
_WITH_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def _suspend(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Leaves the region before a child that needs ordinary tensors."""
    if not _calls.stack:  # a thread without a region
        return
    region = _calls.stack[-1].region
    region.suspend(module)
    _make_plain((*args, *kwargs.values()), "a module that runs plain")
    outcome = Outcome("", "it runs inside a module that is compiled, or has a fast path")
    region.outcomes += [(m, outcome) for m in module.modules() if is_norm(m)]


def _resume(module: nn.Module, args: tuple, output: Any) -> None:
    if _calls.stack:
        _calls.stack[-1].region.resume(module)


def _compute_inputs(module: nn.Module, args: tuple, kwargs: dict) -> None:
    _make_plain((*args, *kwargs.values()), "a hook")


def _compute_result(module: nn.Module, args: tuple, output: Any) -> None:
    _make_plain(output, "a hook")


def abandon_interrupted() -> None:
    """Closes calls of this thread for which an interrupt skipped `leave`."""
    stack = _calls.stack
    if not stack or call_stack.is_running(stack[-1].frame) or call_stack.is_running(stack[0].frame):
        return
    _calls.stack = []
    for call in reversed(stack):
        with contextlib.suppress(Exception):
            _close(call)


def _has_other_hooks(module: nn.Module) -> bool:
    return (
        len(module._forward_hooks) > 1
        or len(module._forward_pre_hooks) > 1
        or bool(module._backward_hooks or module._backward_pre_hooks)
    )


def _make_plain(value: Any, reader: str) -> None:
    for t in tensors([value], in_objects=True):
        if isinstance(t, Deferred):
            compute(t, reader)
