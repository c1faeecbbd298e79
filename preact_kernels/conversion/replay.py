"""Remembers the calls that a region deferred, to answer the same calls of a later forward at once.

A training loop makes the same calls in every step. The first forward of a model is recorded as
usual: `rules.py` decides what is deferred, `matching.py` what runs fused. Beside it, a `Tape` keeps
for each deferred call its arguments and the node, and for each execution its steps. A later forward
compares each call with the tape, and on equality makes the node without asking the rule. The first
difference ends that: rules and matching decide again, and a new tape continues the common part.

What a rule reads is an argument that is compared, or follows from one:

- parameters and buffers of the model: the same objects, with the same metadata
- results of deferred calls: those of the same earlier calls, not computed yet
- other tensors: the same metadata, and the same tensor wherever it was one
- numbers and other constants: equal
- modes, memory mode, hooks of modules: asked at each call
- what is pending: the same executions have happened before, on the same nodes
"""

import copy
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from preact_kernels.conversion.context import Context
from preact_kernels.conversion.deferred import (
    Deferred,
    Node,
    Recording,
    deferred_result,
    has_own_history,
)
from preact_kernels.conversion.matching import Match
from preact_kernels.conversion.operations import CONV, DROPOUT, NORM, tracked_statistics
from preact_kernels.conversion.operations import constants as statistics_read
from preact_kernels.conversion.report import described
from preact_kernels.conversion.rules import is_conv_called_alike, is_norm_called_alike
from preact_kernels.conversion.tape import (
    NODE,
    OTHER,
    OWNED,
    Modes,
    Plan,
    Same,
    Tape,
    TapedCall,
    TapedNode,
    are_equal,
    has_list,
    is_constant,
    metadata_of,
    metadata_of_owned,
    steps_of,
)


class Tapes:
    """The tapes of a model, the last used first; safe to use from several threads."""

    MOST = 4
    MISSES = 8  # after so many forwards in a row that no tape described, try rarely
    PAUSE = 16

    def __init__(self) -> None:
        self._tapes: tuple[Tape, ...] = ()
        self._misses = self._calls = 0

    def start(self, region: Recording, key: tuple) -> "Replay | None":
        """Returns what answers and records the calls of a region; None: nothing does."""
        self._calls += 1
        if self._misses > self.MISSES and self._calls % self.PAUSE:
            return None
        return Replay(region, self, key, [t for t in self._tapes if t.key == key])

    def hit(self, tape: Tape) -> None:
        """Notes that a tape described a forward."""
        self._misses, tapes = 0, self._tapes
        if not tapes or tapes[0] is not tape:
            self._tapes = (tape, *[t for t in tapes if t is not tape][: self.MOST - 1])

    def add(self, tape: Tape, region: Recording) -> None:
        """Adds a tape; drops the one not used for longest, and those of replaced parameters."""
        self._misses += 1
        others = [t for t in self._tapes if t.has_tensors_of(region.owners)]
        self._tapes = (tape, *others[: self.MOST - 1])


