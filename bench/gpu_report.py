"""Builds, tests and measures on a GPU machine: `python -m bench.gpu_report FOLDER`.

Uses the installed Python with torch, pytest and the packages of the benchmarks, and no internet
connection. First builds the libraries, unless they were built from the same sources; then runs the
parts in `parts_of`, the most important first. If a part fails or runs out of time, the next one
starts. FOLDER gets `summary.txt` (one line per part), `log.txt` (output of the parts, without the
middle of long output) and the CSV files of the benchmarks, all written while the parts run. For
tables and plots, copy the CSV files to bench/results/ and run `make report`.

Without a GPU this is a dry run without the parts that need one.
"""

import dataclasses
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
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
KERNEL_TESTS = (
    (
        "kernels/test_cuda_fragments",
        "kernels/test_cuda",
        "kernels/test_cuda_conv",
        "kernels/test_cuda_conv_runs",
    ),
    (
        "stage/test_resnet_1001",
        "kernels/test_triton",
        "kernels/test_triton_sums",
        "kernels/test_float32_stream",
        "stage/test_graphs",
    ),
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
    command: list[str]  # arguments of Python
    seconds: float  # limit
    reserved: float = 0  # seconds that earlier parts without a limit leave to it
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    needs_gpu: bool = False
    repeats: bool = False  # runs again in a resumed report


def tests(name: str, files: Sequence[str], seconds: float, **options) -> Part:
    """Returns a part for the quick tests in some files, in parallel if pytest-xdist is there."""
    command = ["-m", "pytest", "-v", "-rfEs", "--tb=short", "--maxfail=100"]
    command += ["-p", "no:cacheprovider", "-m", "not slow"]
    if importlib.util.find_spec("xdist"):
        count = min(8, os.cpu_count() or 1)  # they share one GPU
        command += ["-n", str(count), "--max-worker-restart", str(4 * count)]
    return Part(name, [*command, *(f"tests/{file}.py" for file in files)], seconds, **options)


def parts_of(folder: Path, options: Sequence[str], test_seconds: float, resume: bool) -> list[Part]:
    """Returns the parts of a report, the most important first.

    Args:
        folder: folder of the files.
        options: options of `python -m bench`.
        test_seconds: time limit for the tests of the kernels.
        resume: keep the rows of an earlier report.
    """
    out, again = ["--out", str(folder)], ["--resume"] * resume
    bench = ["-m", "bench", *out, "--no-plots", *options]
    deepest = ["--networks", "resnet-1001", "--batch", "128", "--contenders"]
    profiled = {"TEARDOWN_CUPTI": "0"}  # CUDA graphs may crash after CUPTI's teardown
    has_gpu = torch.cuda.is_available()
    launches = str(folder / f"{slug(measure.device_name(measure.default_device()))}{LAUNCHES}")
    triton = [*deepest, "fused-store", "fused-graph", "fused-rebuild"]
    converted = ["bench.converted", "--no-graphs", *again, *out, "--models", *CONVERTED_MODELS]
    published = ["-m", "bench.rivals", *again, *out]
    ran = {name for names in KERNEL_TESTS for name in names}
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    others = [str(p.relative_to(ROOT / "tests"))[:-3] for p in found]
    others = [name for name in others if name not in ran and name not in WITHOUT_GPU]
    share_s = test_seconds / len(KERNEL_TESTS)
    parts = [
        Part("check", ["-m", "preact_kernels", "check"], 60),
        *(tests(f"tests {i}", names, share_s) for i, names in enumerate(KERNEL_TESTS, start=1)),
        Part("ceilings", ["-m", "bench.probes", *out], 60, needs_gpu=True),
        Part("first bench", [*bench, *again, *deepest, *GROUPS["uncompiled"]], 120, needs_gpu=True),
        *(
            Part(
                f"launches of {backend}",
                ["-m", "bench.launches", "--backend", backend, "--csv", launches],
                75,
                environment=profiled,
            )
            for backend in BACKENDS
        ),
        Part("bench", [*bench, *(["--resume"] if has_gpu else again)], math.inf, repeats=True),
        Part(
            "bench of triton",
            [*bench, *again, *triton],
            60,
            60,
            {"PREACT_KERNELS_BACKEND": "triton"},  # by default it is the CUDA library
            needs_gpu=True,
            repeats=True,
        ),
        Part("converted", ["-m", *converted], 60, 60),
        Part("rivals", [*published, "--dtype", "bf16", "--contenders", *RIVALS], 60),
        Part("hotspots", ["-m", "bench.hotspots"], 45, 45, profiled),
        tests("other tests", others, math.inf, repeats=True),
    ]
    return [part for part in parts if has_gpu or not part.needs_gpu]


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
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("summary.txt", "log.txt"):
            (folder / name).write_text("")

    def note(self, part: str, words: str) -> None:
        """Prints a line and adds it to the summary."""
        print(f"{part}: {words}", flush=True)
        with (self.folder / "summary.txt").open("a") as summary:
            summary.write(f"{part}: {words}\n")

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
        command = [sys.executable, *part.command]
        if is_bench:
            command += ["--time-limit", str(int(seconds - 10))]
        scripts = os.path.dirname(sys.executable)  # contains ninja in a virtual environment
        path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PATH": path, **part.environment}
        environment["TQDM_MININTERVAL"] = "5"  # seconds between states of a progress bar in the log
        print(f"{part.name}: {seconds:.0f} s at most", flush=True)
        start_s = time.monotonic()
        with (self.folder / "log.txt").open("a+b", buffering=0) as log:
            log.write(f"\n=== {part.name}: {' '.join(command)}\n".encode())
            begin = log.tell()
            options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment}
            status = measure.run_process(command, seconds, GRACE_SECONDS, **options)
            log.seek(begin)
            output = log.read()
            if len(output) > LOG_BYTES:
                log.truncate(begin + LOG_BYTES // 2)
                log.write(b"\n... the middle is left out ...\n" + output[-LOG_BYTES // 2 :])
            lines = re.split(r"[\r\n]+", output.decode(errors="replace").strip())
        counts = [line for line in lines if re.search(r"\d (passed|failed)", line)]  # from pytest
        last = [*lines, *counts[-1:]][-1].strip("= ")[-200:]
        how = "out of time" if status is None else "ok" if not status else f"exit status {status}"
        self.note(part.name, f"{how} after {time.monotonic() - start_s:.0f} s: {last}")
        self.has_failed |= bool(status) or bool(re.search(r"\d failed", last))
        return status


def kept_lines(earlier: Path, sources: str, parts: Sequence[Part]) -> dict[str, str]:
    """Returns lines of parts that ended in an earlier report of the same sources and GPU.

    Parts with tests count also if some tests failed.
    """
    path = earlier / "summary.txt"
    lines = path.read_text().split("\n") if path.exists() else []
    if sources not in lines:
        return {}
    once = {part.name for part in parts if not part.repeats}
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    return {
        name: words
        for name, words in found.items()
        if name in once
        and words.startswith(("ok", "exit status") if name.startswith("tests") else "ok")
    }


def main(given: Sequence[str] | None = None) -> int:
    """Runs every part; returns 1 if one failed."""
    parser = measure.parser("bench.gpu_report", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="folder of the files")
    add("--seconds", type=int, default=520, help="time limit for everything (520)")
    add("--test-seconds", type=int, default=76, help="time limit for the first tests (76)")
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
    kept = kept_lines(a.resume, sources, parts) if a.resume else {}
    report = Report(folder, a.seconds)
    if a.resume and a.resume.resolve() != folder:
        for path in a.resume.glob("*.csv"):
            shutil.copy(path, folder)
    report.note(*sources.split(": "))
    report.has_failed = any(words.startswith("exit status") for words in kept.values())
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
    # Unused time of a group of tests, which the next group gets.
    spare_s = sum(p.seconds for p in parts if p.name in kept and p.name.startswith("tests "))
    parts = [] if a.only_build else [part for part in parts if part.name not in kept]
    for index, part in enumerate(parts):
        seconds = part.seconds + (spare_s if part.name.startswith("tests ") else 0)
        begin_s = time.monotonic()
        report.run(dataclasses.replace(part, seconds=seconds), parts[index + 1 :])
        spare_s = max(0.0, seconds - (time.monotonic() - begin_s))
    for path in folder.glob("*.partial"):  # a killed process leaves them
        path.unlink()
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
