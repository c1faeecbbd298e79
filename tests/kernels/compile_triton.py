"""Compiles every Triton kernel ahead of time, without a GPU, and reports resources.

    python -m tests.kernels.compile_triton --out FILE.csv [--capabilities 80 90 100] [--quick]

The launchers run on meta tensors, under a driver that names a GPU, and their launches are recorded:
block shapes are those that the launchers choose, for the shapes of common networks and for pairs of
widths. Each kernel that Triton would compile for them is compiled once; those with the least room
for every GPU of `SHARED_BYTES`.

The run fails if a kernel needs more shared memory than its GPU has or than `configurations` counts
on. It also fails if a kernel, on one of `CAPABILITIES`, has a stack frame (of spilled registers,
say) larger than `--stack-bytes`, a pipeline of one buffer where the launcher asks for more, loads
of 2 bytes where 16 are possible, no wait for the kernels before it where it is launched as
dependent, or fewer resident programs per multiprocessor than its grid counts on.
"""

import argparse
import csv
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton

from preact_kernels.activations import DEFAULTS
from preact_kernels.kernels import triton as backend
from preact_kernels.kernels.contract import (
    AffineStep,
    BlockRun,
    Conv,
    Epilogue,
    Gradient,
    Inputs,
    Norm,
    Parameters,
    RunWanted,
    Statistics,
    Wanted,
)
from preact_kernels.kernels.triton.configurations import (
    ConvTiles,
    forward_bytes,
    input_bytes,
    weight_bytes,
)
from preact_kernels.kernels.triton.launch import INTERPRETED, Device, compile_options
from preact_kernels.kernels.triton.running_stats import norm_buffers_update
from testbed.cuda_programs import cuobjdump
from testbed.triton_driver import active_driver
from tests.cases import unit_of

kernels = backend.kernels()

CAPABILITIES = (80, 90, 100)  # no spills allowed

MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188}
_SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
SHARED_BYTES = {c: n * 1024 for c, n in _SHARED_KB.items()}


class Shape(NamedTuple):
    """A convolution of a network. The image size affects only the grid."""

    channels: int
    out_channels: int
    kernel: int = 1
    stride: int = 1


# Widths of PreAct ResNet-164 and -1001 with bottlenecks, of -110 with basic blocks, and the narrow
# convolutions of the networks for ImageNet.
SHAPES = (
    *(Shape(4 * w, w) for w in (16, 32, 64)),
    *(Shape(w, 4 * w) for w in (16, 32, 64)),  # projections too
    *(Shape(w, w, 3) for w in (16, 32, 64)),
    *(Shape(w, w, 3, 2) for w in (32, 64)),
)
# Where buffers and registers are short: projections of ResNet-1001 and of networks for ImageNet, a
# layer of DenseNet-121, and the widest that are fused.
WIDE_SHAPES = (
    *(Shape(64, 128, 1, 2), Shape(128, 256, 1, 2), Shape(160, 128)),
    *(Shape(256, 128), Shape(256, 256)),
)
WIDEST_TAPS = Shape(64, 64, 3)
FUSED = ("leaky_relu", "identity")  # activations of fused convolutions besides ReLU
WIDTHS = (16, 32, 64, 128, 192, 256)  # of 1x1 convolutions


class Block(NamedTuple):
    """A block without a projection, of which a run is made."""

    channels: int
    width: int  # of the 3x3 convolution; equal to `channels` in a basic block


BLOCKS = (*(Block(4 * w, w) for w in (16, 32, 64)), *(Block(w, w) for w in (16, 32, 64)))


class Task(NamedTuple):
    """Launches for one GPU."""

    capability: int
    dtype: torch.dtype
    # The name of an activation: ops with it. None: batch norm with ReLU, and rare convolutions.
    shape: Shape | Block | str | None
    tf32: bool = True
    stream: torch.dtype | None = None  # of the residuals of blocks; None: `dtype`
    activation: str = "relu"  # of a convolution


