"""Builds, tests and measures on a GPU machine: `python -m bench.gpu_report FOLDER`.

Uses the Python of the machine with torch, pytest and the packages of the benchmarks, and no
network. The parts, in order: compiled libraries (existing ones of the same sources, or built now),
tests of the kernels, ceilings of the GPU, the first benchmark, the launches of a step with
estimated and measured times, all benchmarks, benchmarks of the Triton backend, converted models,
the hottest kernels, and the other tests if time is left. If a part fails or runs out of time, the
next one starts. FOLDER gets `summary.txt` (one line per part), `log.txt` (all output) and the CSV
files of the benchmarks, all written while the parts run. For tables and plots, copy the CSV files
to bench/results/ and run `make report`.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.__main__ import LOST
from bench.contenders import GROUPS
from bench.dry_run import BACKENDS
from bench.measure import ROOT, commit
from bench.records import LAUNCHES, slug

LIBRARIES = [str(ROOT / "preact_kernels" / name) for name in ("_cpu.so", "_cuda.so")]
LISTING = ROOT / "build" / "libraries.sha256"  # hashes of libraries and sources
KERNEL_TESTS = (
    (
        "kernels/test_cuda_fragments",
        "kernels/test_cuda",
        "kernels/test_cuda_conv",
        "kernels/test_cuda_conv_runs",
    ),
    ("stage/test_resnet_1001", "kernels/test_triton", "stage/test_graphs"),
    ("ops/test_bn_stats", "ops/test_bn_relu", "ops/test_bn_relu_conv", "ops/test_residual_add"),
    (
        "stage/test_preact_stage",
        "stage/test_memory_mode",
        "stage/test_preact_block",
        "ops/test_running_statistics",
        "behaviour/test_determinism",
        "stage/test_training",
    ),
)
"""Tests of the kernels, the most important first. Each group is one run of pytest."""
CONVERTED_MODELS = (
    "torchvision densenet121",
    "timm resnetv2_50",
    "WRN-28-10",
    "DenseNet-BC-100-12",
)
"""Models of `bench.converted`, the most important first."""
WITHOUT_GPU = (
    "kernels/test_cuda_on_host",
    "kernels/test_cuda_build",
    "behaviour/test_versions",
    "behaviour/test_docs",
    "bench/test_session",
    "bench/test_correctness",
    "bench/test_ops",
    "bench/test_plan",
    "study/test_comparisons",
    "study/test_data",
    "study/test_plots",
    "bench/test_gpu_report",
    "behaviour/test_lost_gpu",
)
"""Tests that do not depend on a GPU."""
FIRST_BENCH = ("--networks", "resnet-1001", "--batch", "128", "--contenders", *GROUPS["uncompiled"])
"""What is benchmarked first: contenders that need no compiler."""
FIRST_BENCH_SECONDS = 120
TRITON_BENCH = (
    *("--networks", "resnet-1001", "--batch", "128"),
    *("--contenders", "fused-store", "fused-graph", "fused-rebuild"),
)
RESERVED_SECONDS = {"bench of triton": 60, "converted": 60, "hotspots": 45}
"""For what follows the benchmarks, unless these would have less than `MIN_BENCH_SECONDS`."""
MIN_BENCH_SECONDS = 120
NOT_REPEATED = r"tests \d+|ceilings|first bench|launches of \w+|converted|hotspots"
"""Parts that a resumed report skips if they were ok; tests also if some failed."""
MOST_CRASHES = 3  # of the benchmarks, after which they are not started again
GRACE_SECONDS = 20  # between interrupting and killing a part
LOG_BYTES = 12 * 2**20

LOAD = f"""
import sys
import torch
for path in {LIBRARIES!r}[: 2 if torch.version.cuda else 1]:
    torch.ops.load_library(path)
import preact_kernels as pk
print("torch", torch.__version__, "with the backends", *pk.available_backends())
sys.exit(torch.cuda.is_available() and "cuda" not in pk.available_backends())
"""
"""Loads both libraries, or one if torch has no CUDA; fails if there is a GPU without backend."""


def listing() -> bytes:
    """Hashes of the libraries and of their sources."""
    sources = sorted(str(p) for p in (ROOT / "csrc").rglob("*") if p.is_file())
    paths = [*sources, ROOT / "setup.py", ROOT / "pyproject.toml", *LIBRARIES]
    names = [os.path.relpath(path, ROOT) for path in paths]
    return subprocess.run(["sha256sum", *names], cwd=ROOT, capture_output=True, check=False).stdout


def is_built() -> bool:
    """Whether the libraries load and were built from these sources, according to `LISTING`."""
    if not LISTING.exists() or LISTING.read_bytes() != listing():
        return False
    load = [sys.executable, "-c", LOAD]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(load, cwd=ROOT, capture_output=True, check=False, timeout=60)
        return done.returncode == 0
    return False


def device_name() -> str:
    """The name of the GPU, or "a CPU"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"


