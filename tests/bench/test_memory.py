"""Memory and time of published models."""

import argparse
import dataclasses
import os
import time

import pytest
import torch

from bench import gpu_networks, memory
from bench.records import ModelRow, put, read
from testbed import norm_act_models


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Measures tiny models with the command, in this process; returns rows by contender."""
    tiny = memory.Case(
        lambda: norm_act_models.SwishWideResNet(10, 1),
        (4, 3, 8, 8),
        "SwishBlock",
        activations={norm_act_models.SwishFunction: "silu"},
    )
    for cases in memory.CASES, gpu_networks.CASES:
        monkeypatch.setitem(cases, "tiny", tiny)
    monkeypatch.setattr(memory, "in_own_process", lambda seconds, call, *given: call(*given))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")

    def run(*options):
        paths = ["--device", "cpu", "--out", str(tmp_path)]
        memory.main(["--models", "tiny", "--steps", "1", *paths, *options])
        (path,) = tmp_path.iterdir()
        return {r.contender: r for r in read(path, ModelRow)}

    return run


def test_modes_keep_less_and_a_resumed_run_measures_only_what_is_missing(measured, capsys):
    own = ["checkpoint", *memory.OWN]
    rows = measured("--contenders", memory.PLAIN, *own)
    assert list(rows) == [memory.PLAIN, *own]
    for name, row in rows.items():
        assert row.median_ms and row.peak_bytes is not None and not row.note
        assert row.fused == ("7 of 7" if name in memory.OWN else "")
    plain, store, *_, least = (rows[name].saved_bytes for name in (memory.PLAIN, *memory.OWN))
    assert plain > store > least and plain > rows["checkpoint"].saved_bytes
    capsys.readouterr()
    assert measured("--contenders", memory.PLAIN, *own, "--resume") == rows
    assert not capsys.readouterr().out
    measured("--contenders", memory.PLAIN, "--resume")
    assert not capsys.readouterr().out


def test_a_contender_that_fails_gets_the_reason_and_the_others_get_times(measured, monkeypatch):
    def wrong(*_):
        raise ArithmeticError("error 1, of the plain model 0")

    monkeypatch.setattr(memory.models, "check_equal", wrong)
    store = next(iter(memory.OWN))
    with pytest.raises(SystemExit, match="some contenders were not measured"):
        measured("--contenders", memory.PLAIN, store)
    rows = measured("--contenders", memory.PLAIN)
    assert rows[memory.PLAIN].median_ms
    row = rows[store]
    assert (row.saved_bytes, row.peak_bytes, row.median_ms) == (None, None, None)
    assert row.note == "ArithmeticError: error 1, of the plain model 0"


def test_the_whole_model_is_compiled_within_its_budget(measured, monkeypatch):
    compiled = {}

    def backend(budget):
        def compile_graph(graph, _):
            compiled.setdefault(budget, []).append(graph)
            return graph.forward

        return compile_graph

    monkeypatch.setattr(memory.models, "inductor", backend)
    names = [name for name in memory.RIVALS if name.startswith("compile")]
    rows = measured("--contenders", *names)
    assert all(rows[name].median_ms for name in names)
    assert list(compiled) == [1.0, 0.5, 0.2]
    depth = len(list(norm_act_models.SwishWideResNet(10, 1).modules()))
    for graphs in compiled.values():
        assert len(list(graphs[0].graph.nodes)) > depth


def _sleep_after(end_s):
    gpu_networks._end_process_at(end_s)
    time.sleep(60)


def test_a_process_of_its_own_gives_a_result_or_says_why_not():
    assert memory.in_own_process(60, os.getpid) != os.getpid()
    with pytest.raises(RuntimeError, match="the process ended with exit status 3"):
        memory.in_own_process(60, os._exit, 3)
    with pytest.raises(RuntimeError, match="the process ended with exit status 1"):
        memory.in_own_process(60, _sleep_after, 0.0)
    with pytest.raises(RuntimeError, match="no result within 0 s"):
        memory.in_own_process(0.1, time.sleep, 60)


STORE, GRAPHED = gpu_networks.STORE, f"{gpu_networks.STORE}, graph"


def test_networks_of_a_gpu_are_measured_in_one_process(measured, monkeypatch, capsys):
    in_own_process, calls = memory.in_own_process, []

    def counted(seconds, call, *given):
        calls.append(call)
        return in_own_process(seconds, call, *given)

    monkeypatch.setattr(memory, "in_own_process", counted)
    monkeypatch.setattr(memory.models, "inductor", lambda budget: lambda graph, _: graph.forward)
    rows = measured("--gpu-networks")
    assert len(calls) == 1
    assert list(rows) == [c.name for c in gpu_networks.CONTENDERS]
    for name, row in rows.items():
        assert row.median_ms and row.saved_bytes and not row.note and row.shape == "4x3x8x8"
        assert row.fused == ("7 of 7" if "convert" in name else "")
    assert rows[GRAPHED].saved_bytes == rows[STORE].saved_bytes < rows[memory.PLAIN].saved_bytes
    assert f"in the same rounds, {STORE} took" in capsys.readouterr().out


def test_a_converted_model_with_wrong_gradients_gets_no_time(measured, monkeypatch):
    convert = memory.models.pk.convert

    def with_wrong_gradients(model, **options):
        for p in model.parameters():
            p.register_hook(lambda gradient: 1.01 * gradient)
        return convert(model, **options)

    monkeypatch.setattr(memory.models.pk, "convert", with_wrong_gradients)
    with pytest.raises(SystemExit, match="some contenders were not measured"):
        measured("--gpu-networks", "--contenders", memory.PLAIN, STORE)
    rows = measured("--gpu-networks", "--resume", "--contenders", memory.PLAIN)
    assert rows[memory.PLAIN].median_ms and rows[STORE].median_ms is None
    assert rows[STORE].note.startswith("ArithmeticError: error of gradients ")


def test_cached_choices_of_kernels_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # restores it
    kept, deleted = tmp_path / "ab" / "code.py", tmp_path / "ab" / "code.best_config"
    kept.parent.mkdir()
    for path in (kept, deleted):
        path.touch()
    with memory._compiler_caches(tmp_path):
        assert kept.exists() and not deleted.exists()


def test_a_wrong_captured_step_gets_no_time(measured, monkeypatch):
    def other_step(*arguments):
        return lambda x, target: torch.tensor(1e9)

    monkeypatch.setattr(memory.models.pk, "graphed_step", other_step)
    with pytest.raises(SystemExit, match="some contenders were not measured"):
        measured("--gpu-networks", "--contenders", STORE, GRAPHED)
    rows = measured("--gpu-networks", "--resume", "--contenders", STORE)
    assert rows[STORE].median_ms and rows[GRAPHED].median_ms is None
    assert rows[GRAPHED].note.startswith("ArithmeticError: loss of a captured step 1e+09")


def test_a_contender_that_crashes_the_process_leaves_the_others_measured(measured, monkeypatch):
    class Crash(BaseException):
        pass

    def crash(one):
        raise Crash

    def in_process(seconds, call, *given):
        try:
            return call(*given)
        except Crash:
            raise RuntimeError("the process ended with exit status -11") from None

    monkeypatch.setattr(memory, "in_own_process", in_process)
    monkeypatch.setattr(memory.models.Trained, "capture", crash)
    with pytest.raises(SystemExit, match="some contenders were not measured"):
        measured("--gpu-networks", "--contenders", memory.PLAIN, GRAPHED, STORE)
    rows = measured("--gpu-networks", "--resume", "--contenders", memory.PLAIN)
    assert set(rows) == {memory.PLAIN, GRAPHED, STORE}
    for name, row in rows.items():
        note = "RuntimeError: the process ended with exit status -11"
        assert (row.note, bool(row.median_ms)) == ((note, False) if "graph" in name else ("", True))


def test_a_run_ends_at_its_time_limit_and_says_what_it_left_out(measured, monkeypatch, capsys):
    add = gpu_networks.Network.add

    def too_long(network, row):
        row = add(network, row)
        monkeypatch.setattr(gpu_networks.Ends, "passed", lambda ends, contender: True)
        return row

    monkeypatch.setattr(gpu_networks.Network, "add", too_long)
    rows = measured("--gpu-networks", "--time-limit", "60", "--contenders", memory.PLAIN, STORE)
    assert list(rows) == [memory.PLAIN] and rows[memory.PLAIN].median_ms
    left_out = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert left_out == [f"left out: tiny: {STORE}"]
    measured("--gpu-networks", "--time-limit", "0", "--contenders", STORE)
    assert capsys.readouterr().out == f"left out: tiny: {STORE}\n"


def test_what_is_compiled_when_its_time_ends_is_left_out_without_a_note(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    rows = [ModelRow("tiny", name, "1x1", "fp32") for name in (memory.PLAIN, *memory.COMPILED)]

    def end_while_compiling(*_):
        put(path, dataclasses.replace(rows[0], median_ms=1.0))
        put(path, dataclasses.replace(rows[1], note=gpu_networks.UNFINISHED))
        raise RuntimeError("the process ended with exit status 1")

    monkeypatch.setattr(memory, "in_own_process", end_while_compiling)
    ends = gpu_networks.Ends(float("inf"), 0.0)
    found = memory.measured_in_one_process(rows, path, ends, argparse.Namespace(limit=60))
    assert [(row.note, row.median_ms) for row in found] == [("", 1.0), ("", None), ("", None)]
    assert len(read(path, ModelRow)) == 1
