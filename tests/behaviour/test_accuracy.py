"""`python -m preact_kernels` and its check of the kernels."""

import faulthandler
import inspect
import itertools
import math
import os
import re
import runpy
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels import __main__ as command
from preact_kernels import torch_compat
from preact_kernels.accuracy import check, oracle
from preact_kernels.accuracy.cases import KINDS
from preact_kernels.kernels import cpu, layout
from preact_kernels.kernels.contract import BlockKernels
from preact_kernels.ops import dispatch
from preact_kernels.ops.schema import SCHEMAS
from tests.kernels.cuda_conv_cases import as_tf32

needs_cpu_library = pytest.mark.skipif(
    bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"
)
FLOAT32, FLOAT16 = check.Column(torch.float32), check.Column(torch.float16)
# A kind of case that reaches each function of a backend.
KIND_OF = {
    "bn_stats": "batch norm, ReLU",
    "running_stats_update": "batch norm, ReLU",
    "norm_buffers_update": "batch norm, ReLU",
    "group_stats": "group norm, SiLU",
    "norm_act_forward": "batch norm, ReLU",
    "norm_act_backward": "batch norm, ReLU",
    "norm_act_recompute": "groups, dilation, bias",
    "norm_input_gradient": "batch norm, ReLU",
    "norm_act_conv_forward": "1x1 convolution",
    "norm_act_conv_backward": "1x1 convolution",
    "pool_sums": "group norm, SiLU",
    "dropout_bits": "dropout",
    "dropout": "dropout",
    "residual_add_forward": "residual addition",
    "block_run_forward": "bottlenecks",
    "block_run_backward": "bottlenecks",
}


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_right(kind, training_dtype, monkeypatch):
    monkeypatch.setattr(torch_compat, "has_amx", lambda: False)
    cell = check.check_kind(dispatch.current(), kind, check.Column(training_dtype))
    assert cell is None or not cell.faults


def first_tensor(results):
    """The first tensor of the results of a kernel."""
    if isinstance(results, torch.Tensor):
        return results
    return next(filter(None.__ne__, map(first_tensor, results or ())), None)


def plant(name, monkeypatch, fault, owner=None):
    """Applies `fault` to the first tensor that a function of the CPU backend returns or updates."""
    owner = owner or cpu.kernels()
    function = getattr(owner, name)

    def faulty(*arguments, **options):
        results = function(*arguments, **options)
        fault(first_tensor(arguments[0] if results is None else results))
        return results

    monkeypatch.setattr(owner, name, faulty)


def wrong_by(share, t):
    t[t != 0] = 0 if t.dtype == torch.uint8 else t[t != 0] * (1 + share)


def test_each_function_of_a_backend_has_a_kind():
    functions = {n for n, _ in inspect.getmembers(BlockKernels, inspect.isfunction)}
    assert {n for n in functions if not n.startswith("_")} - {"refusal"} == KIND_OF.keys()


