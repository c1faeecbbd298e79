"""Builds, tests and measures on a GPU machine: `python -m bench.gpu_report FOLDER`.

Uses the installed Python with torch, pytest and the packages of the benchmarks, and no internet
connection. The packages in `PACKAGES`, which `make gpu-packages` writes, are unpacked into a
temporary folder, without those that this Python has. First builds the libraries, unless they were
built from the same sources. Then runs the parts in `parts_of`: those that measure nothing all at
once, then those that measure one by one, the most important first. If a part fails or runs out of
time, the next one starts. `--parts` chooses.

FOLDER gets `summary.txt` (one line per part), `log.txt` (output of the parts) and the CSV files of
the benchmarks, all written when a part ends or before. For tables and plots, copy the CSV files to
bench/results/ and run `make report`.

Without a GPU this is a dry run without the parts that need one.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench import dry_run, gpu_networks, measure
from bench.measure import ROOT, commit
from bench.records import LAUNCHES, slug

LIBRARIES = CPU_LIBRARY, CUDA_LIBRARY = [
    ROOT / "preact_kernels" / name for name in ("_cpu.so", "_cuda.so")
]
PACKAGES = ROOT / "build" / "gpu-packages.tar.xz"
COMPILER_CACHE = ROOT / "build" / "compiler-cache"  # kept for the next report
TEST_SHARE = 0.25  # share of the time limit for the parts that measure nothing
GRACE_SECONDS = 20  # between interrupting and killing a part
LEAST_SECONDS = 30  # least time left to start a part that measures
# Tests of a GPU: first those newer than 5714f0f, which no GPU has run yet, the newest first.
TESTS = (
    "kernels/test_cuda_resident_run.py",  # before resident runs are measured
    "ops/test_small_volumes.py",
    "kernels/test_triton_activations.py",
    "kernels/test_norm_act_residual.py",
    "convert",
    "stage/test_changes.py",
    "ops/test_norms.py",
    "ops/test_activations.py",
    "ops/test_arguments_of_ops.py",
    "kernels/test_any_norm_act.py",
    "behaviour/test_writes_to_results.py",
    "behaviour/test_counted_batches.py",
    "kernels/test_cuda_fragments.py",
    "kernels",
    "stage",
    "ops",
    "behaviour",
)
WITHOUT_GPU = ("kernels/test_cuda_on_host.py", "kernels/test_cuda_build.py")
NETWORKS = list(gpu_networks.CASES)
FIRST_NETWORKS = 5  # measured before resident runs


@dataclasses.dataclass(frozen=True)
class Part:
    """A command of the report."""

    name: str
    command: list[str]  # arguments of the program
    seconds: float  # limit
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    needs_gpu: bool = False
    at_once: bool = False  # measures nothing: runs at the same time as others of this kind
    program: str = sys.executable


def test_files() -> list[str]:
    """Returns the files of `TESTS` in this order: pytest sorts the files of a folder."""
    paths: dict[Path, None] = {}
    for name in TESTS:
        path = ROOT / "tests" / name
        paths |= dict.fromkeys(sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
    names = [str(path.relative_to(ROOT)) for path in paths]
    return [name for name in names if name.removeprefix("tests/") not in WITHOUT_GPU]


def tests(seconds: float) -> Part:
    """Returns a part for the quick tests, in parallel if pytest-xdist is there.

    On a GPU, tests of the CPU backend are left out.
    """
    command = ["-m", "pytest", "-v", "-rfEs", "--tb=short", "--maxfail=100"]
    command += ["-p", "no:cacheprovider", "-m", "not slow"]
    if torch.cuda.is_available():
        command += ["-k", "not cpu"]
    if importlib.util.find_spec("xdist"):
        count = max(1, min(8, (os.cpu_count() or 1) // 2))  # other parts run too
        command += ["-n", str(count), "--max-worker-restart", str(4 * count)]
    command += test_files()
    return Part("tests", command, seconds, at_once=True)


def parts_of(folder: Path, options: Sequence[str], test_seconds: float) -> list[Part]:
    """Returns the parts of a report, the most important first.

    Args:
        folder: folder of the files.
        options: options of `python -m bench`.
        test_seconds: time limit for the parts that measure nothing, all together.
    """
    out, has_gpu = ["--out", str(folder)], torch.cuda.is_available()
    bench = ["-m", "bench", *out, "--no-plots", *options]
    captured = [*bench, "--networks", "resnet-1001", "--batch", "128"]
    captured += ["--contenders", "fused-store", "fused-graph"]
    csv = str(folder / f"{slug(measure.device_name(measure.default_device()))}{LAUNCHES}")
    launches = ["-m", "bench.launches", "--csv", csv, "--backend"]
    profiled = {"TEARDOWN_CUPTI": "0"}  # CUDA graphs may crash after CUPTI's teardown
    ended = {"PYTHONWARNINGS": "ignore:resource_tracker"}  # about processes that ran out of time
    memcheck = ["check-gpu", "SANITIZERS=memcheck", f"PYTHON={sys.executable}"]
    memcheck += [f"SANITIZER_SECONDS={max(1, int(test_seconds) - 10)}"]  # it interrupts the tests
    at_once = {"seconds": test_seconds, "at_once": True}
    backends = ["--backends", "cuda", "triton"] if has_gpu else []
    dtype = "bf16" if has_gpu else "fp32"
    memory = ["-m", "bench.memory", *out, "--gpu-networks", "--dtype", dtype, "--steps", "10"]
    memory += ["--cache", str(COMPILER_CACHE), "--models"]
    ops = ["-m", "pytest", "bench/ops.py", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    parts = [
        Part("check", ["-m", "preact_kernels", "check", *backends], **at_once),
        tests(test_seconds),
        # Records the launches of the CUDA library.
        Part("host-library", ["-m", "testbed.cuda_on_host.build"], **at_once),
        Part("compile", [*memory, *NETWORKS, "--compile-only"], needs_gpu=True, **at_once),
        Part("memcheck", memcheck, program="make", needs_gpu=True, **at_once),
        Part("networks", [*memory, *NETWORKS[:FIRST_NETWORKS]], 250, ended),
        Part("bench-captured", captured, 60, needs_gpu=True),
        Part(
            "bench-resident",
            captured,
            60,
            {"PREACT_KERNELS_RESIDENT_RUNS": "1"},
            needs_gpu=True,
        ),
        Part("more-networks", [*memory, *NETWORKS[FIRST_NETWORKS:]], 230, ended),
        Part("host", ["-m", "bench.host", "--profile", "25"], 60),
        Part("ceilings", ["-m", "bench.probes", *out], 45, needs_gpu=True),
        Part(
            "kernels",
            ["-m", "bench.kernels", *out, "--seconds", "230"],
            240,
            profiled,
            needs_gpu=True,
        ),
        Part("bench", bench, 160),
        Part("launches-cuda", [*launches, "cuda"], 60, profiled),
        Part("launches-triton", [*launches, "triton", "--no-instructions"], 60, profiled),
        Part("bench-triton", captured, 60, {"PREACT_KERNELS_BACKEND": "triton"}, needs_gpu=True),
        Part("ops", [*ops, f"--bench-out={folder}"], 60),
    ]
    return [part for part in parts if has_gpu or not part.needs_gpu]


def remove_installed(folder: Path) -> None:
    """Deletes the packages in a folder that this Python has: others may need its versions."""
    for package in importlib.metadata.distributions(path=[str(folder)]):
        try:
            importlib.metadata.distribution(package.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for name in {path.parts[0] for path in package.files or ()} - {".."}:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def with_packages() -> Iterator[None]:
    """Lets the parts import the packages of `PACKAGES`, if it is there."""
    with tempfile.TemporaryDirectory() as folder:
        if PACKAGES.exists():
            with tarfile.open(PACKAGES) as archive:
                archive.extractall(folder, filter="data")
            remove_installed(Path(folder))
            paths = filter(None, [os.environ.get("PYTHONPATH"), folder])
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        yield


def is_built() -> bool:
    """Whether the libraries are there, and the CUDA library was built from these sources."""
    return all(path.exists() for path in LIBRARIES) and not dry_run.is_stale(CUDA_LIBRARY)


class Report:
    """Runs parts within a time limit and writes their files.

    Args:
        folder: folder of the files; created if missing.
        seconds: time limit of the whole run.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.end_s = folder, time.monotonic() + seconds
        self.has_failed = False
        self._lock = threading.Lock()  # for the files
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("summary.txt", "log.txt"):
            (folder / name).write_text("")

    def note(self, part: str, words: str) -> None:
        """Prints a line and adds it to the summary."""
        print(f"{part}: {words}", flush=True)
        with self._lock, (self.folder / "summary.txt").open("a") as summary:
            summary.write(f"{part}: {words}\n")

    def run_together(self, parts: Sequence[Part]) -> None:
        """Runs parts at the same time."""
        measure.accept_interrupts()  # threads cannot
        with concurrent.futures.ThreadPoolExecutor(max(1, len(parts))) as pool:
            list(pool.map(self.run, parts))

    def run(self, part: Part) -> None:
        """Runs a part, with its output in the log."""
        left_s = self.end_s - time.monotonic() - GRACE_SECONDS
        seconds = min(left_s, part.seconds)
        if seconds < (1 if part.at_once else LEAST_SECONDS):
            self.note(part.name, "no time left")
            return
        command = [part.program, *part.command]
        if part.command[:2] in (["-m", "bench"], ["-m", "bench.memory"]):
            command += ["--time-limit", str(int(seconds - 10))]
        scripts = os.path.dirname(sys.executable)  # contains ninja in a virtual environment
        search = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PATH": search, **part.environment}
        environment["TQDM_MININTERVAL"] = "5"  # seconds between states of a progress bar in the log
        if part.at_once:
            environment["OMP_NUM_THREADS"] = "1"  # the parts share the processor
        print(f"{part.name}: {seconds:.0f} s at most", flush=True)
        start_s = time.monotonic()
        path = self.folder / f"{slug(part.name)}.partial"
        with path.open("w+b", buffering=0) as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment}
            status = measure.run_process(command, seconds, GRACE_SECONDS, **options)
            log.seek(0)
            output = log.read()
        path.unlink()
        with self._lock, (self.folder / "log.txt").open("ab") as all_output:
            head = f"\n=== {part.name}: {' '.join(command)}\n"
            all_output.write(head.encode() + output)
        lines = re.split(r"[\r\n]+", output.decode(errors="replace").strip())
        counts = [line for line in lines if re.search(r"\d (passed|failed)", line)]  # from pytest
        last = [*lines, *counts[-1:]][-1].strip("= ")[-200:]
        if re.search(r"\(exit status (124|137)\)", last):  # `timeout` in the Makefile
            status = None
        how = "out of time" if status is None else "ok" if not status else f"exit status {status}"
        self.note(part.name, f"{how} after {time.monotonic() - start_s:.0f} s: {last}")
        self.has_failed |= bool(status) or bool(re.search(r"\d failed", last))