# With `--quick`: runs of blocks have the convolutions of 16 and 32 channels.
QUICK_SHAPES = (Shape(256, 64), Shape(64, 256), Shape(64, 64, 3), Shape(64, 64, 3, 2))
QUICK_WIDE_SHAPES = (Shape(64, 128, 1, 2), Shape(256, 256))
QUICK_BLOCKS = (*BLOCKS[:3], BLOCKS[-1])


def quick_tasks(capabilities: Sequence[int]) -> list[Task]:
    """bfloat16 with one activation besides ReLU, and float32 where room is short."""
    found = []
    for c in capabilities:
        found += [Task(c, torch.float32, shape) for shape in (*QUICK_WIDE_SHAPES, WIDEST_TAPS)]
        found += [Task(c, torch.bfloat16, block, stream=torch.float32) for block in QUICK_BLOCKS]
        shapes = (*QUICK_WIDE_SHAPES, None, "silu", *QUICK_BLOCKS, *QUICK_SHAPES)
        found += [Task(c, torch.bfloat16, shape) for shape in shapes]
        found.append(Task(c, torch.bfloat16, WIDEST_TAPS, activation="leaky_relu"))
    return found


def all_tasks(capabilities: Sequence[int] | None) -> list[Task]:
    """Every dtype for every GPU; float16 for one GPU, as it has the blocks of bfloat16.

    Args:
        capabilities: of the GPUs; None for `CAPABILITIES`, and for all of `SHARED_BYTES` where
            room is short: for `WIDE_SHAPES` and pairs of `WIDTHS`.
    """
    pairs = (Shape(*p) for p in itertools.product(WIDTHS, repeat=2))
    widths = [s for s in dict.fromkeys((*WIDE_SHAPES, *pairs)) if s not in SHAPES]
    dtypes = torch.bfloat16, torch.float32
    wide = itertools.product(capabilities or SHARED_BYTES, dtypes, widths)
    found = [Task(*task) for task in wide]
    for c in capabilities or CAPABILITIES:
        found += [Task(c, torch.bfloat16, block, stream=torch.float32) for block in BLOCKS]
        for dtype in dtypes:
            found += [Task(c, dtype, shape) for shape in (None, *DEFAULTS, *BLOCKS, *SHAPES)]
            fused = itertools.product(SHAPES, FUSED)
            found += [Task(c, dtype, shape, activation=name) for shape, name in fused]
        if c == 90:
            found += [Task(c, torch.float16, shape) for shape in (None, "silu", *BLOCKS, *SHAPES)]
            narrow = [s for s in SHAPES if s.channels * s.out_channels <= 1024]
            found += [Task(c, torch.float32, shape, tf32=False) for shape in narrow]
    return found


class Launch(NamedTuple):
    """A kernel, and what it is to be launched with."""

    task: Task
    kernel: Any
    args: tuple
    constants: Mapping[str, Any]
    num_warps: int

    def compile(self) -> Any:
        with active_driver(self.task.capability):
            options = compile_options(self.constants, self.num_warps)
            return self.kernel.warmup(*self.args, grid=(1, 1, 1), **self.constants, **options)

    def argument(self, name: str) -> Any:
        """An argument of the kernel, by its name; None where it has none of that name."""
        return dict(zip(self.kernel.arg_names, self.args, strict=False)).get(name)


