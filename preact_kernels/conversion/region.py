"""Regions of code in which norms and the operations after them are deferred and run fused."""

import contextlib
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from preact_kernels import call_stack, torch_compat
from preact_kernels.activations import Activation
from preact_kernels.conversion import operations, registry, repeatable
from preact_kernels.conversion import rules as rules
from preact_kernels.conversion.containers import mapped, tensors
from preact_kernels.conversion.context import Context
from preact_kernels.conversion.deferred import (
    Deferred,
    Node,
    Operation,
    StageRunner,
    called,
    compute,
    computed_arguments,
    deferred_result,
    has_deferred,
    has_own_history,
    recomputed,
    retry_plain,
)
from preact_kernels.conversion.execution import execute
from preact_kernels.conversion.functions import exposes, is_write
from preact_kernels.conversion.liveness import unread
from preact_kernels.conversion.named_activations import (
    NamedActivations,
    recorded,
    regions,
    replace_functions,
    restore_functions,
)
from preact_kernels.conversion.owners import Owner, Owners
from preact_kernels.conversion.policy import POLICIES, Policy
from preact_kernels.conversion.recomputation import Recomputation, is_small
from preact_kernels.conversion.replay import Replay
from preact_kernels.conversion.report import Outcome
from preact_kernels.conversion.subclasses import (
    Call,
    NotServed,
    PlainTensors,
    become_instance,
    result_on_meta,
)
from preact_kernels.kernels import layout
from preact_kernels.torch_compat import disable_torch_function, storage_id


