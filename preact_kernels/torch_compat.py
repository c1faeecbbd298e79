"""The oldest supported torch, and all private functions of torch that the package uses."""

import contextlib
import functools
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_overloaded_args
from torch.utils import _python_dispatch as python_dispatch
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

OLDEST_TORCH = (2, 11)  # as in pyproject.toml

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH:
    raise ImportError(
        f"preact_kernels needs torch {'.'.join(map(str, OLDEST_TORCH))} or later, "
        f"got torch {torch.__version__}"
    )

# One call, and on a GPU one launch, for a list of tensors. PyTorch has no public equivalents.
foreach_add_ = torch._foreach_add_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_neg = torch._foreach_neg
foreach_norm = torch._foreach_norm

# Layout of oneDNN's tensors.
MKLDNN = torch._mkldnn  # type: ignore[attr-defined]


def may_use_onednn() -> bool:
    """Whether PyTorch has oneDNN and the program has not disabled it."""
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


# Base class of all batch norms.
BatchNormBase = nn.modules.batchnorm._BatchNorm

# Whether a `torch.func` transform is running. PyTorch has no public equivalent.
has_functorch_transform = torch._C._are_functorch_transforms_active

# Disables `__torch_function__` of modes and of subclasses of Tensor.
disable_torch_function = torch._C.DisableTorchFunction
# The arguments with a `__torch_function__`, in the order in which PyTorch calls it.
get_overloaded_args = _get_overloaded_args
# Whether `__torch_function__` of subclasses of Tensor is enabled.
is_torch_function_enabled = torch._C._is_torch_function_enabled
# Undoes `disable_torch_function` in its body.
enable_torch_function = torch._C._EnableTorchFunction


def is_function_apply(function: object) -> bool:
    """Whether `function` is `apply` of an autograd Function: a C function since torch 2.15."""
    owner = getattr(function, "__self__", None)
    return (
        isinstance(owner, type)
        and issubclass(owner, torch.autograd.Function)
        and getattr(function, "__name__", "") == "apply"
    )


def is_opaque(target: Any) -> bool:
    """Whether a function in Dynamo's graph may call a custom autograd function, or traces code."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    module = getattr(target, "__module__", None) or "torch"  # operators have no module
    return module.partition(".")[0] not in ("torch", "_operator", "builtins", "math")


_Function = TypeVar("_Function", bound=Callable)
_Value = TypeVar("_Value")


def not_compiled(function: _Function) -> _Function:
    """Makes Dynamo skip a function and all that it calls, without importing Dynamo."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


# Whether hooks are registered for all modules: a fused module must then call its children.
has_global_module_hook = _has_any_global_hook

# Hooks of the innermost `torch.autograd.graph.saved_tensors_hooks`, or None.
top_saved_tensor_hooks = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)

# Whether hooks of saved tensors are allowed (`disable_saved_tensors_hooks` forbids them).
has_saved_tensor_hooks = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

# Whether autocast is on for any device. PyTorch has no public equivalent.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

# Whether forward-mode differentiation is allowed on this thread. PyTorch forbids it in the forward
# of an autograd Function, and in inference mode until it is allowed there.
is_forward_mode_allowed = torch._C._is_fwd_grad_enabled
allow_forward_mode = torch._C._set_fwd_grad_enabled

# The number of `TorchDispatchMode`s on this thread.
dispatch_mode_count = torch._C._len_torch_dispatch_stack


