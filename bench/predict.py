"""Memory, bytes and launches of a training step on a GPU, without one: `python -m bench.predict`.

Runs the forward and the backward of the networks of bench/gpu_networks.py for an H200 with fake
tensors (testbed/fake_cuda): the code of PyTorch and of this package decides as on the GPU, and no
kernel runs. Prints, for eager PyTorch, `torch.utils.checkpoint` and each memory mode of
`pk.convert`:

- the bytes that a forward keeps for the backward, and the peak memory of a step above the memory
  between steps: tensors, without workspaces of cuDNN and fragments of the allocator;
- launches of this package, operators of PyTorch that launch kernels, the bytes that they move (each
  tensor in their arguments once, and what PyTorch's norms read twice), and the FLOPs of PyTorch's
  operators;
- a lower bound of the time: for each launch its bytes over copy bandwidth or its FLOPs over the
  rate of a large product, whichever is longer, and a gap (constants of bench/launches.py), without
  the FLOPs of fused convolutions.

Attention takes more here than on a GPU, where PyTorch has fused kernels for it. `--top` lists what
takes longest.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bench import dry_run, gpu_networks, launches, measure, records
from bench.dry_run import Launch, Recorder, bias_addition
from bench.models import Contender, Trained
from bench.records import Measured, mib, put
from preact_kernels.torch_compat import storage_id
from testbed import fake_cuda

# Of a large product in bfloat16: nvidia-h200-ceilings.csv in bench/results.
FLOPS_PER_US = 7.36e8
ALIGNMENT = 512  # bytes, of tensors on a GPU
# How many of their first arguments PyTorch's norms read twice: for sums, then for the result.
READ_TWICE = {
    "aten::native_batch_norm": 1,
    "aten::native_group_norm": 1,
    "aten::native_batch_norm_backward": 2,
    "aten::native_group_norm_backward": 2,
}
CONTENDERS = tuple(
    c for c in gpu_networks.CONTENDERS if not c.is_graphed and c not in gpu_networks.COMPILED
)


class Memory:
    """Bytes of the storages that are alive."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def add(self, t: Tensor) -> None:
        """Counts the storage of a tensor from now on until it is freed."""
        key, storage = storage_id(t), t.untyped_storage()
        if key not in self._alive:
            size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
            self._alive[key] = weakref.ref(storage, functools.partial(self._free, key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self.now -= size

    def add_temporarily(self, size: int) -> None:
        """Counts bytes that are freed at once."""
        self.peak = max(self.peak, self.now + size)


def size_of(t: Tensor) -> int:
    """The bytes of a tensor's elements."""
    return t.numel() * t.element_size()


class StepRecorder(Recorder):
    """Records all launches of fake tensors on a GPU, their FLOPs, and the memory."""

    def __init__(self) -> None:
        super().__init__(records_all=True)
        self.memory = Memory()
        self.flops: list[float] = []  # of each launch
        self.shapes: list[str] = []  # of the result of each operator of PyTorch

    def add(self, launch: Launch, tensors: dict[int, int | None], flops: float = 0.0) -> None:
        """Records a launch."""
        super().add(launch, tensors)
        self.flops.append(flops)
        self.shapes.append("")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for t in made:
            self.memory.add(t)
        is_allocation = name.startswith(("aten::empty", "aten::new_empty"))
        if function.namespace != "aten" or function.is_view or is_allocation or not made:
            return result
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        parts = {(storage_id(t), t.storage_offset()): size_of(t) for t in (*read, *made)}
        moved = sum(parts.values()) + sum(map(size_of, read[: READ_TWICE.get(name, 0)]))
        count = flop_registry.get(function._overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count else 0.0
        self.add(Launch(name, "", 0, 0, False, moved), {}, flops)
        self.shapes[-1] = f"{list(made[0].shape)} {measure.dtype_name(made[0].dtype)}"
        if name == "aten::convolution" and args[2] is not None:
            self.add(bias_addition(result), {})
        return result


@dataclasses.dataclass
class PredictedRow(Measured):
    """A training step of a network on a GPU, as predicted."""

    case: str
    contender: str
    shape: str
    dtype: str
    saved_bytes: int
    peak_bytes: int
    kernels: int  # launches of this package
    operators: int  # operators of PyTorch that launch kernels
    bytes_moved: int
    flops: float  # of PyTorch's operators
    least_ms: float
    fused: str = ""

    KEY = ("case", "contender", "shape", "dtype")


class Work:
    """Launches of the same kind, and their sums."""

    def __init__(self) -> None:
        self.count, self.bytes_moved, self.flops, self.least_us = 0, 0, 0.0, 0.0

    def add(self, launch: Launch, flops: float) -> None:
        """Adds a launch."""
        self.count += 1
        self.bytes_moved += launch.bytes_moved
        self.flops += flops
        product_us = flops / FLOPS_PER_US
        copy_us = launch.bytes_moved / launches.COPY_BYTES_PER_US
        self.least_us += launches.least_us(launch) + max(0.0, product_us - copy_us)


def step_of(
    case: str, contender: Contender, dtype: torch.dtype
) -> tuple[PredictedRow, dict[tuple[str, str], Work]]:
    """Predicts a step; returns its row, and its launches by name and shape of the result."""
    recorder = StepRecorder()
    network = gpu_networks.CASES[case]
    plain = network.build()  # with data: constructors may read it
    a = argparse.Namespace(dtype=dtype, device=torch.device("cuda"))
    with (
        dry_run.cuda_launches(recorder, fake_cuda.MULTIPROCESSORS, with_instructions=False),
        fake_cuda.gpu(recorder.memory.add_temporarily),
        recorder,
    ):
        one = Trained(contender, network, fake_cuda.to_gpu(plain), a)
        fake_cuda.accept_fake_tensors(one.converted)
        for _ in range(2):  # the first ones record
            one.gradients()
        fused = one.fused_norms() if contender.is_fused else ""
        saved_bytes = one.saved_bytes()
        one.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        recorder.memory.peak = before = recorder.memory.now
        begin = len(recorder.recorded)
        one.gradients()
        end = len(recorder.recorded)
        peak_bytes = recorder.memory.peak - before
    works: dict[tuple[str, str], Work] = collections.defaultdict(Work)
    for index in range(begin, end):
        launch, tensors, *_ = recorder.recorded[index]
        moved = launch.bytes_moved or sum(n or 0 for n in tensors.values())
        works[launch.name, recorder.shapes[index]].add(
            launch._replace(bytes_moved=moved), recorder.flops[index]
        )
    own = sum(work.count for key, work in works.items() if not key[0].startswith("aten::"))
    row = PredictedRow(
        case=case,
        contender=contender.name,
        shape="x".join(map(str, network.gpu_shape or network.shape)),
        dtype=measure.dtype_name(dtype),
        saved_bytes=saved_bytes,
        peak_bytes=peak_bytes,
        kernels=own,
        operators=end - begin - own,
        bytes_moved=sum(work.bytes_moved for work in works.values()),
        flops=sum(work.flops for work in works.values()),
        least_ms=round(sum(work.least_us for work in works.values()) / 1e3, 3),
        fused=fused,
    )
    return row, works


def line_of(row: PredictedRow) -> dict[str, str]:
    """Formats a row."""
    return {
        "network": f"{row.case}, {row.shape}",
        "contender": row.contender,
        "fused": row.fused,
        "kept, MiB": mib(row.saved_bytes),
        "peak, MiB": mib(row.peak_bytes),
        "kernels": str(row.kernels),
        "operators": str(row.operators),
        "GB": f"{row.bytes_moved / 1e9:.1f}",
        "TFLOP, PyTorch": f"{row.flops / 1e12:.2f}",
        "at least ms": f"{row.least_ms:.1f}",
    }


def largest(works: dict[tuple[str, str], Work], count: int) -> list[dict[str, str]]:
    """Formats the kinds of launches that take longest."""
    found = sorted(works.items(), key=lambda item: -item[1].least_us)[:count]
    return [
        {
            "launch": name,
            "result": shape,
            "count": str(work.count),
            "GB": f"{work.bytes_moved / 1e9:.2f}",
            "at least ms": f"{work.least_us / 1e3:.2f}",
        }
        for (name, shape), work in found
    ]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = measure.parser("bench.predict", __doc__)
    add, names = parser.add_argument, [c.name for c in CONTENDERS]
    cases = list(gpu_networks.CASES)
    add("--models", nargs="+", choices=cases, default=cases, metavar="NAME", help=str(cases))
    add("--contenders", nargs="+", choices=names, default=names, metavar="NAME", help=str(names))
    add("--dtype", choices=("fp32", "bf16"), default="bf16", help="bf16: under autocast")
    add("--top", type=int, default=0, metavar="COUNT", help="list what takes longest")
    add("--csv", type=Path, help="file for the rows")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Prints the table, and writes the CSV file."""
    a = arguments(given)
    if not fake_cuda.is_loaded():
        if reason := fake_cuda.missing():
            sys.exit(f"bench.predict: {reason}")
        options = sys.argv[1:] if given is None else given
        command = [sys.executable, "-m", "bench.predict", *options]
        environment = os.environ | fake_cuda.environment()
        return subprocess.run(command, env=environment, check=False).returncode
    os.environ.pop("LD_PRELOAD")  # for the compilers that this process starts
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by `copy`
    machine = measure.Machine.of(torch.device("cpu"))
    machine = dataclasses.replace(machine, device=f"{fake_cuda.NAME}, predicted")
    lines = []
    for case in a.models:
        for contender in CONTENDERS:
            if contender.name not in a.contenders:
                continue
            try:
                row, works = step_of(case, contender, measure.DTYPES[a.dtype])
            except ImportError as error:
                print(f"{case}: left out, {error.name} is not installed")
                break
            if a.csv:
                put(a.csv, machine.stamp(row))
            lines.append(line_of(row))
            if a.top:
                print(f"\n{case}, {contender.name}")
                print(records.table(largest(works, a.top)), flush=True)
    print(records.table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
