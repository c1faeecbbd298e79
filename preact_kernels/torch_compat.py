"""The oldest torch that works, and every private function of torch that the package uses."""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _python_dispatch as python_dispatch
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

# One call, and on a GPU one launch, for a list of tensors. No public function does this.
foreach_add_ = torch._foreach_add_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_neg = torch._foreach_neg
foreach_norm = torch._foreach_norm

# Base class of all batch norms; planning overrides `momentum`.
BatchNormBase = nn.modules.batchnorm._BatchNorm

# Whether a `torch.func` transform is running. No public function says so.
has_functorch_transform = torch._C._are_functorch_transforms_active

# Turns off `__torch_function__` of modes and of subclasses of Tensor.
disable_torch_function = torch._C.DisableTorchFunction

_Function = TypeVar("_Function", bound=Callable)


def not_compiled(function: _Function) -> _Function:
    """Has Dynamo run a function, and what it calls, as it is; imports no Dynamo."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


# Whether hooks are registered for all modules: a fused module must then call its children.
has_global_module_hook = _has_any_global_hook


# The hooks of the innermost `torch.autograd.graph.saved_tensors_hooks`; None without any.
top_saved_tensor_hooks = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)

# Whether autocast is on for any device. No public function says so.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


# The number of `TorchDispatchMode`s on this thread.
dispatch_mode_count = torch._C._len_torch_dispatch_stack


def has_dual_level() -> bool:
    """Whether forward-mode differentiation is on. No public function says so."""
    return forward_ad._current_level >= 0


def current_modes() -> tuple[object, ...]:
    """Modes of this thread under which operations do not run as plain eager code."""
    return (  # in the order of `eager_modes`
        dispatch_mode_count(),
        top_saved_tensor_hooks(),
        has_functorch_transform(),
        forward_ad._current_level,
    )


def eager_modes() -> tuple[object, ...]:
    """The modes of this thread, without those that transform functions."""
    return (*current_modes()[:2], False, -1)


@contextlib.contextmanager
def without_dispatch_modes_above(count: int) -> Iterator[None]:
    """Leaves the dispatch modes that were entered after the first `count`."""
    modes = []
    while dispatch_mode_count() > count:
        modes.append(python_dispatch._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            python_dispatch._push_mode(mode)


def has_function_mode(own: type) -> bool:
    """Whether a `TorchFunctionMode` of others is on, apart from a default device."""
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
    """Makes `hooks` the innermost hooks of saved tensors; None: no hooks."""
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


def without_functorch_transforms() -> contextlib.AbstractContextManager:
    """Leaves the `torch.func` transforms that are running, for tensors from outside of them."""
    if not has_functorch_transform():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


# Two objects exchange their tensors: sizes, storages and places in the autograd graph.
swap_tensor_impl = torch._C._swap_tensor_impl


def exchange(a: Tensor, b: Tensor) -> bool:
    """`torch.utils.swap_tensors`, also where objects have weak references, which stay theirs.

    Returns:
        Whether it did: not where code in C++ holds a tensor.
    """
    if a._use_count() > 1 or b._use_count() > 1:  # type: ignore[attr-defined]
        return False
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    swap_tensor_impl(a, b)
    return True


# A tensor without storage, of a subclass with `__torch_dispatch__`.
make_wrapper_subclass = Tensor._make_wrapper_subclass

_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "ADInplaceOrView", "AutogradOther")
]


def above_autograd(autocast_device: str | None) -> contextlib.AbstractContextManager:
    """Has autograd record operations inside of `__torch_dispatch__` too.

    Args:
        autocast_device: the type of a device for which autocast is on; it casts there too.
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


# Changes tensors in place without counting a version, as PyTorch's batch norm updates statistics.
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
    """What `nn.SyncBatchNorm` calls in training mode, on a GPU."""
    from torch.nn.modules._functions import SyncBatchNorm

    size = torch.distributed.get_world_size(process_group)
    return SyncBatchNorm.apply(
        x, weight, bias, running_mean, running_var, eps, momentum, process_group, size
    )


def has_module_hook(module: nn.Module) -> bool:
    """Whether hooks are registered for a call of `module`. No public function says so."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def has_amx() -> bool:
    """Whether the processor has matrix instructions for half precision."""
    return torch.cpu._is_amx_tile_supported()


def own_parameters(module: nn.Module) -> Iterable[Tensor | None]:
    """`module.parameters(recurse=False)`, without what makes that slow."""
    return module._parameters.values()


def is_distributed() -> bool:
    """Whether a process group was initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


# Whether the backward that runs keeps the graph for another one.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def call_after_backward(function: Callable[[], None]) -> None:
    """Calls a function at the end of the backward that runs on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_exporting() -> bool:
    """Whether `torch.export` is running.

    Dynamo of torch 2.11 makes `torch.compiler.is_exporting()` true under `torch.compile` too.
    """
    return torch.compiler._is_exporting_flag


def is_batch_of_gradients(dy: Tensor) -> bool:
    """Whether `is_grads_batched` made `dy`: its shape leaves out the batch.

    That is an older kind of vmap, which counts as no transform.
    """
    return not torch.compiler.is_compiling() and functorch.is_legacy_batchedtensor(dy)


def storage_id(t: Tensor) -> int:
    """A number that tensors share while they share a storage, on the meta device too."""
    return t.untyped_storage()._cdata


def end_allocation_to_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Ends allocation to the memory pool of a CUDA graph capture that broke, and frees the pool."""
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # where the capture had done it
            end(device_index, pool)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `torch.compile` made `module`; imports no Dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def fsdp_module_class() -> type | None:
    """`torch.distributed.fsdp.FSDPModule` where it was imported, else None."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_mutable_operator(function: object) -> bool:
    """Whether `function` is an operator of `torch.ops` that changes an argument."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        return any(is_mutable_operator(getattr(function, n)) for n in function.overloads())
    return isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable
