"""Benchmarks of networks: order, rows, refused results, crashing processes, resumed runs."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

import preact_kernels as pk
from bench import __main__ as bench
from bench import contenders, floors, hotspots, measure, network, plan, report, scaling
from bench.contenders import ANCHOR, BY_NAME, GROUPS, Contender, Network
from bench.measure import Ceilings, Machine, Timing
from bench.network import Session, Task, measure_steps
from bench.records import Row, ScalingRow, put, read
from preact_kernels.kernels import cuda
from preact_kernels.ops import dispatch
from preact_kernels.study import data
from tests.torchrun import torchrun

CPU = torch.device("cpu")
CEILINGS = Ceilings(10.0, {"float32": 100.0})


@pytest.fixture(autouse=True)
def images(monkeypatch):
    """Digits are loaded once, so the truth is computed once."""
    monkeypatch.setattr(data, "load", lambda folder=None: digits())


digits = functools.cache(data.load_digits)


@pytest.mark.parametrize(
    ("name", "block", "parameters"),
    [
        ("resnet-20", "basic", 0.27),
        ("wrn-28-10", "basic", 36.5),  # arXiv 1605.07146
        ("imagenet-resnet-50", "bottleneck", 25.5),
    ],
)
def test_networks_go_by_name(name, block, parameters):
    found = Network.named(name)
    assert (found.name, found.block) == (name, block)
    with torch.device("meta"):
        count = sum(p.numel() for p in found.model(fused=False).parameters())
    assert count / 1e6 == pytest.approx(parameters, rel=0.01)


def test_what_cannot_run_is_refused(capsys):
    for main, arguments, reason in (
        (bench.main, ["--networks", "wrn-28"], "expected one of resnet-DEPTH, preact-"),
        (bench.main, ["--contenders", "eager"], "contenders: expected some of eager-nchw"),
        (hotspots.main, ["--network", "vgg-16"], "expected one of resnet-DEPTH"),
        (hotspots.main, ["fused-graph", "--device", "cpu"], "CUDA graphs: no GPU"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert reason in capsys.readouterr().err


def test_a_bottleneck_moves_46_times_its_inner_channels():
    block = Network(164).model(fused=False).stages[0][1]
    cost, height = floors.block_cost(block, 1, 32, 4)
    assert height == 32
    assert cost.bytes_moved == 46 * 16 * 32 * 32 * 4
    products = 16 * 64 + 9 * 16 * 16 + 16 * 64
    assert cost.flops == 3 * 2 * products * 32 * 32
    mixed, _ = floors.block_cost(block, 1, 32, 2, stream_itemsize=4)
    assert mixed.bytes_moved == (46 + 32) * 16 * 32 * 32 * 2  # x, y and dy: 32 more


def test_floors_count_every_product_of_a_network():
    # ResNet-50 has 4.09e9 multiply-adds in the forward, with a projection in each stage.
    cost = floors.network_cost(Network.named("imagenet-resnet-50"), 1, torch.bfloat16)
    assert cost.flops / 6 == pytest.approx(4.09e9, rel=0.02)


def test_calls_take_turns_and_a_failing_one_is_left_out():
    order, failed = [], []

    def call(name):
        order.append(name)
        if len(order) == 4:
            raise torch.OutOfMemoryError("no room")

    calls = {name: lambda name=name: call(name) for name in "ab"}
    times = measure.time_in_turn(
        calls, rounds=3, device=CPU, failed=lambda *found: failed.append(found)
    )
    assert order == ["a", "b", "a", "b", "a"]
    assert list(times) == ["a"]
    assert [(name, str(error)) for name, error in failed] == [("b", "no room")]
    order.clear()
    measure.time_in_turn(calls, rounds=3, device=CPU, deadline_s=time.time())
    assert order == ["a", "b"]  # only the first round


def test_a_group_that_is_stopped_leaves_the_rounds_that_ended(tmp_path, monkeypatch):
    rounds = []

    def time_once_ms(call, device):
        rounds.append(call)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return float(len(rounds))

    monkeypatch.setattr(measure, "time_once_ms", time_once_ms)
    with pytest.raises(KeyboardInterrupt):
        measure_steps(Session(task_in(tmp_path, "fused-store", "fused-rebuild")))
    times = {name: row.median_ms for name, row in rows_in(tmp_path).items()}
    assert times == {"fused-store": 1.0, "fused-rebuild": 2.0}


def test_a_timing_is_the_median_and_two_percentiles():
    assert Timing.of([5.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx((3.0, 1.8, 4.2))


def titles_of(*options, device):
    """Returns the titles of a run's tasks, as if the machine had the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
        patch.setattr(contenders, "lack_of_resident_runs", lambda: "")
        a = bench.arguments(["--device", device, *options])
    a.usable = [c for c in BY_NAME.values() if c.name != "inplace-abn"]
    titles = [task.title for task in plan.Plan(a, {}).tasks()]
    assert len(titles) == len(set(titles))
    return titles


@pytest.mark.parametrize(
    ("device", "in_turn"),
    [
        (
            "cuda",
            [
                "resnet-1001, batch 128, bfloat16: uncompiled",
                "resnet-1001, batch 128, bfloat16: compiled",
                "resnet-1001, batch 128, bfloat16: compiled and captured",
                "resnet-1001, batch 256, bfloat16: uncompiled",
                "imagenet-resnet-50, batch 256, bfloat16: wide networks",
                "wrn-28-10, batch 128, bfloat16: wide networks",
                "resnet-1001, batch 128, bfloat16: ops",
                "resnet-1001, batch 128, bfloat16: memory rivals",
                "resnet-1001, batch 128, bfloat16: compile budgets",
                "resnet-10001, batch 128, bfloat16: deepest",
                "resnet-1001, batch 64, bfloat16: uncompiled",
                "resnet-1001, batch 128, float32: uncompiled",
                "resnet-1001, batch 128, bfloat16: 10 steps of training",
                "resnet-164, batch 128, bfloat16: uncompiled",
                "resnet-164, batch 128, bfloat16: memory rivals",
                "resnet-2999, batch 1, bfloat16: kept bytes",
            ],
        ),
        (
            "cpu",
            [
                "resnet-1001, batch 16, float32: main",
                "resnet-164, batch 16, float32: 20 steps of training",
                "resnet-164, batch 16, bfloat16: against eager",
                "preact-resnet-18, batch 16, float32: against eager",
                "resnet-1001, batch 16, float32: peak memory of fused-rebuild",
                "resnet-1001, batch 16, float32: memory rivals",
                "resnet-164, batch 16, float32: main",
                "resnet-1001, batch 16, float32: compile budgets",
                "resnet-1001, batch 16, float32: ops",
                "resnet-164, batch 16, float32: memory rivals",
                "resnet-1001, batch 1, float32: kept bytes",
                "imagenet-resnet-50, batch 4, bfloat16: against eager",
            ],
        ),
    ],
)
def test_the_most_important_tasks_come_first(device, in_turn):
    titles = titles_of(device=device)
    places = [titles.index(title) for title in in_turn]
    assert places == sorted(places)
    assert places[0] == 0
    assert not any("float32" in title for title in titles_of("--dtype", "bf16", device=device))


def test_the_rivals_on_memory_are_in_a_group_with_the_anchor():
    rivals = {*GROUPS["memory rivals"], *GROUPS["compile budgets"]}
    assert {n for n in BY_NAME if n.startswith(("checkpoint", "selective", "compile-b"))} - {
        "compile-blocks"
    } < rivals
    assert all(ANCHOR in names for names in GROUPS.values())


@pytest.mark.parametrize(
    ("images", "dtype", "refusal"),
    [
        (128, torch.bfloat16, ""),
        (128, torch.float16, ""),
        (128, torch.float32, "resident runs: expected float16 or bfloat16, got torch.float32"),
        (133, torch.bfloat16, "resident runs: expected at most 132 images, got 133"),
    ],
)
def test_a_resident_contender_is_timed_only_where_its_runs_are_resident(
    images, dtype, refusal, monkeypatch
):
    """Elsewhere the library runs unit by unit."""
    monkeypatch.setattr(contenders, "lack_of_resident_runs", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    a = bench.arguments(["--device", "cuda", "--batch", str(images)])
    a.dtype = dtype
    tasks = plan.Plan(a, {"stem": "", "commit": "", "command": ""}).tasks()
    names = next(task for task in tasks if task.group == "uncompiled").contenders
    assert ("fused-resident-graph" in names) == (not refusal)
    tasks = plan.Plan(a, {"stem": "", "commit": "", "command": ""}).tasks()
    basic = [task.contenders for task in tasks if task.network == "resnet-110"]
    assert basic and not any("fused-resident-graph" in names for names in basic)
    assert {"fused-graph", "eager-graph"} <= {*names}

    used = []

    class Stage(nn.Module):
        def forward(self, x):
            used.append(cuda.RESIDENT_RUNS)
            if len(used) == 2:
                raise ValueError("planted")
            return x

    model = types.SimpleNamespace(stages=[Stage()])
    BY_NAME["fused-resident-graph"].prepare(model)
    x = torch.empty(images, 1, 1, 1, dtype=dtype)
    if refusal:
        with pytest.raises(RuntimeError, match=refusal):
            model.stages[0](x)
    else:
        assert model.stages[0](x) is x
        with pytest.raises(ValueError, match="planted"):
            model.stages[0](x)
    assert used == ([] if refusal else [True, True]) and not cuda.RESIDENT_RUNS


def test_a_resident_contender_needs_the_library(monkeypatch):
    device, names = torch.device("cuda"), ["fused-graph", "fused-resident-graph"]
    for error, backend, reason in (
        ("no library", "auto", "resident runs: no library"),
        ("", "triton", "resident runs: the backend is triton"),
    ):
        monkeypatch.setattr(cuda, "load_error", lambda error=error: error)
        monkeypatch.setattr(dispatch, "_current", backend)
        assert contenders.available(names, device)[1] == {"fused-resident-graph": reason}


def task_in(folder, *names, **changed):
    """Returns a task for ResNet-8 at batch 4."""
    fields = {"stem": str(folder / "a-cpu"), "commit": "abc", "command": "python -m bench"}
    fields |= {"steps": 2, "floor_ms": 0.5, **changed}
    return Task(fields.pop("kind", "steps"), "resnet-8", 4, "float32", names, "main", **fields)


def rows_in(folder):
    return {r.contender: r for r in read(folder / "a-cpu.csv", Row)}


def change(monkeypatch, name, prepare):
    """Adds a contender with a changed model."""
    base = BY_NAME.get(name, Contender(name, "everything"))
    monkeypatch.setitem(BY_NAME, name, dataclasses.replace(base, prepare=prepare))


def spoil(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps *= 30


def fail(model):
    raise RuntimeError("no such thing")


def test_wrong_results_get_no_speed_and_the_others_get_rows(tmp_path, monkeypatch):
    change(monkeypatch, "eager-wrong", spoil)
    change(monkeypatch, "eager-failing", fail)
    right = ["eager-channels-last", "fused-store", "fused-rebuild"]
    task = task_in(tmp_path, "eager-wrong", *right, "eager-failing")
    measure_steps(Session(task))
    rows, here = rows_in(tmp_path), Machine.of(CPU)
    for name in right:
        row = rows[name]
        assert (row.correct, row.shape, row.case) == ("yes", "4x3x32x32", "resnet-8")
        assert row.median_ms > 0 and row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.floor_ms == 0.5
        assert row.x_of_floor == pytest.approx(row.median_ms / 0.5, rel=1e-4)
        assert row.images_per_s == pytest.approx(4e3 / row.median_ms, rel=1e-4)
        assert row.note.startswith("built and first step in")
        assert (row.device, row.versions) == (here.device, here.versions)
        assert (row.commit, row.command) == ("abc", "python -m bench")
        assert row.date
    assert rows["fused-store"].saved_bytes < rows["eager-channels-last"].saved_bytes
    for name, why in (
        ("eager-wrong", "wrong results on resnet-8: losses deviates"),
        ("eager-failing", "failed: RuntimeError: no such thing"),
    ):
        assert (rows[name].correct, rows[name].median_ms) == ("no", None)
        assert rows[name].note.startswith(why)
    assert "eager-wrong" not in "".join(report.best_rivals(list(rows.values())))
    assert task.missing() == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith("compile") else [])
        for name, contender in BY_NAME.items()
        if not contender.graphed
    ],
)
def test_every_contender_computes_what_eager_does(name, tmp_path):
    reason = bench.available([name], CPU)[1].get(name)
    if reason:
        pytest.skip(reason)
    session = Session(task_in(tmp_path, name))
    assert network.judged(session, BY_NAME[name]).correct == "yes"


def test_a_resumed_group_measures_what_is_missing_beside_the_anchor(tmp_path, monkeypatch):
    first = task_in(tmp_path, "fused-store", "fused-rebuild")
    measure_steps(Session(first))
    before = rows_in(tmp_path)
    monkeypatch.setattr(measure, "time_once_ms", lambda *_: 7.0)
    more = dataclasses.replace(first, contenders=(*first.contenders, "eager-channels-last"))
    assert more.missing() == ["eager-channels-last"]
    measure_steps(Session(more))
    rows = rows_in(tmp_path)
    assert rows.items() >= before.items()
    assert rows["eager-channels-last"].note.endswith("; fused-store took 7.0 ms beside this")
    assert dataclasses.replace(more, commit="def").missing() == list(more.contenders)


def test_a_contender_that_breaks_its_gpu_is_named_and_ends_the_process(tmp_path, monkeypatch):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access")

    def stray(model):
        monkeypatch.setattr(measure, "synchronize", lost)
        raise RuntimeError("CUDA error: launch failure")

    change(monkeypatch, "fused-store", stray)
    session = Session(task_in(tmp_path, "fused-store", "fused-rebuild"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure_steps(session)
    assert (
        rows_in(tmp_path)["fused-store"].note == "failed: RuntimeError: CUDA error: launch failure"
    )
    assert session.task.missing() == ["fused-rebuild"]


@pytest.fixture
def processes(monkeypatch):
    """Measures tasks in this process, or calls `crash`; `ran`: missing contenders of each task."""
    found = types.SimpleNamespace(ran=[], crash=lambda task: None)

    def run_process(command, seconds):
        task = Task(**json.loads(command[-1]))
        found.ran.append(task.missing())
        status = found.crash(task)
        if status is None:
            measure_steps(Session(task))
        return status or 0

    monkeypatch.setattr(measure, "run_process", run_process)
    return found


def run(task):
    return bench.run([task], CEILINGS, time.monotonic() + 500)


def test_a_process_that_crashes_costs_the_contender_that_ran_alone(tmp_path, processes):
    task = task_in(tmp_path, "eager-channels-last", "fused-rebuild", "fused-store")
    processes.crash = lambda one: -6 if "fused-rebuild" in one.missing() else None
    assert run(task) == []
    rows = rows_in(tmp_path)
    assert rows["fused-rebuild"].note == "failed: the process ended with exit status -6"
    assert (rows["fused-rebuild"].correct, rows["fused-rebuild"].median_ms) == ("no", None)
    assert rows["fused-store"].median_ms > 0 and rows["eager-channels-last"].median_ms > 0
    assert "fused-store took" in rows["eager-channels-last"].note
    anchor_first = [["fused-store"], ["eager-channels-last"], ["fused-rebuild"]]
    assert processes.ran == [list(task.contenders), *anchor_first]


def test_a_process_that_names_the_contender_that_broke_it_is_followed_by_one(tmp_path, processes):
    task = task_in(tmp_path, "fused-store", "fused-rebuild", "fused-checkpoint")

    def crash(one):
        if len(processes.ran) > 1:
            return None
        put(task.path, dataclasses.replace(Session(one).row("fused-store"), correct="no"))
        return 1

    processes.crash = crash
    assert run(task) == []
    assert processes.ran == [list(task.contenders), ["fused-rebuild", "fused-checkpoint"]]
    processes.crash = lambda one: 7
    (line,) = run(dataclasses.replace(task, kind="curves"))
    assert ": failed: exit status 7: fused-store, fused-rebuild, fused-checkpoint" in line


def test_a_process_that_overruns_leaves_its_rows_and_those_of_other_commits(tmp_path, monkeypatch):
    task = task_in(tmp_path, "fused-store", "fused-rebuild", "fused-checkpoint")
    old = Session(dataclasses.replace(task, commit="old")).row("fused-rebuild")
    put(task.path, dataclasses.replace(old, median_ms=2.0))
    ends_s = []

    def overrun(command, seconds):
        session = Session(task)
        ends_s.append((Task(**json.loads(command[-1])).end_s, time.time() + seconds))
        put(task.path, dataclasses.replace(session.row("fused-store"), median_ms=1.0))
        monkeypatch.setattr(bench, "LEAST_SECONDS", 99)

    monkeypatch.setattr(measure, "run_process", overrun)
    late = dataclasses.replace(task, group="late")
    (left_out, too) = bench.run([task, late], CEILINGS, time.monotonic() + 60)
    assert left_out.endswith("main: no time left: fused-rebuild, fused-checkpoint")
    assert "late: no time left" in too
    ((inner_s, outer_s),) = ends_s
    assert inner_s <= outer_s < time.time() + 51  # the process can end in time
    rows = rows_in(tmp_path)
    assert rows.keys() == {"fused-store", "fused-rebuild"}
    assert (rows["fused-rebuild"].commit, rows["fused-rebuild"].median_ms) == ("old", 2.0)


@pytest.mark.parametrize("cap_s", [60, 600])
def test_a_contender_that_compiles_for_long_leaves_time_to_the_others(tmp_path, monkeypatch, cap_s):
    left = []

    def compile_for_long(model):
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        if cap_s == 600:  # the alarm rings when there is no time left
            monkeypatch.setattr(network.time, "time", lambda now_s=time.time: now_s() + 400)
        signal.raise_signal(signal.SIGALRM)

    change(monkeypatch, "fused-rebuild", compile_for_long)
    monkeypatch.setattr(network, "FIRST_STEP_SECONDS", cap_s)
    task = task_in(tmp_path, "fused-store", "fused-rebuild", "fused-checkpoint")
    task = dataclasses.replace(task, end_s=time.time() + 500)
    measure_steps(Session(task))
    assert 0 < left[0] <= min(300, cap_s)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    rows = rows_in(tmp_path)
    if cap_s == 60:
        assert rows["fused-rebuild"].note == "failed: TookTooLong: no first step in 60 s"
        assert rows["fused-checkpoint"].median_ms > 0
    else:  # there was not enough time left
        assert rows.keys() == {"fused-store"}


HANGS = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{first}
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("first", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_a_process_that_hangs_is_interrupted_and_killed_with_its_children(first, tmp_path):
    path = tmp_path / "out"
    with path.open("w") as out:
        command = [sys.executable, "-c", HANGS.format(first=first)]
        assert measure.run_process(command, 3, grace_s=1 if first else 20, stdout=out) is None
    pid, *rest = path.read_text().split()
    assert rest == ([] if first else ["interrupted"])
    wait_for_end(pid)


def wait_for_end(pid):
    status = Path(f"/proc/{pid}/stat")
    for _ in range(1000):  # a signal takes its time
        if not status.exists() or status.read_text().split()[2] in "ZX":  # a zombie, dead
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


STOPPED = """
import sys
from bench import measure
measure.run_process([sys.executable, "-c", {hangs!r}], 600)
"""


def test_a_process_ends_with_the_one_that_started_it():
    hangs = "import os\nprint(os.getpid(), flush=True)\n" + HANGS.format(first="")
    command = [sys.executable, "-c", STOPPED.format(hangs=hangs)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=measure.ROOT, **options) as run:
        child, grandchild = run.stdout.readline(), run.stdout.readline()
        run.kill()
        wait_for_end(int(child))
        os.kill(int(grandchild), signal.SIGKILL)  # nobody else ends it


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Runs `main` on ResNet-8 with its tasks in this process; returns their kinds."""
    ran = []

    def run_process(command, seconds):
        task = Task(**json.loads(command[-1]))
        ran.append(task.kind)
        network.main(command[-1])
        return 0

    monkeypatch.setattr(measure, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(measure, "run_process", run_process)
    monkeypatch.setitem(GROUPS, "main", ("eager-channels-last", "fused-store"))
    monkeypatch.setitem(GROUPS, "memory rivals", ("fused-store", "checkpoint-sqrt"))
    options = ["--quick", "--networks", "resnet-8", "--batch", "4", "--device", "cpu"]
    options += ["--steps", "1", "--out", str(tmp_path), "--no-plots"]

    def run(*more):
        ran.clear()
        return bench.main([*options, *more]), list(ran)

    return run


def test_a_run_has_times_peaks_and_curves_and_a_resumed_one_skips_them(quick, tmp_path, capsys):
    status, ran = quick()
    assert (status, set(ran)) == (0, {"steps", "peak", "curves"})
    printed = capsys.readouterr().out
    assert "the best rival" in printed and "Training curves" in printed
    assert "left out" not in printed
    (rows, points) = next(iter(report.load(tmp_path).values()))
    assert {r.contender for r in rows} == {"eager-channels-last", "fused-store", "checkpoint-sqrt"}
    assert all(r.peak_raw_bytes > r.peak_bytes > 0 for r in rows)
    assert {p.contender for p in points} == {"fused-store", "eager-channels-last", "float64"}
    assert max(p.deviation for p in points) < 1e-3
    assert rows[0].floor_ms == pytest.approx(
        CEILINGS.floor_ms(*floors.network_cost(Network(8), 4, torch.float32), torch.float32),
        rel=1e-4,
    )
    assert quick("--resume") == (0, [])
    machine = Machine.of(CPU)
    op = Row("op", "fused-triton", "1x1", "", 16, "float32", "x", correct="no", note="off by 1")
    put(next(tmp_path.glob("*threads.csv"), next(tmp_path.glob("*thread.csv"))), machine.stamp(op))
    assert quick("--resume") == (1, [])
    assert "WRONG: fused-triton on 1x1: off by 1" in capsys.readouterr().out


def test_kept_bytes_are_counted_without_a_step_also_if_a_contender_fails(tmp_path, monkeypatch):
    change(monkeypatch, "eager-failing", fail)
    kept = ("checkpoint-block", "selective-convs", "fused-store", "eager-channels-last")
    task = task_in(tmp_path, "eager-failing", *kept, kind="kept")
    network.measure_kept_bytes(Session(task))
    rows = rows_in(tmp_path)
    assert rows["fused-store"].saved_bytes < rows["eager-channels-last"].saved_bytes
    # Autograd does not see the tensors that selective checkpointing holds.
    assert 0 < rows["checkpoint-block"].saved_bytes < rows["selective-convs"].saved_bytes
    assert rows["eager-failing"].correct == "no"
    assert {r.median_ms for r in rows.values()} == {None}
    assert task.missing() == []


def test_the_hottest_kernels_come_first(tmp_path):
    kernels, step_ms = hotspots.hotspots(Session(task_in(tmp_path, "fused-store")))
    times = [ms for _, _, ms in kernels]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0 and step_ms > 0
    assert any("block_run_forward" in name or "bn_relu" in name for name, _, _ in kernels)


def test_ops_are_measured_until_all_rows_are_there(tmp_path, monkeypatch):
    task, found = task_in(tmp_path, "ops", kind="ops", steps=3), []
    monkeypatch.setattr(os, "execv", lambda path, command: found.extend(command))
    network.main(json.dumps(dataclasses.asdict(task)))
    assert {
        "--bench-batch=4",
        "--bench-dtype=fp32",
        f"--bench-out={tmp_path}",
        "bench/ops.py",
    } < set(found)
    rows = [Row("op", "fused", str(i), "", 4, "float32", "x", commit="abc") for i in range(3)]
    put(task.path, *rows[1:], dataclasses.replace(rows[0], dtype="bfloat16"))
    assert task.missing() == ["ops"]
    put(task.path, rows[0])
    assert task.missing() == []


@pytest.mark.parametrize(
    ("started", "command"),
    [
        (["bench/__main__.py", "--quick"], "python -m bench --quick"),
        (["bench/inference.py", "--batch", "1"], "python -m bench.inference --batch 1"),
    ],
)
def test_rows_say_the_command_that_makes_them(started, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(measure.ROOT / started[0]), *started[1:]])
    assert Machine.of(CPU).command == command


def test_the_commit_can_be_said_or_is_a_hash_of_the_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("PREACT_KERNELS_COMMIT", "0123456789")
    assert measure.commit() == "0123456789"
    monkeypatch.delenv("PREACT_KERNELS_COMMIT")
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    source = tmp_path / "csrc" / "kernel.cu"
    source.parent.mkdir()
    found = []
    for text in ("one", "two", "one"):
        source.write_text(text)
        found.append(measure.commit())
    assert found[0] == found[2] != found[1]
    assert all(f.startswith("sources-") for f in found)


def test_a_backend_that_is_named_is_measured_beside_the_default():
    with pk.use_backend("reference"):
        named = Machine.of(CPU)
    assert named.device == f"{Machine.of(CPU).device}, backend reference"


@pytest.mark.not_under_sanitizer
def test_under_torchrun_the_processes_are_compared_with_one(tmp_path):
    options = ["--networks", "resnet-8", "--batch", "2", "--steps", "2", "--device", "cpu"]
    options += ["--contenders", "eager-channels-last", "fused-store"]
    done = torchrun(2, ["bench", *options, "--out", tmp_path])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(scaling.SHARED) == 1  # only one process prints
    (path,) = tmp_path.iterdir()
    rows = {(r.contender, r.batch_norm): r for r in read(path, ScalingRow)}
    assert list(rows) == [
        ("eager-channels-last", scaling.LOCAL),
        ("fused-store", scaling.LOCAL),
        ("fused-store", scaling.SHARED),
    ]
    for (_, batch_norm), row in rows.items():
        assert row.correct == ("yes" if batch_norm == scaling.SHARED else "another function")
        assert row.processes == 2
        assert row.images_per_s == pytest.approx(2 * 2e3 / row.together_ms, rel=1e-4)
        assert row.efficiency == pytest.approx(row.alone_ms / row.together_ms, rel=1e-4)
        assert 0 <= row.sending_share < 1
    with pytest.raises(FileNotFoundError):  # the report leaves these files alone
        report.load(tmp_path)


def test_building_a_contender_switches_resident_runs_off(monkeypatch):
    """A contender whose backward failed leaves them on."""
    monkeypatch.setattr(cuda, "RESIDENT_RUNS", True)
    network = Network.named("resnet-8")
    BY_NAME["fused-store"].build(network, network.state(), torch.device("cpu"), torch.float32)
    assert not cuda.RESIDENT_RUNS
