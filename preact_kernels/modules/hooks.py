"""Detects modules with hooks or replaced methods."""

from torch import nn

from preact_kernels.torch_compat import has_global_module_hook


def has_hooks(module: nn.Module, methods: tuple[str, ...] = ()) -> bool:
    """Whether a call of `module` runs hooks, or a method that an attribute replaces.

    Args:
        module: the module.
        methods: methods that `forward` calls.
    """
    own = module.__dict__
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or has_global_module_hook()
    ):
        return True
    if "forward" in own or "_call_impl" in own or "_slow_forward" in own:
        return True
    for name in methods:  # noqa: SIM110 - faster than `any`; runs for each child at each call
        if name in own:
            return True
    return False
