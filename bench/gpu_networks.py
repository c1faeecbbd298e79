"""Networks of `python -m bench.memory` on a GPU, and the process that measures one of them.

A process measures all contenders of a network, since it takes long to start one on a GPU. In order,
each contender is built; if it is converted, its output and gradients are compared with the plain
model in a wider dtype; its bytes are measured and its row is written. Then they are timed in turn.
The contenders that torch.compile compiles come last; each is timed in turn with `ANCHORS`.

On a CPU, the same runs small inputs and captures nothing.
"""

import argparse
import dataclasses
import functools
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench import measure, models, records
from bench.models import CIFAR, IMAGENET, PLAIN, Case, Contender, Expected, Trained
from bench.records import ModelRow, number, put
from testbed import packages
from testbed import published_models as published


def _timm(name: str, blocks: str, batch: int) -> Case:
    build = functools.partial(published.timm_model, name)
    return Case(build, (2, 3, 64, 64), blocks, (batch, *IMAGENET[1:]))


CASES = {
    "diffusers AutoencoderKL, 128 to 512 channels": Case(
        functools.partial(
            packages.diffusers, "AutoencoderKL", **packages.STABLE_DIFFUSION_AUTOENCODER
        ),
        (1, 3, 32, 32),
        "ResnetBlock2D",
        (8, 3, 256, 256),
    ),
    "diffusers UNet2DModel, 128 to 512 channels": Case(
        functools.partial(packages.diffusers, "UNet2DModel", **packages.WIDE_UNET),
        (2, 3, 16, 16),
        "ResnetBlock2D",
        (16, 3, 64, 64),
        models.noise_levels,
    ),
    "timm resnetv2_50": _timm("resnetv2_50", "PreActBottleneck", 128),
    "timm resnet50": _timm("resnet50", "Bottleneck", 128),
    "timm densenet121": _timm("densenet121", "DenseLayer", 64),
    "MONAI SegResNet, 32 filters": Case(
        functools.partial(packages.monai, "SegResNet", **packages.PUBLISHED_SEG_RES_NET),
        (1, 1, 16, 16, 16),
        "ResBlock",
        (2, 1, 96, 96, 96),
    ),
    "YOLO-like detector": Case(published.Detector, (2, 3, 64, 64), "CrossStage", (16, 3, 640, 640)),
    "WRN-28-10": Case(published.WideResNet, (2, 3, 8, 8), "WideBlock", CIFAR),
    "ResNet-164": Case(lambda: published.DeepNet(164), (2, 3, 8, 8), "Residual", CIFAR),
}
"""Networks by name, the most important first; the small shapes are for a CPU."""

_BY_NAME = {c.name: c for c in models.CONTENDERS}
STORE, REBUILD = "pk.convert, channels_last", "pk.convert, rebuild, channels_last"


def _graphed(name: str) -> Contender:
    return _BY_NAME[name]._replace(name=f"{name}, graph", is_graphed=True)


COMPILED = (
    models.compiled_model("compile, model", 1.0),
    models.compiled_model("compile, model, budget 0.5", 0.5),
)
CONTENDERS = (
    _BY_NAME[PLAIN],
    _graphed(PLAIN),
    _BY_NAME["checkpoint"],
    _BY_NAME[STORE],
    _BY_NAME[REBUILD],
    _BY_NAME["pk.convert, checkpoint, channels_last"],
    _graphed(STORE),
    _graphed(REBUILD),
    *COMPILED,
)
"""Ways to train a network, in the order in which they are measured."""

_BY_NAME |= {c.name: c for c in CONTENDERS}
ANCHORS = PLAIN, STORE
UNFINISHED = "not finished"  # note of a row while its contender is measured
HANG_SECONDS = 60  # on a GPU, for the bytes of a contender that is not compiled
TIMING_SECONDS = 15  # for timing what was started


class Ends(NamedTuple):
    """When a process ends, and when it ends if it compiles: values of `time.time()`."""

    all_s: float
    compiled_s: float

    def passed(self, contender: Contender) -> bool:
        """Whether it is too late to start a contender."""
        end_s = self.compiled_s if contender in COMPILED else self.all_s
        return time.time() >= end_s - TIMING_SECONDS


