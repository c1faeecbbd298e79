"""Computes recorded nodes: matches run fused, other nodes in PyTorch's operators.

Kernels work on NHWC. In an NCHW model, inputs of fused operations are converted once, intermediate
results stay in NHWC, and results that the program reads are converted back. What runs together with
no convolution stays in NCHW where the backend has kernels for it.
"""

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from preact_kernels import call_stack, torch_compat
from preact_kernels.conversion import repeatable, user_modules
from preact_kernels.conversion.deferred import Node, Recording, become_plain
from preact_kernels.conversion.matching import Match, Matcher, UnitNodes
from preact_kernels.conversion.operations import (
    ACTIVATION,
    ADD,
    CALL,
    CONTIGUOUS,
    CONV,
    NORM,
    SCALE,
    SHIFT,
    constants,
    plain_norm,
    tracked_statistics,
)
from preact_kernels.conversion.policy import POLICIES, Policy, work_of
from preact_kernels.conversion.recomputation import Recomputation
from preact_kernels.conversion.report import Outcome, described
from preact_kernels.kernels import layout
from preact_kernels.kernels.pytorch_conv import may_be_wrong_in_nhwc
from preact_kernels.norms import GroupNorm, NormArguments
from preact_kernels.ops import dispatch
from preact_kernels.ops.arguments import UnitArguments
from preact_kernels.ops.memory_mode import MemoryMode
from preact_kernels.ops.node import FirstRun, run_unit
from preact_kernels.ops.preact_stage import PreparedStage, preact_stage
from preact_kernels.ops.statistics import Update, update_all
from preact_kernels.ops.unit import PreparedUnit
from preact_kernels.torch_compat import storage_id

if TYPE_CHECKING:
    from preact_kernels.conversion.replay import Replay

# Kernels for NCHW take a plane at a time; images with fewer pixels run faster in NHWC (measured).
_FEW_PIXELS = 32


def execute(
    region: Recording, nodes: Sequence[Node], reader: object, replay: "Replay | None" = None
) -> None:
    """Computes `nodes` in order, and records in `region` what ran fused.

    Args:
        region: the region that recorded the nodes.
        nodes: pending nodes, and all pending nodes that they read.
        reader: the function that reads the results, or a description for the report.
        replay: remembers the steps.
    """
    for node in nodes:
        node.check_inputs()
    steps = None if replay is None else replay.plan(nodes, region.pending, reader)
    if steps is None:
        noted = len(region.outcomes)
        steps = _matched(region, nodes, reader)
        if replay is not None:
            replay.matched(nodes, steps, region.outcomes[noted:], reader)
    _Execution(region, nodes, steps).run()


def _matched(region: Recording, nodes: Sequence[Node], reader: object) -> list[Match]:
    """Returns the steps of an execution, and notes what runs fused."""
    matches, refused = Matcher(nodes).match()
    if not _runs_in_nhwc(nodes, matches):
        matches = _without_slow_sums(matches, refused)
    steps = _steps(nodes, matches)
    _note(region, matches, refused, reader)
    return steps


def _runs_in_nhwc(nodes: Sequence[Node], matches: Sequence[Match]) -> bool:
    """Whether to run in NHWC.

    Sums alone run in the format of their inputs. So do units, unless a convolution runs with them,
    the backend has no kernels for NCHW, or images have too few pixels for these to be fast.
    """
    units = [m.nodes[0] for m in matches if not m.is_sum]
    if any(n.operation is CONV for n in nodes):
        return bool(units)
    return any(math.prod(n.shape[2:]) < _FEW_PIXELS or not _serves_planes(n) for n in units)


def _without_slow_sums(matches: Sequence[Match], refused: dict[Node, str]) -> list[Match]:
    """Leaves sums in NCHW plain if the backend would convert and save copies of their inputs."""
    found = []
    for m in matches:
        if m.end.channels_last or _serves_planes(m.nodes[0]):
            found.append(m)
        else:
            refused[m.nodes[0]] = "the backend has no kernels for sums in NCHW"
    return found


def _serves_planes(norm: Node) -> bool:
    like = torch.empty(1, dtype=norm.dtype, device=norm.context.device)
    return dispatch.kernels_for(like).serves_planes


