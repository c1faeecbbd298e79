"""Builds, tests and measures on a GPU machine: `python -m bench.gpu_report FOLDER`.

Uses the installed Python with torch, pytest and the packages of the benchmarks, and no internet
connection. First builds the libraries, unless they were built from the same sources. Then runs the
parts in `parts_of`: those that compare results all at once, those that measure one by one, the most
important first. If a part fails or runs out of time, the next one starts. FOLDER gets `summary.txt`
(one line per part), `log.txt` (output of the parts, without the middle of long output),
`passed.txt` (tests that a later run leaves out) and the CSV files of the benchmarks, all written
when a part ends or before. For tables and plots, copy the CSV files to bench/results/ and run
`make report`.

Without a GPU this is a dry run without the parts that need one.
"""

import concurrent.futures
import dataclasses
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import measure
from bench.contenders import GROUPS
from bench.dry_run import BACKENDS
from bench.measure import ROOT, commit
from bench.records import LAUNCHES, slug

LIBRARIES = [str(ROOT / "preact_kernels" / name) for name in ("_cpu.so", "_cuda.so")]
LISTING = ROOT / "build" / "libraries.sha256"  # hashes of libraries and sources
PASSED = "passed.txt"  # names of tests that passed
KERNEL_TESTS = (
    "kernels/test_cuda_fragments",
    "kernels/test_cuda",
    "kernels/test_cuda_conv",
    "kernels/test_cuda_conv_runs",
    "stage/test_resnet_1001",
    "kernels/test_triton",
    "kernels/test_triton_sums",
    "kernels/test_float32_stream",
    "stage/test_graphs",
    "ops/test_bn_stats",
    "ops/test_bn_relu",
    "ops/test_bn_relu_conv",
    "ops/test_residual_add",
    "stage/test_preact_stage",
    "stage/test_memory_mode",
    "stage/test_preact_block",
    "ops/test_running_statistics",
    "behaviour/test_determinism",
    "stage/test_training",
)
"""Files of tests that run first, the most important first; then the others."""
WITHOUT_GPU = (
    "kernels/test_cuda_on_host",
    "kernels/test_cuda_build",
    "behaviour/test_versions",
    "behaviour/test_docs",
    "bench/test_models",
    "bench/test_networks",
    "bench/test_correctness",
    "bench/test_ops",
    "bench/test_report",
    "bench/test_gpu_report",
    "study/test_comparisons",
    "study/test_data",
    "study/test_plots",
    "behaviour/test_lost_gpu",
)
"""Tests that do not depend on a GPU."""
CONVERTED_MODELS = (
    "torchvision densenet121",
    "timm resnetv2_50",
    "WRN-28-10",
    "DenseNet-BC-100-12",
)
"""Models of `bench.converted`, the most important first."""
RIVALS = (
    "eager",
    "eager, channels_last",
    "checkpoint",
    "pk.convert, channels_last",
    "pk.convert, checkpoint, channels_last",
)
"""Contenders of `bench.rivals` that compile nothing."""
GRACE_SECONDS = 20  # between interrupting and killing a part
MIN_SECONDS = 120  # least time of a part without a limit, if it is left
LEAST_SECONDS = 30  # least time left to start a benchmark
LOG_BYTES = 2**20  # most output of a part in log.txt

LOAD = f"""
import sys
import torch
for path in {LIBRARIES!r}[: 2 if torch.version.cuda else 1]:
    torch.ops.load_library(path)
import preact_kernels as pk
print("torch", torch.__version__, "with the backends", *pk.available_backends())
sys.exit(torch.cuda.is_available() and "cuda" not in pk.available_backends())
"""
"""Loads both libraries, or one if torch has no CUDA; fails if a GPU lacks the backend `cuda`."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A command of the report."""

    name: str
    command: list[str]  # arguments of the program
    seconds: float  # limit
    reserved: float = 0  # seconds that earlier parts without a limit leave to it
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    needs_gpu: bool = False
    repeats: bool = False  # runs again in a resumed report
    compares: bool = False  # measures nothing: runs beside the others of this kind
    program: str = sys.executable


