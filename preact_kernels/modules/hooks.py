"""Detects modules with hooks or replaced methods."""

from torch import nn

from preact_kernels import torch_compat

# Methods that a call of a child runs, and that an attribute of the child may replace.
_CALLED = (
    *("forward", "_call_impl", "_slow_forward"),
    *("_conv_forward", "_check_input_dim", "_check_non_zero_input_channels"),
    *("_apply_instance_norm", "_get_no_batch_dim", "_handle_no_batch_input"),
    *("units", "projection", "is_fusable", "plain_forward"),
)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks, or a method that an attribute replaces."""
    if torch_compat.has_module_hook(module) or torch_compat.has_global_module_hook():
        return True
    own = module.__dict__
    for name in _CALLED:  # noqa: SIM110 - faster than `any`; runs for each child at each call
        if name in own:
            return True
    return False
