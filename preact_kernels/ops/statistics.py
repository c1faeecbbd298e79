"""Statistics of norms, sums that share them, and the update of running statistics."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from preact_kernels import call_stack, torch_compat
from preact_kernels.kernels.contract import (
    Kernels,
    Norm,
    Statistics,
    samples_of,
    statistics_dtype,
)
from preact_kernels.ops import checks


def affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, channels: int
) -> tuple[Tensor, Tensor]:
    """Weight and bias `[C]`, or ones and zeros, in the statistics dtype of `x`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if weight is None:
        weight = torch.ones(channels, dtype=dtype, device=x.device)
    if bias is None:
        bias = torch.zeros(channels, dtype=dtype, device=x.device)
    if weight.dtype != dtype or not weight.is_contiguous():
        weight = weight.to(dtype).contiguous()
    if bias.dtype != dtype or not bias.is_contiguous():
        bias = bias.to(dtype).contiguous()
    return weight, bias


# 1 / samples per channel: with a process group, a tensor on the device that the host does not read.
InvCount = float | Tensor


def inv_count_of(x: Tensor, fixed: Any = None) -> Any:
    """1 / samples per channel of `x`, unless fixed.

    It is fixed if it does not follow from the shape of `x`: 0 in evaluation mode, and an `InvCount`
    of all processes with a process group. Otherwise the backward computes it from `x`: Dynamo would
    recompile for each value of a number that the forward passes to the backward.
    """
    # A process of a group may have no samples.
    return 1.0 / (samples_of(x.shape) or 1) if fixed is None else fixed


def inv_count_of_sums(fixed: InvCount | None) -> float | None:
    """The fixed `inv_count` of the backward's sums, which `sums_over_group` scales to this rank."""
    return None if isinstance(fixed, Tensor) else fixed


def running_statistics(x: Tensor, running_mean: Tensor, running_var: Tensor) -> Statistics:
    """The running statistics, in the statistics dtype of `x`."""
    checks.check_constant("running_mean", running_mean)
    checks.check_constant("running_var", running_var)
    dtype = statistics_dtype(x.dtype)
    return Statistics(running_mean.to(dtype).contiguous(), running_var.to(dtype).contiguous())


def batch_statistics(
    kernels: Kernels, x: Tensor, process_group=None, known: Statistics | None = None
) -> tuple[Statistics, Tensor | None]:
    """The statistics of the batch, and their fixed `inv_count` (see `inv_count_of`).

    Args:
        kernels: the backend's functions.
        x: `[N, C, H, W]`, dense NHWC.
        process_group: the group that shares the statistics (`torch.nn.SyncBatchNorm`).
        known: the statistics of `x`, if the kernel that wrote `x` returned them.
    """
    statistics = known or kernels.bn_stats(x)
    if process_group is None:
        return statistics, None
    return _over_group(statistics, samples_of(x.shape), process_group)


def _over_group(local: Statistics, count: int, process_group) -> tuple[Statistics, Tensor]:
    """Merges the statistics of all ranks, weighted by their counts (Chan et al., 1979).

    The host reads nothing, unless this rank has no samples.
    """
    mean, var = local
    row = torch.cat((mean, var, mean.new_full((1,), count, dtype=torch.double)))  # of doubles
    size = torch.distributed.get_world_size(process_group)
    table = row.new_empty(size * row.numel())
    torch_compat.all_gather_single(table, row, group=process_group)
    table = table.view(size, -1)
    counts, channels = table[:, -1:], mean.numel()
    total = counts.sum()
    if count == 0 and not total:
        raise ValueError("x: expected samples in a process of the group, got empty batches in all")
    table = table.where(counts > 0, 0.0)  # statistics of an empty batch are NaN
    means, variances = table[:, :channels], table[:, channels:-1]
    merged_mean = (means * counts).sum(0) / total
    merged_var = ((variances + (means - merged_mean) ** 2) * counts).sum(0) / total
    return Statistics(merged_mean.to(mean), merged_var.to(var)), total.reciprocal()


def sums_over_group(sums: Tensor, count: int, process_group) -> Tensor:
    """`count / total` times the sums of all ranks, for the gradient of the input.

    `count` and `total` are the samples per channel of this rank and of all ranks. The host does not
    know `total`, so the step's `inv_count` is `1 / count`. Without a group, returns `sums`.
    """
    if process_group is None:
        return sums
    row = torch.cat((sums.flatten(), sums.new_full((1,), count)))
    torch.distributed.all_reduce(row, group=process_group)
    return (row[:-1] / (row[-1] / count)).view_as(sums)


def step_sums(sums: Tensor, norm: Norm, count: int, process_group) -> Tensor:
    """The sums of a batch norm's affine step: pooled if the norm has rows (see `contract`).

    Args:
        sums: `Gradients.sums`.
        norm: the norm.
        count: samples per channel of this process.
        process_group: the group that shares the statistics per channel, or None.
    """
    if sums.dim() == 2:
        return sums_over_group(sums, count, process_group)
    weighted = sums * norm.weight
    shared = sums_over_group(weighted.sum(1, keepdim=True), count, process_group)
    return shared.expand_as(weighted).contiguous()


