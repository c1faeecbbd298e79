"""Changes of the block shapes of Triton's convolutions, one at a time, for bench/block_shapes.py.

Nothing in the backend serves this: `applied` replaces the rule where the launches have imported it.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from bench import dry_run
from bench.contenders import Network
from preact_kernels.kernels.contract import Unit
from preact_kernels.ops.block_arguments import geometry_of

FORWARD, ONE_PASS, INPUT, WEIGHT = "forward", "both", "input", "weight"  # kernels of a unit
# Factors of pixels, warps and resident programs.
FACTORS = (
    *((1, 0.5, 1), (1, 2, 1), (0.5, 1, 1), (2, 1, 1), (1, 1, 2), (0.5, 0.5, 2), (0.5, 1, 2)),
    *((1, 0.5, 2), (0.25, 0.5, 4), (2, 2, 0.5)),
)


class Step(NamedTuple):
    """What is trained."""

    network: Network
    batch: int
    dtype: torch.dtype

    def stages(self, device: str) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yields the stages and their inputs."""
        of_step = self.network, self.batch, self.dtype
        return dry_run.stages(*of_step, "store", None, torch.device(device))


class Kernel(NamedTuple):
    """A kernel of a block, and the `ConvBlocks` that the rule chooses."""

    stage: int
    place: int  # of the convolution in the block
    units: tuple[Unit, ...]  # of the block
    x_shape: tuple[int, ...]  # of the block's input
    part: str = ""
    chosen: Any = None

    @property
    def name(self) -> str:
        """For example `"F2"`, `"B2"`, or `"B2 input"` and `"B2 weight"`."""
        apart = f" {self.part}" if self.part in (INPUT, WEIGHT) else ""
        return f"{'F' if self.part == FORWARD else 'B'}{self.place + 1}{apart}"

    @property
    def unit(self) -> Unit:
        """The convolution with its norm."""
        return self.units[self.place]


class Change(NamedTuple):
    """Other `ConvBlocks` of a kernel; None: two launches in place of one pass."""

    kernel: Kernel
    blocks: Any

    def __str__(self) -> str:
        chosen = self.kernel.chosen._asdict().items()
        return text(self.blocks, *chosen) if self.blocks else "two launches"


def text(blocks: Any, *left_out: tuple[str, int]) -> str:
    """Formats `ConvBlocks`, except fields with these values."""
    return " ".join(f"{n}={v}" for n, v in blocks._asdict().items() if (n, v) not in left_out)


def backend_module(name: str) -> ModuleType:
    """Imports a module of the Triton backend, whose package has functions of the same names."""
    return importlib.import_module(f"preact_kernels.kernels.triton.{name}")


def used(kernel: Kernel) -> dict[str, Any]:
    """Returns the `ConvBlocks` that a run of blocks launches the unit of a kernel with, by part."""
    run_units, precision = (
        backend_module("run_units"),
        backend_module("conv").precision(kernel.unit.dtype),
    )
    key = run_units._RunKey(None, precision, kernel.units, kernel.x_shape)
    forward, backward = run_units._launches(key)[kernel.place]
    g, weight = backward.input._constants[0]["BLOCKS"], backward.weight._constants["BLOCKS"]
    gradients = {ONE_PASS: g} if backward.in_one_pass else {INPUT: g, WEIGHT: weight}
    return {FORWARD: forward._constants["BLOCKS"], **gradients}


def kernels(step: Step, device: str = "cuda") -> Iterator[Kernel]:
    """Yields the kernels of the last block of each stage, unless it is the first one too."""
    for index, (blocks, x) in enumerate(step.stages("meta")):
        shape, dtypes = x.shape, [step.dtype] * 4
        for _, conv in blocks[0].units():
            shape = geometry_of(conv).output_shape(shape, conv.weight.shape)
        convs = [(tuple(c.weight.shape), geometry_of(c)) for _, c in blocks[-1].units()]
        units = tuple(Unit(*conv, torch.device(device), *dtypes) for conv in convs)
        if len(blocks) > 1 and all(map(backend_module("norm_act_conv").serves, units)):
            for unit in dict.fromkeys(units):  # equal ones change together
                kernel = Kernel(index, units.index(unit), units, tuple(shape))
                for part, chosen in used(kernel).items():
                    yield kernel._replace(part=part, chosen=chosen)


def variants(kernel: Kernel) -> Iterator[Change]:
    """Yields the changes of a kernel."""
    chosen, new = kernel.chosen, kernel.chosen._replace
    out_channels, channels, *sizes = kernel.unit.weight_shape
    is_1x1, is_forward = sizes == [1, 1], kernel.part == FORWARD
    found = [
        new(
            block_pixels=int(chosen.block_pixels * pixels),
            num_warps=int(chosen.num_warps * warps),
            resident=max(1, int(chosen.resident * resident)),
        )
        for pixels, warps, resident in FACTORS
    ]
    small = found[FACTORS.index((0.5, 0.5, 2))]
    found.append(new(resident=chosen.resident + 1))
    if is_1x1 or kernel.part == WEIGHT or chosen.num_tap_stages == 0:  # no loop over taps
        found += [*(new(num_stages=n) for n in (1, 2, 3, 4)), small._replace(num_stages=2)]
    else:
        found += [new(num_tap_stages=n) for n in (2, 3, 4, 5)]
        found.append(small._replace(num_tap_stages=4))
    summed, of_result = ("block_cin", "block_cout")[:: 1 if is_forward else -1]
    if getattr(chosen, summed) < (channels if is_forward else out_channels):
        found.append(new(**{summed: 2 * getattr(chosen, summed)}))
    if is_1x1 and getattr(chosen, of_result) > 32:
        found.append(new(**{of_result: getattr(chosen, of_result) // 2}))
    for b in dict.fromkeys(found):
        is_valid = 16 <= b.block_pixels <= 256 and 1 <= b.num_warps <= 8 and b.resident <= 8
        if is_valid and b != chosen:
            yield Change(kernel, b)
    if kernel.part == ONE_PASS:
        yield Change(kernel, None)


@contextlib.contextmanager
def applied(change: Change) -> Iterator[None]:
    """Changes the launches that are made in its context.

    Raises:
        RuntimeError: the kernel would not be launched with the change.
    """
    (kernel, blocks), rule, run_units = (
        change,
        backend_module("configurations"),
        backend_module("run_units"),
    )

    def is_changed(unit: Unit) -> bool:
        return (tuple(unit.weight_shape), unit.conv) == kernel.unit[:2]

    def conv_forward(device: Any, unit: Unit) -> Any:
        is_own = kernel.part == FORWARD and is_changed(unit)
        return blocks if is_own else rule.conv_forward(device, unit)

    def filling(found: Any, *of_grid: Any) -> Any:
        return found if found is blocks else rule.filling(found, *of_grid)

    def conv_backward(device: Any, unit: Unit) -> Any:
        found, is_own = rule.conv_backward(device, unit), kernel.part != FORWARD
        return found._replace(**{kernel.part: blocks}) if is_own and is_changed(unit) else found

    forward, backward = (
        backend_module("norm_act_conv_forward"),
        backend_module("norm_act_conv_backward"),
    )
    new_launches = functools.cache(run_units._launches.__wrapped__)
    with (
        mock.patch.multiple(forward, conv_forward=conv_forward, filling=filling),
        mock.patch.object(backward, "conv_backward", conv_backward),
        mock.patch.object(run_units, "_launches", new_launches),
    ):
        if used(kernel).get(kernel.part) != blocks:
            raise RuntimeError("not launched: two launches replace one pass, or one pass two")
        yield
