"""Other block shapes of Triton's convolutions on a GPU: `python -m bench.block_shapes --compile 8`.

A rule in preact_kernels/kernels/triton/configurations.py chooses block shapes; this measures
alternatives. For each kernel of a block (forward; backward in one pass, or the gradients of the
input and of the weight apart) it changes one thing: pixels, warps, stages, resident programs,
channels, or a few of them together. As dependent launches overlap, it times the first 18 blocks of
a stage, forward and backward, in a CUDA graph; all convolutions with the same shape are changed.
The unchanged stage is timed before and after every dozen changes: a gain below the difference of
these two times is noise.

It says nothing about other GPUs or several changes at once, and does not check results. A change
that does not compile or run is a row with the reason. A stage with a convolution that is not fused
is left out.

`--compile` first fills Triton's cache in several processes, on 5 blocks of a stage; without it each
change is compiled when it is measured, which takes seconds. Rows are written one by one to
`*-block-shapes.csv`. To compile now and measure later, run with `--only-compile`, then `--resume`.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import importlib
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from tqdm import tqdm

import preact_kernels as pk
from bench import dry_run, launches, measure, records
from bench.contenders import Network
from bench.records import BLOCK_SHAPES, BlockShapeRow, number, put, read, slug
from preact_kernels.kernels.contract import Unit
from preact_kernels.ops.block_arguments import geometry_of

BLOCKS = 18
BLOCKS_TO_COMPILE = 5  # the fewest with the same kernels: see `run_weight_gradients.group_size`
CHANGES_IN_TURN = 12  # between two times of the unchanged stage
REPLAYS = 10
FORWARD, ONE_PASS, INPUT, WEIGHT = "forward", "both", "input", "weight"  # parts of a unit
NAMES = {FORWARD: "F{}", ONE_PASS: "B{}", INPUT: "B{} input", WEIGHT: "B{} weight"}
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


def product(name: str) -> ModuleType:
    """Imports a module of the Triton backend, whose package has functions of the same names."""
    return importlib.import_module(f"preact_kernels.kernels.triton.{name}")


def used(kernel: Kernel) -> dict[str, Any]:
    """Returns the `ConvBlocks` that a run of blocks launches the unit of a kernel with, by part."""
    run_units, precision = product("run_units"), product("conv").precision(kernel.unit.dtype)
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
        if len(blocks) > 1 and all(map(product("norm_act_conv").serves, units)):
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
    (kernel, blocks), rule, run_units = change, product("configurations"), product("run_units")

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

    forward, backward = product("norm_act_conv_forward"), product("norm_act_conv_backward")
    new_launches = functools.cache(run_units._launches.__wrapped__)
    with (
        mock.patch.multiple(forward, conv_forward=conv_forward, filling=filling),
        mock.patch.object(backward, "conv_backward", conv_backward),
        mock.patch.object(run_units, "_launches", new_launches),
    ):
        if used(kernel).get(kernel.part) != blocks:
            raise RuntimeError("not launched: two launches move fewer bytes")
        yield


@functools.cache
def short_stage(step: Step, blocks: int, index: int) -> tuple[nn.Module, Tensor]:
    """Returns the first blocks of a stage on the GPU, and their input."""
    stage, x = next(itertools.islice(step.stages("cuda"), index, None))
    return stage[:blocks], x


def us_per_block(step: Step, blocks: int, index: int, change: Change | None = None) -> float:
    """Times a short stage, forward and backward; divides by its blocks."""
    stage, x = short_stage(step, blocks, index)
    with pk.use_backend("triton"), applied(change) if change else contextlib.nullcontext():
        replay = launches.captured(stage, x)
    times = [measure.time_once_ms(replay, torch.device("cuda")) for _ in range(REPLAYS)]
    return 1e3 * min(times) / len(stage)


def attempt(step: Step, blocks: int, change: Change) -> tuple[float | None, str]:
    """Times a change; returns None and the reason if it fails."""
    try:
        return us_per_block(step, blocks, change.kernel.stage, change), ""
    except Exception as error:
        return None, measure.first_line(error)


def check_gpu() -> None:
    """Raises an error if the GPU runs no more kernels of this process."""
    measure.synchronize(torch.device("cuda"))


def compile_change(step: Step, change: Change) -> str:
    """Compiles a change and runs it; returns why it fails."""
    _, note = attempt(step, BLOCKS_TO_COMPILE, change)
    check_gpu()
    return note


def compile_changes(
    step: Step, changes: Sequence[Change], processes: int
) -> Iterator[tuple[Change, str]]:
    """Compiles in other processes, first what changes share; yields changes that fail, and why."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        stages = sorted({change.kernel.stage for change in changes})
        list(pool.map(functools.partial(us_per_block, step, BLOCKS_TO_COMPILE), stages))
        tries = {pool.submit(compile_change, step, change): change for change in changes}
        done = concurrent.futures.as_completed(tries)
        for future in tqdm(done, "compiled", len(tries), leave=False):
            error = future.exception()
            if note := measure.first_line(error) if error else future.result():
                yield tries[future], note
            if error:  # whatever its process runs next would fail too
                pool.shutdown(wait=False, cancel_futures=True)
                raise error


