"""Which statistics a batch norm uses, and the update of its running statistics."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels.kernels.reference.bn_stats import statistics_dtype
from preact_kernels.ops import schema


class Statistics(NamedTuple):
    """What one call of a batch norm normalises with."""

    mean: Tensor  # [C], statistics dtype
    var: Tensor  # [C], biased, statistics dtype
    inv_count: float  # one over the samples a channel; 0 where mean and var are constants


def statistics_of(
    kernels,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    process_group=None,
    carried: tuple[Tensor, Tensor] | None = None,
) -> Statistics:
    """The statistics that normalise `x`.

    Args:
        kernels: the backend's functions.
        x: `[N, C, H, W]`, dense NHWC.
        running_mean: `[C]`, used in evaluation mode.
        running_var: `[C]`, used in evaluation mode.
        training: statistics of the batch, not the running ones.
        process_group: the batch is spread over this group (`torch.nn.SyncBatchNorm`).
        carried: mean and variance of `x`, where the kernel that wrote `x` yielded them.
    """
    if not training:
        dtype = statistics_dtype(x.dtype)
        running = (t.to(dtype).contiguous() for t in (running_mean, running_var))
        return Statistics(*running, 0.0)
    mean, var = carried or kernels.bn_stats(x)
    count = x.shape[0] * x.shape[2] * x.shape[3]
    if process_group is not None:
        return _over_group(mean, var, count, process_group)
    return Statistics(mean, var, 1.0 / count)


def _over_group(mean: Tensor, var: Tensor, count: int, process_group) -> Statistics:
    """Merges the statistics of all ranks, weighted by their counts (Chan et al., 1979)."""
    local = torch.cat([mean.double(), var.double(), mean.new_tensor([count], dtype=torch.double)])
    ranks = [
        torch.empty_like(local) for _ in range(torch.distributed.get_world_size(process_group))
    ]
    torch.distributed.all_gather(ranks, local, group=process_group)
    table = torch.stack([r for r in ranks if r[-1] > 0])
    channels = mean.numel()
    means, variances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    total = counts.sum()
    merged_mean = (means * counts).sum(0) / total
    merged_var = ((variances + (means - merged_mean) ** 2) * counts).sum(0) / total
    return Statistics(merged_mean.to(mean), merged_var.to(var), 1.0 / float(total))


def sums_over_group(sums: Tensor, process_group) -> Tensor:
    """`sums` of all ranks, for the coefficients of the input's gradient."""
    if process_group is None:
        return sums
    sums = sums.clone()
    torch.distributed.all_reduce(sums, group=process_group)
    return sums


def unbiased_variances(statistics: Sequence[Statistics]) -> list[Tensor]:
    """`var * m / (m - 1)`: what running variances follow."""
    if not statistics:
        return []
    factors = [1.0 / (1.0 - s.inv_count) if s.inv_count < 1 else 1.0 for s in statistics]
    return list(torch._foreach_mul([s.var for s in statistics], factors))


def is_recomputation() -> bool:
    """Whether this forward is run by a backward, which has seen its batch once before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def follow_batch(
    stats: Statistics | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
) -> None:
    """Moves one batch norm's running statistics, where it has some, towards those of its batch."""
    if stats is not None and stats.inv_count and running_mean is not None:
        (unbiased,) = unbiased_variances([stats])
        update_running_statistics(
            [(running_mean, running_var)], [(stats.mean, unbiased)], [momentum]
        )


def update_running_statistics(
    running: Sequence[tuple[Tensor, Tensor]],
    batch: Sequence[tuple[Tensor, Tensor]],
    momenta: Sequence[float],
) -> None:
    """Moves running means and variances towards those of the batch, in place.

    `running = (1 - momentum) * running + momentum * batch` for many batch norms at once, where
    `batch` holds means and unbiased variances. Does nothing when a backward runs this forward again
    (`torch.utils.checkpoint`).
    """
    if not running or is_recomputation():
        return
    by_momentum: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    for targets, values, momentum in zip(running, batch, momenta, strict=True):
        all_targets, all_values = by_momentum.setdefault(momentum, ([], []))
        all_targets.extend(targets)
        all_values.extend(values)
    kernels = schema.kernels_for(running[0][0])
    for momentum, (targets, values) in by_momentum.items():
        kernels.running_stats_update(targets, values, momentum)
