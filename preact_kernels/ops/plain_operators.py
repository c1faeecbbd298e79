"""Decides where PyTorch's operators run instead of kernels: under tracers and transforms."""

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from preact_kernels.kernels.contract import HALVES
from preact_kernels.torch_compat import (
    FakeTensor,
    FunctionalTensor,
    is_batch_of_gradients,
    is_exporting,
    is_transformed,
)

# Types of which kernels may read the memory. Other subclasses of Tensor redefine operators.
# AOTAutograd traces with functional tensors.
_SERVED_TYPES = frozenset((Tensor, nn.Parameter, FakeTensor, FunctionalTensor))
_TENSOR_LIKE = (Tensor, Proxy)


def runs_plain(*tensors: Tensor | Proxy | None) -> bool:
    """Whether a call with these tensors must run as PyTorch's operators.

    True under `torch.func` transforms, forward-mode differentiation, `torch.jit.trace`,
    `torch.export` and `torch.fx.symbolic_trace`, and for subclasses of Tensor such as DTensor. The
    ONNX exporters trace with `torch.export` or `torch.jit.trace`. Under `torch.compile`, the
    registered ops run, except inside transforms.
    """
    for t in tensors:
        if type(t) not in _SERVED_TYPES and isinstance(t, _TENSOR_LIKE):
            return True
    return is_transformed() or is_exporting() or torch.jit.is_tracing()


def has_mixed_dtypes(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether `x` is in half precision and any parameter of its norm in float32.

    Under transforms, such a norm gives float32 results or tangents, or an error in PyTorch, and so
    must run in float32.
    """
    return x.dtype in HALVES and any(t is not None and t.dtype == torch.float32 for t in parameters)


def needs_float32_group_norm(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether a group norm in PyTorch's operators must run in float32.

    On a GPU, PyTorch refuses half precision mixed with float32 parameters. The dtype of an `fx`
    proxy is unknown.
    """
    is_concerned = is_transformed() or (isinstance(x, Tensor) and x.is_cuda)
    return is_concerned and has_mixed_dtypes(x, *parameters)


def runs_plain_backward(dy: Tensor) -> bool:
    """Whether the backward of `dy` must run as PyTorch's operators.

    True if the result is differentiated again, if `runs_plain`, and for a batch of gradients
    (`torch.autograd.grad(..., is_grads_batched=True)`).
    """
    return torch.is_grad_enabled() or runs_plain(dy) or is_batch_of_gradients(dy)


def has_served_parameters(module: nn.Module) -> bool:
    """Whether kernels may read the parameters of `module`, without its children."""
    # Faster than `any` and `module._parameters`; runs for each child at each call.
    for t in module.__dict__["_parameters"].values():
        if type(t) not in _SERVED_TYPES and t is not None:
            return False
    return True
