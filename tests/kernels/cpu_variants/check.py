"""Runs tests of the CPU kernels on variants of the library, with sanitizers.

    python -m tests.kernels.cpu_variants.check address+undefined thread

The planted faults come first: a sanitizer that does not report its own fails.
"""

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from testbed import host_compiler
from testbed.host_compiler import ROOT
from tests.kernels.cpu_variants.build import EMULATED, HERE, ISAS, build, needed_isas
from tests.kernels.each_instruction_set import OF_PRODUCTS, SELECTED, TESTS


class Sanitizer(NamedTuple):
    runtime: str
    variable: str  # of its options
    options: str
    planted: str  # the test that it reports what is planted


SANITIZERS = {
    "address": Sanitizer(
        "libasan.so",
        "ASAN_OPTIONS",
        "halt_on_error=0:detect_leaks=0",
        "planted_accesses.py",
    ),
    "undefined": Sanitizer(
        "libubsan.so", "UBSAN_OPTIONS", "print_stacktrace=1", "planted_overflow.py"
    ),
    "thread": Sanitizer("libtsan.so", "TSAN_OPTIONS", "exitcode=0", "planted_races.py"),
}
RUNS = ["address+undefined+emulated", "thread"]

# Further tests for the sanitizers: memory modes, strides, empty and odd images.
MORE_TESTS = {
    "stage/test_preact_stage": (
        "equals_its_blocks_called_in_turn",
        "native_runs_of_blocks_give_the_bits_of_their_units",
    ),
    "stage/test_preact_block": ("tiny_images_and_an_empty_batch",),
    "ops/test_layout": (
        "strides_of_the_inputs_change_no_bit",
        "strides_of_the_weight_change_no_bit",
        "strides_of_the_incoming_gradient_change_no_bit",
    ),
    "ops/test_running_statistics": ("strided_vectors_serve_as_dense_ones_do",),
    "ops/test_bn_stats": ("any_number_of_samples",),
    "ops/test_norm_act": ("norms_and_running_statistics", "an_empty_batch_is_as_in_eager"),
    "ops/test_norm_act_conv": (
        "convolutions_and_running_statistics",
        "dropout_draws_the_random_numbers_of_pytorch",
        "an_empty_batch_is_as_in_eager",
    ),
}
OPTIONS = ["-v", "--capture=sys", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider"]
PLUGIN = ["-p", "tests.kernels.cpu_variants.plugin"]


def selected(isa: str) -> Iterator[tuple[str, str]]:
    """Files and names of tests. What is emulated has only products of convolutions."""
    for file, names in (TESTS if isa in EMULATED else TESTS | MORE_TESTS).items():
        if isa not in EMULATED or file in OF_PRODUCTS:
            yield from ((file, name) for name in names)


def check(variants: Sequence[str], isa: str, library: Path) -> bool:
    """Whether the tests pass on a library. Prints what pytest says: a line, or all of a failure."""
    start = time.perf_counter()
    sanitizers = [SANITIZERS[name] for name in variants if name in SANITIZERS]
    runtimes = [host_compiler.find_file(sanitizer.runtime) for sanitizer in sanitizers]
    reports = library.parent / "reports" / isa
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    env = {
        **os.environ,
        **host_compiler.preloaded(runtimes),
        **{sanitizer.variable: sanitizer.options for sanitizer in sanitizers},
        "PK_CPU_LIBRARY": str(library),
        "PK_RUNTIMES": " ".join(runtimes),
        "PK_REPORTS": str(reports),
        "PREACT_KERNELS_CPU_ISA": isa,
        "TRITON_INTERPRET": "0",
    }
    # AddressSanitizer's come last: see plugin.py.
    tests = [str(HERE / sanitizer.planted) for sanitizer in reversed(sanitizers)]
    if "address" in variants:
        tests.append(str(HERE / "damaged_calls.py"))
    tests += [f"tests/{file}.py::test_{name}" for file, name in selected(isa)]
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
    # A report that the plugin did not see is in the output.
    has_passed = process.returncode == 0 and "Sanitizer:" not in process.stdout
    if has_passed:
        lines = [lines[-1].strip("= ")]
    elif not lines or " in " not in lines[-1]:  # the process ended within a test
        lines += [line for file in reports.iterdir() for line in file.read_text().splitlines()]
    seconds = time.perf_counter() - start
    print(f"{'+'.join(variants)}, {isa}, {seconds:.0f} s:", "\n".join(lines), flush=True)
    return has_passed


def _keep_addresses() -> None:
    """Ends the randomisation of addresses, some of which ThreadSanitizer does not support."""
    ctypes.CDLL(None).personality(0x0040000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    is_x86 = platform.machine() == "x86_64"
    runs = RUNS if is_x86 else [run.replace("+emulated", "") for run in RUNS]
    parser.add_argument("runs", nargs="*", default=runs, help="variants joined by +")
    parser.add_argument("--isa", default="avx2" if is_x86 else "generic", choices=ISAS)
    arguments = parser.parse_args()
    if shutil.which(host_compiler.CXX[0]) is None:
        sys.exit(f"no C++ compiler: {host_compiler.CXX[0]} not found")
    start = time.perf_counter()
    checks = []
    for run in arguments.runs:
        names = run.split("+")
        isas = [arguments.isa, *(EMULATED[-1:] if "emulated" in names else ())]
        library = build(names, needed_isas(names, isas))
        checks += [(names, isa, library) for isa in dict.fromkeys(isas)]
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        have_passed = list(pool.map(lambda arguments: check(*arguments), checks))
    sys.exit(not all(have_passed))


if __name__ == "__main__":
    main()