def is_transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is running."""
    return has_functorch_transform() or forward_ad._current_level >= 0


def current_modes() -> tuple[object, ...]:
    """Returns the modes of this thread in which operations do not run as plain eager code."""
    return (  # in the order of `eager_modes`
        dispatch_mode_count(),
        top_saved_tensor_hooks(),
        has_functorch_transform(),
        forward_ad._current_level,
    )


def eager_modes() -> tuple[object, ...]:
    """Returns `current_modes` without function transforms."""
    return (*current_modes()[:2], False, -1)


def has_fake_mode() -> bool:
    """Whether tensors are fake: a compiler, or `torch.export`, traces shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def without_dispatch_modes_above(count: int) -> Iterator[None]:
    """Exits all dispatch modes but the first `count`."""
    modes = []
    while dispatch_mode_count() > count:
        modes.append(python_dispatch._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            python_dispatch._push_mode(mode)


def has_function_mode(own: type) -> bool:
    """Whether a `TorchFunctionMode` other than `own` and the default device is on."""
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if not isinstance(mode, (own, DeviceContext)):
            return True
    return False


def is_innermost_function_mode(mode: object) -> bool:
    """Whether `mode` was entered last."""
    count = torch._C._len_torch_function_stack()
    return count > 0 and torch._C._get_function_stack_at(count - 1) is mode


@contextlib.contextmanager
def saved_tensor_hooks_of(hooks: tuple[Callable, Callable] | None) -> Iterator[None]:
    """Makes `hooks` the innermost hooks of saved tensors; None disables all hooks."""
    popped = []
    while (top := top_saved_tensor_hooks()) is not None and top != hooks:
        popped.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    is_pushed = hooks is not None and top is None
    if is_pushed:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    try:
        yield
    finally:
        if is_pushed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for own in reversed(popped):
            torch._C._autograd._push_saved_tensors_default_hooks(*own)


def set_hooks_of_saved_tensor(node: Any, index: int, pack: Callable, unpack: Callable) -> None:
    """Sets the hooks of a tensor that a custom function saved."""
    node._raw_saved_tensors[index].register_hooks(pack, unpack)


def without_functorch_transforms() -> contextlib.AbstractContextManager:
    """Exits running `torch.func` transforms, for tensors from outside of them."""
    if not has_functorch_transform():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


# Exchanges the tensors behind two Python objects: sizes, storages and autograd metadata.
swap_tensor_impl = torch._C._swap_tensor_impl


def exchange(a: Tensor, b: Tensor) -> bool:
    """Exchanges two tensors as `torch.utils.swap_tensors` does, but keeps weak references.

    Returns:
        Whether they were exchanged; False: code in C++ holds one of them.
    """
    if a._use_count() > 1 or b._use_count() > 1:  # type: ignore[attr-defined]
        return False
    try:
        swap_tensor_impl(a, b)
    except RuntimeError:  # the profiler, which records shapes, holds weak references in C++
        return False
    a.__class__, b.__class__ = type(b), type(a)
    # Subclasses may override `__getattribute__` and `__setattr__`.
    of_a, of_b = (object.__getattribute__(t, "__dict__") for t in (a, b))
    object.__setattr__(a, "__dict__", of_b)
    object.__setattr__(b, "__dict__", of_a)
    return True


# Creates a tensor without storage of a subclass with `__torch_dispatch__`.
make_wrapper_subclass = Tensor._make_wrapper_subclass

_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "ADInplaceOrView", "AutogradOther")
]


def above_autograd(autocast_device: str | None) -> contextlib.AbstractContextManager:
    """Makes autograd record operations inside `__torch_dispatch__`.

    Args:
        autocast_device: device type for which to enable autocast, or None.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther):
        return contextlib.nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    if autocast_device is not None:
        key = getattr(torch._C.DispatchKey, f"Autocast{autocast_device.upper()}")
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


# In-place changes do not bump versions, as in PyTorch's update of running statistics.
without_new_version = torch.autograd._unsafe_preserve_version_counter


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    process_group,
) -> Tensor:
    """Synchronised batch norm, as `nn.SyncBatchNorm` calls it in training mode on a GPU."""
    from torch.nn.modules._functions import SyncBatchNorm

    size = torch.distributed.get_world_size(process_group)
    return SyncBatchNorm.apply(
        x, weight, bias, running_mean, running_var, eps, momentum, process_group, size
    )


# Renamed in torch 2.13; missing in builds without `torch.distributed`.
all_gather_single: Any = getattr(torch.distributed, "all_gather_single", None) or getattr(
    torch.distributed, "all_gather_into_tensor", None
)


def has_module_hook(module: nn.Module) -> bool:
    """Whether hooks are registered on `module`. PyTorch has no public equivalent."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def has_amx() -> bool:
    """Whether the processor has matrix instructions for half precision."""
    return torch.cpu._is_amx_tile_supported()