def _steps(nodes: Sequence[Node], matches: Sequence[Match]) -> list[Match]:
    """Adds matches of single nodes that run plain; ordered by dependencies."""
    ends = {m.end: m for m in matches}
    replaced = {n for m in matches for n in m.nodes}
    left = [n for n in nodes if n in ends or n not in replaced]
    return [ends.get(n) or Match("", (n,), n, _images(n)) for n in left]


def _images(node: Node) -> tuple[Node | Tensor, ...]:
    reads_one = node.operation in (NORM, CONV, SCALE, SHIFT)
    return tuple(node.inputs[:1] if reads_one else node.inputs)


def _note(
    region: Recording, matches: Sequence[Match], refused: dict[Node, str], reader: object
) -> None:
    def read() -> str:
        return described(reader, region.is_traced)

    found = region.outcomes
    for m in matches:
        units: dict[Node, list[UnitNodes]] = {}
        for u in m.units:
            units.setdefault(u.norm, []).append(u)
        for node, own in units.items():
            if not m.has_conv:
                found.append((_module(node), Outcome(m.name, m.reason or read())))
                continue
            conv = _module(own[0].conv)
            reference = None if conv is None else weakref.ref(conv)
            refusals = () if region.is_traced else tuple([u.refusal() for u in own])
            found.append((_module(node), Outcome(m.name, "", reference, refusals)))
    for node, reason in refused.items():
        found.append((_module(node), Outcome("", reason or read())))


def _module(node: Node | None) -> nn.Module | None:
    """Returns the module that called a norm or a convolution, if known."""
    owner = None if node is None else node.settings.owner
    return None if owner is None else owner.module


_NO_CONTEXT = contextlib.nullcontext()


def _without_new_versions(nodes: Iterable[Node]) -> Any:
    """PyTorch does not bump the versions of running statistics when it updates them."""
    found = [t for n in nodes for t in tracked_statistics(n)]
    statistics = tuple([t for t in found if not t.is_inference()])  # these have no version
    return torch_compat.without_new_version(statistics) if statistics else _NO_CONTEXT


def _reads_updated(nodes: Iterable[Node]) -> bool:
    """Whether an operation reads memory of running statistics that another one updates."""
    updated = {storage_id(t) for n in nodes for t in tracked_statistics(n)}
    if not updated:
        return False
    read = [t for n in nodes for t in (*n.inputs, *constants(n)) if type(t) is not Node]
    return not updated.isdisjoint(map(storage_id, cast(list[Tensor], read)))