def _settle(device: torch.device) -> None:
    """Waits for the GPU, and returns unused memory to it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _loss_of_step(one: Trained) -> None:
    """Runs a captured step; raises if its loss is another than that of a forward."""
    expected, got = one.loss(), float(one.step())
    if not math.isclose(expected, got, rel_tol=torch.finfo(torch.bfloat16).eps):
        raise ArithmeticError(f"loss of a captured step {got:.6g}, of a forward {expected:.6g}")


def _captured_bytes(one: Trained) -> int:
    """Captures the step of a contender; returns the memory that its graph holds.

    On a GPU, a graph keeps the memory of all its tensors, also between steps. On a CPU, nothing is
    captured.
    """
    _settle(one.device)
    before = torch.cuda.memory_reserved(one.device) if one.device.type == "cuda" else 0
    one.capture()
    for _ in range(2):  # the second one reads the weights that the first one has written
        _loss_of_step(one)
    one.optimizer.zero_grad(set_to_none=True)
    if one.device.type != "cuda":
        return one.peak_bytes()
    _settle(one.device)
    return torch.cuda.memory_reserved(one.device) - before


def _gradients(one: Trained) -> list[Tensor]:
    one.gradients()
    return [p.grad for p in one.model.parameters() if p.grad is not None]


def _distance(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The norm of the difference of all tensors together."""
    pairs = zip(found, truth, strict=True)
    return float(torch.stack([(f.double() - t.double()).norm() for f, t in pairs]).norm())


class Network:
    """A network and the contenders that are ready to be timed.

    Args:
        case: the network.
        a: options of the command.
        path: file of the rows.
    """

    def __init__(self, case: Case, a: argparse.Namespace, path: Path) -> None:
        self.case, self.a, self.path = case, a, path
        torch.manual_seed(0)
        self.plain = case.build().to(a.device)
        self.ready: dict[str, Trained] = {}

    @functools.cached_property
    def expected(self) -> Expected:
        """What converted models are compared with."""
        return Expected.of(Trained(_BY_NAME[PLAIN], self.case, self.plain, self.a))

    @functools.cached_property
    def expected_gradients(self) -> tuple[list[Tensor], float]:
        """The gradients of the plain model in a wider dtype, and the error of its own."""
        single = argparse.Namespace(**vars(self.a) | {"dtype": torch.float32})
        wide, plain = (Trained(_BY_NAME[PLAIN], self.case, self.plain, a) for a in (single, self.a))
        if self.a.dtype == torch.float32:
            wide.model.double()
            wide.x = wide.x.double()
        truth = _gradients(wide)
        return truth, _distance(_gradients(plain), truth)

    def check_gradients(self, one: Trained) -> None:
        """Raises if the gradients of all parameters together exceed the budget in the README."""
        truth, plain_error = self.expected_gradients
        norm = float(torch.stack([t.double().norm() for t in truth]).norm())
        error = _distance(_gradients(one), truth)
        if not error <= 2 * plain_error + torch.finfo(self.a.dtype).eps / 2 * norm:
            raise ArithmeticError(
                f"error of gradients {error:.3g}, of the plain model {plain_error:.3g}"
            )

    def _with_bytes(self, row: ModelRow) -> ModelRow:
        contender, fused = _BY_NAME[row.contender], ""
        one = Trained(contender, self.case, self.plain, self.a)
        if contender.is_fused:
            models.check_equal(one, self.expected)
            self.check_gradients(one)
            fused = one.fused_norms()
        for _ in range(2):  # the first ones allocate, record and compile
            one.step()
        saved_bytes = one.saved_bytes()
        one.optimizer.zero_grad(set_to_none=True)
        _settle(self.a.device)
        peak_bytes = _captured_bytes(one) if contender.is_graphed else one.peak_bytes()
        one.optimizer.zero_grad(set_to_none=True)
        _settle(self.a.device)
        self.ready[row.contender] = one
        return dataclasses.replace(
            row, saved_bytes=saved_bytes, peak_bytes=peak_bytes, fused=fused, note=""
        )

    def add(self, row: ModelRow) -> ModelRow:
        """Measures the bytes of a contender; writes and returns its row."""
        print(f"{row.case}, {row.contender}: ", end="", flush=True)
        start_s = time.monotonic()
        put(self.path, dataclasses.replace(row, note=UNFINISHED))
        try:
            row = self._with_bytes(row)
        except (ArithmeticError, RuntimeError, ValueError) as error:
            row = dataclasses.replace(row, note=measure.first_line(error))
        put(self.path, row)
        print(row.note or "bytes", f"({time.monotonic() - start_s:.0f} s)", flush=True)
        self._end_after_cuda_error()
        return row

    def _end_after_cuda_error(self) -> None:
        try:
            _settle(self.a.device)
        except RuntimeError as error:  # no call of CUDA works in this process any longer
            print(measure.first_line(error), flush=True)
            os._exit(1)

    def time(self, rows: Mapping[str, ModelRow], end_s: float) -> None:
        """Times what is ready in turn; writes the times of `rows` so far after each round."""

        def stepped(one: Trained) -> Callable[[], None]:
            def call() -> None:
                one.step()
                one.optimizer.zero_grad(set_to_none=True)  # room for other contenders

            return call

        def write(times: Mapping[str, measure.Timing]) -> None:
            found = [
                dataclasses.replace(rows[name], **timing._asdict())
                for name, timing in times.items()
                if name in rows
            ]
            if found:
                put(self.path, *found)

        def failed(name: str, error: Exception) -> None:
            if name in rows:
                put(self.path, dataclasses.replace(rows[name], note=measure.first_line(error)))
            self._end_after_cuda_error()

        times = measure.time_in_turn(
            {name: stepped(one) for name, one in self.ready.items()},
            rounds=self.a.steps,
            device=self.a.device,
            deadline_s=end_s,
            failed=failed,
            after_round=write,
        )
        for name in times.keys() - rows.keys():
            print(f"in the same rounds, {name} took {times[name].median_ms:,.1f} ms", flush=True)


