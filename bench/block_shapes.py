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
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

import preact_kernels as pk
from bench import launches, measure, records
from bench.block_changes import Change, Step, applied, kernels, text, variants
from bench.contenders import Network
from bench.records import BLOCK_SHAPES, BlockShapeRow, number, put, read, slug

BLOCKS = 18
BLOCKS_TO_COMPILE = 5  # the fewest with the same kernels: see `run_weight_gradients.group_size`
CHANGES_IN_TURN = 12  # between two times of the unchanged stage
REPLAYS = 10


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
        kernel=kernel.name,
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
