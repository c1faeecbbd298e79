"""Benchmarks of networks: order, rows, refused results, failing and crashing processes."""

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import preact_kernels as pk
from bench import __main__ as bench
from bench import contenders, floors, measure, network, plan
from bench.contenders import ANCHOR, BY_NAME, GROUPS, Contender, Network
from bench.measure import Ceilings, Machine
from bench.network import Session, Task, measure_steps
from bench.records import Row, put, read

CPU = torch.device("cpu")
CEILINGS = Ceilings(10.0, {"float32": 100.0})


def test_floors_count_bytes_and_products():
    # ResNet-50 has 4.09e9 multiply-adds in the forward, with a projection in each stage.
    cost = floors.network_cost(Network.named("imagenet-resnet-50"), 1, torch.bfloat16)
    assert cost.flops / 6 == pytest.approx(4.09e9, rel=0.02)
    block = Network(164).model(fused=False).stages[0][1]
    cost, height = floors.block_cost(block, 1, 32, 4)
    assert height == 32
    assert cost.bytes_moved == 46 * 16 * 32 * 32 * 4
    assert cost.flops == 3 * 2 * (16 * 64 + 9 * 16 * 16 + 16 * 64) * 32 * 32
    assert CEILINGS.floor_ms(10e6, 50e6, torch.float32) == 1.0  # ms at 10 GB/s and 100 GFLOP/s
    assert CEILINGS.floor_ms(10e6, 200e6, torch.float32) == 2.0


@pytest.mark.parametrize(
    ("device", "first"),
    [
        ("cuda", "resnet-1001, batch 128, bfloat16: uncompiled"),
        ("cpu", "resnet-1001, batch 16, float32: main"),
    ],
)
def test_the_most_important_tasks_come_first(device, first, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")

    def titles_of(*options):
        a = bench.arguments(["--device", device, *options])
        return [task.title for task in plan.tasks(a, {})]

    titles = titles_of()
    assert titles[0] == first and len(titles) == len(set(titles))
    named = titles_of("--networks", "wrn-16-10")
    assert {title.split(",")[0] for title in named} == {"wrn-16-10"}


def test_the_rivals_on_memory_are_in_a_group_with_the_anchor():
    rivals = {n for n in BY_NAME if n.startswith(("checkpoint", "selective", "compile-b"))}
    assert rivals - {"compile-blocks"} < {*GROUPS["memory rivals"], *GROUPS["compile budgets"]}
    assert all(ANCHOR in names for names in GROUPS.values())


def task_in(folder, *names, **changed):
    """Returns a task for ResNet-8 at batch 4."""
    fields = {"csv": str(folder / "cpu.csv"), "commit": "abc", "command": "python -m bench"}
    fields |= {"steps": 2, "floor_ms": 0.5, **changed}
    return Task("steps", "resnet-8", 4, "float32", names, "main", **fields)


def rows_in(folder):
    return {r.contender: r for r in read(folder / "cpu.csv", Row)}


def spoil(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps *= 30


def test_wrong_results_get_no_speed_and_the_others_get_rows(tmp_path, monkeypatch):
    fail = mock.Mock(side_effect=RuntimeError("no such thing"))
    for name, prepare in (("eager-wrong", spoil), ("eager-failing", fail)):
        monkeypatch.setitem(BY_NAME, name, Contender(name, "everything", prepare=prepare))
    right = ["eager-channels-last", "fused-store", "selective-convs", "checkpoint-block"]
    task = task_in(tmp_path, "eager-wrong", *right, "eager-failing")
    measure_steps(Session(task))
    rows = rows_in(tmp_path)
    for name in right:
        row = rows[name]
        assert (row.correct, row.shape, row.case) == ("yes", "4x3x32x32", "resnet-8")
        assert row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.x_of_floor == pytest.approx(row.median_ms / 0.5, rel=1e-4)
        assert row.images_per_s == pytest.approx(4e3 / row.median_ms, rel=1e-4)
        assert (row.commit, row.command) == ("abc", "python -m bench")
    # Autograd does not see the tensors that selective checkpointing holds.
    eager, fused, selective, checkpointed = (rows[name].saved_bytes for name in right)
    assert eager > fused > checkpointed and selective > checkpointed > 0
    for name, why in (
        ("eager-wrong", "wrong results on resnet-8: losses deviates"),
        ("eager-failing", "failed: RuntimeError: no such thing"),
    ):
        assert (rows[name].correct, rows[name].median_ms) == ("no", None)
        assert rows[name].note.startswith(why)
    assert task.missing() == []
    monkeypatch.setattr(measure, "time_once_ms", lambda *_: 7.0)
    measure_steps(Session(task_in(tmp_path, "fused-store", "fused-checkpoint")))
    later = rows_in(tmp_path)
    assert later.items() >= rows.items()
    assert later["fused-checkpoint"].note == "fused-store took 7.0 ms beside this"


def test_a_group_that_is_stopped_leaves_rounds_that_ended_and_failures(tmp_path, monkeypatch):
    times_ms = [1.0, torch.OutOfMemoryError("no room"), 2.0, KeyboardInterrupt()]
    monkeypatch.setattr(measure, "time_once_ms", mock.Mock(side_effect=times_ms))
    names = "fused-store", "fused-rebuild", "fused-checkpoint"
    with pytest.raises(KeyboardInterrupt):
        measure_steps(Session(task_in(tmp_path, *names)))
    rows = rows_in(tmp_path)
    assert [rows[name].median_ms for name in names] == [1.0, None, 2.0]
    assert rows["fused-rebuild"].note == "failed: OutOfMemoryError: no room"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith("compile") else [])
        for name, contender in BY_NAME.items()
        if not contender.graphed
    ],
)
def test_every_contender_computes_what_eager_does(name, tmp_path):
    reason = contenders.available([name], CPU)[1].get(name)
    if reason:
        pytest.skip(reason)
    session = Session(task_in(tmp_path, name))
    assert network.judged(session, BY_NAME[name]).correct == "yes"


