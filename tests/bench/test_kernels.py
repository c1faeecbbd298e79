"""Times of kernels, blocks and units: rows, and no time for wrong results."""

import pytest
import torch

from bench import kernels, measure
from bench.kernels import by_profiler, items
from bench.records import KernelRow, read
from preact_kernels.ops import dispatch

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Measures with the command; returns the rows."""
    monkeypatch.setattr(measure, "measure_copy_gb_s", lambda device: 10.0)

    def run(*options):
        kernels.main(["--device", "cpu", "--out", str(tmp_path), *options])
        return [row for path in tmp_path.iterdir() for row in read(path, KernelRow)]

    return run


def test_everything_that_is_not_compiled_runs_dry(measured, monkeypatch, capsys):
    planned = [item for item in items(CPU) if item.row.contender != kernels.COMPILED]
    assert len(list(items(CPU))) == len(planned) + 2
    assert [item.row.case for item in planned[:1]] == ["bn_stats"]
    monkeypatch.setattr(kernels, "items", lambda device: planned)
    rows = measured()
    assert [row.key[:5] for row in rows] == [item.row.key[:5] for item in planned]
    for row in rows:
        assert (row.correct, row.note) == ("yes", "")
        assert row.events_us > 0 and row.graph_us is None
        assert row.commit and row.versions and row.command
    row = rows[0]
    assert row.bytes_moved == 2 * 16 * 5 * 4 * 4
    assert row.floor_us == pytest.approx(row.bytes_moved / 10e3)
    assert row.x_of_floor == pytest.approx(row.events_us / row.floor_us, rel=1e-4)
    blocks = {r.contender: r.saved_bytes for r in rows if r.case.startswith("AutoencoderBlock")}
    assert blocks["eager"] > blocks["pk.convert, cpu"] > 0
    assert "bn_stats" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "function"),
    [
        ("bn_stats", "bn_stats"),
        ("forward of batch norm", "norm_act_forward"),
        ("sums of group norm", "norm_act_backward"),
        ("input gradient of batch norm", "norm_input_gradient"),
        ("unit 16 -> 32, backward", "norm_act_conv_backward"),
    ],
)
def test_wrong_results_get_no_time(case, function, measured, monkeypatch):
    own = dispatch.select("cpu", "cpu", torch.float32)
    right = getattr(own, function)

    def wrong(*arguments):
        found = right(*arguments)
        parts = found if isinstance(found, tuple) else (found,)
        parts = [t if t is None else t * 1.02 for t in parts]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)

    monkeypatch.setattr(own, function, wrong)
    with pytest.raises(SystemExit, match="some results were wrong"):
        measured("--cases", case)
    rows = measured("--cases", "no such case")
    of_cpu = [row for row in rows if row.contender.startswith("cpu")]
    assert of_cpu and {(r.correct, r.events_us) for r in of_cpu} == {("no", None)}
    assert all("wrong result" in row.note for row in of_cpu)
    assert all(row.events_us for row in rows if row not in of_cpu)


def test_a_wrong_block_gets_no_time(measured, monkeypatch):
    def convert(model):
        model.conv2.weight.data *= 1.02

    monkeypatch.setattr(kernels.pk, "convert", convert)
    found = [item for item in kernels.block_items(CPU, False) if "Bottleneck" in item.row.case]
    monkeypatch.setattr(kernels, "items", lambda device: found)
    with pytest.raises(SystemExit):
        measured()
    rows = {row.contender: row for row in measured("--cases", "no such case")}
    assert rows["eager"].events_us and not rows["pk.convert, cpu"].events_us


def test_without_time_nothing_is_measured(measured, capsys):
    assert measured("--seconds", "0") == []
    assert "out of time before bn_stats" in capsys.readouterr().out


def test_the_profilers_kernels_are_summed_over_a_call():
    found = by_profiler([(10, 12), (20, 21), (30, 37), (38, 40)], 2)
    assert found == {"profiler_us": 6, "span_us": 15, "longest_us": 7, "launches": 2}
    with pytest.raises(RuntimeError, match="no kernels"):
        by_profiler([], 1)


def test_fresh_inputs_do_not_follow_one_another(monkeypatch):
    shape = (2, 16, 5, 4)
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 2 * 2 * 16 * 5 * 4 * 4)
    problem = kernels.Problem(shape, torch.float32, CPU, True)
    addresses = [t.data_ptr() for pair in problem.sets for t in pair]
    assert len(set(addresses)) == len(problem.sets) == 6  # images: three times the cache
    for index, address in enumerate(addresses[2:], 2):
        assert address not in addresses[max(0, index - 4) : index]
    assert len(kernels.Problem(shape, torch.float32, CPU, False).sets) == 1


class FakeGPU:
    """What times on a GPU use: each call takes 3 ms of its time."""

    def __init__(self, monkeypatch):
        self.ms, self.kept, self.most = 0.0, 0, 0
        device = self

        class Event:
            def __init__(self, enable_timing):
                self.at = None

            def record(self):
                self.at = device.ms

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(measure, "captured", lambda run: (Graph(run), None))
        monkeypatch.setattr(kernels, "profiled", lambda calls: [(0, 2000), (2500, 3000)])

    def sleep(self, cycles):
        self.ms += 11

    def call(self):
        self.ms += 3


class Graph:
    def __init__(self, run):
        self.replay = run


def test_every_way_of_timing_divides_by_its_calls(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    found = kernels.times_of([gpu.call] * 3, torch.device("cuda"))
    assert found.events_us == pytest.approx(3000)
    assert found.graph_us == pytest.approx(3000)
    assert (found.profiler_us, found.span_us, found.longest_us) == (2500 / 3, 1000, 2000)