@needs_cpu_library
@pytest.mark.covering(1)
@pytest.mark.parametrize("column", [FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize("name", KIND_OF)
def test_a_fault_in_each_function_of_a_backend_is_found(name, column, monkeypatch):
    share = 0.1 if column.is_coarse else 0.01
    plant(name, monkeypatch, partial(wrong_by, share))
    cell = check.check_kind("cpu", KIND_OF[name], column)
    assert str(cell).startswith("MISS")
    assert all("allowed" in fault for fault in cell.faults)


@needs_cpu_library
@pytest.mark.parametrize(
    ("name", "kind"),
    [("nhwc", "layouts"), ("nchw", "layouts"), ("weight_gradient", "depthwise convolution")],
)
def test_a_fault_in_another_function_is_found(name, kind, monkeypatch):
    plant(name, monkeypatch, partial(wrong_by, 0.01), layout if kind == "layouts" else None)
    cell = check.check_kind("cpu", kind, FLOAT32)
    assert str(cell).startswith("MISS")


def other_bits_in_the_second_run():
    calls = itertools.count(1)
    return lambda t: t.mul_(1 + 2**-22 * (next(calls) == 2 * check.DRAWS))


def one_wrong_element(t):
    t[-1, -1, -1, -1] += 4


def no_memory(t):
    raise RuntimeError("no memory\nmore lines")


@needs_cpu_library
@pytest.mark.parametrize(
    ("name", "fault", "column", "text"),
    [
        (
            "norm_act_forward",
            other_bits_in_the_second_run(),
            FLOAT32,
            "batch norm, relu: y: two runs gave different bits",
        ),
        ("block_run_forward", one_wrong_element, check.Column(torch.bfloat16), "an element is off"),
        ("residual_add_forward", no_memory, FLOAT32, "addition: RuntimeError: no memory"),
    ],
)
def test_other_faults_are_found_and_named(name, fault, column, text, monkeypatch):
    plant(name, monkeypatch, fault)
    cell = check.check_kind("cpu", KIND_OF[name], column)
    assert str(cell).startswith("MISS")
    if column == FLOAT32:
        assert cell.faults == [text]
    if fault is no_memory:
        assert cell == (math.inf, [text])
    assert any(text in fault for fault in cell.faults)


def test_problems_of_a_case_have_an_x_of_their_own_in_both_memory_formats():
    (case,) = KINDS["batch norm, ReLU"](FLOAT32)
    first, second, third = (check._problem(case, index, FLOAT32)["x"] for index in range(3))
    assert second.is_contiguous(memory_format=torch.channels_last)
    assert first.is_contiguous() and third.is_contiguous()
    assert not torch.equal(first, second) and not torch.equal(first, third)


@pytest.mark.parametrize("column", [FLOAT32, FLOAT16], ids=str)
def test_kinds_have_the_inputs_that_they_are_for(column):
    for kind in ("bottlenecks", "basic blocks", "projections", "rebuilt residual stream"):
        for case in KINDS[kind](column):  # ReLUs have inputs of both signs in a channel
            inputs = []
            case.plain[0].bn1.register_forward_hook(lambda m, args, y, seen=inputs: seen.append(y))
            case.plain(check._problem(case, 1, column)["x"])
            positive = (inputs[0] > 0).float().mean((0, 2, 3))
            assert ((positive > 0.05) & (positive < 0.95)).float().mean() > 0.3
    for case in KINDS["large weight"](column):
        assert case.fused.conv.weight.numel() > 2**16  # small weights on a CPU have fewer
    (many, *_) = KINDS["many pixels"](column)
    assert many.inputs["x"].shape[2:].numel() >= 1024 and "residual" in many.inputs
    if column == FLOAT32:
        least = layout._LEAST_TRANSPOSED
        assert all(c.inputs["x"].numel() >= least for c in KINDS["layouts"](column))


def test_a_large_error_of_plain_pytorch_itself_is_reported(monkeypatch):
    def wrong(x, *arguments, conv2d=F.conv2d):
        return conv2d(x, *arguments) * (1 if x.dtype == torch.float64 else 1.01)

    def conv_forward(conv, x, weight, bias):
        return wrong(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)

    monkeypatch.setattr(torch.nn.Conv2d, "_conv_forward", conv_forward)
    monkeypatch.setattr(F, "conv2d", wrong)
    cell = check.check_kind("reference", "5x5 convolution", FLOAT32)
    assert "plain PyTorch itself has a relative error of 0.0" in cell.faults[-1]


@needs_cpu_library
def test_settings_are_those_of_the_column_and_then_those_of_before(monkeypatch):
    seen, conv = [], torch.backends.cudnn.conv

    def settings():
        drawn = torch.random.get_rng_state().tolist()
        modes = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
        return conv.fp32_precision, dispatch.current(), *modes, drawn

    def note(t):
        seen.append((conv.fp32_precision, bool(torch.empty(3).isnan().all())))

    before = settings()
    plant("norm_act_forward", monkeypatch, note)
    for tf32 in (True, False):
        check.check_kind("cpu", "batch norm, ReLU", check.Column(torch.float32, tf32))
        assert set(seen) == {("tf32" if tf32 else "ieee", True)}
        seen.clear()
    assert settings() == before


@needs_cpu_library
@pytest.mark.parametrize("is_faulty", [False, True])
def test_the_exit_status_says_whether_all_results_are_right(is_faulty, monkeypatch, capsys):
    monkeypatch.setattr(check, "KINDS", dict(list(KINDS.items())[:2]))
    if is_faulty:
        plant("norm_act_backward", monkeypatch, partial(wrong_by, 0.01))
    status = command.main(["check", "--backends", "cpu", "--dtypes", "float32", "bfloat16"])
    printed = capsys.readouterr().out
    assert status == int(is_faulty)
    assert ("MISS" in printed.partition("is a MISS")[2]) == is_faulty
    assert ("some results are wrong" if is_faulty else "all results are right") in printed
    assert ("  float32: batch norm, relu: dx: error" in printed) == is_faulty
    (header,) = re.findall("^cpu +(.*)$", printed, re.M)
    assert header.split() == ["float32", "bfloat16"]
    for backend in dispatch.BACKENDS:
        if backend.load_error() or backend.only_by_name:
            assert f"not checked: {backend.name} (" in printed


def test_a_check_of_plain_pytorch_alone_says_so(monkeypatch, capsys):
    monkeypatch.setattr(check, "KINDS", {"dropout": KINDS["dropout"]})
    assert command.main(["check", "--backends", "reference", "reference"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("dropout") == 1 and "no kernel" not in printed
    is_reference = {b: b.name == "reference" for b in dispatch.BACKENDS}
    monkeypatch.setattr(command, "refusal", lambda b: "" if is_reference[b] else "no library")
    assert command.main(["check"]) == 1
    assert "no kernel of this package was checked" in capsys.readouterr().out


def test_what_is_not_available_or_not_served_is_refused_or_left_out(capsys, monkeypatch):
    row = dispatch._by_name["reference"]
    half = row._replace(name="half", dtypes=(torch.float16,))
    missing = half._replace(name="missing", load_error=lambda: "no library")
    monkeypatch.setattr(dispatch, "BACKENDS", (row, half, missing))
    for arguments, message in (
        (["--backends", "none"], "invalid choice: 'none'"),
        (["--backends", "reference", "--dtypes", "int8"], "invalid choice: 'int8'"),
        (["--backends", "half", "--dtypes", "float32"], "backend half serves none of float32"),
        (["--backends", "missing"], "backend missing cannot be checked: no library"),
    ):
        with pytest.raises(SystemExit) as raised:
            command.main(["check", *arguments])
        assert raised.value.code == 2
        assert message in capsys.readouterr().err
    checked = []
    monkeypatch.setattr(command, "check_backend", lambda b, _: checked.append(b.name) or True)
    command.main(["check", "--dtypes", "float64"])
    assert checked == ["reference"]


def test_on_a_gpu_tf32_is_also_checked_and_rows_come_in_order_from_processes(monkeypatch):
    backend = dispatch._by_name["reference"]
    names = list(map(str, check.columns_of(backend)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert list(map(str, check.columns_of(backend))) == [names[0], "TF32", *names[1:]]
    properties = types.SimpleNamespace(total_memory=2**33)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(check, "run_process", lambda name, kind, columns: [name, kind, *columns])
    rows = check._rows(backend, [FLOAT32])
    assert list(rows) == [["reference", kind, FLOAT32] for kind in KINDS]


@needs_cpu_library
def test_the_program_of_another_process_finds_the_same(monkeypatch, capsys):
    """Runs in this process: the import of torch takes seconds."""

    def run(command, **options):
        assert command[:4] == [sys.executable, "-X", "faulthandler", "-c"]
        monkeypatch.setattr(sys, "argv", ["-c", *command[5:]])
        exec(command[4], {})
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out)

    monkeypatch.setattr(check.subprocess, "run", run)
    columns = FLOAT32, check.Column(torch.bfloat16)
    found = check.run_process("cpu", "autocast", columns)
    assert found == [check.check_kind("cpu", "autocast", column) for column in columns]
    assert found[0] is None and not found[1].faults


@pytest.mark.parametrize(
    ("program", "fault", "limit_s"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "status -11: no output", 60),
        ("raise ValueError('lost')", "status 1: ValueError: lost", 60),
        ("import time; time.sleep(60)", "no result within 0.1 s", 0.1),
    ],
    ids=["crash", "error", "hang"],
)
def test_a_process_that_ends_early_is_a_miss(program, fault, limit_s, monkeypatch):
    def run(command, run=subprocess.run, **options):
        return run([sys.executable, "-S", "-c", program], **options)

    monkeypatch.setattr(check, "SECONDS", limit_s)
    monkeypatch.setattr(check.subprocess, "run", run)
    (cell,) = check.run_process("cpu", "autocast", [FLOAT32])
    assert str(cell) == "MISS" and cell.faults[0].endswith(fault)


TRUTH = torch.tensor([3.0, 4.0], dtype=torch.float64)  # its norm is 5


@pytest.mark.parametrize(
    ("found", "eager_error", "share"),
    [
        (TRUTH, 0.0, 0),
        (TRUTH + torch.tensor([0.0, 0.99e-3]), 0.5e-3, 0.99),
        (TRUTH + torch.tensor([0.0, 1.01e-3]), 0.5e-3, 1.01),
        (TRUTH.float() * (1 + 2**-20), 0.0, 16),
        (TRUTH * torch.nan, 0.0, math.nan),
        (TRUTH * torch.inf, 0.0, math.inf),
        (TRUTH[None], 1.0, math.inf),
        (None, 1.0, math.inf),
    ],
)
def test_the_budget_is_twice_the_error_of_eager_and_one_rounding(found, eager_error, share):
    judgement = oracle.judge({"y": found}, {"y": TRUTH}, {"y": eager_error})["y"]
    assert judgement.share == pytest.approx(share, rel=1e-3, nan_ok=True)
    assert bool(judgement.fault) == (not share <= 1)


def test_results_that_only_one_side_has_and_zeros_that_are_no_zeros_are_faults():
    judgements = oracle.judge({"a": TRUTH, "b": None}, {"a": None, "b": None, "c": TRUTH}, {})
    assert [bool(judgements[name].fault) for name in "abc"] == [True, False, True]
    zero = torch.zeros(2, dtype=torch.float64)
    assert not oracle.judge({"y": zero}, {"y": zero}, {"y": 0.0})["y"].fault
    assert oracle.judge({"y": zero + 1e-30}, {"y": zero}, {"y": 0.0})["y"].fault


def test_a_result_in_another_dtype_is_a_fault():
    comparison = oracle.compare(lambda x: (2 * x).double(), lambda x: 2 * x, [{"x": TRUTH.float()}])
    assert comparison.judgements["y"].fault == "y: expected torch.float32, got torch.float64"
    assert comparison.judgements["dx"].fault == ""


@needs_cpu_library
def test_large_weights_are_right_where_the_processor_has_amx(monkeypatch):
    """There they are left to PyTorch's convolution."""
    monkeypatch.setattr(torch_compat, "has_amx", lambda: True)
    assert not check.check_kind("cpu", "large weight", check.Column(torch.bfloat16)).faults


def test_with_tf32_products_and_one_rounding_have_a_budget_of_their_own():
    def plain(x, conv_weight):
        return F.conv2d(x, conv_weight)

    def rounded(x, conv_weight):
        return plain(*(t + (as_tf32(t) - t).detach() for t in (x, conv_weight)))

    problem = {"x": torch.randn(2, 32, 8, 8), "conv_weight": torch.randn(16, 32, 1, 1)}
    strict = oracle.compare(rounded, plain, [problem]).judgements
    wide = oracle.compare(rounded, plain, [problem], tf32=True).judgements
    assert strict["y"].share > 10
    assert wide["y"].share < 1
    # PyTorch copies ones exactly, so that the budget is one rounding.
    ones = [{"x": torch.ones(8)}]
    found = oracle.compare(lambda x: x * (1 + 2**-12), torch.clone, ones, tf32=True)
    assert (found.judgements["y"].share, found.elements["y"].share) == (0.5, 0.25)


def test_problems_in_float32_are_off_kinks():
    x = torch.randn(16, 4, 4, 4)
    x[3] = 1e-7

    def plain(x):
        return F.relu(x)

    moved = oracle.off_kinks(plain, {"x": x})["x"]
    assert x.abs().min() < 1e-6 < moved.abs().min()
    assert oracle.off_kinks(plain, {"x": x}, most=100)["x"] is x


OF_CPU_ALONE = {
    "scaled_running_stats_update",
    "norm_act_mask_recompute",
    "depthwise_weight_gradient",
}
OPS_OF_LIBRARY = {*SCHEMAS} - {"running_stats_update"} | OF_CPU_ALONE


@pytest.mark.calls(*(f"preact_kernels_cpu::{name}" for name in OPS_OF_LIBRARY))
def test_the_cases_reach_every_operation_of_the_cpu_library():
    with dispatch.use_backend("cpu"):
        for make in KINDS.values():
            for case in make(FLOAT32):
                oracle.evaluate(case.fused, case.inputs)


def test_the_command_lists_backends_and_names_a_source_tree_that_hides_the_package(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(torch_compat, "has_amx", lambda: False)
    monkeypatch.syspath_prepend(tmp_path)
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert f"preact_kernels {pk.__version__}" in printed and "hides" not in printed
    assert f"package: {Path(pk.__file__).parent}" in printed
    for backend in dispatch.BACKENDS:
        reason = backend.load_error()
        state = f"not available: {reason}" if reason else "available"
        assert f"{backend.name:9} {state}" in printed
    assert "PyTorch convolution" in printed
    hidden = tmp_path / "preact_kernels"
    hidden.mkdir()
    (hidden / "__init__.py").touch()
    command.main([])
    assert f"this folder hides {hidden}: run from another folder" in capsys.readouterr().out


@needs_cpu_library
def test_a_reader_that_closes_the_pipe_ends_the_check_without_an_exception(monkeypatch):
    monkeypatch.setenv("PREACT_KERNELS_POISON", "1")  # as the command sets it
    monkeypatch.setattr(faulthandler, "enable", lambda: None)
    monkeypatch.setattr(sys, "argv", ["preact_kernels", "check", "--backends", "cpu"])
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, pytest.raises(SystemExit, match="1"):
        monkeypatch.setattr(sys, "stdout", pipe)
        runpy.run_path(command.__file__, run_name="__main__")
