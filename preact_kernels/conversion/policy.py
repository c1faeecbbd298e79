"""Which tensors a backward computes again, by work and bytes."""

from typing import NamedTuple

import torch
from torch import Tensor

# Floating-point operations that take as long as moving one byte of memory (estimates).
_OPERATIONS_PER_BYTE = {"cpu": 8.0}
_OPERATIONS_PER_BYTE_OF_GPU = 100.0


class Policy(NamedTuple):
    """Which saved values to drop. Work is in bytes moved, per byte of the value.

    Attributes:
        work: most work to compute a value again.
        widening: the same, for convolutions that write at least twice the bytes that they read.
        span: most bytes that a backward holds to compute a value again.
        repeats_depthwise: whether depthwise convolutions run again, which take long for their work.
    """

    work: float
    widening: float
    span: float
    repeats_depthwise: bool

    def refuses(self, work: float, result: Tensor, product: "Product | None") -> bool:
        """Whether an operation takes too much work to be repeated.

        Args:
            work: its work, in bytes moved.
            result: its result.
            product: describes it, if it is a convolution or a linear layer.
        """
        most, size = self.work, result.numel() * result.element_size()
        if product is not None:
            if product.is_depthwise and not self.repeats_depthwise:
                return True
            most = self.widening if size >= 2 * product.read else most
        return work > most * size

    def drops(self, size: int, saved: int, work: float, held: int) -> bool:
        """Whether to compute a value again.

        Args:
            size: its bytes.
            saved: the same, without those to keep for it alone.
            work: work to compute it from what is saved.
            held: bytes of the values that the backward computes before it.
        """
        is_less = 2 * saved >= size and work <= self.widening * saved
        return is_less and held + size <= self.span * size


class Product(NamedTuple):
    """A convolution or a linear layer: the bytes that it reads, and whether it is depthwise."""

    read: int
    is_depthwise: bool

    @staticmethod
    def of(x: Tensor, weight: Tensor) -> "Product":
        return Product(x.numel() * x.element_size(), weight.dim() > 2 and weight.shape[1] == 1)


_ANY = float("inf")
POLICIES: dict[str, Policy] = {
    "rebuild": Policy(30.0, 40.0, 8.0, False),
    "checkpoint": Policy(_ANY, _ANY, 24.0, True),
}


def work_of_products(count: int, device: torch.device) -> float:
    """The work of multiplying and adding `count` pairs, in bytes moved in the same time."""
    return 2 * count / _OPERATIONS_PER_BYTE.get(device.type, _OPERATIONS_PER_BYTE_OF_GPU)
