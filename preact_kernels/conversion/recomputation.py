"""Recomputation of inner tensors of blocks in the backward, for memory mode "checkpoint"."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.conversion.context import Context

# A backward holds the inner tensors of a chain of units; longer chains are split.
MOST_UNITS = 4


class Recomputed:
    """The result of a call, computed again whenever a backward reads it.

    Args:
        call: computes the result.
        source: argument of `call`.
        others: other tensors that `call` reads.
        result: the result; it is not kept.
        context: the modes in which to run `call`.
        units: number of units to compute again for the result.
    """

    def __init__(
        self,
        call: Callable[[Tensor], Tensor],
        source: "Tensor | Recomputed",
        others: Sequence[Tensor],
        result: Tensor,
        context: Context,
        units: int,
    ) -> None:
        self._call, self._source, self._context, self.units = call, source, context, units
        tensors = [source, *others] if isinstance(source, Tensor) else others
        self._versions = [(t, t._version) for t in tensors]
        self._strides, self.offset = result.stride(), result.storage_offset()
        self._hooks: Any = None
        self._saved_count = 0  # saved tensors that are computed from the source
        self._value: Tensor | None = None  # for another reader in the same backward
        # By backward: the source that hooks unpacked, and how many saved tensors still need it.
        self._unpacked: dict[int, tuple[Tensor, int]] = {}
        self._lock = threading.RLock()
        self._is_saved = False

    def save(self, hooks: Any) -> None:
        """Records that the graph of an operation needs the result.

        Args:
            hooks: the program's hooks of saved tensors, to apply to the source; or None.
        """
        self._is_saved = True
        self._save_source(hooks)

    def _save_source(self, hooks: Any) -> None:
        if isinstance(self._source, Recomputed):
            self._source._save_source(hooks)
            return
        if hooks is not None and self._hooks is None:
            self._hooks, self._source = hooks, hooks[0](self._source)
            del self._versions[0]  # the hooks own the source
        self._saved_count += 1

    def value(self) -> Tensor:
        """Returns the result, with its original strides."""
        with self._lock:
            value, self._value = self._value, None
        source = self._saved_source(is_needed=value is None)
        if value is not None:
            return value
        in_modes = self._context.entered_in_backward()
        transforms = torch_compat.without_functorch_transforms()
        with transforms, torch_compat.disable_torch_function(), in_modes, torch.no_grad():
            return self._computed(source)

    def _saved_source(self, is_needed: bool) -> Any:
        """Returns the tensor that the chain of calls begins with, or None if it is not needed.

        A backward unpacks it once, and keeps it for other saved tensors that are computed from it,
        as the hooks of `torch.utils.checkpoint` refuse to unpack twice. Hooks may run any code.
        """
        if isinstance(self._source, Recomputed):
            return self._source._saved_source(is_needed)
        if self._hooks is None:
            return self._source
        backward = torch_compat.backward_id()
        with self._lock:
            source, count = self._unpacked.pop(backward, (None, self._saved_count))
        is_read_again = count > 1 and torch_compat.is_in_backward()
        if source is None:
            if not is_needed:
                return None
            source = self._hooks[1](self._source)
            if is_read_again:
                own = weakref.ref(self)
                torch_compat.call_after_backward(lambda: _forget(own(), backward))
        if is_read_again:
            with self._lock:
                self._unpacked[backward] = source, count - 1
        return source

    def _computed(self, first: Tensor) -> Tensor:
        for t, version in self._versions:
            _check(t, version)
        source = self._source
        value = first if not isinstance(source, Recomputed) else source._computed_once(first)
        y = self._call(value)
        if y.stride() != self._strides:
            y = torch.empty_strided(y.shape, self._strides, dtype=y.dtype, device=y.device).copy_(y)
        return y

    def _computed_once(self, first: Tensor) -> Tensor:
        """Returns the result, and keeps it for the next operation that reads it in a backward."""
        with self._lock:
            value = self._computed(first) if self._value is None else self._value
            if self._is_saved and self._value is None and torch_compat.is_in_backward():
                self._value = value
                own = weakref.ref(self)
                backward = torch_compat.backward_id()
                torch_compat.call_after_backward(lambda: _forget(own(), backward))
            return value


def _forget(own: Recomputed | None, backward: int) -> None:
    if own is not None:
        own._value = None
        own._unpacked.pop(backward, None)


def _check(t: Tensor, version: int) -> None:
    """Raises if a tensor has changed or was freed since the forward."""
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
    """The tensors of an execution that are computed again instead of saved."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, int], Recomputed] = {}

    def find(self, node: object, t: Tensor) -> Recomputed | None:
        """Returns the `Recomputed` of a tensor with the value of `node`; None if it is saved."""
        return self._found.get((node, torch_compat.storage_id(t)))

    def add(self, node: object, recomputed: Recomputed, result: Tensor) -> None:
        self._found[node, torch_compat.storage_id(result)] = recomputed

    @contextlib.contextmanager
    def reading(self, inputs: Iterable[tuple[object, Tensor]]) -> Iterator[None]:
        """Context in which autograd does not save recorded tensors.

        Args:
            inputs: the nodes or tensors that the body reads, and their values.
        """
        pairs = ((torch_compat.storage_id(t), self.find(node, t)) for node, t in inputs)
        found = {key: recomputed for key, recomputed in pairs if recomputed is not None}
        if not found:
            yield
            return
        outer = torch_compat.top_saved_tensor_hooks()

        def pack(t: Tensor) -> Any:
            recomputed = found.get(torch_compat.storage_id(t))
            if recomputed is None:
                return t if outer is None else outer[0](t)
            recomputed.save(outer)
            offset: Any = t.storage_offset() - recomputed.offset
            return _View(recomputed, t.shape, t.stride(), offset)

        def unpack(packed: Any) -> Tensor:
            if type(packed) is not _View:
                return packed if outer is None else outer[1](packed)
            value = packed.base.value()
            return value.as_strided(
                packed.shape, packed.strides, value.storage_offset() + packed.offset
            )

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _View(NamedTuple):
    """Replaces a tensor that autograd would save, as a view of a result."""

    base: Recomputed
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
