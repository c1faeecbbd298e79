"""The oldest torch that works, and every private function of torch that the package uses."""

import contextlib
import re
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

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

# What `F.pad` is in a graph.
pad_functions = (nn.functional.pad, torch._C._nn.pad)

# Whether a `torch.func` transform is running. No public function says so.
has_functorch_transform = torch._C._are_functorch_transforms_active

# Whether hooks are registered for all modules: a fused module must then call its children.
has_global_module_hook = _has_any_global_hook


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


def is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_exporting() -> bool:
    """Whether `torch.export` is running.

    Dynamo of torch 2.11 makes `torch.compiler.is_exporting()` true under `torch.compile` too.
    """
    return torch.compiler._is_exporting_flag


def has_dual_level() -> bool:
    """Whether forward-mode differentiation is on. No public function says so."""
    return forward_ad._current_level >= 0


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


def fsdp_module_class() -> type | None:
    """`torch.distributed.fsdp.FSDPModule` where it was imported, else None."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_mutable_operator(function: object) -> bool:
    """Whether `function` is an operator of `torch.ops` that changes an argument."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        return any(is_mutable_operator(getattr(function, n)) for n in function.overloads())
    return isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable
