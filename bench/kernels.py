"""Kernels, blocks and 1x1 units of a GPU, timed in three ways: `python -m bench.kernels`.

Times each kernel without a convolution on every backend of the GPU, a residual block of an image
autoencoder and a pre-activation bottleneck (plain, converted and compiled), and 1x1 units with the
fused convolution and with PyTorch's. Before a call is timed its results are compared with float64;
a wrong one gets no time.

- events: CUDA events around each call. The GPU waits until all calls are in its queue, so launches
  cost no time unless the queue is full.
- graph: a CUDA graph of many calls, divided by their number.
- profiler: the sum of the durations of a call's kernels, the longest of them, and the time from the
  begin of the first kernel to the end of the last, by the profiler.

Inputs are "fresh" where calls cycle through inputs that together are three times as large as the
L2 cache, and "resident" where each call reads the same inputs, which fit in half of it. Blocks
always read the same inputs. The floor is the least bytes over the measured copy bandwidth. Prints a
line per measurement, the most important first, and writes each to `*-kernels.csv` as it ends.

Without a GPU this is a dry run: tiny shapes, the backends of the CPU, and times by the clock.
"""

import argparse
import collections
import copy
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preact_kernels as pk
from bench import measure, records
from bench.network import TookTooLong, alarm
from bench.records import KERNELS, KernelRow, mib, number, put, slug
from preact_kernels.accuracy.oracle import distance, judge, unit_roundoff
from preact_kernels.kernels import reference
from preact_kernels.kernels.contract import (
    AffineStep,
    Conv,
    Gradient,
    Inputs,
    Norm,
    Unit,
    Wanted,
)
from preact_kernels.ops import dispatch

Results = dict[str, Tensor]

LEAST_CALLS = 20  # of a graph, and between events
ROUNDS = 10  # replays of a graph
SLEEP_CYCLES = 20_000_000  # of the GPU, while calls enter its queue
OUT_OF_TIME = "out of time"
COMPILE_SECONDS = 75.0  # limit for a compiled block
EPS = 1e-5

# [N, C, H, W]. A volume [N, C, D, H, W] runs as an image of D * H rows.
SHAPES = {
    "cuda": ((8, 128, 256, 256), (128, 2048, 7, 7), (1, 8, 96 * 96, 96), (1, 128, 512, 512)),
    "cpu": ((2, 16, 5, 4), (1, 8, 6, 6)),
}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
AUTOENCODER = {"cuda": (8, 128, 256, 256), "cpu": (2, 8, 6, 5)}
BOTTLENECK = {"cuda": (128, 256, 56, 56), "cpu": (2, 16, 6, 5)}
# Input and output channels, and images: 401,408 and 131,072 pixels on a GPU.
UNITS = {
    "cuda": [
        (c, k, shape) for shape in ((128, 56, 56), (128, 32, 32)) for c, k in ((64, 256), (256, 64))
    ],
    "cpu": [(16, 32, (2, 4, 4))],
}


class Problem:
    """Tensors of one shape: several sets of inputs, norms, sums.

    Args:
        shape: `[N, C, H, W]`.
        dtype: dtype of the inputs.
        device: their device.
        is_fresh: draw so many sets that they are three times as large as the L2 cache.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, is_fresh: bool
    ) -> None:
        torch.manual_seed(0)
        n, c, h, w = shape
        self.groups = math.gcd(32, c) if c > 8 else 4
        size = math.prod(shape) * dtype.itemsize
        count = max(4, math.ceil(3 * cache_bytes(device) / size)) if is_fresh else 2
        images = [image(shape, dtype, device) for _ in range(count)]
        # x of one call is the gradient of another, as many calls away as possible.
        gradients = [*images[count // 2 :], *images[: count // 2]]
        self.sets = list(zip(images, gradients, strict=True))[: None if is_fresh else 1]
        rows, vectors = (torch.randn(2, *of, c, device=device) / 8 for of in ((n,), ()))
        wide = torch.rand(2, c, device=device) + 0.5
        self.norms = {
            "relu": Norm(vectors[0], wide[0], wide[1], vectors[1], EPS, "relu"),
            "silu": Norm(
                rows[0], wide[0].expand(n, c).contiguous(), wide[1], vectors[1], EPS, "silu"
            ),
        }
        self.sums = {
            "relu": torch.randn(2, c, device=device) * math.sqrt(n * h * w),
            "silu": torch.randn(2, n, c, device=device) * math.sqrt(h * w),
        }
        self.inv_counts = {"relu": 1 / (n * h * w), "silu": 1 / (h * w)}
        self.samples = n * h * w


def image(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draws `[N, C, H, W]` in NHWC."""
    n, c, h, w = shape
    return torch.randn(n, h, w, c, dtype=dtype, device=device).permute(0, 3, 1, 2)


