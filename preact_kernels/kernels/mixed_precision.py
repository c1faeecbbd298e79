"""A float32 residual stream beside convolutions in half precision, on any backend.

`MixedKernels` need no kernel that mixes precisions. A unit that reads the stream runs batch norm
and ReLU in float32, rounds the activation, and calls PyTorch's convolution; a block ends with a
separate addition. Plain PyTorch computes the same: `F.conv2d(F.relu(bn(x)).to(half), ...)` and
`x + F(x).to(float32)`. The cost is one activation, held briefly in each direction, and one more
pass over the stream for each step that a fused kernel would have merged.

`FusedMixedKernels` use the fused kernels of a backend that has them for such a stream, and
`MixedBlockKernels` also its calls for several blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from preact_kernels.kernels import pytorch_conv
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
    Kernels,
    Norm,
    Output,
    StreamConvs,
    StreamKernels,
    Wanted,
)


class MixedKernels(Kernels):
    """The functions of `Kernels` for tensors of two dtypes.

    Args:
        wide: functions for the residual stream.
        narrow: functions for tensors in the dtype of the weights.
        stream: dtype of the residual stream.
    """

    def __init__(self, wide: Kernels, narrow: Kernels, stream: torch.dtype) -> None:
        self.wide, self.narrow, self.stream = wide, narrow, stream

    def _of(self, x: Tensor) -> Kernels:
        return self.wide if x.dtype == self.stream else self.narrow

    def serves_conv(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        pixels: int | None = None,
    ) -> bool:
        return dtype != self.stream and self.narrow.serves_conv(
            weight_shape, conv, dtype, device, pixels
        )

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        self.wide.running_stats_update(running, batch, momentum)

    def bn_stats(self, x: Tensor) -> BatchStatistics:
        return self._of(x).bn_stats(x)

    def bn_relu_forward(self, x: Tensor, norm: Norm) -> Tensor:
        return self._of(x).bn_relu_forward(x, norm)

    def bn_relu_backward_sums(self, dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
        return self._of(x).bn_relu_backward_sums(dy, x, norm)

    def bn_relu_backward_mask(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self._of(x).bn_relu_backward_mask(dy, x, norm)

    def bn_relu_backward_input(
        self, dy: Tensor, x: Tensor, norm: Norm, sums: Tensor, inv_count: float
    ) -> Tensor:
        return self._of(x).bn_relu_backward_input(dy, x, norm, sums, inv_count)

    def bn_input_gradient(self, g: Tensor, fold: Fold) -> Tensor:
        return self._of(fold.x).bn_input_gradient(g.to(fold.x.dtype), fold)

    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> Output:
        """With a residual, `y` has the dtype of the stream."""
        residual, with_stats = epilogue.residual, epilogue.with_stats
        if residual is not None:
            epilogue = Epilogue(epilogue.conv_bias)
        if x.dtype != self.stream:
            output = self.narrow.bn_relu_conv_forward(x, norm, conv_weight, conv, epilogue)
        else:
            output = pytorch_conv.bn_relu_conv_forward(self, x, norm, conv_weight, conv, epilogue)
        if residual is None:
            return output
        return self.residual_add_forward(output.y, residual, with_stats)

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
        """`g` has the dtype of `x`, and `dy` that of the fold's `x`."""
        is_mixed = x.dtype == self.stream
        unfolded = None
        if fold is not None and (is_mixed or fold.x.dtype == self.stream):
            dy = self.bn_input_gradient(dy, fold)
            unfolded = dy if wanted.dy else None
            fold, wanted = None, wanted._replace(dy=False)
        dy = dy.to(conv_weight.dtype)
        if is_mixed:
            gradients = pytorch_conv.bn_relu_conv_backward(
                self, dy, fold, x, norm, conv_weight, conv, wanted
            )
        else:
            gradients = self.narrow.bn_relu_conv_backward(
                dy, fold, x, norm, conv_weight, conv, wanted
            )
        return gradients if unfolded is None else gradients._replace(dy=unfolded)

    def residual_add_forward(self, x: Tensor, branch: Tensor, with_stats: bool) -> Output:
        """The sum is in the dtype of the stream."""
        return self.wide.residual_add_forward(x.to(self.stream), branch.to(self.stream), with_stats)


