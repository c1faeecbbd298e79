"""The launches of a training step: `python -m bench.launches --network resnet-1001 --batch 128`.

Needs no GPU: launches of the backend's own code are recorded and do not run (bench/dry_run.py).
Prints, for every stage, direction and kernel, the launches per block, the bytes of the tensors in
their arguments (each counted once per launch), and a lower bound of the time: bytes over copy
bandwidth, plus a gap between launches, with the constants below. It leaves out arithmetic, latency
within a kernel, and cache hits. Beside it is the time to issue the instructions of the kernels as
compiled for compute capability 9.0, by static counts, which are rather too high: see
bench/instructions.py. The column "units a block" has bytes in multiples of the inner channels of
all pixels. Launches that occur once per stage count as a fraction per block. Blocks with a
projection are one line of the table; the CSV file has their kernels.

On a GPU, also measures: each stage runs as a CUDA graph under the profiler. The time of a kernel is
from the end of the previous kernel to its own end. Stem, head and optimizer are not listed.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import preact_kernels as pk
from bench import dry_run, measure, records
from bench.contenders import Network
from bench.dry_run import BACKWARD, FORWARD, Launch, StageLaunches
from bench.records import LaunchRow, read, write
from preact_kernels.ops.memory_mode import MEMORY_MODES

REPLAYS = 5
PAUSE_US = 10.0  # the longest between kernels; a longer pause, in a graph, is the profiler's
FILL = "fill_zeros"


# Constants of the lower bound, by `python -m bench.probes` on an H200 at 6a9b61d, where the probe
# had no shared memory, and let the next launch begin before it waited.
COPY_BYTES_PER_US = 4.1e6  # read and written
LAUNCH_US = 1.0  # per kernel of a CUDA graph
DEPENDENT_LAUNCH_US = 0.7  # with programmatic dependent launch


def is_kernel(name: str) -> bool:
    """Whether a launch is a kernel of this package, not an operator of PyTorch or a fill."""
    return not name.startswith("aten::") and name != FILL


def least_us(launch: Launch) -> float:
    """Returns a lower bound of the time from the end of the previous launch to its own end."""
    gap_us = DEPENDENT_LAUNCH_US if launch.is_dependent else LAUNCH_US
    return launch.bytes_moved / COPY_BYTES_PER_US + gap_us


def rows_of(stage: StageLaunches, measured_us: Sequence[float | None]) -> Iterator[LaunchRow]:
    """Yields a row for each part, direction and kernel, in the order of the launches."""
    groups: dict[tuple, list[tuple[Launch, float | None]]] = {}
    for launch, us in zip(stage.launches, measured_us, strict=True):
        key = launch.part, launch.direction, launch.kernel
        groups.setdefault(key, []).append((launch, us))
    for (index, direction, kernel), group in sorted(groups.items(), key=lambda g: g[0][0]):
        part = stage.parts[index]
        launches, times = zip(*group, strict=True)
        bytes_moved = sum(launch.bytes_moved for launch in launches)
        yield LaunchRow(
            stage=part.name,
            direction=direction,
            kernel=kernel,
            blocks=part.blocks,
            launches_per_block=len(launches) / part.blocks,
            grid=_each(launch.grid for launch in launches),
            threads=_each(launch.threads for launch in launches),
            shared_bytes=_each(launch.shared_bytes for launch in launches),
            bytes_per_block=bytes_moved / part.blocks,
            units_per_block=bytes_moved / part.blocks / part.unit_bytes,
            dependent=sum(launch.is_dependent for launch in launches) / len(launches),
            least_us_per_block=sum(map(least_us, launches)) / part.blocks,
            issue_us_per_block=_per_block([launch.issue_us for launch in launches], part.blocks),
            measured_us_per_block=_per_block(times, part.blocks),
        )


def _per_block(times: Sequence[float | None], blocks: int) -> float | None:
    """Returns the sum of times per block; None: one is not known."""
    known = [us for us in times if us is not None]
    return sum(known) / blocks if len(known) == len(times) else None


def _each(values: Iterable) -> str:
    """Joins the different values in order; empty: there are none."""
    return " or ".join(str(v) for v in dict.fromkeys(values) if v)


def table(stages: Sequence[StageLaunches], rows: Sequence[LaunchRow]) -> str:
    """Formats a line for each kernel of the blocks without a projection, and sums."""
    lines = []
    for part in [part for stage in stages for part in stage.parts]:
        own = [row for row in rows if row.stage == part.name]
        for direction in (FORWARD, BACKWARD) if "projection" not in part.name else ():
            some = [row for row in own if row.direction == direction]
            lines += [_line(row.kernel, [row]) for row in some]
            lines.append(_line("sum", some))
        floor_units = part.floor_bytes / part.unit_bytes
        lines.append(_line(f"a block of {part.blocks}; floor {floor_units:.1f} units", own))
    return records.table(lines)


def _line(kernel: str, rows: Sequence[LaunchRow]) -> dict[str, str]:
    """Returns a line with the sums of columns; unmeasured times are left out."""

    def total(name: str, form: str, scale: float = 1) -> str:
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        return format(sum(values) / scale, form) if values else ""

    first, is_one = rows[0], len(rows) == 1
    return {
        "stage": first.stage,
        "direction": first.direction if len({row.direction for row in rows}) == 1 else "",
        "kernel": kernel,
        "launches a block": total("launches_per_block", ".2f"),
        "grid": first.grid if is_one else "",
        "threads": first.threads if is_one else "",
        "MB a block": total("bytes_per_block", ".2f", 1e6),
        "units a block": total("units_per_block", ".2f"),
        "at least us a block": total("least_us_per_block", ".1f"),
        "issue us a block": total("issue_us_per_block", ".1f"),
        "measured us a block": total("measured_us_per_block", ".1f"),
    }


def summary(stages: Sequence[StageLaunches], rows: Sequence[LaunchRow]) -> str:
    """Formats the launches, bytes and time of all stages."""
    floor_bytes = sum(part.floor_bytes * part.blocks for stage in stages for part in stage.parts)
    launches = [launch for stage in stages for launch in stage.launches]
    dependent = sum(launch.is_dependent for launch in launches)
    moved = sum(row.bytes_per_block * row.blocks for row in rows)
    least_ms = sum(row.least_us_per_block * row.blocks for row in rows) / 1e3
    issue_ms = sum((row.issue_us_per_block or 0) * row.blocks for row in rows) / 1e3
    floor_ms = floor_bytes / COPY_BYTES_PER_US / 1e3
    return (
        f"{len(launches)} launches in sequence, {dependent} of them dependent: "
        "these begin before the one ahead has ended\n"
        f"{moved / 1e9:.2f} GB, floor {floor_bytes / 1e9:.2f} GB\n"
        f"lower bound {least_ms:.1f} ms, floor {floor_ms:.1f} ms, "
        f"at {COPY_BYTES_PER_US / 1e6} TB/s, {LAUNCH_US} us a launch and "
        f"{DEPENDENT_LAUNCH_US} us a dependent one\n"
        f"instructions {issue_ms:.1f} ms by a static count, in the kernels that have one"
    )


class Kernel(NamedTuple):
    """A kernel in the profiler's trace."""

    name: str
    us: float  # from the end of the previous kernel to its own end


