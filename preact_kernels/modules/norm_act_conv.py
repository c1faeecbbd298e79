"""`NormActConv`: norm, activation, dropout and convolution."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels.modules.activation import (
    activation_repr,
    held_activation,
    hold_activation,
    plain_activation,
)
from preact_kernels.modules.conv import CONVOLUTIONS, conv_arguments, is_bare_conv, plain_conv
from preact_kernels.modules.norm import (
    channels_of,
    check_norm,
    dimensions_of,
    is_readable_norm,
    norm_arguments,
    plain_norm,
)
from preact_kernels.ops.arguments import ScaleShift, UnitArguments, scale_shift_of
from preact_kernels.ops.dropout import check_dropout
from preact_kernels.ops.node import run_unit
from preact_kernels.ops.plain import chain
from preact_kernels.ops.plain_operators import runs_plain


class NormActConv(nn.Module):
    """Norm, activation, dropout, convolution and residual add; saves only the input for backward.

    Equals `conv(F.dropout(a, dropout, self.training)) [+ residual]` with the same random numbers,
    where `a = act(norm(x) * (1 + scale) + shift)`, for its children: `norm`, `conv`, and `act` if
    the activation is a module. Children are shared, not copied. If a child has hooks or is a
    subclass, the children are called. Dropout also saves one bit per element.

    Args:
        norm: as in `pk.NormAct`.
        activation: as in `pk.NormAct`.
        conv: `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`.
        dropout: probability of dropping an element of the activation, in training mode.

    Raises:
        TypeError: `norm`, `activation` or `conv` is of another class.
        ValueError: the channels or dimensions of `norm` and `conv` differ, a layer norm has a
            weight, the name of the activation is unknown, or `dropout` is outside of [0, 1].
    """

    fused = True

    def __init__(
        self,
        norm: nn.Module,
        activation: str | tuple[str, float] | nn.Module,
        conv: nn.Conv1d | nn.Conv2d | nn.Conv3d,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_norm(norm)
        if not isinstance(conv, CONVOLUTIONS):
            raise TypeError(
                f"conv: expected an nn.Conv1d, nn.Conv2d or nn.Conv3d, got {type(conv).__name__}"
            )
        if channels_of(norm) != conv.in_channels:
            raise ValueError(
                f"conv: expected in_channels {channels_of(norm)} to match norm, "
                f"got {conv.in_channels}"
            )
        if conv.weight.dim() not in dimensions_of(norm):
            raise ValueError(
                f"conv: expected the dimensions of {type(norm).__name__}, got {type(conv).__name__}"
            )
        check_dropout(dropout)
        self.norm = norm
        self.training = norm.training
        hold_activation(self, activation)
        self.conv = conv
        self.dropout = float(dropout)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> Tensor:
        """`[N, C, ...]` to `[N, K, ...]`; the other arguments as in `pk.group_norm_act_conv`."""
        norm, conv, activation = self.norm, self.conv, held_activation(self)
        is_readable = self.fused and is_readable_norm(norm) and is_bare_conv(conv, CONVOLUTIONS)
        if activation is None or not is_readable or runs_plain(x, residual, scale, shift):
            dropout = partial(F.dropout, p=self.dropout, training=self.training)
            return chain(
                *(x, partial(plain_norm, norm), partial(plain_activation, self)),
                partial(plain_conv, conv),
                scale_shift=ScaleShift(scale, shift),
                dropout=dropout if self.dropout else None,
                residual=residual,
            )
        rest = scale_shift_of(scale, shift), self.dropout if self.training else 0.0
        given = UnitArguments(norm_arguments(norm, x), activation, conv_arguments(conv), *rest)
        return run_unit(x, given, residual, prefix="norm.", dims=conv.weight.dim())

    def extra_repr(self) -> str:
        parts = [activation_repr(self), f"dropout={self.dropout}" if self.dropout else ""]
        return ", ".join(filter(None, parts))
