"""What was converted, batch norm by batch norm."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload


class Site(NamedTuple):
    """One batch norm of a model.

    name: of the batch norm, as in `model.named_modules()`.
    fused: whether it runs fused with the ReLU behind it, and a convolution where one follows.
    reason: why it does not, or an empty string.
    into: what runs fused, such as "BN-ReLU-Conv", or an empty string.
    """

    name: str
    fused: bool
    reason: str = ""
    into: str = ""


class ConversionReport(Sequence[Site]):
    """The sites of a model, in order; printed, a table."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = tuple(sites)

    @overload
    def __getitem__(self, index: int) -> Site: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Site]: ...

    def __getitem__(self, index: int | slice) -> Site | Sequence[Site]:
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    @property
    def fused(self) -> tuple[Site, ...]:
        """The sites that run fused."""
        return tuple(s for s in self._sites if s.fused)

    def __repr__(self) -> str:
        return f"<ConversionReport: {len(self.fused)} of {len(self)} batch norms fused>"

    def __str__(self) -> str:
        width = max((len(s.name) for s in self._sites), default=0)
        width = max(width, len("batch norm"))
        rows = [f"{'batch norm':{width}}  fused"]
        rows += [
            f"{s.name:{width}}  {'yes' if s.fused else 'no '}    {s.into or s.reason}".rstrip()
            for s in self._sites
        ]
        return "\n".join([*rows, f"{len(self.fused)} of {len(self)} batch norms are fused"])
