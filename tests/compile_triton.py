"""Compiles every Triton kernel ahead of time, without a GPU, and reports resources.

    python -m tests.compile_triton [--out FILE.csv] [--capabilities 80 90 100] [--quick]

The launchers run on meta tensors, under a driver that names a GPU, and their kernels are compiled
instead of launched: block shapes are those that the launchers choose, for the shapes of common
networks. The run fails if a kernel needs more shared memory than its GPU has, or spills registers
on one of `CAPABILITIES`.
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
from pathlib import Path
from typing import NamedTuple

import torch

from preact_kernels.kernels.contract import Conv, Fold, Norm, Wanted

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
    *(Shape(w, 4 * w) for w in (16, 32, 64)),
    *(Shape(w, w, 3) for w in (16, 32, 64)),
    *(Shape(w, w, 3, 2) for w in (32, 64)),
    *(Shape(16 * w, 64 * w) for w in (1, 2)),  # projections
)


class Compiled(NamedTuple):
    """A row of the report."""

    capability: int
    kernel: str
    shape: str
    dtype: str
    options: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
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
    shape: Shape | None  # None: the ops without a convolution
    tf32: bool = True


def tasks(capabilities, quick: bool) -> list[Task]:
    """Every dtype for every GPU, except float16: once, as its blocks are those of bfloat16.

    Only bfloat16 if quick.
    """
    shapes = (*SHAPES, None)
    chosen = [(c, torch.bfloat16) for c in capabilities]
    if quick:
        return [Task(*c, shape) for c, shape in itertools.product(chosen, shapes)]
    chosen += [(c, torch.float32) for c in capabilities]
    if 90 in capabilities:
        chosen.append((90, torch.float16))
    found = [Task(*c, shape) for c, shape in itertools.product(chosen, shapes)]
    if 90 in capabilities:
        narrow = [s for s in SHAPES if s.channels * s.out_channels <= 1024]
        found += [Task(90, torch.float32, s, tf32=False) for s in narrow]
    return found


def compile_task(task: Task) -> list[Compiled]:
    """Compiles every kernel that the launchers of a task launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from preact_kernels.kernels.triton import launch

    triton.runtime.driver.set_active(Driver(GPUTarget("cuda", task.capability, 32)))
    found = {}
    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        try:
            compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            where = f"sm_{task.capability} {task.shape} {task.dtype}"
            raise RuntimeError(f"{kernel.__name__} does not compile for {where}") from error
        found[compiled.hash] = (kernel.__name__, options, compiled)

    JITFunction.run = compile_only
    gpu = launch.Device(task.capability, MULTIPROCESSORS[task.capability])
    launch.properties = lambda device: gpu
    torch.backends.cudnn.allow_tf32 = task.tf32
    try:
        (launch_others if task.shape is None else launch_conv)(task)
    finally:
        JITFunction.run = run
    return [row(task, *entry) for entry in found.values()]


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
    modules = [m for n, m in sys.modules.items() if n.startswith("preact_kernels.kernels.triton.")]
    modules = [m for m in modules if hasattr(m, "needs_int64")]
    before = modules[0].needs_int64
    for module in modules:
        module.needs_int64 = lambda *_: True
    yield
    for module in modules:
        module.needs_int64 = before


def launch_rare_convs(dtype: torch.dtype) -> None:
    """Odd channels, a bias, evaluation mode, unusual geometry, 64-bit addresses."""
    from preact_kernels.kernels import triton as kernels

    x, y = images(17, dtype, 7), images(23, dtype, 4)
    norm = empty_norm(17)
    weight = torch.empty(23, 17, 3, 3, dtype=dtype, device="meta")
    bias = torch.empty(23, dtype=dtype, device="meta")
    conv = Conv((2, 2), (2, 2), (2, 2), 1)
    batch, running = folds(None, y)
    kernels.bn_relu_conv_forward(x, norm, weight, conv, conv_bias=bias)
    for fold, wanted in (
        (batch, Wanted(input=True, weight=True)),
        (running, Wanted(input=True, weight=False)),
        (running, Wanted(input=False, weight=True)),
    ):
        kernels.bn_relu_conv_backward(y, fold, x, norm, weight, conv, wanted)
    with wide_addresses():
        kernels.bn_relu_conv_forward(x, norm, weight, conv, conv_bias=bias, with_stats=True)
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
    kernels.bn_relu_conv_forward(x, norm, weight, conv, residual=skip, with_stats=True)
    fold, _ = folds(skip, y)
    wanted = Wanted(input=True, weight=True, dy=widens)
    kernels.bn_relu_conv_backward(y, fold, x, norm, weight, conv, wanted)
    if task.dtype == torch.bfloat16:  # each gradient alone, without a fold
        for wanted in (Wanted(input=True, weight=False), Wanted(input=False, weight=True)):
            kernels.bn_relu_conv_backward(y, None, x, norm, weight, conv, wanted)


def row(task: Task, name: str, options: dict, compiled) -> Compiled:
    """The report on one kernel, compiled with the keyword arguments `options` of its launch."""
    registers, spilled = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    blocks = options["BLOCKS"]._asdict() if "BLOCKS" in options else options
    blocks = {n.lower(): v for n, v in blocks.items()}
    blocks = {n: v for n, v in blocks.items() if n.startswith("block_") or n.endswith("_stages")}
    return Compiled(
        capability=task.capability,
        kernel=name,
        shape="x".join(map(str, task.shape)) if task.shape else "",
        dtype=str(task.dtype).removeprefix("torch.") + ("" if task.tf32 else " ieee"),
        options=" ".join(
            f"{n.removeprefix('block_').removeprefix('num_')}={v}" for n, v in blocks.items()
        ),
        warps=compiled.metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        wgmma=len(re.findall(r"\bwgmma\.mma_async", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        async_copies=len(re.findall(r"\bcp\.async\.c[ag]", ptx)),
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory: spills, as no kernel has local arrays."""
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


def faults(rows: list[Compiled]) -> list[str]:
    """Spills, and kernels that exceed the shared memory of their GPU."""
    wrong = []
    for r in rows:
        where = f"sm_{r.capability} {r.kernel} {r.shape} {r.dtype} {r.options}"
        if r.spilled_bytes and r.capability in CAPABILITIES:
            wrong.append(f"{where}: spills {r.spilled_bytes} bytes")
        if r.shared_bytes > SHARED_BYTES[r.capability]:
            wrong.append(f"{where}: {r.shared_bytes} bytes of shared memory")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV file to write the report to")
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--quick", action="store_true", help="only bfloat16")
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
    wrong = faults(rows)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