def _end_process_at(end_s: float) -> threading.Timer:
    """Ends this process at a value of `time.time()`, whatever it does then, unless cancelled."""
    seconds = min(max(0.0, end_s - time.time()), threading.TIMEOUT_MAX)
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    return timer


def measure_rows(rows: Sequence[ModelRow], path: Path, ends: Ends, a: argparse.Namespace) -> str:
    """Measures contenders of a network; writes their rows as soon as they are measured.

    Returns:
        Why nothing was measured, or an empty string.
    """
    try:
        network = Network(CASES[rows[0].case], a, path)
    except ImportError as error:
        return f"{error.name} is not installed"
    except RuntimeError as error:  # of diffusers: versions of packages
        return measure.first_line(error)
    compiled = [row for row in rows if _BY_NAME[row.contender] in COMPILED]
    uncompiled = [row for row in rows if row not in compiled]
    for group in (uncompiled, *([row] for row in compiled)):
        end_s = ends.all_s if group is uncompiled else ends.compiled_s
        right = {}
        for row in group:
            if ends.passed(_BY_NAME[row.contender]):
                continue
            timer = None
            if row in compiled:
                _end_process_at(end_s)
            elif a.device.type == "cuda":
                timer = _end_process_at(time.time() + HANG_SECONDS)
            row = network.add(row)
            if timer is not None:
                timer.cancel()
            if not row.note:
                right[row.contender] = row
        if right:
            network.time(right, end_s)
        network.ready = {name: network.ready[name] for name in ANCHORS if name in network.ready}
    return ""


def compile_model(name: str, contenders: Sequence[str], ends: Ends, a: argparse.Namespace) -> str:
    """Runs two steps of each contender that is compiled, which fill the compiler's caches.

    Returns:
        The seconds that each took, or why there are none.
    """
    try:
        network = Network(CASES[name], a, Path())
    except ImportError as error:
        return f"{error.name} is not installed"
    found = []
    for contender in COMPILED:
        if contender.name in contenders and not ends.passed(contender):
            start_s = time.monotonic()
            one = Trained(contender, network.case, network.plain, a)
            for _ in range(2):
                one.step()
            found.append(f"{contender.name} {time.monotonic() - start_s:.0f} s")
    return ", ".join(found) or "no time left"


def table(rows: Sequence[ModelRow]) -> str:
    """Formats a line per contender, also relative to eager in channels_last."""
    by_name = {row.contender: row for row in rows}

    def share(row: ModelRow, column: str, plain: str = PLAIN) -> str:
        own, whole = getattr(row, column), getattr(by_name.get(plain), column, None)
        return number(own / whole if own is not None and whole else None, ".2f")

    lines = []
    for row in rows:
        batch = int(row.shape.split("x")[0])
        relative = {
            "images a second": number(row.median_ms and batch / row.median_ms * 1e3, ",.0f"),
            "time of eager": share(row, "median_ms"),
            # Of captured steps, it is another quantity: `_captured_bytes`.
            "peak of eager": share(
                row, "peak_bytes", f"{PLAIN}, graph" if row.contender.endswith("graph") else PLAIN
            ),
        }
        lines.append(models.line(row) | relative)
    return records.table(lines)
