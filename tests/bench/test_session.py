"""The benchmarks: networks, floors, order and resumed runs."""

import dataclasses
import time
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

import preact_kernels as pk
from bench import (
    converted,
    floors,
    foreign_models,
    inference,
    measure,
    network,
    report,
    scaling,
    training,
)
from bench.__main__ import LOST, main
from bench.contenders import BY_NAME, Network
from bench.hotspots import hotspots
from bench.hotspots import main as hot_main
from bench.measure import Ceilings, Machine, Timing, time_in_turn
from bench.peak import peak_of_step
from bench.records import (
    CEILINGS,
    LAUNCHES,
    CeilingRow,
    ConvertedRow,
    CurvePoint,
    InferenceRow,
    LaunchRow,
    Records,
    Row,
    ScalingRow,
    read,
    slug,
)
from preact_kernels.study import data
from tests.torchrun import torchrun

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "block", "parameters"),
    [
        ("resnet-20", "basic", 0.27),
        ("resnet-164", "bottleneck", 1.70),
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


@pytest.mark.parametrize("name", ["resnet", "resnet-x", "wrn-28", "vgg-16"])
def test_other_names_are_refused(name, capsys):
    with pytest.raises(ValueError, match="network: expected one of resnet-DEPTH, preact-"):
        Network.named(name)
    with pytest.raises(SystemExit):
        main(["--networks", name])
    assert "expected one of resnet-DEPTH" in capsys.readouterr().err


def test_a_bottleneck_moves_46_times_its_inner_channels():
    block = Network(164).model(fused=False).stages[0][1]
    cost, height = floors.block_cost(block, 1, 32, 4)
    assert height == 32
    assert cost.bytes_moved == 46 * 16 * 32 * 32 * 4
    products = 16 * 64 + 9 * 16 * 16 + 16 * 64
    assert cost.flops == 3 * 2 * products * 32 * 32
    beside_stream, _ = floors.block_cost(block, 1, 32, 2, stream_itemsize=4)
    assert beside_stream.bytes_moved == (46 + 32) * 16 * 32 * 32 * 2  # 32 are of its x, y and dy


def test_floors_count_every_product_of_a_network():
    # Multiply-adds of the forward, with a projection in each stage: 4.09e9 is ResNet-50's.
    cost = floors.network_cost(Network.named("imagenet-resnet-50"), 1, torch.bfloat16)
    assert cost.flops / 6 == pytest.approx(4.09e9, rel=0.02)


def test_calls_take_turns():
    order = []
    times = time_in_turn(
        {name: lambda name=name: order.append(name) for name in "ab"}, rounds=3, device=CPU
    )
    assert order == ["a", "b"] * 3
    assert {t.count for t in times.values()} == {3}
    assert Timing.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Timing(3.0, 1.8, 4.2, 5)


def _spoil(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps *= 30


def session_in(folder):
    images = data.load_digits()
    rows = Records(folder / "rows.csv", Row, keep=False)
    curves = Records(folder / "curves.csv", CurvePoint, keep=False)
    ceilings = Ceilings(10.0, {"float32": 100.0})
    return network.Session(
        device=CPU,
        dtype=torch.float32,
        images=images,
        machine=Machine("cpu", "v", "c", "d", "x"),
        ceilings=ceilings,
        rows=rows,
        curves=curves,
        resume=False,
    )


def measured(session, names, monkeypatch, **changed):
    """What `measure_group` leaves out, and the rows by contender."""
    contenders = []
    for name in names:
        contender = dataclasses.replace(BY_NAME[name], **changed.get(name.replace("-", "_"), {}))
        monkeypatch.setitem(BY_NAME, name, contender)
        contenders.append(contender)
    left_out = network.measure_group(session, contenders, Network(20), 4, rounds=2)
    return left_out, {r.contender: r for r in read(session.rows.path, Row)}


def test_what_there_is_no_time_for_is_named_and_the_rest_is_measured(tmp_path, monkeypatch):
    session = session_in(tmp_path)
    session.deadline_s = time.monotonic()
    names = ["eager-channels-last", "fused-store"]
    left_out, rows = measured(session, names, monkeypatch)
    assert left_out == ["fused-store on resnet-20, batch 4: no time left"]
    assert rows.keys() == {"eager-channels-last"}
    assert rows["eager-channels-last"].median_ms > 0


def test_times_are_saved_after_every_round_and_marked_until_the_last(tmp_path, monkeypatch):
    session = session_in(tmp_path)
    notes, put = [], session.rows.put
    monkeypatch.setattr(
        session.rows, "put", lambda *rows: (notes.append([r.note for r in rows]), put(*rows))
    )
    _, rows = measured(session, ["eager-channels-last", "fused-store"], monkeypatch)
    rounds = [n for n in notes if any(network.UNFINISHED in note for note in n)]
    assert len(rounds) == 2
    assert all(row.note.startswith("built and first step in") for row in rows.values())
    assert not any(network.UNFINISHED in row.note for row in rows.values())


def test_a_run_that_resumes_measures_what_was_stopped_and_not_what_was_wrong(tmp_path, monkeypatch):
    session = session_in(tmp_path)
    session.resume = True
    names = ["eager-channels-last", "fused-store", "fused-rebuild"]
    _, rows = measured(session, names, monkeypatch)
    stopped, wrong = rows["fused-store"], rows["fused-rebuild"]
    session.rows.put(dataclasses.replace(stopped, median_ms=1e9, note=network.UNFINISHED))
    session.rows.put(dataclasses.replace(wrong, median_ms=None, correct="no", note="failed"))
    _, again = measured(session, names, monkeypatch)
    assert again["eager-channels-last"].median_ms == rows["eager-channels-last"].median_ms
    assert again["fused-store"].median_ms < 1e9
    assert again["fused-store"].note.startswith("built and first step in")
    assert (again["fused-rebuild"].median_ms, again["fused-rebuild"].note) == (None, "failed")


class LostGPU:
    """After `stray`, a device that reports an error whenever it is waited for."""

    def __init__(self, monkeypatch):
        self.is_lost = False
        monkeypatch.setattr(measure, "synchronize", self.synchronize)

    def stray(self, model=None):
        self.is_lost = True

    def synchronize(self, device):
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def test_a_contender_that_costs_the_process_its_gpu_is_named_and_not_tried_again(
    tmp_path, monkeypatch
):
    session = session_in(tmp_path)
    names = ["eager-channels-last", "fused-store"]
    with monkeypatch.context() as patch:
        gpu = LostGPU(patch)
        with pytest.raises(measure.DeviceLost, match="fused-store: CUDA error: an illegal"):
            measured(session, names, patch, fused_store={"prepare": gpu.stray})
        gpu.is_lost = False
    _, rows = measured(session, names, monkeypatch)
    assert rows["eager-channels-last"].median_ms > 0
    assert rows["fused-store"].median_ms is None
    assert rows["fused-store"].note.startswith("failed: CUDA error: an illegal memory access")


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_lost_gpu_is_recorded_in_a_row_unless_that_has_a_time(is_timed, tmp_path, monkeypatch):
    session = session_in(tmp_path)
    if is_timed:
        measured(session, ["fused-store"], monkeypatch)
    gpu = LostGPU(monkeypatch)
    names = ["fused-store", "fused-rebuild"]
    with pytest.raises(measure.DeviceLost, match="fused-store") as lost:
        measured(session, names, monkeypatch, fused_store={"prepare": gpu.stray})
    assert lost.value.is_recorded != is_timed


def test_a_contender_that_fails_later_keeps_the_time_that_it_has(tmp_path, monkeypatch):
    session = session_in(tmp_path)
    _, before = measured(session, ["eager-channels-last", "fused-store"], monkeypatch)
    names = ["fused-store", "fused-rebuild"]
    verdicts = session.verdicts

    def fail(model):
        if len(verdicts) == 3:  # all were judged
            raise RuntimeError("out of memory")

    left_out, rows = measured(session, names, monkeypatch, fused_store={"prepare": fail})
    assert left_out == ["fused-store on resnet-20, batch 4: RuntimeError: out of memory"]
    assert rows["fused-store"].median_ms == before["fused-store"].median_ms
    assert rows["fused-rebuild"].median_ms > 0


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_contender_for_which_there_is_no_room_leaves_the_others_their_times(
    is_timed, tmp_path, monkeypatch
):
    session, once, calls = session_in(tmp_path), measure.time_once_ms, []
    if is_timed:
        measured(session, ["fused-store"], monkeypatch)
    filled = []

    def fill_up(step, device):
        calls.append(step.model.stages[0])
        if calls[-1:] == calls[0:1] and len(calls) > 1:  # the first contender, in round 2
            filled.append(weakref.ref(step))
            calls.clear()
            raise torch.OutOfMemoryError("no room")
        if filled:
            assert filled[0]() is None  # its memory is free
        return once(step, device)

    monkeypatch.setattr(measure, "time_once_ms", fill_up)
    left_out, rows = measured(session, ["fused-store", "eager-channels-last"], monkeypatch)
    reason = "OutOfMemoryError: no room"
    assert left_out == [f"fused-store on resnet-20, batch 4: {reason}"]
    assert len(filled) == 1
    assert rows["eager-channels-last"].median_ms > 0
    assert network.UNFINISHED not in rows["eager-channels-last"].note
    if is_timed:
        assert rows["fused-store"].median_ms > 0
    else:
        assert rows["fused-store"].note == f"failed: {reason}"
        assert rows["fused-store"].median_ms is None


def test_the_file_names_a_contender_while_it_may_end_the_process(tmp_path, monkeypatch):
    session, met = session_in(tmp_path), []
    session.rows.write()

    def prepare(model):
        met.append([r for r in read(session.rows.path, Row) if r.contender == "fused-store"])

    names = ["eager-channels-last", "fused-store"]
    _, rows = measured(session, names, monkeypatch, fused_store={"prepare": prepare})
    assert [r.note for r in met[-1]] == [network.ENDED_PROCESS]
    assert rows["fused-store"].median_ms > 0

    def stop(model):
        prepare(model)
        if any(r.note == network.ENDED_PROCESS for r in met[-1]):
            raise KeyboardInterrupt

    unfinished = dataclasses.replace(rows["fused-store"], note=network.UNFINISHED)
    for before in ([], [unfinished], [dataclasses.replace(rows["fused-store"], commit="old")]):
        session = session_in(tmp_path)
        session.rows.put(*before)
        with pytest.raises(KeyboardInterrupt):
            measured(session, names, monkeypatch, fused_store={"prepare": stop})
        assert [(r.correct, r.median_ms) for r in met[-1]] == [("no", None)]
        after = [r for r in read(session.rows.path, Row) if r.contender == "fused-store"]
        assert after == before


def test_a_contender_that_compiles_may_be_killed_without_being_named_as_failed(tmp_path):
    session = session_in(tmp_path)
    session.rows.write()
    with session.attempt(session.row(BY_NAME["compile-blocks"], Network(20), 4)):
        assert read(session.rows.path, Row) == []


def test_a_call_that_costs_the_process_its_gpu_is_named(monkeypatch):
    gpu = LostGPU(monkeypatch)

    def bad():
        gpu.stray()
        raise RuntimeError("CUDA error")

    with pytest.raises(measure.DeviceLost, match="bad: CUDA error"):
        time_in_turn({"good": lambda: None, "bad": bad}, rounds=1, device=CPU)


@pytest.fixture
def quick_main(tmp_path, monkeypatch):
    """Runs `main` on two shallow networks, with ceilings that take no time."""
    ceilings = session_in(tmp_path).ceilings
    monkeypatch.setattr(measure, "measure_ceilings", lambda device: ceilings)
    options = ["--quick", "--device", "cpu", "--out", str(tmp_path / "out"), "--no-plots"]
    return lambda *more: main([*options, *more])


def test_a_lost_gpu_ends_the_run_with_a_status_of_its_own(quick_main, monkeypatch, capsys):
    def lost(*arguments, **options):
        raise measure.DeviceLost("fused-store", "CUDA error")

    monkeypatch.setattr(network, "measure_group", lost)
    assert quick_main() == LOST
    assert "and all that follows: failed: fused-store: CUDA error" in capsys.readouterr().out


def test_a_wrong_op_is_named_and_fails_the_run(quick_main, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(network, "measure_group", lambda *_: None)
    monkeypatch.setattr(training, "measure_curves", lambda *a, **o: None)
    assert quick_main() == 0
    machine = Machine.of(CPU)
    rows = Records(tmp_path / "out" / f"{slug(machine.device)}.csv", Row, keep=True)
    op = Row("op", "fused-triton", "1x1", "", 16, "float32", "x", correct="no", note="off by 1")
    rows.put(machine.stamp(op))
    assert quick_main("--resume") == 1
    assert "WRONG: fused-triton on 1x1: off by 1" in capsys.readouterr().out


def test_a_part_that_costs_the_process_its_gpu_is_not_tried_again(quick_main, monkeypatch, capsys):
    gpu = LostGPU(monkeypatch)
    ran = []

    def measure_group(session, contenders, net, batch, rounds):
        gpu.is_lost = False
        ran.append(net.name)
        if net.depth == 29:
            gpu.stray()
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(network, "measure_group", measure_group)
    monkeypatch.setattr(training, "measure_curves", lambda *a, **o: None)
    assert quick_main() == LOST
    gpu.is_lost = False
    assert quick_main("--resume") == LOST  # another part of the same network
    gpu.is_lost = False
    assert quick_main("--resume") == 1
    assert ran == ["resnet-29", "resnet-29", "resnet-20"]
    assert "resnet-29, batch 16: main: failed: it cost an earlier run" in capsys.readouterr().out


def tiny_net():
    blocks = foreign_models.FunctionalBottleneck(8, 8), foreign_models.FunctionalBottleneck(32, 8)
    return foreign_models.network_of(*blocks)


def not_installed():
    raise ModuleNotFoundError("No module named 'timm'", name="timm")


def assert_says_where(row):
    here = Machine.of(CPU)
    found = row.device, row.versions, row.commit
    assert found == (here.device, here.versions, here.commit)
    assert row.date and row.command.startswith("python -m ")


def test_operators_of_torchvision_are_defined_only_where_its_library_does_not_load(monkeypatch):
    def refuse(*_):
        raise AssertionError("defined a second time, which ends the process")

    monkeypatch.setattr(foreign_models.importlib, "import_module", lambda name: name)
    monkeypatch.setattr(torch.library, "Library", refuse)
    assert foreign_models.torchvision_models() == "torchvision.models"


def test_models_are_measured_before_and_after_conversion(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(converted.CASES, "tiny", converted.Case(tiny_net, 4, 8))
    monkeypatch.setitem(converted.CASES, "missing", converted.Case(not_installed, 2, 8))
    options = ["--steps", "1", "--device", "cpu", "--out", str(tmp_path)]
    converted.main(["--models", "tiny", "missing", *options])
    printed = capsys.readouterr().out
    assert "7 of 7" in printed and "missing: not measured, timm is not installed" in printed
    (path,) = tmp_path.iterdir()
    (row,) = read(path, ConvertedRow)
    assert (row.case, row.batch, row.image_size, row.fused) == ("tiny", 4, 8, 7)
    assert row.plain_bytes > row.store_bytes >= row.rebuild_bytes > 0
    assert row.compiled_graphs == 1
    assert_says_where(row)
    with pytest.raises(FileNotFoundError):  # rows of networks alone
        report.load(tmp_path)
    monkeypatch.setattr(converted, "measured", lambda row, a: pytest.fail("measured again"))
    converted.main(["--models", "tiny", *options, "--resume"])
    assert read(path, ConvertedRow) == [row]


def test_models_are_converted_under_autocast_too(tmp_path, monkeypatch):
    monkeypatch.setitem(converted.CASES, "tiny", converted.Case(tiny_net, 4, 8))
    dtypes = []
    monkeypatch.setattr(
        converted, "check_equal", lambda converted, plain, x, dtype: dtypes.append(dtype)
    )
    options = ["--steps", "1", "--device", "cpu", "--no-graphs", "--out", str(tmp_path)]
    converted.main(["--models", "tiny", *options])
    converted.main(["--models", "tiny", *options, "--dtype", "bf16"])
    (path,) = tmp_path.iterdir()
    single, half = read(path, ConvertedRow)
    assert (single.dtype, half.dtype) == ("fp32", "bf16")
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert half.plain_bytes < 0.8 * single.plain_bytes  # images are float32 in both
    images = [case.images(torch.device("cuda")) for case in converted.CASES.values()]
    assert min(batch for batch, _ in images) == 128


def test_a_model_that_conversion_makes_wrong_gets_no_speed(tmp_path, monkeypatch):
    def convert(model, memory):
        _spoil(model)
        return model

    monkeypatch.setitem(converted.CASES, "tiny", converted.Case(tiny_net, 4, 8))
    monkeypatch.setattr(converted.pk, "convert", convert)
    with pytest.raises(SystemExit, match=r"tiny: .*of the plain model"):
        converted.main(["--models", "tiny", "--device", "cpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_inference_is_measured_in_all_ways(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(inference.NETWORKS, "tiny", inference.Network(tiny_net, 8))
    monkeypatch.setitem(inference.NETWORKS, "missing", inference.Network(not_installed, 8))
    options = ["--batch", "1", "2", "--rounds", "1", "--no-compile", "--device", "cpu"]
    inference.main(["--networks", "tiny", *options, "--out", str(tmp_path)])
    options += ["--size", "16", "--dtype", "fp64"]
    inference.main(["--networks", "resnet-20", "missing", *options, "--out", str(tmp_path)])
    assert "missing: not measured, timm is not installed" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    rows = read(path, InferenceRow)
    contenders = (
        "eager",
        "torch.fx fuse",
        "pk.fuse_for_inference",
        "pk.fuse_for_inference, converted",
    )
    cases = (("tiny", 8, "fp32"), ("resnet-20", 16, "fp64"))
    assert [(r.case, r.image_size, r.dtype, r.batch, r.contender) for r in rows] == [
        (*case, batch, contender) for case in cases for batch in (1, 2) for contender in contenders
    ]
    for row in rows:
        assert row.images_per_s == pytest.approx(row.batch / row.median_ms * 1e3, rel=1e-4)
        assert_says_where(row)
    with pytest.raises(FileNotFoundError):  # rows of networks alone
        report.load(tmp_path)


def test_the_committed_results_can_be_read():
    results = measure.ROOT / "bench" / "results"
    devices = report.load(results)
    assert all(rows and points for rows, points in devices.values())
    assert "| torchvision resnet50 " in report.converted_block(results)


@pytest.mark.parametrize(
    ("started", "command"),
    [
        (["bench/__main__.py", "--quick"], "python -m bench --quick"),
        (["bench/inference.py", "--batch", "1"], "python -m bench.inference --batch 1"),
        (["bin/pytest", "bench/ops.py"], "python -m pytest bench/ops.py"),
    ],
)
def test_rows_say_the_command_that_makes_them(started, command, monkeypatch):
    monkeypatch.setattr(measure.sys, "argv", [str(measure.ROOT / started[0]), *started[1:]])
    assert Machine.of(CPU).command == command


def test_the_commit_can_be_said_for_a_tree_without_history(monkeypatch):
    monkeypatch.setenv("PREACT_KERNELS_COMMIT", "0123456789")
    assert measure.commit() == "0123456789"


def test_without_history_the_commit_is_a_hash_of_the_sources(tmp_path, monkeypatch):
    monkeypatch.delenv("PREACT_KERNELS_COMMIT", raising=False)
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


def test_rows_of_another_process_stay(tmp_path):
    rows, other = (Records(tmp_path / "rows.csv", Row, keep=False) for _ in range(2))
    first, second, third = rows_of_two_families()[:3]
    rows.put(first)
    other.put(first, second)
    rows.read_again()
    rows.put(third)
    assert [r.key for r in read(rows.path, Row)] == [first.key, second.key, third.key]


def test_the_hottest_kernels_come_first():
    kernels, step_ms = hotspots("fused-store", Network(20), 2, CPU, torch.float32)
    times = [ms for _, _, ms in kernels]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0
    assert step_ms > 0
    assert any("preact_stage_forward" in name or "bn_relu" in name for name, _, _ in kernels)


def test_hotspots_refuse_what_cannot_run(capsys):
    for arguments, reason in (
        (["--network", "vgg-16"], "expected one of resnet-DEPTH"),
        (["fused-graph", "--device", "cpu"], "CUDA graphs: no GPU"),
    ):
        with pytest.raises(SystemExit):
            hot_main(arguments)
        assert reason in capsys.readouterr().err


def test_the_peak_of_a_step_counts_what_it_keeps():
    found = peak_of_step("fused-store", Network(20), 2, torch.float32)
    assert found["peak_raw_bytes"] > found["peak_bytes"] > 0


def timed_row(contender, case, ms, kept, note=""):
    machine = Machine("a cpu", "torch 2", "abc", "today", "python -m bench")
    row = Row(
        level="network",
        contender=contender,
        case=case,
        shape="16x3x32x32",
        batch=16,
        dtype="float32",
        memory_mode="x",
        median_ms=ms,
        p20_ms=ms,
        p80_ms=ms,
        saved_bytes=kept,
        correct="yes",
        images_per_s=1.0,
        note=note,
    )
    return machine.stamp(row)


def rows_of_two_families():
    return [
        timed_row(name, case, ms, kept)
        for case in ("resnet-164", "resnet-20", "imagenet-resnet-50")
        for name, ms, kept in (("eager-channels-last", 20.0, 400), ("fused-store", 10.0, 200))
    ]


@pytest.fixture
def pages(tmp_path):
    """Folder with README.md and docs/benchmarks.md, whose blocks say `old`."""
    (tmp_path / "docs").mkdir()
    for page, names in report.PAGES.items():
        blocks = [f"<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->" for name in names]
        (tmp_path / page).write_text("\n".join(blocks))
    return tmp_path


@pytest.mark.not_under_sanitizer
def test_under_torchrun_the_processes_are_compared_with_one(tmp_path):
    options = ["--networks", "resnet-8", "--batch", "2", "--steps", "2", "--device", "cpu"]
    done = torchrun(2, ["bench", *options, "--out", tmp_path])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("fused-rebuild") == 1  # of one process
    (path,) = tmp_path.iterdir()
    rows = {(r.contender, r.batch_norm): r for r in read(path, ScalingRow)}
    assert list(rows) == [
        ("eager-channels-last", scaling.LOCAL),
        ("fused-store", scaling.LOCAL),
        ("fused-store", scaling.SHARED),
        ("fused-rebuild", scaling.SHARED),
        ("fused-checkpoint", scaling.SHARED),
    ]
    for (_, batch_norm), row in rows.items():
        assert row.correct == ("yes" if batch_norm == scaling.SHARED else "another function")
        assert row.processes == 2
        assert row.images_per_s == pytest.approx(2 * 2e3 / row.together_ms, rel=1e-4)
        assert row.efficiency == pytest.approx(
            row.images_per_s / 2 / row.alone_images_per_s, rel=1e-4
        )
        assert 0 <= row.sending_share < 1
    with pytest.raises(FileNotFoundError):  # the report leaves these files alone
        report.load(tmp_path)


def test_a_report_has_a_table_and_the_plots_of_every_family(pages):
    results = pages / "bench" / "results"
    records = Records(results / "a-cpu.csv", Row, keep=False)
    records.put(*rows_of_two_families(), timed_row("fused-store", "resnet-1001", 10.0, 200))
    report.main(["--results", str(results), "--root", str(pages)])
    readme = (pages / "README.md").read_text()
    text = (pages / "docs" / "benchmarks.md").read_text()
    assert "\nold\n" not in readme + text
    places = [
        text.index(f"| {case} ") for case in ("resnet-164", "resnet-20", "imagenet-resnet-50")
    ]
    assert places == sorted(places)
    assert "takes 2.00 times as long as fused-store" in text
    assert "0.500" in text
    plots = [
        "time-against-depth",
        "memory-against-depth",
        "resnet-1001-memory-against-time",
        "resnet-164-memory-against-time",
        "imagenet-resnet-50-memory-against-time",
    ]
    plots = [f"a-cpu-batch-16-float32-{name}.png" for name in plots]
    assert sorted(path.name for path in results.glob("*.png")) == sorted(plots)
    assert all(f"](../bench/results/{name})" in text for name in plots)
    assert f"](bench/results/{plots[2]})" in readme


def test_a_report_has_the_ceilings_and_the_losses_of_a_gpu(pages):
    results = pages / "bench" / "results"
    machine = Machine("A GPU", "versions", "commit", "date", "command")
    ceilings = CeilingRow("copy", "GB/s", 4000.0), CeilingRow("barrier", "us", note="no nvcc")
    path = results / f"a-gpu{CEILINGS}"
    Records(path, CeilingRow, keep=False).put(*map(machine.stamp, ceilings))
    assert "| copy      | 4,000.00   | GB/s   |" in report.gpu_block(results)
    kernels = [
        LaunchRow(
            "1", "forward", kernel, 100, 1.0, "", "", "", 4e6, 0.0, 0.0, 1.9,
            measured_us_per_block=us, copy_gb_s=4000.0, network="resnet-1001", backend=backend,
        )
        for kernel, us, backend in (
            ("F1", 4.0, "cuda"), ("F2", 2.0, "cuda"), ("F3", None, "cuda"), ("F1", None, "triton"),
        )
    ]  # fmt: skip
    path = results / f"a-gpu{LAUNCHES}"
    Records(path, LaunchRow, keep=False).put(*map(machine.stamp, kernels))
    text = report.gpu_block(results)
    assert "take 0.60 ms, by the estimate 0.38 ms" in text
    assert text.index("| F1 ") < text.index("| F2 ")
    assert "F3" not in text and "triton" not in text  # not measured
    records = Records(results / "a-cpu.csv", Row, keep=False)
    records.put(timed_row("fused-store", "resnet-1001", 10.0, 200))
    report.main(["--results", str(results), "--root", str(pages)])
    assert text in (pages / "docs" / "benchmarks.md").read_text()


def test_the_headline_shows_rivals_that_no_other_rival_beats():
    case = "resnet-1001"
    drifted = f"{network.DRIFTED}: fused-store took 5.0 ms beside this, 10.0 ms before"
    rows = [
        timed_row("eager-nchw", case, 20.0, 400 * 2**20),
        timed_row("eager-channels-last", case, 15.0, 400 * 2**20),
        timed_row("fused-store", case, 10.0, 200 * 2**20),
        timed_row("checkpoint-block", case, 14.0, 100 * 2**20, drifted),
        timed_row("selective-convs", case, 16.0, 300 * 2**20, drifted),
        timed_row("fused-rebuild", case, 11.0, 50 * 2**20),
    ]
    lines = [line.split("|")[1:-1] for line in report.headline_table(rows).splitlines()[2:6]]
    assert [[cell.strip() for cell in line if cell.strip() != "x"] for line in lines] == [
        ["eager-channels-last", "400", "1.000", "1.50"],
        ["**fused-store**", "200", "0.500", "1.00"],
        ["checkpoint-block", "100", "0.250", "2.80"],
        ["**fused-rebuild**", "50", "0.125", "1.10"],
    ]


def test_a_page_without_its_markers_is_left_alone(pages):
    with pytest.raises(ValueError, match="expected the marker <!-- bench:ops --> once, found 0"):
        report.rewrite_blocks("text", {"ops": "table"})
    (pages / "docs" / "benchmarks.md").write_text("text")
    before = (pages / "README.md").read_text()
    with pytest.raises(SystemExit, match=r"bench\.report: expected the marker"):
        report.main(["--root", str(pages)])
    assert (pages / "README.md").read_text() == before
