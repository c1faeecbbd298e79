"""Tensors that the backward computes again, in memory modes "rebuild" and "checkpoint".

While an operation runs, hooks of saved tensors replace what autograd saves by a `Value`: the
contents of a storage. An operation that can be repeated gives its result's `Value` a `Recipe`. A
saved value with a recipe is dropped if that pays (`Policy`), and computed again when the backward
reads it; other saved values are kept.
"""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from preact_kernels import torch_compat
from preact_kernels.conversion.containers import mapped
from preact_kernels.conversion.context import Context
from preact_kernels.conversion.policy import Policy, Product
from preact_kernels.torch_compat import FakeTensor

_MOST_BYTES_OF_VECTORS = 2**18
# A backward holds a value that it computed if it reads it again before the forward had saved this
# many times its bytes, and those of the values computed before it.
_WINDOW = 4
# Values that take more work per byte are not computed several times.
_REPEATED_WORK = 8


class Geometry(NamedTuple):
    """The part of a storage that a tensor shows."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(t: Tensor) -> "Geometry":
        return Geometry(t.shape, t.stride(), int(t.storage_offset()))


class Part(NamedTuple):
    """A tensor that shows a part of a value."""

    value: "Value"
    geometry: Geometry

    def is_temporary(self, result: "Value") -> bool:
        """Whether nothing else reads the tensor, which has the shape and strides of `result`."""
        v = self.value
        is_alike = self.geometry == v.geometry and v.geometry[:2] == result.geometry[:2]
        return is_alike and v.recipe is not None and not v.positions


class Recipe(NamedTuple):
    """How to compute a value again.

    Attributes:
        call: computes the value from tensors.
        inputs: the tensors.
        constants: other tensors that `call` reads.
        versions: their versions.
        context: the modes in which to run `call`.
        in_place: does the same, and writes its result to the first input; None: `call` only.
    """

    call: Callable[..., Tensor]
    inputs: tuple[Part, ...]
    constants: tuple[Tensor, ...]
    versions: tuple[int, ...]
    context: Context
    in_place: Callable[..., Tensor] | None


class Value:
    """The contents of a storage at one version.

    Attributes:
        key: id of the storage, and dtype; for a part of a storage that the program's hooks pack
            alone, also its geometry.
        storage: a reference that keeps the id of the storage from being used again.
        version: version of the tensors of the storage.
        geometry: what `tensor` shows.
        dtype: dtype of `tensor`.
        nbytes: bytes of `tensor`.
        tensor: the contents, if kept; or while it is not decided.
        packed: `tensor` as the program's hooks of saved tensors packed it, instead of `tensor`.
        recipe: how to compute it again; None: it is kept.
        positions: for each saved tensor, in order, the bytes that were saved before.
        work: work to compute it from saved values.
        repeated: work to compute it again for later readers.
        is_dropped: whether it is saved, and not kept.
        held: bytes of the dropped values to compute before it, when it was decided.
        unsaved: values to keep only for this one, in order.
        sources: kept values that it is computed from.
        reads: saved tensors that are computed from this kept value.
        uses: saved tensors that are computed from this value, which is neither kept nor dropped.
        is_source: whether a recipe reads `tensor`.
    """

    def __init__(self, key: Any, geometry: Geometry, t: Tensor, tensor: Tensor | None) -> None:
        self.key, self.storage = key, torch_compat.WeakStorage(t.untyped_storage())
        self.version, self.geometry, self.dtype = t._version, geometry, t.dtype
        self.nbytes = t.nbytes
        self.tensor = tensor
        self.packed: Any = None
        self.recipe: Recipe | None = None
        self.is_dropped = self.is_source = False
        self.positions: tuple[int, ...] = ()
        self.work = self.repeated = 0.0
        self.held = 0
        self.unsaved: tuple[Value, ...] = ()
        self.sources: frozenset[Value] = frozenset()
        self.reads = self.uses = 0

    @property
    def is_kept(self) -> bool:
        """Whether autograd saves it, or a dropped value is computed from it."""
        return bool(self.positions or self.reads) and not self.is_dropped

    def keep(self, hooks: Any) -> None:
        """Keeps `tensor`, as the program's hooks of saved tensors pack it."""
        self.recipe, self.is_dropped = None, False
        self.sources, self.unsaved = frozenset(), ()
        if hooks is not None and self.tensor is not None:
            self.packed, self.tensor = hooks[0](self.tensor), None

    def copy(self, t: Tensor) -> None:
        """Keeps a copy, as the program may change `t`, a tensor on the storage."""
        like = torch.empty(0, dtype=self.dtype, device=t.device)
        geometry = self.geometry.offset, self.geometry.shape, self.geometry.strides
        self.tensor, self.packed = like.set_(t.untyped_storage().clone(), *geometry), None
        self.version = self.tensor._version

    def shown(self, whole: Tensor, geometry: Geometry) -> Tensor:
        """The part of a tensor with the contents of the value."""
        own = self.geometry
        if geometry is own or geometry == own:
            return whole
        if whole.stride() != own.strides:
            whole = _with_strides(whole, own.strides)
        offset = whole.storage_offset() + geometry.offset - own.offset
        return whole.as_strided(geometry.shape, geometry.strides, offset)

    @property
    def has_changed(self) -> bool:
        """Whether the program has changed `tensor` in place."""
        return self.tensor is not None and self.tensor._version != self.version

    def checked(self) -> Tensor:
        """The kept tensor; raises if it has changed since it was saved."""
        t = cast(Tensor, self.tensor)
        _check(t, self.version)
        return t


