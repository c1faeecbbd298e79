"""No call of an op ends the process: `random_calls` says what a call must do."""

import os
import signal

import pytest
import torch

from preact_kernels.kernels import cpu
from testbed.cuda_on_host import serve_cpu
from tests.ops import random_calls
from tests.ops.random_calls import NAMESPACES, Namespace, Op, Parameter


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("calls", [150, pytest.param(8500, marks=pytest.mark.slow)])
def test_every_op_returns_or_names_an_argument(calls, name):
    if "cuda" in name and not serve_cpu.install():
        pytest.skip("the CUDA kernels do not run on the host here")
    if "cpu" in name and cpu.load_error():
        pytest.skip(f"backend cpu: {cpu.load_error()}")
    text, has_faults = random_calls.summary(name, 0, calls)
    assert not has_faults, text


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


def returns_nothing(x):
    y = has_no_fault(x)
    return y if x.is_floating_point() else None


def ignores_strides(x):
    y = has_no_fault(x)
    return torch.as_strided(x.detach(), [x.shape[0]], [1]).clone() if x.numel() else y


def ignores_a_cut_storage(x):
    is_cut = isinstance(x, torch.Tensor) and random_calls.has_short_storage(x)
    return torch.zeros(1) if is_cut else has_no_fault(x)


FAULTS = {
    has_no_fault: "",
    ends_the_process: "ended the process: SIGKILL",
    writes_to_its_input: "x was written by a call that returned",
    names_no_argument: "ValueError: expected a floating point dtype",
    names_a_source_file: "ValueError: csrc/cpu/planes.cpp:12, x: expected a floating point dtype",
    returns_nothing: "returned NoneType for Tensor",
    ignores_strides: "returned other bits than for dense copies",
    ignores_a_cut_storage: "returned, with a storage that is too short for x",
}


@pytest.mark.not_under_sanitizer
def test_planted_faults_are_found(monkeypatch):
    ops = [Op(f.__name__, f, [Parameter("x", "Tensor", False)], ["Tensor"]) for f in FAULTS]
    monkeypatch.setitem(NAMESPACES, "planted", Namespace("cpu", "auto", lambda: ops))
    found = {op.name: {""} for op in ops}
    for index, _, fault in random_calls.run_in_a_process("planted", 0, range(150 * len(ops))):
        found[ops[index % len(ops)].name].add(fault.partition("\n")[0])
    assert found == {f.__name__: {"", fault} for f, fault in FAULTS.items()}
