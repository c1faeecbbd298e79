"""Network benchmarks: training steps in turn, bytes kept for the backward, peak memory."""

import contextlib
import dataclasses
import gc
import itertools
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import preact_kernels as pk
from bench import correctness, floors, measure
from bench.contenders import ANCHOR, BY_NAME, Contender, Network
from bench.correctness import Verdict
from bench.records import Records, Row
from preact_kernels.study import data

DRIFTED = "the machine drifted"  # in the note of times that do not compare with earlier groups
UNFINISHED = "stopped before its last round"  # in the note of incomplete times
ENDED_PROCESS = "failed: the process ended in its first step"
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4


class TrainingStep:
    """Forward, cross entropy, backward and a step of SGD with momentum.

    Args:
        model: in training mode.
        batches: images and labels on the device of the model, used in turn.
        graphed: capture the step in a CUDA graph.
    """

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
        """One step on the next batch; returns its loss."""
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


@dataclasses.dataclass
class Session:
    """State that all measurements of one run share."""

    device: torch.device
    dtype: torch.dtype
    images: data.Images
    machine: measure.Machine
    ceilings: measure.Ceilings | None
    rows: Records
    curves: Records
    resume: bool
    deadline_s: float = float("inf")  # of time.monotonic()
    # By contender, judged network and dtype.
    verdicts: dict[tuple, Verdict] = dataclasses.field(default_factory=dict)

    def network(self, name: str) -> Network:
        """The network called `name`, with the classes of this run's images."""
        return Network.named(name, self.images.classes)

    def row(self, contender: Contender, network: Network, batch: int) -> Row:
        """The row of a contender: of an earlier run if this one resumes, or a new one."""
        size = network.image_size
        new = self.machine.stamp(
            Row(
                level="network",
                contender=contender.name,
                case=network.name,
                shape=f"{batch}x3x{size}x{size}",
                batch=batch,
                dtype=measure.dtype_name(self.dtype),
                memory_mode=contender.memory_mode,
                instruction_set=measure.instruction_set(self.device),
            )
        )
        return self.rows.get(new.key, self.machine.commit) or new

    def judge(self, contenders: list[Contender], network: Network) -> dict[str, Verdict]:
        """Verdicts by contender. Each contender is checked once per checked network."""
        judged = correctness.judged_network(network, self.dtype, self.device)
        keys = {c.name: (c.name, judged, self.dtype) for c in contenders}
        unknown = [c for c in contenders if keys[c.name] not in self.verdicts]
        if unknown:
            batch = min(16, len(self.images.labels))
            found = correctness.judge(unknown, network, self.images, batch, self.device, self.dtype)
            self.verdicts.update({keys[name]: verdict for name, verdict in found.items()})
            for contender in unknown:
                verdict = found[contender.name]
                shown = ", ".join(f"{k} {v:.1e}" for k, v in verdict.deviations.items())
                word = "right" if verdict.correct == "yes" else verdict.note
                tqdm.write(f"  {contender.name} on {judged.name}: {word} ({shown or 'no results'})")
        return {name: self.verdicts[key] for name, key in keys.items()}

    @contextlib.contextmanager
    def attempt(self, row: Row) -> Iterator[None]:
        """Marks `row` as failed while the context runs, in case the process ends.

        Not a row of `torch.compile`: a process that is killed at its time limit may be compiling.
        """
        before = self.rows.get(row.key)
        try:
            if _wanted(row) and not row.contender.startswith("compile-"):
                self.rows.put(_failed(row, ENDED_PROCESS))
            yield
        finally:
            if before is None:
                self.rows.remove(lambda other: other.key == row.key)
                self.rows.write()
            else:
                self.rows.put(before)

    def refuse(self, contender: Contender, network: Network, batch: int, note: str) -> None:
        """Records that a contender has no time because its results are wrong or missing."""
        self.rows.put(_failed(self.row(contender, network, batch), note))

    def fail(self, contender: Contender, network: Network, batch: int, reason: str) -> bool:
        """Records that a contender failed, unless its row has a complete time.

        Returns:
            Whether it was recorded.
        """
        is_wanted = _wanted(self.row(contender, network, batch))
        if is_wanted:
            self.refuse(contender, network, batch, f"failed: {reason}")
        return is_wanted


def measure_group(
    session: Session, contenders: list[Contender], network: Network, batch: int, rounds: int
) -> list[str]:
    """Times contenders in turn, and counts the bytes that each keeps for the backward.

    A contender with wrong results gets a row that says so, and no time. A run that resumes skips
    such contenders, keeps complete rows, and times the anchor again beside the rest. Rows are
    written after every round.

    Args:
        session: its `rows` get the results.
        contenders: of one group.
        network: what to train.
        batch: images per step.
        rounds: timed steps per contender.

    Returns:
        What there was no time for.

    Raises:
        DeviceLost: a contender broke the GPU context.
    """
    contenders = [c for c in contenders if session.row(c, network, batch).correct != "no"]
    if not any(_wanted(session.row(c, network, batch)) for c in contenders):
        return []
    try:
        return _measure_group(session, contenders, network, batch, rounds)
    except measure.DeviceLost as lost:
        for contender in contenders:
            if contender.name == lost.contender:
                lost.is_recorded = session.fail(contender, network, batch, lost.reason)
        raise