def replace(patch: pytest.MonkeyPatch, name: str, function: Callable) -> None:
    """Replaces a function in all modules of the kernels that have imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("preact_kernels.kernels.triton.") and hasattr(module, name):
            patch.setattr(module, name, function)


def distinct_launches(todo: Sequence[Task]) -> dict[tuple, Launch]:
    """The launches of some tasks: one for each kernel that Triton would compile, by its key."""
    found: dict[tuple, Launch] = {}

    def record(kernel, grid, args, constants, num_warps, *_):
        launch = Launch(task, kernel, args, constants, num_warps)

        def keep(key, **_):
            found.setdefault((task.capability, kernel.__name__, key), launch)
            return True  # nothing is compiled

        with triton.knobs.runtime.scope():
            triton.knobs.runtime.jit_cache_hook = keep
            launch.compile()

    for task in todo:
        capability = task.capability
        gpu = Device(capability, MULTIPROCESSORS[capability], SHARED_BYTES[capability])
        torch.backends.cudnn.allow_tf32 = task.tf32
        with active_driver(capability), pytest.MonkeyPatch.context() as patch:
            replace(patch, "properties", lambda device, gpu=gpu: gpu)
            replace(patch, "launch_kernel", record)
            if task.shape is None:
                launch_others(task.dtype)
            elif isinstance(task.shape, str):
                launch_activation(task.dtype, task.shape)
            elif isinstance(task.shape, Block):
                launch_run(task)
            else:
                launch_conv(task)
    return found


def empty_norm(*shape: int, activation: str = "relu") -> Norm:
    """A norm of meta tensors `[C]` or `[N, C]`."""
    tensors = (torch.empty(shape, device="meta") for _ in range(4))
    return Norm(*tensors, 1e-5, *DEFAULTS[activation])


def gradients(
    g: torch.Tensor, skip: torch.Tensor | None, x: torch.Tensor
) -> tuple[Gradient, Gradient]:
    """A gradient with a deferred step in training mode, and one in evaluation mode."""
    channels = x.shape[1]
    sums = torch.empty(2, channels, device="meta")
    step = AffineStep(skip, x, empty_norm(channels), sums, 0.5)
    return Gradient(g, step), Gradient(g, step._replace(inv_count=0.0))


def images(channels: int, dtype: torch.dtype, side: int = 32) -> torch.Tensor:
    """A batch in NHWC order."""
    x = torch.empty(128, channels, side, side, dtype=dtype, device="meta")
    return x.contiguous(memory_format=torch.channels_last)


def launch_others(dtype: torch.dtype) -> None:
    """Every kernel without a convolution, for the widths of a network; and `launch_rare_convs`."""
    for channels in (16, 64, 256, 17):
        x, norm = images(channels, dtype), empty_norm(channels)
        kernels.bn_stats(x)
        kernels.norm_act_forward(x, norm)
        kernels.norm_act_backward(x, x, norm, with_g=False)
        kernels.norm_act_backward(x, x, norm, with_g=True)
        kernels.norm_act_recompute(x, x, norm)
        launch_with_residual(x, norm)
        for activated, skip in ((True, None), (False, x)):
            for gradient in gradients(x, skip, x):
                kernels.norm_input_gradient(gradient, activated)
        kernels.residual_add_forward(x, x, True)
        kernels.residual_add_forward(x, x, False)
        bias = torch.empty(channels, dtype=dtype, device="meta")
        kernels.residual_add_forward(x, x, False, bias)
    vectors, count = torch.empty(4, 64, device="meta"), torch.empty((), dtype=int, device="meta")
    norm_buffers_update(*vectors, 0.1, 1.5, count)
    launch_rare_convs(dtype)


def launch_with_residual(x: torch.Tensor, norm: Norm) -> None:
    """`act(p + residual)` and its backward; with rows and by the identity for few widths."""
    norms = [norm]
    if x.shape[1] in (64, 17):
        norms.append(empty_norm(*x.shape[:2]))
        kernels.norm_act_forward(x, empty_norm(x.shape[1], activation="identity"), x)
    for relu in norms:
        kernels.norm_act_forward(x, relu, x)
        kernels.norm_act_backward(x, x, relu, with_g=False, y=x)
        kernels.norm_act_backward(x, x, relu, with_g=True, y=x)


def launch_activation(dtype: torch.dtype, activation: str) -> None:
    """Kernels without a convolution for an activation: every one for silu, few for the others."""
    is_first = activation == "silu"
    for channels in (128, 17) if is_first else (128,):
        x = images(channels, dtype)
        for rows in ((), x.shape[:1]) if is_first else (x.shape[:1],):
            norm = empty_norm(*rows, channels, activation=activation)
            sums = torch.empty(2, *rows, channels, device="meta")
            step = AffineStep(None, x, norm, sums, 0.5)
            kernels.norm_act_forward(x, norm)
            kernels.norm_act_backward(x, x, norm, with_g=True)
            kernels.norm_act_recompute(x, x, norm)
            kernels.norm_input_gradient(Gradient(x, step), True)
            if is_first:
                constant = step._replace(inv_count=0.0)
                kernels.norm_act_backward(x, x, norm, with_g=False)
                kernels.norm_input_gradient(Gradient(x, constant), True)
                for known in (step, constant) if rows else ():
                    kernels.norm_input_gradient(Gradient(x, known))
                    kernels.norm_input_gradient(Gradient(x, known._replace(skip=x)))
        if is_first:
            kernels.group_stats(x, 1)
            kernels.pool_sums(torch.empty(2, 8, channels, device="meta"), norm.weight, channels)


def launch_rare_convs(dtype: torch.dtype) -> None:
    """Odd channels, a bias, evaluation mode, unusual geometry, 64-bit addresses."""
    x, y = images(17, dtype, 7), images(23, dtype, 4)
    norm = empty_norm(17)
    weight = torch.empty(23, 17, 3, 3, dtype=dtype, device="meta")
    bias = torch.empty(23, dtype=dtype, device="meta")
    unit = unit_of(weight, Conv((2, 2), (2, 2), (2, 2), 1), dtype)
    inputs = Inputs(x, norm, weight)
    batch, running = gradients(y, None, y)
    kernels.norm_act_conv_forward(unit, inputs, Epilogue(bias))
    for dy, wanted in (
        (batch, Wanted(input=True, weight=True)),
        (running, Wanted(input=True, weight=False)),
        (running, Wanted(input=False, weight=True)),
    ):
        kernels.norm_act_conv_backward(unit, dy, inputs, wanted)
    with pytest.MonkeyPatch.context() as patch:
        replace(patch, "needs_int64", lambda *_: True)
        kernels.norm_act_conv_forward(unit, inputs, Epilogue(bias, with_stats=True))
        kernels.norm_act_conv_backward(unit, batch, inputs, Wanted(input=True, weight=True))


def launch_conv(task: Task) -> None:
    """A convolution forward and backward, as a stage calls it."""
    channels, out_channels, kernel, stride = task.shape
    x = images(channels, task.dtype)
    y = images(out_channels, task.dtype, 32 // stride)
    weight = torch.empty(out_channels, channels, kernel, kernel, dtype=task.dtype, device="meta")
    conv = Conv((stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)
    unit, inputs = unit_of(weight, conv, task.dtype), Inputs(x, empty_norm(channels), weight)
    unit = unit._replace(activation=DEFAULTS[task.activation])
    widens = out_channels > channels  # the last convolution of a bottleneck
    skip = y if widens else None
    kernels.norm_act_conv_forward(unit, inputs, Epilogue(None, skip, True))
    dy, _ = gradients(y, skip, y)
    wanted = Wanted(input=True, weight=True, dy=widens)
    kernels.norm_act_conv_backward(unit, dy, inputs, wanted)
    if task.dtype == torch.bfloat16:  # each gradient alone, from a whole dy
        for wanted in (Wanted(input=True, weight=False), Wanted(input=False, weight=True)):
            kernels.norm_act_conv_backward(unit, Gradient(y), inputs, wanted)


def run_of_blocks(
    sides: Sequence[tuple[int, int, int]],
    blocks: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    image: Callable[[int, torch.dtype], torch.Tensor],
    weight: Callable[..., torch.Tensor],
    vector: Callable[[int], torch.Tensor],
) -> tuple[BlockRun, list[torch.Tensor]]:
    """A run of blocks with all statistics, and the inputs of its units.

    `sides` are the output and input channels and the kernel size of each unit of a block, `dtypes`
    those of the products and of the residual stream. The functions make tensors.
    """
    dtype, stream = dtypes
    between = [stream, *[dtype] * (len(sides) - 1), stream]  # dtypes between units
    units, parameters, inputs, statistics = [], [], [], []
    for index, (out_channels, in_channels, side) in enumerate(blocks * sides):
        place = index % len(sides)
        conv_weight = weight(out_channels, in_channels, side, side)
        conv = Conv((1, 1), (side // 2, side // 2), (1, 1), 1)
        units.append(unit_of(conv_weight, conv, dtype, *between[place : place + 2]))
        bn_weight, bn_bias, mean, var = (vector(in_channels) for _ in range(4))
        parameters.append(Parameters(bn_weight, bn_bias, conv_weight))
        inputs.append(image(in_channels, between[place]))
        statistics.append(Statistics(mean, var))
    return BlockRun(units[: len(sides)], parameters, statistics), inputs


def launch_run(task: Task) -> None:
    """A run of two blocks in training mode, forward and backward, with and without rebuilding.

    With a float32 stream weights are float32 too, as under autocast.
    """
    channels, width = task.shape
    side_of_image = 512 // width  # as in networks for CIFAR
    sides = [(width, channels, 3), (channels, width, 3)]
    if channels != width:
        sides = [(width, channels, 1), (width, width, 3), (channels, width, 1)]
    stream = task.stream or task.dtype
    x = images(channels, stream, side_of_image)
    run, inputs = run_of_blocks(
        sides,
        2,
        (task.dtype, stream),
        partial(images, side=side_of_image),
        partial(torch.empty, dtype=stream, device="meta"),
        partial(torch.empty, device="meta"),
    )
    of_batch = run._replace(statistics=[run.statistics[0], *[None] * (len(inputs) - 1)])
    kernels.block_run_forward(of_batch, x, RunWanted(True, [True, True], True))
    kernels.block_run_backward(run, Gradient(x), inputs, None)
    if task.dtype == torch.bfloat16:
        dy, _ = gradients(images(channels, task.dtype, side_of_image), None, x)
        rebuilt = [None if index == len(sides) else t for index, t in enumerate(inputs)]
        kernels.block_run_backward(run, dy, rebuilt, x)


def counted_bytes(launch: Launch) -> int:
    """The shared memory that `configurations` counts on for a kernel; all there is for others."""
    config = launch.constants.get("TILES")
    if not isinstance(config, ConvTiles) or "SHAPE" not in launch.constants:
        return SHARED_BYTES[launch.task.capability]
    x, dy = launch.argument("x"), launch.argument("dy")
    if launch.kernel.__name__ == "norm_act_conv_backward_weight_kernel":
        count, (dy, x, _) = weight_bytes, launch.argument("units")[0]
        products = min(dy.dtype, x.dtype, key=lambda dtype: dtype.itemsize)
    else:
        products = launch.argument("conv_weight").dtype
        if launch.kernel.__name__ == "norm_act_conv_forward_kernel":
            count, dy = forward_bytes, launch.argument("y")
        else:
            count, dy = input_bytes, dy.g if dy.step.x is None else dy.step.x
    weight = torch.empty(launch.constants["SHAPE"][:4], device="meta")
    unit = unit_of(weight, Conv((1, 1), (0, 0), (1, 1), 1), products, x.dtype, dy.dtype)
    return count(config, unit)


def least_room(capability: int, quick: bool) -> dict[tuple, Launch]:
    """The convolutions of runs of blocks that count on the most shared memory of a GPU."""
    todo = [
        Task(capability, torch.bfloat16, block, stream=stream)
        for block in (BLOCKS[:3] if quick else BLOCKS)
        for stream in (None, torch.float32)
    ]
    found = [item for item in distinct_launches(todo).items() if "SHAPE" in item[1].constants]
    found.sort(key=lambda item: counted_bytes(item[1]), reverse=True)
    chosen: dict[tuple, tuple] = {}  # one for each kernel and shape
    for key, launch in found:
        chosen.setdefault((launch.kernel.__name__, launch.constants["SHAPE"]), (key, launch))
    return dict([*chosen.values()][: 2 if quick else 12])


class Compiled(NamedTuple):
    """A row of the report."""

    capability: int
    kernel: str
    task: str  # the first that needs the kernel
    constants: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    counted_bytes: int  # shared memory, at most, as the launcher counts
    resident: int  # programs per multiprocessor
    resident_counted_on: int  # by the grid; 0 where a program owns one tile
    stages: int  # that the launcher asks for
    buffers: int  # of the loop's asynchronous copies
    two_byte_loads: int
    two_byte_loads_needed: bool  # `needs_two_byte_loads`
    waits_first: bool  # see `waits_first`


def row(launch: Launch) -> Compiled:
    """Compiles a kernel, and reports on it."""
    task, constants = launch.task, launch.constants
    try:
        compiled = launch.compile()
    except Exception as error:
        raise RuntimeError(f"{launch.kernel.__name__} does not compile for {task}") from error
    registers, stack_bytes = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    config = constants["TILES"]._asdict() if "TILES" in constants else constants
    warps, shared_bytes = compiled.metadata.num_warps, compiled.metadata.shared
    return Compiled(
        capability=task.capability,
        kernel=launch.kernel.__name__,
        task=str(task),
        constants=" ".join(f"{n}={value}" for n, value in constants.items()),
        warps=warps,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=shared_bytes,
        counted_bytes=counted_bytes(launch),
        resident=resident_programs(task.capability, warps, registers, shared_bytes),
        resident_counted_on=config.get("resident", 0),
        stages=max(config.get("num_stages", 1), tap_stages(launch)),
        buffers=buffers(compiled.asm["ttgir"]),
        two_byte_loads=two_byte_loads(launch, ptx),
        two_byte_loads_needed=needs_two_byte_loads(launch),
        waits_first=waits_first(ptx, compiled.metadata.launch_pdl),
    )


def tap_stages(launch: Launch) -> int:
    """Stages of the loop over taps; 1 where it is unrolled or has one iteration."""
    shape = launch.constants.get("SHAPE")
    is_unrolled = launch.argument("partials") is not None
    if shape is None or shape.R * shape.S == 1 or is_unrolled:
        return 1
    return launch.constants["TILES"].num_tap_stages


def needs_two_byte_loads(launch: Launch) -> bool:
    """Whether elements that a thread stores together do not lie together where it loads them."""
    constants = launch.constants
    channels = [constants[n] for n in ("CHANNELS", "C", "K") if n in constants]
    if "SHAPE" in constants:
        channels += constants["SHAPE"].C, constants["SHAPE"].K
    is_packing = launch.kernel.__name__ == "pack_weights_kernel"  # from any memory layout
    return is_packing or any(c % 8 for c in channels)


def two_byte_loads(launch: Launch, ptx: str) -> int:
    """Loads of 2 bytes, except for one of a weight or bias of which a thread has one element."""
    config = launch.constants.get("TILES")
    threads = 32 * launch.num_warps
    if isinstance(config, ConvTiles):
        one_each = config.tile_cin * config.tile_cout <= threads
    else:
        one_each = launch.argument("bias") is not None and config.tile_channels == threads
    found = len(re.findall(r"\bld\.global\S*\.[bu]16\b", ptx))
    return max(0, found - one_each)


def waits_first(ptx: str, is_dependent: bool) -> bool:
    """Whether a dependent kernel waits before it accesses memory, and then lets others start.

    The wait comes before any branch. A kernel that is not launched as dependent has no wait.
    """
    if not is_dependent:
        return "griddepcontrol" not in ptx
    before, wait, after = ptx.partition("griddepcontrol.wait;")
    early = r"^\s*(?:@%p\d+ )?(?:bra|ret|(?:ld|st|atom|red|cp)\S*\.global)\b"
    is_late = re.search(early, before, re.MULTILINE)
    return bool(wait) and not is_late and "griddepcontrol.launch_dependents;" in after


def buffers(ttgir: str) -> int:
    """The most buffers that a loop's asynchronous copies fill in turn; 0 without such copies."""
    if "async_copy_global_to_local" not in ttgir:
        return 0
    return max(map(int, re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)))


