"""Ceilings of a GPU: `python -m bench.probes --out FOLDER`.

Measures copy bandwidth, matrix rates and the time of a launch of a kernel that depends on the
previous one (bench/probes.cu) in a CUDA graph, plain and with programmatic dependent launch. Its
thread blocks have the threads, registers and shared memory of a convolution in csrc/cuda, and wait
like it for the launch ahead before they let the next one begin.

Needs nvcc and a GPU of compute capability 9.0 or later. Prints a table and writes
`*-ceilings.csv`.
"""

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import measure, records
from bench.records import CEILINGS, CeilingRow, number, put, slug
from testbed.cuda_programs import nvcc

SOURCE = measure.ROOT / "bench" / "probes.cu"
FOLDER = measure.ROOT / "build" / "probes"
LAUNCHES = 1000


def build(architecture: str) -> Path:
    """Builds the library of the probe, for example for `"sm_90"`; returns its path.

    Raises:
        RuntimeError: it does not compile, or there is no nvcc.
    """
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc was not found")
    FOLDER.mkdir(parents=True, exist_ok=True)
    library = FOLDER / f"probes-{architecture}.so"
    flags = ["-O3", "-std=c++17", f"-arch={architecture}", "-shared", "-Xcompiler=-fPIC,-Wall"]
    command = [compiler, *flags, "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stderr}")
    return library


def chain_us(library: ctypes.CDLL, thread_blocks: int, is_dependent: bool) -> float:
    """Times a launch of the probe in a CUDA graph.

    Raises:
        RuntimeError: a launch failed, or a kernel did not wait for the one ahead.
    """
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    library.launch_chain.restype = ctypes.c_char_p

    def launch() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointer = ctypes.c_void_p(count.data_ptr())
        error = library.launch_chain(stream, thread_blocks, ctypes.c_bool(is_dependent), pointer)
        if error:
            raise RuntimeError(error.decode())

    graph, _ = measure.captured(lambda: [launch() for _ in range(LAUNCHES)])
    us = 1e3 * measure.best_ms(graph.replay, torch.device("cuda")) / LAUNCHES
    count.zero_()
    graph.replay()
    if count.item() != LAUNCHES:
        raise RuntimeError("a kernel did not wait for the one ahead")
    return us


def rows(device: torch.device) -> list[CeilingRow]:
    """Measures the ceilings that need no compiler."""
    ceilings = measure.measure_ceilings(device)
    rates = ceilings.matmul_gflop_s.items()
    return [
        CeilingRow("copy", "GB/s", ceilings.copy_gb_s),
        *(CeilingRow(f"matrix product, {name}", "GFLOP/s", rate) for name, rate in rates),
    ]


def chain_rows(device: torch.device) -> list[CeilingRow]:
    """Measures launches of the probe."""
    properties = torch.cuda.get_device_properties(device)
    library = ctypes.CDLL(str(build(f"sm_{properties.major}{properties.minor}")))
    return [
        CeilingRow(
            f"{'dependent' if is_dependent else 'plain'} launch in a graph, {text}",
            "us",
            chain_us(library, thread_blocks, is_dependent),
        )
        for thread_blocks, text in (
            (1, "one block"),
            (properties.multi_processor_count, "one block a multiprocessor"),
        )
        for is_dependent in (False, True)
    ]


def table(found: Sequence[CeilingRow]) -> str:
    """Formats a line per ceiling."""
    lines = [
        {"ceiling": r.name, "measured": number(r.value, ",.2f"), "unit": r.unit} for r in found
    ]
    return records.table(lines)


def main(given: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    a = measure.parser("bench.probes", __doc__, "--out").parse_args(given)
    if not torch.cuda.is_available():
        sys.exit("bench.probes: no GPU")
    device = torch.device("cuda")
    machine = measure.Machine.of(device)
    path = a.out / f"{slug(machine.device)}{CEILINGS}"
    path.unlink(missing_ok=True)
    for measured in (rows, chain_rows):
        try:
            found = measured(device)
        except (OSError, RuntimeError) as error:
            sys.exit(f"bench.probes: {error}")
        put(path, *map(machine.stamp, found))
        print(table(found), flush=True)


if __name__ == "__main__":
    main()
