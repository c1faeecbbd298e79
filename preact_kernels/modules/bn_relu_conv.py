"""`BNReLUConv2d`: batch norm, ReLU and convolution."""

from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels.activations import RELU
from preact_kernels.modules.conv import conv_arguments, is_bare_conv, plain_conv
from preact_kernels.modules.norm import is_bare_norm, plain_batch_norm
from preact_kernels.norms import BatchNorm
from preact_kernels.ops import checks
from preact_kernels.ops.arguments import UnitArguments
from preact_kernels.ops.node import run_unit
from preact_kernels.ops.plain import chain
from preact_kernels.ops.plain_operators import runs_plain


class BNReLUConv2d(nn.Module):
    """Batch norm, ReLU, convolution and residual add; saves only the input for backward.

    Equals `conv(F.relu(bn(x))) [+ residual]` for its children `bn`, an `nn.BatchNorm2d` or
    `nn.SyncBatchNorm`, and `conv`, an `nn.Conv2d`.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: height and width of the kernel, or an int for both.
        stride: stride of the convolution.
        padding: padding of the convolution: an int, a pair, `"same"` or `"valid"`.
        dilation: dilation of the convolution.
        groups: number of groups of the convolution.
        bias: whether the convolution has a bias.
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None for their cumulative average.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of range, or `groups` does not divide the channels.
    """

    fused = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = False,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
    ) -> None:
        super().__init__()
        checks.check_count("in_channels", in_channels)
        checks.check_count("out_channels", out_channels)
        checks.check_count("groups", groups)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups: expected a divisor of in_channels {in_channels} and out_channels "
                f"{out_channels}, got {groups}"
            )
        checks.check_norm_numbers(eps, momentum)
        size = checks.pair("kernel_size", kernel_size, minimum=1)
        checks.geometry(size, stride, padding, dilation, groups)
        self.bn = nn.BatchNorm2d(in_channels, eps, momentum)
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            cast(tuple[int, int], size),
            stride,
            padding,
            dilation,
            groups,
            bias,
        )

    @classmethod
    def from_modules(cls, bn: nn.BatchNorm2d, conv: nn.Conv2d) -> "BNReLUConv2d":
        """Creates a fused module from two existing modules, which are shared, not copied.

        Args:
            bn: `nn.BatchNorm2d` or `nn.SyncBatchNorm` of C channels.
            conv: `nn.Conv2d` with C input channels.

        Returns:
            The module, in the mode (training or evaluation) of `bn`.

        Raises:
            TypeError: `bn` or `conv` is of another class.
            ValueError: their channel counts differ.
        """
        if not isinstance(bn, nn.BatchNorm2d | nn.SyncBatchNorm):
            raise TypeError(f"bn: expected an nn.BatchNorm2d, got {type(bn).__name__}")
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(f"conv: expected an nn.Conv2d, got {type(conv).__name__}")
        if bn.num_features != conv.in_channels:
            raise ValueError(
                f"conv: expected in_channels {bn.num_features} to match bn, got {conv.in_channels}"
            )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.bn, module.conv = bn, conv
        module.training = bn.training
        return module

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`[N, C, H, W]` to `[N, K, H', W']`; `residual` has the shape of the output."""
        bn, conv = self.bn, self.conv
        is_fusable = self.fused and is_bare_norm(bn) and is_bare_conv(conv)
        if not is_fusable or runs_plain(x, residual):
            relu = partial(F.relu, inplace=is_bare_norm(bn))
            own = partial(plain_batch_norm, bn), relu, partial(plain_conv, conv)
            return chain(x, *own, residual=residual)
        given = UnitArguments(BatchNorm.of_module(bn), RELU, conv_arguments(conv))
        return run_unit(x, given, residual, prefix="bn_", dims=4)