def resident_programs(capability: int, warps: int, registers: int, shared_bytes: int) -> int:
    """How many programs are resident on a multiprocessor at once.

    Warps take registers in units of 256. Each program takes 1 KB of shared memory more than it asks
    for.
    """
    most_warps, shared = {80: (64, 164), 89: (48, 100), 120: (48, 100)}.get(capability, (64, 228))
    by_registers = 65536 // (-(-32 * registers // 256) * 256 * warps)
    return min(by_registers, most_warps // warps, shared * 1024 // (shared_bytes + 1024), 32)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack and local memory."""
    tool = cuobjdump(of_triton=True)
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {n: int(v) for n, v in re.findall(r"\b([A-Z]+):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def faults(rows: Sequence[Compiled], stack_bytes: int = 0) -> list[str]:
    """What fails the run: see the top of this file."""
    wrong = []
    for r in rows:
        where = f"{r.kernel}, {r.task}, {r.constants}"
        if not r.shared_bytes <= r.counted_bytes <= SHARED_BYTES[r.capability]:
            needed = f"{r.shared_bytes} bytes of shared memory, {r.counted_bytes} counted"
            wrong.append(f"{where}: {needed}")
        if r.capability not in CAPABILITIES:
            continue
        if r.stack_bytes > stack_bytes:
            wrong.append(f"{where}: a stack frame of {r.stack_bytes} bytes")
        if r.stages > 1 and r.buffers < 2:
            wrong.append(f"{where}: {r.buffers} buffers where {r.stages} stages were asked for")
        if r.two_byte_loads and not r.two_byte_loads_needed:
            wrong.append(f"{where}: {r.two_byte_loads} loads of 2 bytes")
        if not r.waits_first:
            wrong.append(f"{where}: does not wait for the kernels before it first")
        if r.resident < r.resident_counted_on:
            wrong.append(f"{where}: {r.resident} resident programs, not {r.resident_counted_on}")
    return wrong


def all_kernels() -> set[str]:
    """The names of the kernels that launchers call."""
    modules = [m for name, m in sys.modules.items() if name.startswith(backend.__name__)]
    values = [value for module in modules for value in vars(module).values()]
    jitted = [f for f in values if isinstance(f, triton.runtime.JITFunction)]
    return {f.__name__ for f in jitted if f.__name__.endswith("_kernel")}


_launches: list[Launch] = []  # processes inherit them


def _row_of(index: int) -> Compiled:
    return row(_launches[index])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a CSV file for the report")
    parser.add_argument("--capabilities", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true", help="fewer dtypes and shapes")
    parser.add_argument("--stack-bytes", type=int, default=0, help="allowed for each thread (0)")
    options = parser.parse_args()
    if INTERPRETED:
        sys.exit("compile_triton: TRITON_INTERPRET is set, but the interpreter does not compile")
    capabilities = options.capabilities
    todo = quick_tasks(capabilities or CAPABILITIES) if options.quick else all_tasks(capabilities)
    found = distinct_launches(todo)
    for capability in SHARED_BYTES:
        found |= least_room(capability, options.quick)
    # The longest first.
    _launches.extend(sorted(found.values(), key=lambda n: "conv" not in n.kernel.__name__))
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        rows = sorted(pool.imap_unordered(_row_of, range(len(_launches))))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        csv.writer(file).writerows([Compiled._fields, *rows])
    print(f"Triton {triton.__version__}: {len(rows)} kernels compiled")
    wrong = faults(rows, options.stack_bytes)
    wrong += [f"{name}: not compiled" for name in sorted(all_kernels() - {r.kernel for r in rows})]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