class Replay:
    """The position of a running region on its tapes.

    Attributes:
        func: the function of the next call, if `answer` may answer it.
        nodes: the pending nodes of this forward; None: computed.
    """

    def __init__(self, region: Recording, tapes: Tapes, key: tuple, known: list[Tape]) -> None:
        self._region, self._tapes, self._key, self._known = region, tapes, key, known
        self._tape: Tape | None = None  # the tape that describes this forward so far
        self._new: Tape = Tape(key, (), ())  # what is recorded, if no tape describes it
        self.nodes: list[Node | None] = []
        self._events = self._plan_count = 0  # executions and flushes so far, and executions
        self._others: dict[int, int] = {}  # numbers of the tensors that pending nodes read, by id
        self._other_count = 0
        self._following: Iterator[TapedNode] = iter(())
        self._expected: Any = None  # the next node of the tape
        self.func: Any = None
        self._context: Any = None  # context of the last node that was answered, and its modes
        self._modes: Modes | None = None
        self._execution_key: tuple = ()  # of the running execution
        if known:
            self._follow(known[0])

    def _follow(self, tape: Tape) -> None:
        self._tape = tape
        self._following = itertools.islice(tape.nodes, len(self.nodes), None)
        self._expect_next()

    def _expect_next(self) -> None:
        self._expected = following = next(self._following, None)
        self.func = None if following is None else following.func

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the deferred result of a call, or NotImplemented if a rule must decide.

        Overrides of functions are disabled.

        Args:
            func: the function, `self.func`.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        current, region = cast(Tape, self._tape), self._region
        if region.context is None or not region.is_in_context():
            # Computes what other modes recorded, which may differ from the tape.
            context = region.context_for(self._expected.modes.device)
            if context is None or self._tape is not current:
                return NotImplemented
        result = self._answer(args, kwargs)
        if result is NotImplemented and len(self._known) > 1:
            for tape in self._known:
                if tape is not current and self._may_follow(tape, func):
                    self._follow(tape)
                    result = self._answer(args, kwargs)
                    if result is not NotImplemented:
                        return result
            self._follow(current)
        return result

    def _may_follow(self, tape: Tape, func: Any) -> bool:
        """Whether another tape describes the forward so far, and expects a call of `func`."""
        current, count, plans = cast(Tape, self._tape), len(self.nodes), self._plan_count
        if len(tape.nodes) <= count or len(tape.plans) < plans or tape.nodes[count].func != func:
            return False
        # Tapes with a common part share its objects.
        has_nodes = not count or tape.nodes[count - 1] is current.nodes[count - 1]
        return has_nodes and (not plans or tape.plans[plans - 1] is current.plans[plans - 1])

    def _answer(self, args: tuple, kwargs: dict) -> Any:
        region, nodes, expected = self._region, self.nodes, self._expected
        call = expected.call
        values: Sequence[Any] = (*args, *kwargs.values()) if kwargs else args
        if call.listed is not None:
            if not args or type(args[0]) is not call.listed:
                return NotImplemented
            values = (*args[0], *values[1:])
        if len(values) != call.value_count or tuple(kwargs) != call.names:
            return NotImplemented
        inputs = [values[i] for i in call.inputs]
        for position, number in call.of_nodes:
            t, node = values[position], nodes[number]
            if node is None or type(t) is not Deferred or t.preact_node is not node:
                return NotImplemented
            if not has_own_history(t):
                return NotImplemented
        for position, owned, metadata in call.owned:
            t = values[position]
            if t is not owned:
                return NotImplemented
            if (t.dtype, t.shape, t.stride(), t.requires_grad) != metadata:
                return NotImplemented
        constants = [values[i] for i in call.places]
        if [*map(id, constants)] != call.ids and not are_equal(call.constants, constants):
            return NotImplemented
        new = self._new_others(call.others, values) if call.others else ()
        if new is None:
            return NotImplemented
        operation, settings = expected.operation, expected.fields["settings"]
        if operation is NORM:
            if not is_norm_called_alike(region, settings, inputs):
                return NotImplemented
        elif operation is CONV and not is_conv_called_alike(region, settings, inputs[1]):
            return NotImplemented
        context: Any = region.context
        if context is not self._context or self._modes is not expected.modes:
            if context is None or Modes.of(context) != expected.modes:
                return NotImplemented
            self._context, self._modes = context, expected.modes
        if self._events != expected.events or region.memory != expected.memory:
            return NotImplemented
        for key in new:
            self._others[key] = self._other_count
            self._other_count += 1
        node = Node.replayed(region, context, expected.fields, inputs)
        with region.lock:
            region.pending.append(node)
        if operation.precedes_activation:
            region.replayed_norm(node, call.updated, call.evaluated)
        node.index = len(nodes)
        nodes.append(node)
        self._expected = following = next(self._following, None)
        self.func = None if following is None else following.func
        return deferred_result(node, inputs, call.is_in_place)

    def _new_others(self, others: Sequence, values: Sequence[Any]) -> list[int] | None:
        """Compares tensors that are no parameters; returns ids of new ones; None: they differ."""
        new: list[int] = []
        for position, number, metadata in others:
            t = values[position]
            known = self._others.get(id(t))
            if known is None:
                if id(t) not in new:
                    new.append(id(t))
                known = self._other_count + new.index(id(t))
            if known != number or type(t) is not metadata[0]:
                return None
            if metadata_of(t) != metadata[1] or t.is_inference() is not metadata[2]:
                return None
        return new

    def _add_other(self, t: Tensor) -> None:
        if id(t) not in self._others:
            self._others[id(t)] = self._other_count
            self._other_count += 1

    def recorded(self, node: Node) -> None:
        """Takes a node that a rule recorded."""
        inputs = tuple(map(self._described, node.inputs))
        found = TapedNode(node, inputs, self._events, self._modes_of(node.context))
        expected = self._expected
        if self._tape is not None and (expected is None or not expected.describes(found)):
            self._diverge(self._plan_count)
        if self._tape is None:
            self._new.nodes.append(found)
        node.index = len(self.nodes)
        self.nodes.append(node)
        self._expect_next()

    def _modes_of(self, context: Context) -> Modes:
        """The modes of a context, the same object as for the node before if they are equal."""
        modes = Modes.of(context)
        before = self._new.nodes[-1].modes if self._new.nodes else None
        return before if before is not None and before == modes else modes

    def _described(self, value: "Node | Tensor") -> Any:
        """Describes an input of a node."""
        if isinstance(value, Node):
            return NODE, value.index
        if self._is_owned(value):
            return OWNED, Same(value), metadata_of(value)
        self._add_other(value)
        number = self._others[id(value)]
        return OTHER, number, type(value), metadata_of(value), value.is_inference()

    def _is_owned(self, t: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer of the model.

        Not one that a program puts in its place for a call, such as `torch.func.functional_call`.
        """
        is_own = isinstance(t, nn.Parameter) or not t.requires_grad
        return is_own and t.is_leaf and self._region.owners.find(t) is not None

    def call_recorded(self, func: Any, args: tuple, kwargs: dict, result: Any, count: int) -> None:
        """Takes the call that recorded nodes.

        Args:
            func: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: its result.
            count: number of nodes before the call.
        """
        if self._tape is not None or len(self.nodes) != count + 1:
            return
        node = self.nodes[count]
        if node is not None and type(result) is Deferred and result.preact_node is node:
            call = self._call_of(node, func, args, kwargs)
            if call is not None:
                self._new.nodes[count].set_call(call, node)

    def _call_of(self, node: Node, func: Any, args: tuple, kwargs: dict) -> TapedCall | None:
        """Describes a call; None if rules must decide about it again."""
        if node.operation is DROPOUT:  # draws random numbers
            return None
        values, listed = [*args, *kwargs.values()], None
        if args and type(args[0]) in (list, tuple):
            listed = type(args[0])
            values[:1] = args[0]
        of_nodes: list[tuple[int, int]] = []
        others: list[tuple[int, int, tuple]] = []
        owned: list[tuple[int, Tensor, tuple]] = []
        places: list[int] = []
        ids: list[int] = []
        constants: list[Any] = []
        at: dict[int, int] = {}  # positions, by the id of the node's input
        is_in_place = False
        for position, value in enumerate(values):
            own: Any = value
            if type(value) is Deferred:
                own = value.preact_node
                if own is node:  # the result is the argument
                    own, is_in_place = own.inputs[0], True
                if own.value is not None or own.region is not self._region:
                    return None
                of_nodes.append((position, own.index))
            elif not isinstance(value, Tensor):
                if not is_constant(value):
                    return None
                places.append(position)
                # A list is compared, as the program may change it.
                ids.append(0 if has_list(value) else id(value))
                constants.append(copy.deepcopy(value) if has_list(value) else value)
            elif self._is_owned(value):
                owned.append((position, value, metadata_of_owned(value)))
            elif type(value) in self._region.tensor_types and id(value) in self._others:
                metadata = type(value), metadata_of(value), value.is_inference()
                others.append((position, self._others[id(value)], metadata))
            else:
                return None
            at[id(own)] = position
        inputs = [at.get(id(i)) for i in node.inputs]
        if None in inputs or not {position for position, *_ in others}.issubset(inputs):
            return None
        return TapedCall(
            func,
            tuple(kwargs),
            listed,
            len(values),
            tuple(of_nodes),
            tuple(owned),
            tuple(others),
            tuple(places),
            ids,
            constants,
            tuple(cast(list[int], inputs)),
            is_in_place,
            frozenset(map(id, tracked_statistics(node))),
            frozenset(map(id, statistics_read(node))),
            {position for position, *_ in owned}.issuperset(inputs[1:]),
        )

    def _diverge(self, plan_count: int) -> None:
        """Continues with rules and matching."""
        tape, count = self._tape, len(self.nodes)
        if tape is None:
            return
        self._new = Tape(self._key, tape.nodes[:count], tape.plans[:plan_count])
        self._tape, self._following = None, iter(())
        self._expect_next()

    def plan(
        self, nodes: Sequence[Node], pending: Sequence[Node], reader: object
    ) -> list[Match] | None:
        """Returns the steps of an execution, and reports them; None: they must be matched.

        Args:
            nodes: the nodes that are computed.
            pending: the other pending nodes.
            reader: as in `execute`.
        """
        self._execution_key = self._key_of(nodes, pending)
        self._plan_count += 1
        if self._tape is None:
            return None
        plans, number = self._tape.plans, self._plan_count - 1
        if number >= len(plans) or plans[number].key != self._execution_key:
            self._diverge(number)
            return None
        plan = plans[number]
        if plan.steps is None:
            return None
        read = described(reader) if any(is_read for *_, is_read in plan.outcomes) else ""
        for module, outcome, is_read in plan.outcomes:
            outcome = outcome._replace(reason=read) if is_read else outcome
            self._region.outcomes.append((None if module is None else module(), outcome))
        return [step.of(nodes) for step in plan.steps]

    @staticmethod
    def _key_of(nodes: Sequence[Node], pending: Sequence[Node]) -> tuple:
        numbers = [(n.index, n.is_held) for n in nodes]
        rest = [(n.index, n.is_held, n.user is not None) for n in pending]
        return numbers, rest

    def matched(
        self, nodes: Sequence[Node], steps: Sequence[Match], outcomes: Sequence, reader: object
    ) -> None:
        """Takes the steps of an execution, and what it adds to the report."""
        if self._tape is None:
            read = described(reader)
            found = [
                (None if m is None else weakref.ref(m), o, o.reason == read) for m, o in outcomes
            ]
            own = steps_of(nodes, steps, self._reads_parameters)
            self._new.plans.append(Plan(self._execution_key, own, found))

    def _reads_parameters(self, node: Node) -> bool:
        if node.operation is not NORM and node.operation is not CONV:
            return True
        call = self._new.nodes[node.index].call
        return call is not None and call.reads_parameters

    def executed(self, nodes: Sequence[Node], pending: Sequence[Node]) -> None:
        """Notes the end of an execution, or of a flush.

        Args:
            nodes: nodes that were computed, or that nothing reads.
            pending: nodes that are still pending.
        """
        self._events += 1
        for node in nodes:
            self.nodes[node.index] = None
        if not pending:
            self._others.clear()
            return
        read = {id(i) for n in pending for i in n.inputs if not isinstance(i, Node)}
        self._others = {key: number for key, number in self._others.items() if key in read}

    def commit(self) -> None:
        """Keeps the tape for later forwards."""
        if self._tape is not None:
            self._tapes.hit(self._tape)
        elif self._new.nodes:
            self._tapes.add(self._new, self._region)