def is_of(folder: Path, sources: str) -> bool:
    """Whether the report in a folder is of `sources`, a line of its summary."""
    path = folder / "summary.txt"
    return path.exists() and sources in path.read_text().splitlines()


def ended_parts(folder: Path, sources: str) -> dict[str, str]:
    """The lines of parts that an earlier report has of the same sources and GPU."""
    if not is_of(folder, sources):
        return {}
    summary = (folder / "summary.txt").read_text()
    ended = dict(re.findall(rf"^({NOT_REPEATED}): (ok.*)", summary, re.MULTILINE))
    return ended | dict(re.findall(r"^(tests \d+): (exit status.*)", summary, re.MULTILINE))


class Report:
    """Runs parts within a time limit and writes their files.

    Args:
        folder: for the files; created if missing.
        seconds: for the whole run.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.end_s = folder, time.monotonic() + seconds
        self.has_failed = False
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("summary.txt", "log.txt"):
            (folder / name).write_text("")

    def left_s(self) -> float:
        """Seconds left of the run."""
        return self.end_s - time.monotonic()

    def note(self, part: str, words: str) -> None:
        """Adds a line to the summary."""
        with (self.folder / "summary.txt").open("a") as summary:
            summary.write(f"{part}: {words}\n")

    def run(
        self, part: str, command: Sequence[str], seconds: float, **environment: str
    ) -> int | None:
        """Runs a command for at most `seconds`; prints its output and appends it to the log.

        At the limit, interrupts the command, and `GRACE_SECONDS` later kills it and its children.

        Returns:
            Its exit status; None if there was no time to start or to finish.
        """
        seconds = min(seconds, self.left_s() - GRACE_SECONDS)
        if seconds < 1:
            self.note(part, "no time left")
            return None
        start_s = time.monotonic()
        deadline_s, is_late, end = start_s + seconds, False, b""
        scripts = os.path.dirname(sys.executable)  # has ninja, in a virtual environment
        path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the command inherits SIG_IGN
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with (self.folder / "log.txt").open("ab", buffering=0) as log:
            log.write(f"\n=== {part}: {' '.join(command)}\n".encode())
            while True:
                left_s = max(0.0, deadline_s - time.monotonic())
                has_ended = process.poll() is not None
                if select.select([process.stdout], [], [], min(left_s, 1.0))[0]:
                    printed = os.read(process.stdout.fileno(), 2**16)
                    if not printed:
                        break
                    if log.tell() < LOG_BYTES:
                        log.write(printed)
                    sys.stdout.buffer.write(printed)
                    sys.stdout.flush()
                    end = (end + printed)[-2000:]
                elif has_ended or (is_late and not left_s):
                    break
                elif not left_s:
                    is_late = True
                    deadline_s += GRACE_SECONDS
                    process.send_signal(signal.SIGINT)
        if not is_late:  # the output can end before the process
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its children
        process.stdout.close()
        status = process.wait()
        text = end.decode(errors="replace").replace("\r", "\n").strip()
        how = "out of time" if is_late else "ok" if status == 0 else f"exit status {status}"
        lines = text.splitlines() or [""]
        counts = [line for line in lines if re.search(r"\d (passed|failed)", line)]  # of pytest
        last = [*lines, *counts][-1].strip("= ")[-200:]
        self.note(part, f"{how} after {time.monotonic() - start_s:.0f} s: {last}")
        self.has_failed |= (status != 0 and not is_late) or bool(re.search(r"\d failed", text))
        return None if is_late else status

    def tests(self, part: str, names: Sequence[str], seconds: float) -> None:
        """Runs the quick tests of some files, in several processes if pytest-xdist is installed."""
        processes = []
        if importlib.util.find_spec("xdist"):
            count = min(8, os.cpu_count() or 1)  # they share one GPU
            processes = ["-n", str(count), "--max-worker-restart", str(4 * count)]
        options = ["-v", "-rfEs", "--tb=short", "--maxfail=100", "-p", "no:cacheprovider"]
        options += ["-m", "not slow", *processes]
        files = [f"tests/{name}.py" for name in names]
        self.run(part, [sys.executable, "-m", "pytest", *options, *files], seconds)

    def bench(
        self, part: str, options: Sequence[str], seconds: float, *, resume: bool, **environment: str
    ) -> None:
        """Runs the benchmarks; restarts them after a lost GPU, and after a few crashes."""
        end_s = time.monotonic() + min(seconds, self.left_s() - GRACE_SECONDS)
        crashes = 0
        while True:
            left_s = end_s - time.monotonic()
            if left_s < 30:
                self.note(part, "no time left")
                return
            command = [sys.executable, "-m", "bench", "--out", str(self.folder), "--no-plots"]
            command += ["--time-limit", str(int(left_s - 10)), *["--resume"] * resume, *options]
            status = self.run(part, command, left_s, **environment)
            has_crashed = status is not None and status < 0  # in a first step, a row says so
            crashes += has_crashed
            if status != LOST and not (has_crashed and crashes <= MOST_CRASHES):
                return
            resume = True


def main(given: Sequence[str] | None = None) -> int:
    """Runs every part; returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="for the files")
    parser.add_argument("--seconds", type=int, default=520, help="for everything (520)")
    parser.add_argument("--test-seconds", type=int, default=140, help="for the first tests (140)")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="EARLIER",
        help="folder of an earlier report of this commit: keeps its rows, skips parts that ended",
    )
    parser.add_argument("--only-build", action="store_true", help="build for another machine")
    a, options = parser.parse_known_args(given)  # options: for `python -m bench`
    if a.resume and not a.resume.is_dir():
        parser.error(f"--resume: expected a folder, got {a.resume}")
    sources = f"sources: {commit()} on {device_name()}"
    ended = ended_parts(a.resume, sources) if a.resume else {}
    report = Report(a.folder.resolve(), a.seconds)
    if a.resume and a.resume.resolve() != report.folder:
        kept = ["*.csv", *["*-lost.txt"] * is_of(a.resume, sources)]
        for path in [path for pattern in kept for path in a.resume.glob(pattern)]:
            shutil.copy(path, report.folder)

    report.note(*sources.split(": "))
    report.has_failed = any(line.startswith("exit status") for line in ended.values())
    if is_built():
        report.note("build", "not needed: the libraries were built from these sources, and load")
    else:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        if report.run("build", command, 180) == 0 and all(map(os.path.exists, LIBRARIES)):
            LISTING.parent.mkdir(exist_ok=True)
            LISTING.write_bytes(listing())
    report.run("libraries", [sys.executable, "-c", LOAD], 60)
    if not a.only_build:
        measure_all(report, options, a.test_seconds, ended, resume=bool(a.resume))
    for path in report.folder.glob("*.partial"):  # of a process that was killed
        path.unlink()
    print((report.folder / "summary.txt").read_text())
    return int(report.has_failed)