class _Execution:
    def __init__(self, region: Recording, nodes: Sequence[Node], steps: Sequence[Match]) -> None:
        self._region, self._steps = region, steps
        self._own = set(nodes)
        self._values: dict[Node, Tensor] = {}  # results of this execution
        self._converted: dict[Node | Tensor, Tensor] = {}  # NHWC copies of inputs
        self._reads = Counter(i for s in steps for i in s.inputs)
        self._saves_output = False  # whether the last step may have saved its result
        self._in_nhwc = _runs_in_nhwc(nodes, [s for s in steps if s.name])
        self._saved = {s.inputs[0] for s in steps if s.name}  # inputs that fused operations save
        # Updates of running statistics, done at the end unless a step may read one.
        self._updates: list[Update] | None = None if _reads_updated(nodes) else []
        self._biases: dict[Node | Tensor, Tensor] = {}  # of convolutions, which the next norm adds
        # The backward of a custom autograd function may compute nodes again, from values that
        # PyTorch's operators would save.
        self._is_in_function = region.is_in_function()
        self._saves_values = region.saves_values()

    def run(self) -> None:
        try:
            for step in self._steps:
                inputs = [self._input(i, step) for i in step.inputs]
                kept: Any = _NO_CONTEXT
                # Other steps update at the end.
                if step.blocks or step.end.operation is NORM or self._updates is None:
                    kept = _without_new_versions(step.nodes)
                policy = POLICIES.get(step.end.memory) if self._saves_values else None
                if policy is None:
                    with kept:
                        y = self._result(step, inputs)
                else:
                    recomputation = self._region.recomputation
                    first = FirstRun(recomputation.may_hide_nodes())
                    with kept, self._region.saving():
                        y = self._result(step, inputs, first)
                    recorded = recomputation.record_saved(first.saved)
                    self._remember(policy, step, inputs, y, first)
                    recomputation.settle(policy, first.node, recorded)
                    del first, recorded
                self._values[step.end] = y
                for node in step.nodes:
                    node.is_done = True
                del inputs
                for i in step.inputs:
                    self._release(i)
                self._store(step.end, y)
                del y
        except BaseException:
            for node, value in self._values.items():  # for a later attempt
                bias = self._biases.get(node)
                node.value = value if bias is None else layout.with_bias(value, bias.detach())
            self._update_statistics()
            raise
        self._update_statistics()

    def _update_statistics(self) -> None:
        """Updates the running statistics of the units so far."""
        if self._updates:
            with _without_new_versions(self._own):
                update_all(self._updates)

    def _input(self, value: Node | Tensor, step: Match) -> Tensor:
        t: Any = value.value if isinstance(value, Node) else value
        in_nhwc = self._in_nhwc and (step.name != "" or not _stays_in_nchw(step.end))
        saves_input = not step.name and step.end.operation in (CONV, CALL)
        if t is not None and saves_input and (value not in self._saved or not in_nhwc):
            return t  # a copy in NHWC would be saved, too
        if isinstance(value, Node):
            t = self._values.get(value, t)
        if not in_nhwc or layout.is_nhwc(t):
            return t
        if value not in self._converted:
            self._converted[value] = self._copied(value, t)
        return self._converted[value]

    def _copied(self, value: Node | Tensor, t: Tensor, values: Tensor | None = None) -> Tensor:
        """Converts a tensor to NHWC; `values` are its values in NHWC, if known."""
        copy = _ToChannelsLast.apply(t, values)
        if values is None:
            self._remember_copy(copy, _nhwc, t)
        return copy

    def _remember_copy(self, copy: Tensor, call: Callable[[Tensor], Tensor], t: Tensor) -> None:
        """Lets the backward keep one of a tensor and its copy in another memory format."""
        end = self._steps[0].end
        policy = POLICIES.get(end.memory) if self._saves_values else None
        if policy is None or copy is t:
            return
        add, rest = self._region.recomputation.add, ((), end.context, 2.0 * copy.nbytes)
        if not add(policy, copy, call, (t,), *rest):
            add(policy, t, _unchanged, (copy,), *rest, is_twin=True)

    def _release(self, value: Node | Tensor) -> None:
        self._reads[value] -= 1
        if self._reads[value] == 0:
            self._converted.pop(value, None)
            if isinstance(value, Node):
                self._values.pop(value, None)

    def _result(self, step: Match, inputs: list[Tensor], first: FirstRun | None = None) -> Tensor:
        self._saves_output = False
        if not step.name:
            return self._plain(step.end, inputs, first is not None)
        if not step.blocks:
            x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
            prepared = cast("PreparedUnit | None", step.prepared)
            given = step.units[0].arguments(x) if prepared is None else prepared.given
            in_nhwc = self._is_nhwc_result(step)
            bias = self._bias_for_next_norm(step, x, given)
            if bias is not None:
                self._biases[step.end] = bias
            return run_unit(
                x,
                given,
                residual,
                channels_last=in_nhwc,
                first=first,
                x_bias=self._biases.get(step.inputs[0]),
                omits_bias=bias is not None,
                checked=None if prepared is None else prepared.checked(x, residual, in_nhwc),
                updates=self._updates,
            )
        start = step.nodes[0]
        module = _module(start)
        if self._region.run_stage is not None:
            return self._region.run_stage(step.blocks, inputs[0], module, step.end.dtype)
        name = user_modules.memory_of(module, start.memory)
        self._saves_output = name != "store"
        blocks = cast("PreparedStage | None", step.prepared) or step.blocks
        return preact_stage(blocks, inputs[0], step.end.dtype, MemoryMode(name))

    def _bias_for_next_norm(self, step: Match, x: Tensor, given: UnitArguments) -> Tensor | None:
        """Returns a convolution's bias if only a group norm of another unit reads its result.

        The norm then adds the bias to the statistics alone, where PyTorch's convolution would add
        it in a kernel of its own.
        """
        end, conv = step.end, given.conv
        if conv is None or conv.bias is None or not x.numel():
            return None
        if len(step.inputs) > 1 or self._is_in_function or self._is_read_outside(end):
            return None
        readers = [s for s in self._steps if end in s.inputs]
        if len(readers) > 1 or self._reads[end] > 1 or 0 in end.shape:
            return None
        (reader,) = readers
        if not reader.name or reader.inputs[0] is not end:
            return None
        if not isinstance(reader.units[0].norm.settings.norm, GroupNorm):
            return None
        like = torch.empty(1, dtype=end.dtype, device=end.context.device)
        return conv.bias if dispatch.kernels_for(like).adds_bias else None

    def _is_nhwc_result(self, step: Match) -> bool:
        """Whether a unit writes its result in NHWC.

        The ReLU of a sum saves its result: in the format of the tensor that the program holds,
        unless fused operations save it, too.
        """
        end = step.end
        if end.channels_last or not self._in_nhwc:
            return end.channels_last
        saves_result = step.is_sum and end.operation is ACTIVATION
        return not saves_result or end in self._saved or not self._is_read_outside(end)

    def _remember(
        self,
        policy: Policy,
        step: Match,
        inputs: list[Tensor],
        y: Tensor,
        first: FirstRun,
    ) -> None:
        """Lets the backward compute `y` again instead of saving it."""
        work, product = work_of(inputs, y, _weight(step))
        recomputation, node = self._region.recomputation, step.end
        if not y.requires_grad or recomputation.refuses(policy, work, y, product):
            return
        call: Any = None
        in_place: Any = None
        if step.name:
            call, constants = _run_again(first, y, recomputation)
        else:
            call, constants = _call_again(node, inputs, recomputation)
            in_place = _in_place(node, inputs)
        if call is not None:
            rest = constants, node.context, work, in_place
            recomputation.add(policy, y, call, inputs, *rest)

    def _may_share(self, contiguous: Node) -> bool:
        """Whether to use a tensor itself instead of a copy in another memory format.

        Only operations of this execution may read the copy, and a norm must save the tensor: then a
        backward after an in-place change of the tensor also raises in plain PyTorch.
        """
        source = contiguous.inputs[0]
        is_saved = any(
            s.name and s.inputs[0] is source and s.nodes[0].needs_grad for s in self._steps
        )
        return is_saved and not self._is_read_outside(contiguous)

    def _is_read_outside(self, node: Node) -> bool:
        return node.is_held or any(u not in self._own for u in node.users)

    def _plain(self, node: Node, inputs: list[Tensor], saves_less: bool) -> Tensor:
        rest: Sequence[Any] = node.inputs[len(inputs) :]
        if node.operation is NORM:
            if _crashes(node, inputs[0]):
                inputs = [inputs[0].contiguous()]
            # The recomputation of a checkpoint must not update statistics again.
            updates = not call_stack.is_recomputing()
            return plain_norm(node.settings, inputs[0], *rest, updates=updates)
        if node.operation is CONTIGUOUS and self._may_share(node):
            return inputs[0]
        if _stays_in_nchw(node):
            inputs = [layout.with_plain_strides(inputs[0])]
        settings = node.settings
        if node.operation is CALL and saves_less and inputs[0].requires_grad:
            settings = settings._replace(func=repeatable.without_indices(settings.func))
        return node.operation.run(settings, *inputs, *rest)

    def _store(self, node: Node, y: Tensor) -> None:
        """Keeps a result that later steps read, and fills the program's tensor."""
        if not self._reads[node]:
            del self._values[node]
        if not self._is_read_outside(node):
            if self._is_in_function:
                node.value = y
            return
        held = node.reference() if node.reference is not None else None
        is_nchw = not node.channels_last and layout.is_nhwc(y)
        inside = y.detach() if is_nchw else y
        if is_nchw:
            y = _contiguous(y, self._saves_output)
            self._remember_copy(y, layout.with_plain_strides, inside)
        elif node.channels_last:
            # The program may change the output in place.
            y = y.clone() if self._saves_output and y.requires_grad else layout.nhwc(y)
        else:
            y = layout.with_plain_strides(y)
        node.value = y = y.view_as(y) if node.is_view and not y._is_view() else y
        if held is not None:
            become_plain(held)
        if self._reads[node]:
            # Later steps read the program's tensor.
            value = node.value
            self._values[node] = self._copied(node, value, inside) if is_nchw else value


