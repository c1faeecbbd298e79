"""Hooks on residual blocks, and evaluation of the values that they read."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from preact_kernels import torch_compat
from preact_kernels.modules.blocks import PreActBlock
from preact_kernels.study.blocks import ResidualBlock
from preact_kernels.study.diagnostics.rows import BlockRow

Blocks = Mapping[str, nn.Module]
Key = tuple[str, str]  # a quantity and the name of a block
STAGE = re.compile(r"((?:.*\.)?stages\.(\d+))\.\d+")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `DistributedDataParallel` and `torch.compile`."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the `PreActBlock`s and `ResidualBlock`s of a network by name, in order.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `model` has no such blocks.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    modules = unwrapped(model).named_modules()
    blocks: dict[str, nn.Module] = {
        name: m for name, m in modules if isinstance(m, PreActBlock | ResidualBlock)
    }
    if not blocks:
        raise ValueError(
            "model: expected residual blocks of this package, got none: name the blocks of another "
            "network in blocks=, a dict of modules"
        )
    return blocks


def checked_blocks(model: nn.Module, blocks: Blocks | None) -> dict[str, nn.Module]:
    """Returns `blocks`, checked, or the residual blocks of `model`."""
    if blocks is None:
        return blocks_of(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(blocks, Mapping):
        raise TypeError(f"blocks: expected a dict of modules, got {type(blocks).__name__}")
    if not blocks:
        raise ValueError("blocks: expected at least one block, got none")
    return dict(blocks)


@contextlib.contextmanager
def unchanged_state(model: nn.Module) -> Iterator[None]:
    """Restores the model's buffers and torch's random state at the end, bit for bit."""
    buffers = [
        (module, name, t, t.detach().clone())
        for module in model.modules()
        for name, t in module.named_buffers(recurse=False)
    ]
    tensors = (*model.parameters(), *model.buffers())
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for module, name, t, value in buffers:
                t.copy_(value)
                setattr(module, name, t)  # a forward may have assigned another tensor


@contextlib.contextmanager
def output_hooks(blocks: Blocks, read: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls `read(name, output)` at the first call of each block in the body."""
    called: set[str] = set()

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name in called:
                return
            if not isinstance(output, Tensor):
                kind = type(output).__name__
                raise TypeError(f"blocks: expected blocks that return a tensor, got {kind}")
            called.add(name)
            read(name, output)

        return hook

    handles = []
    try:
        for name, block in blocks.items():
            handles.append(block.register_forward_hook(hook_of(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not called:
        raise ValueError("blocks: expected blocks that the model calls, got none that it called")


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns `dtype`, or float32 if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def statistics(name: str, y: Tensor) -> dict[Key, Tensor]:
    """Returns mean and standard deviation of a block's output, on its device."""
    y = y.detach().to(wide(y.dtype))
    mean = y.mean()
    std = (y - mean).square_().mean().sqrt()  # on CPUs 3 to 10 times as fast as torch.std_mean
    return {("std", name): std, ("mean", name): mean}


def weights_of(block: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters with two or more axes."""
    return [p for p in block.parameters() if p.ndim >= 2]


def _evaluate(norms_of: dict[Key, list[Tensor]], scalars: dict[Key, Tensor]) -> dict[Key, float]:
    """Returns L2 norms of lists of tensors, and values of 0-d tensors; copies to the host once."""
    tensors = [t.detach() for ts in norms_of.values() for t in ts]
    values: list[Tensor] = []
    if tensors:
        dtype = torch.float32
        for t in tensors:
            dtype = torch.promote_types(dtype, t.dtype)
        values.extend(torch_compat.foreach_norm(tensors, 2, dtype))
    values.extend(scalars.values())
    device = values[-1].device
    numbers = iter(torch.stack([v.to(device) for v in values]).tolist())
    result = {key: math.hypot(*islice(numbers, len(ts))) for key, ts in norms_of.items()}
    result.update(zip(scalars, numbers, strict=True))
    return result


def _ratio(a: float, b: float) -> float:
    if b == 0:
        return math.inf if a else 0.0
    return a / b


def rows_of(
    step: int,
    blocks: Blocks,
    gradient_of: Callable[[nn.Parameter], Tensor | None],
    scalars: dict[Key, Tensor],
    before: dict[str, list[tuple[nn.Parameter, Tensor]]] | None = None,
) -> list[BlockRow]:
    """Returns the rows of the blocks that were called.

    Args:
        step: number of the step.
        blocks: all blocks.
        gradient_of: returns a parameter's gradient.
        scalars: statistics of the outputs, and norms of their gradients.
        before: weights, with copies from before the step; None if there was no step.
    """
    norms_of: dict[Key, list[Tensor]] = {}
    for name, block in blocks.items():
        if ("mean", name) not in scalars:
            continue
        weight_gradients = norms_of.setdefault(("dw", name), [])
        other_gradients = norms_of.setdefault(("db", name), [])
        for p in block.parameters():
            gradient = gradient_of(p) if p.requires_grad else None
            if gradient is not None:
                (weight_gradients if p.ndim >= 2 else other_gradients).append(gradient)
        if before is None:
            norms_of[("w", name)] = [*weights_of(block)]
        else:
            norms_of[("w", name)] = [old for _, old in before[name]]
            norms_of[("update", name)] = [p.detach() - old for p, old in before[name]]
    measured = _evaluate(norms_of, scalars)
    rows = []
    for number, (name, block) in enumerate(blocks.items(), 1):
        if ("mean", name) not in scalars:
            continue
        weight_gradient_norm, norm = measured[("dw", name)], measured[("w", name)]
        is_trained = any(p.requires_grad for p in weights_of(block))
        update = measured.get(("update", name))
        match = STAGE.fullmatch(name)
        rows.append(
            BlockRow(
                step=step,
                block=number,
                name=name,
                stage=int(match[2]) + 1 if match else 0,
                activation_mean=measured[("mean", name)],
                activation_std=measured[("std", name)],
                activation_gradient_norm=measured.get(("dy", name)),
                gradient_norm=math.hypot(weight_gradient_norm, measured[("db", name)]),
                weight_norm=norm,
                gradient_to_weight=_ratio(weight_gradient_norm, norm) if is_trained else None,
                update_to_weight=None if update is None else _ratio(update, norm),
            )
        )
    return rows
