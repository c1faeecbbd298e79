"""Benchmarks of single ops: contenders, rows, and no speed for wrong results."""

import time
import types
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("pytest_benchmark")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

from bench import ops, report
from bench.measure import Ceilings, Timing
from bench.records import Row
from preact_kernels.kernels.contract import Conv
from preact_kernels.kernels.cuda import CUDAKernels
from tests.cases import unit_of

CPU = torch.device("cpu")
CASE = ops.Case("bn_relu", 8, 4)
CASE_AND_DIRECTION = "bn_relu, forward + backward"
ON_CPU = ops.contenders(CASE, CPU)


class Benchmark:
    """The part of pytest-benchmark's fixture that an op uses."""

    def __init__(self):
        self.extra_info = {}

    def pedantic(self, call, setup, rounds):
        times_s = []
        for _ in range(rounds):
            setup()
            start_s = time.perf_counter()
            call()
            times_s.append(time.perf_counter() - start_s)
        self.stats = types.SimpleNamespace(stats=types.SimpleNamespace(data=times_s))


def rows_of(monkeypatch, **added):
    """Runs an op with contenders `added`; returns rows by contender, and the error or None."""
    monkeypatch.setattr(ops, "contenders", lambda case, device: ON_CPU | added)
    settings = types.SimpleNamespace(
        device=CPU, dtype=torch.float32, batch=2, ceilings=Ceilings(10.0, {"float32": 100.0})
    )
    rows, error = [], None
    try:
        ops.test_op(Benchmark(), rows.append, settings, CASE, backward=True)
    except Exception as raised:
        error = raised
    return {row.contender: row for row in rows}, error


def test_a_wrong_contender_of_an_op_leaves_the_others_their_times(monkeypatch):
    entered = []

    class Context(nullcontext):
        def __enter__(self):
            entered.append(True)

    wrong = ops.Contender(lambda case, t: ops.eager(case, t) * 1.5, nullcontext, "x")
    right = ops.Contender(ops.fused, Context, "x")
    rows, error = rows_of(monkeypatch, wrong=wrong, right=right)
    assert "output deviates by 5.0e-01 from float64" in str(error)
    row = rows.pop("wrong")
    assert (row.correct, row.median_ms) == ("no", None)
    assert row.note.startswith("AssertionError: output deviates")
    assert rows.keys() == {*ON_CPU, "right"}
    for row in rows.values():
        assert (row.correct, row.shape, row.case) == ("yes", "2x8x4x4", CASE_AND_DIRECTION)
        floor_ms = 8 * 2 * 8 * 4 * 4 * 4 / 10 / 1e6  # 8 passes at 10 GB/s
        assert row.x_of_floor == pytest.approx(row.median_ms / floor_ms)
        assert row.gb_per_s == pytest.approx(10 / row.x_of_floor)
    assert len(entered) > 20  # in every round


def test_a_wrong_fused_op_gets_no_speed(monkeypatch):
    wrong = ops.CONTENDERS[ops.FUSED]._replace(forward=lambda case, t: ops.eager(case, t) * 1.5)
    rows, error = rows_of(monkeypatch, **{ops.FUSED: wrong})
    assert "output deviates" in str(error)
    assert rows == {}


def op_row(contender, case, ms):
    row = Row("op", contender, case, "128x16x32x32 -> 16", 128, "bfloat16", "x")
    row.set_timing(Timing(ms, ms, ms), ms)
    return row


def test_ops_show_what_auto_could_take_where_it_was_measured():
    rows = [op_row(name, "1x1", ms) for name, ms in (("eager-channels-last", 4.0), ("fused", 2.0))]
    assert "fused-" not in report.ops_table(rows)
    more = [op_row(name, "3x3", 1.0) for name in ("eager-channels-last", "fused", "fused-triton")]
    header, _, first, second = report.ops_table([*rows, *more]).splitlines()
    assert [cell.strip() for cell in header.split("|")[4:8]] == [
        "eager channels_last, ms", "fused, ms", "fused-triton, ms", "eager / fused",
    ]  # fmt: skip
    assert [cell.strip() for cell in first.split("|")[4:8]] == ["4.000", "2.000", "", "2.00"]
    assert [cell.strip() for cell in second.split("|")[4:8]] == ["1.000", "1.000", "1.000", "1.00"]


def test_ops_on_a_gpu_have_the_contenders_of_the_libraries_that_are_there(monkeypatch):
    convolution = ops.Case("bn_relu_conv2d", 16, 32, 16, 3)
    for backends, names in (
        (("reference", "triton", "cuda"), ["fused-triton", "fused-bn-relu"]),
        (("reference", "triton"), ["fused-triton"]),
        (("reference",), []),
    ):
        monkeypatch.setattr(ops.pk, "available_backends", lambda found=backends: found)
        assert list(ops.contenders(convolution, torch.device("cuda")))[2:] == names
        assert len(ops.contenders(convolution, CPU)) == 2
    monkeypatch.setattr(ops.pk, "available_backends", lambda: ("reference", "triton", "cuda"))
    bn_relu = ops.contenders(ops.Case("bn_relu", 64, 32), torch.device("cuda"))
    assert list(bn_relu) == ["eager-channels-last", "fused", "fused-triton"]
    kernels = CUDAKernels(types.SimpleNamespace())
    with ops.CONTENDERS["fused-bn-relu"].context():
        weight = torch.empty(16, 16, 1, 1, dtype=torch.bfloat16)
        assert not kernels.serves(unit_of(weight, Conv((1, 1), (0, 0), (1, 1), 1)), 1)
