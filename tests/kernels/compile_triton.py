"""Compiles every Triton kernel ahead of time, without a GPU, and reports resources.

    python -m tests.kernels.compile_triton [--out FILE.csv] [--capabilities 80 90 100] [--quick]

The launchers run on meta tensors, under a driver that names a GPU, and their kernels are compiled
instead of launched: block shapes are those that the launchers choose, for the shapes of common
networks and for pairs of widths. The run fails if a kernel needs more shared memory than its GPU
has, or, on one of `CAPABILITIES`, has a stack frame (of spilled registers, say) larger than
`--stack-bytes`, a pipeline of one buffer where the launcher asks for more, loads of 2 bytes where
16 are possible, or fewer resident programs per multiprocessor than its grid counts on.
"""

import argparse
import contextlib
import csv
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from preact_kernels.kernels.contract import BlockRun, Conv, Epilogue, Fold, Norm, Wanted

CAPABILITIES = (80, 90, 100)  # no spills allowed

MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 188}
SHARED_BYTES = {c: n * 1024 for c, n in ((80, 163), (89, 99), (90, 227), (100, 227), (120, 99))}


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
WIDTHS = (16, 32, 64, 128, 192, 256)  # of 1x1 convolutions


class Block(NamedTuple):
    """A block without a projection, of which a run is made."""

    channels: int
    width: int  # of the 3x3 convolution; equal to `channels` in a basic block


BLOCKS = (*(Block(4 * w, w) for w in (16, 32, 64)), *(Block(w, w) for w in (16, 32, 64)))


class Compiled(NamedTuple):
    """A row of the report."""

    capability: int
    kernel: str
    shape: str
    dtype: str
    options: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    resident: int  # programs per multiprocessor
    resident_counted_on: int  # by the grid; 0 where a program owns one tile
    stages: int  # that the launcher asks for
    buffers: int  # of the loop's asynchronous copies
    two_byte_loads: int
    two_byte_loads_needed: bool  # `needs_two_byte_loads`
    partial_bytes: int  # of a launch: partial results, written and read again
    wgmma: int
    mma: int
    async_copies: int


class Driver:
    """The parts of a Triton driver that compilation needs."""

    def __init__(self, target) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels cache the target of each device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        return self.target


class Task(NamedTuple):
    """Compiled by one process."""

    capability: int
    dtype: torch.dtype
    shape: Shape | Block | None  # None: the ops without a convolution
    tf32: bool = True
    stream: torch.dtype | None = None  # of the residuals of blocks; None: `dtype`


def tasks(capabilities: Sequence[int] | None, quick: bool) -> list[Task]:
    """Every dtype for every GPU, except float16: once, as its blocks are those of bfloat16.

    Args:
        capabilities: of the GPUs; None for `CAPABILITIES`, and for all of `SHARED_BYTES` where
            room is short: for `WIDE_SHAPES` and pairs of `WIDTHS`.
        quick: without pairs of `WIDTHS`, and with only bfloat16 for all but `WIDE_SHAPES`.
    """
    pairs = () if quick else (Shape(*p) for p in itertools.product(WIDTHS, repeat=2))
    widths = [s for s in dict.fromkeys((*WIDE_SHAPES, *pairs)) if s not in SHAPES]
    of_widths = [
        Task(c, dtype, shape)
        for c in capabilities or SHARED_BYTES
        for dtype in (torch.bfloat16, torch.float32)
        for shape in widths
    ]
    capabilities = capabilities or CAPABILITIES
    shapes = (None, *BLOCKS, *SHAPES)  # those that take long first: processes end together
    chosen = [(c, torch.bfloat16) for c in capabilities]
    wide = [Task(*c, b, stream=torch.float32) for c, b in itertools.product(chosen, BLOCKS)]
    if quick:
        return wide + [Task(*c, s) for s, c in itertools.product(shapes, chosen)] + of_widths
    chosen += [(c, torch.float32) for c in capabilities]
    if 90 in capabilities:
        chosen.append((90, torch.float16))
    found = wide + [Task(*c, shape) for shape, c in itertools.product(shapes, chosen)]
    if 90 in capabilities:
        narrow = [s for s in SHAPES if s.channels * s.out_channels <= 1024]
        found += [Task(90, torch.float32, s, tf32=False) for s in narrow]
    return found + of_widths


class Launch(NamedTuple):
    """A compiled kernel, and what it was to be launched with."""

    kernel: Any
    args: tuple
    constants: Mapping[str, Any]
    compiled: Any


