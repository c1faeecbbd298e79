"""How the fused modules read an `nn.BatchNorm2d` child, and count its batches.

A child is read, never called, so a fused module stands aside (`is_bare_norm`) for a child whose
call does more than its type says: hooks, another type, a bias where none is served.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from preact_kernels.ops.bn_stats import is_recomputation, update_running_statistics


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs more than its `forward`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _has_any_global_hook()
    )


def is_bare_norm(bn: nn.Module) -> bool:
    """Whether reading the parameters of a batch norm is the same as calling it."""
    return type(bn) in (nn.BatchNorm2d, nn.SyncBatchNorm) and not has_hooks(bn)


def is_bare_conv(conv: nn.Module) -> bool:
    """Whether reading the weights of a convolution is the same as calling it."""
    return type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and not has_hooks(conv)


def uses_batch(bn: nn.Module) -> bool:
    """Whether a call of `bn` normalises with the statistics of its batch."""
    return bn.training or bn.running_mean is None


def process_group(bn: nn.Module):
    """The group over which a SyncBatchNorm child shares its statistics, or None."""
    if not (isinstance(bn, nn.SyncBatchNorm) and uses_batch(bn) and bn.training):
        return None
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    group = bn.process_group or torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def _momentum(bn: nn.Module) -> float:
    """Weight of the coming batch; the cumulative average where momentum is None."""
    if bn.momentum is not None:
        return bn.momentum
    return 1.0 / (float(bn.num_batches_tracked) + 1.0)


def bn_arguments(bn: nn.Module) -> dict:
    """The batch-norm arguments of `pk.bn_relu` and `pk.bn_relu_conv2d` for a child."""
    training = uses_batch(bn)
    tracks = not training or (bn.training and bn.track_running_stats)
    return {
        "bn_weight": bn.weight,
        "bn_bias": bn.bias,
        "running_mean": bn.running_mean if tracks else None,
        "running_var": bn.running_var if tracks else None,
        "training": training,
        "momentum": _momentum(bn) if training and tracks and bn.running_mean is not None else 0.0,
        "eps": bn.eps,
        "process_group": process_group(bn),
    }


def tracks_batches(bn: nn.Module) -> bool:
    """Whether a call of `bn` updates its running statistics."""
    return bn.training and bn.track_running_stats and bn.running_mean is not None


def count_batches(norms: Iterable[nn.Module]) -> None:
    """One more batch for every child that tracks them, unless a backward runs it again."""
    if is_recomputation():
        return
    counters = [
        bn.num_batches_tracked
        for bn in norms
        if tracks_batches(bn) and bn.num_batches_tracked is not None
    ]
    if counters:
        torch._foreach_add_(counters, 1)


def track(norms: Sequence[nn.Module], batch: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Updates running statistics and counters of the children that track, once.

    Args:
        norms: the children that normalised with their batch.
        batch: mean and unbiased variance of each of these batches.
    """
    if len(set(map(id, norms))) < len(norms):  # used more than once: in order
        for bn, stats in zip(norms, batch, strict=True):
            track([bn], [stats])
        return
    tracked = [(bn, stats) for bn, stats in zip(norms, batch, strict=True) if tracks_batches(bn)]
    update_running_statistics(
        [(bn.running_mean, bn.running_var) for bn, _ in tracked],
        [stats for _, stats in tracked],
        [_momentum(bn) for bn, _ in tracked],
    )
    count_batches(bn for bn, _ in tracked)
