"""Measurements of signal flow by block: activations, gradients, weights and their updates."""

import copy
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from preact_kernels.modules.blocks import PreActBlock
from preact_kernels.study.diagnostics.block_hooks import (
    STAGE,
    Blocks,
    Key,
    blocks_of,
    checked_blocks,
    output_hooks,
    rows_of,
    statistics,
    unchanged_state,
    unwrapped,
    weights_of,
    wide,
)
from preact_kernels.study.diagnostics.rows import (
    BlockRow,
    Thresholds,
    warnings_of,
    write_csv,
)


def measure(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    x: Tensor,
    target: Any,
    *,
    blocks: Blocks | None = None,
    step: int = 0,
) -> list[BlockRow]:
    """Measures all blocks in one forward and backward of `loss_fn(model(x), target)`.

    Gradients (`p.grad`), buffers, torch's random state and the mode of the model do not change.
    Blocks have hooks during the call, so a `PreActStage` calls them one by one, in mode `"store"`.
    If a block is called more than once, its first call is measured.

    Args:
        model: a model in the mode (training or evaluation) to measure; `DistributedDataParallel` is
            unwrapped, so each process measures its own batch.
        loss_fn: maps the model's output and the target to a tensor of one element.
        x: input of the model.
        target: target of the loss.
        blocks: modules by name that return a tensor each; None: `blocks_of(model)`.
        step: `step` of the rows.

    Returns:
        A row for each block that was called, in the order of `blocks`; `update_to_weight` is None.

    Raises:
        TypeError: an argument has the wrong type, or a block does not return a tensor.
        ValueError: there are no blocks, the model calls none of them, the loss has more than one
            element, or the loss depends on no parameter that requires a gradient.
    """
    blocks = checked_blocks(model, blocks)
    model = unwrapped(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    scalars: dict[Key, Tensor] = {}

    def read(name: str, y: Tensor) -> None:
        def read_gradient(dy: Tensor) -> None:
            scalars[("dy", name)] = torch.linalg.vector_norm(dy.detach(), dtype=wide(dy.dtype))

        scalars.update(statistics(name, y))
        if y.requires_grad:
            y.register_hook(read_gradient)

    with unchanged_state(model), torch.enable_grad():
        with output_hooks(blocks, read):
            output = model(x)
        loss = loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn: expected a tensor of one element, got {got}")
        if not parameters or not loss.requires_grad:
            raise ValueError("model: expected a loss that depends on parameters, got a constant")
        # Unlike `backward`, does not change `p.grad` or run hooks of gradient accumulation.
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {id(p): g for p, g in zip(parameters, found, strict=True)}
    return rows_of(step, blocks, lambda p: gradients.get(id(p)), scalars)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


class _BeforeStep(NamedTuple):
    """Values from `before_step` for `after_step`."""

    scalars: dict[Key, Tensor]
    weights: dict[str, list[tuple[nn.Parameter, Tensor]]]


class Monitor:
    """Measures all blocks at training steps 1, `every`, 2 `every`, 3 `every`, and so on.

    Does not change the results of training, bit for bit. At these steps `before_step` copies the
    weights and runs one more forward without gradients, with hooks that read the outputs of the
    blocks; then it restores buffers and torch's random state. The step itself runs without hooks:
    stages keep their memory mode, and a captured CUDA graph can be replayed.
    `activation_gradient_norm` is None. Gradients are `p.grad` after the step, unscaled and clipped,
    as the optimizer used them; None counts as zero.

    Around an ordinary training loop::

        with Monitor(model).attach(optimizer) as monitor:
            train()
        print(monitor.warnings)

    If steps do not call the model (`graphed_step`), do not attach the monitor: call
    `before_step(x)` before each step and `after_step()` after it.

    Args:
        model: the network; `DistributedDataParallel` is unwrapped, and each process measures its
            own batch.
        every: steps between measurements.
        thresholds: limits for the warnings; None: the defaults.
        blocks: modules by name that return a tensor each; None: `blocks_of(model)`.

    Attributes:
        step: steps done; set it when training continues.
        rows: `BlockRow`s of all measurements.
        warnings: `warnings_of` these rows.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are no blocks, or `every` is below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        thresholds: Thresholds | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.blocks = checked_blocks(model, blocks)
        _check_count("every", every)
        self.model = model
        self.every = every
        self.thresholds = Thresholds() if thresholds is None else thresholds
        self.step = 0
        self.rows: list[BlockRow] = []
        self.warnings: list[str] = []
        self._before: _BeforeStep | None = None
        self._handles: list[Any] = []

    @property
    def is_due(self) -> bool:
        return self.step == 0 or (self.step + 1) % self.every == 0

    def before_step(self, *args: Any, **kwargs: Any) -> None:
        """Measures `model(*args, **kwargs)` if the next step is due and not measured yet."""
        if self._before is not None or not self.is_due:
            return
        scalars: dict[Key, Tensor] = {}
        model = unwrapped(self.model)
        with (
            unchanged_state(model),
            torch.no_grad(),  # also keeps the hook of `attach` from measuring this forward
            output_hooks(self.blocks, lambda name, y: scalars.update(statistics(name, y))),
        ):
            model(*args, **kwargs)
        weights = {
            name: [(p, p.detach().clone()) for p in weights_of(block)]
            for name, block in self.blocks.items()
        }
        self._before = _BeforeStep(scalars, weights)

    def after_step(self) -> None:
        """Counts an optimizer step; adds rows and warnings if `before_step` measured it."""
        self.step += 1
        if self._before is None:
            return
        scalars, weights = self._before
        self._before = None
        rows = rows_of(self.step, self.blocks, lambda p: p.grad, scalars, weights)
        self.rows += rows
        self.warnings += warnings_of(rows, self.thresholds)

    def attach(self, optimizer: Optimizer) -> "Monitor":
        """Calls `before_step` at forwards of the model and `after_step` at steps of `optimizer`.

        Only forwards in training mode with gradients count, and only the first before each step
        (gradient accumulation). Calls of `torch.compile(model)` are measured; calls after
        `model.compile()` and calls that a CUDA graph captures are not.

        Returns:
            This monitor; as a context manager, it calls `detach` at the end.

        Raises:
            TypeError: `optimizer` is not a `torch.optim.Optimizer`.
            ValueError: the monitor is attached already.
        """
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {kind}")
        if self._handles:
            raise ValueError("optimizer: expected a detached monitor, got one that is attached")
        called = self.model
        while isinstance(called, DistributedDataParallel):
            called = called.module  # called with the input on the right device

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is not called:  # deep copies of the model also have the hook
                return
            if module.training and torch.is_grad_enabled() and not _is_recorded():
                self.before_step(*args, **kwargs)

        def after(*_: Any) -> None:
            if not _is_recorded():
                self.after_step()

        self._handles = [
            called.register_forward_pre_hook(before, with_kwargs=True),
            optimizer.register_step_post_hook(after),
        ]
        return self

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        write_csv(path, self.rows)


def _is_recorded() -> bool:
    """Whether calls are being compiled or captured instead of run."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def identity_test(model: nn.Module, x: Tensor, *, blocks: Blocks | None = None) -> dict[str, bool]:
    """Tests whether blocks return their input if the last convolution of the branch is zero.

    True if `block(x) == x` for all elements (-0.0 equals 0.0), as with full pre-activation. Biases
    of norms are set to random numbers, as after training: with zero biases, a branch that ends with
    a norm would also be zero. Runs a copy of the model in training mode.

    Args:
        model: a network of `PreActBlock`s, `ResidualBlock`s or blocks with a `last_conv`.
        x: input of the model.
        blocks: modules by name; None: `blocks_of(model)`.

    Returns:
        A bool by name, for blocks that keep the shape of their input.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are no blocks, or one has no `last_conv`.
    """
    model, blocks = copy.deepcopy((unwrapped(model), checked_blocks(model, blocks)))
    inputs: dict[str, Tensor] = {}
    result: dict[str, bool] = {}

    def keep(name: str, args: tuple[Any, ...]) -> None:
        inputs.setdefault(name, args[0].clone())  # the block may change its input

    def compare(name: str, y: Tensor) -> None:
        if y.shape == inputs[name].shape:
            result[name] = torch.equal(y, inputs[name])

    with torch.no_grad(), unchanged_state(model):
        torch.manual_seed(0)
        for name, block in blocks.items():
            for module in block.modules():
                if not isinstance(module, nn.Conv2d) and isinstance(
                    bias := getattr(module, "bias", None), Tensor
                ):
                    bias.uniform_(-1, 1)
            conv = _last_conv(name, block)
            conv.weight.zero_()
            if conv.bias is not None:
                conv.bias.zero_()
            block.register_forward_pre_hook(lambda _, args, name=name: keep(name, args))
        model.train()
        with output_hooks(blocks, compare):
            model(x)
    return result


def _last_conv(name: str, block: nn.Module) -> nn.Conv2d:
    if isinstance(block, PreActBlock):
        *_, (_, conv) = block.units()
        return conv
    last = getattr(block, "last_conv", None)
    if not isinstance(last, nn.Conv2d):
        kind = type(block).__name__
        raise ValueError(f"blocks: expected blocks with a last_conv, got {kind} as {name!r}")
    return last


def histograms(
    model: nn.Module, x: Tensor, *, bins: int = 81, limit: float | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Counts the values in each stage's output, in the current mode of the model.

    Args:
        model: a network with blocks named `stages.<i>.<j>`.
        x: input of the model.
        bins: bins of equal width, from `-limit` to `limit`.
        limit: larger magnitudes are not counted; None: the largest magnitude in each stage.

    Returns:
        Counts `[bins]` and edges `[bins + 1]` by stage (`"stages.0"`), on the CPU.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are no stages, or a number is out of range.
    """
    _check_count("bins", bins)
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"limit: expected a positive number or None, got {limit}")
    named = ((STAGE.fullmatch(name), block) for name, block in blocks_of(model).items())
    ends = {match[1]: block for match, block in named if match}  # the last block of each stage
    if not ends:
        raise ValueError("model: expected blocks named stages.<i>.<j>, got none")
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def count(name: str, y: Tensor) -> None:
        values = y.detach().double().cpu().flatten()
        values = values[values.isfinite()]
        end = limit or (float(values.abs().max()) if values.numel() else 0.0) or 1.0
        counts = torch.histc(values, bins, -end, end).long()
        found[name] = counts, torch.linspace(-end, end, bins + 1, dtype=torch.float64)

    model = unwrapped(model)
    with unchanged_state(model), torch.no_grad(), output_hooks(ends, count):
        model(x)
    return found
