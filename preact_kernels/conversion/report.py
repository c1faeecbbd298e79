"""The report of what ran fused in the last call of a model, for each norm."""

import os
import re
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from preact_kernels import call_stack
from preact_kernels.ops.dispatch import CHECK

# Folders of this package and of torch; the report names lines of other code.
_OWN_FOLDERS = tuple(
    os.path.dirname(os.path.abspath(f)) + os.sep for f in (call_stack.__file__, torch.__file__)
)


class Outcome(NamedTuple):
    """How one call of a norm ran."""

    into: str  # the fused operation, or an empty string
    reason: str  # why the norm ran plain, or no convolution ran fused with it
    conv: "weakref.ref[nn.Module] | None" = None  # the convolution that ran fused with it
    refusals: tuple[Callable[[], str], ...] = ()  # see `Site`; one for each convolution


class Site(NamedTuple):
    """A norm of a model.

    Attributes:
        name: name of the norm in `model.named_modules()`.
        fused: whether it ran fused with the following activation or convolution.
        reason: why it ran plain, or why no convolution ran fused with it; or an empty string.
        into: the fused operation, such as "BN-ReLU-Conv" or "GN-SiLU-Dropout-Conv", or an empty
            string.
        conv: name of the convolution that ran fused with it, or an empty string.
        refusal: why that convolution, or the projection beside it, ran in PyTorch; or an empty
            string, if they ran in kernels of the backend.
    """

    name: str
    fused: bool
    reason: str = ""
    into: str = ""
    conv: str = ""
    refusal: str = ""


class ConversionReport(tuple[Site, ...]):
    """The sites of a model, in order; prints as a table."""

    experimental = ""
    """Name of the experimental backend for the model's current device, or an empty string."""

    @property
    def fused(self) -> tuple[Site, ...]:
        """The sites that ran fused."""
        return tuple(s for s in self if s.fused)

    def __repr__(self) -> str:
        return f"<ConversionReport: {len(self.fused)} of {len(self)} norms fused>"

    def __str__(self) -> str:
        width = max([len("norm"), *(len(s.name) for s in self)])
        rows = [f"{'norm':{width}}  fused"]
        for s in self:
            arguments = ", ".join(dict.fromkeys(re.findall(r"(\w+): ", s.refusal)))
            refusal = f"PyTorch convolution ({arguments})" if arguments else ""
            text = ", ".join(filter(None, (s.into, s.conv, s.reason, refusal)))
            rows.append(f"{s.name:{width}}  {'yes' if s.fused else 'no '}    {text}".rstrip())
        rows.append(f"{len(self.fused)} of {len(self)} norms are fused")
        if self.experimental:
            rows.append(
                f"backend {self.experimental!r} is experimental; `{CHECK}` compares it with float64"
            )
        return "\n".join(rows)


def described(reader: object, is_traced: bool = False) -> str:
    """Describes the reader of a deferred tensor, with file and line unless traced by a compiler."""
    name = reader if isinstance(reader, str) else getattr(reader, "__name__", str(reader))
    if is_traced:
        return f"read by {name}"
    line = call_stack.line_outside(_OWN_FOLDERS)
    if line is None:
        return f"read by {name}"
    return f"read by {name} ({os.path.basename(line[0])}:{line[1]})"
