"""The cheapest memory mode of every stage that fits a budget."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from preact_kernels.conversion.execution import MEMORY
from preact_kernels.conversion.hooks import CONVERSION, is_norm
from preact_kernels.memory import check_model_and_input, saved_storages
from preact_kernels.modules.blocks import in_stream
from preact_kernels.modules.preact_block import PreActBlock
from preact_kernels.modules.preact_stage import PreActStage, is_fusable
from preact_kernels.ops import layout
from preact_kernels.ops.autocast import compute_dtype, is_autocast
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.block_arguments import BlockArguments, first_recorded, geometry_of
from preact_kernels.ops.memory_mode import MEMORY_MODES, MemoryMode
from preact_kernels.ops.preact_stage import preact_stage
from preact_kernels.ops.unit import ConvArguments
from preact_kernels.torch_compat import BatchNormBase, FakeTensor, FakeTensorMode, storage_id

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class StageOption:
    """A memory mode of one stage."""

    memory: str
    saved_bytes: int  # what the stage adds to what the rest of the model keeps
    extra_bytes: int  # moved beyond what mode "store" moves, in a step


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage: where it is, its modes, and the mode that was chosen."""

    name: str  # as in `model.named_modules()`; in a converted model, of its first batch norm
    blocks: int
    options: tuple[StageOption, ...]
    chosen: StageOption
    is_converted: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The choice of `plan_memory`; printed, a table of stages and modes in MiB.

    budget: bytes that a forward may keep for the backward.
    predicted_bytes: what it will keep, as `pk.saved_bytes` counts.
    other_bytes: of these, what is outside the stages.
    extra_bytes: moved in a step beyond what mode "store" moves.
    stages: in order.
    """

    budget: int
    predicted_bytes: int
    other_bytes: int
    extra_bytes: int
    stages: tuple[StagePlan, ...]

    def apply(self, model: nn.Module) -> nn.Module:
        """Sets the modes of the stages of `model`, which is returned.

        Raises:
            ValueError: `model` has other stages than the one that was planned for.
        """
        found = {n: len(m) for n, m in model.named_modules() if isinstance(m, PreActStage)}
        expected = {p.name: p.blocks for p in self.stages if not p.is_converted}
        norms = {n: m for n, m in model.named_modules() if is_norm(m)}
        converted = [p.name for p in self.stages if p.is_converted]
        if found != expected or not norms.keys() >= set(converted):
            wanted = ", ".join(f"{p.name!r} of {p.blocks} blocks" for p in self.stages)
            has = ", ".join(f"{n!r} of {count} blocks" for n, count in found.items())
            raise ValueError(f"model: expected the stages {wanted}, got {has or 'none'}")
        for stage in self.stages:
            memory = stage.chosen.memory
            if stage.is_converted:
                norms[stage.name].__dict__[MEMORY] = memory
            else:
                _set_mode(cast(PreActStage, model.get_submodule(stage.name)), memory)
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
        lines.append(f"{'outside stages':{width}} {'':>6}{self.other_bytes / _MIB:>12,.1f}")
        lines.append(
            f"* chosen: {self.predicted_bytes / _MIB:,.1f} of {self.budget / _MIB:,.1f} MiB, "
            f"{self.extra_bytes / _MIB:,.1f} MiB more to move in a step than with 'store'"
        )
        return "\n".join(lines)


class _ConvertedStage(nn.Module):
    """Blocks in a row of a converted model, with the attributes of a `PreActStage`."""

    def __init__(self, blocks: Sequence[BlockArguments], dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks, self.dtype = tuple(blocks), dtype
        self.memory = "store"
        self.segments: int | None = None
        self.anchor_every: int | None = None

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The tensors that the blocks read, which no forward saves for itself."""
        for block in self.blocks:
            yield from cast("list[nn.Parameter]", block.weights())
            for bn, _ in block.units:
                yield from cast("list[nn.Parameter]", [t for t in bn[:4] if t is not None])

    def copy_of_shapes(self, device: torch.device) -> "_ConvertedStage":
        """A copy on `device` whose tensors have no values."""

        def empty(value):
            if isinstance(value, Tensor):
                return _shape_of(value, device).requires_grad_(value.requires_grad)
            if isinstance(value, BlockArguments | BatchNorm | ConvArguments):
                return type(value)(*map(empty, value))
            return type(value)(map(empty, value)) if isinstance(value, list | tuple) else value

        return _ConvertedStage([empty(b) for b in self.blocks], self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last block."""
        memory = MemoryMode(self.memory, self.segments, self.anchor_every)
        return preact_stage(self.blocks, x, self.dtype, memory)


_Stage = PreActStage | _ConvertedStage


def _set_mode(stage: _Stage, memory: str) -> None:
    stage.memory, stage.segments, stage.anchor_every = memory, None, None


def plan_memory(model: nn.Module, x: Tensor, budget: int) -> MemoryPlan:
    """Chooses the memory mode of each stage: the fastest combination that fits in `budget` bytes.

    Runs a copy of the model on shapes alone, in its present mode (training or evaluation, with or
    without autocast), and counts saved bytes as `pk.saved_bytes` does. Nothing is computed, and
    `model` does not change. Modes have their default numbers of segments and anchors. Stages are
    `PreActStage`s, and the residual blocks in a row of a converted model (`pk.convert`).

    The cost of a mode is the memory traffic that it adds to `"store"`: `"rebuild"` reads y and z
    and writes x for each block whose input it rebuilds; `"checkpoint"` also runs the forward
    again. All combinations of modes are compared.

    Args:
        model: has at least one stage.
        x: an input like those to come, on any device, the meta device too.
        budget: bytes that one forward may keep for the backward, parameters left out.

    Returns:
        The plan; `plan.apply(model)` sets it, `print(plan)` shows it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the model has no stage, or no combination fits; the message names the smallest
            budget that fits.
    """
    check_model_and_input(model, x)
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget: expected an int (bytes), got {type(budget).__name__}")
    if budget < 0:
        raise ValueError(f"budget: expected at least 0 bytes, got {budget}")
    is_served = any(isinstance(m, PreActStage) or CONVERSION in vars(m) for m in model.modules())
    other_bytes, stages = _options(model, x) if is_served else (0, [])
    if not stages:
        raise ValueError("model: expected at least one PreActStage, or a converted model, got none")
    chosen = _cheapest([s.options for s in stages], budget - other_bytes)
    if chosen is None:
        smallest = other_bytes + sum(min(o.saved_bytes for o in s.options) for s in stages)
        raise ValueError(f"budget: expected at least {smallest} bytes, got {budget}")
    stages = [
        dataclasses.replace(stage, chosen=choice)
        for stage, choice in zip(stages, chosen, strict=True)
    ]
    predicted = other_bytes + _saved(chosen)
    return MemoryPlan(budget, predicted, other_bytes, _extra(chosen), tuple(stages))


def _cheapest(
    options: Iterable[Sequence[StageOption]], budget: int
) -> tuple[StageOption, ...] | None:
    """The combination that fits and moves the least; of equal ones, the one that saves least.

    Goes through the stages, and drops each combination so far that another one beats in both.
    """
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


def _saved(options: Iterable[StageOption]) -> int:
    return sum(o.saved_bytes for o in options)


def _extra(options: Iterable[StageOption]) -> int:
    return sum(o.extra_bytes for o in options)


def _options(model: nn.Module, x: Tensor) -> tuple[int, list[StagePlan]]:
    """Bytes saved outside the stages, and the options of each stage, from shapes alone.

    Every mode saves an input of the stage that requires a gradient, and some save its output. To
    count no tensor twice, the rest of the model runs with each stage replaced by a function that
    saves only such an input; other inputs and outputs that the rest saves are then left out of the
    stage's own bytes.
    """
    ends: dict[str, _EndsOfStage] = {}
    fake_mode = FakeTensorMode()
    with fake_mode:
        rest = _copy_of_shapes(model)
        names = {m: name for name, m in rest.named_modules()}
        for name, module in rest.named_modules():
            if isinstance(module, PreActStage):
                run = functools.partial(_ends_of_stage, ends, name, module)
                module.forward = run  # type: ignore[method-assign]
            if (conversion := vars(module).get(CONVERSION)) is not None:
                conversion.extra_types = (FakeTensor,)
                conversion.run_stage = functools.partial(_ends_of_converted_stage, ends, names)
        outside, _ = saved_storages(rest, _shape_of(x).requires_grad_(x.requires_grad))
    other_bytes = sum(size for size, _ in outside.values())
    for name, module in model.named_modules():
        if isinstance(module, PreActStage) and name not in ends:
            raise ValueError(f"model: expected each PreActStage to run once, {name!r} did not run")
    plans = []
    for name, (run_stage, x, y) in ends.items():
        is_converted = isinstance(run_stage, _ConvertedStage)
        own = run_stage if is_converted else cast(PreActStage, model.get_submodule(name))
        # In another layout the rest saves a copy of the output, not the output itself.
        is_nhwc = y.is_contiguous(memory_format=torch.channels_last)
        is_shared = is_nhwc and storage_id(y) in outside
        is_saved = not x.requires_grad and storage_id(x) in outside
        options = _options_of_stage(own, x, fake_mode, (is_saved, is_shared))
        if y.requires_grad and x.requires_grad:
            other_bytes -= x.numel() * x.element_size()
        plans.append(StagePlan(name, len(_sizes_of(own)), options, options[0], is_converted))
    return other_bytes, plans


def _options_of_stage(
    stage: _Stage, x: Tensor, fake_mode: FakeTensorMode, are_saved: tuple[bool, bool]
) -> tuple[StageOption, ...]:
    """What a stage saves in each mode.

    Args:
        stage: the stage.
        x: a fake tensor like its input.
        fake_mode: that of `x`.
        are_saved: whether the rest of the model saves the input, and the output.
    """
    # The meta device is much faster. It has no autocast, and other memory formats than real
    # devices in plain convolutions.
    is_plain = isinstance(stage, PreActStage) and not all(map(is_fusable, stage))
    device = x.device if is_plain or is_autocast(x) else torch.device("meta")
    options = []
    with contextlib.nullcontext() if device.type == "meta" else fake_mode:
        shapes: _Stage
        if isinstance(stage, _ConvertedStage):
            shapes = stage.copy_of_shapes(device)
        else:
            shapes = _copy_of_shapes(stage, device)
        own = _shape_of(x, device).requires_grad_(x.requires_grad)
        for memory in MEMORY_MODES:
            _set_mode(shapes, memory)
            kept, found = saved_storages(shapes, own)
            for t, is_saved in zip((own, found), are_saved, strict=True):
                if is_saved:
                    kept.pop(storage_id(t), None)
            size = sum(size for size, _ in kept.values())
            options.append(StageOption(memory, size, _extra_bytes(shapes, own, memory)))
    return tuple(options)


class _Ends(torch.autograd.Function):
    """In place of a stage: saves an input with a gradient, and returns a tensor like its output."""

    @staticmethod
    def forward(ctx, x, parameter, shape, channels_last):
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


class _EndsOfStage(NamedTuple):
    """A stage of a copy of shapes, its input and its output."""

    stage: _Stage
    x: Tensor
    y: Tensor


def _ends_of_stage(
    ends: dict[str, _EndsOfStage], name: str, stage: PreActStage, x: Tensor
) -> Tensor:
    x = in_stream(_blocks(stage)[0], x)
    return _ends_of(ends, name, stage, x, list(stage.parameters()))


def _ends_of_converted_stage(
    ends: dict[str, _EndsOfStage],
    names: dict[nn.Module, str],
    blocks: Sequence[BlockArguments],
    x: Tensor,
    first_norm: nn.Module | None,
    dtype: torch.dtype,
) -> Tensor:
    stage = _ConvertedStage(blocks, dtype)
    if first_norm is None:  # no mode can be set
        return stage(x)
    return _ends_of(ends, names[first_norm], stage, x, list(stage.parameters()))


def _ends_of(
    ends: dict[str, _EndsOfStage],
    name: str,
    stage: _Stage,
    x: Tensor,
    parameters: Sequence[Tensor],
) -> Tensor:
    """The output of `_Ends` for a stage."""
    if name in ends:
        kind = "PreActStage" if isinstance(stage, PreActStage) else "stage"
        raise ValueError(f"model: expected each {kind} to run once, {name!r} runs again")
    channels_last = any(map(layout.is_channels_last, (x, *_weights(stage))))
    shape = _sizes_of(stage, x.shape)[-1][-1]
    trained = next((p for p in parameters if p.requires_grad), None)
    x = layout.nhwc(x)
    y = _Ends.apply(x, trained, shape, channels_last)
    ends[name] = _EndsOfStage(stage, x, y)
    return y


def _blocks(stage: PreActStage) -> list[PreActBlock]:
    return cast(list[PreActBlock], list(stage))


def _weights(stage: _Stage) -> list[Tensor]:
    if isinstance(stage, PreActStage):
        return [m.weight for m in stage.modules() if isinstance(m, nn.Conv2d)]
    return [w for b in stage.blocks for w in b.weights()]


def _sizes_of(stage: _Stage, shape: Sequence[int] = (1, 1, 64, 64)) -> list[list[Sequence[int]]]:
    """Output shapes of the convolutions of each block, for an input of `shape`."""
    sizes: list[list[Sequence[int]]] = []
    for block in stage.blocks if isinstance(stage, _ConvertedStage) else _blocks(stage):
        if isinstance(block, BlockArguments):
            convs: list = [conv for _, conv in block.units]
        else:
            convs = [conv for _, conv in block.units()]
        sizes.append([])
        for conv in convs:
            shape = geometry_of(conv).output_shape(shape, conv.weight.shape)
            sizes[-1].append(shape)
    return sizes


def _shape_of(t: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device or t.device)


_Model = TypeVar("_Model", bound=nn.Module)


def _copy_of_shapes(model: _Model, device: torch.device | None = None) -> _Model:
    """A copy whose tensors have no values, and whose batch norms read none."""
    fakes = {}
    for t in (*model.parameters(), *model.buffers()):
        fake = _shape_of(t, device)
        is_parameter = isinstance(t, nn.Parameter)
        fakes[id(t)] = nn.Parameter(fake, t.requires_grad) if is_parameter else fake
    model = copy.deepcopy(model, fakes)
    for module in model.modules():
        if isinstance(module, BatchNormBase):
            module.momentum = 0.1  # None reads the number of batches
            if isinstance(module, nn.SyncBatchNorm):  # without communication
                module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
    return model


def _first_recorded(stage: _Stage, x: Tensor) -> int:
    """The first block that autograd records on an input `x`: those before it save nothing."""
    if isinstance(stage, _ConvertedStage):
        return first_recorded(stage.blocks, x)[0]
    if x.requires_grad:
        return 0
    trained = (i for i, b in enumerate(stage) if any(p.requires_grad for p in b.parameters()))
    return next(trained, len(stage))


def _extra_bytes(stage: _Stage, x: Tensor, memory: str) -> int:
    """Memory traffic of a step beyond that of mode `"store"`, bytes."""
    mode = MemoryMode(memory)
    itemsize = x.element_size()
    inner_size = compute_dtype(x).itemsize if is_autocast(x) else _weights(stage)[0].itemsize
    shape: Sequence[int] = x.shape
    wide, inner = [x.numel() * itemsize], []
    for shapes in _sizes_of(stage, shape):
        shape = shapes.pop()
        wide.append(math.prod(shape) * itemsize)
        inner.append([math.prod(s) * inner_size for s in shapes])
    if isinstance(stage, _ConvertedStage):
        can_rebuild = [b.is_residual and b.projection is None for b in stage.blocks]
    else:
        can_rebuild = [b.is_residual and b.projection() is None for b in _blocks(stage)]
    first = _first_recorded(stage, x)
    starts = [first + start for start in mode.segment_starts(len(can_rebuild) - first)]
    extra = 0
    for start, end in itertools.pairwise([*starts, len(can_rebuild)]):
        keeps = mode.keeps_input(can_rebuild[start:end], x.dtype)
        for i, is_kept in enumerate(keeps, start):
            if memory == "checkpoint":
                extra += 2 * wide[i] + 2 * sum(inner[i]) + wide[i + 1]
            if not is_kept:
                extra += inner[i][-1] + wide[i] + wide[i + 1]
    return extra
