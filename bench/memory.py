"""Memory and time of published models in training: `python -m bench.memory`.

Every model is trained in channels_last: as it is, with each block under `torch.utils.checkpoint`,
compiled as a whole by `torch.compile`, also within activation memory budgets of 0.5 and 0.2, and
converted by `pk.convert` in each memory mode. A process per contender measures the bytes that a
forward keeps for the backward and the peak memory of a training step; it compares the output of a
converted model with float64. Then one process per model times the contenders in turn. Writes a CSV
file after each of these processes; `make report` makes the table of docs/memory.md and the figure
of README.md from it. Models of packages that are not installed are left out.

On a GPU, the networks, the contenders and the process that measures them are those of
bench/gpu_networks.py. `--gpu-networks` runs these on a CPU, with small inputs.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from bench import gpu_networks, measure, models
from bench.models import PLAIN, Case, Expected, Trained
from bench.records import MEMORY, ModelRow, put, read, remove, slug
from testbed import published_models as published


def _timm(name: str, blocks: str = "") -> Case:
    build = functools.partial(published.timm_model, name)
    return Case(build, (4, 3, 160, 160), blocks)


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
ON_GPU = {
    "eager, channels_last, graph": "eager, graph",
    "pk.convert, channels_last, graph": "store, graph",
    "pk.convert, rebuild, channels_last, graph": "rebuild, graph",
}
"""Titles of further contenders on a GPU."""

COMPILED = tuple(c.name for c in gpu_networks.COMPILED)
_COMPILED = (*gpu_networks.COMPILED, models.compiled_model("compile, model, budget 0.2", 0.2))
_BY_NAME = {c.name: c for c in (*models.CONTENDERS, *_COMPILED)}
CONTENDERS = tuple(_BY_NAME[name] for name in (PLAIN, *TITLES))
"""Contenders on a CPU."""


# Time that is kept for each later network on a GPU: compiling ends before. It is an estimate of a
# process without compiled contenders.
RESERVED_SECONDS = 35


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
            fused = one.fused_norms()
            expected = Expected.of(Trained(_BY_NAME[PLAIN], case, plain, a))
            models.check_equal(Trained(contender, case, plain, a), expected)
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
    try:
        CASES[rows[0].case].build()
    except ImportError as error:
        print(f"{rows[0].case}: not measured, {error.name} is not installed")
        return []
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


def _in_file(rows: Sequence[ModelRow], path: Path) -> list[ModelRow]:
    """Returns rows as the file has them; those that it does not have are as given."""
    known = {r.key: r for r in read(path, ModelRow)}
    return [known.get(row.key, row) for row in rows]


def _is_done(row: ModelRow) -> bool:
    """Whether a row has a time, or the reason why there is none."""
    return bool(row.median_ms or row.note.removeprefix(gpu_networks.UNFINISHED))


def measured_in_one_process(
    rows: Sequence[ModelRow], path: Path, ends: gpu_networks.Ends, a: argparse.Namespace
) -> list[ModelRow]:
    """Measures the contenders of one of the GPU's networks; returns their rows.

    If the process crashes, the contender that it measured gets a note, and a new process measures
    those that have neither a time nor a note.
    """
    remove(path, rows)
    todo = list(rows)
    while todo and time.time() < ends.all_s:
        seconds = min(a.limit, ends.all_s - time.time())
        try:
            reason = in_own_process(seconds, gpu_networks.measure_rows, todo, path, ends, a)
            if reason:
                print(f"{rows[0].case}: not measured, {reason}")
                return []
            break
        except RuntimeError as error:
            left = [row for row in _in_file(todo, path) if not _is_done(row)]
            is_compiled = all(row.contender in COMPILED for row in left)
            if time.time() >= (ends.compiled_s if is_compiled else ends.all_s):
                break
            blamed = [row for row in left if row.note]
            if len(left) == len(todo) and not blamed:
                # It crashed when it timed those that have bytes, or before it measured any.
                blamed = [row for row in left if row.peak_bytes] or left
            note = measure.first_line(error)
            print(note, flush=True)
            for row in blamed:
                put(path, dataclasses.replace(row, note=note))
            todo = [row for row in left if row not in blamed]
    remove(path, [row for row in _in_file(rows, path) if row.note == gpu_networks.UNFINISHED])
    return _in_file(rows, path)


def compile_only(names: Sequence[str], ends: gpu_networks.Ends, a: argparse.Namespace) -> None:
    """Fills the compiler's caches with code for networks, in two processes at a time."""

    def compile_one(name: str) -> None:
        seconds = max(0.0, min(a.limit, ends.all_s - time.time()))
        try:
            took = in_own_process(seconds, gpu_networks.compile_model, name, a.contenders, ends, a)
        except RuntimeError as error:
            took = measure.first_line(error)
        print(f"{name}: {took}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, names))


@contextlib.contextmanager
def _compiler_caches(folder: Path | None) -> Iterator[None]:
    """Sets the folder of PyTorch's caches of compiled code: a temporary one if None.

    Their key has the memory budget. An empty cache has nothing of older versions. Configurations of
    kernels that were chosen by times are deleted: the GPU may have been busy.
    """
    for path in folder.rglob("*.best_config") if folder else ():
        path.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder or temporary)
        yield


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = measure.parser("bench.memory", __doc__, "--device", "--out")
    names = dict.fromkeys(c.name for c in (*CONTENDERS, *gpu_networks.CONTENDERS))
    models.add_options(parser, CASES | gpu_networks.CASES, list(names))
    add = parser.add_argument
    add("--limit", type=float, default=3600, help="seconds for each process (3600)")
    words = "ends after this time; lists what was left out"
    add("--time-limit", type=float, default=math.inf, metavar="SECONDS", help=words)
    add("--resume", action="store_true", help="leave out models that were measured at this commit")
    words = "the networks of a GPU (always on a GPU); on a CPU with small inputs"
    add("--gpu-networks", action="store_true", help=words)
    words = "measure nothing: fill the compiler's caches for the GPU's networks"
    add("--compile-only", action="store_true", help=words)
    add("--cache", type=Path, help="folder of the compiler's caches (a new one for each model)")
    a = parser.parse_args(given)
    a.gpu_networks |= a.device.type == "cuda" or a.compile_only
    cases = list(gpu_networks.CASES if a.gpu_networks else CASES)
    contenders = [c.name for c in (gpu_networks.CONTENDERS if a.gpu_networks else CONTENDERS)]
    a.models, a.contenders = a.models or cases, a.contenders or contenders
    for option, known in ("models", cases), ("contenders", contenders):
        if unknown := set(getattr(a, option)) - set(known):
            parser.error(f"--{option}: expected some of {known}, got {sorted(unknown)}")
    return a


