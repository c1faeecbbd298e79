"""Measurements of networks, each in a separate process: `python -m bench.network TASK`.

`python -m bench` starts these processes. TASK is a `Task` in JSON. Results are rows of CSV files.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import preact_kernels as pk
from bench import correctness, measure
from bench.contenders import ANCHOR, BY_NAME, Contender, Network
from bench.records import Row, put, read
from preact_kernels.study import data

FIRST_STEP_SECONDS = 120  # limit for compilation, check and first step of a contender
FIRST_STEPS_SHARE = 0.6  # share of the time left for all first steps
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4


@dataclasses.dataclass(frozen=True)
class Task:
    """A measurement by one process: contenders on one network, batch and dtype."""

    kind: str  # "steps", or "peak": peak memory of one contender on a CPU
    network: str
    batch: int
    dtype: str  # "float32"
    contenders: tuple[str, ...]  # the most important first
    group: str  # description in the title
    steps: int = 0  # timed rounds
    device: str = "cpu"
    csv: str = ""  # path of the CSV file
    commit: str = ""
    command: str = ""
    floor_ms: float | None = None  # least time of a step
    end_s: float = float("inf")  # value of `time.time()` at which the process is interrupted

    @property
    def title(self) -> str:
        """The title, for example `"resnet-1001, batch 16, float32: main"`."""
        return f"{self.network}, batch {self.batch}, {self.dtype}: {self.group}"

    @property
    def path(self) -> Path:
        """The CSV file."""
        return Path(self.csv)

    def rows(self) -> dict[str, Row]:
        """Reads the rows of this network, batch and dtype, by contender."""
        own = self.network, self.batch, self.dtype
        found = read(self.path, Row)
        return {r.contender: r for r in found if (r.case, r.batch, r.dtype) == own}

    def missing(self) -> list[str]:
        """Returns the contenders that are not measured yet."""
        rows = self.rows()
        timed = {n for n, r in rows.items() if r.median_ms is not None}
        if self.kind == "peak":  # only of contenders with a time
            return [n for n in self.contenders if n in timed and rows[n].peak_bytes is None]
        failed = {n for n, r in rows.items() if r.correct == "no"}
        return [n for n in self.contenders if n not in timed | failed]


class TrainingStep:
    """Forward, cross entropy, backward and a step of SGD with momentum; cycles through batches."""

    def __init__(
        self, model: nn.Module, batches: list[tuple[Tensor, Tensor]], *, graphed: bool = False
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(
            model.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, foreach=True
        )
        self.batches: Iterator[tuple[Tensor, Tensor]] = itertools.cycle(batches)
        self.captured = None
        if graphed:
            self.captured = pk.graphed_step(model, _loss, self.optimizer, *batches[0])

    def __call__(self) -> Tensor:
        """Runs one step on the next batch; returns its loss."""
        images, labels = next(self.batches)
        if self.captured is not None:
            return self.captured(images, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss = _loss(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, labels)


class Session:
    """Network and machine of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.device, self.dtype = torch.device(task.device), getattr(torch, task.dtype)
        self.network = Network.named(task.network)
        self.machine = dataclasses.replace(
            measure.Machine.of(self.device, task.command), commit=task.commit
        )

    @functools.cached_property
    def state(self) -> dict[str, Tensor]:
        """The initial weights of all contenders."""
        return self.network.state()

    def row(self, name: str) -> Row:
        """Returns the row of a contender, or a new one, stamped with this machine."""
        size, batch = self.network.image_size, self.task.batch
        new = Row(
            level="network",
            contender=name,
            case=self.network.name,
            shape=f"{batch}x3x{size}x{size}",
            batch=batch,
            dtype=self.task.dtype,
            memory_mode=BY_NAME[name].memory_mode,
            instruction_set=measure.instruction_set(self.device),
        )
        return self.machine.stamp(self.task.rows().get(name) or new)

    def step(self, name: str, batches: int = 4) -> TrainingStep:
        """Creates a training step of a contender."""
        contender, dtype = BY_NAME[name], self.dtype
        model = contender.build(self.network, self.state, self.device, dtype)
        drawn = data.Batches(
            correctness.digits(), self.task.batch, seed=2, size=self.network.image_size
        )
        inputs = [drawn[i] for i in range(batches)]
        inputs = [(contender.input(x, self.device, dtype), y.to(self.device)) for x, y in inputs]
        return TrainingStep(model, inputs, graphed=contender.graphed)

    def fail(self, row: Row, error: BaseException) -> None:
        """Writes the reason why a contender has no time; raises if it broke the GPU."""
        error.__traceback__ = None  # its frames keep tensors alive
        row.correct, row.note = "no", f"failed: {measure.first_line(error)}"
        tqdm.write(f"  {row.contender}: {row.note}")
        put(self.task.path, row)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        measure.synchronize(self.device)


