"""Times of the convolutions that a fused unit may run on a CPU, by shape: `python -m bench.routes`.

Runs forward and backward of a batch norm, ReLU and convolution by each route in turn: the direct
convolution of the library, and PyTorch's convolution behind the library's passes, on activations in
NHWC and in NCHW. Prints the route that `preact_kernels/kernels/cpu.py` chooses, the minimum time of
each, and the chosen one as a multiple of the fastest.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from bench import measure
from bench.records import table
from preact_kernels.kernels import cpu, pytorch_conv
from preact_kernels.kernels.contract import Conv, Epilogue, Gradient, Inputs, Norm, Unit, Wanted
from preact_kernels.kernels.layout import nhwc

ROUTES = DIRECT, NHWC, NCHW = "direct", "PyTorch NHWC", "PyTorch NCHW"

# Input and output channels, kernel size, stride, image size: of CIFAR, wide and ImageNet ResNets.
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


def trial(shape: Sequence[int], batch: int, dtype: torch.dtype) -> tuple[Callable[[], None], str]:
    """Returns a function that runs forward and backward of a unit, and the route of the rule."""
    channels, outputs, kernel, stride, size = shape
    conv = Conv((stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)
    weight = torch.randn(outputs, channels, kernel, kernel) / math.sqrt(channels) / kernel
    weight = weight.to(dtype)
    x = nhwc(torch.randn(batch, channels, size, size).to(dtype))
    out = -(-size // stride)
    dy = Gradient(nhwc(torch.randn(batch, outputs, out, out).to(dtype)))
    unit = Unit(weight.shape, conv, x.device, dtype, dtype, dtype, dtype)
    kernels = cpu.kernels()
    norm = Norm(*kernels.bn_stats(x), torch.ones(channels), torch.zeros(channels), 1e-5)
    inputs = Inputs(x, norm, weight)

    def run() -> None:
        kernels.norm_act_conv_forward(unit, inputs, Epilogue(with_stats=True))
        kernels.norm_act_conv_backward(unit, dy, inputs, Wanted(True, True))

    if kernels.serves(unit, batch * size**2):
        return run, DIRECT
    return run, NCHW if pytorch_conv._converts_activation(x, weight) else NHWC


def times_ms(run: Callable[[], None], rounds: int) -> dict[str, float]:
    """Returns the minimum time of each route, over rounds of all routes."""
    found = dict.fromkeys(ROUTES, math.inf)
    for turn in range(rounds + 1):
        for route in ROUTES:
            with forced(route):
                ms = measure.time_once_ms(run, torch.device("cpu"))
            if turn:  # the first warms up
                found[route] = min(found[route], ms)
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Prints a line for each shape."""
    parser = measure.parser("bench.routes", __doc__)
    add = parser.add_argument
    add("--batch", type=int, default=16)
    add("--dtype", choices=measure.DTYPES, default="fp32")
    add("--rounds", type=int, default=10)
    a = parser.parse_args(given)
    if error := cpu.load_error():
        parser.error(error)
    lines = []
    for shape in SHAPES:
        channels, outputs, kernel, stride, size = shape
        run, chosen = trial(shape, a.batch, measure.DTYPES[a.dtype])
        times = times_ms(run, a.rounds)
        lines.append(
            {
                "input": f"{size}x{size}x{channels}",
                "output": outputs,
                "kernel": f"{kernel}x{kernel}",
                "stride": stride,
                **{f"{route}, ms": f"{ms:.2f}" for route, ms in times.items()},
                "chosen": chosen,
                "of the fastest": f"{times[chosen] / min(times.values()):.2f}",
            }
        )
    threads = torch.get_num_threads()
    print(f"{cpu.kernels().instruction_set}, {a.dtype}, batch {a.batch}, {threads} threads")
    print(table(lines))


if __name__ == "__main__":
    main()
