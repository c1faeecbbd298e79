"""Checks launches of known kernels: they must be what Triton would choose.

`python -m tests.kernels.prepared_launches` runs blocks whose tensors begin at any address, with a
stand-in for what compiles and starts a kernel. It prints, as JSON, the names of the kernels that
were launched from `prepared`, and how often Triton looked a kernel up when blocks ran again. It
fails at a launch that differs from what Triton would choose.
"""

import json
import random
import weakref

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from preact_kernels.kernels import triton as backend
from preact_kernels.kernels.contract import (
    AffineStep,
    Gradient,
    Norm,
    RunWanted,
)
from preact_kernels.kernels.triton import conv, launch, run_units
from testbed.triton_driver import Driver
from tests.kernels.compile_triton import replace, run_of_blocks

BOTTLENECK, BASIC = [(5, 20, 1), (5, 5, 3), (20, 5, 1)], [(20, 20, 3)] * 2
SMALL = [(5, 20, 1), (5, 5, 1), (20, 5, 1)]  # two kernels of one grid

any_offset = random.Random(0)
driver = Driver(90)
kernels = backend.kernels()


def choice(kernel, grid, args, constants, num_warps, *_):
    """What Triton would choose for a launch."""
    debug = triton.knobs.runtime.debug
    binder = kernel.device_caches[90][-1]
    _, types, _ = binder(*args, **constants, num_warps=num_warps, debug=debug)
    return kernel, grid, num_warps, driver.get_current_stream(0), debug, types


class Launches:
    """Records launches; the kernels do nothing."""

    def __init__(self):
        self.reused = set()  # names of kernels that were launched from `prepared`
        self.lookups = 0
        self.precision = None
        self._launch = launch.launch_kernel

    def launch_kernel(self, kernel, grid, args, constants, num_warps, prepared=None, key=None):
        assert constants.get("PRECISION", self.precision) == self.precision
        assert list(constants) == kernel.arg_names[len(args) :]
        self.request = kernel, grid, args, constants, num_warps
        self._launch(*self.request, prepared, key)

    def look_up(self, kernel, *args, **options):
        self.lookups += 1
        return Compiled(self)


class Compiled:
    """Stands for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, launches):
        self.launches, self.choice = launches, choice(*launches.request)

    @property
    def run(self):
        launches, alive = self.launches, weakref.ref(self)  # as Triton's: does not keep the code

        def start(*args):
            kernel, grid, tensors, constants, _ = launches.request
            launches.reused.add(kernel.__name__)
            expected = *tensors, *constants.values()
            assert alive() is not None and alive().choice == choice(*launches.request)
            assert args[:4] == (*grid, driver.get_current_stream(0))
            assert len(args) == 9 + len(expected)
            assert all(a is b for a, b in zip(args[9:], expected, strict=True))

        return start


def at_any_address(shape, dtype=torch.float32):
    whole = torch.empty(torch.Size(shape).numel() + 1, dtype=dtype)
    return whole[any_offset.randrange(2) :][: whole.numel() - 1].view(shape)


def launch_blocks(
    launches, blocks, sides, is_nhwc=True, weight_dtype=torch.bfloat16, dtype=torch.bfloat16,
    stream=None,
):  # fmt: skip
    """A run forward and backward, in every mode."""

    def image(channels, dtype=stream or dtype):
        return at_any_address((3, 5, 1, channels), dtype).permute(0, 3, 1, 2)

    def vector(channels):
        return at_any_address((channels,))

    def with_step(skip):
        norm = Norm(vector(20), vector(20), vector(20), None, 1)
        return Gradient(
            image(20, dtype), AffineStep(skip, image(20), norm, at_any_address((2, 20)), 0.5)
        )

    def weight(out_channels, in_channels, *side):
        found = at_any_address((out_channels, *side, in_channels), weight_dtype)
        found = found.permute(0, 3, 1, 2)
        return found if is_nhwc else found.contiguous()

    launches.precision = conv.precision(dtype)
    run, inputs = run_of_blocks(sides, blocks, (dtype, stream or dtype), image, weight, vector)
    run.units[0] = run.units[0]._replace(eps=1)
    frozen = run._replace(units=[u._replace(uses_batch=False) for u in run.units])
    of_batch = run._replace(statistics=[run.statistics[0], *[None] * (len(inputs) - 1)])
    for any_run in (of_batch, frozen):
        for with_stats in (True, False):
            wanted = RunWanted(with_stats, [True] * blocks, True)
            kernels.block_run_forward(any_run, image(20), wanted)
    rebuilt = [t if index % len(sides) else None for index, t in enumerate(inputs)]
    for any_run, dy, kept, y in (
        (run, Gradient(image(20)), inputs, None),
        *((run, Gradient(image(20)), rebuilt, image(20)) for _ in sides[1:2]),  # not of one unit
        (frozen, Gradient(image(20)), inputs, None),
        *((run, with_step(skip), inputs, None) for skip in (image(20), None, image(20), None)),
    ):
        kernels.block_run_backward(any_run, dy, kept, y)


def run_all(is_apart: bool) -> tuple[list[str], list[int]]:
    """Names of reused kernels, and lookups: at first, of other and of the same blocks."""
    launches = Launches()
    float32 = {"weight_dtype": torch.float32}
    lookups = []
    run_units._launches.cache_clear()
    with (
        pytest.MonkeyPatch.context() as patch,
        triton.knobs.runtime.scope(),
    ):
        replace(patch, "properties", lambda device: launch.Device(90, 132, 227 * 1024))
        replace(patch, "costs_less_apart", lambda *_: is_apart)
        replace(patch, "launch_kernel", launches.launch_kernel)
        patch.setattr(JITFunction, "run", launches.look_up)
        triton.runtime.driver.set_active(driver)
        driver.get_current_stream = lambda device: 0
        for blocks in (1, 2, 5, 65, 6, 5):
            before = launches.lookups
            launch_blocks(launches, blocks, BOTTLENECK, **float32)
            lookups.append(launches.lookups - before)
        for sides in (BOTTLENECK, BASIC, BASIC[:1], SMALL):
            for is_nhwc in (True, False):
                for weight_dtype in (torch.bfloat16, torch.float32):
                    launch_blocks(launches, 5, sides, is_nhwc, weight_dtype)
            launch_blocks(launches, 5, sides, **float32, stream=torch.float32)
            for allow_tf32 in (True, False, True):
                torch.backends.cudnn.allow_tf32 = allow_tf32
                launch_blocks(launches, 5, sides, **float32, dtype=torch.float32)
        for stream in (1, 0):
            driver.get_current_stream = lambda device, stream=stream: stream
            launch_blocks(launches, 5, BOTTLENECK)
        for triton.knobs.runtime.debug in (True, False):
            launch_blocks(launches, 5, BOTTLENECK)
    return sorted(launches.reused), lookups


if __name__ == "__main__":
    print(json.dumps({f"apart {is_apart}": run_all(is_apart) for is_apart in (True, False)}))