def cache_bytes(device: torch.device) -> int:
    """The size of the L2 cache of a GPU; a small number for a CPU."""
    if device.type != "cuda":
        return 2**10
    return torch.cuda.get_device_properties(device).L2_cache_size


def in_float64(value: Any) -> Any:
    """Converts the tensors of nested tuples to float64."""
    if isinstance(value, Tensor):
        return value.double()
    if isinstance(value, tuple):
        parts = [in_float64(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return torch.float64 if isinstance(value, torch.dtype) else value


class Op(NamedTuple):
    """A function of a backend: its arguments for a set of inputs, and its passes over the image."""

    function: str
    arguments: Callable[[Problem, Tensor, Tensor], tuple]
    passes: int  # images that it reads and writes


def _forward(activation: str) -> Op:
    return Op("norm_act_forward", lambda p, x, dy: (x, p.norms[activation]), 2)


def _backward(activation: str) -> Op:
    return Op("norm_act_backward", lambda p, x, dy: (dy, x, p.norms[activation], False), 2)


def _recompute(activation: str) -> Op:
    return Op("norm_act_recompute", lambda p, x, dy: (dy, x, p.norms[activation]), 3)


def _input_gradient(activation: str) -> Op:
    def arguments(p: Problem, x: Tensor, dy: Tensor) -> tuple:
        norm, sums = p.norms[activation], p.sums[activation]
        return Gradient(dy, AffineStep(None, x, norm, sums, p.inv_counts[activation])), True

    return Op("norm_input_gradient", arguments, 3)


OPS = {
    "bn_stats": Op("bn_stats", lambda p, x, dy: (x,), 1),
    "group_stats": Op("group_stats", lambda p, x, dy: (x, p.groups), 1),
    "sums of group norm, silu": _backward("silu"),
    "forward of group norm, silu": _forward("silu"),
    "input gradient of group norm, silu": _input_gradient("silu"),
    "recomputation of group norm, silu": _recompute("silu"),
    "sums of batch norm, relu": _backward("relu"),
    "forward of batch norm, relu": _forward("relu"),
    "input gradient of batch norm, relu": _input_gradient("relu"),
    "recomputation of batch norm, relu": _recompute("relu"),
}
"""The kernels without a convolution, the most important first."""


def results_of(found: Any) -> Results:
    """Names the tensors of a result."""
    parts = found if isinstance(found, tuple) else (found,)
    return {str(index): t for index, t in enumerate(parts) if isinstance(t, Tensor)}


def errors_of(truth: Results, *runs: Results) -> dict[str, float]:
    """The largest error of any run, by result."""
    return {name: max(distance(run[name], t) for run in runs) for name, t in truth.items()}


def check(
    found: Results, truth: Results, errors: dict[str, float], rounding: float | None = None
) -> None:
    """Compares results with float64: errors may be twice `errors`, PyTorch's, plus one rounding.

    Raises:
        ArithmeticError: a result is wrong.
    """
    faults = [j.fault for j in judge(found, truth, errors, rounding).values() if j.fault]
    if faults:
        raise ArithmeticError(f"wrong result {'; '.join(faults)}")


def check_op(op: Op, kernels: Any, problem: Problem) -> None:
    """Checks an op for the first set of inputs.

    Statistics of m samples may be off by the square root of m roundings of float32. Other sums are
    of gradients that are rounded to the dtype of the images.
    """
    given = op.arguments(problem, *problem.sets[0])
    plain = reference.kernels()
    found, eager, truth = (
        results_of(getattr(k, op.function)(*arguments))
        for k, arguments in ((kernels, given), (plain, given), (plain, in_float64(given)))
    )
    x = problem.sets[0][0]
    rounding = unit_roundoff(x.dtype)
    if op.function.endswith("stats"):
        rounding = math.sqrt(problem.samples) * unit_roundoff(torch.float32)
    check(found, truth, errors_of(truth, eager), rounding)


class Times(NamedTuple):
    """Times of a call in us; None: not measured."""

    events_us: float
    graph_us: float | None = None
    profiler_us: float | None = None  # sum of the durations of kernels
    span_us: float | None = None  # from the begin of the first kernel to the end of the last
    longest_us: float | None = None  # the longest kernel
    launches: float | None = None


def in_turn(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], None], int]:
    """Returns a function that makes at least LEAST_CALLS calls, and their number.

    It keeps as many results as there are calls, so that results of fresh inputs are fresh, too.
    """
    kept: collections.deque = collections.deque(maxlen=len(calls))
    rounds = math.ceil(LEAST_CALLS / len(calls))

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                kept.append(call())

    return run, rounds * len(calls)


