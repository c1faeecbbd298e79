"""Memory and time of published models in training: `python -m bench.memory`.

Every model is trained in channels_last: as it is, with each block under `torch.utils.checkpoint`,
compiled as a whole by `torch.compile`, also within activation memory budgets of 0.5 and 0.2, and
converted by `pk.convert` in each memory mode. A process per contender measures the bytes that a
forward keeps for the backward and the peak memory of a training step; it compares the output of a
converted model with float64. Then one process per model times the contenders in turn. Writes a CSV
file after each of these processes; `make report` makes the table of docs/memory.md and the figure
of README.md from it. Models of packages that are not installed are left out.
"""

import argparse
import dataclasses
import functools
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import preact_kernels as pk
from bench import measure, models
from bench.contenders import inductor
from bench.models import IMAGENET, Case, Contender, Trained
from bench.records import MEMORY, ModelRow, put, read, slug
from testbed import published_models as published


def _timm(name: str, blocks: str = "") -> Case:
    build = functools.partial(published.timm_model, name)
    return Case(build, (4, 3, 160, 160), blocks, IMAGENET)


FIGURE = {
    "timm resnet50": _timm("resnet50", "Bottleneck"),
    "timm densenet121": _timm("densenet121", "DenseLayer"),
    "timm efficientnet_b0": _timm("efficientnet_b0", "DepthwiseSeparableConv InvertedResidual"),
    "timm resnetv2_50": _timm("resnetv2_50", "PreActBottleneck"),
    "diffusers AutoencoderKL": models.CASES["diffusers AutoencoderKL"],
}
"""Models in the figure of README.md."""

CASES = FIGURE | {
    "timm wide_resnet50_2": _timm("wide_resnet50_2", "Bottleneck"),
    "timm regnety_008": _timm("regnety_008", "Bottleneck"),
    "timm hrnet_w18": _timm("hrnet_w18", "BasicBlock Bottleneck"),
    "timm vgg16_bn": _timm("vgg16_bn"),
    "timm inception_v3": _timm("inception_v3"),
    "MONAI SegResNet": models.CASES["MONAI SegResNet"],
}
"""Models by name."""


def _compile(model: nn.Module, case: Case, budget: float) -> None:
    model.compile(backend=inductor(budget), dynamic=False)


def _compiled(name: str, budget: float) -> Contender:
    return Contender(name, functools.partial(_compile, budget=budget))


PLAIN = "eager, channels_last"
RIVALS = {
    "checkpoint": "checkpoint by block",
    "compile, model": "compile",
    "compile, model, budget 0.5": "compile, budget 0.5",
    "compile, model, budget 0.2": "compile, budget 0.2",
}
OWN = {
    "pk.convert, channels_last": "store",
    "pk.convert, rebuild, channels_last": "rebuild",
    "pk.convert, checkpoint, channels_last": "checkpoint",
}
TITLES = RIVALS | OWN
"""Titles of the contenders that are compared with `PLAIN`."""

_COMPILED = (
    _compiled("compile, model", 1.0),
    _compiled("compile, model, budget 0.5", 0.5),
    _compiled("compile, model, budget 0.2", 0.2),
)
_BY_NAME = {c.name: c for c in (*models.CONTENDERS, *_COMPILED)}
CONTENDERS = tuple(_BY_NAME[name] for name in (PLAIN, *TITLES))


def _send_result(sender, call: Callable, *arguments: object) -> None:
    sender.send(call(*arguments))


