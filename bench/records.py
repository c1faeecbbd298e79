"""Rows of results: one CSV file per device, with the same columns for ops and networks."""

import csv
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Row:
    """One contender on one network or op. None: not measured."""

    level: str  # "network" or "op"
    contender: str
    case: str  # the network ("resnet-1001") or the op ("bn_relu_conv2d 1x1 forward")
    shape: str  # of the input, NxCxHxW; for a convolution also " -> K"
    batch: int
    dtype: str  # of the activations: "float32", "bfloat16", ...
    memory_mode: str  # what it keeps for the backward
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    saved_bytes: int | None = None  # kept for the backward, without parameters
    peak_bytes: int | None = None  # above what the process holds between steps
    peak_raw_bytes: int | None = None  # all resident (CPU) or allocated (GPU) memory
    floor_ms: float | None = None  # see bench/floors.py
    x_of_floor: float | None = None
    images_per_s: float | None = None
    gb_per_s: float | None = None  # modelled bytes over median time
    gflop_per_s: float | None = None
    correct: str = ""  # "yes", "no", "another function", or "" (not checked)
    note: str = ""
    instruction_set: str = ""  # of the fused CPU kernels; "" on a GPU
    commit: str = ""
    device: str = ""
    versions: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple:
        """Equal for two measurements of the same thing."""
        what = self.level, self.contender, self.case, self.shape
        return *what, self.batch, self.dtype, self.instruction_set, self.device

    def set_timing(self, timing, floor_ms: float | None) -> None:
        """Sets the times from a `bench.measure.Timing`, and what is derived from them."""
        self.median_ms, self.p20_ms, self.p80_ms = timing.median_ms, timing.p20_ms, timing.p80_ms
        self.images_per_s = self.batch / (timing.median_ms / 1e3)
        if floor_ms is not None:
            self.floor_ms, self.x_of_floor = floor_ms, timing.median_ms / floor_ms


@dataclasses.dataclass
class CurvePoint:
    """The loss of one training step of one contender."""

    case: str
    contender: str
    dtype: str
    batch: int
    step: int
    loss: float
    truth: str  # the contender that it is compared with
    deviation: float  # |loss - loss of truth| / |loss of truth|
    commit: str = ""
    device: str = ""
    versions: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple:
        """Equal for two measurements of the same thing."""
        return self.case, self.contender, self.dtype, self.batch, self.step, self.device


# How names of files of other records end.
SCALING = "-scaling.csv"
CONVERTED = "-converted.csv"
INFERENCE = "-inference.csv"
LAUNCHES = "-launches.csv"
CEILINGS = "-ceilings.csv"


@dataclasses.dataclass
class ScalingRow:
    """One contender on one network in several processes: see bench/scaling.py."""

    contender: str
    case: str  # the network
    batch_norm: str  # whose statistics: "of all processes" or "of each process"
    batch: int  # images per process
    dtype: str
    processes: int
    alone_ms: float | None = None  # median
    apart_ms: float | None = None
    together_ms: float | None = None
    alone_images_per_s: float | None = None
    images_per_s: float | None = None  # of all processes together
    efficiency: float | None = None
    sending_share: float | None = None  # of the time of `together`, sending and waiting
    correct: str = ""  # as in `Row`
    note: str = ""
    commit: str = ""
    device: str = ""
    versions: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple:
        """Equal for two measurements of the same thing."""
        what = self.contender, self.case, self.batch_norm, self.batch, self.dtype
        return *what, self.processes, self.device

    def set_times(self, alone_ms: float, apart_ms: float, together_ms: float) -> None:
        """Sets the times, and what is derived from them: N processes over N times one."""
        self.alone_ms, self.apart_ms, self.together_ms = alone_ms, apart_ms, together_ms
        self.alone_images_per_s = self.batch / (alone_ms / 1e3)
        self.images_per_s = self.processes * self.batch / (together_ms / 1e3)
        self.efficiency = alone_ms / together_ms
        self.sending_share = max(0.0, 1 - apart_ms / together_ms)


@dataclasses.dataclass
class ConvertedRow:
    """One model before and after `pk.convert`: see bench/converted.py."""

    case: str
    batch: int
    image_size: int  # pixels
    dtype: str
    batch_norms: int
    fused: int  # of these
    plain_bytes: int | None = None  # kept for the backward
    store_bytes: int | None = None
    rebuild_bytes: int | None = None
    plain_ms: float | None = None  # median time of a training step
    store_ms: float | None = None
    rebuild_ms: float | None = None
    plain_channels_last_ms: float | None = None  # weights and images in that format
    store_channels_last_ms: float | None = None
    compiled_graphs: int | None = None  # of the converted model; 1: no graph break
    commit: str = ""
    device: str = ""
    versions: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple:
        """Equal for two measurements of the same thing."""
        return self.case, self.batch, self.image_size, self.dtype, self.device


