"""Inner tensors of blocks that backward computes again: the memory mode "checkpoint"."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.conversion.context import Context

# A backward holds the inner tensors of a chain of units; longer chains are split.
MOST_UNITS = 4


class Recomputed:
    """A value that is computed again whenever a backward reads it.

    Args:
        call: computes it.
        source: what `call` takes.
        read: other tensors that `call` reads.
        context: the modes in which it runs.
        units: how many units are computed again for it.
    """

    def __init__(
        self,
        call: Callable[[Tensor], Tensor],
        source: "Tensor | Recomputed",
        read: Sequence[Tensor],
        context: Context,
        units: int,
    ) -> None:
        self._call, self._source, self._context, self.units = call, source, context, units
        tensors = [source, *read] if isinstance(source, Tensor) else read
        self._versions = [(t, t._version) for t in tensors]
        self._value: Tensor | None = None  # for another reader in the same backward
        self._lock = threading.Lock()
        self.is_saved = False  # whether the graph of a later operation needs it

    def take(self) -> Tensor:
        """Returns the value, which is not kept."""
        with self._lock:
            value, self._value = self._value, None
        if value is not None:
            return value
        in_modes = self._context.entered_in_backward()
        with torch_compat.disable_torch_function(), in_modes, torch.no_grad():
            return self._computed()

    def _computed(self) -> Tensor:
        for t, version in self._versions:
            _check(t, version)
        source = self._source
        if isinstance(source, Recomputed):
            value = source._value if source._value is not None else source._computed()
            if source.is_saved:  # the backward reads it next
                source._value = value
            source = value
        return self._call(source)


def _check(t: Tensor, version: int) -> None:
    """Raises if a tensor that is read again has changed since."""
    shape = list(t.shape)
    if t._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {shape} is at version {t._version}, expected version "
            f"{version} (memory='checkpoint' computes blocks again)"
        )
    if t.numel() and not t.untyped_storage().nbytes():
        raise RuntimeError(
            f"memory='checkpoint': a tensor of shape {shape} was freed between forward and "
            "backward; shard whole blocks, or use memory='store'"
        )


class Recomputation:
    """The values of one execution that autograd does not save, by node."""

    def __init__(self) -> None:
        self._found: dict[Any, Recomputed] = {}

    def units(self, node: object) -> int:
        """How many units are computed again for a result; 0: it is saved."""
        found = self._found.get(node)
        return 0 if found is None else found.units

    def add(
        self,
        node: object,
        call: Callable[[Tensor], Tensor],
        source: object,
        value: Tensor,
        read: Sequence[Tensor],
        context: Context,
        units: int,
    ) -> None:
        """Notes that the result of `node` is to be computed again.

        Args:
            node: the node.
            call: as in `Recomputed`, and so are the following.
            source: the node or tensor that `call` takes.
            value: its value.
            read: other tensors that `call` reads.
            context: the modes in which it runs.
            units: how many units are computed again.
        """
        self._found[node] = Recomputed(call, self._found.get(source, value), read, context, units)

    @contextlib.contextmanager
    def reading(self, nodes: Sequence[object], values: Sequence[Tensor]) -> Iterator[None]:
        """Runs its body so that autograd saves none of the noted `values`, of `nodes`."""
        found = {
            torch_compat.storage_id(t): self._found[n]
            for n, t in zip(nodes, values, strict=True)
            if n in self._found
        }
        if not found:
            yield
            return
        outer = torch_compat.top_saved_tensor_hooks()

        def pack(t: Tensor) -> Any:
            value = found.get(torch_compat.storage_id(t))
            if value is None:
                return t if outer is None else outer[0](t)
            value.is_saved = True
            return _View(value, t.shape, t.stride(), t.storage_offset())

        def unpack(packed: Any) -> Tensor:
            if type(packed) is not _View:
                return packed if outer is None else outer[1](packed)
            return packed.value.take().as_strided(*packed[1:])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _View(NamedTuple):
    """What autograd would save: a view of a value, or the value itself."""

    value: Recomputed
    shape: Sequence[int]
    strides: Sequence[int]
    offset: Any
