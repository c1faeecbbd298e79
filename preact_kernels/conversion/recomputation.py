"""Inner tensors of blocks that backward computes again: the memory mode "checkpoint"."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        self._hooks: Any = None
        self._value: Tensor | None = None  # for another reader in the same backward
        self._lock = threading.Lock()
        self._is_saved = False

    def save(self, hooks: Any) -> None:
        """Notes that the graph of an operation needs the value.

        Args:
            hooks: the program's hooks of saved tensors, which take the source; or None.
        """
        self._is_saved = True
        self._save_source(hooks)

    def _save_source(self, hooks: Any) -> None:
        if isinstance(self._source, Recomputed):
            self._source._save_source(hooks)
        elif hooks is not None and self._hooks is None:
            self._hooks, self._source = hooks, hooks[0](self._source)
            del self._versions[0]  # the hooks decide what becomes of the source

    def take(self) -> Tensor:
        """Returns the value, which is not kept."""
        with self._lock:
            value, self._value = self._value, None
        if value is not None:
            return value
        source = self._saved_source()
        in_modes = self._context.entered_in_backward()
        with torch_compat.disable_torch_function(), in_modes, torch.no_grad():
            return self._computed(source)

    def _saved_source(self) -> Any:
        """Returns the tensor that the chain of calls begins with; hooks may run anything."""
        if isinstance(self._source, Recomputed):
            return self._source._saved_source()
        return self._source if self._hooks is None else self._hooks[1](self._source)

    def _computed(self, first: Tensor) -> Tensor:
        for t, version in self._versions:
            _check(t, version)
        source = self._source
        if not isinstance(source, Recomputed):
            return self._call(first)
        value = source._computed(first) if source._value is None else source._value
        if source._is_saved:  # the backward reads it next
            source._value = value
        return self._call(value)


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
    def reading(self, inputs: Iterable[tuple[object, Tensor]]) -> Iterator[None]:
        """Runs its body so that autograd saves none of the noted values.

        Args:
            inputs: the nodes or tensors that the body reads, and their values.
        """
        found = {torch_compat.storage_id(t): self._found[n] for n, t in inputs if n in self._found}
        if not found:
            yield
            return
        outer = torch_compat.top_saved_tensor_hooks()

        def pack(t: Tensor) -> Any:
            value = found.get(torch_compat.storage_id(t))
            if value is None:
                return t if outer is None else outer[0](t)
            value.save(outer)
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