def tests(folder: Path, seconds: float) -> Part:
    """Returns a part for the quick tests, in parallel if pytest-xdist is there.

    Tests in `folder` / PASSED are left out, and on a GPU those of the CPU backend.
    """
    command = ["-m", "pytest", "-v", "-rfEs", "--tb=short", "--maxfail=100"]
    command += ["-p", "no:cacheprovider", "-m", "not slow"]
    command += ["-p", "bench.left_out", "--left-out", str(folder / PASSED)]
    if torch.cuda.is_available():
        command += ["-k", "not cpu"]
    if importlib.util.find_spec("xdist"):
        count = max(1, min(8, (os.cpu_count() or 1) // 2))  # beside other parts
        command += ["-n", str(count), "--max-worker-restart", str(4 * count)]
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    others = [str(p.relative_to(ROOT / "tests"))[:-3] for p in found]
    files = dict.fromkeys((*KERNEL_TESTS, *(n for n in others if n not in WITHOUT_GPU)))
    command += (f"tests/{file}.py" for file in files)
    return Part("tests", command, seconds, compares=True)


def parts_of(folder: Path, options: Sequence[str], test_seconds: float, resume: bool) -> list[Part]:
    """Returns the parts of a report, the most important first.

    Args:
        folder: folder of the files.
        options: options of `python -m bench`.
        test_seconds: time limit for the parts that compare results, all together.
        resume: keep the rows of an earlier report.
    """
    out, again = ["--out", str(folder)], ["--resume"] * resume
    bench = ["-m", "bench", *out, "--no-plots", *options]
    deepest = ["--networks", "resnet-1001", "--batch", "128", "--contenders"]
    profiled = {"TEARDOWN_CUPTI": "0"}  # CUDA graphs may crash after CUPTI's teardown
    has_gpu = torch.cuda.is_available()
    launches = str(folder / f"{slug(measure.device_name(measure.default_device()))}{LAUNCHES}")
    triton = [*deepest, "fused-store", "fused-graph", "fused-rebuild-graph"]
    gpu_backends = ["--backends", "cuda", "triton"] if has_gpu else []
    memcheck = ["check-gpu", "SANITIZERS=memcheck", f"PYTHON={sys.executable}"]
    memcheck += [f"SANITIZER_SECONDS={int(test_seconds) - 10}"]  # it interrupts the tests itself
    converted = ["bench.converted", "--no-graphs", *again, *out, "--models", *CONVERTED_MODELS]
    published = ["-m", "bench.rivals", *again, *out]
    shapes = ["-m", "bench.block_shapes", "--resume", *out]
    compiled_shapes = [
        *shapes,
        "--only-compile",
        "--compile",
        str(max(1, (os.cpu_count() or 1) // 3)),
    ]
    compared = {"seconds": test_seconds, "compares": True}
    parts = [
        Part("check", ["-m", "preact_kernels", "check", *gpu_backends], **compared),
        tests(folder, test_seconds),
        Part("memcheck", memcheck, program="make", needs_gpu=True, **compared),
        Part("compiled shapes", compiled_shapes, needs_gpu=True, **compared),
        Part("ceilings", ["-m", "bench.probes", *out], 60, needs_gpu=True),
        Part("first bench", [*bench, *again, *deepest, *GROUPS["uncompiled"]], 120, needs_gpu=True),
        *(
            Part(
                f"launches of {backend}",
                [*launches_of(backend), "--csv", launches],
                75,
                environment=profiled,
            )
            for backend in BACKENDS
        ),
        Part(
            "bench of triton",
            [*bench, *again, *triton],
            60,
            0,
            {"PREACT_KERNELS_BACKEND": "triton"},  # by default it is the CUDA library
            needs_gpu=True,
            repeats=True,
        ),
        Part("block shapes", [*shapes, "--seconds", "50"], 75, needs_gpu=True),
        Part("bench", [*bench, *(["--resume"] if has_gpu else again)], math.inf, repeats=True),
        Part("converted", ["-m", *converted], 60, 60),
        Part("rivals", [*published, "--dtype", "bf16", "--contenders", *RIVALS], 60),
        Part("hotspots", ["-m", "bench.hotspots"], 45, 45, profiled),
    ]
    return [part for part in parts if has_gpu or not part.needs_gpu]


def launches_of(backend: str) -> list[str]:
    """Returns a command that reads its recording, which is made where the libraries are built."""
    recording = str(ROOT / "build" / f"launches-{backend}.pickle")
    return ["-m", "bench.launches", "--backend", backend, "--recording", recording]


def listing() -> bytes:
    """Returns hashes of the libraries and of their sources."""
    sources = sorted(str(p) for p in (ROOT / "csrc").rglob("*") if p.is_file())
    paths = [*sources, ROOT / "setup.py", ROOT / "pyproject.toml", *LIBRARIES]
    names = [os.path.relpath(path, ROOT) for path in paths]
    return subprocess.run(["sha256sum", *names], cwd=ROOT, capture_output=True, check=False).stdout


def is_built() -> bool:
    """Whether the libraries load and, by `LISTING`, were built from these sources."""
    if not LISTING.exists() or LISTING.read_bytes() != listing():
        return False
    return measure.run_process([sys.executable, "-c", LOAD], 60, cwd=ROOT) == 0


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
        (folder / PASSED).touch()  # pytest reads it

    def note(self, part: str, words: str) -> None:
        """Prints a line and adds it to the summary."""
        print(f"{part}: {words}", flush=True)
        with self._lock, (self.folder / "summary.txt").open("a") as summary:
            summary.write(f"{part}: {words}\n")

    def _add(self, head: str, output: bytes) -> None:
        """Adds the output of a part to the log, without its middle."""
        if len(output) > LOG_BYTES:
            half = LOG_BYTES // 2
            output = output[:half] + b"\n... the middle is left out ...\n" + output[-half:]
        with self._lock, (self.folder / "log.txt").open("ab") as log:
            log.write(f"\n=== {head}\n".encode() + output)

    def run_together(self, parts: Sequence[Part]) -> dict[str, int | None]:
        """Runs parts beside each other; returns what `run` does, by name."""
        measure.accept_interrupts()  # threads cannot
        with concurrent.futures.ThreadPoolExecutor(max(1, len(parts))) as pool:
            return dict(zip((p.name for p in parts), pool.map(self.run, parts), strict=True))

    def run(self, part: Part, later: Sequence[Part] = ()) -> int | None:
        """Runs a part with its output in the log, and leaves time for the `later` parts.

        Returns:
            The exit status; None: no time to start or to finish.
        """
        left_s = self.end_s - time.monotonic() - GRACE_SECONDS
        free_s = max(left_s - sum(p.reserved for p in later), MIN_SECONDS)
        seconds = min(left_s, free_s if part.seconds == math.inf else part.seconds)
        is_bench = part.command[:2] == ["-m", "bench"]
        if seconds < (LEAST_SECONDS if is_bench else 1):
            self.note(part.name, "no time left")
            return None
        command = [part.program, *part.command]
        if is_bench:
            command += ["--time-limit", str(int(seconds - 10))]
        scripts = os.path.dirname(sys.executable)  # contains ninja in a virtual environment
        search = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PATH": search, **part.environment}
        environment["TQDM_MININTERVAL"] = "5"  # seconds between states of a progress bar in the log
        print(f"{part.name}: {seconds:.0f} s at most", flush=True)
        start_s = time.monotonic()
        if part.compares:
            environment["OMP_NUM_THREADS"] = "1"  # the parts share the processor
        path = self.folder / f"{slug(part.name)}.partial"
        with path.open("w+b", buffering=0) as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment}
            status = measure.run_process(command, seconds, GRACE_SECONDS, **options)
            log.seek(0)
            output = log.read()
        path.unlink()
        self._add(f"{part.name}: {' '.join(command)}", output)
        lines = re.split(r"[\r\n]+", output.decode(errors="replace").strip())
        if part.name == "tests":
            with (self.folder / PASSED).open("a") as passed:
                passed.writelines(f"{name}\n" for name in passed_tests(lines))
        counts = [line for line in lines if re.search(r"\d (passed|failed)", line)]  # from pytest
        last = [*lines, *counts[-1:]][-1].strip("= ")[-200:]
        if re.search(r"\(exit status (124|137)\)", last):  # of `timeout`, in the Makefile
            status = None
        how = "out of time" if status is None else "ok" if not status else f"exit status {status}"
        self.note(part.name, f"{how} after {time.monotonic() - start_s:.0f} s: {last}")
        self.has_failed |= bool(status) or bool(re.search(r"\d failed", last))
        return status


def passed_tests(lines: Sequence[str]) -> list[str]:
    """Returns the names of tests that passed, or were skipped, from the output of pytest -v."""
    found = []
    for line in lines:
        by_worker = re.fullmatch(r"\[gw\d+\] \[ *\d+%\] (?:PASSED|SKIPPED) (tests/.*?) *", line)
        alone = re.fullmatch(r"(tests/.*) (?:PASSED|SKIPPED)(?: \(.*\))? +\[ *\d+%\]", line)
        if by_worker or alone:
            found.append((by_worker or alone)[1])
    return found


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file; none if there is no file."""
    return path.read_text().splitlines() if path.exists() else []


def kept_lines(earlier: Path, parts: Sequence[Part]) -> dict[str, str]:
    """Returns lines of parts that ended well in an earlier report."""
    once = {part.name for part in parts if not part.repeats}
    lines = _lines(earlier / "summary.txt")
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    return {name: words for name, words in found.items() if name in once and words.startswith("ok")}


def main(given: Sequence[str] | None = None) -> int:
    """Runs every part; returns 1 if one failed."""
    parser = measure.parser("bench.gpu_report", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="folder of the files")
    add("--seconds", type=int, default=520, help="time limit for everything (520)")
    add("--test-seconds", type=int, default=150, help="limit for comparing results (150)")
    add(
        "--resume",
        type=Path,
        metavar="EARLIER",
        help="folder of an earlier report of this commit: keeps its rows, skips parts that ended",
    )
    add("--only-build", action="store_true", help="build for another machine")
    a, options = parser.parse_known_args(given)  # options: for `python -m bench`
    if a.resume and not a.resume.is_dir():
        parser.error(f"--resume: expected a folder, got {a.resume}")
    folder = a.folder.resolve()
    parts = parts_of(folder, options, a.test_seconds, bool(a.resume))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    sources = f"sources: {commit()} on {name}"
    is_same = bool(a.resume) and sources in _lines(a.resume / "summary.txt")
    kept = kept_lines(a.resume, parts) if is_same else {}
    passed = _lines(a.resume / PASSED) if is_same else []
    report = Report(folder, a.seconds)
    if a.resume and a.resume.resolve() != folder:
        for path in a.resume.glob("*.csv"):
            shutil.copy(path, folder)
    (folder / PASSED).write_text("".join(f"{line}\n" for line in passed))
    report.note(*sources.split(": "))
    if is_built():
        report.note("build", "not needed: the libraries were built from these sources, and load")
    else:
        build = Part("build", ["setup.py", "-q", "build_ext", "--inplace"], 180)
        if report.run(build) == 0 and all(map(os.path.exists, LIBRARIES)):
            LISTING.parent.mkdir(exist_ok=True)
            LISTING.write_bytes(listing())
    report.run(Part("libraries", ["-c", LOAD], 60))
    for part, words in kept.items():
        report.note(part, words)
    if a.only_build:
        parts = []
        build = "from bench import probes; print(probes.build('sm_90'))"
        report.run(Part("probes", ["-c", build], 120))
        for backend in BACKENDS:
            report.run(Part(f"recording of {backend}", launches_of(backend), 300))
    parts = [part for part in parts if part.name not in kept]
    together, alone = ([p for p in parts if p.compares == kind] for kind in (True, False))
    ended = report.run_together(together)
    for index, part in enumerate(alone):
        report.run(part, alone[index + 1 :])
    if "tests" in ended and ended["tests"] is None:
        report.run(tests(folder, math.inf))
    for path in folder.glob("*.partial"):  # a killed process leaves them
        path.unlink()
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