class Region(TorchFunctionMode):
    """While entered, defers operations on this thread and runs them fused.

    Operations without a rule in `registry.RULES` compute their deferred arguments.

    Args:
        memory: memory mode of residual blocks, as in `PreActStage`.
        owners: finds the modules of a model by their parameters and buffers.
        run_stage: replaces `preact_stage` for consecutive residual blocks, for planning.
        extra_types: subclasses of Tensor to defer like plain tensors.
        is_traced: whether PyTorch traces the code. Then no deferred tensor is left at the end or
            passed to C++.
        activations: activations that the user names.

    Attributes:
        is_distributed: whether there is a process group.
        pending: nodes that are not computed yet, in order.
        outcomes: outcomes of the norms.
    """

    def __init__(
        self,
        memory: str = "store",
        owners: "Owners | None" = None,
        run_stage: StageRunner | None = None,
        extra_types: tuple[type, ...] = (),
        is_traced: bool = False,
        activations: NamedActivations | None = None,
    ) -> None:
        super().__init__()
        self.activations = activations or NamedActivations.of()
        self.memory, self.owners, self.run_stage = memory, owners or Owners(), run_stage
        self.tensor_types = frozenset((Tensor, nn.Parameter, *extra_types))
        self._ordinary_types = self.tensor_types | {Deferred}
        self.is_traced, self.is_distributed = is_traced, torch_compat.is_distributed()
        self.pending: list[Node] = []
        self.outcomes: list[tuple[nn.Module | None, Outcome]] = []
        self.context: Any = None
        self.is_closed = self._is_suspended = False
        self._suspended_for: list[Any] = []
        self.frame: types.FrameType | None = None  # frame that entered the region
        self.recomputed: dict[int, dict[Node, Tensor]] = {}  # values by backward
        self._modes = torch_compat.eager_modes()
        hooks = torch_compat.top_saved_tensor_hooks()
        frees_parameters = self.is_distributed and torch_compat.has_fsdp()
        self.recomputation = Recomputation(hooks, frees_parameters)
        self._hooks = self.recomputation.hooks()  # one object for all operations
        self._dispatch_modes = torch_compat.dispatch_mode_count()
        # Computed tensors that could not become plain tensors yet, by id.
        self._not_plain: dict[int, weakref.ref[Deferred]] = {}
        # Ids of running statistics that pending norms update, and that they only read.
        self.updated: set[int] = set()
        self.evaluated: set[int] = set()
        self._normalised: set[int] = set()  # ids of the inputs of pending norms
        self._storages = _Storages()
        self._plain_tensors = PlainTensors()
        self._call_of_subclass: Call | None = None  # current call with instances of subclasses
        # Copies of running statistics, by id of the original, for a call that must not update it.
        self.copies: dict[int, Tensor] = {}
        self.refusal = ""  # class that kept the last call from being deferred, with advice
        self.lock = threading.RLock()
        self.saves_less = False  # whether any module has a memory mode other than "store"
        self.replay: Replay | None = None  # answers calls as in an earlier forward

    def __enter__(self) -> "Region":
        """Enters the region; first computes pending nodes of outer regions."""
        for region in regions.entered:
            region.flush("an inner region")
        regions.entered.append(self)
        replace_functions(self.activations.functions)
        # PyTorch forbids it in the forward of autograd functions, and in inference mode.
        self._allows_forward_mode = torch_compat.is_forward_mode_allowed()
        torch_compat.allow_forward_mode(True)
        self._is_inference = torch.is_inference_mode_enabled()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Ends recording; `finish` computes pending nodes."""
        self.is_closed = True
        regions.entered.remove(self)
        restore_functions(self.activations.functions)
        torch_compat.allow_forward_mode(self._allows_forward_mode)
        if torch_compat.is_innermost_function_mode(self):  # False for interleaved generators
            super().__exit__(*error)

    def suspend(self, module: Any) -> None:
        """Leaves the region while a module or function runs, unless another mode was entered since.

        First computes results of the region that the program holds.
        """
        self.flush("a module that runs plain")
        self._suspended_for.append(module)
        if not self._is_suspended and torch_compat.is_innermost_function_mode(self):
            super().__exit__(None, None, None)
            self._is_suspended = True

    def resume(self, module: Any) -> None:
        """Undoes `suspend(module)`, and later suspensions that are still open."""
        if module not in self._suspended_for:
            return
        while self._suspended_for.pop() is not module:
            pass
        if self._is_suspended and not self._suspended_for:
            self._is_suspended = False
            super().__enter__()

    @torch_compat.not_compiled
    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Records `func`, or calls it on computed tensors."""
        kwargs = kwargs or {}
        if self.is_closed:
            return func(*args, **kwargs)
        if self.pending and self.is_in_function():
            self.flush(_IN_FUNCTION)  # it may free its inputs and results
        if self.frame is not None and self.frame.f_back is None:
            self._abandon()  # an interrupt skipped the end of the region
            return func(*args, **kwargs)
        if not torch_compat.is_torch_function_enabled():  # as in `Tensor.backward` of an instance
            types = tuple(map(type, tensors((args, kwargs))))
        if func is _COUNT and not kwargs and _counts_batch(args):
            return func(*args)
        replay = self.replay
        if replay is not None and func is replay.func:
            with disable_torch_function():
                result = replay.answer(func, args, kwargs)
            if result is not NotImplemented:
                return result
        rule, self.refusal = registry.RULES.get(func), ""
        reads_deferred = Deferred in types
        if not reads_deferred and not self._ordinary_types.issuperset(types):
            reads_deferred = any(issubclass(t, Deferred) for t in types)
        if rule is registry.METADATA:
            if not reads_deferred:
                return func(*args, **kwargs)
            if call_stack.is_read_by_checkpoint(_CALL):  # it saves its inputs in C++
                return self._call(func, reads_deferred, args, kwargs)
            with disable_torch_function():
                return func(*args, **kwargs)
        if rule is not None and (reads_deferred or self._is_first(func)):
            result = self._record_by(rule, func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        elif self.activations.operators and reads_deferred:
            activation = self.activations.of_operator(func)
            if (result := recorded(self, args, kwargs, activation)) is not NotImplemented:
                return result
        return self._call(func, reads_deferred, args, kwargs)

    def _is_first(self, func: Callable) -> bool:
        """Whether a rule decides about a call without deferred arguments."""
        if func in registry.NORM_FUNCTIONS:
            return True
        # The rules of other functions look for pending norms, or for a checkpoint's recomputation.
        may_record = bool(self.pending) or torch_compat.is_in_backward()
        return may_record and func in registry.FIRST

    def _record_by(
        self, rule: Callable, func: Callable, types: Sequence[type], args: tuple, kwargs: dict
    ) -> Any:
        """Calls a rule, with plain tensors instead of instances of subclasses of Tensor."""
        first = type(next(itertools.chain(args, kwargs.values()), None))
        is_ordinary = first in self._ordinary_types or issubclass(first, list | tuple)
        is_ordinary = is_ordinary and self._ordinary_types.issuperset(types)
        if is_ordinary or self.is_traced:  # traced code has no instances of other classes
            with disable_torch_function():
                replay = self.replay
                count = 0 if replay is None else len(replay.nodes)
                result = rule(self, args, kwargs)
                if replay is not None and len(replay.nodes) > count:
                    replay.call_recorded(func, args, kwargs, result, count)
                return result
        call = Call(func, args, kwargs) if torch_compat.is_torch_function_enabled() else None
        with disable_torch_function():
            plain = self._plain_tensors.in_arguments((args, kwargs), self.tensor_types)
            self._call_of_subclass, count = call, len(self.pending)
            try:
                result = rule(self, *plain)
            finally:
                self._call_of_subclass = None
            is_argument = isinstance(result, Deferred) and len(self.pending) == count
            if is_argument and call is not None:  # the class may change its attributes
                node = result.preact_node
                same = node.shape, node.dtype, node.channels_last
                if self._result_on_meta(call, *same, True) is None:
                    return NotImplemented
            return result

    def _result_on_meta(
        self,
        call: Call,
        shape: Sequence[int],
        dtype: torch.dtype,
        channels_last: bool,
        in_place: bool,
    ) -> Tensor | None:
        """Returns `result_on_meta`; None if the class is not served."""
        strides = layout.strides(shape, channels_last)
        with torch_compat.without_dispatch_modes_above(0):
            like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            try:
                return result_on_meta(call, like, in_place)
            except NotServed as error:
                self.refusal = str(error)
                return None

    def is_recording(self) -> bool:
        """Whether operations may be deferred here.

        False under functional transforms and dispatch modes; inside `torch.utils.checkpoint`, where
        the backward runs operations again outside of the region, and must save the same tensors;
        and in custom autograd functions, which may free tensors without an operation of PyTorch.
        """
        return not self.is_in_function() and torch_compat.current_modes() == self._modes

    def is_in_function(self) -> bool:
        """Whether the forward of an autograd function runs; False in another inference mode."""
        if torch_compat.is_forward_mode_allowed():
            return False
        return torch.is_inference_mode_enabled() is self._is_inference

    def caller(self) -> types.FrameType | None:
        """Returns the frame that called the function of the current rule."""
        return call_stack.caller_of(_CALL)

    def context_for(self, device: torch.device) -> Context | None:
        """Returns the modes for a deferred operation, or None if it must not be deferred.

        Computes nodes that were recorded in other modes.
        """
        if not self.is_recording():
            return None
        context = self.context
        if context is None or context.device != device or not context.is_current():
            self.flush("an operation in another autocast, grad or inference mode")
            self.context = context = Context.current(device)
        return context

    def is_in_context(self) -> bool:
        """Whether `context_for` returns `self.context`; if False, perhaps; faster."""
        context, modes = self.context, self._modes
        return (
            torch_compat.is_forward_mode_allowed()
            and context.is_current()
            and torch_compat.current_modes() == modes
        )

    def record(
        self,
        operation: Operation,
        tensors: Sequence[Tensor],
        settings: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        channels_last: bool,
        in_place: bool = False,
    ) -> Any:
        """Defers an operation.

        Args:
            operation: the operation; `context_for(device)` is not None.
            tensors: inputs: deferred tensors, and tensors of the `tensor_types`.
            settings: other arguments.
            shape: shape of the result.
            dtype: dtype of the result.
            channels_last: memory format of the result in plain PyTorch.
            in_place: whether the result replaces the first of `tensors`, a deferred tensor.

        Returns:
            The deferred tensor, or NotImplemented if the operation must be called.
        """
        inputs: list[Any] = []
        needs_grad = reads_node = False
        for t in tensors:
            if isinstance(t, Deferred):
                node = t.preact_node
                if node.value is None and node.region is self and has_own_history(t):
                    inputs.append(node)
                    needs_grad, reads_node = needs_grad or node.needs_grad, True
                    continue
                computed = compute(t, "another region, or an autograd function")
                computed = self._plain_tensors.in_arguments(computed, self.tensor_types)
                tensors = [computed if other is t else other for other in tensors]
                t = computed
            inputs.append(t)
            needs_grad = needs_grad or t.requires_grad
        needs_grad = needs_grad and self.context.has_grad
        if not (reads_node or operation.precedes_activation or self.normalises(tensors[0])):
            return NotImplemented  # a change of modes computed the inputs, or their readers
        if in_place and (type(inputs[0]) is not Node or (inputs[0].needs_grad and not needs_grad)):
            return NotImplemented  # the input was computed, or gradients are disabled
        meta_result = inputs[0].meta_result if in_place else None
        if self._call_of_subclass is not None:
            expected = shape, dtype, channels_last, in_place
            meta_result = self._result_on_meta(self._call_of_subclass, *expected)
            if meta_result is None or (in_place and not isinstance(tensors[0], type(meta_result))):
                return NotImplemented  # not served, or PyTorch returns another object
        node = Node(self, operation, settings, inputs, shape, dtype, channels_last, needs_grad)
        with self.lock:
            self.pending.append(node)
            if operation.precedes_activation:
                self._normalised.add(id(inputs[0]))
        if self.memory != "store":
            node.memory = self.memory
        result = deferred_result(node, tensors, in_place)
        if meta_result is not None:
            become_instance(result, node, meta_result)
        if self.replay is not None:
            self.replay.recorded(node)
        return result

    def replayed_norm(self, norm: Node, updated: Set[int], evaluated: Set[int]) -> None:
        """Takes a norm like one that was recorded in an earlier forward.

        Args:
            norm: its node.
            updated: ids of the running statistics that it updates.
            evaluated: ids of those that it only reads.
        """
        self._normalised.add(id(norm.inputs[0]))
        self.updated.update(updated)
        self.evaluated.update(evaluated)

    def normalises(self, t: Tensor) -> bool:
        """Whether a pending norm reads a computed tensor, and may save it in NHWC for backward.

        False if PyTorch traces the code, since a compiler decides what is saved.
        """
        return id(t) in self._normalised and torch.is_grad_enabled() and not self.is_traced

    def named_activation(self, called: type) -> Activation | None:
        """Returns the activation that the user names for a class of modules or functions."""
        return self.activations.of_class(called)

    def note(self, owner: Owner | None, reason: str) -> None:
        """Records why a norm is not deferred."""
        if owner is not None or self.is_traced:
            module = None if owner is None else owner.module
            self.outcomes.append((module, Outcome("", reason)))

    def before_statistics(self, statistics: Sequence[Tensor], is_updated: bool) -> None:
        """Computes pending nodes if a norm among them conflicts with a call on these statistics."""
        for t in statistics:
            if id(t) in self.updated or (is_updated and id(t) in self.evaluated):
                self.flush("a second call of the batch norm")

    def _call(self, func: Callable, reads_deferred: bool, args: tuple, kwargs: dict) -> Any:
        if self.copies:
            copies, self.copies = self.copies, {}
            args, kwargs = mapped(lambda t: copies.get(id(t), t), (args, kwargs))
        if not kwargs and all(map(_is_irrelevant, args)):
            return func(*args, **kwargs)
        if not self.pending:
            return self._run(func, (args, kwargs), args, kwargs)
        if func in _BACKWARD or torch_compat.is_function_apply(func):  # they may write to anything
            self.flush(func)
        given = args, kwargs
        if reads_deferred:
            if has_deferred(given):
                reader = f"{func.__name__} of {self.refusal}" if self.refusal else func
                args, kwargs = computed_arguments(given, reader)
            else:  # the deferred tensor is in an object of another class
                self.flush(func)
        is_written = bool(self.pending) and is_write(func, args, kwargs)
        if self.pending and (is_written or self.updated):
            with disable_torch_function():
                ids = {storage_id(t) for t in tensors((args, kwargs)) if t.is_floating_point()}
                if ids and self._storages.concern(self.pending, ids, is_written):
                    self.flush(func)
        return self._run(func, given, args, kwargs)

    def _run(self, func: Callable, given: tuple, args: tuple, kwargs: dict) -> Any:
        """Calls a function; the backward may compute again what it saves, and its result."""
        policy = POLICIES.get(self.memory)
        # Modules in mode "store", too, must report writes to tensors that recipes read.
        has_no_recipes = policy is None and self.recomputation.is_empty
        if has_no_recipes or not torch_compat.has_saved_tensor_hooks():
            return called(func, given, args, kwargs)
        is_function, is_exposed = torch_compat.is_function_apply(func), exposes(func)
        is_written = is_function or is_exposed or is_write(func, args, kwargs)
        if is_written:
            with disable_torch_function():
                self.recomputation.before_write(tensors((args, kwargs)), is_exposed)
        is_opaque = func in _BACKWARD or is_function
        if policy is None or is_opaque or not self.saves_values() or not self.is_recording():
            return called(func, given, args, kwargs)
        # Otherwise a class may change results; a checkpoint may recompute with plain tensors.
        is_plain = torch_compat.is_torch_function_enabled()
        function = func
        if is_plain and args and type(args[0]) in self.tensor_types and args[0].requires_grad:
            function = repeatable.without_indices(func)
        with self.saving():
            result = called(function, given, args, kwargs)
        with disable_torch_function():
            if (
                type(result) in self.tensor_types
                and is_plain
                and not is_written
                and repeatable.is_repeatable(func)
                and result.requires_grad
            ):
                self._remember(policy, func, args, kwargs, result)
            self.recomputation.settle(policy)
        return result

    def _remember(
        self, policy: Policy, func: Callable, args: tuple, kwargs: dict, result: Tensor
    ) -> None:
        """Lets the backward compute a result again instead of saving it."""
        if is_small(result):
            return
        separated = repeatable.separated(args, kwargs)
        if separated is None:
            return
        found, arguments = separated
        if not self.tensor_types.issuperset(map(type, found)):
            return
        work, product = repeatable.work(func, found, result)
        if self.recomputation.refuses(policy, work, result, product):
            return
        are_constants = [repeatable.is_constant(t) for t in found]
        inputs = [t for t, c in zip(found, are_constants, strict=True) if not c]
        if not inputs or not all(t.is_floating_point() for t in inputs):
            return
        constant = self.recomputation.constant
        weight = found[1] if product is not None and found[0].requires_grad else None
        constants = [
            constant(t, t is weight) for t, c in zip(found, are_constants, strict=True) if c
        ]

        def call(*tensors: Tensor) -> Tensor:
            of_inputs, others = iter(tensors), iter(constants)
            given = [next(others if c else of_inputs) for c in are_constants]
            own_args, own_kwargs = arguments(*given)
            return func(*own_args, **own_kwargs)

        context = self.recomputation.context(result.device)
        self.recomputation.add(policy, result, call, inputs, constants, context, work)

    def saving(self) -> contextlib.AbstractContextManager:
        """Context in which hooks replace what an operation saves."""
        return torch.autograd.graph.saved_tensors_hooks(*self._hooks)

    def saves_values(self) -> bool:
        """Whether hooks may replace what autograd saves; a compiler decides that itself."""
        is_eager = not self.is_traced and torch.is_grad_enabled()
        return is_eager and torch_compat.has_saved_tensor_hooks()

    def compute(self, targets: Sequence[Node], reader: object) -> None:
        """Computes nodes, and pending nodes that they read.

        Args:
            targets: pending nodes.
            reader: the function that reads the results, or a description for the report.
        """
        with self._modes_of_execution():
            wanted = set(targets)
            needed, nodes, others = set(wanted), [], []
            for node in reversed(self.pending):
                if node in needed:
                    nodes.append(node)
                    for i in node.inputs:
                        if type(i) is Node and i.value is None:
                            needed.add(i)
                else:
                    others.append(node)
            self._set_pending(others[::-1])
            if not nodes:
                return
            nodes.reverse()
            self._forget_unread([n for n in nodes if n not in wanted])
            replay = self.replay
            try:
                with nodes[0].context.entered_above_autograd():
                    execute(self, nodes, reader, replay)
            except BaseException:
                self.replay = None
                raise
            finally:
                left = [n for n in nodes if not n.is_done]
                if left:
                    self._set_pending(left + self.pending)
            for node in nodes:
                node.release()
            if replay is not None:
                replay.executed(nodes, self.pending)

    def compute_again(self, node: Node) -> None:
        """Computes a node that was dropped as unread, in plain operators."""
        with self._modes_of_execution(), node.context.entered_above_autograd():
            node.value = recomputed(node)

    @contextlib.contextmanager
    def _modes_of_execution(self) -> Iterator[None]:
        modes = torch_compat.without_dispatch_modes_above(self._dispatch_modes)
        transforms = torch_compat.without_functorch_transforms()
        with self.lock, modes, transforms, disable_torch_function():
            yield

    def _forget_unread(self, nodes: Sequence[Node]) -> None:
        """Drops references to tensors that the program never reads again."""
        held, tensors, t = [], [], None
        for node in nodes:
            t = None if node.reference is None else node.reference()
            if t is not None:
                held.append(node)
                tensors.append(t)
        del t
        for node, is_unread in zip(held, unread(tensors, self.frame), strict=True):
            if is_unread:
                node.reference = None

    def _set_pending(self, nodes: list[Node]) -> None:
        self.pending, self._storages = nodes, _Storages()
        self.updated = {id(t) for n in nodes for t in operations.tracked_statistics(n)}
        self.evaluated = {id(t) for n in nodes for t in operations.constants(n)}
        self._normalised = {id(n.inputs[0]) for n in nodes if n.operation.precedes_activation}

    def flush(self, reader: object) -> None:
        """Computes all results that the program holds, and updates running statistics."""
        if not self.pending:
            return
        with self.lock:
            self._forget_unread(self.pending)
            held = [n for n in self.pending if n.is_held or operations.tracked_statistics(n)]
            self.compute(held, reader)
            for node in self.pending:  # nothing reads these
                node.release()
            if self.replay is not None:
                self.replay.executed(self.pending, ())
            self._set_pending([])

    def _abandon(self) -> None:
        """Closes the region; its function mode stays on the stack."""
        self.is_closed, self.frame = True, None
        with contextlib.suppress(Exception):
            self.finish("an interrupted call")

    def keep(self, t: Deferred) -> None:
        """Remembers a computed tensor that could not become a plain tensor yet."""
        self._not_plain[id(t)] = weakref.ref(t)

    def finish(self, reader: object) -> None:
        """Computes pending nodes, and makes deferred tensors plain tensors."""
        self.flush(reader)
        self.recomputation.finish()
        for reference in list(self._not_plain.values()):
            t = reference()
            if isinstance(t, Deferred):
                retry_plain(t)


_CALL = Region.__torch_function__.__code__
_COUNT = Tensor.add_
_BACKWARD = {Tensor.backward, torch.autograd.grad}
_IN_FUNCTION = "a custom autograd function"


class _Storages:
    """Storages that pending nodes read, and running statistics that they update."""

    def __init__(self) -> None:
        self._read: set[int] = set()
        self._updated: set[int] = set()
        self._count = 0  # number of pending nodes added so far

    def concern(self, pending: Sequence[Node], ids: set[int], is_written: bool) -> bool:
        """Whether a call that reads or writes the storages `ids` must wait for pending nodes."""
        for node in pending[self._count :]:
            self._updated.update(map(storage_id, operations.tracked_statistics(node)))
            self._read.update(map(storage_id, operations.constants(node)))
            for i in node.inputs:
                t = i.value if isinstance(i, Node) else i
                if t is not None:
                    self._read.add(storage_id(t))
        self._count = len(pending)
        return not self._updated.isdisjoint(ids) or (is_written and not self._read.isdisjoint(ids))


def _counts_batch(args: tuple) -> bool:
    """Whether a sum in place is that of a norm that counts a batch, outside of checkpoints."""
    return not torch_compat.is_in_backward() and all(map(_is_irrelevant, args))


def _is_irrelevant(value: object) -> bool:
    """Whether an argument cannot concern pending nodes: a number, or a tensor of integers."""
    if isinstance(value, Tensor):
        return not isinstance(value, Deferred) and not value.is_floating_point()
    return type(value) in (bool, float, int)
