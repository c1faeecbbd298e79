"""Block shapes: changes, the launches that have them, and rows of changes that run or fail."""

import concurrent.futures
import functools
import pickle

import pytest
import torch

pytest.importorskip("tabulate")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("triton")

from bench import block_shapes, launches, measure, report
from bench.block_changes import Change, Step, applied, backend_module, kernels, used, variants
from bench.block_shapes import main, table
from bench.contenders import Network
from bench.records import BLOCK_SHAPES, BlockShapeRow, read
from preact_kernels.kernels.triton.configurations import ConvBlocks, Device
from preact_kernels.ops import dispatch

HOPPER = Device(90, 132, 227 * 1024)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The GPU for which block shapes are chosen."""
    for name in ("norm_act_conv_forward", "norm_act_conv_backward"):
        monkeypatch.setattr(backend_module(name), "properties", lambda device: HOPPER)


@functools.cache
def kernels_of(network="resnet-1001", batch=128, dtype=torch.bfloat16):
    return list(kernels(Step(Network.named(network), batch, dtype)))


def test_every_kernel_of_a_block_is_changed():
    names = [f"{k.stage + 1} {k.name}" for k in kernels_of()]
    last = ["3 F1", "3 B1", "3 F2", "3 B2 input", "3 B2 weight"]
    last += ["3 F3", "3 B3 input", "3 B3 weight"]
    firsts = [f"{s} {d}{n}" for s in "12" for n in "123" for d in "FB"]
    assert names == [*firsts, *last]
    assert {k.stage for k in kernels_of("imagenet-resnet-50")} == {0}  # the others are not fused
    # The second convolution of a basic block is the same.
    assert [k.name for k in kernels_of("resnet-20") if k.stage == 0] == ["F1", "B1"]
    assert kernels_of("resnet-11") == []  # only blocks with a projection


def test_changes_are_valid_and_say_all_that_they_change():
    for kernel in [*kernels_of(), *kernels_of(dtype=torch.float32)]:
        changes = list(variants(kernel))
        assert len({str(c) for c in changes}) == len(set(changes)) == len(changes) >= 7
        for change in changes:
            assert pickle.loads(pickle.dumps(change)) == change
            if change.blocks is None:
                assert (kernel.part, str(change)) == ("both", "two launches")
                continue
            said = {n: int(v) for n, v in (field.split("=") for field in str(change).split())}
            assert said and kernel.chosen._replace(**said) == change.blocks
            assert all(getattr(kernel.chosen, name) != value for name, value in said.items())
            pixels, cin, cout, warps, stages, tap_stages, resident = change.blocks
            assert {pixels, cin, cout} <= {16, 32, 64, 128, 256} and warps in (1, 2, 4, 8)
            assert 1 <= stages <= 4 and 0 <= tap_stages <= 5 and 1 <= resident <= 8


def test_each_field_is_changed_where_it_can_be():
    kernel = next(k for k in kernels_of() if (k.stage, k.place, k.part) == (2, 0, "forward"))
    assert kernel.chosen == ConvBlocks(64, 64, 64, 8, 3, 1, 1)
    assert [str(change) for change in variants(kernel)] == [
        "num_warps=4",
        "block_pixels=32",
        "block_pixels=128",
        "resident=2",
        "block_pixels=32 num_warps=4 resident=2",
        "block_pixels=32 resident=2",
        "num_warps=4 resident=2",
        "block_pixels=16 num_warps=4 resident=4",
        "num_stages=1",
        "num_stages=2",
        "num_stages=4",
        "block_pixels=32 num_warps=4 num_stages=2 resident=2",
        "block_cin=128",
        "block_cout=32",
    ]


@pytest.mark.parametrize(
    ("kernel", "said", "unsaid"),
    [
        ((2, 1, "input"), ["num_tap_stages=2"], ["num_stages=2", "two launches"]),
        ((0, 1, "both"), ["num_stages=2", "two launches"], ["num_tap_stages=2"]),
        ((2, 0, "both"), ["block_cin=32", "two launches"], ["block_cin=128", "block_cout=32"]),
        ((2, 2, "input"), ["block_cout=256", "block_cin=32"], ["block_cin=128", "block_cout=64"]),
        ((2, 2, "weight"), ["block_cout=128"], ["block_cout=32"]),
    ],
)
def test_loops_and_channels_of_a_kernel_are_changed(kernel, said, unsaid):
    (found,) = [k for k in kernels_of() if (k.stage, k.place, k.part) == kernel]
    changes = [str(change) for change in variants(found)]
    assert set(said) <= set(changes)
    assert not set(unsaid) & set(changes)


@pytest.mark.parametrize("batch", [2, 128])  # so few pixels have smaller tiles
def test_a_change_reaches_its_kernel_alone_and_ends_with_its_context(batch):
    found = kernels_of(batch=batch)
    for change in [c for kernel in found for c in variants(kernel)][::3]:
        kernel, blocks = change
        places = [kernel._replace(place=place) for place in range(3)]
        before = [used(k) for k in places]
        with applied(change):
            after = [used(k) for k in places]
        expected = [dict(parts) for parts in before]
        if blocks is None:
            del expected[kernel.place]["both"]
            assert set(after[kernel.place]) == {"forward", "input", "weight"}
            expected[kernel.place] = expected[kernel.place] | {
                part: after[kernel.place][part] for part in ("input", "weight")
            }
        else:
            expected[kernel.place][kernel.part] = blocks
        assert after == expected
        assert [used(k) for k in places] == before


def test_a_training_step_launches_the_change(monkeypatch):
    """Also where the launches of the same stage are known from an earlier step."""
    step = Step(Network.named("resnet-29"), 1, torch.float32)
    stage, x = next(step.stages("cpu"))
    stage, x = stage[:2], x.detach()[:, :, :4, :4].normal_().requires_grad_()
    for module in stage.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.BatchNorm2d):
            module.reset_parameters()
    (kernel,) = [k for k in kernels(step) if (k.stage, k.place, k.part) == (0, 1, "forward")]
    change = Change(kernel, kernel.chosen._replace(num_warps=2, block_pixels=16))
    launched, module = [], backend_module("norm_act_conv_forward")
    launch = module.launch_kernel

    def recorded(kernel, grid, args, constants, *rest):
        launched.append(constants["BLOCKS"])
        launch(kernel, grid, args, constants, *rest)

    monkeypatch.setattr(module, "launch_kernel", recorded)

    def counts():
        launched.clear()
        with block_shapes.pk.use_backend("triton"):
            torch.autograd.grad(stage(x).sum(), [x, *stage.parameters()])
        return launched.count(kernel.chosen), launched.count(change.blocks)

    assert counts() == (2, 0)
    with applied(change):
        assert counts() == (0, 2)
    assert counts() == (2, 0)


def test_a_kernel_that_the_change_would_not_launch_is_said(monkeypatch):
    kernel = next(k for k in kernels_of() if k.part == "both")
    change = next(variants(kernel))
    backward = backend_module("norm_act_conv_backward")
    chosen = backward.conv_backward
    monkeypatch.setattr(backward, "costs_less_apart", lambda *sizes: True)
    with pytest.raises(RuntimeError, match="not launched"), applied(change):
        pass
    assert backward.conv_backward is chosen


def test_a_time_is_that_of_a_block_of_a_stage_with_the_change(monkeypatch):
    kernel = next(k for k in kernels_of() if k.part == "both")
    change, stage, times = next(variants(kernel)), [None] * 4, iter([3.0, 2.0, *[5.0] * 100])

    def captured(given, x):
        assert (given, x) == (stage, "x")
        assert dispatch.current() == "triton"
        return used(kernel)[kernel.part]

    monkeypatch.setattr(block_shapes, "short_stage", lambda *which: (stage, "x"))
    monkeypatch.setattr(launches, "captured", captured)
    replayed = []
    monkeypatch.setattr(
        measure, "time_once_ms", lambda replay, device: replayed.append(replay) or next(times)
    )
    assert block_shapes.us_per_block(None, 4, 0, change) == 500  # of the shortest time
    assert set(replayed) == {change.blocks}
    assert block_shapes.us_per_block(None, 4, 0) == 1250
    assert replayed[-1] == kernel.chosen


def test_a_few_blocks_compile_the_kernels_of_a_short_stage():
    group_size = backend_module("run_weight_gradients").group_size
    few, all_blocks = block_shapes.BLOCKS_TO_COMPILE, block_shapes.BLOCKS
    sizes = {group_size(blocks - n, 1) for blocks in (few, all_blocks) for n in (0, 1)}
    assert len(sizes) == 1  # with and without the block with a projection


class Gpu:
    """A GPU that takes 10 us for an unchanged block."""

    def __init__(self):
        self.calls = []  # change or None, and blocks
        self.us = {}  # by change: a time or an error
        self.drift_us = 0.0  # of each time of the unchanged stage
        self.is_lost = False

    def us_per_block(self, step, blocks, index, change=None):
        self.calls.append((change and str(change), index, blocks))
        if change is None:
            return 10.0 + self.drift_us * sum(name is None for name, *_ in self.calls[:-1])
        result = self.us.get((change.kernel.stage, change.kernel.place, str(change)), 9.0)
        if isinstance(result, BaseException):
            raise result
        return result

    def synchronize(self, device):
        if self.is_lost:
            raise RuntimeError("the GPU is lost")


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu()
    machine = measure.Machine("A GPU", "versions", "commit", "date", "command")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "synchronize", found.synchronize)
    monkeypatch.setattr(measure.Machine, "of", lambda device: machine)
    monkeypatch.setattr(block_shapes.pk, "available_backends", lambda: ("triton",))
    monkeypatch.setattr(block_shapes, "us_per_block", found.us_per_block)
    monkeypatch.setattr(  # functions of this process are replaced
        concurrent.futures,
        "ProcessPoolExecutor",
        lambda processes, mp_context: concurrent.futures.ThreadPoolExecutor(1),
    )
    return found


@pytest.fixture
def command(tmp_path):
    """Runs the command on `resnet-29`; returns the rows that the file has."""

    def run(*options):
        main(["--network", "resnet-29", "--out", str(tmp_path), *options])
        return rows()

    def rows():
        return read(tmp_path / f"a-gpu{BLOCK_SHAPES}", BlockShapeRow)

    run.rows = rows
    run.folder = tmp_path
    return run


def test_the_unchanged_stage_is_measured_between_dozens_of_changes(gpu, command):
    gpu.drift_us = 1.0
    rows = command()
    changes = [c for k in kernels_of("resnet-29") for c in variants(k)]
    assert len(rows) == len(changes) == sum(name is not None for name, *_ in gpu.calls)
    assert all(blocks == block_shapes.BLOCKS for *_, blocks in gpu.calls)
    names = [name for name, *_ in gpu.calls]
    assert names[0] is names[13] is names[26] is None and None not in names[1:13] + names[14:26]
    assert names[-1] is None
    assert {row.conv[-3:] for row in rows[: len(rows) // 4]} == {"3x3"}
    first, later = rows[0], rows[12]
    assert (first.before_us_per_block, first.after_us_per_block) == (10, 11)
    assert (first.gain_us_per_block, later.gain_us_per_block) == (1.5, 2.5)
    with pytest.raises(FileNotFoundError):  # has no rows of networks
        report.load(command.folder)


def test_changes_that_fail_are_rows_with_the_reason(gpu, command, capsys):
    gpu.us[0, 1, "num_warps=2"] = RuntimeError("out of resource: shared memory\nmore")
    rows = command()
    (failed,) = [row for row in rows if row.note]
    assert (failed.stage, failed.kernel, failed.change) == (1, "F2", "num_warps=2")
    assert failed.note == "RuntimeError: out of resource: shared memory"
    assert failed.us_per_block is failed.gain_us_per_block is None
    assert f"{len(rows)} changes: 1 do not run, 0 are not measured" in capsys.readouterr().out


def test_compiling_comes_first_and_leaves_out_what_fails(gpu, command):
    gpu.us[0, 1, "num_warps=2"] = RuntimeError("too many registers")
    (failed,) = command("--compile", "2", "--only-compile")
    assert failed.note == "RuntimeError: too many registers"
    assert [call[:2] for call in gpu.calls[:3]] == [(None, 0), (None, 1), (None, 2)]
    assert {blocks for *_, blocks in gpu.calls} == {block_shapes.BLOCKS_TO_COMPILE}
    compiled = len(gpu.calls) - 3
    gpu.calls.clear()
    rows = command("--resume")
    assert len(rows) == compiled == sum(name is not None for name, *_ in gpu.calls) + 1
    assert [row.note for row in rows if row.us_per_block is None] == [failed.note]


def test_an_interrupted_run_keeps_its_rows_and_is_resumed(gpu, command, monkeypatch):
    gpu.us[1, 1, "num_warps=4"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        command()
    known = command.rows()
    assert {row.stage for row in known} == {1} and all(row.us_per_block == 9 for row in known)
    gpu.us.clear()
    gpu.calls.clear()
    rows = command("--resume")
    changes = sum(name is not None for name, *_ in gpu.calls)
    assert changes == len(rows) - len(known) > len(known) > 20
    machine = measure.Machine("A GPU", "versions", "another", "date", "command")
    monkeypatch.setattr(measure.Machine, "of", lambda device: machine)
    gpu.calls.clear()
    command("--resume")
    assert sum(name is not None for name, *_ in gpu.calls) == len(rows)


@pytest.mark.parametrize(
    ("options", "note"), [(["--compile", "1"], "the GPU is lost"), ([], "illegal address")]
)
def test_a_lost_gpu_ends_the_run_after_one_row(gpu, command, options, note):
    gpu.us[0, 1, "num_warps=2"] = RuntimeError("illegal address")
    gpu.is_lost = True  # else the changes after this one would fail without a fault of their own
    with pytest.raises(RuntimeError, match="the GPU is lost"):
        command(*options)
    assert [row.note for row in command.rows()] == [f"RuntimeError: {note}"]


def test_no_time_measures_nothing(gpu, command):
    with pytest.raises(SystemExit, match="nothing was measured"):
        command("--seconds", "0")
    assert gpu.calls == []


def test_the_table_has_the_best_change_of_each_kernel():
    def row(kernel, change, us):
        found = BlockShapeRow("n", 1, "d", 1, kernel, "16x16x3x3", "num_warps=8", change)
        found.set_times(us, 10.0, 11.0)
        return found

    rows = [
        row("F1", "slower", 10.75),
        row("F2", "good", 9.5),
        row("F2", "best", 9.25),
        row("B1", "largest", 8.0),
        row("B2", "failed", None),
    ]
    first, second = table(rows).splitlines()[2:]
    assert " ".join(first.split()) == "1 B1 16x16x3x3 num_warps=8 largest 8.00 10.00 11.00 2.50"
    assert " ".join(second.split()) == "1 F2 16x16x3x3 num_warps=8 best 9.25 10.00 11.00 1.25"


def test_what_is_not_served_is_said(capsys, monkeypatch):
    for options, message in (
        (["--network", "vgg-16"], "expected one of resnet-DEPTH"),
        (["--batch", "0"], "--batch: expected at least 1, got 0"),
        (["--only-compile"], "--compile: expected at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            main(options)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"bench\.block_shapes: no GPU"):
        main([])