def by_events_us(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Returns the median time of a call by events; on a CPU by the clock."""
    if device.type != "cuda":
        return 1e3 * statistics.median(measure.time_once_ms(call, device) for call in calls)
    events = [torch.cuda.Event(enable_timing=True)]
    kept: collections.deque = collections.deque(maxlen=len(calls))
    torch.cuda._sleep(SLEEP_CYCLES)
    events[0].record()
    for _ in range(math.ceil(LEAST_CALLS / len(calls))):
        for call in calls:
            kept.append(call())
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
    events[-1].synchronize()
    pairs = itertools.pairwise(events)
    return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def by_graph_us(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Returns the time of a call in a CUDA graph of many."""
    run, count = in_turn(calls)
    graph, _ = measure.captured(run)
    rounds = [measure.time_once_ms(graph.replay, device) for _ in range(ROUNDS)]
    return 1e3 * statistics.median(rounds) / count


def profiled(calls: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
    """Returns the begin and end of each kernel of one round of calls, in us."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.time_range.start, e.time_range.end) for e in events]


def by_profiler(kernels: Sequence[tuple[float, float]], calls: int) -> dict[str, float]:
    """Returns the last four fields of `Times` from the kernels of some calls.

    Raises:
        RuntimeError: the profiler saw no kernels.
    """
    if not kernels:
        raise RuntimeError("the profiler saw no kernels")
    durations = [end - begin for begin, end in kernels]
    span = max(end for _, end in kernels) - min(begin for begin, _ in kernels)
    return {
        "profiler_us": sum(durations) / calls,
        "span_us": span / calls,
        "longest_us": max(durations),
        "launches": len(kernels) / calls,
    }


def times_of(calls: Sequence[Callable[[], object]], device: torch.device) -> Times:
    """Times calls in every way."""
    kept = [call() for call in calls]  # compiles, and takes memory from the system
    del kept
    measure.synchronize(device)
    times = Times(by_events_us(calls, device))
    if device.type != "cuda":
        return times
    times = times._replace(graph_us=by_graph_us(calls, device))
    return times._replace(**by_profiler(profiled(calls), len(calls)))


class Item(NamedTuple):
    """A measurement: its row, and a function that checks the call and returns the calls to time."""

    row: KernelRow
    prepare: Callable[[], Sequence[Callable[[], object]]]
    seconds: float = 60.0  # limit


def backends_of(device: torch.device) -> list[str]:
    """The backends to measure."""
    names = ("cuda", "triton") if device.type == "cuda" else ("cpu", "reference")
    return [name for name in names if name in pk.available_backends()]


def backend(name: str, device: torch.device) -> Any:
    """The functions of a backend."""
    return dispatch.select(name, device.type, DTYPES[device.type])


@functools.lru_cache(maxsize=2)
def problem_of(shape: Sequence[int], device: torch.device, is_fresh: bool) -> Problem:
    """The problem of a shape."""
    return Problem(shape, DTYPES[device.type], device, is_fresh)


def op_items(name: str, device: torch.device) -> Iterator[Item]:
    """Yields the measurements of a kernel: shapes, inputs, backends."""
    op, dtype = OPS[name], DTYPES[device.type]

    def prepare(shape: Sequence[int], backend_name: str, is_fresh: bool) -> list[Callable]:
        kernels, problem = backend(backend_name, device), problem_of(shape, device, is_fresh)
        check_op(op, kernels, problem)
        function = getattr(kernels, op.function)
        return [functools.partial(function, *op.arguments(problem, *s)) for s in problem.sets]

    for shape in SHAPES[device.type]:
        image_bytes = math.prod(shape) * dtype.itemsize
        fits = op.passes * image_bytes <= cache_bytes(device) / 2
        for is_fresh in (True, False) if fits else (True,):
            for contender in backends_of(device):
                row = KernelRow(
                    case=name,
                    contender=contender,
                    shape="x".join(map(str, shape)),
                    dtype=measure.dtype_name(dtype),
                    inputs="fresh" if is_fresh else "resident",
                    bytes_moved=op.passes * image_bytes,
                )
                yield Item(row, functools.partial(prepare, shape, contender, is_fresh))


class AutoencoderBlock(nn.Module):
    """`x + conv2(silu(norm2(conv1(silu(norm1(x))))))` with group norms, as in image autoencoders.

    Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models" (arXiv
    2112.10752).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        groups = math.gcd(32, channels)
        self.norm1, self.norm2 = (nn.GroupNorm(groups, channels, 1e-6) for _ in range(2))
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class Bottleneck(nn.Module):
    """A pre-activation bottleneck with an identity shortcut.

    He et al., "Identity Mappings in Deep Residual Networks" (arXiv 1603.05027).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 4
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(c) for c in (channels, inner, inner))
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(self.norm1(x)))
        h = self.conv2(F.relu(self.norm2(h)))
        return x + self.conv3(F.relu(self.norm3(h)))


class Block(NamedTuple):
    """A block in plain PyTorch, its input and the gradient of its output."""

    plain: nn.Module
    x: Tensor
    dy: Tensor

    @classmethod
    def of(cls, kind: type[nn.Module], shape: Sequence[int], device: torch.device) -> "Block":
        """A block in channels_last. Batch norms are float32."""
        torch.manual_seed(0)
        dtype = DTYPES[device.type]
        plain = kind(shape[1]).to(device)
        for module in plain.modules():
            if isinstance(module, nn.Conv2d | nn.GroupNorm):
                module.to(dtype)
        plain.to(memory_format=torch.channels_last)
        return cls(plain, *(image(shape, dtype, device) for _ in range(2)))


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Runs forward and backward; returns the output and the gradients of x and parameters."""
    x = x.detach().requires_grad_()
    y = model(x)
    return y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)


