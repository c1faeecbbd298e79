"""The ops of a compiled library under the named arguments of the contract.

`cpu.py` and `cuda.py` load one library each. Convolutions that `serves_conv` refuses are
PyTorch's, on an activation that the library computes and that is freed at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.kernels import pytorch_conv, running_stats
from preact_kernels.kernels.contract import (
    BatchStatistics,
    BlockRun,
    BlockRunGradients,
    BlockRunOutput,
    Conv,
    ConvGradients,
    Fold,
    Norm,
    Output,
    Wanted,
)

_NO_FOLD = (None, None, None, None, None, 0.0, None, 0.0)


def _flat(fold: Fold | None) -> tuple:
    """`skip, x, mean, var, weight, eps, sums, inv_count`, as the library takes a fold."""
    if fold is None:
        return _NO_FOLD
    skip, x, norm, sums, inv_count = fold
    return skip, x, norm.mean, norm.var, norm.weight, norm.eps, sums, inv_count


class NativeKernels:
    """Implements `BlockKernels` with the ops of one namespace of `torch.ops`.

    Args:
        ops: the namespace, with its library loaded.
    """

    has_conv_bias: bool  # whether the fused convolution takes a bias

    def __init__(self, ops) -> None:
        self._ops = ops

    def serves_conv(
        self, weight_shape: Sequence[int], conv: Conv, dtype: torch.dtype, device: torch.device
    ) -> bool:
        """Whether the library's fused convolutions serve a weight."""
        raise NotImplementedError

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        """See `Kernels`."""
        running_stats.running_stats_update(running, batch, momentum)

    def bn_stats(self, x: Tensor) -> BatchStatistics:
        """See `Kernels`."""
        return BatchStatistics(*self._ops.bn_stats.default(x))

    def bn_relu_forward(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Kernels`."""
        return self._ops.bn_relu_forward.default(x, *norm)

    def bn_relu_backward_sums(self, dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """See `Kernels`."""
        return self._ops.bn_relu_backward_sums.default(dy, x, *norm)

    def bn_relu_backward_mask(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        return self._ops.bn_relu_backward_mask.default(dy, x, *norm)

    def bn_relu_backward_input(
        self, dy: Tensor, x: Tensor, norm: Norm, sums: Tensor, inv_count: float
    ) -> Tensor:
        """See `Kernels`."""
        return self._ops.bn_relu_backward_input.default(dy, x, *norm, sums, inv_count)

    def bn_input_gradient(self, g: Tensor, fold: Fold) -> Tensor:
        """See `Kernels`."""
        skip, *rest = _flat(fold)
        return self._ops.bn_input_gradient.default(skip, g, *rest)

    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        *,
        conv_bias: Tensor | None = None,
        residual: Tensor | None = None,
        with_stats: bool = False,
    ) -> Output:
        """See `Kernels`."""
        has_kernel = conv_bias is None or self.has_conv_bias
        if has_kernel and self.serves_conv(conv_weight.shape, conv, x.dtype, x.device):
            bias = (conv_bias,) if self.has_conv_bias else ()
            y, mean, var = self._ops.bn_relu_conv_forward.default(
                x, *norm, conv_weight, *bias, residual, with_stats
            )
            return Output(y, BatchStatistics(mean, var) if with_stats else None)
        return pytorch_conv.bn_relu_conv_forward(
            self,
            x,
            norm,
            conv_weight,
            conv,
            conv_bias=conv_bias,
            residual=residual,
            with_stats=with_stats,
        )

    def bn_relu_conv_backward(
        self,
        dy: Tensor,
        fold: Fold | None,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        wanted: Wanted,
    ) -> ConvGradients:
        """See `Kernels`."""
        if not self.serves_conv(conv_weight.shape, conv, x.dtype, x.device):
            return pytorch_conv.bn_relu_conv_backward(
                self, dy, fold, x, norm, conv_weight, conv, wanted
            )
        g, dconv_weight, sums, unfolded = self._ops.bn_relu_conv_backward.default(
            dy, *_flat(fold), x, *norm, conv_weight, *wanted
        )
        return ConvGradients(
            g if wanted.input else None,
            sums if wanted.input else None,
            dconv_weight if wanted.weight else None,
            unfolded if wanted.dy else None,
        )

    def residual_add_forward(self, x: Tensor, branch: Tensor, with_stats: bool) -> Output:
        """See `Kernels`."""
        y, mean, var = self._ops.residual_add_forward.default(x, branch, with_stats)
        return Output(y, BatchStatistics(mean, var) if with_stats else None)

    def block_run_forward(
        self,
        x: Tensor,
        run: BlockRun,
        x_statistics: BatchStatistics | None,
        known: Sequence[Tensor] | None,
        *,
        with_stats: bool,
        keep_inputs: bool,
        keep_block_inputs: bool,
    ) -> BlockRunOutput:
        """See `BlockKernels`."""
        parameters, eps, units_per_block = run
        y, mean, var, *rest = self._ops.preact_stage_forward.default(
            x,
            x_statistics or (),
            parameters,
            known or (),
            eps,
            units_per_block,
            with_stats,
            keep_inputs,
            keep_block_inputs,
        )
        statistics = BatchStatistics(mean, var) if with_stats else None
        count = 0 if known else 2 * len(eps)
        kept = iter(rest[count:])
        keeps = [keep_inputs if i % units_per_block else keep_block_inputs for i in range(len(eps))]
        inputs = [next(kept) if keep else None for keep in keeps]
        return BlockRunOutput(y, statistics, list(known) if known else rest[:count], inputs)

    def block_run_backward(
        self,
        dy: Tensor,
        fold: Fold | None,
        run: BlockRun,
        inputs: Sequence[Tensor | None],
        statistics: Sequence[Tensor],
        inv_count: float,
        y: Tensor | None,
    ) -> BlockRunGradients:
        """See `BlockKernels`."""
        parameters, eps, units_per_block = run
        # Negating the weights of a block's last unit negates each product, and so each sum.
        stride = 3 * units_per_block
        last = list(parameters[stride - 1 :: stride])
        negated = torch_compat.foreach_neg(last) if y is not None else ()
        g, block_dy, x, *rest = self._ops.preact_stage_backward.default(
            dy,
            *_flat(fold),
            [h for h in inputs if h is not None],
            statistics,
            parameters,
            eps,
            inv_count,
            units_per_block,
            y,
            negated,
        )
        return BlockRunGradients(g, block_dy, x, rest[::2], rest[1::2])
