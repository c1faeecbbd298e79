"""The ops of a compiled library under the named arguments of the contract.

`cpu.py` and `cuda.py` load one library each. Convolutions that `serves_conv` refuses are
PyTorch's, on an activation that the library computes and that is freed at once.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.kernels import pytorch_conv, running_stats
from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    BatchStatistics,
    BlockKernels,
    BlockRun,
    BlockRunGradients,
    BlockRunOutput,
    Conv,
    ConvGradients,
    Epilogue,
    Fold,
    Norm,
    Output,
    Wanted,
)
from preact_kernels.kernels.flat_ops import FlatOps, flat_fold

PACKAGE = Path(__file__).parent.parent


@functools.cache
def load_library(name: str) -> str:
    """Loads a compiled library of the package. Returns why it cannot, or an empty string."""
    if not (PACKAGE / name).exists():
        return f"the package was installed without {name}"
    try:
        torch.ops.load_library(str(PACKAGE / name))
    except OSError as error:
        return f"{name} does not load: {error}"
    return ""


def _named(dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The last argument of an op, unless it is None: passing None costs time in the dispatcher."""
    return {} if dtype is None else {"dtype": dtype}


class NativeKernels(FlatOps, BlockKernels):
    """A compiled library; see `BlockKernels`."""

    has_conv_bias: bool  # whether the fused convolution takes a bias

    def _serves(self, x: Tensor, conv_weight: Tensor, conv: Conv, dtype: torch.dtype) -> bool:
        pixels = x.numel() // x.shape[1]
        return self.serves_conv(conv_weight.shape, conv, dtype, x.device, pixels)

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        running_stats.fast_running_stats_update(running, batch, momentum)

    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> Output:
        has_kernel = epilogue.conv_bias is None or self.has_conv_bias
        dtype = epilogue.dtype or pytorch_conv.compute_dtype(x, conv_weight)
        if not has_kernel or not self._serves(x, conv_weight, conv, dtype):
            return pytorch_conv.bn_relu_conv_forward(self, x, norm, conv_weight, conv, epilogue)
        op = self._ops.bn_relu_conv_forward.default
        found = op(x, *norm, conv_weight, conv.stride, *epilogue[:3], **_named(epilogue.dtype))
        return self.output(found, epilogue.with_stats)

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
        dtype = pytorch_conv.compute_dtype(x, dy, conv_weight)
        if not self._serves(x, conv_weight, conv, dtype):
            return pytorch_conv.bn_relu_conv_backward(
                self, dy, fold, x, norm, conv_weight, conv, wanted
            )
        op = self._ops.bn_relu_conv_backward.default
        found = op(dy, *flat_fold(fold), x, *norm, conv_weight, conv.stride, *wanted)
        return self.gradients(found, wanted)

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
        parameters, eps, units_per_block, _, dtype = run
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
            **_named(dtype),
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
        parameters, eps, units_per_block, *_ = run
        # Negating the weights of a block's last unit negates each product, and so each sum.
        stride = 3 * units_per_block
        last = list(parameters[stride - 1 :: stride])
        negated = torch_compat.foreach_neg(last) if y is not None else ()
        g, block_dy, x, *rest = self._ops.preact_stage_backward.default(
            dy,
            *flat_fold(fold),
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
