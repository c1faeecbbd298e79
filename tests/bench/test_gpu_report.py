"""The report of a GPU machine: failing or hanging parts stop no others; libraries are current."""

import dataclasses
import os
import re
import shutil
import signal
import types

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

from bench import __main__ as bench
from bench import block_shapes, contenders, converted, gpu_report, launches, measure, rivals
from bench.contenders import GROUPS
from bench.gpu_report import Part, Report
from bench.records import LAUNCHES


def summary(folder):
    return (folder / "summary.txt").read_text().splitlines()


def test_every_part_leaves_its_output_and_a_line(tmp_path, capfd):
    report = Report(tmp_path, seconds=100)
    assert report.run(Part("first", ["-c", "print('one'); print('two')"], 50)) == 0
    assert not report.has_failed
    late = Part("second", ["-c", "import os; os.write(2, b'bad\\n'); raise SystemExit(7)"], 50)
    assert report.run(late, [Part("third", [], 50, reserved=10)]) == 7
    assert report.has_failed
    slow = "import time\nprint('= 3 failed, 5 passed =')\nprint('a warning', flush=True)\n"
    report.has_failed = False
    assert report.run(Part("tests", ["-c", slow + "time.sleep(60)"], 3)) is None
    assert report.has_failed
    assert report.run(Part("quiet", ["-c", "print('three')"], 50)) == 0
    report.end_s = 0
    assert report.run(Part("late", ["-c", "print(1)"], 50)) is None
    first, second, third, fourth, last = summary(tmp_path)
    assert re.fullmatch(r"first: ok after \d+ s: two", first)
    assert re.fullmatch(r"second: exit status 7 after \d+ s: bad", second)
    assert re.fullmatch(r"tests: out of time after \d+ s: 3 failed, 5 passed", third)
    assert re.fullmatch(r"quiet: ok after \d+ s: three", fourth)
    assert last == "late: no time left"
    log = (tmp_path / "log.txt").read_text()
    assert "\nfirst: ok after " in capfd.readouterr().out.join("\n\n")
    assert log.index("one\ntwo\n") < log.index("=== second: ") < log.index("bad\n")


