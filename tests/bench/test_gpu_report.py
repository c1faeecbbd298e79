"""The report of a GPU machine: parts that fail or hang stop no other, and libraries are not old."""

import itertools
import os
import re
import shutil
import sys
import time
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

from bench import converted, gpu_report, launches
from bench.__main__ import LOST
from bench.__main__ import arguments as bench_arguments
from bench.contenders import GROUPS
from bench.gpu_report import Report
from bench.records import LAUNCHES


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
    [([0], 1), ([1], 1), ([None], 1), ([LOST, -6, LOST, 0], 4), ([-11] * 9, 4)],
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


class Parts(dict):
    """The parts of a run on a machine with a GPU, of which none does anything.

    Commands by part; `environments` alike.
    """

    def __init__(self):
        self.environments = {}

    def __eq__(self, names):
        return list(self) == names


@pytest.fixture
def parts(monkeypatch):
    found = Parts()

    def run(self, part, command, seconds, **environment):
        found[part], found.environments[part] = command, environment
        return 0

    monkeypatch.setattr(Report, "run", run)
    monkeypatch.setattr(gpu_report, "is_built", lambda: True)
    monkeypatch.setattr(gpu_report, "commit", lambda: "abc")
    monkeypatch.setattr(gpu_report.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report.torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    return found


KERNEL_TESTS = ["tests 1", "tests 2", "tests 3", "tests 4"]
MEASURED = [
    *("ceilings", "first bench", "launches of cuda", "launches of triton"),
    *("bench", "bench of triton", "converted", "hotspots", "other tests"),
]


def test_the_most_important_parts_come_first(parts, tmp_path):
    assert gpu_report.main([str(tmp_path)]) == 0
    assert parts == ["libraries", *KERNEL_TESTS, *MEASURED]
    assert sorted(os.listdir(tmp_path)) == ["log.txt", "summary.txt"]


def test_the_commands_are_understood(parts, tmp_path, monkeypatch):
    gpu_report.main([str(tmp_path), "--steps", "7"])
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    options = {part: command[3:] for part, command in parts.items()}
    assert all(
        parts[part][:3] == [sys.executable, "-m", "bench"] for part in parts if "bench" in part
    )
    for part, resumes, contenders in (
        ("first bench", False, GROUPS["uncompiled"]),
        ("bench", True, None),
        ("bench of triton", False, ("fused-store", "fused-graph", "fused-rebuild")),
    ):
        a = bench_arguments(options[part])
        assert (a.out, a.steps, a.resume) == (tmp_path, 7, resumes)
        assert a.contenders == (contenders and list(contenders))
    for backend in ("cuda", "triton"):
        part = f"launches of {backend}"
        a = launches.arguments(options[part])
        assert (a.backend, a.csv) == (backend, tmp_path / f"nvidia-h200{LAUNCHES}")
        assert parts.environments[part] == {"TEARDOWN_CUPTI": "0"}
    named = [part for part, e in parts.environments.items() if "PREACT_KERNELS_BACKEND" in e]
    assert named == ["bench of triton"]
    assert set(gpu_report.CONVERTED_MODELS) < set(converted.CASES)
    assert options["converted"][:3] == ["--no-graphs", "--out", str(tmp_path)]


# Which share of its limit every part takes; 1: it has to be killed.
@pytest.mark.parametrize(("share", "least_s"), [(1.0, 0), (0.6, 70), (0.5, 110), (0.2, 200)])
def test_the_benchmarks_have_time_and_the_report_ends_in_time(
    parts, tmp_path, monkeypatch, share, least_s
):
    now_s, limits = 0.0, {}

    def run(self, part, command, seconds, **environment):
        nonlocal now_s
        seconds = min(seconds, self.left_s() - gpu_report.GRACE_SECONDS)
        if seconds < 1:
            return None
        limits[part] = seconds
        is_late = share == 1.0
        now_s += share * seconds + is_late * gpu_report.GRACE_SECONDS
        return None if is_late else 0

    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(Report, "run", run)
    gpu_report.main([str(tmp_path), "--seconds", "520"])
    assert now_s <= 520
    assert limits["first bench"] >= 110
    if share < 1:
        assert limits["bench"] >= least_s
    if share < 0.5:
        assert all(limits[part] == s for part, s in gpu_report.RESERVED_SECONDS.items())
    ended = [f"{part}: ok" for part in (*KERNEL_TESTS, "ceilings", "converted", "hotspots")]
    ended += [f"launches of {backend}: ok" for backend in ("cuda", "triton")]
    now_s = 0.0
    limits.clear()
    (tmp_path / "summary.txt").write_text("\n".join(["sources: abc on NVIDIA H200", *ended]))
    gpu_report.main([str(tmp_path / "again"), "--seconds", "520", "--resume", str(tmp_path)])
    assert limits["bench"] >= 200
    assert now_s <= 520


SUMMARY = """sources: abc on NVIDIA H200
build: ok after 60 s: done
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
    assert gpu_report.main([str(out), "--resume", str(earlier)]) == 1  # tests 3 failed
    again = [part for part in MEASURED if part not in ("ceilings", "launches of triton")]
    assert parts == ["libraries", "tests 2", "tests 4", *again]
    first, _, *kept = (out / "summary.txt").read_text().splitlines()
    lines = SUMMARY.splitlines()
    assert first == lines[0]
    assert sorted(kept) == sorted(lines[i] for i in (2, 4, 5, 7))  # for a run that resumes this one
    assert sorted(os.listdir(out)) == ["a-gpu-lost.txt", "a-gpu.csv", "log.txt", "summary.txt"]
    assert (out / "log.txt").read_text() == ""


@pytest.mark.parametrize("sources", ["def on NVIDIA H200", "abc on NVIDIA H100"])
def test_a_report_of_other_sources_or_of_another_gpu_repeats_every_part(parts, tmp_path, sources):
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    earlier.mkdir()
    (earlier / "summary.txt").write_text(SUMMARY.replace("abc on NVIDIA H200", sources))
    (earlier / "a-gpu-lost.txt").write_text("a part that this GPU may run\n")
    assert gpu_report.main([str(out), "--resume", str(earlier)]) == 0
    assert parts == ["libraries", *KERNEL_TESTS, *MEASURED]
    assert sorted(os.listdir(out)) == ["log.txt", "summary.txt"]


def test_a_report_can_resume_in_its_own_folder(parts, tmp_path):
    (tmp_path / "a-gpu.csv").write_text("rows")
    assert gpu_report.main([str(tmp_path), "--resume", str(tmp_path)]) == 0
    assert (tmp_path / "a-gpu.csv").read_text() == "rows"


def test_a_folder_to_resume_from_that_is_not_there_is_named(parts, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_report.main([str(tmp_path / "out"), "--resume", str(tmp_path / "nowhere")])
    assert "--resume: expected a folder, got " in capsys.readouterr().err
    assert parts == []
