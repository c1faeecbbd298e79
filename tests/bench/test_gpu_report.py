"""The report of a GPU machine: failing or hanging parts stop no others."""

import re
import types

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

from bench import __main__ as bench
from bench import dry_run, gpu_report, launches, measure, models
from bench.gpu_report import Part, Report
from bench.records import LAUNCHES

COMPARE = ["check", "tests", "memcheck", "host-library"]
MEASURE = [
    *("ceilings", "bench", "models", "launches-cuda", "launches-triton"),
    *("bench-triton", "bench-resident", "ops"),
]
NEEDS_GPU = {"memcheck", "ceilings", "bench-triton", "bench-resident"}


def summary(folder):
    return (folder / "summary.txt").read_text().splitlines()


def test_every_part_leaves_its_output_and_a_line(tmp_path):
    report = Report(tmp_path, seconds=100)
    report.run(Part("first", ["-c", "print('one'); print('two')"], 50))
    # A sanitizer that runs out of time has found no fault.
    out_of_time = "print('not passed: memcheck (exit status 124); 124 is out of time'); exit(2)"
    report.run(Part("memcheck", ["-c", out_of_time], 50))
    assert not report.has_failed
    report.run(Part("second", ["-c", "import os; os.write(2, b'bad\\n'); raise SystemExit(7)"], 50))
    assert report.has_failed
    slow = "import time\nprint('= 3 failed, 5 passed =')\nprint('a warning', flush=True)\n"
    report.has_failed = False
    report.run(Part("tests", ["-c", slow + "time.sleep(60)"], 3, compares=True))
    assert report.has_failed
    report.end_s = 0
    report.run(Part("late", ["-c", "print(1)"], 50))
    first, _, second, third, last = summary(tmp_path)
    assert re.fullmatch(r"first: ok after \d+ s: two", first)
    assert re.fullmatch(r"second: exit status 7 after \d+ s: bad", second)
    assert re.fullmatch(r"tests: out of time after \d+ s: 3 failed, 5 passed", third)
    assert last == "late: no time left"
    log = (tmp_path / "log.txt").read_text()
    assert log.index("one\ntwo\n") < log.index("=== second: ") < log.index("bad\n")


def test_parts_that_compare_run_at_the_same_time(tmp_path):
    wait = "import pathlib, time\npathlib.Path({!r}).touch()\n"
    wait += "while not pathlib.Path({!r}).exists(): time.sleep(0.01)\nprint('met')"
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    parts = [
        Part("a", ["-c", wait.format(one, two)], 50, compares=True),
        Part("b", ["-c", wait.format(two, one)], 50, compares=True),
    ]
    Report(tmp_path, seconds=100).run_together(parts)
    assert all(re.fullmatch(r"[ab]: ok after \d+ s: met", line) for line in summary(tmp_path))
    assert (tmp_path / "log.txt").read_text().count("\nmet\n") == 2


@pytest.fixture
def machine(monkeypatch):
    """A machine with processes that only take a share of their limit.

    Records commands, environments and limits by part, in order.
    """
    found = types.SimpleNamespace(
        commands={}, environments={}, limits={}, share=0.1, now_s=0.0, has_gpu=True, is_stale=False
    )
    run = Report.run

    def run_part(self, part):
        found.part = part.name
        run(self, part)

    def run_together(self, parts):
        """Takes the time of the longest part."""
        begin_s, ends_s = found.now_s, [found.now_s]
        for part in parts:
            found.now_s = begin_s
            self.run(part)
            ends_s.append(found.now_s)
        found.now_s = max(ends_s)

    def run_process(command, seconds, grace_s, **options):
        found.commands[found.part], found.limits[found.part] = command, seconds
        found.environments[found.part] = options["env"]
        is_late = found.share == 1
        found.now_s += seconds + grace_s if is_late else found.share * seconds
        return None if is_late else 0

    monkeypatch.setattr(Report, "run", run_part)
    monkeypatch.setattr(Report, "run_together", run_together)
    monkeypatch.setattr(measure, "run_process", run_process)
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: found.now_s)
    monkeypatch.setattr(gpu_report, "LIBRARIES", [gpu_report.ROOT / "setup.py"])
    monkeypatch.setattr(dry_run, "is_stale", lambda library: found.is_stale)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    return found


def test_the_most_important_parts_come_first_and_some_need_a_gpu(machine, tmp_path):
    assert gpu_report.main([str(tmp_path)]) == 0
    assert list(machine.commands) == [*COMPARE, *MEASURE]
    names = [line.split(":")[0] for line in summary(tmp_path)]
    assert names == ["sources", "build", *COMPARE, *MEASURE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "summary.txt"]
    machine.has_gpu, machine.is_stale = False, True
    machine.commands.clear()
    gpu_report.main([str(tmp_path)])
    without_gpu = [p for p in (*COMPARE, *MEASURE) if p not in NEEDS_GPU]
    assert list(machine.commands) == ["build", *without_gpu]


def test_parts_can_be_chosen(machine, tmp_path, capsys):
    gpu_report.main([str(tmp_path), "--parts", "bench", "tests", "--networks", "resnet-20"])
    assert list(machine.commands) == ["tests", "bench"]
    with pytest.raises(SystemExit):
        gpu_report.main([str(tmp_path), "--parts", "no-such-part"])
    assert "--parts: expected some of check, tests, " in capsys.readouterr().err


def test_the_commands_are_understood(machine, tmp_path):
    gpu_report.main([str(tmp_path), "--steps", "7"])
    options = {part: command[3:] for part, command in machine.commands.items()}
    for part in ("bench", "bench-triton", "bench-resident"):
        assert machine.commands[part][1:3] == ["-m", "bench"]
        a = bench.arguments(options[part])
        assert (a.out, a.steps) == (tmp_path, 7)
        assert (a.contenders is None) == (part == "bench")
        assert a.time_limit <= machine.limits[part] - 10
    for backend in ("cuda", "triton"):
        part = f"launches-{backend}"
        a = launches.arguments(options[part])
        assert (a.backend, a.csv) == (backend, tmp_path / f"nvidia-h200{LAUNCHES}")
        assert machine.environments[part]["TEARDOWN_CUPTI"] == "0"
    assert machine.environments["bench-triton"]["PREACT_KERNELS_BACKEND"] == "triton"
    assert machine.environments["bench-resident"]["PREACT_KERNELS_RESIDENT_RUNS"] == "1"
    assert set(gpu_report.MODELS) < {c.name for c in models.CONTENDERS}
    for word in machine.commands["tests"]:
        name = word.removeprefix("--ignore=")
        assert not name.startswith("tests/") or (gpu_report.ROOT / name).exists(), name


# Share of its limit that every part takes; 1: it is killed.
@pytest.mark.parametrize(("share", "least_s"), [(1.0, 0), (0.6, 60)])
def test_the_benchmarks_have_time_and_the_report_ends_in_time(machine, tmp_path, share, least_s):
    machine.share = share
    gpu_report.main([str(tmp_path), "--seconds", "519"])
    assert machine.now_s <= 519
    assert machine.limits["bench"] >= 100
    assert machine.limits.get("bench-resident", 0) >= least_s