def in_own_process(seconds: float, call: Callable, *arguments: object):
    """Returns `call(*arguments)`, computed in a new process.

    Raises:
        RuntimeError: the process ended without a result, or ran longer than `seconds`.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, call, *arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise RuntimeError(f"no result within {seconds:.0f} s")
        result = receiver.recv()
        process.join(30)  # it cleans up
        return result
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def _plain_model(row: ModelRow, a: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return CASES[row.case].build().to(a.device)


def with_memory(row: ModelRow, a: argparse.Namespace) -> ModelRow:
    """Returns the row of a contender with its bytes, or with the reason why there are none."""
    case, contender = CASES[row.case], _BY_NAME[row.contender]
    measure.map_large_allocations()
    try:
        plain = _plain_model(row, a)
        one = Trained(contender, case, plain, a)
        one.step()
        saved_bytes = one.saved_bytes()
        one.step()  # memory of the first steps includes the compiler's
        peak_bytes = []
        for _ in range(3):
            one.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            peak_bytes.append(one.peak_bytes())
        fused = ""
        if contender.is_fused:
            report = pk.conversion_report(one.converted)
            fused = f"{len(report.fused)} of {len(report)}"
            reference = Trained(_BY_NAME[PLAIN], case, plain, a)
            models.check_equal(Trained(contender, case, plain, a), reference)
    except (ArithmeticError, RuntimeError) as error:
        return dataclasses.replace(row, note=measure.first_line(error))
    peak = int(statistics.median(peak_bytes))
    return dataclasses.replace(row, saved_bytes=saved_bytes, peak_bytes=peak, fused=fused)


def with_times(rows: Sequence[ModelRow], a: argparse.Namespace) -> list[ModelRow]:
    """Returns the rows of a model's contenders with their times."""
    plain = _plain_model(rows[0], a)

    def step(one: Trained) -> None:
        one.step()
        one.optimizer.zero_grad(set_to_none=True)  # no room for gradients of all contenders

    steps = {}
    for row in rows:
        one = Trained(_BY_NAME[row.contender], CASES[row.case], plain, a)
        steps[row.contender] = functools.partial(step, one)
        for _ in range(2):
            steps[row.contender]()
    times = measure.time_in_turn(steps, rounds=a.steps, device=a.device, title=rows[0].case)
    found = []
    for row in rows:
        median_ms, p20_ms, p80_ms = times[row.contender]
        found.append(dataclasses.replace(row, median_ms=median_ms, p20_ms=p20_ms, p80_ms=p80_ms))
    return found


def measured(rows: Sequence[ModelRow], path: Path, a: argparse.Namespace) -> list[ModelRow]:
    """Measures the contenders of a model; writes and returns their rows."""
    done: list[ModelRow] = []
    for row in rows:
        print(f"{row.case}, {row.contender}: ", end="", flush=True)
        start_s = time.monotonic()
        try:
            row = in_own_process(a.limit, with_memory, row, a)
        except RuntimeError as error:
            row = dataclasses.replace(row, note=measure.first_line(error))
        print(row.note or "bytes", f"({time.monotonic() - start_s:.0f} s)", flush=True)
        put(path, row)
        done.append(row)
    right = [row for row in done if not row.note]
    if right:
        try:
            timed = in_own_process(a.limit, with_times, right, a)
        except RuntimeError as error:
            note = f"no times: {measure.first_line(error)}"
            timed = [dataclasses.replace(row, note=note) for row in right]
        put(path, *timed)
        done = [next((t for t in timed if t.key == row.key), row) for row in done]
    return done


def _is_done(rows: Sequence[ModelRow], path: Path) -> bool:
    """Whether the file has a time, or the reason why there is none, of each row at its commit."""
    known = {r.key: r for r in read(path, ModelRow)}
    found = [known[row.key] for row in rows if row.key in known]
    return len(found) == len(rows) and all(
        old.commit == row.commit and (old.median_ms or old.note)
        for old, row in zip(found, rows, strict=True)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = measure.parser("bench.memory", __doc__, "--device", "--out")
    names = [c.name for c in CONTENDERS]
    models.add_options(parser, CASES, names)
    add = parser.add_argument
    add("--limit", type=float, default=3600, help="seconds for each process (3600)")
    add("--resume", action="store_true", help="leave out models that were measured at this commit")
    a = parser.parse_args(arguments)
    dtype, a.dtype = a.dtype, measure.DTYPES[a.dtype]
    machine = measure.Machine.of(a.device)
    path = a.out / f"{slug(machine.device)}{MEMORY}"
    failed = False
    for name in a.models or CASES:
        case = CASES[name]
        on_gpu = a.device.type == "cuda"
        shape = "x".join(map(str, (on_gpu and case.gpu_shape) or case.shape))
        rows = [
            machine.stamp(ModelRow(name, c.name, shape, dtype))
            for c in CONTENDERS
            if c.name in (a.contenders or names) and (case.blocks or not c.needs_blocks)
        ]
        if a.resume and _is_done(rows, path):
            continue
        try:
            case.build()
        except ImportError as error:
            print(f"{name}: not measured, {error.name} is not installed")
            continue
        # The second process of a contender takes the code that the first one compiled. The key of
        # PyTorch's caches has the memory budget; an empty cache has nothing of older versions.
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            rows = measured(rows, path, a)
        failed = failed or any(r.note for r in rows)
        print(models.table(rows), flush=True)
    if failed:
        sys.exit("bench.memory: some contenders were not measured")


if __name__ == "__main__":
    main()
