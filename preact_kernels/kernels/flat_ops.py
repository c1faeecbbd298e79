"""`Kernels` by ops with flat arguments: those of a compiled library, or the registered ones."""

from typing import Any

from torch import Tensor

from preact_kernels.kernels.contract import (
    BatchStatistics,
    ConvGradients,
    Fold,
    Kernels,
    Norm,
    Output,
    Wanted,
)


def flat_fold(fold: Fold | None) -> tuple:
    """`skip, x, mean, var, weight, eps, sums, inv_count`: a fold as schemas take it."""
    if fold is None:  # no global constant: with dynamic shapes, Dynamo reads its floats as inputs
        return None, None, None, None, None, 0.0, None, 0.0
    skip, x, norm, sums, inv_count = fold
    return skip, x, norm.mean, norm.var, norm.weight, norm.eps, sums, inv_count


class FlatOps(Kernels):
    """What the ops of all libraries have in common; see `Kernels`.

    A schema has no optional results: an op returns an empty tensor for each that is not wanted.

    Args:
        ops: a namespace of `torch.ops`.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def bn_stats(self, x: Tensor) -> BatchStatistics:
        return BatchStatistics(*self._ops.bn_stats.default(x))

    def bn_relu_forward(self, x: Tensor, norm: Norm) -> Tensor:
        return self._ops.bn_relu_forward.default(x, *norm)

    def bn_relu_backward_sums(self, dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
        return self._ops.bn_relu_backward_sums.default(dy, x, *norm)

    def bn_relu_backward_mask(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self._ops.bn_relu_backward_mask.default(dy, x, *norm)

    def bn_relu_backward_input(
        self, dy: Tensor, x: Tensor, norm: Norm, sums: Tensor, inv_count: float
    ) -> Tensor:
        return self._ops.bn_relu_backward_input.default(dy, x, *norm, sums, inv_count)

    def bn_input_gradient(self, g: Tensor, fold: Fold) -> Tensor:
        return self._ops.bn_input_gradient.default(g, *flat_fold(fold))

    def residual_add_forward(self, x: Tensor, branch: Tensor, with_stats: bool) -> Output:
        return self.output(
            self._ops.residual_add_forward.default(x, branch, with_stats), with_stats
        )

    @staticmethod
    def output(results: tuple[Tensor, Tensor, Tensor], with_stats: bool) -> Output:
        """The results `y, mean, var` of an op, by name."""
        y, mean, var = results
        return Output(y, BatchStatistics(mean, var) if with_stats else None)

    @staticmethod
    def gradients(results: tuple[Tensor, Tensor, Tensor, Tensor], wanted: Wanted) -> ConvGradients:
        """The results `g, sums, dconv_weight, dy` of an op, by name."""
        g, sums, dconv_weight, dy = results
        return ConvGradients(
            g if wanted.input else None,
            sums if wanted.input else None,
            dconv_weight if wanted.weight else None,
            dy if wanted.dy else None,
        )
