"""A float32 residual stream beside half precision in the CUDA library: it is read and written by
the fused convolutions.

Eager is what a backend does without such kernels: batch norm and ReLU in float32, PyTorch's
convolution in half precision, the addition in float32.
"""

import collections

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import reference
from preact_kernels.kernels.contract import Conv, Wanted
from preact_kernels.kernels.mixed_precision import MixedKernels
from preact_kernels.ops import block_runs
from tests import test_cuda_conv as cuda_conv
from tests.cases import in_dtype, random_block, random_stage
from tests.oracle import assert_same_bits, check, evaluate, plain_copy
from tests.test_autocast import Autocast
from tests.test_cuda_conv import (
    ALL,
    DEVICE,
    QUICK,
    SLOW,
    TYPICAL,
    Backward,
    Case,
    Forward,
    backward_inputs,
    call,
    forward_inputs,
    kernels,
    launches,
    mapped,
    name,
    nhwc,
    on_host,
    schedule,  # noqa: F401
    set_schedule,
)
from tests.test_preact_stage import recorded_calls, unit_by_unit

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HALVES = (torch.bfloat16, torch.float16)
every_case = pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=str
)
typical = pytest.mark.parametrize("case", TYPICAL, ids=str)
every_half = pytest.mark.parametrize("half", HALVES, ids=name)
# Whether the input of the convolution is of the stream, or its output.
either_side = pytest.mark.parametrize("side", ["input", "output"])


def beside_stream(inputs: Forward | Backward, side: str) -> Forward | Backward:
    """`inputs` with float32 tensors of the stream, which are no rounded half precision."""

    def wide(t):
        noise = torch.rand_like(t, dtype=torch.float32) - 0.5
        return None if t is None else nhwc(t.float() * (1 + noise / 1000))

    if side == "input":
        inputs = inputs._replace(x=wide(inputs.x))
        return inputs._replace(residual=None) if isinstance(inputs, Forward) else inputs
    if isinstance(inputs, Forward):
        return inputs._replace(residual=wide(inputs.residual))
    fold = inputs.fold
    if fold is None:
        return inputs._replace(dy=wide(inputs.dy))
    skip = None if fold.skip is None else wide(fold.skip)
    return inputs._replace(fold=fold._replace(x=wide(fold.x), skip=skip))


def unfused(half: torch.dtype):
    """Eager beside a float32 stream. As in plain PyTorch, `g` is a result of the convolution."""

    def run(case, inputs, options):
        found = call(MixedKernels(reference, reference, torch.float32), case, inputs, options)
        return found | ({"g": found["g"].to(half)} if "g" in found else {})

    return run


def check_case(case: Case, inputs: Forward | Backward, options, monkeypatch):
    monkeypatch.setattr(cuda_conv, "eager", unfused(inputs.conv_weight.dtype))
    return cuda_conv.check_case(case, inputs, options)


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_forward")
@every_case
@every_half
@either_side
def test_forward_and_statistics_keep_the_budget(case, half, side, monkeypatch):
    inputs = beside_stream(forward_inputs(case, half), side)
    found = check_case(case, inputs, True, monkeypatch)
    assert found["y"].dtype == (torch.float32 if side == "output" else half)


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_backward")
@every_case
@every_half
@either_side
def test_backward_of_a_folded_gradient_keeps_the_budget(case, half, side, monkeypatch):
    inputs = beside_stream(backward_inputs(case, half), side)
    found = check_case(case, inputs, ALL, monkeypatch)
    assert found["g"].dtype == half
    assert found["dy"].dtype == (torch.float32 if side == "output" else half)