def _measure_group(
    session: Session, contenders: list[Contender], network: Network, batch: int, rounds: int
) -> list[str]:
    device, dtype = session.device, session.dtype
    now_s = time.monotonic()
    last_start_s = now_s + 0.7 * (session.deadline_s - now_s)  # leaves 30% for timing
    left_out = []
    if device.type == "cpu":  # one call: each computes the truth again, which is slow on a CPU
        session.judge(contenders, network)
    state = network.state()
    batches = data.Batches(session.images, batch, seed=2, size=network.image_size)
    drawn = [batches[i] for i in range(4)]
    steps: dict[str, TrainingStep] = {}
    rows: dict[str, Row] = {}
    wanted: dict[str, tuple[str, str]] = {}  # correct, note
    for contender in tqdm(contenders, desc=f"{network.name}: first steps", leave=False):
        row = session.row(contender, network, batch)
        if steps and time.monotonic() > last_start_s:
            left_out.append(f"{contender.name} on {network.name}, batch {batch}: no time left")
            continue
        with session.attempt(row):
            verdict = session.judge([contender], network)[contender.name]
        if not verdict.may_show_speed:
            session.refuse(contender, network, batch, verdict.note)
            continue
        try:
            start_s = time.perf_counter()
            with session.attempt(row), measure.running(contender.name, device):
                model = contender.build(network, state, device, dtype)
                inputs = [(contender.input(x, device, dtype), y.to(device)) for x, y in drawn]
                step = TrainingStep(model, inputs, graphed=contender.graphed)
                step()
                measure.synchronize(device)
                first_s = time.perf_counter() - start_s
                if device.type == "cuda" and not contender.graphed:
                    row.peak_bytes, row.peak_raw_bytes = _gpu_peak(step, device)
        except measure.DeviceLost:
            raise
        except Exception as error:  # a failed contender does not end the run
            reason = correctness.first_line(error)
            session.fail(contender, network, batch, reason)
            left_out.append(f"{contender.name} on {network.name}, batch {batch}: {reason}")
            error.__traceback__ = model = step = inputs = None  # room for the next one
            _free(device)
            continue
        if _wanted(row):
            first_step = f"built and first step in {first_s:.1f} s"
            note = "; ".join(filter(None, [verdict.note, first_step]))
            wanted[contender.name] = verdict.correct, note
            if row.median_ms is None:
                row.correct, row.note = verdict.correct, note
            session.rows.put(row)
        steps[contender.name], rows[contender.name] = step, row
    if not steps:
        return left_out
    floor_ms = None
    if session.ceilings is not None:
        cost = floors.network_cost(network, batch, dtype)
        floor_ms = session.ceilings.floor_ms(*cost, dtype)

    def put(times: dict[str, measure.Timing], note: str) -> None:
        for name, (correct, first_note) in wanted.items():
            rows[name].set_timing(times[name], floor_ms)
            rows[name].correct = correct
            rows[name].note = "; ".join(filter(None, [first_note, note]))
        session.rows.put(*(rows[name] for name in wanted))

    def drop(name: str, error: Exception) -> None:
        reason = correctness.first_line(error)
        del steps[name]
        wanted.pop(name, None)
        session.fail(BY_NAME[name], network, batch, reason)
        left_out.append(f"{name} on {network.name}, batch {batch}: {reason}")
        _free(device)

    title = f"{network.name}, batch {batch}"
    put(*_times(session, steps, rows, rounds, title, lambda times: put(times, UNFINISHED), drop))
    for contender in contenders:
        if contender.name in steps and rows[contender.name].saved_bytes is None:
            images = contender.input(drawn[0][0], device, dtype)
            with measure.running(contender.name, device):
                rows[contender.name].saved_bytes = kept_bytes(
                    contender, steps[contender.name].model, images
                )
                measure.synchronize(device)
            session.rows.put(rows[contender.name])
    steps.clear()
    gc.collect()
    return left_out


