"""Batch norms with an activation of their own: timm's `BatchNormAct2d` and `SyncBatchNormAct`."""

from torch import nn

from preact_kernels.modules.batch_norm import has_both_statistics_or_none
from preact_kernels.modules.hooks import has_hooks

_NAMES = ("BatchNormAct2d", "SyncBatchNormAct")


def has_activation(module: nn.Module) -> bool:
    """Whether `module` is a batch norm with an activation, `act`, behind a dropout, `drop`."""
    kind = type(module)
    return kind.__name__ in _NAMES and kind.__module__.startswith("timm.")


def is_norm_act(module: nn.Module) -> bool:
    """Whether a call of `module` is a batch norm and a ReLU, and nothing else."""
    if not has_activation(module):
        return False
    drop, act = module.drop, module.act
    return (
        type(drop) is nn.Identity
        and type(act) is nn.ReLU
        and has_both_statistics_or_none(module)
        and not (has_hooks(module) or has_hooks(drop) or has_hooks(act))
    )
