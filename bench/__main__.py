"""Network benchmarks: `python -m bench`.

Measures the limits of the machine, then the tasks of bench/plan.py, the most important first,
until the time limit: contenders on the first network and on others. Each task is a process
(bench/network.py). A contender is timed only if its results are correct. Writes one CSV file per
device and plots, prints tables, and lists tasks that did not fit.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from bench import floors, measure, plan, plots, report
from bench.contenders import ANCHOR, BY_NAME, GROUPS, Network, available, is_rival
from bench.network import Session, Task
from bench.records import Row, put, read, remove, slug

LEAST_SECONDS = 30  # least time left to start a task: importing PyTorch takes up to 15 s
STOP_SECONDS = 10  # time from the interrupt of a process to the time limit


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line and sets the defaults that depend on the device."""
    parser = measure.parser("bench", __doc__, "--device", "--out")
    add = parser.add_argument
    add(
        "--networks",
        nargs="+",
        metavar="NAME",
        help="resnet-, preact-resnet- or imagenet-resnet-DEPTH, wrn-DEPTH-10; the most important "
        "first (resnet-1001 resnet-164 resnet-110, and wide networks)",
    )
    add(
        "--batch",
        type=int,
        nargs="+",
        help="images, the most important first (16; on a GPU 128 256 64)",
    )
    add("--steps", type=int, help="timed steps of each contender (5; GPU: 20)")
    add("--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(BY_NAME)}")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="fp32; on a GPU bf16")
    add("--quick", action="store_true", help="two shallow networks, no torch.compile")
    add("--no-plots", action="store_true", help="tables and CSV alone")
    add("--time-limit", type=float, default=540, metavar="SECONDS", help="for the whole run (540)")
    a = parser.parse_args(given)
    on_gpu = a.device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error(f"--device: expected a device of this machine, got {a.device}: no GPU here")
    a.is_default = not (a.quick or a.networks)
    # Measured in addition to the default, on the first networks.
    other_dtype = torch.float32 if on_gpu else torch.bfloat16
    a.other_dtype = other_dtype if a.is_default and a.dtype is None else None
    a.dtype = measure.DTYPES[a.dtype or ("bf16" if on_gpu else "fp32")]
    depths = (29, 20) if a.quick else (1001, 164, 110)
    a.networks = list(dict.fromkeys(a.networks or (f"resnet-{depth}" for depth in depths)))
    a.batch = a.batch or ([128, 256, 64] if on_gpu else [16])
    a.steps = a.steps or (3 if a.quick else 20 if on_gpu else 5)
    names = a.contenders or [
        name
        for name in dict.fromkeys(name for group in GROUPS.values() for name in group)
        if not (a.quick and name.startswith("compile"))
    ]
    try:
        a.usable, a.unusable = available(names, a.device)
        for name in a.networks:
            _ = Network.named(name).block
    except ValueError as error:
        parser.error(str(error))
    return a


def command_of(task: Task, ceilings: measure.Ceilings, seconds: float) -> list[str]:
    """Returns the command that measures a task; it will be interrupted after `seconds`."""
    dtype = getattr(torch, task.dtype)
    cost = floors.network_cost(Network.named(task.network), task.batch, dtype)
    floor_ms = ceilings.floor_ms(*cost, dtype)
    task = dataclasses.replace(task, floor_ms=floor_ms, end_s=time.time() + seconds)
    return [sys.executable, "-m", "bench.network", json.dumps(dataclasses.asdict(task))]


def measured(task: Task, ceilings: measure.Ceilings, deadline_s: float) -> list[str]:
    """Measures the missing results of a task in another process, until the deadline.

    If the process crashes after it has written rows, another one measures the contenders without a
    row. If it crashes before, each contender gets its own process.

    Returns:
        Results that are still missing, and the reasons.
    """
    before = task.missing()
    if not before:
        return []
    status, left_s = None, deadline_s - time.monotonic()
    if left_s >= LEAST_SECONDS:
        seconds = left_s - STOP_SECONDS
        status = measure.run_process(command_of(task, ceilings, seconds), seconds)
    missing = task.missing()
    if not missing:
        return []
    if not status:
        return [f"{task.title}: no time left: {', '.join(missing)}"]
    if task.kind == "peak":
        what = "not measured" if is_rival(*missing) else "failed"
        return [f"{task.title}: {what}: exit status {status}"]
    if missing != before:
        return measured(task, ceilings, deadline_s)
    if len(missing) > 1:
        missing.sort(key=lambda name: name != ANCHOR)  # it is timed together with the others
        alone = [dataclasses.replace(task, contenders=(name,)) for name in missing]
        return [line for one in alone for line in measured(one, ceilings, deadline_s)]
    row = Session(task).row(*missing)
    row.correct, row.note = "no", f"failed: the process ended with exit status {status}"
    put(task.path, row)
    return []


def rows_of(tasks: Sequence[Task], path: Path) -> list[Row]:
    """Returns the rows of the networks, batches and dtypes that the tasks measure."""
    planned = {(task.network, task.batch, task.dtype) for task in tasks}
    return [
        row
        for row in read(path, Row)
        if row.level == "network" and (row.case, row.batch, row.dtype) in planned
    ]


def run(tasks: Sequence[Task], ceilings: measure.Ceilings, deadline_s: float) -> list[str]:
    """Runs tasks until the deadline; returns missing results and the reasons."""
    left_out = []
    with tqdm(tasks, desc="bench", unit="task") as bar:
        for task in bar:
            bar.set_postfix_str(task.title)
            left_out += measured(task, ceilings, deadline_s)
    return left_out


def show(rows: Sequence[Row], folder: Path, *, with_plots: bool) -> None:
    """Prints the table and writes the plots of a device."""
    if not rows:
        print("nothing was measured")
        return
    print("", report.step_table(rows), sep="\n")
    for path in plots.write_plots(rows, folder) if with_plots else ():
        print(f"plot: {path}")


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; returns 1 if a fused contender is wrong or a task failed."""
    start_s = time.monotonic()
    a = arguments(given)
    machine = measure.Machine.of(a.device)
    print(f"{machine.device}; {machine.versions}; commit {machine.commit}")
    for name, reason in a.unusable.items():
        print(f"skipped: {name}: {reason}")
    path = a.out.resolve() / f"{slug(machine.device)}.csv"  # the processes run in another folder
    ceilings = measure.measure_ceilings(a.device)
    print(f"ceilings: {ceilings}", flush=True)
    common = {
        "device": str(a.device),
        "csv": str(path),
        "commit": machine.commit,
        "command": machine.command,
    }
    tasks = list(plan.tasks(a, common))
    # What is measured again; rows of other networks and of ops stay.
    remove(path, rows_of(tasks, path))
    try:
        left_out = run(tasks, ceilings, start_s + a.time_limit)
    except KeyboardInterrupt:
        left_out = ["the rest: stopped by hand"]
    rows = rows_of(tasks, path)
    show(rows, path.parent, with_plots=not a.no_plots)
    for line in left_out:
        print(f"left out: {line}")
    if left_out:
        print("--networks and --contenders choose; --time-limit SECONDS gives more time")
    wrong = [row for row in rows if row.correct == "no" and not is_rival(row.contender)]
    for row in wrong:
        print(f"WRONG: {row.contender} on {row.case}: {row.note}")
    print(f"{time.monotonic() - start_s:.0f} s; results in {path}")
    return 1 if wrong or any(": failed: " in line for line in left_out) else 0


if __name__ == "__main__":
    sys.exit(main())
