"""No call of an op ends the process: `random_calls` says what a call must do."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from preact_kernels.kernels import cpu
from testbed.cuda_on_host import serve_cpu
from tests.ops import random_calls
from tests.ops.random_calls import NAMESPACES, Namespace, Op, Parameter


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize("calls", [350, pytest.param(8500, marks=pytest.mark.slow)])
def test_every_op_returns_or_names_an_argument(calls):
    command = [sys.executable, "-m", "tests.ops.random_calls", "--calls", str(calls)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    left_out = process.stdout.count("is left out")
    assert left_out == 3 * bool(cpu.load_error()) + (not serve_cpu.install()), process.stdout


def has_no_fault(x):
    is_served = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dim() == 4
    if not is_served or x.is_meta or x.numel() > 2**20 or random_calls.has_short_storage(x):
        raise ValueError("x: expected another tensor")
    return x.detach().clone()


def ends_the_process(x):
    if isinstance(x, torch.Tensor) and random_calls.has_short_storage(x):
        os.kill(os.getpid(), signal.SIGKILL)
    return has_no_fault(x)


def writes_to_its_input(x):
    y = has_no_fault(x)
    if not x.is_floating_point():
        x.zero_()
    return y


def writes_before_an_error(x):
    y = has_no_fault(x)
    if not x.is_floating_point():
        x.zero_()
        raise ValueError("x: expected a floating point dtype")
    return y


def names_no_argument(x):
    y = has_no_fault(x)
    if not x.is_floating_point():
        raise ValueError("expected a floating point dtype")
    return y


def names_a_source_file(x):
    y = has_no_fault(x)
    if not x.is_floating_point():
        raise ValueError("csrc/cpu/planes.cpp:12, x: expected a floating point dtype")
    return y


def asserts(x):
    y = has_no_fault(x)
    assert x.is_floating_point()
    return y


def returns_nothing(x):
    y = has_no_fault(x)
    return y if x.is_floating_point() else None


def ignores_strides(x):
    y = has_no_fault(x)
    return torch.as_strided(x.detach(), [x.shape[0]], [1]).clone() if x.numel() else y


def ignores_a_cut_storage(x):
    is_cut = isinstance(x, torch.Tensor) and random_calls.has_short_storage(x)
    return torch.zeros(1) if is_cut else has_no_fault(x)


def refuses_a_valid_call(x):
    if has_no_fault(x).dtype == torch.bfloat16:
        raise ValueError("x: expected another dtype")
    return x


def changes_later_results(x):
    y = has_no_fault(x)
    if not x.is_floating_point():
        refused.append(x)
        raise ValueError("x: expected a floating point dtype")
    return y[1:] if refused else y


refused = []
FAULTS = {
    ends_the_process: "ended the process: SIGKILL",
    writes_to_its_input: "x was written by a call that returned",
    writes_before_an_error: "x was written by a call that refused",
    names_no_argument: "ValueError: expected a floating point dtype",
    names_a_source_file: "ValueError: csrc/cpu/planes.cpp:12, x: expected a floating point dtype",
    asserts: "AssertionError: assert False",
    returns_nothing: "returned NoneType for Tensor",
    ignores_strides: "returned other bits than for dense copies",
    ignores_a_cut_storage: "returned, with a storage that is too short for x",
    refuses_a_valid_call: "a valid call: ValueError: x: expected another dtype",
    changes_later_results: "valid calls give other bits after the random ones",
}


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize(("function", "fault"), [(has_no_fault, ""), *FAULTS.items()])
def test_planted_faults_are_found(function, fault, monkeypatch):
    op = Op(function.__name__, function, [Parameter("x", "Tensor", False)], ["Tensor"])
    monkeypatch.setitem(NAMESPACES, "planted", Namespace("cpu", "auto", lambda: [op]))
    reports = random_calls.run_in_a_process("planted", 0, range(100))
    found = {f.partition("\n")[0] for *_, f in reports}
    assert found - {""} == ({fault} if fault else set())
