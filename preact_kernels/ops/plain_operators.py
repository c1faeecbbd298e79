"""Where PyTorch's own operators run in place of kernels: under tracers and transforms."""

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from preact_kernels.torch_compat import (
    FakeTensor,
    FunctionalTensor,
    is_batch_of_gradients,
    is_exporting,
    is_transformed,
)

# Kernels read the memory of these; other subclasses of Tensor define what an operator does.
# AOTAutograd traces with functional tensors.
_SERVED_TYPES = frozenset((Tensor, nn.Parameter, FakeTensor, FunctionalTensor))
_TENSOR_LIKE = (Tensor, Proxy)


def runs_plain(*tensors: Tensor | Proxy | None) -> bool:
    """Whether a call must run as PyTorch's own operators.

    That is so under `torch.func` transforms, forward-mode differentiation, `torch.jit.trace`,
    `torch.export` and `torch.fx.symbolic_trace`, and for subclasses of Tensor such as DTensor. The
    ONNX exporters trace with `torch.export` or `torch.jit.trace`. Under `torch.compile`, the
    registered ops run, except inside transforms.

    Args:
        tensors: arguments of the call. Only their types are read.
    """
    for t in tensors:
        if type(t) not in _SERVED_TYPES and isinstance(t, _TENSOR_LIKE):
            return True
    return is_transformed() or is_exporting() or torch.jit.is_tracing()


def has_mixed_dtypes(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether `x` has a half precision and any of the parameters of its batch norm float32.

    Under transforms PyTorch then gives float32 results or tangents, or an error: there such a
    batch norm must run in float32.
    """
    return x.dtype in (torch.bfloat16, torch.float16) and any(
        t is not None and t.dtype == torch.float32 for t in parameters
    )


def needs_float32_group_norm(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether a group norm in PyTorch's own operators must run in float32.

    On a GPU PyTorch refuses a half precision with float32 parameters. Of an `fx` proxy no dtype is
    known.
    """
    is_concerned = is_transformed() or (isinstance(x, Tensor) and x.is_cuda)
    return is_concerned and has_mixed_dtypes(x, *parameters)


def runs_plain_backward(dy: Tensor) -> bool:
    """Whether a backward must run as PyTorch's own operators.

    That is so where its results are differentiated again, where `runs_plain` says so, and for a
    batch of gradients (`torch.autograd.grad(..., is_grads_batched=True)`).

    Args:
        dy: the incoming gradient.
    """
    return torch.is_grad_enabled() or runs_plain(dy) or is_batch_of_gradients(dy)


def has_served_parameters(module: nn.Module) -> bool:
    """Whether kernels may read the parameters of `module` itself."""
    for t in module._parameters.values():  # no `any`, for speed: runs for every child at every call
        if type(t) not in _SERVED_TYPES and t is not None:
            return False
    return True