def test_the_log_leaves_out_the_middle_of_long_output(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "LOG_BYTES", 2000)
    report = Report(tmp_path, seconds=100)
    report.run(Part("long", ["-c", "print(*range(3000), 'e' 'nd')"], 50))
    report.run(Part("next", ["-c", "print('t' 'wo')"], 50))
    log = (tmp_path / "log.txt").read_text()
    assert 2000 < len(log) < 3000
    assert log.index("\n0 1 2 ") < log.index("middle is left out") < log.index(" 2999 end\n")
    assert log.index(" end\n") < log.index("=== next: ") < log.index("\ntwo\n")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small tree with a source and two libraries; they load unless a file `broken` exists."""
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
    assert gpu_report.is_built()
    return tmp_path


@pytest.mark.parametrize(
    "name", ["csrc/cuda/kernel.cu", "csrc/new.h", "preact_kernels/_cuda.so", "broken"]
)
def test_libraries_of_other_sources_or_that_do_not_load_are_built_again(tree, name):
    (tree / name).write_text("changed")
    assert not gpu_report.is_built()


def test_every_file_of_tests_that_is_named_exists():
    for name in (*gpu_report.KERNEL_TESTS, *gpu_report.WITHOUT_GPU):
        assert os.path.exists(gpu_report.ROOT / "tests" / f"{name}.py"), name


TESTS = ["check", "tests", "memcheck", "compiled shapes"]
MEASURED = [
    *("ceilings", "first bench", "launches of cuda", "launches of triton"),
    *("bench of triton", "block shapes", "bench", "converted", "rivals", "hotspots"),
]
NEEDS_GPU = {
    *("memcheck", "compiled shapes"),
    *("ceilings", "first bench", "bench of triton", "block shapes"),
}


@pytest.fixture
def machine(monkeypatch):
    """A machine with processes that only take a share of their limit.

    Records commands, environments and limits by part, in order. Parts that run together take the
    time of the longest.
    """
    found = types.SimpleNamespace(
        commands={}, environments={}, limits={}, share=0.1, late=(), now_s=0.0, has_gpu=True
    )
    run = Report.run

    def run_part(self, part, later=()):
        found.part = part.name
        return run(self, part, later)

    def run_together(self, parts):
        begin_s, ended, ends_s = found.now_s, {}, [found.now_s]
        for part in parts:
            found.now_s = begin_s
            ended[part.name] = self.run(part)
            ends_s.append(found.now_s)
        found.now_s = max(ends_s)
        return ended

    def run_process(command, seconds, grace_s, **options):
        found.commands[found.part], found.limits[found.part] = command, seconds
        found.environments[found.part] = options["env"]
        is_late = found.share == 1 or found.part in found.late
        found.now_s += seconds + grace_s if is_late else found.share * seconds
        return None if is_late else 0

    monkeypatch.setattr(Report, "run", run_part)
    monkeypatch.setattr(Report, "run_together", run_together)
    monkeypatch.setattr(measure, "run_process", run_process)
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: found.now_s)
    monkeypatch.setattr(gpu_report, "is_built", lambda: True)
    monkeypatch.setattr(gpu_report, "commit", lambda: "abc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.has_gpu)
    monkeypatch.setattr(contenders, "lack_of_resident_runs", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return found


def test_the_most_important_parts_come_first(machine, tmp_path):
    assert gpu_report.main([str(tmp_path)]) == 0
    assert list(machine.commands) == ["libraries", *TESTS, *MEASURED]
    assert sorted(os.listdir(tmp_path)) == ["log.txt", "passed.txt", "summary.txt"]
    assert [line.split(":")[0] for line in summary(tmp_path)] == [
        "sources", "build", "libraries", *TESTS, *MEASURED,
    ]  # fmt: skip


def test_a_dry_run_has_the_parts_that_need_no_gpu(machine, tmp_path):
    machine.has_gpu = False
    assert gpu_report.main([str(tmp_path)]) == 0
    parts = [part for part in (*TESTS, *MEASURED) if part not in NEEDS_GPU]
    assert list(machine.commands) == ["libraries", *parts]


def test_for_another_machine_all_is_built_that_takes_long(machine, tmp_path):
    machine.has_gpu = False
    assert gpu_report.main([str(tmp_path), "--only-build"]) == 0
    recordings = [f"recording of {backend}" for backend in ("cuda", "triton")]
    assert list(machine.commands) == ["libraries", "probes", *recordings]
    for name, backend in zip(recordings, ("cuda", "triton"), strict=True):
        assert machine.commands[name][1:] == gpu_report.launches_of(backend)


def test_the_commands_are_understood(machine, tmp_path):
    gpu_report.main([str(tmp_path), "--steps", "7"])
    options = {part: command[3:] for part, command in machine.commands.items()}
    for part, resumes, named in (
        ("first bench", False, GROUPS["uncompiled"]),
        ("bench", True, None),
        ("bench of triton", False, ("fused-store", "fused-graph", "fused-rebuild-graph")),
    ):
        assert machine.commands[part][1:3] == ["-m", "bench"]
        a = bench.arguments(options[part])
        assert (a.out, a.steps, a.resume) == (tmp_path, 7, resumes)
        assert a.contenders == (named and list(named))
        assert a.time_limit <= machine.limits[part] - 10
    for backend in ("cuda", "triton"):
        part = f"launches of {backend}"
        a = launches.arguments(options[part])
        assert (a.backend, a.csv) == (backend, tmp_path / f"nvidia-h200{LAUNCHES}")
        assert machine.environments[part]["TEARDOWN_CUPTI"] == "0"
        assert a.recording == gpu_report.ROOT / "build" / f"launches-{backend}.pickle"
    for part, compiles in (("compiled shapes", True), ("block shapes", False)):
        a = block_shapes.arguments(options[part])
        assert (a.only_compile, a.compile > 0, a.resume) == (compiles, compiles, True)
        assert a.out == tmp_path
    named = [part for part, e in machine.environments.items() if "PREACT_KERNELS_BACKEND" in e]
    assert named == ["bench of triton"]
    assert set(gpu_report.CONVERTED_MODELS) < set(converted.CASES)
    assert set(gpu_report.RIVALS) < {c.name for c in rivals.CONTENDERS}
    assert options["converted"][:3] == ["--no-graphs", "--out", str(tmp_path)]


# Share of its limit that every part takes; 1: it is killed.
@pytest.mark.parametrize(("share", "least_s"), [(1.0, 0), (0.6, 70), (0.2, 180)])
def test_the_benchmarks_have_time_and_the_report_ends_in_time(machine, tmp_path, share, least_s):
    machine.share = share
    gpu_report.main([str(tmp_path), "--seconds", "519"])
    assert machine.now_s <= 519
    assert machine.limits["first bench"] >= 100
    assert machine.limits.get("bench", 0) >= least_s


def test_benchmarks_that_are_killed_leave_time_to_the_parts_behind_them(machine, tmp_path):
    machine.late = ("bench",)
    gpu_report.main([str(tmp_path), "--seconds", "520"])
    assert machine.limits["converted"] == machine.limits["bench of triton"] == 60
    assert machine.limits["hotspots"] == 45
    assert machine.now_s <= 520


SUMMARY = """sources: abc on NVIDIA H200
build: ok after 60 s: done
check: ok after 40 s: all results are right; 39 s
memcheck: out of time after 140 s: 20 passed in 139 s
tests: exit status 1 after 20 s: 1 failed, 100 passed in 19 s
ceilings: ok after 20 s: done
a line that no part has
launches of cuda: exit status 1 after 20 s: done
launches of triton: ok after 20 s: done
bench: ok after 200 s: done
hotspots: out of time after 45 s: done
"""


def test_a_report_that_resumes_keeps_the_rows_and_the_parts_that_ended(machine, tmp_path):
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    earlier.mkdir()
    for name in ("a-gpu.csv", "log.txt"):
        (earlier / name).write_text("rows")
    (earlier / "summary.txt").write_text(SUMMARY)
    assert gpu_report.main([str(out), "--resume", str(earlier)]) == 0
    again = [part for part in MEASURED if part not in ("ceilings", "launches of triton")]
    assert list(machine.commands) == ["libraries", *TESTS[1:], *again]
    assert "--resume" in machine.commands["bench"] and "--resume" in machine.commands["converted"]
    lines = SUMMARY.splitlines()
    assert {lines[i] for i in (0, 2, 5, 8)} < set(summary(out))  # a later report can resume
    assert lines[-1] not in summary(out)
    assert sorted(os.listdir(out)) == ["a-gpu.csv", "log.txt", "passed.txt", "summary.txt"]


def test_tests_that_had_no_time_run_again_without_those_that_passed(machine, tmp_path, monkeypatch):
    ran = []
    run_process = measure.run_process

    def run_tests(command, seconds, *args, stdout, **options):
        if "pytest" in command:
            ran.append((tmp_path / "passed.txt").read_text().splitlines())
            stdout.write(b"[gw1] [ 5%] PASSED tests/a.py::test_b[(1, 2)-x] \n")
            stdout.write(b"[gw0] [ 5%] FAILED tests/a.py::test_c \n")
            stdout.write(b"tests/a.py::test_d SKIPPED (no GPU)  [ 7%]\n")
        return run_process(command, seconds, *args, stdout=stdout, **options)

    monkeypatch.setattr(measure, "run_process", run_tests)
    machine.late = ("tests",)
    passed = ["tests/a.py::test_b[(1, 2)-x]", "tests/a.py::test_d"]
    gpu_report.main([str(tmp_path)])
    assert ran == [[], passed]
    assert f"{tmp_path}/passed.txt" in machine.commands["tests"]
    assert machine.limits["tests"] > 150  # what was left in the end
    gpu_report.main([str(tmp_path), "--resume", str(tmp_path)])
    assert ran[2] == 2 * passed
    machine.late = ()
    gpu_report.main([str(tmp_path)])  # does not resume
    assert ran[4:] == [[]]


SOME_PASS = """import pytest
def test_a(): pass
def test_a_b(): assert False
@pytest.mark.parametrize("x", ["1", "1]2"])
def test_c(x): assert x == "1"
"""


def test_a_test_that_failed_runs_again_though_its_name_begins_with_one_that_passed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(measure, "ROOT", tmp_path)  # where processes run
    monkeypatch.setenv("PYTHONPATH", str(gpu_report.ROOT))
    (tmp_path / "pytest.ini").touch()  # names begin with tests/
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_names.py").write_text(SOME_PASS)
    part = gpu_report.tests(tmp_path, 60)
    options = [word for word in part.command if not word.startswith("tests/")]
    report = Report(tmp_path, seconds=200)
    for _ in range(2):
        report.run(dataclasses.replace(part, command=[*options, "tests/test_names.py"]))
    first, second = summary(tmp_path)
    assert " 2 failed, 2 passed" in first
    assert " 2 failed" in second and "passed" not in second


def test_parts_that_compare_run_at_the_same_time(tmp_path):
    wait = "import pathlib, time\npathlib.Path({!r}).touch()\n"
    wait += "while not pathlib.Path({!r}).exists(): time.sleep(0.01)\nprint('met')"
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    parts = [
        Part("a", ["-c", wait.format(one, two)], 50, compares=True),
        Part("b", ["-c", wait.format(two, one)], 50, compares=True),
    ]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as if started in the background
    try:
        assert Report(tmp_path, seconds=100).run_together(parts) == {"a": 0, "b": 0}
    finally:
        signal.signal(signal.SIGINT, before)
    assert all(re.fullmatch(r"[ab]: ok after \d+ s: met", line) for line in summary(tmp_path))
    assert (tmp_path / "log.txt").read_text().count("\nmet\n") == 2


def test_a_sanitizer_that_runs_out_of_time_has_found_no_fault(tmp_path):
    report = Report(tmp_path, seconds=100)
    script = "print('not passed: memcheck (exit status 124); 124 and 137 are out of time')\nexit(2)"
    assert report.run(Part("memcheck", ["-c", script], 50)) is None
    assert not report.has_failed
    report.run(Part("memcheck", ["-c", script.replace("124)", "1)")], 50))
    assert report.has_failed


@pytest.mark.parametrize("sources", ["def on NVIDIA H200", "abc on NVIDIA H100"])
def test_a_report_of_other_sources_or_of_another_gpu_repeats_every_part(machine, tmp_path, sources):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "summary.txt").write_text(SUMMARY.replace("abc on NVIDIA H200", sources))
    (earlier / "passed.txt").write_text("tests/a.py::test_b\n")
    assert gpu_report.main([str(tmp_path / "out"), "--resume", str(earlier)]) == 0
    assert list(machine.commands) == ["libraries", *TESTS, *MEASURED]
    assert (tmp_path / "out" / "passed.txt").read_text() == ""


def test_a_report_can_resume_in_its_own_folder_alone_if_it_exists(machine, tmp_path, capsys):
    (tmp_path / "a-gpu.csv").write_text("rows")
    assert gpu_report.main([str(tmp_path), "--resume", str(tmp_path)]) == 0
    assert (tmp_path / "a-gpu.csv").read_text() == "rows"
    with pytest.raises(SystemExit):
        gpu_report.main([str(tmp_path / "out"), "--resume", str(tmp_path / "nowhere")])
    assert "--resume: expected a folder, got " in capsys.readouterr().err