@functools.lru_cache(maxsize=1)
def expected(kind: type[nn.Module], shape: Sequence[int], device: torch.device) -> tuple:
    """A block, its results in float64, and PyTorch's errors in both memory formats."""
    block = Block.of(kind, shape, device)
    wide = copy.deepcopy(block.plain).double()
    truth = results_of(gradients(wide, block.x.double(), block.dy.double()))
    in_nchw = copy.deepcopy(block.plain).to(memory_format=torch.contiguous_format)
    runs = [
        results_of(gradients(block.plain, block.x, block.dy)),
        results_of(gradients(in_nchw, block.x.contiguous(), block.dy.contiguous())),
    ]
    return block, truth, errors_of(truth, *runs)


CONVERTED = "pk.convert, "  # and a backend
COMPILED = "torch.compile"


def block_items(device: torch.device, is_compiled: bool) -> Iterator[Item]:
    """Yields the measurements of the blocks, in channels_last."""

    def prepare(kind: type[nn.Module], shape: Sequence[int], row: KernelRow) -> list[Callable]:
        block, truth, errors = expected(kind, shape, device)
        model, backend_name = copy.deepcopy(block.plain), "auto"
        if row.contender == COMPILED:
            torch._dynamo.reset()
            model.compile(dynamic=False)
        elif row.contender.startswith(CONVERTED):
            pk.convert(model)
            backend_name = row.contender.removeprefix(CONVERTED)

        def step() -> tuple[Tensor, ...]:
            with pk.use_backend(backend_name):
                return gradients(model, block.x, block.dy)

        check(results_of(step()), truth, errors)
        if row.contender != COMPILED:  # counting would compile again
            with pk.use_backend(backend_name):
                row.saved_bytes = pk.saved_bytes(model, block.x.detach().requires_grad_())
        return [step]

    converted = [CONVERTED + name for name in backends_of(device)]
    for kind, shape in (
        (AutoencoderBlock, AUTOENCODER[device.type]),
        (Bottleneck, BOTTLENECK[device.type]),
    ):
        for contender in [COMPILED] if is_compiled else ["eager", *converted]:
            row = KernelRow(
                case=f"{kind.__name__}, forward + backward",
                contender=contender,
                shape="x".join(map(str, shape)),
                dtype=measure.dtype_name(DTYPES[device.type]),
                inputs="the same",
            )
            seconds = COMPILE_SECONDS if is_compiled else 60.0
            yield Item(row, functools.partial(prepare, kind, tuple(shape), row), seconds)