def test_a_contender_that_compiles_for_long_leaves_time_to_the_others(tmp_path, monkeypatch):
    left = []

    def compile_for_long(model):
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        signal.raise_signal(signal.SIGALRM)

    slow = dataclasses.replace(BY_NAME["fused-rebuild"], prepare=compile_for_long)
    monkeypatch.setitem(BY_NAME, slow.name, slow)
    monkeypatch.setattr(network, "FIRST_STEP_SECONDS", 60)
    names = "fused-store", "fused-rebuild", "fused-checkpoint"
    measure_steps(Session(task_in(tmp_path, *names, end_s=time.time() + 500)))
    assert 0 < left[0] <= 60
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    rows = rows_in(tmp_path)
    assert rows["fused-rebuild"].note == "failed: TookTooLong: no first step in 60 s"
    assert rows["fused-checkpoint"].median_ms > 0


def test_a_process_that_crashes_costs_the_contender_that_ran_alone(tmp_path, monkeypatch):
    task = task_in(tmp_path, "eager-channels-last", "fused-rebuild", "fused-store")
    ran = []

    def run_process(command, seconds):
        one = Task(**json.loads(command[-1]))
        ran.append(one.missing())
        if one.kind == "peak":
            return 7
        if "fused-rebuild" in ran[-1]:
            return -6
        row = Session(one).row
        put(one.path, *(dataclasses.replace(row(n), median_ms=1.0) for n in ran[-1]))
        return 0

    monkeypatch.setattr(measure, "run_process", run_process)
    peak = dataclasses.replace(task, kind="peak", contenders=("fused-store",), group="peak")
    failed = bench.run([task, peak], CEILINGS, time.monotonic() + 500)
    assert failed == ["resnet-8, batch 4, float32: peak: failed: exit status 7"]
    rows = rows_in(tmp_path)
    assert rows["fused-rebuild"].note == "failed: the process ended with exit status -6"
    assert (rows["fused-rebuild"].correct, rows["fused-rebuild"].median_ms) == ("no", None)
    assert rows["fused-store"].median_ms and rows["eager-channels-last"].median_ms
    anchor_first = [["fused-store"], ["eager-channels-last"], ["fused-rebuild"]]
    assert ran == [list(task.contenders), *anchor_first, ["fused-store"]]


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
time.sleep(600)
"""


def test_a_process_that_hangs_is_interrupted_and_killed_with_its_children(tmp_path):
    path = tmp_path / "out"
    with path.open("w") as out:
        command = [sys.executable, "-c", HANGS]
        assert measure.run_process(command, 2, grace_s=1, stdout=out) is None
    pid, *rest = path.read_text().split()
    assert rest == ["interrupted"]
    status = Path(f"/proc/{pid}/stat")
    for _ in range(1000):  # a signal takes its time
        if not status.exists() or status.read_text().split()[2] in "ZX":  # a zombie, dead
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_a_run_has_times_peaks_and_a_table(tmp_path, monkeypatch, capsys):
    ran = []

    def run_process(command, seconds):
        ran.append(Task(**json.loads(command[-1])).kind)
        network.main(command[-1])
        return 0

    monkeypatch.setattr(measure, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(measure, "run_process", run_process)
    spoiled = dataclasses.replace(BY_NAME["fused-rebuild"], prepare=spoil)
    monkeypatch.setitem(BY_NAME, "fused-rebuild", spoiled)
    names = ["eager-channels-last", "fused-store", "checkpoint-sqrt"]
    options = ["--quick", "--networks", "resnet-8", "--batch", "4", "--device", "cpu"]
    options += ["--steps", "1", "--out", str(tmp_path)]
    assert bench.main([*options, "--contenders", *names]) == 0
    printed = capsys.readouterr().out
    assert "peak, MiB" in printed and "left out" not in printed
    (plot,) = tmp_path.glob("*.png")
    assert f"plot: {plot}" in printed
    (path,) = tmp_path.glob("*.csv")
    rows = read(path, Row)
    assert ran == ["steps", "peak", "peak", "steps", "peak"]
    assert [r.contender for r in rows] == names
    assert all(r.peak_raw_bytes > r.peak_bytes > 0 for r in rows)
    cost = floors.network_cost(Network(8), 4, torch.float32)
    assert rows[0].floor_ms == pytest.approx(CEILINGS.floor_ms(*cost, torch.float32), rel=1e-4)
    put(path, dataclasses.replace(rows[0], case="resnet-14"))
    assert bench.main([*options, "--no-plots", "--contenders", "fused-rebuild"]) == 1
    assert "WRONG: fused-rebuild on resnet-8: wrong results" in capsys.readouterr().out
    # Rows of the same network are replaced.
    left = [(r.case, r.contender) for r in read(path, Row)]
    assert left == [("resnet-14", names[0]), ("resnet-8", "fused-rebuild")]


def test_unknown_names_are_refused(capsys):
    for option, reason in (
        (["--networks", "wrn-28"], "expected one of resnet-DEPTH, preact-"),
        (["--contenders", "eager"], "contenders: expected some of eager-nchw"),
    ):
        with pytest.raises(SystemExit):
            bench.main(option)
        assert reason in capsys.readouterr().err


def test_rows_say_the_command_the_commit_and_the_backend(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(measure.ROOT / "bench/__main__.py"), "--quick"])
    assert Machine.of(CPU).command == "python -m bench --quick"
    monkeypatch.setattr(sys, "argv", [str(measure.ROOT / "bench/models.py")])
    assert Machine.of(CPU).command == "python -m bench.models"
    with pk.use_backend("reference"):
        assert Machine.of(CPU).device.endswith(", backend reference")
    monkeypatch.setenv("PREACT_KERNELS_COMMIT", "0123456789")
    assert measure.commit() == "0123456789"
    monkeypatch.delenv("PREACT_KERNELS_COMMIT")
    monkeypatch.setattr(measure, "ROOT", tmp_path)  # has no git history
    assert measure.commit() == "unknown"
