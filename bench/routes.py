"""Times of the convolutions that a fused unit may run on a CPU, by shape: `python -m bench.routes`.

Runs forward and backward of a batch norm, ReLU and convolution by each route in turn: the direct
convolution of the library, and PyTorch's convolution behind the library's passes, on activations in
NHWC and in NCHW. Prints the route that `preact_kernels/kernels/cpu.py` chooses, the minimum time of
each, and the chosen one as a multiple of the fastest. With one thread, times are of the processor.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch

from bench import measure
from bench.records import table
from preact_kernels.kernels import cpu, pytorch_conv
from preact_kernels.kernels.contract import (
    Conv,
    Epilogue,
    Gradient,
    Inputs,
    Norm,
    Unit,
    Wanted,
)
from preact_kernels.kernels.layout import nhwc

ROUTES = DIRECT, NHWC, NCHW = "direct", "PyTorch NHWC", "PyTorch NCHW"


class Shape(NamedTuple):
    """A square convolution of square images."""

    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    size: int

    def __str__(self) -> str:
        channels = f"{self.size}x{self.size}x{self.in_channels} -> {self.out_channels}"
        return f"{channels}, {self.kernel}x{self.kernel}" + ", stride 2" * (self.stride == 2)


# Convolutions of CIFAR ResNets, wide ResNets and ImageNet ResNets.
SHAPES = (
    *((16, 16, 3, 1, 32), (64, 16, 1, 1, 32), (16, 64, 1, 1, 32)),
    *((32, 32, 3, 1, 16), (128, 32, 1, 1, 16), (32, 128, 1, 1, 16)),
    *((64, 64, 3, 1, 8), (256, 64, 1, 1, 8), (64, 256, 1, 1, 8)),
    *((64, 64, 3, 1, 32), (128, 128, 3, 1, 16), (256, 256, 3, 1, 8), (512, 512, 3, 1, 4)),
    *((64, 128, 3, 2, 32), (128, 256, 3, 2, 16), (256, 512, 3, 2, 8)),
    *((160, 160, 3, 1, 32), (320, 320, 3, 1, 16), (640, 640, 3, 1, 8), (160, 320, 3, 2, 32)),
    *((64, 64, 3, 1, 56), (128, 128, 3, 1, 28), (256, 256, 3, 1, 14), (512, 512, 3, 1, 7)),
    *((256, 64, 1, 1, 56), (512, 128, 1, 1, 28), (1024, 256, 1, 1, 14), (2048, 512, 1, 1, 7)),
    *((64, 256, 1, 1, 56), (128, 512, 1, 1, 28), (256, 1024, 1, 1, 14), (512, 2048, 1, 1, 7)),
)


@contextmanager
def forced(route: str) -> Iterator[None]:
    """Every unit takes this route."""
    is_direct, is_nchw = route == DIRECT, route == NCHW
    with (
        patch.object(cpu.CPUKernels, "serves", lambda *_: is_direct),
        patch.object(pytorch_conv, "_converts_activation", lambda *_: is_nchw),
    ):
        yield


class Trial:
    """A unit with random tensors, NHWC but for the weight, as a network has them."""

    def __init__(self, shape: Shape, batch: int, dtype: torch.dtype) -> None:
        channels, outputs, kernel, stride, size = shape
        conv = Conv((stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)
        weight = torch.randn(outputs, channels, kernel, kernel) / math.sqrt(channels) / kernel
        x = nhwc(torch.randn(batch, channels, size, size).to(dtype))
        out = -(-size // stride)
        self.dy = Gradient(nhwc(torch.randn(batch, outputs, out, out).to(dtype)))
        self.unit = Unit(weight.shape, conv, x.device, dtype, dtype, dtype, dtype)
        self.kernels = cpu.kernels()
        norm = Norm(*self.kernels.bn_stats(x), torch.ones(channels), torch.zeros(channels), 1e-5)
        self.inputs = Inputs(x, norm, weight.to(dtype))

    def chosen(self) -> str:
        """The route that the rule takes with the current number of threads."""
        x, _, weight = self.inputs
        if self.kernels.serves(self.unit, x.numel() // x.shape[1]):
            return DIRECT
        return NCHW if pytorch_conv._converts_activation(x, weight) else NHWC

    def run(self) -> None:
        """Forward with statistics, and backward with both gradients."""
        kernels, unit, inputs = self.kernels, self.unit, self.inputs
        kernels.norm_act_conv_forward(unit, inputs, Epilogue(with_stats=True))
        kernels.norm_act_conv_backward(unit, self.dy, inputs, Wanted(True, True))

    def times_ms(self, rounds: int) -> dict[str, float]:
        """The minimum time of each route, over rounds that run all in turn."""
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        found = dict.fromkeys(ROUTES, math.inf)
        for turn in range(rounds + 1):
            for route in ROUTES:
                with forced(route):
                    start = clock()
                    self.run()
                    ms = (clock() - start) * 1e3
                if turn:  # the first warms up
                    found[route] = min(found[route], ms)
        return found


def main(given: Sequence[str] | None = None) -> None:
    """Prints a line for each shape and number of threads."""
    parser = measure.parser("bench.routes", __doc__)
    add = parser.add_argument
    add("--batch", type=int, default=16)
    add("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    add("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    add("--rounds", type=int, default=10)
    add("--shapes", type=int, nargs="*", default=[*range(len(SHAPES))], help="their places")
    a = parser.parse_args(given)
    if error := cpu.load_error():
        parser.error(error)
    dtype, before = measure.DTYPES[a.dtype], torch.get_num_threads()
    lines = []
    for shape in (Shape(*SHAPES[place]) for place in a.shapes):
        trial = Trial(shape, a.batch, dtype)
        for threads in a.threads:
            torch.set_num_threads(threads)
            times, chosen = trial.times_ms(a.rounds), trial.chosen()
            lines.append(
                {
                    "shape": str(shape),
                    "threads": threads,
                    **{f"{route}, ms": f"{ms:.2f}" for route, ms in times.items()},
                    "chosen": chosen,
                    "of the fastest": f"{times[chosen] / min(times.values()):.2f}",
                }
            )
    torch.set_num_threads(before)
    print(f"{cpu.kernels().instruction_set}, {measure.dtype_name(dtype)}, batch {a.batch}")
    print(table(lines))


if __name__ == "__main__":
    main()
