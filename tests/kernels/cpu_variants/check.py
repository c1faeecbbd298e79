"""Runs tests of the CPU kernels on variants of the library, each instrumented by a sanitizer.

    python -m tests.kernels.cpu_variants.check

The planted faults come first: a sanitizer that does not report them fails.
"""

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kernels import host_compiler
from tests.kernels.cpu_variants.build import HERE, ISAS, build
from tests.kernels.each_instruction_set import TESTS
from tests.kernels.host_compiler import ROOT

PLANTED = {"address": "planted_accesses.py", "thread": "planted_races.py"}
# The runtime of a sanitizer, the variable of its options, and those.
RUNTIMES = {
    "address": (
        "libasan.so",
        "ASAN_OPTIONS",
        "halt_on_error=0:suppress_equal_pcs=0:detect_leaks=0",
    ),
    "thread": ("libtsan.so", "TSAN_OPTIONS", "halt_on_error=0"),
}
OPTIONS = ["-v", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider"]
SELECTED = ["-m", "not slow", "-k", "cpu"]
PLUGIN = ["-p", "tests.kernels.cpu_variants.plugin"]


def files():
    """The tests of every instruction set."""
    return [f"tests/{file}.py::test_{name}" for file, names in TESTS.items() for name in names]


def check(variant: str, isa: str, library: Path) -> bool:
    """Whether the tests pass on a variant. Prints what pytest says: a line, or all of a failure."""
    start = time.perf_counter()
    runtime, variable, options = RUNTIMES[variant]
    reports = library.parent / "reports"
    for earlier in library.parent.glob("reports.*"):
        earlier.unlink()
    env = {
        **os.environ,
        **host_compiler.preloaded(runtime),
        variable: f"{options}:log_path={reports}",
        "PK_CPU_LIBRARY": str(library),
        "PK_REPORTS": str(reports),
        "PREACT_KERNELS_CPU_ISA": isa,
        "TRITON_INTERPRET": "0",
    }
    tests = [str((HERE / PLANTED[variant]).relative_to(ROOT)), *files()]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *SELECTED, *PLUGIN, *tests],
        cwd=ROOT,
        env=env,
        preexec_fn=_keep_addresses,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = process.stdout.splitlines()
    if process.returncode == 0:
        lines = [lines[-1].strip("= ")]
    elif process.returncode > 1:  # it ended within a test
        lines += [line for file in library.parent.glob("reports.*") for line in file.open()][-100:]
    seconds = time.perf_counter() - start
    print(f"{variant}, {isa}, {seconds:.0f} s:", "\n".join(lines), flush=True)
    return process.returncode == 0


def _keep_addresses() -> None:
    """Ends the randomisation of addresses, some of which ThreadSanitizer does not support."""
    ctypes.CDLL(None).personality(0x0040000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sanitizers = [*RUNTIMES]
    parser.add_argument("--sanitizers", nargs="+", default=sanitizers, choices=sanitizers)
    isa = "avx2" if platform.machine() == "x86_64" else "generic"
    parser.add_argument("--isa", default=isa, choices=ISAS)
    arguments = parser.parse_args()
    if shutil.which(host_compiler.CXX[0]) is None:
        sys.exit(f"no C++ compiler: {host_compiler.CXX[0]} not found")
    start = time.perf_counter()
    # Kernels of avx512_bf16 are those of avx512 but for products.
    isas = ["avx512", arguments.isa] if arguments.isa == "avx512_bf16" else [arguments.isa]
    libraries = [build([variant], isas) for variant in arguments.sanitizers]
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(check, variant, arguments.isa, library)
            for variant, library in zip(arguments.sanitizers, libraries, strict=True)
        ]
    sys.exit(not all(job.result() for job in jobs))


if __name__ == "__main__":
    main()