class TookTooLong(KeyboardInterrupt):
    """Raised by `alarm`; not an Exception, so that no compiler catches it."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises TookTooLong if the body takes longer, also during compilation."""

    def ring(*_) -> None:
        raise TookTooLong(f"no first step in {FIRST_STEP_SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def first_step(session: Session, row: Row) -> TrainingStep | None:
    """Checks a contender, runs its first step and counts its bytes; None: it is wrong."""
    contender, device = BY_NAME[row.contender], session.device
    verdict = judged(session, contender)
    row.correct, row.note = verdict.correct, verdict.note
    if verdict.correct == "no":
        put(session.task.path, row)
        return None
    step = session.step(row.contender)
    step()
    measure.synchronize(device)
    if device.type == "cuda" and step.captured is None:
        row.peak_bytes, row.peak_raw_bytes = _gpu_peak(step, device)
    images, _ = next(step.batches)
    row.saved_bytes = kept_bytes(contender, step.model, images)
    return step


def measure_steps(session: Session) -> None:
    """Counts the bytes that each contender keeps for the backward, and times them in turn.

    A contender with wrong results, or with a first step longer than FIRST_STEP_SECONDS, gets a row
    with the reason and no time. If the anchor has a time already, it is timed again in these
    rounds, and notes of the others contain that time.
    """
    task, device = session.task, session.device
    wanted = task.missing()
    known = task.rows().get(ANCHOR)
    has_reference = known is not None and known.median_ms is not None and ANCHOR not in wanted
    steps: dict[str, TrainingStep] = {}
    rows = {name: session.row(name) for name in wanted}
    if has_reference:
        steps[ANCHOR] = session.step(ANCHOR)
        steps[ANCHOR]()
        measure.synchronize(device)
    last_s = time.time() + FIRST_STEPS_SHARE * (task.end_s - time.time())
    for name in wanted:
        try:
            with alarm(min(last_s - time.time(), FIRST_STEP_SECONDS)):
                step = first_step(session, rows[name])
            if step is not None:
                steps[name] = step
        except (Exception, TookTooLong) as error:  # measure the other contenders
            if time.time() >= last_s:
                break
            session.fail(rows[name], error)
        step = None  # frees its memory

    def fail(name: str, error: Exception) -> None:
        del steps[name]
        if name not in wanted:
            raise error
        session.fail(rows[name], error)

    def write(times: dict[str, measure.Timing]) -> None:
        timed = [dataclasses.replace(rows[name]) for name in times if name in wanted]
        for row in timed:
            row.set_timing(times[row.contender], task.floor_ms)
            if has_reference and ANCHOR in times:
                beside = f"{ANCHOR} took {times[ANCHOR].median_ms:.1f} ms beside this"
                row.note = "; ".join(filter(None, [row.note, beside]))
        if timed:
            put(task.path, *timed)

    measure.time_in_turn(
        steps,
        rounds=task.steps,
        device=device,
        deadline_s=task.end_s - 5,
        title=task.title,
        failed=fail,
        after_round=write,  # a stopped process keeps the rounds that have ended
    )


def judged(session: Session, contender: Contender) -> correctness.Verdict:
    """Checks the results of a contender; prints their errors."""
    verdict = correctness.judge(contender, session.network, 16, session.device, session.dtype)
    shown = ", ".join(f"{k} {v:.1e}" for k, v in verdict.deviations.items())
    tqdm.write(f"  {contender.name}: {verdict.note or 'right'} ({shown})")
    return verdict


def _gpu_peak(step: TrainingStep, device: torch.device) -> tuple[int, int]:
    step.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return peak - before, peak


def kept_bytes(contender: Contender, model: nn.Module, images: Tensor) -> int:
    """Returns the bytes that one forward keeps for the backward, without parameters.

    `pk.saved_bytes` counts tensors that autograd saves. Selective checkpointing holds tensors that
    autograd does not see; for it, this counts the memory that the forward's result keeps allocated.
    The two differ by the input and the logits.
    """
    if contender.hooks_see_all:
        return pk.saved_bytes(model, images)
    return measure.allocated_bytes(lambda: model(images), images.device)


def measure_peak(session: Session) -> None:
    """Measures the peak resident memory of a training step, for the task's only contender.

    `peak_bytes` is the peak minus the memory between steps: activations, gradients and workspace,
    without libraries, weights, optimizer state and compiled code.
    """
    (name,) = session.task.contenders
    step, row = session.step(name, batches=1), session.row(name)
    step()
    step.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    between_steps = measure.resident_bytes()
    measure.reset_peak()
    step()
    row.peak_raw_bytes = measure.peak_resident_bytes()
    row.peak_bytes = row.peak_raw_bytes - between_steps
    put(session.task.path, row)


def main(given: str) -> None:
    """Measures a task."""
    task = Task(**json.loads(given))
    try:
        (measure_peak if task.kind == "peak" else measure_steps)(Session(task))
    except KeyboardInterrupt:
        sys.exit("out of time")


if __name__ == "__main__":
    main(sys.argv[1])