class FusedMixedKernels(MixedKernels):
    """`MixedKernels` for convolutions that take a float32 stream on one side.

    `g` is in half precision, as the convolution's gradient is in plain PyTorch, unless PyTorch's
    convolution computed it, or that of a projection was added. Such a `g` is unfolded first.
    Without a fold, `dy` beside an input of the stream is that of a projection, and is rounded.

    Args:
        wide: functions for the residual stream.
        narrow: functions for tensors in `half`, and for convolutions with one side in `half`.
        half: dtype of the products; also of the weights, unless those are float32.
    """

    narrow: StreamConvs

    def __init__(self, wide: Kernels, narrow: StreamConvs, half: torch.dtype) -> None:
        super().__init__(wide, narrow, torch.float32)
        self.half = half
        self.takes_float32_weights = narrow.takes_float32_weights

    def serves_conv(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        pixels: int | None = None,
    ) -> bool:
        """Whether fused kernels serve the convolution, of whichever unit of a block."""
        return self.narrow.serves_stream_conv(weight_shape, conv, self.half, device, pixels)

    def _fuses(self, x: Tensor, conv_weight: Tensor, conv: Conv, y_dtype: torch.dtype) -> bool:
        """Whether a fused kernel takes a convolution of `x` whose other side has `y_dtype`."""
        return self.half in (x.dtype, y_dtype) and self.serves_conv(
            conv_weight.shape, conv, self.half, x.device, x.numel() // x.shape[1]
        )

    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> Output:
        residual = epilogue.residual
        if residual is not None:
            residual = residual.to(self.stream)
        epilogue = epilogue._replace(residual=residual, dtype=self.half)
        y_dtype = self.half if residual is None else self.stream
        if not self._fuses(x, conv_weight, conv, y_dtype):
            weight = conv_weight.to(self.half)
            return super().bn_relu_conv_forward(x, norm, weight, conv, epilogue)
        return self.narrow.bn_relu_conv_forward(x, norm, conv_weight, conv, epilogue)

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
        if fold is not None and dy.dtype == self.stream:
            dy = self.bn_input_gradient(dy, fold)
            found = self.bn_relu_conv_backward(
                dy, None, x, norm, conv_weight, conv, wanted._replace(dy=False)
            )
            return found._replace(dy=dy if wanted.dy else None)
        if fold is None and x.dtype == self.stream:  # of a projection: as autograd rounds it
            dy = dy.to(self.half)
        y_dtype = (dy if fold is None else fold.x).dtype
        if not self._fuses(x, conv_weight, conv, y_dtype):
            weight = conv_weight.to(self.half)
            found = super().bn_relu_conv_backward(dy, fold, x, norm, weight, conv, wanted)
            if found.conv_weight is None:
                return found
            return found._replace(conv_weight=found.conv_weight.to(conv_weight.dtype))
        return self.narrow.bn_relu_conv_backward(dy, fold, x, norm, conv_weight, conv, wanted)


class MixedBlockKernels(FusedMixedKernels, BlockKernels):
    """`FusedMixedKernels` that also run several blocks in one call."""

    narrow: StreamKernels

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
        return self.narrow.block_run_forward(
            x,
            run._replace(dtype=self.half),
            x_statistics,
            known,
            with_stats=with_stats,
            keep_inputs=keep_inputs,
            keep_block_inputs=keep_block_inputs,
        )

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
        if fold is not None and dy.dtype == self.stream:
            dy, fold = self.bn_input_gradient(dy, fold), None
        run = run._replace(dtype=self.half)
        return self.narrow.block_run_backward(dy, fold, run, inputs, statistics, inv_count, y)
