"""Network benchmarks: `python -m bench`.

Measures the limits of the machine, then the tasks of `Plan`, the most important first, until the
time limit: contenders on the first network (the deepest, of --depths) and others, the bytes that
they keep, training curves, single ops. A contender is timed only if its results are correct. Lists
at the end what did not fit. Writes one CSV file per device, prints tables, saves plots beside it.

Under torchrun, measures data-parallel training in place of all that: see bench/scaling.py.
"""

import argparse
import dataclasses
import gc
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from bench import floors, measure, network, plots, report, scaling, training
from bench.contenders import (
    ANCHOR,
    BY_NAME,
    COUNTED_BY_DEPTH,
    DEEPEST,
    DEPTHS_COUNTED,
    GROUPS,
    MAIN_GROUPS,
    WIDE_GROUP,
    WIDE_NETWORKS,
    Contender,
    Network,
    available,
)
from bench.correctness import compares_stages, first_line, judged_network
from bench.network import Session
from bench.records import CurvePoint, Records, Row, slug
from preact_kernels.study import data

FAILED = "failed"
LOST = 3  # exit status: a kernel broke the GPU context


@dataclasses.dataclass(frozen=True)
class Task:
    """A part of the run."""

    title: str
    needs_s: Callable[[], float]  # estimated
    run: Callable[[], list[str] | None]  # returns what it left out


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line and sets the defaults that depend on the device."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        metavar="NAME",
        help="resnet-, preact-resnet- or imagenet-resnet-DEPTH, wrn-DEPTH-10; the most important "
        "first",
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", help="of resnet, ahead of --networks (1001 164 110)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        help="images, the most important first (16; on a GPU 128 256 64)",
    )
    parser.add_argument("--steps", type=int, help="timed steps of each contender (5; GPU: 20)")
    parser.add_argument(
        "--curve-steps",
        type=int,
        help="of the training curves (20; half as many from 300 layers on)",
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(BY_NAME)}"
    )
    parser.add_argument("--device", help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="fp32; on a GPU bf16")
    parser.add_argument(
        "--data", help=f"directory of CIFAR files (or {data.ENVIRONMENT_VARIABLE}); else digits"
    )
    parser.add_argument("--out", type=Path, default=measure.ROOT / "bench" / "out")
    parser.add_argument(
        "--quick", action="store_true", help="two shallow networks, no torch.compile, no ops"
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip what the CSV has for this commit"
    )
    parser.add_argument("--no-plots", action="store_true", help="tables and CSV alone")
    parser.add_argument(
        "--time-limit", type=float, default=540, metavar="SECONDS", help="of the whole run (540)"
    )
    a = parser.parse_args(given)
    on_gpu = torch.cuda.is_available() if a.device is None else a.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        parser.error(f"--device: expected a device of this machine, got {a.device}: no GPU here")
    a.device = torch.device(a.device or ("cuda" if on_gpu else "cpu"))
    a.is_default = not (a.quick or a.depths or a.networks)
    # Measured beside the default, on the first networks.
    a.other_dtype = torch.float32 if on_gpu else torch.bfloat16
    a.has_other_dtype = a.is_default and a.dtype is None
    a.dtype = measure.DTYPES[a.dtype or ("bf16" if on_gpu else "fp32")]
    if not (a.depths or a.networks):
        a.depths = (29, 20) if a.quick else (1001, 164, 110)
    depths = sorted(set(a.depths or ()), reverse=True)
    a.networks = list(dict.fromkeys([*(f"resnet-{d}" for d in depths), *(a.networks or ())]))
    a.batch = a.batch or ([128, 256, 64] if on_gpu else [16])
    a.steps = a.steps or (3 if a.quick else 20 if on_gpu else 5)
    a.curve_steps = a.curve_steps or (5 if a.quick else 20)
    a.names = a.contenders or [
        name
        for name in dict.fromkeys(name for group in GROUPS.values() for name in group)
        if not (a.quick and name.startswith("compile"))
    ]
    try:
        a.usable, a.unusable = available(a.names, a.device)
        for name in a.networks:
            _ = Network.named(name).block
    except ValueError as error:
        parser.error(str(error))
    return a