PYTORCH, FUSED = "PyTorch's convolution", "fused"


def unit_items(device: torch.device) -> Iterator[Item]:
    """Yields the measurements of 1x1 units: forward and backward, fused and not."""
    dtype = DTYPES[device.type]

    def prepare(
        channels: tuple[int, int], images: Sequence[int], names: tuple[str, str], backward: bool
    ) -> list[Callable]:
        c, k = channels
        n, h, w = images
        problem = problem_of((n, c, h, w), device, True)
        weight = torch.randn(k, c, 1, 1, device=device).to(dtype) / math.sqrt(c)
        unit = Unit(
            weight.shape, Conv((1, 1), (0, 0), (1, 1), 1), device, dtype, dtype, dtype, dtype
        )
        dys = [image((n, k, h, w), dtype, device) for _ in problem.sets]
        kernels = backend(names[0], device)
        refusal = "measured" if names[1] == PYTORCH else ""

        def run(kernels: Any, unit: Unit, x: Tensor, dy: Tensor, norm: Norm, weight: Tensor):
            inputs = Inputs(x, norm, weight)
            if not backward:
                return kernels.norm_act_conv_forward(unit, inputs)
            return kernels.norm_act_conv_backward(unit, Gradient(dy), inputs, Wanted(True, True))

        def chosen(*arguments: Any) -> object:
            with mock.patch.object(kernels, "refusal", lambda *_: refusal):
                return run(kernels, *arguments)

        given = [
            (unit, x, dy, problem.norms["relu"], weight)
            for (x, _), dy in zip(problem.sets, dys, strict=True)
        ]
        plain = functools.partial(run, reference.kernels())
        truth = results_of(plain(*in_float64(given[0])))
        errors = errors_of(truth, results_of(plain(*given[0])))
        check(results_of(chosen(*given[0])), truth, errors, unit_roundoff(dtype))
        return [functools.partial(chosen, *arguments) for arguments in given]

    for c, k, images in UNITS[device.type]:
        pixels = math.prod(images)
        for backward in (False, True):
            moved = (k + 2 * c if backward else c + k) * pixels * dtype.itemsize
            for name in backends_of(device):
                for how in (FUSED, PYTORCH) if name != "reference" else (PYTORCH,):
                    row = KernelRow(
                        case=f"1x1 unit {c} -> {k}, {'backward' if backward else 'forward'}",
                        contender=f"{name}, {how}",
                        shape=f"{images[0]}x{c}x{images[1]}x{images[2]}",
                        dtype=measure.dtype_name(dtype),
                        inputs="fresh",
                        bytes_moved=moved,
                    )
                    yield Item(
                        row, functools.partial(prepare, (c, k), images, (name, how), backward)
                    )


