"""Detects modules with hooks or replaced methods."""

from typing import Any

from torch import nn

from preact_kernels.activations import ACTIVATION_MODULES
from preact_kernels.norms import NORM_MODULES
from preact_kernels.torch_compat import has_global_module_hook

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _original(function: Any) -> Any:
    """The function if it is PyTorch's; a new object if the program has replaced it."""
    module = getattr(function, "__globals__", {}).get("__name__", "")
    is_original = module.startswith("torch.nn.modules.") and not hasattr(function, "__wrapped__")
    return function if is_original else object()


# The functions that PyTorch's classes call, if the program does not replace them.
_FORWARDS: dict[type, Any] = {
    kind: _original(kind.forward) for kind in (*NORM_MODULES, *ACTIVATION_MODULES, *CONVOLUTIONS)
}
_CONV_FORWARDS = {kind: _original(kind._conv_forward) for kind in CONVOLUTIONS}


def has_hooks(module: nn.Module, methods: tuple[str, ...] = ()) -> bool:
    """Whether a call of `module` runs hooks or replaced methods.

    Finds methods that an attribute of the module replaces. On classes of PyTorch it finds a
    replaced `forward`, and `_conv_forward`.

    Args:
        module: the module.
        methods: methods that `forward` calls.
    """
    own, kind = module.__dict__, type(module)
    if (  # faster than `torch_compat.has_module_hook`; runs for each child at each call
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or has_global_module_hook()
    ):
        return True
    if "forward" in own or "_call_impl" in own or "_slow_forward" in own:
        return True
    if kind in _FORWARDS and _FORWARDS[kind] is not kind.forward:
        return True
    if kind in _CONV_FORWARDS and _CONV_FORWARDS[kind] is not kind._conv_forward:
        return True
    for name in methods:  # noqa: SIM110 - faster than `any`
        if name in own:
            return True
    return False
