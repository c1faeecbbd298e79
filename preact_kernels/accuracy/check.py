"""`python -m preact_kernels check`: compares the kernels of each backend with float64 here."""

import concurrent.futures
import contextlib
import math
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch
from torch import nn

from preact_kernels.accuracy import oracle
from preact_kernels.accuracy.cases import HALF, Case, cases
from preact_kernels.ops import dispatch
from preact_kernels.ops.checks import dtype_name

DRAWS = 3
SEED = 0
# Of ReLU inputs. With more, one is always near zero.
MOST_KINKS = 200_000


class Column(NamedTuple):
    """The activations' dtype, and whether products of float32 may round their operands to TF32."""

    dtype: torch.dtype
    tf32: bool = False

    def __str__(self) -> str:
        return "TF32" if self.tf32 else dtype_name(self.dtype)


class Cell(NamedTuple):
    """What became of the cases of one kind in one dtype."""

    share: float  # the largest error, as a share of what is allowed
    faults: list[str]

    def __str__(self) -> str:
        if not self.faults:
            return f"{self.share:.2f}"
        return f"MISS {self.share:.3g}" if 1 < self.share < math.inf else "MISS"


def device_of(backend: dispatch.Backend) -> torch.device:
    """Where a backend is checked."""
    if backend.device_types:
        return torch.device(backend.device_types[0])
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def columns_of(backend: dispatch.Backend) -> list[Column]:
    """The dtypes that a backend serves."""
    found = [Column(dtype) for dtype in backend.dtypes]
    if device_of(backend).type == "cuda":
        found.insert(1, Column(torch.float32, tf32=True))
    return found


def processes_for(backend: dispatch.Backend) -> int:
    """How many processes check a backend; 0 stands for this one alone.

    Triton compiles some hundred kernels, which takes nearly all of the time.
    """
    is_compiled = backend.name == "triton" and device_of(backend).type == "cuda"
    return min(8, os.cpu_count() or 1) if is_compiled else 0


def check_backend(backend: dispatch.Backend, columns: Sequence[Column]) -> bool:
    """Prints a table with a row for each kind of case. Returns whether all results are right."""
    kinds = list(cases(torch.bfloat16))
    cells = _cells(backend, [(kind, column) for kind in kinds for column in columns])
    width = max(map(len, kinds))
    print(f"{backend.name:{width}}", *(f"{column!s:>9}" for column in columns))
    faults = []
    for kind in kinds:
        row = [next(cells) for _ in columns]
        if any(row):
            texts = ["" if cell is None else str(cell) for cell in row]
            print(f"{kind:{width}}", *(f"{text:>9}" for text in texts), flush=True)
        for column, cell in zip(columns, row, strict=True):
            faults += [f"{kind}, {column}: {fault}" for fault in (cell.faults if cell else ())]
    print(*faults, sep="\n", end="\n\n" if faults else "\n")
    return not faults


def _cells(backend: dispatch.Backend, tasks: Sequence[tuple[str, Column]]) -> Iterator[Cell | None]:
    """The cells of kinds and columns, in order."""
    workers = processes_for(backend)
    if not workers:
        yield from (check_kind(backend.name, *task) for task in tasks)
        return
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawned) as pool:
        for future in [pool.submit(check_kind, backend.name, *task) for task in tasks]:
            try:
                yield future.result()
            except BrokenProcessPool as error:
                yield Cell(math.inf, [str(error)])


def check_kind(name: str, kind: str, column: Column) -> Cell | None:
    """Judges the cases of one kind on a backend; None if there are none in that dtype."""
    (backend,) = (b for b in dispatch.BACKENDS if b.name == name)
    with torch.random.fork_rng([]), _settings(column), dispatch.use_backend(name):
        torch.manual_seed(SEED)
        found = cases(column.dtype).get(kind)
        if found is None:
            return None
        cells = [_check(_moved(case, device_of(backend)), column) for case in found]
    return Cell(max(c.share for c in cells), [f for c in cells for f in c.faults])


def _check(case: Case, column: Column) -> Cell:
    most = 0 if column.dtype in HALF or column.tf32 else MOST_KINKS
    try:
        inputs = [oracle.off_kinks(case.plain, case.inputs, most=most)] * DRAWS
        results, judgements = oracle.compare(case.fused, case.plain, inputs, tf32=column.tf32)
        again = oracle.evaluate(case.fused, inputs[0], seed=0)
    except Exception as error:  # of a kernel or a compiler: the others are checked nevertheless
        message = str(error).strip().partition("\n")[0]
        return Cell(math.inf, [f"{case.name}: {type(error).__name__}: {message}"])
    faults = [j.fault for j in judgements.values() if j.fault]
    faults += [
        f"{name}: two runs gave different bits"
        for name, t in results.items()
        if t is not None and not oracle.same_bits(t, again[name])
    ]
    share = max(math.inf if math.isnan(j.share) else j.share for j in judgements.values())
    return Cell(share, [f"{case.name}: {fault}" for fault in faults])


def _moved(case: Case, device: torch.device) -> Case:
    def moved(function: Any) -> Any:
        return function.to(device) if isinstance(function, nn.Module) else function

    inputs = {name: t.to(device) for name, t in case.inputs.items()}
    return case._replace(fused=moved(case.fused), plain=moved(case.plain), inputs=inputs)


@contextlib.contextmanager
def _settings(column: Column) -> Iterator[None]:
    """Lets convolutions round to TF32 or not; makes PyTorch's repeat their bits; hides warnings."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = column.tf32, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before
