"""The report of a GPU machine: parts that fail or hang stop no other, and libraries are not old."""

import os
import shutil
import sys

import pytest

pytest.importorskip("tqdm")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

from bench import gpu_report
from bench.__main__ import LOST
from bench.gpu_report import Report


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "out", seconds=100)


def summary(report):
    return (report.folder / "summary.txt").read_text().splitlines()


def test_every_part_leaves_its_output_and_a_line(report):
    assert report.run("first", python("print('one'); print('two')"), 50) == 0
    assert report.run("second", python("print('bad'); raise SystemExit(7)"), 50) == 7
    first, second = summary(report)
    assert first.startswith("first: ok after 0 s: two")
    assert second.startswith("second: exit status 7 after 0 s: bad")
    log = (report.folder / "log.txt").read_text()
    assert log.index("one\ntwo\n") < log.index("=== second: ") < log.index("bad\n")
    assert report.has_failed


def test_what_a_part_prints_is_saved_while_it_runs(report):
    code = f"print('begun'); import time; time.sleep(0.5); print(open({str(report.folder)!r} + "
    assert report.run("part", python(code + "'/log.txt').read().count('begun\\n'))"), 50) == 0
    assert summary(report)[-1].endswith(": 1")


def test_a_part_that_hangs_is_stopped_with_its_children(report):
    child = "import time; print('child', flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert report.run("hangs", python(code), 1) is None
    assert summary(report)[-1].startswith("hangs: out of time after 1 s")
    assert not report.has_failed


def test_a_part_without_time_does_not_start(tmp_path):
    report = Report(tmp_path, seconds=0)
    assert report.run("late", python("print(1)"), 50) is None
    assert summary(report) == ["late: no time left"]


def test_tests_that_fail_before_they_are_stopped_are_no_success(report):
    code = "print('3 failed, 5 passed', flush=True); import time; time.sleep(60)"
    assert report.run("tests", python(code), 1) is None
    assert report.has_failed


@pytest.mark.parametrize(("statuses", "runs"), [([0], 1), ([1], 1), ([LOST, LOST, 0], 3)])
def test_benchmarks_go_on_in_a_new_process_where_a_kernel_cost_one_its_gpu(
    report, monkeypatch, statuses, runs
):
    commands = []

    def run(part, command, seconds):
        commands.append(command)
        return statuses[len(commands) - 1]

    monkeypatch.setattr(report, "run", run)
    report.bench(90, ["--batch", "8"])
    assert len(commands) == runs
    assert all("--resume" in c and c[-2:] == ["--batch", "8"] for c in commands)


def test_benchmarks_do_not_try_for_ever(report, monkeypatch):
    commands = []
    monkeypatch.setattr(report, "run", lambda *a: commands.append(a) or LOST)
    report.bench(90, [])
    assert len(commands) == 5


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small tree with a source and two libraries, which "load" where they are not empty."""
    for name in ("csrc/cuda/kernel.cu", "setup.py", "preact_kernels/_cpu.so"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    shutil.copy(tmp_path / "preact_kernels/_cpu.so", tmp_path / "preact_kernels/_cuda.so")
    libraries = [str(tmp_path / "preact_kernels" / n) for n in ("_cpu.so", "_cuda.so")]
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "LIBRARIES", libraries)
    monkeypatch.setattr(gpu_report, "LISTING", tmp_path / "build" / "libraries.sha256")
    monkeypatch.setattr(gpu_report, "LOAD", "import os; os.path.exists('broken') and exit(1)")
    return tmp_path


def test_libraries_of_these_sources_are_taken_as_they_are(tree):
    assert not gpu_report.is_built()
    gpu_report.list_libraries()
    assert gpu_report.is_built()


@pytest.mark.parametrize("name", ["csrc/cuda/kernel.cu", "setup.py", "preact_kernels/_cuda.so"])
def test_libraries_of_other_sources_are_built_again(tree, name):
    gpu_report.list_libraries()
    (tree / name).write_text("changed")
    assert not gpu_report.is_built()


def test_libraries_that_do_not_load_are_built_again(tree):
    gpu_report.list_libraries()
    (tree / "broken").touch()
    assert not gpu_report.is_built()


def test_every_file_of_tests_that_is_named_exists():
    for name in (*gpu_report.TELLING, *gpu_report.WITHOUT_GPU):
        assert os.path.exists(gpu_report.ROOT / "tests" / f"{name}.py")


def test_the_parts_run_in_order_and_leave_few_files(tmp_path, monkeypatch):
    parts = []

    def run(self, part, command, seconds):
        parts.append(part)
        self.note(part, "ok")
        return 0

    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "a-gpu.csv").write_text("rows")
    monkeypatch.setattr(Report, "run", run)
    monkeypatch.setattr(gpu_report, "is_built", lambda: True)
    out = tmp_path / "out"
    assert gpu_report.main([str(out), "--resume", str(earlier)]) == 0
    assert parts == ["libraries", "tests", "bench 1", "hotspots", "other tests"]
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*"))
    assert files == ["a-gpu.csv", "log.txt", "summary.txt"]
