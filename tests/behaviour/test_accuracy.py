"""`python -m preact_kernels` and its check of the kernels."""

import inspect
import math

import pytest
import torch

import preact_kernels as pk
from preact_kernels import __main__ as command
from preact_kernels.accuracy import check
from preact_kernels.accuracy.cases import cases
from preact_kernels.kernels import cpu
from preact_kernels.kernels.contract import BlockKernels
from preact_kernels.ops import dispatch
from tests.kernels.cuda_conv_cases import as_tf32

needs_cpu_library = pytest.mark.skipif(
    bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"
)
FLOAT32 = check.Column(torch.float32)
# A kind of case that reaches each function of a backend.
KIND_OF = {
    "bn_stats": "batch norm, ReLU",
    "running_stats_update": "batch norm, ReLU",
    "group_stats": "group norm, SiLU",
    "norm_act_forward": "batch norm, ReLU",
    "norm_act_backward": "batch norm, ReLU",
    "norm_input_gradient": "batch norm, ReLU",
    "norm_act_conv_forward": "1x1 convolution",
    "norm_act_conv_backward": "1x1 convolution",
    "dropout_bits": "layouts and dropout masks",
    "dropout": "layouts and dropout masks",
    "nhwc": "layouts and dropout masks",
    "nchw": "layouts and dropout masks",
    "residual_add_forward": "residual addition",
    "block_run_forward": "bottlenecks",
    "block_run_backward": "bottlenecks",
}


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.parametrize("kind", cases(torch.bfloat16))
def test_every_kind_is_right(kind, training_dtype):
    cell = check.check_kind(dispatch.current(), kind, check.Column(training_dtype))
    assert cell is None or not cell.faults


def first_tensor(results):
    """The first tensor of the results of a kernel."""
    if isinstance(results, torch.Tensor):
        return results
    return next(filter(None.__ne__, map(first_tensor, results or ())), None)


def plant(name, monkeypatch, fault):
    """Applies `fault` to the first tensor that a function of the CPU backend returns or updates."""
    kernels = cpu.kernels()
    function = getattr(kernels, name)

    def faulty(*arguments, **options):
        results = function(*arguments, **options)
        fault(first_tensor(arguments[0] if results is None else results))
        return results

    monkeypatch.setattr(kernels, name, faulty)


def wrong_by_one_percent(t):
    t[t != 0] = 0 if t.dtype == torch.uint8 else t[t != 0] * 1.01


@needs_cpu_library
@pytest.mark.parametrize("name", KIND_OF)
def test_a_fault_in_each_function_of_a_backend_is_found(name, monkeypatch):
    plant(name, monkeypatch, wrong_by_one_percent)
    cell = check.check_kind("cpu", KIND_OF[name], FLOAT32)
    assert str(cell).startswith("MISS")
    assert all("allowed" in fault for fault in cell.faults)


def test_each_function_of_a_backend_has_a_kind():
    functions = {n for n, _ in inspect.getmembers(BlockKernels, inspect.isfunction)}
    assert {n for n in functions if not n.startswith("_")} - {"serves"} == KIND_OF.keys()


@needs_cpu_library
def test_what_two_runs_round_differently_is_found(monkeypatch):
    calls = []

    def fault(t):
        calls.append(t)
        t.mul_(1 + 2**-22 * (len(calls) == check.DRAWS + 1))

    plant("norm_act_forward", monkeypatch, fault)
    cell = check.check_kind("cpu", "batch norm, ReLU", FLOAT32)
    assert cell.faults == ["batch norm, relu: y: two runs gave different bits"]
    assert str(cell) == "MISS"


@needs_cpu_library
def test_a_call_that_raises_is_a_miss_with_the_error(monkeypatch):
    def fault(t):
        raise RuntimeError("no memory\nmore lines")

    plant("residual_add_forward", monkeypatch, fault)
    cell = check.check_kind("cpu", "residual addition", FLOAT32)
    assert cell == (math.inf, ["addition: RuntimeError: no memory"])


@needs_cpu_library
@pytest.mark.parametrize("is_faulty", [False, True])
def test_the_exit_status_says_whether_all_results_are_right(is_faulty, monkeypatch, capsys):
    monkeypatch.setattr(check, "cases", lambda dtype: dict(list(cases(dtype).items())[:2]))
    if is_faulty:
        plant("norm_act_backward", monkeypatch, wrong_by_one_percent)
    status = command.main(["check", "--backends", "cpu", "--dtypes", "float32", "bfloat16"])
    printed = capsys.readouterr().out
    assert status == int(is_faulty)
    assert ("MISS" in printed.partition("is a MISS")[2]) == is_faulty
    assert ("some results are wrong" if is_faulty else "all results are right") in printed
    assert ("batch norm, ReLU, float32: batch norm, relu: dx: error" in printed) == is_faulty


def test_what_is_not_available_or_not_served_is_refused(capsys):
    for arguments, message in (
        (["--backends", "none"], "invalid choice: 'none'"),
        (["--backends", "reference", "--dtypes", "int8"], "invalid choice: 'int8'"),
    ):
        with pytest.raises(SystemExit) as raised:
            command.main(["check", *arguments])
        assert raised.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow  # each process imports torch
@needs_cpu_library
def test_processes_find_what_one_finds(monkeypatch):
    backend = dispatch._by_name["cpu"]
    tasks = [(kind, FLOAT32) for kind in ("residual addition", "batch norm, ReLU")]
    alone = list(check._cells(backend, tasks))
    monkeypatch.setattr(check, "processes_for", lambda backend: 2)
    assert list(check._cells(backend, tasks)) == alone


def test_products_in_tf32_have_a_budget_of_their_own():
    def plain(x, conv_weight):
        return torch.nn.functional.conv2d(x, conv_weight)

    def rounded(x, conv_weight):
        return plain(*(t + (as_tf32(t) - t).detach() for t in (x, conv_weight)))

    problem = {"x": torch.randn(2, 32, 8, 8), "conv_weight": torch.randn(16, 32, 1, 1)}
    _, strict = check.oracle.compare(rounded, plain, [problem])
    _, wide = check.oracle.compare(rounded, plain, [problem], tf32=True)
    assert strict["y"].share > 10
    assert wide["y"].share < 1


def test_the_command_lists_every_backend_with_the_reason(capsys):
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert f"preact_kernels {pk.__version__}" in printed
    for backend in dispatch.BACKENDS:
        reason = backend.load_error()
        state = f"not available: {reason}" if reason else "available"
        assert f"{backend.name:9} {state}" in printed
    assert "PyTorch convolution" in printed
