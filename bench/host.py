"""Host time of converted models: `python -m bench.host`.

Runs networks on small images, where kernels take little of a step, in one thread: plain, converted,
and built of fused modules. The difference between the last two is what a conversion costs beside
its kernels: module calls, comparison of the calls with those of the last step, or recording and
matching in a model's first step. Also runs a network in which nothing can run fused. On a GPU,
CUDA events time the same calls: the GPU waits for the host. `--profile` lists the functions that
take longest in a step of the fused and of the converted network.
"""

import copy
import cProfile
import gc
import pstats
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import preact_kernels as pk
from bench import measure
from bench.records import table
from testbed import published_models as published

PLAIN, CONVERTED, FUSED = "plain", "converted", "fused modules"


class Case(NamedTuple):
    """A network.

    Attributes:
        build: builds it.
        shape: shape of its input.
        fused: builds the same of fused modules.
        units: number of its units; 0: nothing runs fused.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    fused: Callable[[], nn.Module] | None = None
    units: int = 0


def _unfused() -> nn.Module:
    """A network whose norms are read by activations that are not fused."""
    units = [(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.SELU()) for _ in range(100)]
    return nn.Sequential(*[nn.Sequential(*unit) for unit in units])


def _deep(depth: int, batch: int, size: int) -> Case:
    return Case(
        lambda: published.DeepNet(depth),
        (batch, 3, size, size),
        lambda: pk.preact_resnet(depth),
        depth - 2,
    )


CASES = {
    "164 layers, 1x32x32": _deep(164, 1, 32),
    "164 layers, 16x32x32": _deep(164, 16, 32),
    "1001 layers, 1x32x32": _deep(1001, 1, 32),
    "nothing to fuse, 1x8x8": Case(_unfused, (1, 16, 8, 8)),
}


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def line_of(name: str, steps: int, device: torch.device) -> dict[str, str]:
    """Times a case; returns a line of the table."""
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.build().to(device, memory_format=torch.channels_last)
    models = {PLAIN: plain, CONVERTED: pk.convert(copy.deepcopy(plain))}
    if case.fused is not None:
        models[FUSED] = case.fused().to(device, memory_format=torch.channels_last)
    x = _channels_last(torch.randn(case.shape)).to(device)
    outputs: dict[str, Tensor] = {}

    def forward(key: str) -> Callable[[], None]:
        def call() -> None:
            outputs[key] = models[key](x)

        return call

    def backward(key: str) -> Callable[[], None]:
        return lambda: outputs.pop(key).sum().backward()

    calls = {}
    for key in models:
        calls |= {f"{key} forward": forward(key), f"{key} backward": backward(key)}
    # Nothing is remembered yet; the first call of all allocates memory.
    first_ms = 0.0
    for _ in range(2):
        models[CONVERTED] = pk.convert(copy.deepcopy(plain))
        gc.collect()
        first_ms = measure.time_once_ms(calls[f"{CONVERTED} forward"], device)
        calls[f"{CONVERTED} backward"]()
    for call in (*calls.values(), *calls.values()):
        call()
    times = measure.time_in_turn(calls, rounds=steps, device=device, title=name)
    forward_ms = {key: times[f"{key} forward"].median_ms for key in models}
    step_ms = {key: forward_ms[key] + times[f"{key} backward"].median_ms for key in models}
    line = {"network": name}
    for key in (PLAIN, CONVERTED, FUSED):
        both = f"{forward_ms[key]:.1f}, {step_ms[key]:.1f}" if key in models else ""
        line[f"{key}: forward, step, ms"] = both
    line["first forward, ms"] = f"{first_ms:.1f}"
    line["speed"] = f"{step_ms[PLAIN] / step_ms[CONVERTED]:.2f}x"
    added_us = first_us = ""
    if FUSED in models:
        added_us = f"{(step_ms[CONVERTED] - step_ms[FUSED]) * 1e3 / case.units:.0f}"
        first_us = f"{(first_ms - forward_ms[FUSED]) * 1e3 / case.units:.0f}"
    return line | {"us a unit": added_us, "us a unit, first": first_us}


def print_profile(name: str, count: int, device: torch.device) -> None:
    """Prints the functions that take longest in a step, by cProfile, which slows down calls."""
    case, steps = CASES[name], 3
    torch.manual_seed(0)
    models = {CONVERTED: pk.convert(case.build())}
    if case.fused is not None:
        models[FUSED] = case.fused()
    x = _channels_last(torch.randn(case.shape)).to(device)
    for key, model in models.items():
        model.to(device, memory_format=torch.channels_last)
        profile = cProfile.Profile()
        with torch.autograd.set_multithreading_enabled(False):  # the profiler sees this thread
            for step in range(2 + steps):
                measure.synchronize(device)
                if step >= 2:
                    profile.enable()
                model(x).sum().backward()
                profile.disable()
        print(f"{name}, {key}: {steps} steps")
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(count)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = measure.parser("bench.host", __doc__, "--device")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=15, help="rounds, each model in turn")
    parser.add_argument("--threads", type=int, default=1)
    words = "also list the COUNT functions that take longest"
    parser.add_argument("--profile", type=int, default=0, metavar="COUNT", help=words)
    a = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(a.threads)
    try:
        lines = [line_of(name, a.steps, a.device) for name in a.cases]
        for name in a.cases if a.profile else ():
            print_profile(name, a.profile, a.device)
    finally:
        torch.set_num_threads(threads)
    print(table(lines))
    print(measure.Machine.of(a.device))


if __name__ == "__main__":
    main()
