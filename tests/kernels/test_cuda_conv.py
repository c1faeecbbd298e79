"""The results of the fused convolutions of the CUDA library, on the host or on a GPU."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from preact_kernels.kernels import reference
from preact_kernels.kernels.contract import Wanted
from tests.conftest import IS_CUDA_ON_HOST
from tests.kernels.cuda_conv_cases import (
    ALL,
    TYPICAL,
    Case,
    backward_inputs,
    call,
    cases_and_dtypes,
    check_case,
    every_case,
    every_dtype,
    forward_inputs,
    kernels,
    mapped,
    set_schedule,
    typical,
)
from tests.kernels.cuda_on_host import build
from tests.oracle import weight_gradient_inside_the_image

pytestmark = pytest.mark.usefixtures("fused_convolutions")


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_forward")
@every_case
def test_forward_and_statistics_keep_the_budget(case, dtype):
    check_case(case, forward_inputs(case, dtype), True)


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_backward")
@every_case
def test_backward_of_a_folded_gradient_keeps_the_budget(case, dtype):
    check_case(case, backward_inputs(case, dtype), ALL)


def resnet_1001_cases():
    """The convolutions of its blocks; without a GPU of as many images as make six tiles a block."""
    for width, side, images in ((16, 32, 3), (32, 16, 6), (64, 8, 6)):
        for batch in [images] if IS_CUDA_ON_HOST else [128, 64]:
            yield Case(batch, side, side, 4 * width, width, 1)
            yield Case(batch, side, side, width, width, 3)
            yield Case(batch, side, side, width, 4 * width, 1)


@pytest.mark.covering(1)
@pytest.mark.not_under_sanitizer
@every_dtype
@pytest.mark.parametrize("case", [*resnet_1001_cases()], ids=str)
def test_many_tiles_a_block_keep_the_budget(case, dtype):
    set_schedule(multiprocessors=1)
    check_case(case, forward_inputs(case, dtype), True)
    check_case(case, backward_inputs(case, dtype), ALL)


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_forward")
@typical
@pytest.mark.parametrize(("residual", "stats"), [(False, False), (False, True), (True, False)])
def test_forward_with_and_without_residual_and_statistics(case, residual, stats):
    found = check_case(case, forward_inputs(case, torch.bfloat16, residual), stats)
    assert ("mean" in found) == stats


@pytest.mark.covering(2)
@typical
@pytest.mark.parametrize("fold", ["none", "evaluation", "z", "skip"])
@pytest.mark.parametrize("needs", [*itertools.product([False, True], repeat=3)], ids=str)
def test_every_combination_of_flags(case, fold, needs):
    wanted = Wanted(*needs)
    if fold == "none" and wanted.dy:
        pytest.skip("there is nothing to unfold")
    found = check_case(case, backward_inputs(case, torch.bfloat16, fold), wanted)
    names = ["g", "sums"] * wanted.input + ["conv_weight"] * wanted.weight + ["dy"] * wanted.dy
    assert list(found) == names


@typical
def test_nan_passes_through(case):
    dtype = torch.bfloat16
    given, arriving = forward_inputs(case, dtype), backward_inputs(case, dtype)
    middle = (0, 3, case.height // 2, case.width // 2)
    for inputs in (given, arriving):
        inputs.x[middle] = torch.nan
    y = call(kernels(), case, given, False)["y"]
    expected = call(reference, case, given, False)["y"]
    assert expected.isnan().any()
    assert torch.equal(y.isnan(), expected.isnan())
    wanted = Wanted(True, True)
    found = call(kernels(), case, arriving, wanted)
    expected = call(reference, case, arriving, wanted)
    assert not expected["g"].isnan().any()  # a NaN lets the gradient pass, and does not join it
    assert expected["conv_weight"].isnan().any()
    assert expected["sums"].isnan().any()
    for name, t in expected.items():
        assert torch.equal(found[name].isnan(), t.isnan())
    torch.testing.assert_close(found["g"][middle], expected["g"][middle], rtol=0.02, atol=0)


LOW_NAN = 0x7F800001  # infinite without the low bits that TF32 does not have


@typical
@pytest.mark.parametrize("name", ["x", "dy", "conv_weight"])
def test_a_nan_with_a_payload_in_the_low_bits_alone_stays_nan(case, name):
    for inputs, options in (
        (forward_inputs(case, torch.float32, False), False),
        (backward_inputs(case, torch.float32, "none"), Wanted(True, True)),
    ):
        if name not in inputs._fields:
            continue
        changed = getattr(inputs, name)
        changed.view(torch.int32)[0, 3, case.side // 2, case.side // 2] = LOW_NAN
        assert changed.isnan().sum() == 1
        found = call(kernels(), case, inputs, options)
        expected = call(reference, case, inputs, options)
        assert any(t.isnan().any() for t in expected.values())
        for result, t in expected.items():
            assert torch.equal(found[result].isnan(), t.isnan()), result
            assert torch.equal(found[result].isinf(), t.isinf()), result


@pytest.mark.parametrize("changed", ["x", "dy"])
@cases_and_dtypes(TYPICAL[1], Case(1, 8, 16, 32, 32, 3), Case(1, 9, 5, 64, 64, 3))
def test_padding_takes_no_part_in_the_gradient_of_the_weight(case, changed, dtype):
    inputs = backward_inputs(case, dtype, "none")
    inputs.norm.weight.abs_()
    tensor = getattr(inputs, changed)
    tensor[-1, 3, 0, 0] = torch.inf
    tensor[0, 5, -1, -1] = torch.nan
    found = call(kernels(), case, inputs, Wanted(True, True))["conv_weight"]
    wide = mapped(inputs, Tensor.double)
    a = reference.bn_relu_forward(wide.x, wide.norm)
    expected = weight_gradient_inside_the_image(a, wide.dy)
    assert not expected.isfinite().all()
    assert expected.isfinite().any()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@typical
@pytest.mark.parametrize("value", [3.0, -1e4])
def test_statistics_of_constant_channels_are_exact(case, value):
    inputs = forward_inputs(case, torch.float32)
    inputs.conv_weight.zero_()
    inputs.residual.fill_(value)
    found = call(kernels(), case, inputs, True)
    assert torch.equal(found["mean"], torch.full_like(found["mean"], value))
    assert torch.equal(found["var"], torch.zeros_like(found["var"]))


@typical
def test_statistics_of_large_means_keep_the_budget(case):
    inputs = forward_inputs(case, torch.float32)
    inputs.residual.add_(1000)
    check_case(case, inputs, True)


@typical
@pytest.mark.parametrize("scale", [-1e-12, 1e-3, 1e9, -1e17])
def test_sums_keep_the_budget_at_any_magnitude(case, scale):
    inputs = forward_inputs(case, torch.float32)
    inputs.conv_weight.zero_()
    inputs.residual.add_(1).mul_(scale)
    check_case(case, inputs, True)
    inputs = backward_inputs(case, torch.float32)
    for t in (inputs.dy, inputs.fold.skip, inputs.fold.sums):
        t.add_(1).mul_(scale)
    inputs.fold.norm.weight.mul_(1e-3 if abs(scale) > 1 else 0)  # beside which skip counts
    check_case(case, inputs, ALL)


@pytest.mark.parametrize(
    "values", [(torch.inf,), (-torch.inf,), (torch.inf, -torch.inf), (torch.nan,)]
)
def test_statistics_of_what_is_not_finite_are_those_of_pytorch(values):
    case = Case(2, 9, 17, 16, 16, 1)
    inputs = forward_inputs(case, torch.float32)
    for i, value in enumerate(values):
        inputs.residual[i, 3, 8 * i, 5] = value
    found = call(kernels(), case, inputs, True)
    expected = reference.bn_stats(found["y"])
    torch.testing.assert_close(found["mean"], expected.mean, equal_nan=True)
    assert torch.equal(found["var"].isfinite(), expected.var.isfinite())


@pytest.mark.slow
@pytest.mark.skipif(not IS_CUDA_ON_HOST, reason="on a GPU, compute-sanitizer is what there is")
@pytest.mark.skipif("PK_SANITIZE" in os.environ, reason="is what runs")
def test_under_the_sanitizer_the_quick_tests_pass():
    build.build("kernels", sanitize=True)
    folder = Path(__file__).parent
    files = [*folder.glob("test_cuda_conv*.py"), folder / "test_float32_stream.py"]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m"]
    process = subprocess.run(
        [sys.executable, *command, "not slow", *map(str, files)],
        cwd=build.ROOT,
        env={**os.environ, **build.sanitizer_environment(), "PK_SANITIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