class _Saved(NamedTuple):
    """Replaces a tensor that autograd would save."""

    owner: "Recomputation"
    value: Value
    geometry: Geometry
    position: int

    def replace(self, t: Tensor) -> "_Saved":
        """A hook of saved tensors."""
        return self


class _Unchanged(NamedTuple):
    """Replaces a tensor that autograd would save, and that is kept in any case."""

    tensor: Tensor
    version: int


class _Packed(NamedTuple):
    """The same, as the program's hooks packed it."""

    unpack: Callable
    packed: Any


class _Pass:
    """What a backward has computed again, or unpacked, and will read again.

    Attributes:
        values: by value.
        read: how many saved tensors it has read, by value, and for values that hooks packed also
            how many that are computed from it; without values that it does not read again.
    """

    def __init__(self) -> None:
        self.values: dict[Value, Tensor] = {}
        self.read: Counter[Value] = Counter()

    def reads_soon(self, value: Value, first: float) -> bool:
        """Whether a saved tensor with the value is read before one at position `first`."""
        left = len(value.positions) - self.read[value]
        return left > 0 and value.positions[left - 1] >= first


class Recomputation:
    """The values of a region.

    Args:
        hooks: the program's hooks of saved tensors, to apply to what is kept; or None.
        frees_parameters: whether parameters may be freed before the backward, as by FSDP2.

    Attributes:
        work: work of the dropped values, in bytes moved.
    """

    def __init__(self, hooks: Any, frees_parameters: bool) -> None:
        self._hooks, self._frees_parameters = hooks, frees_parameters
        # Values by key: saved ones, and in `_fresh` those with a recipe that are not saved yet.
        self._known: dict[Any, weakref.ref[Value]] = {}
        self._fresh: dict[Any, Value] = {}
        self._undecided: list[Value] = []  # saved by the current operation for the first time
        self._nodes: list[weakref.ref] = []  # hidden nodes that keep values
        self._holding: list[Value] = []  # those of `_fresh` that hold unsaved values
        # Values that are kept for others alone, and storages that code outside may change.
        self._extra: weakref.WeakSet[Value] = weakref.WeakSet()
        self._exposed: dict[int, Any] = {}
        self._geometries: dict[Geometry, Geometry] = {}
        self._read: set[int] = set()  # ids of storages that recipes read, or have read
        self.work = 0.0
        # Bytes of the values saved so far, of the largest, and of those that are kept.
        self._position = self._largest = self._kept_bytes = 0
        self._operation = 0  # `_position` when the current operation began
        self._context: Context | None = None
        self._passes: dict[int, _Pass] = {}
        self._lock = threading.RLock()

    @property
    def is_empty(self) -> bool:
        """Whether no recipe can read a tensor of the program."""
        return not self._known and not self._fresh

    def hooks(self) -> tuple[Callable, Callable]:
        """Hooks of saved tensors for each operation; call `settle` after it."""
        return self._pack, _unpacked

    def may_hide_nodes(self) -> bool:
        """Whether a node may save tensors without hooks: the program has no hooks of its own."""
        return self._hooks is None and torch_compat.top_saved_tensor_hooks() is None

    def record_saved(self, tensors: Iterable[tuple[int, Tensor]]) -> list[tuple[int, "_Saved"]]:
        """Treats what the hidden node of a custom function saved as what hooks see.

        Args:
            tensors: tensors by their index among the node's saved tensors; others are kept.

        Returns:
            What `settle` is to replace.
        """
        packed = [(index, self._pack(t)) for index, t in tensors]
        return [(index, saved) for index, saved in packed if type(saved) is _Saved]

    def context(self, device: torch.device) -> Context:
        """The current modes for tensors on a device."""
        context = self._context
        if context is None or context.device != device or not context.is_current():
            context = self._context = Context.current(device)
        return context

    def refuses(self, policy: Policy, work: float, result: Tensor, product: Product | None) -> bool:
        """Whether an operation takes too much work to be repeated; see `Policy.refuses`."""
        return policy.refuses(work, result, product, self._kept_bytes, self._position)

    def add(
        self,
        policy: Policy,
        result: Tensor,
        call: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        constants: Sequence[Tensor],
        context: Context,
        work: float,
        in_place: Callable[..., Tensor] | None = None,
        is_twin: bool = False,
    ) -> bool:
        """Records how an operation computed its result, so that it need not be saved.

        Args:
            policy: decides about the inputs, if the operation saved them.
            result: the result; ignored if it is not dense, or shares memory with other tensors.
            call: computes it again, without gradients, from `inputs`.
            inputs: tensors of the size of an image.
            constants: other tensors that `call` reads.
            context: the modes in which the operation ran.
            work: its work, in bytes moved.
            in_place: like `call`, but writes to the first input, of the same shape and dtype.
            is_twin: the result is the older of a tensor and its copy, of which one is to be saved.

        Returns:
            Whether the result need not be saved.
        """
        if is_small(result) or policy.is_negligible(result.nbytes, self._largest):
            return False
        if not _is_served(result) or not _is_whole(result):
            return False
        if not all(map(_is_served, inputs)):
            return False
        if self._frees_parameters and not all(map(is_small, constants)):
            return False
        key, keys = _key(result), [*map(_key, inputs)]
        found = self._find(result, key)
        is_new = found is None or (found.recipe is None and found in self._undecided)
        if not is_new or key in keys:
            return False  # it is a view
        self._decide(policy, [v for v in self._undecided if v is not found])
        parts = [
            Part(self._find(t, k) or self._new(t.detach(), k), self._geometry(t))
            for t, k in zip(inputs, keys, strict=True)
        ]
        sources = frozenset(p.value for p in parts if p.value.recipe is None)
        unsaved = [p.value for p in parts if p.value in sources and not p.value.is_kept]
        value = Value(key, self._geometry(result), result, None) if found is None else found
        for part, t in zip(parts, inputs, strict=True):
            v = part.value
            if v.recipe is not None:
                self._keep_if_costly(v, t)
            if v.recipe is None:
                sources |= {v}
                continue
            sources = sources | v.sources if sources else v.sources
            if not v.is_dropped:
                unsaved, work = [*unsaved, *(u for u in v.unsaved if not u.is_kept)], work + v.work
        unsaved = list(dict.fromkeys(unsaved))
        is_large = 2 * sum(v.nbytes for v in unsaved) > value.nbytes and not is_twin
        if is_large or any(map(self._is_exposed, unsaved)):
            return False
        value.work, value.unsaved, value.sources = work, tuple(unsaved), sources
        for v in sources:
            v.is_source = True
            self._read.add(v.key[0])
        constants = tuple([t.detach() if t.requires_grad else t for t in constants])
        versions = tuple([t._version for t in constants])
        value.recipe = Recipe(call, tuple(parts), constants, versions, context, in_place)
        if found is None:
            self._fresh[key] = value
            if unsaved:
                self._holding.append(value)
        return True

    def constant(self, t: Tensor, is_saved: bool = False) -> Tensor:
        """A tensor without its history; of a small one a copy, since it may change or be freed.

        Args:
            t: the tensor.
            is_saved: whether autograd saves it, so that it may not change.
        """
        is_copied = is_small(t) and (self._frees_parameters or not is_saved)
        return t.detach().clone() if is_copied else t.detach()

    def constants(self, given: Any) -> Any:
        """Applies `constant` to the tensors in a tuple if parameters may be freed."""
        return mapped(self.constant, given) if self._frees_parameters else given

    def before_write(self, tensors: Iterable[Tensor], is_exposed: bool) -> None:
        """Copies what recipes read, before it may change in place.

        Args:
            tensors: the tensors that may change.
            is_exposed: whether code outside of PyTorch may change them later, unseen.
        """
        ids = {torch_compat.storage_id(t): t for t in tensors if t.layout is torch.strided}
        if not is_exposed and self._read.isdisjoint(ids):
            return
        values: list[tuple[dict, Any, Value | None]] = [
            *((self._known, key, found()) for key, found in self._known.items()),
            *((self._fresh, key, found) for key, found in self._fresh.items()),
        ]
        for own, key, value in values:
            if key[0] not in ids:
                continue
            if value is not None and value.is_source and not value.is_dropped:
                value.copy(ids[key[0]])
                del own[key]
            elif is_exposed:
                del own[key]
        for key, t in ids.items() if is_exposed else ():
            self._exposed[key] = torch_compat.WeakStorage(t.untyped_storage())

    def _is_exposed(self, value: Value) -> bool:
        t = value.tensor
        return t is not None and torch_compat.storage_id(t) in self._exposed

    def settle(
        self, policy: Policy, node: Any = None, recorded: Sequence[tuple[int, _Saved]] = ()
    ) -> None:
        """Decides which values that the last operation saved are kept.

        Args:
            policy: decides.
            node: the hidden node of the operation.
            recorded: what `record_saved` returned for it.
        """
        self._decide(policy, self._undecided)
        self._operation = self._position
        kept = []
        for index, saved in recorded:
            if saved.value.recipe is not None:
                torch_compat.set_hooks_of_saved_tensor(node, index, saved.replace, _unpacked)
            else:
                kept.append(saved.value)
        if kept:  # later operations find the values as long as the node is alive
            node.preact_values = kept
            self._nodes.append(weakref.ref(node))
        for value in self._holding:
            if value.storage.expired():
                self._fresh.pop(value.key, None)
        self._holding = [v for v in self._holding if self._fresh.get(v.key) is v]
        if len(self._fresh) > 64:
            self._fresh = {k: v for k, v in self._fresh.items() if not v.storage.expired()}

    def _decide(self, policy: Policy, values: list[Value]) -> None:
        if not values:
            return
        for value in values:
            if value.recipe is None or not self._is_worth_it(policy, value):
                value.keep(self._hooks)
                self._kept_bytes += value.nbytes if value not in self._extra else 0
                continue
            for v in value.unsaved:
                if not v.is_kept:
                    self._keep_for_others(v)
            value.tensor, value.is_dropped, value.unsaved = None, True, ()
            self.work += value.work
            for v in value.sources:
                v.reads += len(value.positions)
            for part in value.recipe.inputs:
                part.value.uses += 1
        self._undecided = [v for v in self._undecided if v not in values]

    def _keep_for_others(self, value: Value) -> None:
        """Keeps a value that autograd does not save, and that the program may change."""
        if self._hooks is not None:  # they may not copy it
            version = value.version
            value.copy(cast(Tensor, value.tensor))
            value.version = version  # that of the program's tensor, so that `_find` finds it
        value.keep(self._hooks)
        value.is_source = True
        self._read.add(value.key[0])
        self._kept_bytes += value.nbytes
        self._extra.add(value)

    def _is_worth_it(self, policy: Policy, value: Value) -> bool:
        unsaved = [v for v in value.unsaved if not v.is_kept]
        if any(v.has_changed for v in unsaved):
            return False
        saved = value.nbytes - sum(v.nbytes for v in unsaved)
        value.held = sum([v.nbytes for v in _dropped_before(value)])
        return policy.drops(value.nbytes, saved, value.work, value.held, self._largest)

    def finish(self) -> None:
        """Forgets values that nothing saved, and copies what the program still holds."""
        for reference in self._nodes:
            if (node := reference()) is not None:
                del node.preact_values
        own = self._fresh, self._known, self._holding, self._exposed, self._read, self._geometries
        for found in (*own, self._nodes):
            found.clear()
        for value in list(self._extra):
            if value.tensor is not None and torch_compat.is_shared(value.tensor):
                value.copy(value.tensor)
        self._extra.clear()

    def _geometry(self, t: Tensor) -> Geometry:
        """One object for all equal geometries: the garbage collector visits each object."""
        found = Geometry.of(t)
        return self._geometries.setdefault(found, found)

    def _find(self, t: Tensor, key: Any) -> Value | None:
        version = t._version
        found = self._fresh.get(key)
        if found is not None and found.version == version:
            return found
        for own in (key,) if self._hooks is None else (key, (*key, Geometry.of(t))):
            known = self._known.get(own)
            found = None if known is None else known()
            if found is not None and found.version == version:
                return found
        return None

    def _new(self, t: Tensor, key: Any) -> Value:
        """A value that is not computed from others; the program's hooks pack its parts alone."""
        if self._hooks is not None and not _is_whole(t):
            key = *key, Geometry.of(t)
        value = Value(key, self._geometry(t), t, t)
        self._known[key] = weakref.ref(value)
        return value

    def _keep_if_costly(self, value: Value, t: Tensor) -> None:
        """Keeps a value that is not kept, but takes much work to compute again and again.

        Such are a dropped value that is read again much later, and a value that nothing saves, but
        that several dropped results are computed from.
        """
        work = 0.0
        if value.is_dropped:
            since = self._operation - value.positions[-1]
            if since > 4 * _WINDOW * value.nbytes:
                work = value.work + sum([v.work for v in _dropped_before(value)])
            if since > _WINDOW * (value.nbytes + value.held):
                value.repeated += value.work
                work = max(work, value.repeated)
        elif value.uses:
            value.repeated += value.work
            work = value.repeated
        if work > _REPEATED_WORK * value.nbytes:
            value.tensor = _whole(t, value)
            for v in value.sources if value.is_dropped else ():
                v.reads -= len(value.positions)
            value.reads += value.uses
            if value.positions:
                value.keep(self._hooks)
                self._kept_bytes += value.nbytes
            else:
                self._keep_for_others(value)
            self._fresh.pop(value.key, None)
            self._known[value.key] = weakref.ref(value)

    def _pack(self, t: Tensor) -> Any:
        if t.grad_fn is not None:  # its own function may save it
            t = t.detach()
        if type(t) is Parameter or is_small(t) or not _is_served(t):
            if self._hooks is not None:
                return _Packed(self._hooks[1], self._hooks[0](t))
            return t if t.is_inference() else _Unchanged(t, t._version)
        key = _key(t)
        value = self._find(t, key) or self._new(t, key)
        if not value.positions:
            self._position += value.nbytes
            self._largest = max(self._largest, value.nbytes)
            if value.tensor is None and value.packed is None:
                value.tensor = _whole(t, value)
            self._undecided.append(value)
            if value.recipe is not None:
                self._known[key] = weakref.ref(self._fresh.pop(key))
        elif value.is_dropped:
            for v in value.sources:
                v.reads += 1
        value.positions += (self._position,)
        return _Saved(self, value, self._geometry(t), self._position)

    def unpack(self, saved: _Saved) -> Tensor:
        """The tensor that a backward reads."""
        value = saved.value
        if value.recipe is None and self._hooks is None:
            return value.shown(value.checked(), saved.geometry)
        with self._lock:
            own = self._pass()
            own.read[value] += 1
            unpacked = value.sources if self._hooks is not None else ()
            t = own.values.get(value)
            if t is None:
                t = self._computed(value, saved.position, own)
            if not own.reads_soon(value, saved.position - _WINDOW * (value.nbytes + value.held)):
                if value.recipe is not None:
                    own.values.pop(value, None)
            elif torch_compat.is_in_backward():
                own.values[value] = t
            own.read.update(unpacked)
            for v in (value, *unpacked):
                if own.read[v] >= len(v.positions) + v.reads:
                    own.values.pop(v, None)
                    del own.read[v]  # the key would keep tensors that the value is computed from
            return value.shown(t, saved.geometry)

    def _pass(self) -> _Pass:
        backward = torch_compat.backward_id()
        if not torch_compat.is_in_backward():
            return _Pass()
        own = self._passes.get(backward)
        if own is None:
            if len(self._passes) > 4:  # backwards that raised
                del self._passes[min(self._passes)]
            own = self._passes[backward] = _Pass()
            reference = weakref.ref(self)
            torch_compat.call_after_backward(lambda: _forget(reference(), backward))
        return own

    def _kept(self, value: Value, own: _Pass) -> Tensor:
        """The contents of a kept value; hooks unpack it once in a backward."""
        if value.tensor is not None:
            return value.checked()
        t = own.values.get(value)
        if t is None:
            t = own.values[value] = self._hooks[1](value.packed)
        return t

    def _computed(self, target: Value, position: int, own: _Pass) -> Tensor:
        """Computes a value, and values before it that are dropped."""
        if target.recipe is None:
            return self._kept(target, own)
        order = _order(target, own)
        uses = Counter(p.value for v in order for p in cast(Recipe, v.recipe).inputs)
        first = position - _WINDOW * (target.nbytes + target.held)
        # Hooks run any code, in the modes of the backward.
        values = {i: self._kept(i, own) for i in uses if i.recipe is None}
        modes = torch_compat.without_functorch_transforms(), torch_compat.disable_torch_function()
        context: Context | None = None
        with modes[0], modes[1], torch.no_grad(), contextlib.ExitStack() as stack:
            for v in order:
                recipe = cast(Recipe, v.recipe)
                if recipe.context is not context:
                    stack.close()
                    context = recipe.context
                    stack.enter_context(context.entered_in_backward())
                for t, version in zip(recipe.constants, recipe.versions, strict=True):
                    _check(t, version)
                inputs = []
                for part in recipe.inputs:
                    i = part.value
                    computed = values if i in values else own.values
                    inputs.append(i.shown(computed[i], part.geometry))
                call = recipe.call
                first_input = recipe.inputs[0]
                is_last_use = first_input.value in values and uses[first_input.value] == 1
                if recipe.in_place is not None and is_last_use and first_input.is_temporary(v):
                    call = recipe.in_place
                y = call(*inputs)
                values[v] = y = _with_strides(y, v.geometry.strides)
                del inputs
                for part in recipe.inputs:
                    uses[part.value] -= 1
                    if not uses[part.value]:
                        values.pop(part.value, None)
                if v is not target and v.positions and own.reads_soon(v, first):
                    own.values[v] = y
        return y