def _run_again(
    first: FirstRun, y: Tensor, recomputation: Recomputation
) -> tuple[Any, list[Tensor]]:
    """Returns a function that computes a unit again, and what it reads besides its inputs."""
    rerun = first.rerun(y)
    if rerun is None:
        return None, []
    *tensors, conv_bias, bits = rerun.tensors
    if conv_bias is not None:  # autograd does not save it
        conv_bias = recomputation.constant(conv_bias)
    given = [t.detach() if t is not None and t.requires_grad else t for t in tensors]
    own = recomputation.constants((*given, conv_bias, bits))
    return rerun._replace(tensors=own), [t for t in own if t is not None]


def _call_again(
    node: Node, inputs: Sequence[Tensor], recomputation: Recomputation
) -> tuple[Callable[..., Tensor] | None, list[Tensor]]:
    """Returns a function that computes a node again, and what it reads besides its inputs."""
    run, settings = node.operation.run, node.settings
    others: Sequence[Any] = node.inputs[len(inputs) :]
    has_weight = node.operation is CONV and inputs[0].requires_grad
    rest = [recomputation.constant(t, has_weight and t is others[0]) for t in others]
    if node.operation is NORM:
        if settings.norm.process_group:
            return None, rest
        settings = settings._replace(norm=_of_this_forward(settings.norm))
    if _stays_in_nchw(node):
        return lambda x: run(settings, layout.with_plain_strides(x), *rest), rest
    return lambda *inputs: run(settings, *inputs, *rest), rest