def measure_changes(
    step: Step, rows: dict[Change, BlockShapeRow], end_s: float
) -> Iterator[list[BlockShapeRow]]:
    """Measures in the order of `rows` until `time.time()` is `end_s`; yields rows that it sets."""
    for index, changes in itertools.groupby(rows, lambda change: change.kernel.stage):
        left, before_us = list(changes), None
        while left and time.time() < end_s:
            before_us = before_us or us_per_block(step, BLOCKS, index)
            done = []
            while left and len(done) < CHANGES_IN_TURN and time.time() < end_s:
                change = left.pop(0)
                us, rows[change].note = attempt(step, BLOCKS, change)
                rows[change].set_times(us, before_us)
                done.append(rows[change])
                yield done[-1:]
                check_gpu()
            after_us = us_per_block(step, BLOCKS, index)
            for row in done:
                row.set_times(row.us_per_block, before_us, after_us)
            yield done
            before_us = after_us


def row_of(step: Step, change: Change) -> BlockShapeRow:
    """Returns the row of a change, without times."""
    kernel = change.kernel
    return BlockShapeRow(
        network=step.network.name,
        batch=step.batch,
        dtype=measure.dtype_name(step.dtype),
        stage=kernel.stage + 1,
        kernel=NAMES[kernel.part].format(kernel.place + 1),
        conv="x".join(map(str, kernel.unit.weight_shape)),
        chosen=text(kernel.chosen),
        change=str(change),
    )


def table(rows: Sequence[BlockShapeRow], form: str = "simple") -> str:
    """Formats a line for each kernel that a change makes faster, with the best change."""
    best: dict[tuple, BlockShapeRow] = {}
    gains = [row for row in rows if row.gain_us_per_block is not None and row.gain_us_per_block > 0]
    for row in sorted(gains, key=lambda row: -row.gain_us_per_block):
        best.setdefault((row.stage, row.kernel), row)
    lines = [
        {
            "stage": row.stage,
            "kernel": row.kernel,
            "weight": row.conv,
            "chosen": row.chosen,
            "change": row.change,
            "us a block": number(row.us_per_block, ".2f"),
            "unchanged": number(row.before_us_per_block, ".2f"),
            "unchanged again": number(row.after_us_per_block, ".2f"),
            "gain": number(row.gain_us_per_block, ".2f"),
        }
        for row in best.values()
    ]
    return records.table(lines, form)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = measure.parser("bench.block_shapes", __doc__, "--out")
    add = parser.add_argument
    add("--network", default="resnet-1001", help="as in python -m bench (resnet-1001)")
    add("--batch", type=int, default=128, help="images (128)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16")
    add("--compile", type=int, default=0, metavar="N", help="compile in N processes first")
    add("--only-compile", action="store_true", help="with --compile: measure nothing")
    add("--seconds", type=float, default=300, help="for measuring (300)")
    add("--resume", action="store_true", help="skip changes that the CSV has for this commit")
    a = parser.parse_args(given)
    for name, least in (("batch", 1), ("compile", int(a.only_compile))):
        if getattr(a, name) < least:
            parser.error(f"--{name}: expected at least {least}, got {getattr(a, name)}")
    try:
        a.step = Step(Network.named(a.network), a.batch, measure.DTYPES[a.dtype])
        _ = a.step.network.block
    except ValueError as error:
        parser.error(str(error))
    return a


def main(given: Sequence[str] | None = None) -> None:
    """Compiles, measures, prints and writes."""
    a = arguments(given)
    if not torch.cuda.is_available():
        sys.exit("bench.block_shapes: no GPU")
    if "triton" not in pk.available_backends():
        sys.exit("bench.block_shapes: no Triton")
    machine = measure.Machine.of(torch.device("cuda"))
    path = a.out / f"{slug(machine.device)}{BLOCK_SHAPES}"
    known = {(r.key, r.commit): r for r in read(path, BlockShapeRow)} if a.resume else {}
    changes = [change for kernel in kernels(a.step) for change in variants(kernel)]
    changes.sort(key=lambda c: (c.kernel.unit.weight_shape[2:] == (1, 1), c.kernel.stage))
    rows = {change: machine.stamp(row_of(a.step, change)) for change in changes}
    rows = {change: known.get((row.key, row.commit), row) for change, row in rows.items()}

    def left() -> dict[Change, BlockShapeRow]:
        return {c: row for c, row in rows.items() if row.us_per_block is None and not row.note}

    if a.compile:
        for change, note in compile_changes(a.step, list(left()), a.compile):
            rows[change].note = note
            put(path, rows[change])
    if not a.only_compile:
        for done in measure_changes(a.step, left(), time.time() + a.seconds):
            put(path, *done)
    print(table(list(rows.values())))
    failed = sum(bool(row.note) for row in rows.values())
    print(f"{len(rows)} changes: {failed} do not run, {len(left())} are not measured")
    if not a.only_compile and all(row.us_per_block is None for row in rows.values()):
        sys.exit("bench.block_shapes: nothing was measured")


if __name__ == "__main__":
    main()
