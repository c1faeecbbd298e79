"""Benchmarks of single ops: rows, and no speed for wrong results."""

import types

import pytest
import torch

from bench import ops
from bench.measure import Ceilings


class Benchmark:
    """The part of pytest-benchmark's fixture that an op uses."""

    def __init__(self):
        self.extra_info = {}

    def pedantic(self, call, setup, rounds):
        for _ in range(rounds):
            setup()
            call()
        self.stats = types.SimpleNamespace(stats=types.SimpleNamespace(data=[2e-3] * rounds))


def test_an_op_leaves_rows_of_both_contenders_and_a_wrong_one_none(monkeypatch):
    monkeypatch.setattr(ops, "ROUNDS_S", 0)
    ceilings, rows = Ceilings(10.0, {"float32": 100.0}), []
    settings = types.SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.float32, batch=2, ceilings=ceilings
    )

    def run():
        case = ops.Case("bn_relu", 8, 4)
        ops.test_op(Benchmark(), rows.append, settings, case, backward=True)

    run()
    assert [row.contender for row in rows] == ["eager-channels-last", "fused"]
    for row in rows:
        assert (row.correct, row.shape) == ("yes", "2x8x4x4")
        assert row.case == "bn_relu, forward + backward"
        floor_ms = 8 * 2 * 8 * 4 * 4 * 4 / 10 / 1e6  # 8 passes at 10 GB/s
        assert row.x_of_floor == pytest.approx(row.median_ms / floor_ms)
        assert row.gb_per_s == pytest.approx(10 / row.x_of_floor)
    monkeypatch.setitem(ops.CONTENDERS, ops.FUSED, lambda case, t: ops.eager(case, t) * 1.5)
    with pytest.raises(AssertionError, match=r"output deviates by 5\.0e-01 from float64"):
        run()
    assert len(rows) == 2
