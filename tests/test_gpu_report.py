"""The report of a GPU machine: parts that fail or hang stop no other, and libraries are not old."""

import itertools
import os
import re
import shutil
import sys
import time
from pathlib import Path

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
    assert re.fullmatch(r"first: ok after \d+ s: two", first)
    assert re.fullmatch(r"second: exit status 7 after \d+ s: bad", second)
    log = (report.folder / "log.txt").read_text()
    assert log.index("one\ntwo\n") < log.index("=== second: ") < log.index("bad\n")
    assert report.has_failed


def test_a_part_that_closes_its_output_early_keeps_its_exit_status(report):
    code = "import os, time; os.close(1); os.close(2); time.sleep(0.5); os._exit(7)"
    assert report.run("part", python(code), 50) == 7


WAIT_FOR_LOG = """
import pathlib, sys
print("begun")
while "begun\\n" not in pathlib.Path(sys.argv[1]).read_text():
    pass
"""


def test_what_a_part_prints_is_saved_while_it_runs(report):
    log = str(report.folder / "log.txt")
    assert report.run("part", [*python(WAIT_FOR_LOG), log], 50) == 0


INTERRUPTED = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
try:
    {first}
    print("pid", child.pid, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("=== 3 failed, 5 passed ===")
    print("a warning of a worker")
"""


def assert_is_gone(report):
    (pid,) = re.findall(r"^pid (\d+)$", (report.folder / "log.txt").read_text(), re.M)
    status = Path(f"/proc/{pid}/stat")
    for _ in range(1000):  # a signal takes its time
        if not status.exists() or status.read_text().split()[2] in "ZX":  # a zombie, dead
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_a_part_that_runs_out_of_time_can_say_what_failed(report):
    assert report.run("tests", python(INTERRUPTED.format(first="")), 5) is None
    assert re.fullmatch(r"tests: out of time after \d+ s: 3 failed, 5 passed", summary(report)[-1])
    assert report.has_failed
    assert_is_gone(report)


def test_a_part_that_does_not_heed_an_interrupt_is_killed_with_its_children(report, monkeypatch):
    monkeypatch.setattr(gpu_report, "GRACE_SECONDS", 1)
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert report.run("hangs", python(INTERRUPTED.format(first=deaf)), 5) is None
    assert re.fullmatch(r"hangs: out of time after \d+ s: pid \d+", summary(report)[-1])
    assert not report.has_failed
    assert_is_gone(report)


def test_a_part_without_time_does_not_start(tmp_path):
    report = Report(tmp_path, seconds=0)
    assert report.run("late", python("print(1)"), 50) is None
    assert summary(report) == ["late: no time left"]


def test_a_log_that_is_too_large_to_return_is_cut(report, monkeypatch):
    monkeypatch.setattr(gpu_report, "LOG_BYTES", 1000)
    report.run("loud", python("print('x' * 10**6); print('end')"), 50)
    assert (report.folder / "log.txt").stat().st_size < 10**5
    assert summary(report)[-1].endswith(": end")


@pytest.mark.parametrize(
    ("statuses", "runs"),
    [([0], 1), ([1], 1), ([None], 1), ([LOST, -6, LOST, 0], 4), ([-11, -11, 0], 2)],
)
def test_benchmarks_go_on_in_a_new_process_where_a_kernel_cost_one_its_gpu(
    report, monkeypatch, statuses, runs
):
    commands = []

    def run(part, command, seconds, **environment):
        commands.append(command)
        return statuses[len(commands) - 1]

    monkeypatch.setattr(report, "run", run)
    report.bench("bench", ["--batch", "8"], 90, resume=False)
    assert len(commands) == runs
    assert ["--resume" in c for c in commands] == [False, *[True] * (runs - 1)]
    assert all(c[-2:] == ["--batch", "8"] for c in commands)


def test_benchmarks_that_always_fail_end_with_their_time(report, monkeypatch):
    now_s = 0.0

    def run(part, command, seconds, **environment):
        nonlocal now_s
        now_s += 20
        return LOST

    monkeypatch.setattr(report, "end_s", 1000.0)
    monkeypatch.setattr(report, "run", run)
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: now_s)
    report.bench("bench", [], 100, resume=False)
    assert now_s == 80
    assert summary(report) == ["bench: no time left"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small tree with a source and two libraries, which load unless there is a file `broken`."""
    for name in ("csrc/cuda/kernel.cu", "setup.py", "pyproject.toml", "preact_kernels/_cpu.so"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    shutil.copy(tmp_path / "preact_kernels/_cpu.so", tmp_path / "preact_kernels/_cuda.so")
    libraries = [str(tmp_path / "preact_kernels" / n) for n in ("_cpu.so", "_cuda.so")]
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "LIBRARIES", libraries)
    monkeypatch.setattr(gpu_report, "LISTING", tmp_path / "build" / "libraries.sha256")
    monkeypatch.setattr(gpu_report, "LOAD", "import os; os.path.exists('broken') and exit(1)")
    assert not gpu_report.is_built()
    (tmp_path / "build").mkdir()
    gpu_report.LISTING.write_bytes(gpu_report.listing())
    return tmp_path


def test_libraries_of_these_sources_are_taken_as_they_are(tree):
    assert gpu_report.is_built()


@pytest.mark.parametrize(
    "name", ["csrc/cuda/kernel.cu", "csrc/new.h", "setup.py", "preact_kernels/_cuda.so"]
)
def test_libraries_of_other_sources_are_built_again(tree, name):
    (tree / name).write_text("changed")
    assert not gpu_report.is_built()


def test_libraries_that_do_not_load_are_built_again(tree):
    (tree / "broken").touch()
    assert not gpu_report.is_built()


def test_every_file_of_tests_that_is_named_exists():
    for name in (*itertools.chain(*gpu_report.KERNEL_TESTS), *gpu_report.WITHOUT_GPU):
        assert os.path.exists(gpu_report.ROOT / "tests" / f"{name}.py")


@pytest.fixture
def parts(monkeypatch):
    """The parts of a run on a machine with a GPU, of which none does anything."""
    found = []

    def run(self, part, command, seconds, **environment):
        found.append(part)
        return 0

    monkeypatch.setattr(Report, "run", run)
    monkeypatch.setattr(gpu_report, "is_built", lambda: True)
    monkeypatch.setattr(gpu_report.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return found


KERNEL_TESTS = ["tests 1", "tests 2", "tests 3", "tests 4"]
MEASURED = [
    *("ceilings", "launches of cuda", "launches of triton"),
    *("bench", "bench of triton", "converted", "hotspots", "other tests"),
]


def test_the_most_important_parts_come_first(parts, tmp_path):
    assert gpu_report.main([str(tmp_path)]) == 0
    assert parts == ["libraries", *KERNEL_TESTS, *MEASURED]
    assert sorted(os.listdir(tmp_path)) == ["log.txt", "summary.txt"]


SUMMARY = """build: ok after 60 s: done
tests 1: ok after 20 s: 700 passed in 18 s
tests 2: out of time after 40 s: 3 failed, 200 passed in 39 s
tests 3: exit status 1 after 20 s: 1 failed, 100 passed in 19 s
ceilings: ok after 20 s: done
launches of cuda: exit status 1 after 20 s: done
launches of triton: ok after 20 s: done
bench: ok after 200 s: done
hotspots: out of time after 45 s: done
"""


def test_a_report_that_resumes_keeps_the_rows_and_the_parts_that_ended(parts, tmp_path):
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    earlier.mkdir()
    for name in ("a-gpu.csv", "a-gpu-lost.txt", "log.txt"):
        (earlier / name).write_text("rows")
    (earlier / "summary.txt").write_text(SUMMARY)
    assert gpu_report.main([str(out), "--resume", str(earlier)]) == 0
    again = [part for part in MEASURED if part not in ("ceilings", "launches of triton")]
    assert parts == ["libraries", "tests 2", "tests 4", *again]
    kept = (out / "summary.txt").read_text().splitlines()
    assert sorted(kept[1:]) == sorted(
        SUMMARY.splitlines()[i] for i in (1, 3, 4, 6)
    )  # for a run that resumes this one
    assert sorted(os.listdir(out)) == ["a-gpu-lost.txt", "a-gpu.csv", "log.txt", "summary.txt"]
    assert (out / "log.txt").read_text() == ""


def test_a_report_can_resume_in_its_own_folder(parts, tmp_path):
    (tmp_path / "a-gpu.csv").write_text("rows")
    assert gpu_report.main([str(tmp_path), "--resume", str(tmp_path)]) == 0
    assert (tmp_path / "a-gpu.csv").read_text() == "rows"


def test_a_folder_to_resume_from_that_is_not_there_is_named(parts, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_report.main([str(tmp_path / "out"), "--resume", str(tmp_path / "nowhere")])
    assert "--resume: expected a folder, got " in capsys.readouterr().err
    assert parts == []