def _unpacked(saved: Any) -> Tensor:
    if type(saved) is _Saved:
        return saved.owner.unpack(saved)
    if type(saved) is _Unchanged:
        _check(saved.tensor, saved.version)
        return saved.tensor
    return saved.unpack(saved.packed) if type(saved) is _Packed else saved


def _forget(own: Recomputation | None, backward: int) -> None:
    if own is not None:
        own._passes.pop(backward, None)


def _order(target: Value, own: _Pass) -> list[Value]:
    """The values to compute for `target`, in order."""
    order: dict[Value, None] = {}
    waiting = [target]
    while waiting:
        v = waiting[-1]
        recipe = cast(Recipe, v.recipe)
        missing = [
            p.value
            for p in recipe.inputs
            if p.value.recipe is not None and p.value not in order and p.value not in own.values
        ]
        if missing and v not in order:
            waiting += missing
        else:
            order.setdefault(waiting.pop())
    return [*order]


def _dropped_before(value: Value) -> list[Value]:
    """The dropped values to compute before a value."""
    found: dict[Value, None] = {}
    waiting = [value]
    while waiting:
        for part in cast(Recipe, waiting.pop().recipe).inputs:
            v = part.value
            if v.recipe is not None and v not in found:
                found[v] = None
                waiting.append(v)
    return [v for v in found if v.is_dropped]


