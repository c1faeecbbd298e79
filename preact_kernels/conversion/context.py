"""PyTorch's modes when an operation was recorded, restored when it runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from preact_kernels import torch_compat
from preact_kernels.ops import dispatch
from preact_kernels.ops.autocast import has_autocast


def _autocast_dtype(kind: str) -> torch.dtype | None:
    is_cast = has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else None


class Context(NamedTuple):
    """Modes that change what an operation computes or saves for backward."""

    device: torch.device
    has_grad: bool
    is_inference: bool
    autocast_dtype: torch.dtype | None  # None: autocast is off
    saved_tensor_hooks: tuple[Callable, Callable] | None  # pack and unpack
    backend: str
    stream: Any  # CUDA stream; None on a CPU

    @staticmethod
    def current(device: torch.device) -> "Context":
        """Returns the modes of this thread for tensors on `device`."""
        return Context(
            device,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _autocast_dtype(device.type),
            torch_compat.top_saved_tensor_hooks(),
            dispatch.current(),
            torch.cuda.current_stream(device) if device.type == "cuda" else None,
        )

    def is_current(self) -> bool:
        """Whether this thread is in these modes, ignoring the hooks of saved tensors."""
        if (
            torch.is_grad_enabled() is not self.has_grad
            or torch.is_inference_mode_enabled() is not self.is_inference
            or dispatch.current() != self.backend
        ):
            return False
        may_cast = torch_compat.is_any_autocast_enabled() or self.autocast_dtype is not None
        if may_cast and _autocast_dtype(self.device.type) != self.autocast_dtype:
            return False
        return self.stream is None or torch.cuda.current_stream(self.device) == self.stream

    def entered_in_backward(self) -> contextlib.AbstractContextManager:
        """Enters these modes, but keeps the current hooks of saved tensors."""
        hooks = torch_compat.top_saved_tensor_hooks()
        return self._replace(saved_tensor_hooks=hooks).entered()

    @contextlib.contextmanager
    def entered_above_autograd(self) -> Iterator[None]:
        """Enters these modes; autograd records operations even in `__torch_dispatch__`."""
        is_cast = self.autocast_dtype is not None
        is_below = self.is_inference or not self.has_grad
        kind = self.device.type if is_cast else None
        above = contextlib.nullcontext() if is_below else torch_compat.above_autograd(kind)
        with above, self.entered():
            yield

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        now = Context.current(self.device)
        if now == self:
            yield
            return
        kind = self.device.type
        with contextlib.ExitStack() as stack:
            if now.is_inference != self.is_inference:
                stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.has_grad))
            if now.autocast_dtype != self.autocast_dtype:
                enabled = self.autocast_dtype is not None
                stack.enter_context(torch.autocast(kind, self.autocast_dtype, enabled=enabled))
            if now.saved_tensor_hooks != self.saved_tensor_hooks:
                hooks = self.saved_tensor_hooks
                stack.enter_context(torch_compat.saved_tensor_hooks_of(hooks))
            if now.backend != self.backend:
                stack.enter_context(dispatch.use_backend(self.backend))
            if now.stream != self.stream:
                self.stream.wait_stream(now.stream)
                stack.enter_context(torch.cuda.stream(self.stream))
                stack.callback(now.stream.wait_stream, self.stream)
            yield
