"""`NormAct`: a norm and an activation."""

from functools import partial

from torch import Tensor, nn

from preact_kernels.modules.activation import (
    activation_repr,
    held_activation,
    hold_activation,
    plain_activation,
)
from preact_kernels.modules.norm import (
    check_norm,
    is_readable_norm,
    norm_arguments,
    plain_norm,
)
from preact_kernels.ops.arguments import ScaleShift, UnitArguments, scale_shift_of
from preact_kernels.ops.node import run_unit
from preact_kernels.ops.plain import chain
from preact_kernels.ops.plain_operators import runs_plain


class NormAct(nn.Module):
    """A norm and an activation; saves only the input for backward.

    Do not change the input in place before the backward, also under autocast.

    Equals `act(norm(x) * (1 + scale) + shift)` for its children: `norm`, and `act` if the
    activation is a module. Children are shared, not copied. If a child has hooks or is a subclass,
    the children are called.

    Args:
        norm: `nn.GroupNorm`, `nn.BatchNorm1d`, `2d` or `3d`, `nn.SyncBatchNorm`,
            `nn.InstanceNorm1d`, `2d` or `3d`, or an `nn.LayerNorm` over `(C, ...)` without
            `elementwise_affine`.
        activation: the name of an activation, or a tuple of the name and its parameter, as in
            `pk.group_norm_act`; or a module, such as `nn.SiLU()`.

    Raises:
        TypeError: `norm` or `activation` is of another class.
        ValueError: a layer norm has a weight, or the name of the activation is unknown.
    """

    fused = True

    def __init__(self, norm: nn.Module, activation: str | tuple[str, float] | nn.Module) -> None:
        super().__init__()
        check_norm(norm)
        self.norm = norm
        self.training = norm.training
        hold_activation(self, activation)

    def forward(
        self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        """`[N, C, ...]` to the same shape; `scale` and `shift` as in `pk.group_norm_act`."""
        norm, activation = self.norm, held_activation(self)
        is_readable = self.fused and is_readable_norm(norm)
        if activation is None or not is_readable or runs_plain(x, scale, shift):
            own = partial(plain_norm, norm), partial(plain_activation, self)
            return chain(x, *own, scale_shift=ScaleShift(scale, shift))
        scale_shift = scale_shift_of(scale, shift)
        given = UnitArguments(norm_arguments(norm, x), activation, None, scale_shift)
        return run_unit(x, given, prefix="norm.")

    def extra_repr(self) -> str:
        return activation_repr(self)
