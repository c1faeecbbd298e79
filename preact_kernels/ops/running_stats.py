"""The update of running statistics: the one place that writes a batch norm's buffers."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.kernels.contract import Kernels
from preact_kernels.ops.bn_stats import Statistics


class RunningStatistics(NamedTuple):
    """Buffers of one batch norm that follow its batches."""

    mean: Tensor | None  # None: only the batches are counted
    var: Tensor | None  # unbiased
    momentum: float | None  # None: the cumulative average, which needs `batch_count`
    batch_count: Tensor | None = None  # `num_batches_tracked`


class UnbiasedStatistics(NamedTuple):
    """Mean and unbiased variance of a batch, which running statistics follow."""

    mean: Tensor
    var: Tensor


def unbiased(statistics: Sequence[Statistics]) -> list[UnbiasedStatistics]:
    """Variances times `m / (m - 1)`, for `m` samples per channel."""
    if not statistics:
        return []
    factors = [1.0 / (1.0 - s.inv_count) if s.inv_count < 1 else 1.0 for s in statistics]
    variances = torch_compat.foreach_mul([s.var for s in statistics], factors)
    return [UnbiasedStatistics(s.mean, v) for s, v in zip(statistics, variances, strict=True)]


def update(
    kernels: Kernels,
    running: Sequence[RunningStatistics | None],
    batch: Sequence[UnbiasedStatistics | None],
) -> None:
    """Moves running statistics towards those of the batch, and counts the batch, in place.

    `running = (1 - momentum) * running + momentum * batch`, as few calls as the momenta allow.
    Does nothing while a backward runs this forward again (`torch.utils.checkpoint`): the batch
    was counted the first time.

    Args:
        kernels: the backend's functions.
        running: one for each batch norm that used its batch; None where nothing is tracked.
        batch: the statistics of each of these; None for an empty batch, which is only counted.
    """
    tracked = [(r, b) for r, b in zip(running, batch, strict=True) if r is not None]
    if not tracked or _is_recomputation():
        return
    by_momentum: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    for r, b in tracked:
        if b is None or r.mean is None or r.var is None:
            continue
        if r.momentum is None:  # traced: a number that is not known, and so no key
            momentum = 1.0 / (float(cast(Tensor, r.batch_count)) + 1.0)
            kernels.running_stats_update([r.mean, r.var], [b.mean, b.var], momentum)
            continue
        targets, values = by_momentum.setdefault(r.momentum, ([], []))
        targets.extend((r.mean, r.var))
        values.extend(b)  # Dynamo of torch 2.11 does not trace `+=` with a named tuple
    for momentum, (targets, values) in by_momentum.items():
        kernels.running_stats_update(targets, values, momentum)
    counts = [r.batch_count for r, _ in tracked if r.batch_count is not None]
    if counts:
        torch_compat.foreach_add_(counts, 1)


def _is_recomputation() -> bool:
    """Whether this forward is run by a backward."""
    return not torch.compiler.is_compiling() and torch_compat.is_in_backward()
