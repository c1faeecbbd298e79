"""Rows of results: CSV files, one per device and kind of row, and tables."""

import csv
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tabulate import tabulate

# Endings of the files that do not hold `Row`s.
MODELS = "-models.csv"
MEMORY = "-memory.csv"
LAUNCHES = "-launches.csv"
CEILINGS = "-ceilings.csv"
KERNELS = "-kernels.csv"
PREDICTED = "-predicted.csv"
REMOVED = "-training.csv", "-functions.csv"  # nothing reads them: their commands were removed


@dataclasses.dataclass(kw_only=True)
class Measured:
    """The last columns of every row: where it was measured. `bench.measure.Machine` sets them."""

    commit: str = ""
    device: str = ""
    versions: str = ""
    date: str = ""
    command: str = ""

    KEY: ClassVar[tuple[str, ...]]  # columns that identify a measurement

    @property
    def key(self) -> tuple:
        """Identifies the measurement; repeated measurements have the same key."""
        return tuple(getattr(self, name) for name in (*self.KEY, "device"))


@dataclasses.dataclass
class Row(Measured):
    """One contender on one network or op. None: not measured."""

    level: str  # "network" or "op"
    contender: str
    case: str  # the network ("resnet-1001") or the op ("bn_relu_conv2d 1x1 forward")
    shape: str  # shape of the input, NxCxHxW; for a convolution also " -> K"
    batch: int
    dtype: str  # dtype of the activations: "float32", "bfloat16", ...
    memory_mode: str  # tensors that it keeps for the backward
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    saved_bytes: int | None = None  # kept for the backward, without parameters
    peak_bytes: int | None = None  # peak of a step minus memory between steps
    peak_raw_bytes: int | None = None  # all resident (CPU) or allocated (GPU) memory
    floor_ms: float | None = None  # see bench/floors.py
    x_of_floor: float | None = None
    images_per_s: float | None = None
    gb_per_s: float | None = None  # modelled bytes over median time
    gflop_per_s: float | None = None
    correct: str = ""  # "yes", "no", or "" (not checked)
    note: str = ""
    instruction_set: str = ""  # instruction set of the fused CPU kernels; "" on a GPU

    KEY = ("level", "contender", "case", "shape", "batch", "dtype", "instruction_set")

    def set_timing(self, timing, floor_ms: float | None) -> None:
        """Sets the times from a `bench.measure.Timing`, and derived columns."""
        self.median_ms, self.p20_ms, self.p80_ms = timing
        self.images_per_s = self.batch / (timing.median_ms / 1e3)
        if floor_ms is not None:
            self.floor_ms, self.x_of_floor = floor_ms, timing.median_ms / floor_ms


@dataclasses.dataclass
class ModelRow(Measured):
    """One way to train a published model: see bench/models.py and bench/memory.py."""

    case: str
    contender: str
    shape: str  # shape of the input
    dtype: str
    saved_bytes: int | None = None  # kept for the backward, without parameters
    peak_bytes: int | None = None  # peak of a step minus memory between steps
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    fused: str = ""  # norms that run fused, of all
    note: str = ""  # why it was not measured, or the number of graphs of torch.compile

    KEY = ("case", "contender", "shape", "dtype")


@dataclasses.dataclass
class LaunchRow(Measured):
    """A kernel of a block in a training step: see bench/launches.py."""

    stage: str  # "1", or "1 projection" for the blocks of stage 1 with a projection
    direction: str  # "forward" or "backward"
    kernel: str  # the name with a prefix, F1 for the first unit of a block in the forward
    blocks: int  # residual blocks with these launches
    launches_per_block: float
    grid: str  # thread blocks
    threads: str  # per thread block
    shared_bytes: str  # per thread block
    bytes_per_block: float
    units_per_block: float  # bytes_per_block / bytes of the inner channels of all pixels
    dependent: float  # share of the launches that may begin before the previous one has ended
    least_us_per_block: float
    issue_us_per_block: float | None = None  # to issue the instructions; None: not known
    measured_us_per_block: float | None = None
    copy_gb_s: float | None = None  # measured copy bandwidth of the GPU
    network: str = ""
    batch: int = 0
    dtype: str = ""
    backend: str = ""
    memory: str = ""
    residual_dtype: str = ""
    multiprocessors: int = 0

    STEP = ("network", "batch", "dtype", "backend", "memory", "residual_dtype", "multiprocessors")
    KEY = (*STEP, "stage", "direction", "kernel")

    @property
    def step(self) -> tuple:
        """Identifies the training step; all its kernels have the same value."""
        return tuple(getattr(self, name) for name in self.STEP)


