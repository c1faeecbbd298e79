"""The launches of a training step: those of the backends, where they belong, and their bytes."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import types

import pytest
import torch

pytest.importorskip("tabulate")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from bench import dry_run, launches, measure, report
from bench.dry_run import BACKWARD, FORWARD, Launch, Part, PlacedLaunch, StageLaunches
from bench.launches import Kernel, arguments, estimated_us, kernels_in, main, recorded, rows_of
from bench.records import LAUNCHES, LaunchRow, Records, read
from tests.kernels.cuda_on_host import build, serve_cpu

# Of a block without a projection, in each stage, beside those that occur once a run.
LAUNCHES_A_BLOCK = {"cuda": (6, 6, 6), "triton": (6, 6, 6)}
KERNELS_OF_UNITS = ("F1", "F2", "F3", "B1", "B2", "B3")

if shutil.which(build.CXX[0]) is None:
    pytest.skip(f"no C++ compiler: {build.CXX[0]} not found", allow_module_level=True)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def environment():
    """Without Triton's interpreter, which has no launches."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def rows_by(backend, *options, folder):
    """The rows that the command writes, in a process of its own."""
    if backend == "triton":
        pytest.importorskip("triton")
    path = folder / "launches.csv"
    command = [sys.executable, "-m", "bench.launches", "--backend", backend, "--csv", str(path)]
    done = subprocess.run(
        [*command, *options], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return read(path, LaunchRow)


def of_cuda(*options):
    """The rows of the CUDA backend."""
    stages = recorded(arguments([*options, "--backend", "cuda"]))
    return [row for s in stages for row in rows_of(s, [None] * len(s.launches))]


def units(rows, direction):
    return sum(row.units_per_block for row in rows if row.direction == direction)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_units_of_a_block_have_so_many_launches(backend, tmp_path):
    rows = rows_by(backend, "--network", "resnet-164", folder=tmp_path)
    counts = []
    for stage in "123":
        of_units = [r for r in rows if r.stage == stage and r.kernel[:2] in KERNELS_OF_UNITS]
        counts.append(sum(round(row.launches_per_block) for row in of_units))
        assert {row.kernel[:2] for row in of_units} == set(KERNELS_OF_UNITS)
    assert tuple(counts) == LAUNCHES_A_BLOCK[backend]


@pytest.mark.parametrize("network", ["resnet-164", "resnet-1001"])
def test_a_run_of_blocks_has_few_other_launches_whatever_its_length(network):
    rows = of_cuda("--network", network, "--batch", "8")
    for stage in "123":
        others = [r for r in rows if r.stage == stage and r.kernel[:2] not in KERNELS_OF_UNITS]
        assert 0 < sum(round(r.launches_per_block * r.blocks) for r in others) <= 40


def test_resnet_1001_has_its_launches_and_bytes():
    rows = of_cuda("--network", "resnet-1001", "--batch", "128")
    for row in [r for r in rows if r.stage in "123"]:
        assert row.blocks == 110
        assert row.launches_per_block <= 1
    first = [r for r in rows if r.stage == "1"]
    # What kernels are given is what they read and write: see bench/floors.py. Sums, statistics and
    # weights are small in the first stage.
    assert 16 < units(first, FORWARD) < 16.2
    # g of a block's first unit is not stored: the kernel after it reads two units in its place, dx
    # with it, and writes dx where the plan of the floors has B1b. At most 2 blocks on each of 132
    # multiprocessors write partial weight gradients, which are read once.
    partials = 2 * 4 * 264 * (2 * 64 * 16 + 9 * 16 * 16) / (128 * 32 * 32 * 16 * 2)
    assert 26 < units(first, BACKWARD) < 26.1 + partials
    recomputed = [r for r in rows if r.kernel.startswith("B3 bn_relu_conv_backward_recomputed")]
    assert {r.stage for r in recomputed} == {"1", "2"}
    assert all(r.launches_per_block * r.blocks == pytest.approx(109) for r in recomputed)
    last = [r for r in rows if r.stage == "3" and "sum" not in r.kernel]
    assert 16 < units(last, FORWARD) < 18


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_float32_stream_takes_twice_the_bytes_in_as_many_launches(backend, tmp_path):
    options = ("--network", "resnet-164", "--batch", "128", "--residual-dtype", "float32")
    rows = rows_by(backend, *options, folder=tmp_path)
    assert {row.residual_dtype for row in rows} == {"float32"}
    first = [r for r in rows if r.stage == "1" and r.kernel[:2] in KERNELS_OF_UNITS]
    assert sum(round(row.launches_per_block) for row in first) == LAUNCHES_A_BLOCK[backend][0]
    # Of 16 units, 12 are of the stream: x, and then x again and y.
    assert 16 + 12 < units(first, FORWARD) < 16 + 12.2
    # Of 32, or 26 where g of the first unit is not stored, and of partial sums, 16 are of the
    # stream: x of the fold, skip, the stored dy, and x.
    least = {"cuda": 26, "triton": 32}[backend] + 16
    assert least < units(first, BACKWARD) < least + 3


def test_what_runs_again_is_listed():
    of_mode = {}
    for memory in ("store", "rebuild", "checkpoint"):
        rows = of_cuda("--network", "resnet-47", "--batch", "2", "--memory", memory)
        of_mode[memory] = {
            r.kernel: r.launches_per_block
            for r in rows
            if (r.stage, r.direction) == ("2", BACKWARD) and "bn_relu_conv_forward" in r.kernel
        }
    assert of_mode["store"] == {}
    assert set(of_mode["rebuild"]) == {"B3 bn_relu_conv_forward"}
    assert {"B1 bn_relu_conv_forward", "B2 bn_relu_conv_forward"} < set(of_mode["checkpoint"])


def test_the_file_has_the_stages_that_are_done(tmp_path, monkeypatch):
    path, done, rows_of_stage = tmp_path / "launches.csv", [], launches.rows_of

    def rows(stage, us):
        done.append({row.stage for row in read(path, LaunchRow)} if path.exists() else set())
        return rows_of_stage(stage, us)

    monkeypatch.setattr(launches, "rows_of", rows)
    main(["--network", "resnet-29", "--batch", "2", "--csv", str(path)])
    done.append({row.stage for row in read(path, LaunchRow)})
    assert done[0] == set()
    assert all(before < after for before, after in itertools.pairwise(done))


def test_grids_are_those_of_a_gpu_with_so_many_multiprocessors():
    def largest(multiprocessors):
        rows = of_cuda("--network", "resnet-29", "--multiprocessors", str(multiprocessors))
        return max(int(r.grid) for r in rows if r.kernel.endswith("bn_relu_conv_forward"))

    assert 0 < largest(10) <= 40 < largest(100)


def test_networks_with_convolutions_of_pytorch_run_none_of_them(tmp_path):
    rows = of_cuda("--network", "imagenet-resnet-50", "--batch", "64")
    names = {row.kernel.split()[-1] for row in rows}
    assert {"aten::convolution", "aten::convolution_backward", "bn_relu_backward_mask"} < names


@pytest.mark.skipif(torch.cuda.is_available(), reason="the library for the host is not loaded")
def test_no_small_number_beside_half_a_pointer_is_the_address_of_a_tensor():
    with serve_cpu.without_running(lambda launch: None):
        tensors = [torch.empty(gib << 30, dtype=torch.uint8) for gib in (1, 1, 2, 2, 3, 1)]
    for t in tensors:
        begin = t.data_ptr() % 2**32
        assert begin >= 2**30 and begin + t.numel() <= 2**32


@pytest.mark.skipif(torch.cuda.is_available(), reason="the library for the host is not loaded")
def test_kernels_run_again_after_a_recording():
    of_cuda("--network", "resnet-29", "--batch", "2")
    assert serve_cpu.tensor_at(torch.empty(1000).data_ptr()) is None
    x = torch.ones(2, 16, 3, 3).contiguous(memory_format=torch.channels_last)
    mean, _ = torch.ops.preact_kernels_cuda.bn_stats(x)
    assert torch.equal(mean, torch.ones(16))


@pytest.mark.parametrize(
    ("call", "name", "floats"),
    [
        (lambda x: x.new_zeros(3), "aten::new_zeros", 3),
        (torch.zeros_like, "aten::zeros_like", 10),
        (lambda x: x.neg(), "aten::neg", 20),
        (lambda x: torch.zeros(7), "aten::zeros", 7),
    ],
)
def test_an_operator_of_a_call_moves_what_it_reads_and_writes(call, name, floats):
    x, recorder = torch.ones(10), dry_run.Recorder()
    with recorder:
        call(x)
        with recorder.call("bn_stats"):
            call(x.view(2, 5))
            torch.empty_like(x)
    (met,) = recorder.recorded
    assert met.launch.name == name
    assert sum(met.tensors.values()) == 4 * floats


def test_parts_of_a_tensor_end_where_the_next_begins():
    from bench.dry_run import _find_sizes, _Recorded

    def launch(*addresses):
        return _Recorded(Launch("k", "1", 1, 32, 0, False, 0), dict.fromkeys(addresses), 0, True)

    met = [launch(100, 140), launch(100), launch(160, 300)]
    tensors = [range(100, 200), range(300, 450)]
    _find_sizes(met, lambda a: next((t for t in tensors if a in t), None))
    assert [m.tensors for m in met] == [{100: 40, 140: 20}, {100: 40}, {160: 40, 300: 150}]


def placed(name, bytes_moved=0, *, blocks=1, is_dependent=False, kernel=None, direction=FORWARD):
    launch = Launch(name, str(blocks), blocks, 256, 0, is_dependent, bytes_moved)
    return PlacedLaunch(launch, 0, direction, kernel or name)


def test_an_estimate_is_bytes_and_gaps():
    assert estimated_us(placed("sum_partials", 4_300_000)) == pytest.approx(2.9)
    dependent = placed("sum_partials", is_dependent=True)
    assert estimated_us(dependent) < estimated_us(placed("sum_partials"))


def test_a_kernel_that_is_not_known_is_an_error_that_names_it():
    stage = StageLaunches([Part("1", 1, 8, 368.0)], [placed("fill_zeros"), placed("secret")])
    with pytest.raises(ValueError, match=r"kernel secret: .* does not know it"):
        list(rows_of(stage, [None, None]))


def test_the_command_names_a_kernel_that_is_not_known(monkeypatch):
    monkeypatch.setattr(launches, "KERNELS", launches.KERNELS - {"bn_stats"})
    with pytest.raises(SystemExit, match=r"^bench\.launches: kernel bn_stats"):
        main(["--network", "resnet-29", "--batch", "2"])


def test_rows_add_up_to_the_launches():
    part = Part("1", 4, 8, 368.0)
    runs = [placed("sum_partials", 40, kernel="F1 sum_partials") for _ in range(8)]
    stage = StageLaunches([part], [*runs, placed("bn_stats", 16)])
    first, last = rows_of(stage, [1.0] * 8 + [6.0])
    assert (first.launches_per_block, first.bytes_per_block, first.units_per_block) == (2, 80, 10)
    assert (first.measured_us_per_block, last.measured_us_per_block) == (2, 1.5)
    assert first.estimated_us_per_block == pytest.approx(2 * 1.9, rel=1e-3)
    text = launches.table([stage], [first, last])
    assert "2.25" in text and "floor 46.0 units" in text and "estimated us" in text


def test_the_file_has_the_rows_of_the_table(tmp_path, capsys):
    path = tmp_path / f"cuda{LAUNCHES}"
    main(["--network", "resnet-29", "--batch", "2", "--csv", str(path)])
    rows = read(path, LaunchRow)
    header = path.read_text().splitlines()[0].split(",")
    assert header[:3] == ["stage", "direction", "kernel"]
    assert {"launches_per_block", "bytes_per_block", "estimated_us_per_block"} < set(header)
    assert len({row.key for row in rows}) == len(rows)
    assert {(r.network, r.batch, r.dtype, r.backend) for r in rows} == {
        ("resnet-29", 2, "bfloat16", "cuda")
    }
    printed = capsys.readouterr().out
    total = round(sum(row.launches_per_block * row.blocks for row in rows))
    assert f"{total} launches in sequence" in printed
    estimated_ms = sum(row.estimated_us_per_block * row.blocks for row in rows) / 1e3
    assert f"estimated {estimated_ms:.1f} ms" in printed
    assert torch.cuda.is_available() or all(r.measured_us_per_block is None for r in rows)
    with pytest.raises(FileNotFoundError):  # rows of networks alone
        report.load(tmp_path)


def test_the_file_keeps_the_rows_of_other_steps_alone(tmp_path):
    path = tmp_path / f"a-gpu{LAUNCHES}"
    old = LaunchRow(
        "1", "forward", "F1 of old", 1, 1.0, "", "", "", 0.0, 0.0, 0.0, 0.0,
        network="resnet-29", batch=2, dtype="bfloat16", backend="cuda", memory="store",
        residual_dtype="bfloat16", multiprocessors=132,
    )  # fmt: skip
    other = dataclasses.replace(old, backend="triton")
    Records(path, LaunchRow, keep=False).put(old, other)
    step = ["--network", "resnet-29", "--batch", "2", "--multiprocessors", "132"]
    main([*step, "--csv", str(path)])
    first, *rows = read(path, LaunchRow)
    assert first == other
    assert {row.backend for row in rows} == {"cuda"}
    assert old.kernel not in {row.kernel for row in rows}


SPANS = [("a", 0.0, 4.0), ("b", 3.0, 9.0), ("c", 5.0, 8.0), ("d", 10.0, 12.0)]


def test_a_kernel_takes_from_the_end_of_the_one_ahead():
    again = [(name, begin + 100, end + 100) for name, begin, end in SPANS]
    assert kernels_in([*again, *SPANS], 2) == [
        Kernel("a", 4), Kernel("b", 5), Kernel("c", 0), Kernel("d", 3),
    ]  # fmt: skip


def test_replays_that_differ_are_an_error():
    with pytest.raises(RuntimeError, match="other kernels in some replays"):
        kernels_in([*SPANS, *[("x", begin + 100, end + 100) for _, begin, end in SPANS]], 2)
    with pytest.raises(RuntimeError, match="other kernels in some replays"):
        kernels_in(SPANS[:3], 2)


PROFILED = [
    Kernel("void preact_kernels::cuda::bn_stats_kernel<float, 4>(Params)", 1.0),
    Kernel("void at::native::vectorized_elementwise_kernel<4, F>(int)", 2.0),
    Kernel("Memset (Device)", 3.0),
    Kernel("bn_relu_conv_forward_kernel", 4.0),
]


def test_measured_kernels_are_those_that_were_recorded():
    met = [placed(n) for n in ("bn_stats", "aten::zeros", "fill_zeros", "bn_relu_conv_forward")]
    assert launches.times_of(met, PROFILED) == [1.0, None, None, 4.0]
    variant = [placed("bn_stats"), placed("bn_relu_conv_forward_rare")]  # of the same kernel
    assert launches.times_of(variant, PROFILED) == [1.0, 4.0]
    with pytest.raises(RuntimeError, match="kernel 1: expected None, the GPU ran bn_relu_conv"):
        launches.times_of(met[:3], PROFILED)
    with pytest.raises(RuntimeError, match="kernel 0: expected bn_relu_conv_forward"):
        launches.times_of(met[3:], PROFILED)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose kernels are those that were recorded, and each take 2 us."""
    step = ["--network", "resnet-29", "--batch", "2"]
    stages = iter(recorded(arguments(step)))

    def kernels_of(step):
        names = [p.launch.name for p in next(stages).launches]
        names = ["Memset (Device)" if n == "fill_zeros" else f"{n}_kernel" for n in names]
        return [Kernel(name, 2.0) for name in names]

    machine = measure.Machine("A GPU", "versions", "commit", "date", "command")
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(launches, "captured", lambda stage, x: lambda: None)
    monkeypatch.setattr(measure, "time_once_ms", lambda step, device: 0.1)
    monkeypatch.setattr(launches, "kernels_of", kernels_of)
    monkeypatch.setattr(measure, "measure_copy_gb_s", lambda device: 4000.0)
    monkeypatch.setattr(dry_run, "stages", lambda *_: [(None, None)] * 3)
    monkeypatch.setattr(launches.pk, "use_backend", lambda name: contextlib.nullcontext())
    monkeypatch.setattr(measure.Machine, "of", lambda device: machine)
    return step


def test_measured_times_are_beside_the_estimates(gpu, tmp_path, capsys):
    path = tmp_path / f"cuda{LAUNCHES}"
    main([*gpu, "--csv", str(path)])
    for row in read(path, LaunchRow):
        if "fill" in row.kernel or "aten::" in row.kernel:
            assert row.measured_us_per_block is None
        else:
            assert row.measured_us_per_block == pytest.approx(2 * row.launches_per_block)
        assert row.copy_gb_s == 4000.0
    printed = capsys.readouterr().out
    assert "stage 3: measured 0.10 ms" in printed
    assert len(printed.split("largest losses, copy bandwidth 4,000 GB/s:\n")[1].splitlines()) == 12


def test_losses_are_the_time_over_the_bytes_at_copy_bandwidth():
    def row(kernel, blocks, bytes_per_block, measured_us):
        return LaunchRow(
            "1", "forward", kernel, blocks, 2.0, "", "", "", bytes_per_block, 0.0, 0.0, 0.0,
            measured_us_per_block=measured_us, copy_gb_s=4000.0,
        )  # fmt: skip

    rows = [
        row("small", 1, 4e6, 2.0),  # 1 us of bytes
        row("large", 100, 4e6, 4.0),
        row("unknown", 100, 4e6, None),
        row("middle", 100, 4e6, 1.25),
    ]
    first, second = launches.losses(rows, most=2).splitlines()[2:]
    assert first.split() == ["1", "forward", "large", "200", "0.400", "0.100", "0.300", "25%"]
    assert second.split() == ["1", "forward", "middle", "200", "0.125", "0.100", "0.025", "80%"]


def test_a_stage_that_is_not_measured_leaves_its_estimates(gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launches, "kernels_of", lambda step: kernels_in([], 5))
    path = tmp_path / f"cuda{LAUNCHES}"
    with pytest.raises(SystemExit, match="nothing was measured"):
        main([*gpu, "--csv", str(path)])
    assert all(row.measured_us_per_block is None for row in read(path, LaunchRow))
    printed = capsys.readouterr().out
    assert "stage 1: measured 0.10 ms" in printed
    assert "stage 1: kernels not measured: the profiler saw no kernels" in printed


@needs_gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_gpu_measures_what_was_recorded(backend, tmp_path):
    rows = rows_by(backend, "--network", "resnet-29", folder=tmp_path)
    for row in rows:
        is_own = "aten::" not in row.kernel and "fill" not in row.kernel
        assert (row.measured_us_per_block is not None) == is_own, row.kernel


def test_help_says_what_the_columns_are(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert "estimated time" in text and "--memory {store,rebuild,checkpoint}" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network", "vgg-16"], "expected one of resnet-DEPTH"),
        (["--network", "resnet-1000"], "depth: expected 6n+2"),
        (["--batch", "0"], "--batch: expected at least 1, got 0"),
        (["--multiprocessors", "0"], "--multiprocessors: expected at least 1, got 0"),
        (["--dtype", "fp64"], "invalid choice: 'fp64'"),
        (["--backend", "cpu"], "invalid choice: 'cpu'"),
    ],
)
def test_what_is_not_served_is_said(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="Triton is not interpreted")
def test_the_interpreter_is_refused():
    pytest.importorskip("triton")
    with pytest.raises(SystemExit, match="TRITON_INTERPRET is set"):
        main(["--backend", "triton"])


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(build, "CXX", ["no-such-compiler"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no no-such-compiler"):
        main(["--backend", "cuda"])
