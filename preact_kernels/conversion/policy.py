"""Which tensors a backward computes again, by work and bytes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# Floating-point operations that take as long as moving one byte of memory (estimates).
_OPERATIONS_PER_BYTE = {"cpu": 8.0}
_OPERATIONS_PER_BYTE_OF_GPU = 100.0
# To compute a value with fewer bytes takes longer in Python than in its kernel, on a CPU.
_MOST_NEGLIGIBLE_BYTES = 2**18


class Policy(NamedTuple):
    """Which saved values to drop. Work is in bytes moved, per byte of the value.

    Attributes:
        work: most work to compute a value again.
        work_of_volumes: the same for 3-D convolutions. There most bytes are in layers of few
            channels, whose convolutions take a small part of the time of a step.
        widening: the same, for convolutions that write at least twice the bytes that they read.
        span: most bytes that a backward holds to compute a value again, as a multiple of the bytes
            of the largest value saved so far.
        repeats_grouped: whether convolutions in groups run again, which take long for their work.
        least: values with fewer bytes than this share of the largest value so far, and than
            `_MOST_NEGLIGIBLE_BYTES`, are kept.
        costly: values of more work are kept while there is room for them.
        spare: there is room while less than this share of the bytes saved so far is kept.
    """

    work: float
    work_of_volumes: float
    widening: float
    span: float
    repeats_grouped: bool
    least: float
    costly: float
    spare: float

    def is_negligible(self, size: int, largest: int) -> bool:
        """Whether a value has too few bytes to be computed again; for `largest` see `drops`."""
        return size < min(self.least * largest, _MOST_NEGLIGIBLE_BYTES)

    def refuses(
        self, work: float, result: Tensor, product: "Product | None", kept: int, saved: int
    ) -> bool:
        """Whether an operation takes too much work to be repeated.

        Args:
            work: its work, in bytes moved.
            result: its result.
            product: describes it, if it is a convolution or a linear layer.
            kept: bytes kept so far.
            saved: bytes saved so far, kept or not.
        """
        most, size = self.work, result.nbytes
        if product is not None:
            most = self.work_of_volumes if product.dims == 3 else most
            if product.is_grouped and not self.repeats_grouped:
                return True
            most = self.widening if size >= 2 * product.read else most
        if kept < self.spare * saved:
            most = min(most, self.costly)
        return work > most * size

    def drops(self, size: int, saved: int, work: float, held: int, largest: int) -> bool:
        """Whether to compute a value again.

        Args:
            size: its bytes.
            saved: the same, without the bytes of tensors to keep only in order to compute it.
            work: work to compute it from what is saved.
            held: bytes of the values that the backward computes before it.
            largest: bytes of the largest value so far.
        """
        is_less = 2 * saved >= size and work <= self.widening * saved
        # Prefer to end a segment at a value of few channels.
        most = self.span * largest if 4 * size > largest else self.span * largest / 2
        return is_less and held + size <= most


class Product(NamedTuple):
    """A convolution or a linear layer.

    Attributes:
        read: bytes of its input.
        is_grouped: whether it is a convolution in groups.
        dims: axes of its kernel; 0: a linear layer.
    """

    read: int
    is_grouped: bool
    dims: int


_ANY = float("inf")
POLICIES: dict[str, Policy] = {
    "rebuild": Policy(
        work=20.0,
        work_of_volumes=30.0,
        widening=40.0,
        span=4.0,
        repeats_grouped=False,
        least=1 / 32,
        costly=_ANY,
        spare=0.0,
    ),
    "checkpoint": Policy(
        work=_ANY,
        work_of_volumes=_ANY,
        widening=_ANY,
        span=8.0,
        repeats_grouped=True,
        least=0.0,
        costly=60.0,
        spare=1 / 8,
    ),
}


def work_of(
    inputs: Sequence[Tensor], result: Tensor, weight: Tensor | None, is_transposed: bool = False
) -> tuple[float, Product | None]:
    """The work of an operation, in bytes moved, and its convolution or linear layer.

    Args:
        inputs: what it reads; if it is a convolution or a linear layer, its input comes first.
        result: its result.
        weight: the weight of a convolution or a linear layer; None: another operation.
        is_transposed: whether the convolution is transposed.
    """
    moved = float(sum([t.nbytes for t in (*inputs, result)]))
    if weight is None:
        return moved, None
    x = inputs[0]
    products = (x if is_transposed else result).numel() * math.prod(weight.shape[1:])
    per_byte = _OPERATIONS_PER_BYTE.get(x.device.type, _OPERATIONS_PER_BYTE_OF_GPU)
    image = result if is_transposed else x
    channels = image.shape[image.dim() - weight.dim() + 1]  # also without a batch axis
    is_grouped = weight.dim() > 2 and weight.shape[1] != channels
    product = Product(x.nbytes, is_grouped, weight.dim() - 2)
    return moved + 2 * products / per_byte, product