class Plan:
    """The tasks of a run, in order, and estimates of their times."""

    def __init__(self, a: argparse.Namespace, session: Session) -> None:
        self.a, self.session = a, session
        self.main_groups = MAIN_GROUPS[session.device.type]
        self.networks = [session.network(name) for name in a.networks]
        self.has_all = not a.quick and a.contenders is None

    @property
    def in_other_dtype(self) -> "Plan":
        """The same in the dtype that is measured beside the default."""
        return Plan(self.a, dataclasses.replace(self.session, dtype=self.a.other_dtype))

    def step_s(self, name: str, net: Network, batch: int) -> float:
        """Estimated time of one training step, scaled from the nearest measurement if any."""
        launches_s = (0.3 if self.session.device.type == "cuda" else 0.1) * net.depth / 1001
        cost = floors.network_cost(net, batch, self.session.dtype)
        floor_s = self.session.ceilings.floor_ms(*cost, self.session.dtype) / 1e3
        work = net.depth * batch
        best = (float("inf"), max(launches_s, 4 * floor_s))
        for row in self.session.rows:
            if row.level != "network" or row.median_ms is None:
                continue
            measured = Network.named(row.case)
            if measured.family != net.family:
                continue
            distance = abs(measured.depth - net.depth) + 1e4 * (row.contender != name)
            seconds = row.median_ms / 1e3 * work / (measured.depth * row.batch)
            best = min(best, (distance, seconds))
        return best[1]

    def _group_s(self, contenders: list[Contender], net: Network, batch: int) -> float:
        judged = judged_network(net, self.session.dtype, self.session.device)
        known = self.session.verdicts
        new = [c for c in contenders if (c.name, judged, self.session.dtype) not in known]
        passes = 4 if compares_stages(self.session.dtype, self.session.device) else 2
        judging_s = sum(passes * self.step_s(c.name, judged, 16) for c in new)
        on_gpu = self.session.device.type == "cuda"  # its batches differ from the checked one
        compiling_s = sum(
            (60 if c.name == "compile-blocks" else 20) * ((c in new) + on_gpu)
            for c in contenders
            if c.name.startswith("compile-")
        )
        if new:
            judging_s += 3 * passes * self.step_s("eager-nchw", judged, 16)
        return (
            judging_s
            + compiling_s
            + sum(1 + 5 * self.step_s(c.name, net, batch) for c in contenders)
        )

    def _curve_s(self, net: Network, batch: int, steps: int, with_float64: bool) -> float:
        passes = 2.2 + (5 if with_float64 else 0)
        return passes * steps * self.step_s("eager-channels-last", net, batch)

    def _contenders(self, group: str) -> list[Contender]:
        """The contenders of a group that can run here, the most important first."""
        usable = {c.name: c for c in self.a.usable}
        return [usable[name] for name in GROUPS[group] if name in usable]

    def _group(self, group: str, net: Network, batch: int) -> Iterator[Task]:
        contenders = self._contenders(group)
        if not contenders or (
            group not in self.main_groups and {c.name for c in contenders} == {ANCHOR}
        ):
            return
        session = self.session
        rounds = self.a.steps * (3 if net.family == "resnet" and net.depth < 300 else 1)
        if group not in self.main_groups and self.session.device.type == "cpu":
            rounds = max(3, rounds // 2)
        if group == "deepest":
            rounds = 3
        # On a GPU, a group that runs out of time leaves out its last contenders.
        needed = contenders[:2] if session.device.type == "cuda" else contenders
        in_dtype = "" if session.dtype == self.a.dtype else f", {measure.dtype_name(session.dtype)}"
        yield Task(
            f"{net.name}, batch {batch}{in_dtype}: {group}",
            lambda: self._group_s(needed, net, batch),
            lambda: network.measure_group(session, contenders, net, batch, rounds),
        )

    def _peaks(self, group: str, net: Network, batch: int) -> Iterator[Task]:
        contenders = self._contenders(group)
        if self.session.device.type == "cuda" or not contenders:
            return
        if group not in self.main_groups and {c.name for c in contenders} == {ANCHOR}:
            return
        session = self.session
        yield Task(
            f"{net.name}, batch {batch}: peak memory of {group}",
            lambda: 15 + 4 * self.step_s("eager-nchw", net, batch),
            lambda: network.measure_peaks(session, contenders, net, batch),
        )

    def _curves(self, net: Network, batch: int) -> Iterator[Task]:
        if not {"eager-channels-last", ANCHOR} <= {c.name for c in self.a.usable}:
            return
        session, with_float64 = self.session, net.depth < 300
        steps = self.a.curve_steps if with_float64 else max(3, self.a.curve_steps // 2)
        yield Task(
            f"{net.name}, batch {batch}: {steps} steps of training",
            lambda: self._curve_s(net, batch, steps, with_float64),
            lambda: training.measure_curves(session, net, batch, steps, with_float64=with_float64),
        )

    def tasks(self) -> Iterator[Task]:
        """Every task, the most important first."""
        return self._gpu_tasks() if self.session.device.type == "cuda" else self._cpu_tasks()

    def _cpu_tasks(self) -> Iterator[Task]:
        foremost, *others = self.networks
        first = self.a.batch[0]
        for batch in self.a.batch:
            yield from self._group("main", foremost, batch)
        yield from self._all_curves()
        if self.a.has_other_dtype:
            for net in others[:1]:
                yield from self.in_other_dtype._group("against eager", net, first)
        yield from self._wide_networks()
        yield from self._peaks("main", foremost, first)
        yield from self._group("memory rivals", foremost, first)
        yield from self._peaks("memory rivals", foremost, first)
        for net in others:
            for batch in self.a.batch:
                yield from self._group("main", net, batch)
        yield from self._group("compile budgets", foremost, first)
        yield from self._peaks("compile budgets", foremost, first)
        yield from self._ops()
        yield from self._rivals_of(others)
        yield from self._counts()
        if self.a.has_other_dtype:
            yield from self.in_other_dtype._wide_networks()

    def _gpu_tasks(self) -> Iterator[Task]:
        """Contenders that need no compiler come first: compiling takes minutes."""
        foremost, *others = self.networks
        first, *batches = self.a.batch
        groups = MAIN_GROUPS["cuda"]
        for group in groups:
            yield from self._group(group, foremost, first)
        for batch in batches[:1]:
            yield from self._group("uncompiled", foremost, batch)
        yield from self._wide_networks()
        yield from self._ops()
        yield from self._group("memory rivals", foremost, first)
        for batch in batches[:1]:
            yield from self._group("compiled", foremost, batch)
        yield from self._group("compile budgets", foremost, first)
        yield from self._deepest()
        for batch in batches[:1]:
            yield from self._group("compiled and captured", foremost, batch)
        for batch in batches[1:]:
            for group in groups:
                yield from self._group(group, foremost, batch)
        if self.a.has_other_dtype:
            for batch in self.a.batch:
                for group in groups:
                    yield from self.in_other_dtype._group(group, foremost, batch)
        yield from self._all_curves()
        for net in others:
            for group in groups:
                for batch in self.a.batch:
                    yield from self._group(group, net, batch)
        yield from self._rivals_of(others)
        yield from self._counts()

    def _wide_networks(self) -> Iterator[Task]:
        device = self.session.device.type
        for name, batch in WIDE_NETWORKS[device] if self.a.is_default else ():
            yield from self._group(WIDE_GROUP[device], self.session.network(name), batch)

    def _deepest(self) -> Iterator[Task]:
        name, batch = DEEPEST
        if self.a.is_default:
            yield from self._group("deepest", self.session.network(name), batch)

    def _rivals_of(self, networks: Sequence[Network]) -> Iterator[Task]:
        for net in networks:
            for group in ("memory rivals", "compile budgets") if net.depth >= 164 else ():
                yield from self._group(group, net, self.a.batch[0])

    def _all_curves(self) -> Iterator[Task]:
        if self.a.contenders is not None:
            return
        foremost, batch = self.networks[0], self.a.batch[0]
        shallow = [n for n in self.networks if n.depth < 300 and n.block == "bottleneck"]
        for net in dict.fromkeys([*shallow[:1], foremost]):
            yield from self._curves(net, batch)

    def _ops(self) -> Iterator[Task]:
        if self.has_all:
            yield Task("ops", lambda: 45, self._run_ops)

    def _counts(self) -> Iterator[Task]:
        """Kept bytes of single images, against depth."""
        session = self.session
        contenders = [c for c in self.a.usable if c.name in COUNTED_BY_DEPTH]
        for depth in DEPTHS_COUNTED if contenders and self.has_all else ():
            net = session.network(f"resnet-{depth}")
            yield Task(
                f"{net.name}, batch 1: kept bytes",
                lambda net=net: 1 + len(contenders) * net.depth / 300,
                lambda net=net: network.count_kept_bytes(session, contenders, net),
            )

    def _run_ops(self) -> list[str]:
        """Runs `pytest bench/ops.py` in another process."""
        missing = [m for m in ("pytest", "pytest_benchmark") if not importlib.util.find_spec(m)]
        if missing:
            return [f"ops: {' and '.join(missing)} not installed"]
        from bench.ops import CASES, contenders

        device = str(self.session.device.type)
        total = 2 * sum(len(contenders(case, self.session.device)) for case in CASES)
        commit = self.session.machine.commit
        known = [r for r in self.session.rows if r.level == "op" and r.commit == commit]
        if self.session.resume and len(known) == total:  # forward, and with backward
            return []
        dtype = next(k for k, v in measure.DTYPES.items() if v == self.session.dtype)
        command = [
            *(sys.executable, "-m", "pytest", "bench/ops.py", "-q", "-p", "no:cacheprovider"),
            *("-o", "addopts=", "--benchmark-disable-gc"),
            f"--bench-device={device}",
            f"--bench-dtype={dtype}",
            f"--bench-out={self.a.out}",
            f"--bench-command={self.session.machine.command}",
        ]
        left_s = self.session.deadline_s - time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=measure.ROOT, capture_output=True, text=True, timeout=left_s
            )
        except subprocess.TimeoutExpired:
            return ["the rest of the ops: no time left"]
        finally:
            self.session.rows.read_again()  # the process wrote to the same file
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAIL", "ERR"))]
            reason = failed or [done.stdout[-500:] + done.stderr[-500:]]
            return [f"ops: {FAILED}: {line}" for line in reason]
        return []


def run(plan: Plan, session: Session, lost_tasks: Path) -> tuple[list[str], bool]:
    """Runs the tasks that fit in the time limit.

    Args:
        plan: the tasks.
        session: their state.
        lost_tasks: file with the titles of tasks that broke the GPU context in an earlier run,
            where no row says so. A resumed run skips them.

    Returns:
        What was left out and why, and whether a kernel broke the GPU context.
    """
    left_out = []
    tasks = list(plan.tasks())
    if not session.resume:
        lost_tasks.unlink(missing_ok=True)
    lost_before = lost_tasks.read_text().splitlines() if lost_tasks.exists() else []
    with tqdm(tasks, desc="bench", unit="task") as bar:
        for task in bar:
            bar.set_postfix_str(task.title)
            if task.title in lost_before:
                left_out.append(f"{task.title}: {FAILED}: it cost an earlier run its GPU")
                continue
            left_s, needs_s = session.deadline_s - time.monotonic(), task.needs_s()
            if needs_s > left_s:
                left_out.append(
                    f"{task.title}: needs about {needs_s:.0f} s, {max(0, left_s):.0f} s were left"
                )
                continue
            start_s = time.monotonic()
            try:
                with measure.running(task.title, session.device):
                    left_out += task.run() or []
            except measure.DeviceLost as lost:
                left_out.append(f"{task.title}, and all that follows: {FAILED}: {lost}")
                if not lost.is_recorded:
                    with lost_tasks.open("a") as file:
                        file.write(f"{task.title}\n")
                return left_out, True
            except Exception as error:  # run the other tasks; the exit status will be 1
                left_out.append(f"{task.title}: {FAILED}: {first_line(error)}")
            tqdm.write(f"{task.title}: {time.monotonic() - start_s:.0f} s")
            gc.collect()
            if session.device.type == "cuda":
                torch.compiler.reset()  # code for other shapes slows every look-up
                torch.cuda.empty_cache()
    return left_out, False


def show(device: str, folder: Path, *, with_plots: bool) -> None:
    """Prints tables, best rivals and plots of one device."""
    try:
        rows, points = report.load(folder)[device]
    except (FileNotFoundError, KeyError):
        print("nothing was measured")
        return
    for title, table in (
        ("Training steps", report.network_table(rows, "simple")),
        ("Memory", report.memory_table(rows, "simple")),
        ("Training curves", report.training_table(points, "simple")),
        ("Ops", report.ops_table(rows, "simple")),
    ):
        if table:
            print(f"\n{title}\n{table}")
    written = plots.write_plots(rows, points, folder) if with_plots else {}
    print()
    for line in report.best_rivals(rows):
        print(line)
    for paths in written.values():
        for path in paths:
            print(f"plot: {path}")


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmarks.

    Returns:
        1 if a fused contender is wrong or a part failed; `LOST` if a kernel broke the GPU context,
        and a new process with --resume can measure the rest.
    """
    start_s = time.monotonic()
    a = arguments(given)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return scaling.main(a)
    try:
        images = data.load(a.data)
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        raise SystemExit(f"bench: {error}") from error
    machine = measure.Machine.of(a.device)
    print(f"{machine.device}; {machine.versions}; commit {machine.commit}; data: {images.name}")
    for name, reason in a.unusable.items():
        print(f"skipped: {name}: {reason}")
    stem = slug(machine.device)
    a.out.mkdir(parents=True, exist_ok=True)
    ceilings = measure.measure_ceilings(a.device)
    print(f"ceilings: {ceilings}", flush=True)
    session = Session(
        device=a.device,
        dtype=a.dtype,
        images=images,
        machine=machine,
        ceilings=ceilings,
        rows=Records(a.out / f"{stem}.csv", Row, keep=a.resume),
        curves=Records(a.out / f"{stem}-training.csv", CurvePoint, keep=a.resume),
        resume=a.resume,
        deadline_s=start_s + a.time_limit,
    )
    session.rows.write()
    if not a.resume:
        session.curves.path.unlink(missing_ok=True)
    is_lost = False
    try:
        left_out, is_lost = run(Plan(a, session), session, a.out / f"{stem}-lost.txt")
    except KeyboardInterrupt:
        left_out = ["the rest: stopped by hand; --resume goes on from here"]
    show(machine.device, a.out, with_plots=not a.no_plots)
    for line in left_out:
        print(f"left out: {line}")
    if left_out:
        print("--resume measures what was left out; --time-limit SECONDS gives it more time")
    wrong = [
        r
        for r in session.rows
        if r.correct == "no"
        and r.commit == machine.commit
        and (r.level == "op" or BY_NAME[r.contender].fused)
    ]
    for row in wrong:
        print(f"WRONG: {row.contender} on {row.case}: {row.note}")
    print(f"{time.monotonic() - start_s:.0f} s; results in {session.rows.path}")
    if is_lost:
        return LOST
    return 1 if wrong or any(f": {FAILED}: " in line for line in left_out) else 0


if __name__ == "__main__":
    status = main()
    if status == LOST:  # a normal exit would call CUDA again
        sys.stdout.flush()
        os._exit(LOST)
    sys.exit(status)