def unbiased_factor(inv_count: Any) -> Any:
    """`m / (m - 1)`, for `m` samples per channel; 1 for one sample. An `InvCount`, as its argument.

    A biased variance times this is unbiased.
    """
    if isinstance(inv_count, Tensor):
        return torch.where(inv_count < 1, 1 / (1 - inv_count), 1.0)
    return 1.0 / (1.0 - inv_count) if inv_count < 1 else 1.0


class Updated(Protocol):
    """What `update_running_statistics` reads of a norm; see `norms.NormArguments`."""

    @property
    def running_mean(self) -> Tensor | None: ...
    @property
    def running_var(self) -> Tensor | None: ...
    @property
    def momentum(self) -> float | None: ...
    @property
    def batch_count(self) -> Tensor | None: ...


def update_running_statistics(
    kernels: Kernels,
    norms: Sequence[Updated],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    factors: Sequence[InvCount] | None = None,
) -> None:
    """Updates running statistics, and counts the batch, in place.

    `running = (1 - momentum) * running + momentum * batch`, in one call per momentum, or one by one
    if norms share buffers. Only this function writes the buffers of batch norms. It does nothing
    while `torch.utils.checkpoint` runs a forward again.

    Args:
        kernels: the backend's functions.
        norms: the arguments of norms in training mode.
        means: batch mean for each norm; empty for an empty batch, which is only counted.
        variances: batch variance for each norm.
        factors: `unbiased_factor` of each variance; None: the variances are unbiased.
    """
    if not torch.compiler.is_compiling() and call_stack.is_recomputing():
        return
    _check_running(norms)  # all before any is written
    if len(norms) > 1 and _share_buffers(norms):
        for index, bn in enumerate(norms):
            one = slice(index, index + 1)
            some = None if factors is None else factors[one]
            update_running_statistics(kernels, [bn], means[one], variances[one], some)
        return
    by_momentum: dict[float, tuple[list[Tensor], list[Tensor], list[float]]] = {}
    counts = []
    for index, bn in enumerate(norms):
        if bn.batch_count is not None:
            counts.append(bn.batch_count)
        if not means or bn.running_mean is None or bn.running_var is None:
            continue
        variance, factor = variances[index], 1.0 if factors is None else factors[index]
        if isinstance(factor, Tensor) or bn.momentum is None:
            variance, factor = variance * factor, 1.0
        running, batch = [bn.running_mean, bn.running_var], [means[index], variance]
        if bn.momentum is None:
            _average_cumulatively(running, batch, cast(Tensor, bn.batch_count))
            continue
        targets, values, of_values = by_momentum.setdefault(bn.momentum, ([], [], []))
        targets.extend(running)
        values.extend(batch)
        of_values.extend((1.0, factor))
    for momentum, (targets, values, of_values) in by_momentum.items():
        kernels.norm_buffers_update(targets, values, momentum, of_values, counts)
        counts = []
    if counts:
        torch_compat.foreach_add_(counts, 1)


class Update(NamedTuple):
    """The statistics of a batch, for the running statistics of a norm."""

    kernels: Kernels
    norm: Any  # `NormArguments`
    mean: Tensor | None  # None: the batch is empty, and only counted
    var: Tensor | None
    factor: InvCount  # `unbiased_factor`


def update_all(updates: Sequence[Update]) -> None:
    """`update_running_statistics`, in one call for norms on the same kernels, device and dtype."""
    groups: dict[Any, list[Update]] = {}
    for update in updates:
        mean = update.mean
        kind = None if mean is None else (mean.device, mean.dtype)
        groups.setdefault((id(update.kernels), kind), []).append(update)
    for group in groups.values():
        kernels, norms = group[0].kernels, [u.norm for u in group]
        if group[0].mean is None:
            update_running_statistics(kernels, norms, [], [])
            continue
        means, variances = ([cast(Tensor, u[i]) for u in group] for i in (2, 3))
        update_running_statistics(kernels, norms, means, variances, [u.factor for u in group])


def _average_cumulatively(
    running: Sequence[Tensor], batch: Sequence[Tensor], count: Tensor
) -> None:
    """`running = running + (batch - running) / (count + 1)`, in place, in float64.

    Unlike PyTorch, the host does not read the count, so that a CUDA graph can capture this.
    """
    momentum = 1 / (count.double() + 1)
    for r, b in zip(running, batch, strict=True):
        share = momentum.to(r.device)
        r.copy_(share * b.double() + (1 - share) * r.double())


def _check_running(norms: Sequence[Updated]) -> None:
    vectors: list[Tensor] = []
    for bn in norms:
        if bn.running_mean is not None and bn.running_var is not None:
            vectors += (bn.running_mean, bn.running_var)
    if all([t.is_contiguous() and not t.requires_grad for t in vectors]):
        return  # faster than the same checks one by one
    for index, t in enumerate(vectors):
        checks.check_running("running_var" if index % 2 else "running_mean", t)


def _share_buffers(norms: Sequence[Updated]) -> bool:
    """Whether norms share a running mean, or a counter of batches that an average reads."""
    buffers: list[Tensor] = []
    for bn in norms:
        if bn.running_mean is not None:
            buffers.append(bn.running_mean)
        if bn.momentum is None and bn.batch_count is not None:
            buffers.append(bn.batch_count)
    return len(set(buffers)) < len(buffers)