def _rows_of(name: str, a: argparse.Namespace, machine: measure.Machine) -> list[ModelRow]:
    """Returns a row without results for each contender of a model."""
    case = (gpu_networks.CASES if a.gpu_networks else CASES)[name]
    shape = (a.device.type == "cuda" and case.gpu_shape) or case.shape
    dtype = next(key for key, dtype in measure.DTYPES.items() if dtype == a.dtype)
    return [
        machine.stamp(ModelRow(name, c.name, "x".join(map(str, shape)), dtype))
        for c in (gpu_networks.CONTENDERS if a.gpu_networks else CONTENDERS)
        if c.name in a.contenders and (case.blocks or not c.needs_blocks)
    ]


def main(given: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    a = arguments(given)
    a.dtype = measure.DTYPES[a.dtype]
    machine = measure.Machine.of(a.device)
    path = a.out / f"{slug(machine.device)}{MEMORY}"
    end_s = time.time() + a.time_limit
    if a.compile_only:
        with _compiler_caches(a.cache):
            compile_only(a.models, gpu_networks.Ends(end_s, end_s), a)
        return
    failed, left_out = False, {}
    for index, name in enumerate(a.models):
        rows = _rows_of(name, a, machine)
        old = _in_file(rows, path)
        if a.resume and all(r.commit == machine.commit and _is_done(r) for r in old):
            continue
        if time.time() >= end_s:
            left_out[name] = rows
            continue
        with _compiler_caches(a.cache):
            if a.gpu_networks:
                later = len(a.models) - 1 - index
                ends = gpu_networks.Ends(end_s, end_s - later * RESERVED_SECONDS)
                rows = measured_in_one_process(rows, path, ends, a)
                left_out[name] = [row for row in rows if not _is_done(row)]
                print(gpu_networks.table(rows), flush=True)
            else:
                rows = measured(rows, path, a)
                print(models.table(rows), flush=True)
        failed = failed or any(r.note for r in rows)
    for name, rows in left_out.items():
        if rows:
            print(f"left out: {name}: {'; '.join(row.contender for row in rows)}")
    if failed:
        sys.exit("bench.memory: some contenders were not measured")


if __name__ == "__main__":
    main()