def replace_everywhere(name: str, function: Callable) -> Callable:
    """Replaces a function of the kernels' modules in all that import it. Returns the original."""
    modules = [m for n, m in sys.modules.items() if n.startswith("preact_kernels.kernels.triton.")]
    before = [vars(m)[name] for m in modules if name in vars(m)]
    for module in modules:
        if name in vars(module):
            setattr(module, name, function)
    return before[0]


def compile_task(task: Task) -> list[Compiled]:
    """Compiles every kernel that the launchers of a task launch."""
    import triton
    from triton.backends.compiler import GPUTarget

    from preact_kernels.kernels.triton import launch

    triton.runtime.driver.set_active(Driver(GPUTarget("cuda", task.capability, 32)))
    found = {}

    def compile_only(kernel, grid, args, constants, num_warps, *_):
        try:
            compiled = kernel.warmup(*args, grid=grid, **constants, num_warps=num_warps)
        except Exception as error:
            where = f"sm_{task.capability} {task.shape} {task.dtype}"
            raise RuntimeError(f"{kernel.__name__} does not compile for {where}") from error
        found[compiled.hash] = Launch(kernel, args, constants, compiled)

    gpu = launch.Device(task.capability, MULTIPROCESSORS[task.capability])
    launch.properties = lambda device: gpu
    torch.backends.cudnn.allow_tf32 = task.tf32
    before = replace_everywhere("launch_kernel", compile_only)
    try:
        if task.shape is None:
            launch_others(task)
        elif isinstance(task.shape, Block):
            launch_run(task)
        else:
            launch_conv(task)
    finally:
        replace_everywhere("launch_kernel", before)
    return [row(task, entry) for entry in found.values()]


def empty_norm(channels: int) -> Norm:
    """A batch norm of meta tensors."""
    return Norm(*(torch.empty(channels, device="meta") for _ in range(4)), 1e-5)


def folds(skip: torch.Tensor | None, x: torch.Tensor) -> tuple[Fold, Fold]:
    """A fold in training mode, and one in evaluation mode."""
    channels = x.shape[1]
    sums = torch.empty(2, channels, device="meta")
    norm = empty_norm(channels)
    return Fold(skip, x, norm, sums, 0.5), Fold(skip, x, norm, sums, 0.0)


def images(channels: int, dtype: torch.dtype, side: int = 32) -> torch.Tensor:
    """A batch in NHWC order."""
    x = torch.empty(128, channels, side, side, dtype=dtype, device="meta")
    return x.contiguous(memory_format=torch.channels_last)


def launch_others(task: Task) -> None:
    """Every kernel without a convolution, for the widths of a network; and `launch_rare_convs`."""
    from preact_kernels.kernels import triton as kernels

    for channels in (16, 64, 256, 17):
        x, norm = images(channels, task.dtype), empty_norm(channels)
        kernels.bn_stats(x)
        kernels.bn_relu_forward(x, norm)
        kernels.bn_relu_backward_sums(x, x, norm)
        kernels.bn_relu_backward_mask(x, x, norm)
        for fold in folds(x, x):
            kernels.bn_relu_backward_input(x, x, norm, fold.sums, fold.inv_count)
            kernels.bn_input_gradient(x, fold)
        kernels.residual_add_forward(x, x, True)
        kernels.residual_add_forward(x, x, False)
    launch_rare_convs(task.dtype)


@contextlib.contextmanager
def wide_addresses():
    """A context in which `needs_int64` is true for every tensor."""
    before = replace_everywhere("needs_int64", lambda *_: True)
    try:
        yield
    finally:
        replace_everywhere("needs_int64", before)


def launch_rare_convs(dtype: torch.dtype) -> None:
    """Odd channels, a bias, evaluation mode, unusual geometry, 64-bit addresses."""
    from preact_kernels.kernels import triton as kernels

    x, y = images(17, dtype, 7), images(23, dtype, 4)
    norm = empty_norm(17)
    weight = torch.empty(23, 17, 3, 3, dtype=dtype, device="meta")
    bias = torch.empty(23, dtype=dtype, device="meta")
    conv = Conv((2, 2), (2, 2), (2, 2), 1)
    batch, running = folds(None, y)
    kernels.bn_relu_conv_forward(x, norm, weight, conv, Epilogue(bias))
    for fold, wanted in (
        (batch, Wanted(input=True, weight=True)),
        (running, Wanted(input=True, weight=False)),
        (running, Wanted(input=False, weight=True)),
    ):
        kernels.bn_relu_conv_backward(y, fold, x, norm, weight, conv, wanted)
    with wide_addresses():
        kernels.bn_relu_conv_forward(x, norm, weight, conv, Epilogue(bias, with_stats=True))
        wanted = Wanted(input=True, weight=True)
        kernels.bn_relu_conv_backward(y, batch, x, norm, weight, conv, wanted)


