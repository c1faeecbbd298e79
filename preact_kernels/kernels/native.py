"""Adapters from the contract's named arguments to ops with flat arguments.

The compiled libraries and the registered ops share `FlatOps`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.kernels import running_stats
from preact_kernels.kernels.contract import (
    AffineStep,
    BlockKernels,
    BlockRun,
    BlockRunGradients,
    BlockRunOutput,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Norm,
    Output,
    Parameters,
    RunWanted,
    Statistics,
    Unit,
    Wanted,
    samples_of,
)
from preact_kernels.kernels.pytorch_conv import UnitKernels


def flat_gradient(gradient: Gradient) -> tuple:
    """`g`, then the step `skip, x, mean, var, weight, eps, sums, inv_count`, as schemas take it."""
    g, step = gradient
    if step is None:  # a literal: with dynamic shapes, Dynamo turns floats of a global into inputs
        return g, None, None, None, None, None, 0.0, None, 0.0
    skip, x, norm, sums, inv_count = step
    return g, skip, x, norm.mean, norm.var, norm.weight, norm.eps, sums, inv_count


class FlatOps(UnitKernels):
    """Functions of `Kernels` that call ops with equal schemas in all libraries.

    Schemas have no optional results: an op returns an empty tensor for each unwanted result.

    Args:
        ops: a namespace of `torch.ops`.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def bn_stats(self, x: Tensor) -> Statistics:
        return Statistics(*self._ops.bn_stats.default(x))

    def group_stats(self, x: Tensor, groups: int, bias: Tensor | None = None) -> Statistics:
        if bias is None:
            return Statistics(*self._ops.group_stats.default(x, groups))
        mean, var = self.group_stats(x.to(bias.dtype) + bias.view(-1, 1, 1), groups)
        return Statistics(mean - bias, var)

    def norm_act_forward(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return self._ops.norm_act_forward.default(x, *norm, residual)

    def norm_act_backward(
        self, dy: Tensor, x: Tensor, norm: Norm, with_g: bool, y: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        if with_g:
            return self._ops.norm_act_backward_mask.default(dy, x, *norm, y)
        return None, self._ops.norm_act_backward_sums.default(dy, x, *norm, y)

    def norm_act_recompute(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self._ops.norm_act_recompute.default(dy, x, *norm)

    def norm_input_gradient(self, gradient: Gradient, activated: bool = False) -> Tensor:
        if not activated:
            return self._ops.norm_input_gradient.default(*flat_gradient(gradient))
        dy, step = gradient
        assert step is not None
        skip, x, norm, sums, inv_count = step
        return self._ops.norm_act_backward_input.default(dy, x, *norm, sums, inv_count, skip)

    def residual_add_forward(
        self, x: Tensor, branch: Tensor, with_stats: bool, bias: Tensor | None = None
    ) -> Output:
        y, mean, var = self._ops.residual_add_forward.default(x, branch, with_stats, bias)
        return Output(y, Statistics(mean, var) if with_stats else None)


def gradients(results: tuple[Tensor, Tensor, Tensor, Tensor], wanted: Wanted) -> Gradients:
    """The results `g, sums, dconv_weight, dy` of an op, by name."""
    g, sums, dconv_weight, dy = results
    return Gradients(
        g if wanted.input else None,
        sums if wanted.input else None,
        dconv_weight if wanted.weight else None,
        dy if wanted.dy else None,
    )


class NativeKernels(FlatOps, BlockKernels):
    """A compiled library; see `BlockKernels`."""

    checks_arguments = True

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        running_stats.fast_running_stats_update(running, batch, momentum)

    def _fused_forward(self, unit: Unit, inputs: Inputs, epilogue: Epilogue) -> Output:
        x, norm, conv_weight = inputs
        op = self._ops.norm_act_conv_forward.default
        y, mean, var = op(x, *norm, conv_weight, unit.conv.stride, *epilogue, unit.dtype)
        return Output(y, Statistics(mean, var) if epilogue.with_stats else None)

    def _fused_backward(
        self, unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted
    ) -> Gradients:
        x, norm, conv_weight = inputs
        op = self._ops.norm_act_conv_backward.default
        given = *flat_gradient(dy), x, *norm, conv_weight, unit.conv.stride
        return gradients(op(*given, *wanted[:3], unit.dtype), wanted)

    def block_run_forward(self, run: BlockRun, x: Tensor, wanted: RunWanted) -> BlockRunOutput:
        given = list(filter(None, run.statistics))
        op = self._run_forward(run, x)
        kept_blocks = [block for block, keep in enumerate(wanted.block_inputs) if keep]
        flat = *_flat_run(run, given), wanted.statistics, kept_blocks, wanted.unit_inputs
        y, mean, var, *rest = op(x, *flat)
        count = len(run.parameters)
        if len(given) < count:
            given = list(map(Statistics, rest[:count], rest[count : 2 * count]))
            del rest[: 2 * count]
        kept, others = iter(rest), [wanted.unit_inputs] * (len(run.units) - 1)
        inputs: list[Tensor | None] = []
        for keeps_input in wanted.block_inputs:
            inputs += [next(kept) if keeps else None for keeps in (keeps_input, *others)]
        statistics = Statistics(mean, var) if wanted.statistics else None
        return BlockRunOutput(y, statistics, given, inputs)

    def _run_forward(self, run: BlockRun, x: Tensor) -> Any:
        """The op for `block_run_forward`."""
        return self._ops.block_run_forward.default

    def _run_backward(self, run: BlockRun, dy: Gradient, kept: Sequence[Tensor]) -> Any:
        """The op for `block_run_backward`; `kept` are the inputs that the forward kept."""
        return self._ops.block_run_backward.default

    def block_run_backward(
        self, run: BlockRun, dy: Gradient, inputs: Sequence[Tensor | None], y: Tensor | None
    ) -> BlockRunGradients:
        statistics = list(filter(None, run.statistics))
        count, per_block, first = len(run.parameters), len(run.units), run.parameters[0]
        kept_blocks: list[int] = []
        last: list[Tensor] = []  # last weights of the blocks to rebuild
        for block, x in enumerate(inputs[::per_block]):
            if x is None:
                last.append(run.parameters[(block + 1) * per_block - 1].conv_weight)
            else:
                kept_blocks.append(block)
        # x = y - F(z), where F is the last unit: negating its weight negates F(z).
        negated = torch_compat.foreach_neg(last) if last else ()
        inv_count = 1.0 / samples_of(dy.g.shape) if run.units[0].uses_batch else 0.0
        kept = [t for t in inputs if t is not None]
        op = self._run_backward(run, dy, kept)
        given = *flat_gradient(dy), *_flat_run(run, statistics)
        g, whole, x, sums, *rest = op(*given, kept, kept_blocks, inv_count, y, negated)
        conv_weights, of_norms = rest[:count], rest[count:]
        norm = Norm(*statistics[0], first.bn_weight, first.bn_bias, run.units[0].eps)
        step = AffineStep(whole, x, norm, sums, inv_count)
        parameters = list(map(Parameters, of_norms[1::2], of_norms[::2], conv_weights))
        return BlockRunGradients(Gradient(g, step), parameters)


def _flat_run(run: BlockRun, statistics: Sequence[Statistics]) -> tuple:
    """A run as schemas take it, with the statistics of its first units."""
    units = run.units
    bn_weights, bn_biases, conv_weights = zip(*run.parameters, strict=True)
    means, variances = zip(*statistics, strict=True) if statistics else ((), ())
    parts = bn_weights, bn_biases, conv_weights, means, variances, run.eps
    return *parts, len(units), units[0].dtype