def captured(stage: nn.Module, x: Tensor) -> Callable[[], None]:
    """Captures a stage's forward and backward in a CUDA graph; returns its replay."""
    for module in stage.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.reset_parameters()
    with torch.no_grad():
        x.normal_()
    parameters = list(stage.parameters())
    dy = torch.randn_like(stage(x))

    def step() -> None:
        torch.autograd.grad(stage(x), [x, *parameters], dy)

    return measure.captured(step)[0].replay


def kernels_of(step: Callable[[], None]) -> list[Kernel]:
    """Profiles a step; returns its kernels in order.

    Raises:
        RuntimeError: the profiler saw no kernels, or other kernels in half of the runs.
    """
    replays = []
    for _ in range(REPLAYS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        replays.append([(e.name, e.time_range.start, e.time_range.end) for e in events])
    return kernels_in(replays)


def kernels_in(replays: Sequence[Sequence[tuple[str, float, float]]]) -> list[Kernel]:
    """Returns the kernels of one replay with their median times, in the order of their ends.

    A dependent kernel may begin before the one ahead, which the profiler also sometimes misses.
    A pause before a kernel counts up to `PAUSE_US`.

    Args:
        replays: name, begin and end in us of every kernel, for each replay.

    Raises:
        RuntimeError: there are no kernels, or no more than half of the replays have the same ones.
    """
    runs = [sorted(spans, key=lambda span: span[2]) for spans in replays]
    counts = collections.Counter(tuple(name for name, _, _ in run) for run in runs if run)
    if not counts:
        raise RuntimeError("the profiler saw no kernels")
    ((names, count),) = counts.most_common(1)
    if 2 * count <= len(runs):
        raise RuntimeError("the profiler saw other kernels in some replays than in others")
    times: list[list[float]] = []
    for run in runs:
        if tuple(name for name, _, _ in run) == names:
            ends = [run[0][1], *(end for _, _, end in run)]
            spans = zip(ends[:-1], run, strict=True)
            times.append([end - max(ahead, begin - PAUSE_US) for ahead, (_, begin, end) in spans])
    return [
        Kernel(n, statistics.median(us))
        for n, us in zip(names, zip(*times, strict=True), strict=True)
    ]


def times_of(
    launches: Sequence[Launch], kernels: Sequence[Kernel], known: Set[str]
) -> list[float | None]:
    """Returns the measured time of each launch; None: a fill or an operator of PyTorch.

    `known`: names of the kernels of this package.

    Raises:
        RuntimeError: the GPU ran other kernels of this package, or in another order.
    """
    expected = [launch.name for launch in launches if is_kernel(launch.name)]
    own = [(name, k.us) for k in kernels if (name := own_name(k.name, known))]
    for index, (name, met) in enumerate(itertools.zip_longest(expected, [n for n, _ in own])):
        if not (name and met and name.startswith(met)):  # `name` may end with a variant
            raise RuntimeError(f"kernel {index}: expected {name}, the GPU ran {met}")
    times = iter(us for _, us in own)
    return [next(times) if is_kernel(launch.name) else None for launch in launches]


def own_name(kernel: str, known: Set[str]) -> str | None:
    """Returns the launch name of a kernel in the profiler's trace; None: not of this package."""
    found = re.search(r"(\w+)_kernel\b", kernel)
    is_own = found and any(name.startswith(found[1]) for name in known)
    return found[1] if is_own else None


def measured(a: argparse.Namespace, stages: Sequence[StageLaunches]) -> Iterator[list]:
    """Yields the measured times of each stage's launches; prints the times of whole stages."""
    step = a.network, a.batch, a.dtype, a.memory
    known = {p.name for s in stages for p in s.launches if is_kernel(p.name)}
    on_gpu = dry_run.stages(*step, torch.device("cuda"))
    for launches, (stage, x) in zip(stages, on_gpu, strict=True):
        name = launches.parts[-1].name
        try:
            with pk.use_backend(a.backend):
                step = captured(stage, x)
            step_ms = min(measure.time_once_ms(step, torch.device("cuda")) for _ in range(REPLAYS))
            print(f"stage {name}: measured {step_ms:.2f} ms")
            kernels = kernels_of(step)
            times = times_of(launches.launches, kernels, known)
            own_us, all_us = sum(us or 0 for us in times), sum(k.us for k in kernels)
            print(
                f"  by the profiler {all_us / 1e3:.2f} ms, of which fills and kernels of PyTorch "
                f"{(all_us - own_us) / 1e3:.2f} ms"
            )
            yield times
        except RuntimeError as error:
            print(f"stage {name}: kernels not measured: {error}")
            yield [None] * len(launches.launches)


def multiprocessors() -> int:
    """Returns this GPU's number of multiprocessors; without a GPU, an H200's."""
    has_gpu = torch.cuda.is_available()
    return torch.cuda.get_device_properties(0).multi_processor_count if has_gpu else 132


def recorded(a: argparse.Namespace) -> list[StageLaunches]:
    """Records the launches; on a GPU machine in another process, as this one runs CUDA."""
    step = a.network, a.batch, a.dtype, a.backend, a.memory, multiprocessors(), a.instructions
    if not torch.cuda.is_available():
        return dry_run.dry_run(*step)
    spawn = multiprocessing.get_context("spawn")
    environment = mock.patch.dict(os.environ)
    with environment, concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        os.environ.pop("PREACT_KERNELS_BACKEND", None)  # it may load the library
        return pool.submit(dry_run.dry_run, *step).result()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = measure.parser("bench.launches", __doc__)
    add = parser.add_argument
    add("--network", default="resnet-1001", help="as in python -m bench")
    add("--batch", type=int, default=128, help="images (128)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16")
    add("--backend", choices=dry_run.BACKENDS, default="cuda")
    add("--memory", choices=MEMORY_MODES, default="store")
    add(
        "--instructions",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count them: takes a minute or two to compile Triton's kernels",
    )
    add("--csv", type=Path, help="file for a row per kernel; keeps rows of other steps")
    a = parser.parse_args(given)
    try:
        a.network = Network.named(a.network)
        _ = a.network.block
    except ValueError as error:
        parser.error(str(error))
    a.dtype = measure.DTYPES[a.dtype]
    return a


def main(given: Sequence[str] | None = None) -> None:
    """Prints the table, and writes the CSV file after every stage."""
    a = arguments(given)
    try:
        stages = recorded(a)
    except (RuntimeError, ImportError) as error:
        sys.exit(f"bench.launches: {error}")
    on_gpu, device = torch.cuda.is_available(), measure.default_device()
    machine = measure.Machine.of(device)
    step = {
        "network": a.network.name,
        "batch": a.batch,
        "dtype": measure.dtype_name(a.dtype),
        "backend": a.backend,
        "memory": a.memory,
        "residual_dtype": measure.dtype_name(a.dtype),
        "multiprocessors": multiprocessors(),
    }
    copy_gb_s = measure.measure_copy_gb_s(device) if on_gpu else None
    known = read(a.csv, LaunchRow) if a.csv else []
    known = [row for row in known if row.step != tuple(step.values())]
    rows: list[LaunchRow] = []
    times = measured(a, stages) if on_gpu else [[None] * len(s.launches) for s in stages]
    for stage, us in zip(stages, times, strict=True):
        for row in rows_of(stage, us):
            row = dataclasses.replace(row, **step, copy_gb_s=copy_gb_s)
            rows.append(machine.stamp(row))
        if a.csv:
            write(a.csv, [*known, *rows])
    print(table(stages, rows))
    print(f"{', '.join(map(str, step.values()))} multiprocessors\n{summary(stages, rows)}")
    if on_gpu and all(row.measured_us_per_block is None for row in rows):
        sys.exit("bench.launches: nothing was measured")


if __name__ == "__main__":
    main()