@dataclasses.dataclass
class InferenceRow:
    """One contender on one network in evaluation mode: see bench/inference.py."""

    case: str  # the network
    contender: str
    batch: int
    image_size: int  # pixels
    dtype: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    images_per_s: float | None = None
    commit: str = ""
    device: str = ""
    versions: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple:
        """Equal for two measurements of the same thing."""
        return self.case, self.contender, self.batch, self.image_size, self.dtype, self.device


@dataclasses.dataclass
class LaunchRow:
    """A kernel of a block in a training step: see bench/launches.py."""

    stage: str  # "1", or "1 projection" for the blocks of stage 1 with a projection
    direction: str  # "forward" or "backward"
    kernel: str  # the name, behind F1 for the first unit of a block in the forward
    blocks: int  # of the network, whose launches were counted
    launches_per_block: float
    grid: str  # blocks of the GPU
    threads: str  # of a block
    shared_bytes: str  # of a block
    bytes_per_block: float
    units_per_block: float  # of the inner channels of every pixel
    dependent: float  # share of the launches that may begin before the one ahead has ended
    estimated_us_per_block: float
    measured_us_per_block: float | None = None
    copy_gb_s: float | None = None  # measured copy bandwidth of the GPU
    network: str = ""
    batch: int = 0
    dtype: str = ""
    backend: str = ""
    memory: str = ""
    residual_dtype: str = ""
    multiprocessors: int = 0
    commit: str = ""
    device: str = ""
    versions: str = ""
    date: str = ""
    command: str = ""

    @property
    def step(self) -> tuple:
        """Equal for the kernels of one step."""
        what = self.network, self.batch, self.dtype, self.backend, self.memory
        return *what, self.residual_dtype, self.multiprocessors

    @property
    def key(self) -> tuple:
        """Equal for two counts of the same thing."""
        return *self.step, self.stage, self.direction, self.kernel


@dataclasses.dataclass
class CeilingRow:
    """A limit of a GPU: see bench/probes.py."""

    name: str
    unit: str
    value: float | None = None  # None: the probe failed
    note: str = ""  # why
    commit: str = ""
    device: str = ""
    versions: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple:
        """Equal for two measurements of the same thing."""
        return self.name, self.device


def slug(text: str) -> str:
    """`text` as part of a file name: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _parsed(text: str, annotation: str) -> object:
    if text == "" and "None" in str(annotation):
        return None
    if "int" in str(annotation):
        return int(text)
    if "float" in str(annotation):
        return float(text)
    return text


class Records:
    """The records of one CSV file, which is rewritten after every change.

    Args:
        path: the CSV file.
        record: `Row` or `CurvePoint`.
        keep: start with the records of the file, if it exists; otherwise start empty.

    Raises:
        ValueError: the columns of the file are not those of `record`.
    """

    def __init__(self, path: Path, record: type, keep: bool) -> None:
        self.path, self.record = Path(path), record
        self._by_key: dict[tuple, object] = {}
        if keep and self.path.exists():
            self._by_key = {r.key: r for r in read(self.path, record)}

    def read_again(self) -> None:
        """Adds the records that another process wrote to the file."""
        if self.path.exists():
            self._by_key |= {r.key: r for r in read(self.path, self.record)}

    def __iter__(self) -> Iterator:
        return iter(self._by_key.values())

    def get(self, key: tuple, commit: str | None = None):
        """The record with this key, if it was measured at this commit (None: any); else None."""
        found = self._by_key.get(key)
        return found if found is not None and commit in (None, found.commit) else None

    def remove(self, is_old: Callable[[Any], bool]) -> None:
        """Removes records; the next change writes the file."""
        self._by_key = {key: r for key, r in self._by_key.items() if not is_old(r)}

    def put(self, *records) -> None:
        """Adds records, replaces those with the same key, and writes the file."""
        for record in records:
            self._by_key[record.key] = record
        self.write()

    def write(self) -> None:
        """Writes the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(f.name for f in dataclasses.fields(self.record))
            for record in self:
                writer.writerow(
                    f"{v:.6g}" if isinstance(v, float) else ("" if v is None else v)
                    for v in dataclasses.astuple(record)
                )
        os.replace(partial, self.path)


def read(path: Path, record: type) -> list:
    """The records of a CSV file.

    Raises:
        ValueError: the columns of the file are not those of `record`.
    """
    fields = {f.name: f.type for f in dataclasses.fields(record)}
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != list(fields):
            raise ValueError(
                f"{path}: expected the columns {', '.join(fields)}, got "
                f"{', '.join(reader.fieldnames or ('none',))}; measure again without --resume"
            )
        return [
            record(**{name: _parsed(text, fields[name]) for name, text in line.items()})
            for line in reader
        ]
