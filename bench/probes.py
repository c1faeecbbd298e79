"""Ceilings of a GPU: `python -m bench.probes --out FOLDER`.

Measures copy bandwidth, matrix rates, the time of a launch, and, by bench/probes.cu, what decides
whether the blocks of a stage can stay on their multiprocessors:

- a barrier of a grid with one block on every multiprocessor, alone, and with a merge of statistics:
  every block adds integers for 2 values of 64 channels, and reads the sums behind the barrier;
- a launch that depends on the one ahead, in a CUDA graph: plain, and by programmatic dependent
  launch.

Needs nvcc and a GPU of compute capability 9.0 or later. Prints a table and writes
`*-ceilings.csv`. A probe that fails leaves a row that says why.
"""

import argparse
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate

from bench import measure
from bench.records import CEILINGS, CeilingRow, Records, slug

SOURCE = measure.ROOT / "bench" / "probes.cu"
FOLDER = measure.ROOT / "build" / "probes"
BARRIERS, LAUNCHES = 2000, 1000
MERGED_WORDS = (1, 6)  # integers a value: one, and what an exact sum of float32 takes


def nvcc() -> str:
    """The compiler.

    Raises:
        RuntimeError: there is none.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if found is None:
        raise RuntimeError(f"expected nvcc in PATH or in {home}/bin, found none")
    return found


def build(architecture: str) -> Path:
    """The shared library of the probes, for example for `"sm_90"`.

    Raises:
        RuntimeError: it does not compile, or there is no nvcc.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:10]
    library = FOLDER / f"probes-{architecture}-{digest}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        flags = ["-O3", "-std=c++17", f"-arch={architecture}", "-shared", "-Xcompiler=-fPIC,-Wall"]
        command = [nvcc(), *flags, "-o", str(partial), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stderr}")
        os.replace(partial, library)
    return library


class Probes:
    """The functions of the library; times are in us."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def _call(self, name: str, *arguments: object) -> float:
        """The result of a probe.

        Raises:
            RuntimeError: it failed; the message is of the library.
        """
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        us = ctypes.c_double()
        error = function(*arguments, ctypes.byref(us))
        if error:
            raise RuntimeError(error.decode())
        return us.value

    def barrier_us(self, words: int) -> float:
        """A barrier of the grid; with `words`, also of merging so many integers a value."""
        return self._call("probe_barrier", BARRIERS, words)

    def launch_us(self, *, fills: bool, is_dependent: bool) -> float:
        """A launch in a CUDA graph, of one block or of one on every multiprocessor."""
        return self._call(
            "probe_launch", LAUNCHES, ctypes.c_bool(fills), ctypes.c_bool(is_dependent)
        )


class Ceiling(NamedTuple):
    """What is measured, and its unit."""

    name: str
    unit: str
    call: Callable[[], float]


def ceilings_of(probes: Probes) -> Iterator[Ceiling]:
    """The probes, by what they measure."""
    yield Ceiling("grid barrier", "us", lambda: probes.barrier_us(0))
    for words in MERGED_WORDS:
        name = f"grid barrier, {words} word{'s' * (words > 1)} a value merged"
        yield Ceiling(name, "us", functools.partial(probes.barrier_us, words))
    for fills in (False, True):
        of = "one block a multiprocessor" if fills else "one block"
        for is_dependent in (False, True):
            kind = "dependent launch" if is_dependent else "plain launch"
            call = functools.partial(probes.launch_us, fills=fills, is_dependent=is_dependent)
            yield Ceiling(f"{kind} in a graph, {of}", "us", call)


def row_of(ceiling: Ceiling) -> CeilingRow:
    """The row of a ceiling, with the error of a probe that fails."""
    try:
        return CeilingRow(ceiling.name, ceiling.unit, ceiling.call())
    except RuntimeError as error:
        return CeilingRow(ceiling.name, ceiling.unit, note=str(error).splitlines()[0])


def machine_rows(ceilings: measure.Ceilings) -> list[CeilingRow]:
    """The rows of what PyTorch measures."""
    rates = ceilings.matmul_gflop_s.items()
    return [
        CeilingRow("copy", "GB/s", ceilings.copy_gb_s),
        *(CeilingRow(f"matrix product, {name}", "GFLOP/s", rate) for name, rate in rates),
        CeilingRow("launch by PyTorch", "us", ceilings.launch_us),
        CeilingRow("launch by PyTorch in a graph", "us", ceilings.graph_launch_us),
    ]


def main(given: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 if a probe failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=measure.ROOT / "bench" / "out")
    a = parser.parse_args(given)
    if not torch.cuda.is_available():
        sys.exit("bench.probes: no GPU")
    device = torch.device("cuda")
    machine = measure.Machine.of(device)
    records = Records(a.out / f"{slug(machine.device)}{CEILINGS}", CeilingRow, keep=False)
    records.put(*map(machine.stamp, machine_rows(measure.measure_ceilings(device))))
    try:
        probes = Probes(build("sm_{}{}".format(*torch.cuda.get_device_capability(device))))
    except (OSError, RuntimeError) as error:
        sys.exit(f"bench.probes: {error}")
    for ceiling in ceilings_of(probes):
        records.put(machine.stamp(row_of(ceiling)))
    rows = list(records)
    lines = [[r.name, "" if r.value is None else f"{r.value:,.2f}", r.unit, r.note] for r in rows]
    print(tabulate(lines, ["ceiling", "measured", "unit", "note"], disable_numparse=True))
    return int(any(r.value is None for r in rows))


if __name__ == "__main__":
    sys.exit(main())