@dataclasses.dataclass
class KernelRow(Measured):
    """A call on a GPU, timed in several ways: see bench/kernels.py. Times are per call."""

    case: str  # the kernel, block or unit
    contender: str  # the backend, or the way to run a block or unit
    shape: str  # shape of the input
    dtype: str
    inputs: str  # "fresh", "resident" in the L2 cache, or "the same" of any size
    bytes_moved: int | None = None  # the least
    floor_us: float | None = None  # bytes_moved over copy bandwidth
    events_us: float | None = None
    graph_us: float | None = None
    profiler_us: float | None = None  # sum of the durations of kernels
    span_us: float | None = None  # from the begin of the first kernel to the end of the last
    longest_us: float | None = None  # the longest kernel
    launches: float | None = None
    gb_per_s: float | None = None
    x_of_floor: float | None = None
    saved_bytes: int | None = None  # kept for the backward, without parameters
    correct: str = ""  # "yes", "no", or "" (not checked)
    note: str = ""  # why it has no time

    KEY = ("case", "contender", "shape", "dtype", "inputs")


@dataclasses.dataclass
class CeilingRow(Measured):
    """A limit of a GPU: see bench/probes.py."""

    name: str
    unit: str
    value: float | None = None  # None: the probe failed
    note: str = ""  # the reason

    KEY = ("name",)


def number(value: float | None, form: str = ",.1f") -> str:
    """Formats a number; None is empty."""
    return "" if value is None else format(value, form)


def mib(value: int | None) -> str:
    """Formats bytes in MiB; None is empty."""
    return number(None if value is None else value / 2**20, ",.0f")


def table(lines: Sequence[Mapping[str, object]], form: str = "simple") -> str:
    """Formats a table with a column per key; empty without lines."""
    return tabulate(lines, "keys", form, disable_numparse=True) if lines else ""


def slug(text: str) -> str:
    """Converts text to a part of a file name: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def columns(record: type[Measured]) -> dict[str, str]:
    """Returns the types of a record by column; the columns of `Measured` come last."""
    types = {f.name: str(f.type) for f in dataclasses.fields(record)}
    machine = [f.name for f in dataclasses.fields(Measured)]
    return {n: types[n] for n in types if n not in machine} | {n: types[n] for n in machine}


def read(path: Path, record: type[Measured]) -> list:
    """Reads the records of a CSV file; none if there is no file.

    Raises:
        ValueError: the file has other columns than `record`.
    """
    types = columns(record)

    def parsed(text: str, type_name: str) -> object:
        if text == "" and "None" in type_name:
            return None
        return int(text) if "int" in type_name else float(text) if "float" in type_name else text

    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != list(types):
            raise ValueError(
                f"{path}: expected the columns {', '.join(types)}, got "
                f"{', '.join(reader.fieldnames or ('none',))}"
            )
        return [
            record(**{n: parsed(text, types[n]) for n, text in line.items()}) for line in reader
        ]


def put(path: Path, *records: Measured) -> None:
    """Adds records to a CSV file; they replace records with the same key."""
    known = {r.key: r for r in read(path, type(records[0]))}
    write(path, list((known | {r.key: r for r in records}).values()))


def remove(path: Path, records: Sequence[Measured]) -> None:
    """Removes records with the same keys from a CSV file, and a file without records."""
    if not records:
        return
    keys = {r.key for r in records}
    if kept := [r for r in read(path, type(records[0])) if r.key not in keys]:
        write(path, kept)
    else:
        path.unlink(missing_ok=True)


def write(path: Path, records: list) -> None:
    """Writes a CSV file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    names = list(columns(type(records[0])))
    with partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for record in records:
            values = [getattr(record, name) for name in names]
            writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in values)
    os.replace(partial, path)