def measure_all(
    report: Report,
    options: Sequence[str],
    test_seconds: float,
    ended: dict[str, str],
    *,
    resume: bool,
) -> None:
    """Runs tests and benchmarks, the most important first; keeps the lines of parts that ended."""

    def run(part: str, command: Sequence[str], seconds: float, **environment: str) -> None:
        if part not in ended:
            report.run(part, [sys.executable, "-m", *command], seconds, **environment)

    for part, line in ended.items():
        report.note(part, line)
    tests_end_s = time.monotonic() + test_seconds
    groups = {f"tests {index}": names for index, names in enumerate(KERNEL_TESTS, start=1)}
    groups = {part: names for part, names in groups.items() if part not in ended}
    for index, (part, names) in enumerate(groups.items()):
        share_s = (tests_end_s - time.monotonic()) / (len(groups) - index)
        report.tests(part, names, share_s)
    has_gpu = torch.cuda.is_available()
    out = ["--out", str(report.folder)]
    later = RESERVED_SECONDS if has_gpu else ("hotspots",)
    reserved_s = {part: RESERVED_SECONDS[part] for part in later if part not in ended}
    profiled = {"TEARDOWN_CUPTI": "0"}  # CUDA graphs may crash after CUPTI's teardown
    if has_gpu:
        run("ceilings", ["bench.probes", *out], 60)
        if "first bench" not in ended:
            first = [*options, *FIRST_BENCH]
            report.bench("first bench", first, FIRST_BENCH_SECONDS, resume=resume)
        file = str(report.folder / f"{slug(device_name())}{LAUNCHES}")
        for backend in BACKENDS:
            command = ["bench.launches", "--backend", backend, "--csv", file]
            run(f"launches of {backend}", command, 75, **profiled)
    seconds = report.left_s() - GRACE_SECONDS - sum(reserved_s.values())
    seconds = max(seconds, MIN_BENCH_SECONDS)
    report.bench("bench", options, seconds, resume=resume or has_gpu)
    if has_gpu:
        part = "bench of triton"
        environment = {"PREACT_KERNELS_BACKEND": "triton"}  # by default it is the CUDA library
        seconds = RESERVED_SECONDS[part]
        report.bench(part, [*options, *TRITON_BENCH], seconds, resume=resume, **environment)
        converted = ["bench.converted", "--no-graphs", *["--resume"] * resume, *out]
        converted += ["--models", *CONVERTED_MODELS]
        run("converted", converted, RESERVED_SECONDS["converted"])
    run("hotspots", ["bench.hotspots"], RESERVED_SECONDS["hotspots"], **profiled)
    ran = {name for names in KERNEL_TESTS for name in names}
    tests = ROOT / "tests"
    others = sorted(str(p.relative_to(tests))[:-3] for p in tests.rglob("test_*.py"))
    others = [name for name in others if name not in ran and name not in WITHOUT_GPU]
    report.tests("other tests", others, report.left_s())


if __name__ == "__main__":
    sys.exit(main())