def launch_conv(task: Task) -> None:
    """A convolution forward and backward, as a stage calls it."""
    from preact_kernels.kernels import triton as kernels

    channels, out_channels, kernel, stride = task.shape
    x = images(channels, task.dtype)
    y = images(out_channels, task.dtype, 32 // stride)
    weight = torch.empty(out_channels, channels, kernel, kernel, dtype=task.dtype, device="meta")
    norm = empty_norm(channels)
    conv = Conv((stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)
    widens = out_channels > channels  # the last convolution of a bottleneck
    skip = y if widens else None
    kernels.bn_relu_conv_forward(x, norm, weight, conv, Epilogue(None, skip, True))
    fold, _ = folds(skip, y)
    wanted = Wanted(input=True, weight=True, dy=widens)
    kernels.bn_relu_conv_backward(y, fold, x, norm, weight, conv, wanted)
    if task.dtype == torch.bfloat16:  # each gradient alone, without a fold
        for wanted in (Wanted(input=True, weight=False), Wanted(input=False, weight=True)):
            kernels.bn_relu_conv_backward(y, None, x, norm, weight, conv, wanted)


def launch_run(task: Task) -> None:
    """A run of two blocks in training mode, forward and backward, with and without rebuilding.

    Weights are float32 beside a float32 stream, as under autocast.
    """
    from preact_kernels.kernels import triton as kernels

    channels, width = task.shape
    side_of_image = 512 // width  # as in networks for CIFAR
    sides = [(width, channels, 3), (channels, width, 3)]
    if channels != width:
        sides = [(width, channels, 1), (width, width, 3), (channels, width, 1)]
    parameters, inputs, statistics = [], [], []
    stream = task.stream or task.dtype
    x = images(channels, stream, side_of_image)
    for out_channels, in_channels, side in 2 * sides:
        norm = empty_norm(in_channels)
        weight = torch.empty(out_channels, in_channels, side, side, device="meta")
        parameters += [norm.weight, norm.bias, weight.to(stream)]
        is_first = len(inputs) % len(sides) == 0
        inputs.append(images(in_channels, stream if is_first else task.dtype, side_of_image))
        statistics += [norm.mean, norm.var]
    convs = [Conv((1, 1), (side // 2, side // 2), (1, 1), 1) for *_, side in sides]
    run = BlockRun(parameters, [1e-5] * len(inputs), len(sides), convs, task.dtype)
    keeps = {"keep_inputs": True, "keep_block_inputs": True}
    kernels.block_run_forward(x, run, empty_norm(channels)[:2], None, with_stats=True, **keeps)
    kernels.block_run_backward(x, None, run, inputs, statistics, 0.5, None)
    if task.dtype == torch.bfloat16:
        fold, _ = folds(None, x)
        g = images(channels, task.dtype, side_of_image)
        kernels.block_run_backward(g, fold, run, inputs, statistics, 0.5, x)


def row(task: Task, launch: Launch) -> Compiled:
    """The report on one kernel."""
    compiled, constants = launch.compiled, launch.constants
    registers, stack_bytes = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    blocks = constants["BLOCKS"]._asdict() if "BLOCKS" in constants else constants
    shown = {n.lower(): v for n, v in blocks.items()}
    shown = {n: v for n, v in shown.items() if n.startswith("block_") or n.endswith("_stages")}
    warps, shared_bytes = compiled.metadata.num_warps, compiled.metadata.shared
    parameters = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    partials = parameters.get("partials")
    return Compiled(
        capability=task.capability,
        kernel=launch.kernel.__name__,
        shape=shape_name(task.shape),
        dtype=str(task.dtype).removeprefix("torch.")
        + ("" if task.tf32 else " ieee")
        + (" beside float32" if task.stream else ""),
        options=" ".join(
            f"{n.removeprefix('block_').removeprefix('num_')}={v}" for n, v in shown.items()
        ),
        warps=warps,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=shared_bytes,
        resident=resident_programs(task.capability, warps, registers, shared_bytes),
        resident_counted_on=blocks.get("resident", 0),
        stages=max(blocks.get("num_stages", 1), tap_stages(launch)),
        buffers=buffers(compiled.asm["ttgir"]),
        two_byte_loads=two_byte_loads(launch),
        two_byte_loads_needed=needs_two_byte_loads(launch),
        partial_bytes=0 if partials is None else partials.numel() * partials.itemsize,
        wgmma=len(re.findall(r"\bwgmma\.mma_async", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        async_copies=len(re.findall(r"\bcp\.async\.c[ag]", ptx)),
    )


def shape_name(shape: Shape | Block | None) -> str:
    """A convolution's channels, kernel and stride; or the channels of a block in a run."""
    if shape is None:
        return ""
    return "x".join(map(str, shape)) if isinstance(shape, Shape) else "run of {}, {}".format(*shape)


def tap_stages(launch: Launch) -> int:
    """Stages of the loop over taps; 1 where it is unrolled or has one iteration."""
    geometry, blocks = launch.constants.get("GEOMETRY"), launch.constants.get("BLOCKS")
    is_unrolled = dict(zip(launch.kernel.arg_names, launch.args, strict=False)).get("partials")
    if geometry is None or geometry.R * geometry.S == 1 or is_unrolled is not None:
        return 1
    return blocks.num_tap_stages


def channels_of(constants: Mapping[str, Any]) -> list[int]:
    """The numbers of channels of the tensors that a kernel reads."""
    if "GEOMETRY" in constants:
        return [constants["GEOMETRY"].C, constants["GEOMETRY"].K]
    return [constants[n] for n in ("CHANNELS", "C", "K") if n in constants]


def needs_two_byte_loads(launch: Launch) -> bool:
    """Whether elements that a thread stores together do not lie together where it loads them."""
    is_packing = launch.kernel.__name__ == "pack_weights_kernel"  # from any memory layout
    return is_packing or any(c % 8 for c in channels_of(launch.constants))


def two_byte_loads(launch: Launch) -> int:
    """Loads of 2 bytes, except for one of a weight of which each thread has one element."""
    from preact_kernels.kernels.triton.configurations import ConvBlocks

    blocks, threads = launch.constants.get("BLOCKS"), 32 * launch.compiled.metadata.num_warps
    is_conv = isinstance(blocks, ConvBlocks)
    one_each = is_conv and blocks.block_cin * blocks.block_cout <= threads
    found = len(re.findall(r"\bld\.global\S*\.[bu]16\b", launch.compiled.asm["ptx"]))
    return max(0, found - one_each)


def buffers(ttgir: str) -> int:
    """The most buffers that a loop's asynchronous copies fill in turn; 0 without such copies."""
    if "async_copy_global_to_local" not in ttgir:
        return 0
    return max(map(int, re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)))


def resident_programs(capability: int, warps: int, registers: int, shared_bytes: int) -> int:
    """How many programs are resident on a multiprocessor at once.

    A warp is given registers in units of 256, and a program 1 KB of shared memory beside its own.
    """
    most_warps, shared = {80: (64, 164), 89: (48, 100), 120: (48, 100)}.get(capability, (64, 228))
    by_registers = 65536 // (-(-32 * registers // 256) * 256 * warps)
    return min(by_registers, most_warps // warps, shared * 1024 // (shared_bytes + 1024), 32)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack and local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {n: int(v) for n, v in re.findall(r"\b([A-Z]+):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def faults(rows: list[Compiled], stack_bytes: int = 0) -> list[str]:
    """What fails the run: see the top of this file."""
    wrong = []
    for r in rows:
        where = f"sm_{r.capability} {r.kernel} {r.shape} {r.dtype} {r.options}"
        if r.shared_bytes > SHARED_BYTES[r.capability]:
            wrong.append(f"{where}: {r.shared_bytes} bytes of shared memory")
        if r.capability not in CAPABILITIES:
            continue
        if r.stack_bytes > stack_bytes:
            wrong.append(f"{where}: a stack frame of {r.stack_bytes} bytes")
        if r.stages > 1 and r.buffers < 2:
            wrong.append(f"{where}: {r.buffers} buffers where {r.stages} stages were asked for")
        if r.two_byte_loads and not r.two_byte_loads_needed:
            wrong.append(f"{where}: {r.two_byte_loads} loads of 2 bytes")
        if r.resident < r.resident_counted_on:
            wrong.append(f"{where}: {r.resident} resident programs, not {r.resident_counted_on}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV file to write the report to")
    parser.add_argument("--capabilities", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true", help="fewer dtypes and shapes")
    parser.add_argument("--stack-bytes", type=int, default=0, help="allowed for each thread (0)")
    options = parser.parse_args()
    if os.environ.pop("TRITON_INTERPRET", None):
        sys.exit("compile_triton: TRITON_INTERPRET is set, but the interpreter does not compile")

    import triton
    from tabulate import tabulate

    rows = []
    todo = tasks(options.capabilities, options.quick)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for found in pool.imap_unordered(compile_task, todo):
            rows += found
    rows.sort()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([Compiled._fields, *rows])
    print(tabulate(rows, headers=[f.replace("_", " ") for f in Compiled._fields]))
    print(f"Triton {triton.__version__}: {len(rows)} kernels compiled")
    wrong = faults(rows, options.stack_bytes)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
