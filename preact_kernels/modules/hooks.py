"""Whether calling a module runs more than its `forward`."""

from torch import nn

from preact_kernels import torch_compat

# The methods that a call of a child runs. An attribute of the child may replace each.
_CALLED = frozenset(
    (
        *("forward", "_call_impl", "_slow_forward"),
        *("_conv_forward", "_check_input_dim", "_check_non_zero_input_channels"),
        *("units", "projection", "is_fusable", "plain_forward"),
    )
)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks of its own, or a method that replaces its class's."""
    return torch_compat.has_module_hook(module) or not _CALLED.isdisjoint(module.__dict__)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs more than its `forward`."""
    return (
        torch_compat.has_global_module_hook()
        or torch_compat.has_module_hook(module)
        or not _CALLED.isdisjoint(module.__dict__)
    )