def items(device: torch.device) -> Iterator[Item]:
    """Yields every measurement, the most important first."""
    first, *others = OPS
    yield from op_items(first, device)
    yield from block_items(device, is_compiled=False)
    for name in others:
        yield from op_items(name, device)
    yield from unit_items(device)
    yield from block_items(device, is_compiled=True)


def measured(item: Item, device: torch.device, copy_gb_s: float, seconds: float) -> None:
    """Fills in a row: times, or the reason why there are none."""
    row = item.row
    try:
        with alarm(seconds):
            calls = item.prepare()
            row.correct = "yes"
            times = times_of(calls, device)
    except TookTooLong:
        row.note = OUT_OF_TIME
        return
    except ArithmeticError as error:
        row.correct, row.note = "no", measure.first_line(error)
        return
    except Exception as error:
        row.note = measure.first_line(error)
        return
    for name, value in times._asdict().items():
        setattr(row, name, value)
    if row.bytes_moved:
        us = times.graph_us or times.events_us
        row.floor_us = row.bytes_moved / copy_gb_s / 1e3
        row.gb_per_s, row.x_of_floor = row.bytes_moved / us / 1e3, us / row.floor_us


def line(row: KernelRow) -> dict[str, str]:
    """Formats a row for the table."""
    return {
        "case": row.case,
        "shape": row.shape,
        "inputs": row.inputs,
        "contender": row.contender,
        "floor, us": number(row.floor_us),
        "graph, us": number(row.graph_us),
        "events, us": number(row.events_us),
        "profiler, us": number(row.profiler_us),
        "span, us": number(row.span_us),
        "longest, us": number(row.longest_us),
        "launches": number(row.launches, ".1f"),
        "x of floor": number(row.x_of_floor, ".2f"),
        "kept, MiB": mib(row.saved_bytes),
        "note": row.note,
    }


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = measure.parser("bench.kernels", __doc__, "--device", "--out")
    parser.add_argument("--seconds", type=float, default=230, help="time limit (230)")
    parser.add_argument("--cases", default="", help="measure only cases that contain this text")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    a = arguments(given)
    end_s = time.monotonic() + a.seconds
    machine = measure.Machine.of(a.device)
    path = a.out / f"{slug(machine.device)}{KERNELS}"
    copy_gb_s = measure.measure_copy_gb_s(a.device)
    print(f"copy {copy_gb_s:,.0f} GB/s", flush=True)
    rows: list[KernelRow] = []
    for item in items(a.device):
        if a.cases not in item.row.case:
            continue
        seconds = min(item.seconds, end_s - time.monotonic())
        if seconds < 1:
            print(f"bench.kernels: {OUT_OF_TIME} before {item.row.case}")
            break
        measured(item, a.device, copy_gb_s, seconds)
        row = machine.stamp(item.row)
        rows.append(row)
        put(path, row)
        print("; ".join(f"{k} {v}" for k, v in line(row).items() if v), flush=True)
    print(records.table([line(row) for row in rows]))
    if any(row.correct == "no" for row in rows):
        sys.exit("bench.kernels: some results were wrong")


if __name__ == "__main__":
    main()