def main(given: Sequence[str] | None = None) -> int:
    """Runs every part; returns 1 if one failed."""
    parser = measure.parser("bench.gpu_report", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="folder of the files")
    add("--seconds", type=int, default=520, help="time limit for everything (520)")
    add("--parts", nargs="+", metavar="NAME", help="parts to run (all)")
    a, options = parser.parse_known_args(given)  # options: for `python -m bench`
    folder = a.folder.resolve()
    parts = parts_of(folder, options, TEST_SHARE * a.seconds)
    if a.parts:
        names = [part.name for part in parts]
        if unknown := set(a.parts) - set(names):
            wanted, got = ", ".join(names), ", ".join(sorted(unknown))
            parser.error(f"--parts: expected some of {wanted}, got {got}")
        parts = [part for part in parts if part.name in a.parts]
    report = Report(folder, a.seconds)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    report.note("sources", f"{commit()} on {name}")
    if is_built():
        report.note("build", "not needed: the libraries were built from these sources")
    else:
        report.run(Part("build", ["setup.py", "-q", "build_ext", "--inplace"], 180))
    with with_packages():
        report.run_together([part for part in parts if part.at_once])
        for part in parts:
            if not part.at_once:
                report.run(part)
    for path in folder.glob("*.partial"):  # a killed process leaves them
        path.unlink()
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
