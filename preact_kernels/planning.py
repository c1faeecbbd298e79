"""Chooses the fastest memory modes of all stages that fit a budget."""

import copy
import dataclasses
import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from preact_kernels.conversion import user_modules
from preact_kernels.conversion.norm_modules import is_norm
from preact_kernels.kernels.contract import Block
from preact_kernels.memory import check_model_and_input, saved_storages
from preact_kernels.modules.preact_stage import PreActStage, run_blocks
from preact_kernels.ops.block_arguments import BlockArguments
from preact_kernels.ops.blocks import stage_values
from preact_kernels.ops.memory_mode import MEMORY_MODES, STORE, MemoryMode
from preact_kernels.ops.preact_stage import Recorder, StageCall, preact_stage
from preact_kernels.ops.saved_tensors import save
from preact_kernels.torch_compat import BatchNormBase, FakeTensor, FakeTensorMode, storage_id

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class StageOption:
    """A memory mode of one stage.

    Attributes:
        memory: the mode.
        saved_bytes: bytes that the stage saves, in addition to the rest of the model.
        extra_bytes: bytes moved in a step, in addition to mode "store".
    """

    memory: str
    saved_bytes: int
    extra_bytes: int


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """A stage, its memory modes, and the chosen mode.

    Attributes:
        name: name of the stage in `model.named_modules()`; in a converted model, name of its first
            batch norm.
        blocks: number of blocks.
        options: the possible memory modes.
        chosen: the chosen mode.
        is_converted: whether the stage is in a converted model.
    """

    name: str
    blocks: int
    options: tuple[StageOption, ...]
    chosen: StageOption
    is_converted: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The result of `plan_memory`; prints as a table of stages and modes in MiB.

    Attributes:
        budget: bytes that a forward may save for backward.
        predicted_bytes: bytes that it will save, as `pk.saved_bytes` counts.
        other_bytes: bytes saved outside the stages, included in `predicted_bytes`.
        extra_bytes: bytes moved in a step, in addition to mode "store".
        stages: the stages, in order.
        network: of a converted model, the modes other than "store" for the whole network.
        chosen: one of `network`, or a mode of the first of its modules; None: "store" outside the
            stages.
        modules: the converted modules and their modes, in order, if `chosen`.
    """

    budget: int
    predicted_bytes: int
    other_bytes: int
    extra_bytes: int
    stages: tuple[StagePlan, ...]
    network: tuple[StageOption, ...] = ()
    chosen: StageOption | None = None
    modules: tuple[tuple[str, str], ...] = ()

    def apply(self, model: nn.Module) -> nn.Module:
        """Sets the memory modes of the stages, and of a converted model.

        Args:
            model: the model given to `plan_memory`, or one with the same stages.

        Returns:
            `model`.

        Raises:
            ValueError: the stages of `model` differ from the plan.
        """
        found = {n: len(m) for n, m in model.named_modules() if isinstance(m, PreActStage)}
        expected = {p.name: p.blocks for p in self.stages if not p.is_converted}
        norms = {n: m for n, m in model.named_modules() if is_norm(m)}
        converted = [p.name for p in self.stages if p.is_converted]
        modules = _converted_modules(model)
        has_modules = not self.modules or [*modules] == [n for n, _ in self.modules]
        if found != expected or not norms.keys() >= set(converted) or not has_modules:
            wanted = ", ".join(f"{p.name!r} of {p.blocks} blocks" for p in self.stages)
            has = ", ".join(f"{n!r} of {count} blocks" for n, count in found.items())
            raise ValueError(f"model: expected the stages {wanted}, got {has or 'none'}")
        if self.network:
            modes = dict(self.modules)
            for name, module in modules.items():
                user_modules.set_module_memory(module, modes.get(name, "store"))
        for stage in self.stages:
            memory = stage.chosen.memory
            if stage.is_converted:
                user_modules.set_memory(norms[stage.name], memory)
            else:
                module = cast(PreActStage, model.get_submodule(stage.name))
                module.memory, module.segments, module.anchor_every = memory, None, None
        return model

    def __str__(self) -> str:
        names = [s.name for s in self.stages]
        width = max(map(len, [*names, "outside stages"]))
        lines = [
            f"{'stage':{width}} blocks" + "".join(f"{mode:>13}" for mode in MEMORY_MODES) + "  MiB"
        ]
        for stage in self.stages:
            cells = "".join(
                f"{o.saved_bytes / _MIB:>12,.1f}{'*' if o is stage.chosen else ' '}"
                for o in stage.options
            )
            lines.append(f"{stage.name:{width}} {stage.blocks:>6}{cells}")
        if self.chosen is None:
            lines.append(f"{'outside stages':{width}} {'':>6}{self.other_bytes / _MIB:>12,.1f}")
        if self.network:
            cells = "".join(
                f"{o.saved_bytes / _MIB:>12,.1f}{'*' if o is self.chosen else ' '}"
                for o in self.network
            )
            lines.append(f"{'whole network':{width}} {'':>19}{cells}")
        is_mixture = len({mode for _, mode in self.modules}) > 1
        if self.chosen is not None and is_mixture:
            count = [m for _, m in self.modules].count(self.chosen.memory)
            title = f"first {count} of {len(self.modules)} modules"
            skipped = 13 * MEMORY_MODES.index(self.chosen.memory)
            size = f"{self.chosen.saved_bytes / _MIB:>12,.1f}*"
            lines.append(f"{title:{width + 7 + skipped}}{size}")
        lines.append(
            f"* chosen: {self.predicted_bytes / _MIB:,.1f} of {self.budget / _MIB:,.1f} MiB, "
            f"{self.extra_bytes / _MIB:,.1f} MiB more to move in a step than with 'store'"
        )
        return "\n".join(lines)


def plan_memory(model: nn.Module, x: Tensor, budget: int) -> MemoryPlan:
    """Chooses the memory mode of each stage: the fastest combination that fits in `budget` bytes.

    Runs a copy of the model with fake tensors, in its current mode (training or evaluation, with or
    without autocast), and counts saved bytes as `pk.saved_bytes` does. `model` does not change.
    Modes have their default numbers of segments and anchors. Stages are `PreActStage`s, and runs
    of residual blocks of a converted model (`pk.convert`). Blocks of a stage that do not run
    fused, such as blocks with hooks, count as outside the stage.

    The cost of a mode is the memory traffic that it adds to `"store"`: `"rebuild"` reads y and z
    and writes x for each block input that it rebuilds; `"checkpoint"` also runs the forward again.
    All combinations of modes are compared. For a converted model without `PreActStage`s, so are
    modes of its modules, in the order of `model.named_modules()`: `"rebuild"` in the first ones, or
    `"checkpoint"` in the first ones and `"rebuild"` in the others; bisection finds how many first
    ones. Their cost is the work of all operations that the backward runs again: bytes moved, and
    products at 8 (CPU) or 100 (GPU) operations a byte.

    Args:
        model: a model with at least one stage, or a converted model.
        x: an example input on any device, including the meta device.
        budget: bytes that one forward may save for backward, without parameters.

    Returns:
        The plan; `plan.apply(model)` sets the modes, `print(plan)` shows them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the model is not converted and has no stage, a `PreActStage` does not run or
            runs twice, or no combination fits; then the message has the smallest budget that does.
    """
    check_model_and_input(model, x)
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget: expected an int (bytes), got {type(budget).__name__}")
    if budget < 0:
        raise ValueError(f"budget: expected at least 0 bytes, got {budget}")
    is_converted = any(map(user_modules.is_converted, model.modules()))
    has_stage = any(isinstance(m, PreActStage) for m in model.modules())
    if not is_converted and not has_stage:
        raise ValueError("model: expected at least one PreActStage, or a converted model, got none")
    other_bytes, stages = _options(model, x)
    network = None if has_stage else _Network(model, x, stages)
    whole = () if network is None else network.whole
    combination = _cheapest([s.options for s in stages], budget - other_bytes)
    chosen: _NetworkChoice | None = None
    predicted = extra = 0
    if combination is not None:
        predicted = other_bytes + sum(o.saved_bytes for o in combination)
        extra = sum(o.extra_bytes for o in combination)
    if network is not None and (combination is None or extra > 0):
        chosen = network.cheapest(budget)
        if combination is not None and chosen is not None:
            cost = chosen.option.extra_bytes, chosen.option.saved_bytes
            chosen = None if (extra, predicted) <= cost else chosen
    if combination is None and chosen is None:
        least = other_bytes + sum(min(o.saved_bytes for o in s.options) for s in stages)
        least = least if network is None else min(least, network.least_bytes())
        raise ValueError(f"budget: expected at least {least} bytes, got {budget}")
    modules: tuple = ()
    option = None
    if chosen is not None:
        option, modules = chosen.option, tuple(chosen.modes.items())
        predicted, extra, combination = option.saved_bytes, option.extra_bytes, chosen.stages
    stages = [
        dataclasses.replace(stage, chosen=choice)
        for stage, choice in zip(stages, cast(tuple, combination), strict=True)
    ]
    return MemoryPlan(
        budget=budget,
        predicted_bytes=predicted,
        other_bytes=other_bytes,
        extra_bytes=extra,
        stages=tuple(stages),
        network=whole,
        chosen=option,
        modules=modules,
    )


def _cheapest(
    options: Iterable[Sequence[StageOption]], budget: int
) -> tuple[StageOption, ...] | None:
    """The combination that fits and moves least, and among equal ones saves least.

    Adds stage after stage, and drops combinations that are worse than another one in both.
    """
    if budget < 0:
        return None
    best: list[tuple[int, int, tuple[StageOption, ...]]] = [(0, 0, ())]
    for some in options:
        longer = [
            (extra + o.extra_bytes, saved + o.saved_bytes, (*chosen, o))
            for extra, saved, chosen in best
            for o in some
        ]
        longer.sort(key=lambda c: c[:2])
        best, least = [], budget + 1
        for extra, saved, chosen in longer:
            if saved < least:
                least = saved
                best.append((extra, saved, chosen))
    return best[0][2] if best else None


class _BlockBytes(NamedTuple):
    """Bytes of the tensors that the forward of a block computes."""

    inputs: list[int]  # one per unit
    statistics: list[int]  # saved statistics of each unit, except buffers
    output: int


class _Call(NamedTuple):
    """A call of consecutive fused blocks: a stage or a part of it."""

    arguments: StageCall
    x: Tensor  # dense NHWC
    tensors: Sequence[Tensor]  # parameters and running statistics
    y: Tensor  # dense NHWC
    blocks: list[_BlockBytes]


class _Ends(torch.autograd.Function):
    """Replaces a stage: returns a tensor like its output, and saves what all memory modes save.

    These are the tensors that the blocks read, and the input if it has a gradient.
    """

    @staticmethod
    def forward(ctx, blocks, x, *tensors):
        save(ctx, (x if ctx.needs_input_grad[1] else None, *tensors))
        shape = x.shape
        for block in blocks:
            shape = block.shapes(shape)[-1]
        y = x.new_empty(shape, dtype=blocks[-1].units[-1].y_dtype)
        return y.contiguous(memory_format=torch.channels_last)


class _Stages:
    """Replaces the stages of a model by `_Ends`, and records their calls by name."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, list[_Call]] = {}
        self._names = {module: name for name, module in model.named_modules()}
        for module in self._names:
            if isinstance(module, PreActStage):
                run = functools.partial(self._run, module)
                module.forward = run  # type: ignore[method-assign]
            if (conversion := user_modules.conversion_of(module)) is not None:
                conversion.memory, conversion.extra_types = "store", (FakeTensor,)
                conversion.run_stage = self._run_converted

    def _run(self, stage: PreActStage, x: Tensor) -> Tensor:
        return run_blocks(stage, x, STORE, self._recorder(stage))

    def _run_converted(
        self,
        blocks: Sequence[BlockArguments],
        x: Tensor,
        first_norm: nn.Module | None,
        dtype: torch.dtype,
    ) -> Tensor:
        if first_norm is None:  # the mode of this stage cannot be set
            return preact_stage(blocks, x, dtype)
        return preact_stage(blocks, x, dtype, record=self._recorder(first_norm))

    def _recorder(self, module: nn.Module) -> Recorder:
        """Returns a function that records calls under the name of a module."""
        name = self._names[module]
        if name in self.calls:
            kind = "PreActStage" if isinstance(module, PreActStage) else "stage"
            raise ValueError(f"model: expected each {kind} to run once, {name!r} runs again")
        calls = self.calls[name] = []

        def record(arguments: StageCall, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
            y = _Ends.apply(arguments.blocks, x, *tensors)
            sizes = _block_bytes(arguments.blocks, x, tensors)
            calls.append(_Call(arguments, x, tensors, y, sizes))
            return y

        return record


def _options(model: nn.Module, x: Tensor) -> tuple[int, list[StagePlan]]:
    """Bytes saved outside the stages, and the options of each stage.

    Runs the model on fake tensors with `_Ends` in place of its stages. No tensor counts twice: an
    input with a gradient, and tensors that the blocks read, count for the stage; other inputs, and
    outputs, count for the rest of the model if it saves them, too.
    """
    with FakeTensorMode():
        rest = _copy_of_shapes(model, x.device if x.is_meta else None)
        stages = _Stages(rest)
        outside, _ = saved_storages(rest, _shape_of(x).requires_grad_(x.requires_grad))
    for name, module in model.named_modules():
        if isinstance(module, PreActStage) and name not in stages.calls:
            raise ValueError(f"model: expected each PreActStage to run once, {name!r} did not run")
    plans, other_bytes = [], 0
    for name, calls in stages.calls.items():
        read = sum(outside.pop(storage_id(t), (0,))[0] for call in calls for t in call.tensors)
        options = []
        for memory in MEMORY_MODES:
            saved, extra = read, 0
            for call in calls:
                more_saved, more_extra = _bytes_of(call, memory, outside)
                saved, extra = saved + more_saved, extra + more_extra
            options.append(StageOption(memory, saved, extra))
        stage = model.get_submodule(name)
        is_converted = not isinstance(stage, PreActStage)
        count = sum(len(c.blocks) for c in calls) if is_converted else len(cast(PreActStage, stage))
        plans.append(StagePlan(name, count, tuple(options), options[0], is_converted))
        other_bytes -= sum(c.x.nbytes for c in calls if c.x.requires_grad and c.y.requires_grad)
    other_bytes += sum(size for size, _ in outside.values())
    return other_bytes, plans


class _NetworkChoice(NamedTuple):
    """Modes of the modules of a converted network, and of its stages."""

    option: StageOption
    modes: dict[str, str]
    stages: tuple[StageOption, ...]


class _Network:
    """The modes of the modules of a converted network, in steps.

    Of n modules, step k <= n has "rebuild" in the first k, and step n + k also "checkpoint" in the
    first k.
    """

    def __init__(self, model: nn.Module, x: Tensor, stages: Sequence[StagePlan]) -> None:
        self._model, self._x, self._stages = model, x, stages
        self._names = [*_converted_modules(model)]
        self._known: dict[int, _NetworkChoice] = {}

    @property
    def whole(self) -> tuple[StageOption, StageOption]:
        """The options "rebuild" and "checkpoint" for all modules."""
        count = len(self._names)
        return self._choice(count).option, self._choice(2 * count).option

    def cheapest(self, budget: int) -> _NetworkChoice | None:
        """A step after step 0 that fits in a budget: by bisection, the one before it does not.

        Where neither all modules in "rebuild" nor all in "checkpoint" fit, the first that fits.
        """
        count = len(self._names)
        rebuild, checkpoint = (option.saved_bytes for option in self.whole)
        if min(rebuild, checkpoint) > budget:  # a mixture may keep less than both
            steps = map(self._choice, range(1, 2 * count))
            return next((c for c in steps if c.option.saved_bytes <= budget), None)
        low, high = (0, count) if rebuild <= budget else (count, 2 * count)
        while high - low > 1:
            middle = (low + high) // 2
            if self._choice(middle).option.saved_bytes <= budget:
                high = middle
            else:
                low = middle
        return self._choice(high)

    def least_bytes(self) -> int:
        """The fewest bytes of a step."""
        count = len(self._names)
        return min(self._choice(step).option.saved_bytes for step in range(1, 2 * count + 1))

    def _choice(self, step: int) -> _NetworkChoice:
        if step not in self._known:
            self._known[step] = self._run(step)
        return self._known[step]

    def _run(self, step: int) -> _NetworkChoice:
        """Counts what a step saves, and the work of what its backward computes again."""
        count = len(self._names)
        modes = {
            n: MEMORY_MODES[(i < step) + (i < step - count)] for i, n in enumerate(self._names)
        }
        of_stages = [_mode_of(stage.name, modes) for stage in self._stages]
        work: list[float] = []
        with FakeTensorMode():
            network = _copy_of_shapes(self._model, self._x.device if self._x.is_meta else None)
            for name, module in _converted_modules(network).items():
                user_modules.set_module_memory(module, modes[name])
                conversion = cast(user_modules.Conversion, user_modules.conversion_of(module))
                conversion.extra_types, conversion.note_work = (FakeTensor,), work.append
            for stage, memory in zip(self._stages, of_stages, strict=True):
                user_modules.set_memory(network.get_submodule(stage.name), memory)
            x = _shape_of(self._x).requires_grad_(self._x.requires_grad)
            saved, _ = saved_storages(network, x)
        chosen = tuple(
            next(o for o in stage.options if o.memory == memory)
            for stage, memory in zip(self._stages, of_stages, strict=True)
        )
        extra = round(sum(work)) + sum(o.extra_bytes for o in chosen)
        memory = MEMORY_MODES[1 + (step > count)]
        option = StageOption(memory, sum(size for size, _ in saved.values()), extra)
        return _NetworkChoice(option, modes, chosen)


def _converted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The converted modules by name; a module comes before its children."""
    return {n: m for n, m in model.named_modules() if user_modules.is_converted(m)}


def _mode_of(norm: str, modes: Mapping[str, str]) -> str:
    """The mode of the innermost module that contains a norm."""
    name = norm
    while name and name not in modes:
        name = name.rpartition(".")[0]
    return modes.get(name, "store")


def _block_bytes(
    blocks: Sequence[Block], x: Tensor, tensors: Sequence[Tensor]
) -> list[_BlockBytes]:
    """Sizes of each block, for the input `x` of the first block and its `flat_values`."""
    values = stage_values(blocks, tensors)
    parameters, running = iter(values.parameters), iter(values.running)
    shape: Sequence[int] = x.shape
    sizes = []
    for block in blocks:
        *shapes, shape = block.shapes(shape)
        inputs, statistics = [], []
        for unit, unit_shape in zip(block.units, shapes, strict=True):
            inputs.append(math.prod(unit_shape) * unit.x_dtype.itemsize)
            bn_weight = next(parameters).bn_weight  # as large as the mean, and as the variance
            count = 2
            if not unit.uses_batch:
                of_unit = next(running), next(running)
                count = sum(t.dtype != bn_weight.dtype or not t.is_contiguous() for t in of_unit)
            statistics.append(count * bn_weight.nbytes)
        output = math.prod(shape) * block.units[-1].y_dtype.itemsize
        sizes.append(_BlockBytes(inputs, statistics, output))
    return sizes


def _bytes_of(call: _Call, memory: str, outside: Container[int]) -> tuple[int, int]:
    """Bytes that a call saves, without `call.tensors`, and moves in addition to mode `"store"`.

    Args:
        call: the call.
        memory: the memory mode.
        outside: ids of the storages that the rest of the model saves.
    """
    _, blocks, _, first, skipped = call.arguments
    kept = MemoryMode(memory).kept_inputs(blocks, first, skipped, call.x.dtype)
    saved = extra = 0
    for begin, keeps in kept.segments:
        for index, keeps_input in enumerate(keeps, begin):
            inputs, statistics, output = call.blocks[index]
            skipped = kept.skipped if index == first else 0
            saved += sum(statistics[skipped:])
            if memory == "checkpoint":
                saved += inputs[0] if index == begin else 0
                extra += 2 * sum(inputs) + output
            else:
                saved += sum(inputs[skipped if keeps_input else 1 :])
            if not keeps_input:
                extra += inputs[-1] + inputs[0] + output
    saves_x = first + kept.skipped == 0
    if saves_x and not call.x.requires_grad and storage_id(call.x) in outside:
        saved -= call.x.nbytes
    if kept.saves_y and storage_id(call.y) not in outside:
        saved += call.y.nbytes
    return saved, extra


def _shape_of(t: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device or t.device)


_Model = TypeVar("_Model", bound=nn.Module)


def _copy_of_shapes(model: _Model, device: torch.device | None) -> _Model:
    """A copy of the model for fake tensors, optionally on another device."""
    fakes = {}
    for t in (*model.parameters(), *model.buffers()):
        fake = _shape_of(t, device)
        is_parameter = isinstance(t, nn.Parameter)
        fakes[id(t)] = nn.Parameter(fake, t.requires_grad) if is_parameter else fake
    model = copy.deepcopy(model, fakes)
    for module in model.modules():
        if isinstance(module, BatchNormBase):
            module.momentum = 0.1  # with None, it would read the value of `num_batches_tracked`
            if isinstance(module, nn.SyncBatchNorm):  # avoid communication
                module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
    return model
