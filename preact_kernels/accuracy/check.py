"""Checks the kernels of a backend against float64, for `python -m preact_kernels check`."""

import concurrent.futures
import contextlib
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preact_kernels.accuracy import oracle
from preact_kernels.accuracy.cases import KINDS, Case, Column
from preact_kernels.ops import dispatch

DRAWS = 3  # problems per case
MOST_KINKS = 200_000  # `most` of `oracle.off_kinks`
SECONDS = 300  # timeout of the process for one kind of case
# Limits for the relative error of plain PyTorch itself, about ten times the usual error.
MOST_EAGER_ERROR = {
    torch.float64: 1e-11,
    torch.float32: 1e-4,
    torch.float16: 0.05,
    torch.bfloat16: 0.15,
}
MOST_TF32_ERROR = 0.05


class Cell(NamedTuple):
    """Result of one kind of case in one dtype."""

    share: float  # the largest error / the allowed error
    faults: list[str]

    def __str__(self) -> str:
        if not self.faults:
            return f"{self.share:.2f}"
        return f"MISS {self.share:.4g}" if 1 < self.share < math.inf else "MISS"


def backend_of(name: str) -> dispatch.Backend:
    """The backend with this name."""
    (backend,) = (b for b in dispatch.BACKENDS if b.name == name)
    return backend


def device_of(backend: dispatch.Backend) -> torch.device:
    """The device on which to check a backend."""
    if backend.device_types:
        return torch.device(backend.device_types[0])
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def columns_of(backend: dispatch.Backend) -> list[Column]:
    """The columns for a backend: its dtypes, and TF32 on a GPU."""
    device_type = device_of(backend).type
    found = [Column(dtype, device_type=device_type) for dtype in backend.dtypes]
    if device_type == "cuda":
        found.insert(1, Column(torch.float32, True, device_type))
    return found


def check_backend(backend: dispatch.Backend, columns: Sequence[Column]) -> bool:
    """Prints a table with a row for each kind of case. Returns whether all results are right."""
    width = max(map(len, KINDS))
    print(f"{backend.name:{width}}", *(f"{column!s:>9}" for column in columns), flush=True)
    is_right = True
    for kind, row in zip(KINDS, _rows(backend, columns), strict=True):
        if not any(row):
            continue
        texts = ["" if cell is None else str(cell) for cell in row]
        print(f"{kind:{width}}", *(f"{text:>9}" for text in texts), flush=True)
        for column, cell in zip(columns, row, strict=True):
            for fault in cell.faults if cell else ():
                is_right = False
                print(f"  {column}: {fault}", flush=True)
    print()
    return is_right


def _rows(backend: dispatch.Backend, columns: Sequence[Column]) -> Iterator[list[Cell | None]]:
    """The cells of each kind of case.

    On a GPU each kind runs in its own process, since an error of a kernel makes later CUDA calls of
    the process fail. Several processes run at a time: Triton compiles some hundred kernels.
    """
    if device_of(backend).type == "cpu":
        for kind in KINDS:
            yield [check_kind(backend.name, kind, column) for column in columns]
        return
    gib = torch.cuda.get_device_properties(device_of(backend)).total_memory / 2**30
    workers = max(1, min(8, len(os.sched_getaffinity(0)), int(gib / 2)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            yield from pool.map(lambda kind: run_process(backend.name, kind, columns), KINDS)
        finally:
            pool.shutdown(cancel_futures=True)


def run_process(name: str, kind: str, columns: Sequence[Column]) -> list[Cell | None]:
    """Checks one kind of case in its own process."""
    package = Path(__file__).parents[2]
    program = (
        f"import sys; sys.path.append({str(package)!r}); "
        f"from {__name__} import main; main(*sys.argv[1:])"
    )
    command = [sys.executable, "-X", "faulthandler", "-c", program, name, kind, *map(str, columns)]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [Cell(math.inf, [f"no result within {SECONDS} s"])] * len(columns)
    if process.returncode:
        lines = (process.stderr.strip() or "no output").splitlines()
        line = lines[0 if process.returncode < 0 else -1]  # by faulthandler, or of a traceback
        fault = f"the process exited with status {process.returncode}: {line}"
        return [Cell(math.inf, [fault])] * len(columns)
    cells = json.loads(process.stdout.splitlines()[-1])
    return [None if cell is None else Cell(*cell) for cell in cells]


def main(name: str, kind: str, *chosen: str) -> None:
    """Prints the cells of one kind of case for the chosen columns as JSON."""
    backend = backend_of(name)
    columns = {str(column): column for column in columns_of(backend)}
    print(json.dumps([check_kind(name, kind, columns[text]) for text in chosen]))


def check_kind(name: str, kind: str, column: Column) -> Cell | None:
    """Checks the cases of one kind on a backend; None if there are none for the column."""
    device = device_of(backend_of(name))
    with torch.random.fork_rng([]), _settings(column), dispatch.use_backend(name):
        torch.manual_seed(0)
        cells = [_check(case, device, column) for case in KINDS[kind](column)]
    if not cells:
        return None
    return Cell(max(c.share for c in cells), [f for c in cells for f in c.faults])


def _check(case: Case, device: torch.device, column: Column) -> Cell:
    try:
        case = case.to(device)
        problems = [_problem(case, index, column) for index in range(DRAWS)]
        comparison = oracle.compare(case.fused, case.plain, problems, column.tf32, True)
        again = [oracle.evaluate(case.fused, p, seed=seed) for seed, p in enumerate(problems)]
    except Exception as error:  # kernel and compiler errors must not stop the other cases
        message = str(error).strip().partition("\n")[0]
        return Cell(math.inf, [f"{case.name}: {type(error).__name__}: {message}"])
    judgements = [*comparison.judgements.values(), *comparison.elements.values()]
    faults = [j.fault for j in judgements if j.fault]
    most = MOST_TF32_ERROR if column.tf32 else MOST_EAGER_ERROR[column.dtype]
    if not comparison.eager_error <= most:
        faults.append(f"plain PyTorch itself has a relative error of {comparison.eager_error:.3g}")
    changed = {
        name
        for first, second in zip(comparison.runs, again, strict=True)
        for name, t in first.items()
        if t is not None and (second[name] is None or not oracle.same_bits(t, second[name]))
    }
    faults += [f"{name}: two runs gave different bits" for name in sorted(changed)]
    share = max(math.inf if math.isnan(j.share) else j.share for j in judgements)
    return Cell(share, [f"{case.name}: {fault}" for fault in faults])


def _problem(case: Case, index: int, column: Column) -> oracle.Inputs:
    """Inputs of a case with random signs of `x`; every second `x` is stored in NHWC."""
    x = case.inputs["x"]
    x = x * (torch.randint(2, x.shape) * 2 - 1).to(x)
    most = 0 if column.is_coarse else MOST_KINKS
    inputs = oracle.off_kinks(case.plain, {**case.inputs, "x": x}, most=most)
    if index % 2 and x.dim() == 4:
        nhwc: Tensor = inputs["x"].contiguous(memory_format=torch.channels_last)
        inputs = {**inputs, "x": nhwc}
    return inputs


@contextlib.contextmanager
def _settings(column: Column) -> Iterator[None]:
    """Sets TF32 as the column says, fills new tensors with NaN, and hides warnings.

    Makes PyTorch's operations deterministic.
    """
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    deterministic: Any = torch.utils.deterministic
    precision = conv.fp32_precision
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = deterministic.fill_uninitialized_memory
    conv.fp32_precision = "tf32" if column.tf32 else "ieee"
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        conv.fp32_precision = precision
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warns_only)
        deterministic.fill_uninitialized_memory = was_filling