def _key(t: Tensor) -> Any:
    return torch_compat.storage_id(t), t.dtype


def is_small(t: Tensor) -> bool:
    """Whether a tensor is kept in any case: values of channels, or of images and channels."""
    count = t.numel()
    is_vector = t.dim() < 3 or count <= t.shape[0] * t.shape[1]
    return is_vector and count * t.element_size() < _MOST_BYTES_OF_VECTORS


def _is_served(t: Tensor) -> bool:
    kind = type(t)
    is_plain = kind is Tensor or kind is FakeTensor
    return (
        (is_plain or kind.__torch_dispatch__ is Tensor.__torch_dispatch__)
        and t.is_floating_point()
        and t.layout is torch.strided
        and not t.is_inference()
        and not t.is_neg()
    )


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor shows each element of its storage once."""
    if t.untyped_storage().nbytes() != t.nbytes:
        return False
    if t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)):
        return True
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _whole(t: Tensor, value: Value) -> Tensor:
    """A tensor with the geometry of a value, from one on the same storage."""
    if Geometry.of(t) == value.geometry:
        return t.detach()
    return t.detach().as_strided(*value.geometry)


def _with_strides(t: Tensor, strides: Sequence[int]) -> Tensor:
    if t.stride() == tuple(strides):
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def _check(t: Tensor, version: int) -> None:
    """Raises if a tensor has changed or was freed since the forward."""
    if t._version != version:
        shape = list(t.shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {shape} is at version {t._version}, expected version "
            f"{version}"
        )
    if t.numel() and not t.untyped_storage().nbytes():
        raise RuntimeError(
            f"a tensor of shape {list(t.shape)} was freed between forward and backward; shard "
            "whole blocks, or use memory='store'"
        )
