"""Op benchmarks: the fused ops against the eager channels_last sequence, `pytest bench/ops.py`.

Shapes are taken from the stages of ResNet-1001. A benchmark fails and records no time if results
exceed the budget (twice eager's own error against float64, plus one rounding). Rounds of fused and
eager alternate. `PREACT_KERNELS_BACKEND` chooses the backend.

On a GPU, calls cycle through so many inputs that none is in the L2 cache, and a CUDA graph of many
calls is replayed for at least `ROUND_MS`, which leaves out launches. On a CPU there are three
inputs: in a network, too, they come from the caches.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import preact_kernels as pk
from bench import floors, measure
from bench.records import Row

STAGES = ((16, 32), (32, 16), (64, 8))  # inner channels; height and width in pixels
ROUNDS_S = 0.5  # approximate time of the rounds of one benchmark
ROUND_MS = 2.0  # least time of a round on a GPU: much longer than the synchronisation


class Case(NamedTuple):
    """An op with a shape."""

    op: str
    channels: int
    size: int
    out: int | None = None  # output channels; None: `bn_relu`
    kernel: int = 1
    has_residual: bool = False

    def __str__(self) -> str:
        words = [self.op.replace("_", "-"), f"{self.channels}"]
        if self.out:
            words += [f"{self.out}", f"{self.kernel}x{self.kernel}"]
        if self.has_residual:
            words.append("residual")
        return "-".join([*words, f"{self.size}px"])

    @property
    def title(self) -> str:
        """The title, for example `"bn_relu_conv2d 1x1 + residual"`."""
        title = self.op + (f" {self.kernel}x{self.kernel}" if self.out else "")
        return title + (" + residual" if self.has_residual else "")

    @property
    def shape(self) -> str:
        """Channels and image size."""
        return f"{self.channels}x{self.size}x{self.size}" + (f" -> {self.out}" if self.out else "")

    def cost(self, batch: int, dtype: torch.dtype, backward: bool) -> floors.Cost:
        """Returns bytes and FLOPs."""
        pixels = batch * self.size**2
        if self.out is None:
            return floors.bn_relu_cost(pixels * self.channels, dtype.itemsize, backward)
        return floors.bn_relu_conv_cost(
            pixels * self.channels,
            pixels * self.out,
            2.0 * pixels * self.out * self.channels * self.kernel**2,
            dtype.itemsize,
            has_residual=self.has_residual,
            backward=backward,
        )


CASES = [
    case
    for c, size in STAGES
    for case in (
        Case("bn_relu", 4 * c, size),
        Case("bn_relu_conv2d", 4 * c, size, c),
        Case("bn_relu_conv2d", c, size, c, 3),
        Case("bn_relu_conv2d", c, size, 4 * c, has_residual=True),
    )
]


def inputs(case: Case, batch: int, device: torch.device, dtype: torch.dtype, seed: int) -> dict:
    """Draws tensors by name: `x`, `dy`, batch norm, He-scaled weight, residual."""
    g = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, layout=torch.contiguous_format) -> Tensor:
        drawn = torch.randn(*shape, generator=g, device=device)
        return drawn.to(dtype).contiguous(memory_format=layout)

    def image(channels: int) -> Tensor:
        return draw(batch, channels, case.size, case.size, layout=torch.channels_last)

    c, k = case.channels, case.kernel
    tensors = {
        "x": image(c),
        "dy": image(case.out or c),
        "bn_weight": torch.rand(c, generator=g, device=device) + 0.5,
        "bn_bias": torch.randn(c, generator=g, device=device),
        "running_mean": torch.zeros(c, device=device),
        "running_var": torch.ones(c, device=device),
    }
    if case.out:
        weight = draw(case.out, c, k, k, layout=torch.channels_last)
        tensors["conv_weight"] = weight * (2 / (c * k * k)) ** 0.5
    if case.has_residual:
        tensors["residual"] = image(case.out)
    for name in ("x", "bn_weight", "bn_bias", "conv_weight", "residual"):
        if name in tensors:
            tensors[name].requires_grad_()
    return tensors


def fused(case: Case, t: dict) -> Tensor:
    """Runs the fused op."""
    norm = (t["bn_weight"], t["bn_bias"], t["running_mean"], t["running_var"])
    if case.out is None:
        return pk.bn_relu(t["x"], *norm, training=True)
    residual, padding = t.get("residual"), case.kernel // 2
    return pk.bn_relu_conv2d(
        t["x"], t["conv_weight"], *norm, padding=padding, residual=residual, training=True
    )


def eager(case: Case, t: dict) -> Tensor:
    """Runs the op in plain PyTorch."""
    h = F.batch_norm(
        t["x"], t["running_mean"], t["running_var"], t["bn_weight"], t["bn_bias"], training=True
    )
    h = F.relu(h, inplace=True)
    if case.out is None:
        return h
    y = F.conv2d(h, t["conv_weight"], padding=case.kernel // 2)
    return y + t["residual"] if case.has_residual else y


EAGER, FUSED = "eager-channels-last", "fused"
CONTENDERS = {EAGER: eager, FUSED: fused}
KEEPS = {EAGER: "x and activation", FUSED: "x"}  # for the backward


def run(name: str, case: Case, t: dict, backward: bool) -> tuple[Tensor, ...]:
    """Returns the output, and with `backward` the gradients of all inputs."""
    y = CONTENDERS[name](case, t)
    if not backward:
        return (y,)
    wanted = [v for v in t.values() if v.requires_grad]
    return y.detach(), *torch.autograd.grad(y, wanted, t["dy"])


def assert_correct(case: Case, settings) -> None:
    """Asserts that the fused op's error is at most twice eager's, plus one rounding."""
    t = inputs(case, settings.batch, settings.device, settings.dtype, seed=0)

    def copy(dtype: torch.dtype | None) -> dict:
        copies = {name: v.detach().to(dtype, copy=True) for name, v in t.items()}
        return {name: v.requires_grad_(t[name].requires_grad) for name, v in copies.items()}

    truth = run(EAGER, case, copy(torch.float64), True)
    own = run(EAGER, case, copy(None), True)
    found = run(FUSED, case, copy(None), True)
    eps = torch.finfo(settings.dtype).eps
    for index, (f, o, exact) in enumerate(zip(found, own, truth, strict=True)):
        norm = exact.norm()
        off, allowed = (f - exact).norm() / norm, 2 * (o - exact).norm() / norm + eps
        what = "output" if index == 0 else f"gradient {index}"
        assert off <= allowed, f"{what} deviates by {off:.1e} from float64, allowed {allowed:.1e}"


def many_calls(call: Callable[[dict], object], sets: list[dict], device: torch.device):
    """Returns a function to time, and the number of calls that it makes."""
    if device.type != "cuda":
        turn = itertools.cycle(sets)
        return (lambda: call(next(turn))), 1
    graph, kept = measure.captured(lambda: [call(t) for t in sets])
    replays = math.ceil(ROUND_MS / measure.time_once_ms(graph.replay, device))

    def replay() -> None:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize(device)

    replay.kept = kept  # the graph writes to these tensors
    return replay, replays * len(sets)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward-backward"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(benchmark, record, settings, case: Case, backward: bool) -> None:
    """Times the fused op; the set-up of each round is a round of eager PyTorch."""
    device, dtype, batch = settings.device, settings.dtype, settings.batch
    assert_correct(case, settings)
    first = inputs(case, batch, device, dtype, seed=1)
    count = 3
    if device.type == "cuda":
        set_bytes = sum(t.numel() * t.element_size() for t in first.values())
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        count = min(64, max(8, 2 * cache // set_bytes))
    sets = [first, *(inputs(case, batch, device, dtype, seed=s) for s in range(2, count + 1))]
    timed, calls = {}, {}
    for name in CONTENDERS:
        call = functools.partial(run, name, case, backward=backward)
        timed[name], calls[name] = many_calls(call, sets, device)
    eager_s: list[float] = []

    def run_eager() -> None:
        start_s = time.perf_counter()
        timed[EAGER]()
        eager_s.append(time.perf_counter() - start_s)

    for _ in range(3):
        run_eager()
        timed[FUSED]()
    rounds = int(min(200, max(20, ROUNDS_S / 2 / min(eager_s))))
    eager_s.clear()
    benchmark.group = case.title
    benchmark.pedantic(timed[FUSED], setup=run_eager, rounds=rounds)

    cost = case.cost(batch, dtype, backward)
    for name, samples_s in ((EAGER, eager_s), (FUSED, benchmark.stats.stats.data)):
        row = Row(
            level="op",
            contender=name,
            case=f"{case.title}, {'forward + backward' if backward else 'forward'}",
            shape=f"{batch}x{case.shape}",
            batch=batch,
            dtype=measure.dtype_name(dtype),
            memory_mode=KEEPS[name],
            correct="yes",
            instruction_set=measure.instruction_set(device),
        )
        timing = measure.Timing.of([s * 1e3 / calls[name] for s in samples_s])
        row.set_timing(timing, settings.ceilings.floor_ms(*cost, dtype))
        row.gb_per_s = cost.bytes_moved / row.median_ms / 1e6
        row.gflop_per_s = cost.flops / row.median_ms / 1e6
        shown = "median_ms", "gb_per_s", "gflop_per_s", "x_of_floor"
        benchmark.extra_info[name] = {column: getattr(row, column) for column in shown}
        record(row)