def _unchanged(copy: Tensor) -> Tensor:
    return copy


def _in_place(node: Node, inputs: Sequence[Tensor]) -> Callable[..., Tensor] | None:
    """Returns a function that computes a sum or a ReLU in place of the first of its inputs."""
    if node.operation is ADD and node.dtype == inputs[0].dtype:
        return Tensor.add_
    if node.operation is ACTIVATION and node.settings.name == "relu":
        return Tensor.relu_
    return None


def _of_this_forward(norm: NormArguments) -> NormArguments:
    """The arguments of a norm with the same result later, without an update."""
    if norm.running_mean is None:
        return norm
    if norm.training:
        return norm._replace(running_mean=None, running_var=None, momentum=0.0)
    return norm.with_copied_statistics()


def _weight(step: Match) -> Tensor | None:
    """The weight of the convolution of a step without blocks."""
    if step.name:
        conv = step.units[0].conv
    else:
        conv = step.end if step.end.operation is CONV else None
    return None if conv is None else cast(Tensor, conv.inputs[1])


def _stays_in_nchw(node: Node) -> bool:
    """Whether a node is a convolution of an NCHW model that PyTorch may compute wrongly in NHWC."""
    if node.operation is not CONV or node.channels_last or node.context.device.type != "cpu":
        return False
    x, weight = node.inputs[:2]
    return may_be_wrong_in_nhwc(node.settings.conv, x.shape, weight.shape, node.dtype)


def _crashes(norm: Node, x: Tensor) -> bool:
    """Whether PyTorch's backward of a norm crashes if the norm runs in NHWC.

    This happens to group norms on a CPU if only weight and bias need gradients.
    """
    is_group_norm = isinstance(norm.settings.norm, GroupNorm)
    return is_group_norm and not norm.channels_last and x.is_cpu and not x.requires_grad


def _nhwc(t: Tensor) -> Tensor:
    return layout.nhwc(t.unsqueeze(2)).squeeze(2) if t.dim() == 3 else layout.nhwc(t)


def _contiguous(y: Tensor, is_saved: bool) -> Tensor:
    """Converts `y` to NCHW, without adding to the autograd graph where possible."""
    if not y.requires_grad or is_saved or type(y) is not Tensor or y._is_view():
        return layout.with_plain_strides(y)
    y.data = layout.with_plain_strides(y.detach())
    return y


class _ToChannelsLast(torch.autograd.Function):
    """Converts an NCHW tensor to channels_last; its gradient is NCHW, as in plain PyTorch.

    The second argument has its values in channels_last, if known.
    """

    @staticmethod
    def forward(ctx, t, values=None):
        ctx.set_materialize_grads(False)
        return (_nhwc(t) if values is None else values).detach()

    @staticmethod
    def backward(ctx, dy):
        return None if dy is None else layout.with_plain_strides(dy), None