def is_distributed() -> bool:
    """Whether a process group was initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def has_fsdp() -> bool:
    """Whether `fully_shard` manages a module, whose parameters it frees after each forward."""
    states = sys.modules.get("torch.distributed._composable_state")
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if states is None or fsdp is None:
        return False
    found = list(states._module_state_mapping.values())
    return any(isinstance(state(), fsdp.FSDPState) for state in found)


# Id of the backward that runs on this thread, or -1.
backward_id = torch._C._current_graph_task_id


def is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return backward_id() != -1


def is_foreign_thread() -> bool:
    """Whether Python did not create this thread, such as those of autograd."""
    return isinstance(threading.current_thread(), threading._DummyThread)


# Whether autograd passes the context of the code that calls a backward to its own threads.
PASSES_CONTEXTS = hasattr(torch._C, "_remove_obj_from_tls")  # torch 2.13


def value_of_backward(variable: ContextVar[_Value]) -> _Value | None:
    """In a backward, the value of a context variable where it was called, or None.

    Needs `PASSES_CONTEXTS`. Autograd does not enter the context in its threads. A backward that is
    called in such a thread passes on the empty context of the thread, or the value if the same
    node has asked for it before.
    """
    tls = torch._C
    if tls._is_key_in_tls(variable.name):
        return tls._get_obj_in_tls(variable.name)
    if not tls._is_key_in_tls("context"):
        return None
    value = tls._get_obj_in_tls("context").get(variable)
    if value is not None:  # for backwards inside of this one; autograd removes it with its node
        tls._stash_obj_in_tls(variable.name, value)
    return value


# Global variables of the code of checkpoints.
CHECKPOINT_GLOBALS = checkpoint.__dict__

# Codes of functions nested in the non-reentrant checkpoint; one of them runs the recomputation.
RECOMPUTATIONS = {
    code
    for code in checkpoint._checkpoint_without_reentrant_generator.__code__.co_consts
    if isinstance(code, types.CodeType)
}
# Code that runs the recomputation of a reentrant checkpoint, and then its backward.
REENTRANT_RECOMPUTATION = checkpoint.CheckpointFunction.backward.__code__

# Whether the running backward keeps the graph for another backward.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def call_after_backward(function: Callable[[], Any]) -> None:
    """Calls a function at the end of the backward that runs on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_exporting() -> bool:
    """Whether `torch.export` is running.

    Dynamo of torch 2.11 makes `torch.compiler.is_exporting()` true under `torch.compile` too.
    """
    return torch.compiler._is_exporting_flag


def is_batch_of_gradients(dy: Tensor) -> bool:
    """Whether `dy` comes from `is_grads_batched`: a legacy vmap, which `is_transformed` ignores."""
    return not torch.compiler.is_compiling() and functorch.is_legacy_batchedtensor(dy)


# A weak reference to a storage, whose id no other storage has meanwhile.
WeakStorage = StorageWeakRef


def is_shared(t: Tensor) -> bool:
    """Whether other tensors share the memory of `t`."""
    storage = t.untyped_storage()  # the second reference
    return torch._C._storage_Use_Count(storage._cdata) > 2


def storage_id(t: Tensor) -> int:
    """Returns an id of the storage of a tensor, also on the meta device."""
    return t.untyped_storage()._cdata


def end_allocation_to_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Ends allocation to the memory pool of a broken CUDA graph capture, and frees the pool."""
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # the capture may have done it
            end(device_index, pool)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `module` is the result of `torch.compile`, without importing Dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_mutable_operator(function: object) -> bool:
    """Whether `function` is an operator of `torch.ops` that changes an argument in place."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        return any(is_mutable_operator(getattr(function, n)) for n in function.overloads())
    return isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable
