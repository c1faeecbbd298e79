"""Everything that one run on a GPU machine has to bring back: `python -m bench.gpu_report FOLDER`.

The machine's Python is used as it is, with torch, pytest and what the benchmarks need; no network.
In order: the compiled libraries (those that are there, if they were made of these sources, or a
build), the tests that a GPU tells most about, the benchmarks, the hottest kernels, and the other
tests if time is left. FOLDER gets `summary.txt` (a line a part), `log.txt` (what every part
printed) and the CSV files of the benchmarks, all written as they come. A part that fails or runs
out of time stops no other. `python -m bench.report --results FOLDER` makes tables and plots.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.__main__ import LOST
from bench.measure import ROOT

LIBRARIES = [str(ROOT / "preact_kernels" / name) for name in ("_cpu.so", "_cuda.so")]
LISTING = ROOT / "build" / "libraries.sha256"  # libraries and their sources, for sha256sum
TELLING = (
    "test_cuda", "test_cuda_conv", "test_triton", "test_graphs", "test_bn_stats", "test_bn_relu",
    "test_bn_relu_conv", "test_residual_add", "test_preact_stage", "test_memory_mode",
    "test_preact_block", "test_running_statistics", "test_determinism", "test_training",
)  # fmt: skip
"""Tests that a GPU tells most about, the most telling first."""
WITHOUT_GPU = (
    "test_cuda_on_host", "test_cuda_build", "test_versions", "test_bench", "test_gpu_report",
    "test_lost_gpu",
)  # fmt: skip
"""Tests of which a GPU tells nothing."""

LOAD = f"""
import sys
import torch
for path in {LIBRARIES!r}[: 2 if torch.version.cuda else 1]:
    torch.ops.load_library(path)
import preact_kernels as pk
print("torch", torch.__version__, "with the backends", *pk.available_backends())
sys.exit(torch.cuda.is_available() and "cuda" not in pk.available_backends())
"""
"""Loads the libraries, that of CUDA if torch has it; fails if a GPU that is there is not served."""


def is_built() -> bool:
    """Whether the libraries were made of these sources (`list_libraries`), and load."""
    commands = (["sha256sum", "--check", "--status", str(LISTING)], [sys.executable, "-c", LOAD])
    return LISTING.exists() and not any(
        subprocess.run(c, cwd=ROOT, capture_output=True, check=False).returncode for c in commands
    )


def list_libraries() -> None:
    """Notes what the libraries were made of, so that a later run can take them as they are."""
    sources = sorted(str(p) for p in (ROOT / "csrc").rglob("*") if p.is_file())
    names = [os.path.relpath(p, ROOT) for p in [*sources, ROOT / "setup.py", *LIBRARIES]]
    done = subprocess.run(["sha256sum", *names], cwd=ROOT, capture_output=True, check=True)
    LISTING.parent.mkdir(exist_ok=True)
    LISTING.write_bytes(done.stdout)


class Report:
    """The files of a run, and the time that it has.

    Args:
        folder: for the files; made where it is missing.
        seconds: for the whole run.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.end_s = folder, time.monotonic() + seconds
        self.has_failed = False
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("summary.txt", "log.txt"):
            (folder / name).write_text("")

    def left_s(self) -> float:
        """Seconds that are left of the run."""
        return self.end_s - time.monotonic()

    def note(self, part: str, words: str) -> None:
        """Adds a line to the summary."""
        with (self.folder / "summary.txt").open("a") as summary:
            summary.write(f"{part}: {words}\n")

    def run(self, part: str, command: Sequence[str], seconds: float) -> int | None:
        """Runs a command for `seconds` at most; what it prints goes to the screen and to the log.

        Returns:
            Its exit status; None where there was no time to start or to finish.
        """
        limit_s = int(min(seconds, self.left_s()))
        if limit_s <= 0:
            self.note(part, "no time left")
            return None
        start_s = time.monotonic()
        end = b""
        scripts = os.path.dirname(sys.executable)  # where ninja may be
        with (self.folder / "log.txt").open("ab", buffering=0) as log:
            log.write(f"\n=== {part}: {' '.join(command)}\n".encode())
            process = subprocess.Popen(
                ["timeout", "--signal=INT", "--kill-after=10", str(limit_s), *command],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            while printed := os.read(process.stdout.fileno(), 2**16):
                log.write(printed)
                sys.stdout.buffer.write(printed)
                sys.stdout.flush()
                end = (end + printed)[-2000:]
        status = process.wait()
        is_late = status in (124, 137)  # interrupted, killed
        text = end.decode(errors="replace").replace("\r", "\n").strip()
        last = text.rpartition("\n")[2]
        how = "out of time" if is_late else "ok" if status == 0 else f"exit status {status}"
        self.note(part, f"{how} after {time.monotonic() - start_s:.0f} s: {last[-200:]}")
        self.has_failed |= (status != 0 and not is_late) or bool(re.search(r"\b\d+ failed", text))
        return None if is_late else status

    def tests(self, part: str, names: Sequence[str], seconds: float) -> None:
        """The quick tests of some files, in several processes where pytest-xdist is there."""
        processes = []
        if importlib.util.find_spec("xdist"):
            processes = ["-n", str(min(8, os.cpu_count() or 1))]  # they share one GPU
        files = [f"tests/{name}.py" for name in names]
        options = [
            "-q", "-rs", "--tb", "short", "--maxfail", "200", "-p", "no:cacheprovider",
            "-m", "not slow", *processes,
        ]  # fmt: skip
        self.run(part, [sys.executable, "-m", "pytest", *options, *files], seconds)

    def bench(self, seconds: float, options: Sequence[str]) -> None:
        """The benchmarks, in a new process each time that a failed kernel cost one its GPU."""
        end_s = time.monotonic() + min(seconds, self.left_s())
        for attempt in range(1, 6):
            left_s = int(end_s - time.monotonic())
            command = [
                sys.executable, "-m", "bench", "--out", str(self.folder), "--resume", "--no-plots",
                "--time-limit", str(left_s - 15), *options,
            ]  # fmt: skip
            if left_s < 45 or self.run(f"bench {attempt}", command, left_s) != LOST:
                return


def main(given: Sequence[str] | None = None) -> int:
    """Runs every part; returns 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="for the files")
    parser.add_argument("--seconds", type=int, default=520, help="for everything (520)")
    parser.add_argument("--test-seconds", type=int, default=130, help="for the first tests (130)")
    parser.add_argument("--resume", type=Path, help="a folder whose CSV files the run goes on from")
    parser.add_argument("--only-build", action="store_true", help="libraries for another machine")
    a, options = parser.parse_known_args(given)  # the rest is for `python -m bench`
    report = Report(a.folder.resolve(), a.seconds)
    for path in sorted(a.resume.glob("*.csv")) if a.resume else ():
        shutil.copy(path, report.folder)

    if is_built():
        report.note("build", "not needed: the libraries were made of these sources, and load")
    else:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        if report.run("build", command, 180) == 0 and all(map(os.path.exists, LIBRARIES)):
            list_libraries()
    report.run("libraries", [sys.executable, "-c", LOAD], 60)
    if not a.only_build:
        report.tests("tests", TELLING, a.test_seconds)
        report.bench(report.left_s() - 45, options)
        report.run("hotspots", [sys.executable, "-m", "bench.hotspots"], 45)
        others = sorted(p.stem for p in (ROOT / "tests").glob("test_*.py"))
        others = [name for name in others if name not in (*TELLING, *WITHOUT_GPU)]
        report.tests("other tests", others, report.left_s())
    print((report.folder / "summary.txt").read_text())
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