def _times(
    session: Session,
    steps: dict[str, TrainingStep],
    rows: dict[str, Row],
    rounds: int,
    title: str,
    after_round: Callable[[dict[str, measure.Timing]], None],
    out_of_memory: Callable[[str, Exception], None],
) -> tuple[dict[str, measure.Timing], str]:
    """Times in turn, and a note if the machine drifted since an earlier group.

    It drifted if the time of the anchor changed by over 10%. Such a group is timed a second time.
    """
    is_anchored = ANCHOR in rows and not _wanted(rows[ANCHOR])
    before_ms = rows[ANCHOR].median_ms if is_anchored else None
    for _ in range(2):
        now_s = time.monotonic()  # a slow machine gets fewer rounds, not fewer groups
        times = measure.time_in_turn(
            steps,
            rounds=rounds,
            device=session.device,
            deadline_s=now_s + 0.4 * (session.deadline_s - now_s),
            title=title,
            after_round=after_round,
            out_of_memory=out_of_memory,
        )
        if (
            before_ms is None
            or ANCHOR not in times
            or abs(times[ANCHOR].median_ms / before_ms - 1) <= 0.1
        ):
            return times, ""
        now_ms = times[ANCHOR].median_ms
        if time.monotonic() + sum(t.median_ms * rounds / 1e3 for t in times.values()) > (
            session.deadline_s
        ):
            break
    drift = f"{DRIFTED}: {ANCHOR} took {now_ms:.1f} ms beside this, {before_ms:.1f} ms before"
    tqdm.write(f"  {title}: {drift}")
    return times, drift


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def relative_times(rows: Sequence[Row]) -> dict[str, float]:
    """Step times as multiples of the anchor's time in the same group, by contender.

    Where the machine drifted, the note of a row holds the time that the anchor took beside it.

    Args:
        rows: of one network, batch, dtype and device. Without the anchor the result is empty.
    """
    anchor_ms = next((r.median_ms for r in rows if r.contender == ANCHOR), None)
    ratios = {}
    for row in rows:
        if anchor_ms is None or row.median_ms is None or UNFINISHED in row.note:
            continue
        drift = re.search(rf"{DRIFTED}: {ANCHOR} took ([\d.]+) ms beside this", row.note)
        ratios[row.contender] = row.median_ms / (float(drift[1]) if drift else anchor_ms)
    return ratios


def _failed(row: Row, note: str) -> Row:
    """`row` without times."""
    times = dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "images_per_s", "x_of_floor"))
    return dataclasses.replace(row, correct="no", note=note, **times)


def _wanted(row: Row) -> bool:
    is_timed = row.median_ms is not None and UNFINISHED not in row.note
    return not is_timed and row.correct != "no"


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
    """Bytes that one forward keeps for the backward, without parameters.

    `pk.saved_bytes` counts what autograd saves. Selective checkpointing holds tensors that autograd
    does not see; for it, this counts the memory that the result of the forward keeps allocated,
    which differs by the input and the logits.

    Args:
        contender: of `model`.
        model: in training mode; has run before.
        images: `[N, 3, H, W]`.
    """
    if contender.hooks_see_all:
        return pk.saved_bytes(model, images)
    return measure.allocated_bytes(lambda: model(images), images.device)


def count_kept_bytes(session: Session, contenders: list[Contender], network: Network) -> None:
    """Counts the bytes that a forward of one image keeps; runs no training step.

    Args:
        session: its `rows` get rows without times.
        contenders: what to count.
        network: what to run.
    """
    batch = 1
    images, _ = data.Batches(session.images, batch, seed=2, size=network.image_size)[0]
    for contender in tqdm(contenders, desc=f"{network.name}: kept bytes", leave=False):
        row = session.row(contender, network, batch)
        if row.saved_bytes is not None:
            continue
        model = contender.build(network, network.state(), session.device, session.dtype)
        x = contender.input(images, session.device, session.dtype)
        row.saved_bytes = kept_bytes(contender, model, x)
        session.rows.put(row)


def measure_peaks(
    session: Session, contenders: list[Contender], network: Network, batch: int
) -> list[str]:
    """Measures the peak resident memory of a training step on a CPU, in one process per contender.

    Args:
        session: its `rows` get the results. Contenders without a time there are skipped.
        contenders: what to measure.
        network: what to train.
        batch: images per step.

    Returns:
        What was left out.
    """
    left_out = []
    for contender in tqdm(contenders, desc=f"{network.name}: peak memory", leave=False):
        row = session.row(contender, network, batch)
        if row.median_ms is None or row.peak_bytes is not None:
            continue
        needs_s = 15 + 4 * row.median_ms / 1e3
        if time.monotonic() + needs_s > session.deadline_s:
            left_out.append(f"peak memory of {contender.name} on {network.name}: no time left")
            continue
        options = {
            "--network": network.name,
            "--batch": batch,
            "--dtype": measure.dtype_name(session.dtype),
            "--classes": network.classes,
        }
        arguments = [str(word) for option in options.items() for word in option]
        try:
            left_s = session.deadline_s - time.monotonic() + 20
            command = ["bench.peak", contender.name, *arguments]
            found = measure.run_child(command, min(120, left_s))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            why = correctness.first_line(error)
            left_out.append(f"peak memory of {contender.name} on {network.name}: {why}")
            continue
        row.peak_bytes, row.peak_raw_bytes = found["peak_bytes"], found["peak_raw_bytes"]
        session.rows.put(row)
    return left_out
