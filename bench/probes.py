"""Ceilings of a GPU: `python -m bench.probes --out FOLDER`.

Measures copy bandwidth, matrix rates and the time of a launch. bench/probes.cu measures whether the
blocks of a stage could stay on their multiprocessors:

- a barrier of a grid with one block on every multiprocessor, alone, and with a merge of statistics:
  every block adds integers for 2 values of 64 channels, and reads the sums after the barrier;
- a launch that depends on the previous one, in a CUDA graph: plain, and with programmatic dependent
  launch. Blocks have the threads, registers and shared memory of a convolution in csrc/cuda, and
  like it wait for the launch ahead before they let the next one begin.

Needs nvcc and a GPU of compute capability 9.0 or later. Prints a table and writes
`*-ceilings.csv`. The row of a probe that fails has the reason.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench import measure, records
from bench.records import CEILINGS, CeilingRow, number, put, slug

SOURCE = measure.ROOT / "bench" / "probes.cu"
FOLDER = measure.ROOT / "build" / "probes"
BARRIERS, LAUNCHES = 2000, 1000
VALUES = 2 * 64  # kValues in the source
MERGED_WORDS = (1, 6)  # integers per value: one, or as many as an exact sum of float32 needs


def nvcc() -> str:
    """Returns the path of nvcc.

    Raises:
        RuntimeError: nvcc is not found.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if found is None:
        raise RuntimeError(f"expected nvcc in PATH or in {home}/bin, found none")
    return found


def build(architecture: str) -> Path:
    """Builds the library of the probes, for example for `"sm_90"`; returns its path.

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
    """Times the kernels of a library on the current GPU, in us; RuntimeError: one failed."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.device = torch.device("cuda")
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def _zeros(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def _launch(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        pointers = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments
        ]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = function(stream, *pointers)
        if error:
            raise RuntimeError(error.decode())

    def barrier_us(self, words: int) -> float:
        """Times a grid barrier; with `words`, also the merge of that many integers per value."""
        arrived, wrong = self._zeros(1), self._zeros(1)
        sums = self._zeros(max(1, BARRIERS * words * VALUES), torch.int64)

        def run() -> None:
            arrived.zero_()
            sums.zero_()
            counts = self.multiprocessors, BARRIERS, words
            self._launch("launch_barrier", *counts, arrived, sums, wrong)

        us = 1e3 * measure.best_ms(run, self.device) / BARRIERS
        if wrong.item():
            raise RuntimeError("a block left the barrier before all had come")
        return us

    def launch_us(self, blocks: int, is_dependent: bool) -> float:
        """Times a launch in a CUDA graph."""
        number = self._zeros(1)
        what = "launch_chain", blocks, ctypes.c_bool(is_dependent), number
        graph, _ = measure.captured(lambda: [self._launch(*what) for _ in range(LAUNCHES)])
        us = 1e3 * measure.best_ms(graph.replay, self.device) / LAUNCHES
        number.zero_()
        graph.replay()
        if number.item() != LAUNCHES:
            raise RuntimeError("a kernel did not wait for the one ahead")
        return us

    def by_name(self) -> dict[str, Callable[[], float]]:
        """Returns the probes by name."""
        found = {"grid barrier": functools.partial(self.barrier_us, 0)}
        for words in MERGED_WORDS:
            name = f"grid barrier, {words} word{'s' * (words > 1)} a value merged"
            found[name] = functools.partial(self.barrier_us, words)
        for blocks, text in (
            (1, "one block"),
            (self.multiprocessors, "one block a multiprocessor"),
        ):
            for is_dependent, kind in ((False, "plain"), (True, "dependent")):
                probe = functools.partial(self.launch_us, blocks, is_dependent)
                found[f"{kind} launch in a graph, {text}"] = probe
        return found


def launch_us(device: torch.device, in_graph: bool = False) -> float:
    """Times PyTorch's smallest kernel, launched one by one or in a CUDA graph."""
    value = torch.zeros(1, device=device)

    def calls() -> None:
        for _ in range(LAUNCHES):
            value.add_(1)

    run = measure.captured(calls)[0].replay if in_graph else calls
    return 1e3 * measure.best_ms(run, device) / LAUNCHES


def row_of(name: str, probe: Callable[[], float]) -> CeilingRow:
    """Runs a probe; returns its row, with the error if it fails."""
    try:
        return CeilingRow(name, "us", probe())
    except RuntimeError as error:
        return CeilingRow(name, "us", note=str(error).splitlines()[0])


def table(rows: Sequence[CeilingRow], form: str = "simple") -> str:
    """Formats a line per ceiling, with the reason if a probe failed."""
    lines = [
        {"ceiling": r.name, "measured": number(r.value, ",.2f") or r.note, "unit": r.unit}
        for r in rows
    ]
    return records.table(lines, form)


def main(given: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 if a probe failed."""
    a = measure.parser("bench.probes", __doc__, "--out").parse_args(given)
    if not torch.cuda.is_available():
        sys.exit("bench.probes: no GPU")
    device = torch.device("cuda")
    machine, ceilings = measure.Machine.of(device), measure.measure_ceilings(device)
    path = a.out / f"{slug(machine.device)}{CEILINGS}"
    path.unlink(missing_ok=True)
    rows = [
        CeilingRow("copy", "GB/s", ceilings.copy_gb_s),
        *(
            CeilingRow(f"matrix product, {name}", "GFLOP/s", rate)
            for name, rate in ceilings.matmul_gflop_s.items()
        ),
        CeilingRow("launch by PyTorch", "us", launch_us(device)),
        CeilingRow("launch by PyTorch in a graph", "us", launch_us(device, in_graph=True)),
    ]
    put(path, *map(machine.stamp, rows))
    try:
        probes = Probes(build("sm_{}{}".format(*torch.cuda.get_device_capability(device))))
    except (OSError, RuntimeError) as error:
        sys.exit(f"bench.probes: {error}")
    for name, probe in probes.by_name().items():
        rows.append(row_of(name, probe))
        put(path, machine.stamp(rows[-1]))
    print(table(rows))
    return int(any(r.value is None for r in rows))


if __name__ == "__main__":
    sys.exit(main())
