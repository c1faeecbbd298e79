"""Which statistics a batch norm uses: its batch's, a process group's, or the running ones."""

from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels.kernels.contract import BatchStatistics, Kernels, statistics_dtype


class Statistics(NamedTuple):
    """What one call of a batch norm normalises with."""

    mean: Tensor  # [C], statistics dtype
    var: Tensor  # [C], biased, statistics dtype
    inv_count: float  # one over the samples per channel; 0 where mean and var are constants

    def fixed_inv_count(self, training: bool, process_group) -> float | None:
        """`inv_count`; None where it follows from the shape of the tensor that is normalised.

        A backward then computes it from that tensor (`inv_count_of`). Dynamo compiles a number that
        is passed to a backward for one batch size alone.
        """
        return None if training and process_group is None else self.inv_count


def inv_count_of(x: Tensor) -> float:
    """One over the samples per channel of `x`."""
    return 1.0 / (x.shape[0] * x.shape[2] * x.shape[3])


def running_statistics(x: Tensor, running_mean: Tensor, running_var: Tensor) -> Statistics:
    """The statistics of evaluation mode, in the statistics dtype of `x`."""
    dtype = statistics_dtype(x.dtype)
    return Statistics(running_mean.to(dtype).contiguous(), running_var.to(dtype).contiguous(), 0.0)


def batch_statistics(
    kernels: Kernels, x: Tensor, process_group=None, known: BatchStatistics | None = None
) -> Statistics:
    """The statistics of the batch.

    Args:
        kernels: the backend's functions.
        x: `[N, C, H, W]`, dense NHWC.
        process_group: the batch is spread over this group (`torch.nn.SyncBatchNorm`).
        known: the statistics of `x`, where the kernel that wrote `x` returned them.
    """
    mean, var = known or kernels.bn_stats(x)
    if process_group is not None:
        count = x.shape[0] * x.shape[2] * x.shape[3]
        return _over_group(mean, var, count, process_group)
    return Statistics(mean, var, inv_count_of(x))


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
