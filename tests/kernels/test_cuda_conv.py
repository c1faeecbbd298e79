"""The fused convolutions of the CUDA library: results, schedules, and which are served."""

from contextlib import nullcontext

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cuda, reference
from preact_kernels.kernels.contract import Conv, Gradient, Norm, Wanted
from preact_kernels.ops import dispatch
from preact_kernels.torch_compat import FakeTensorMode
from testbed.cuda_on_host import serve_cpu
from tests.cases import in_dtype, random_block, recorded_calls, unit_of
from tests.conftest import IS_CUDA_ON_HOST
from tests.kernels.cuda_conv_cases import (
    ALL,
    DEVICE,
    DTYPES,
    QUICK,
    SLOW,
    TYPICAL,
    Backward,
    Case,
    Forward,
    backward_inputs,
    call,
    cases_and_dtypes,
    check_case,
    forward_inputs,
    has_kernel,
    kernels,
    launches,
    mapped,
    moved,
    nhwc,
    on_host,
    set_schedule,
    typical,
)
from tests.oracle import assert_same_bits, evaluate

pytestmark = pytest.mark.usefixtures("fused_convolutions")
ONE_BY_ONE, THREE_BY_THREE = TYPICAL
TOO_MANY_PIXELS = pytest.raises(RuntimeError, match=r"x: expected at most 1073741824 pixels, got")


@pytest.mark.calls(
    "preact_kernels_cuda::norm_act_conv_forward", "preact_kernels_cuda::norm_act_conv_backward"
)
@cases_and_dtypes(*QUICK, *SLOW)
def test_both_directions_keep_the_budget(case, dtype):
    check_case(case, forward_inputs(case, dtype), True)
    check_case(case, backward_inputs(case, dtype), ALL)


def resnet_1001_cases():
    """Convolutions of its blocks; without a GPU of as many images as make three tiles a block."""
    for width, side, images in ((16, 32, 2), (32, 16, 3), (64, 8, 3)):
        batch = images if IS_CUDA_ON_HOST else 128
        yield Case(batch, side, side, 4 * width, width, 1)
        yield Case(batch, side, side, width, width, 3)
        yield Case(batch, side, side, width, 4 * width, 1)


@pytest.mark.covering(1)
@pytest.mark.not_under_sanitizer
@cases_and_dtypes(*resnet_1001_cases(), dtypes=DTYPES[::2])
def test_many_tiles_a_block_keep_the_budget(case, dtype):
    set_schedule(multiprocessors=1)
    check_case(case, forward_inputs(case, dtype), True)
    check_case(case, backward_inputs(case, dtype), ALL)


@pytest.mark.parametrize(("residual", "stats"), [(False, False), (False, True), (True, False)])
def test_forward_with_and_without_residual_and_statistics(residual, stats):
    inputs = forward_inputs(THREE_BY_THREE, torch.bfloat16, residual)
    assert ("mean" in check_case(THREE_BY_THREE, inputs, stats)) == stats


@pytest.mark.parametrize(
    ("case", "step", "needs"),
    [
        (ONE_BY_ONE, "none", (True, True, False)),
        (THREE_BY_THREE, "none", (False, True, False)),
        (THREE_BY_THREE, "none", (True, False, False)),
        (THREE_BY_THREE, "evaluation", (True, True, True)),
        (ONE_BY_ONE, "evaluation", (False, True, False)),
        (ONE_BY_ONE, "z", (True, False, True)),
        (THREE_BY_THREE, "z", (False, True, True)),
        (ONE_BY_ONE, "skip", (True, True, False)),
        (THREE_BY_THREE, "skip", (False, False, True)),
        (THREE_BY_THREE, "skip", (False, True, False)),
        (ONE_BY_ONE, "skip", (True, False, False)),
    ],
    ids=str,
)
def test_only_what_is_wanted_is_returned(case, step, needs):
    wanted = Wanted(*needs)
    found = check_case(case, backward_inputs(case, torch.bfloat16, step), wanted)
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
    expected = call(reference.kernels(), case, given, False)["y"]
    assert expected.isnan().any()
    assert torch.equal(y.isnan(), expected.isnan())
    wanted = Wanted(True, True)
    found = call(kernels(), case, arriving, wanted)
    expected = call(reference.kernels(), case, arriving, wanted)
    assert not expected["g"].isnan().any()  # a NaN lets the gradient pass, and does not join it
    assert expected["conv_weight"].isnan().any()
    assert expected["sums"].isnan().any()
    for name, t in expected.items():
        assert torch.equal(found[name].isnan(), t.isnan())
    torch.testing.assert_close(found["g"][middle], expected["g"][middle], rtol=0.02, atol=0)


@typical
def test_statistics_of_large_means_and_of_constants_keep_the_budget(case):
    inputs = forward_inputs(case, torch.float32)
    inputs.residual.add_(1000)
    inputs.residual[:, 3], inputs.conv_weight[3] = -1e4, 0
    found = check_case(case, inputs, True)
    assert (found["mean"][3], found["var"][3]) == (-1e4, 0)


@pytest.mark.parametrize("scale", [-1e-12, -1e17])
def test_sums_keep_the_budget_at_any_magnitude(scale):
    inputs = forward_inputs(ONE_BY_ONE, torch.float32)
    inputs.conv_weight.zero_()
    inputs.residual.add_(1).mul_(scale)
    check_case(ONE_BY_ONE, inputs, True)
    inputs = backward_inputs(ONE_BY_ONE, torch.float32)
    g, step = inputs.dy
    for t in (g, step.skip, step.sums):
        t.add_(1).mul_(scale)
    step.norm.weight.mul_(1e-3 if abs(scale) > 1 else 0)  # not to hide skip
    check_case(ONE_BY_ONE, inputs, ALL)


@pytest.mark.parametrize("values", [(torch.inf, -torch.inf), (torch.nan,)])
def test_statistics_of_what_is_not_finite_are_those_of_pytorch(values):
    case = Case(2, 9, 17, 16, 16, 1)
    inputs = forward_inputs(case, torch.float32)
    for i, value in enumerate(values):
        inputs.residual[i, 3, 8 * i, 5] = value
    inputs.residual[0, 5, 2, 2] = torch.inf
    found = call(kernels(), case, inputs, True)
    expected = reference.bn_stats(found["y"])
    torch.testing.assert_close(found["mean"], expected.mean, equal_nan=True)
    assert torch.equal(found["var"].isfinite(), expected.var.isfinite())


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize("case", [Case(3, 7, 5, 16, 64, 1), Case(3, 7, 5, 64, 64, 3)], ids=str)
def test_images_at_the_end_of_a_batch_do_not_depend_on_its_size(case, monkeypatch):
    """On a GPU behind 2^31 elements."""
    monkeypatch.setattr(cuda, "_most_pixels", lambda *_: None)  # else PyTorch's convolution runs
    if not IS_CUDA_ON_HOST:
        if torch.cuda.mem_get_info()[0] < 48 * 2**30:
            pytest.skip("needs 48 GiB of GPU memory")
        case = case._replace(images=2**17 + 3, height=16, width=16)
    for inputs, options, name in (
        (forward_inputs(case, torch.bfloat16), False, "y"),
        (backward_inputs(case, torch.bfloat16), Wanted(True, False), "g"),
    ):
        last = mapped(inputs, lambda t: t[-2:] if t.dim() == 4 else t)
        last = last._replace(conv_weight=inputs.conv_weight)
        expected = call(kernels(), case._replace(images=2), last, options)[name]
        found = call(kernels(), case, inputs, options)[name]
        assert_same_bits({name: found[-2:]}, {name: expected})


@on_host
@pytest.mark.parametrize("side", [1, 3])
def test_more_pixels_than_indices_of_32_bits_count_are_refused(side, monkeypatch):
    """Tensors have addresses and no memory."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    weight, launched = torch.randn(16, 16, side, side).bfloat16(), []
    norm = Norm(*torch.ones(4, 16), 1e-5)
    for pixels, refusal in ((2**30, nullcontext()), (2**30 + 1, TOO_MANY_PIXELS)):
        case = Case(pixels, 1, 1, 16, 16, side)
        with serve_cpu.without_running(launched.append):
            x = torch.empty(pixels, 16, 1, 1, dtype=torch.bfloat16)
            for inputs, options in (
                (Forward(x, norm, weight, None), False),
                (Backward(Gradient(x), x, norm, weight), Wanted(True, True)),
            ):
                launched.clear()
                with refusal:
                    call(kernels(), case, inputs, options)
                assert bool(launched) == (pixels == 2**30)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(Case(3, 9, 17, 32, 32, 1), torch.bfloat16), (Case(3, 9, 17, 16, 16, 3), torch.float32)],
    ids=str,
)
def test_neither_schedules_nor_memory_change_a_bit(case, dtype):
    """Weights are stored NHWC, or activations begin anywhere."""
    for inputs, options in (
        (forward_inputs(case, dtype), True),
        (backward_inputs(case, dtype), ALL),
    ):
        set_schedule()
        expected = check_case(case, inputs, options)
        stored_nhwc = inputs._replace(conv_weight=nhwc(inputs.conv_weight))
        set_schedule(1)
        for other in (stored_nhwc, moved(inputs)):
            assert_same_bits(call(kernels(), case, other, options), expected)


@on_host
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("case", [Case(1, 17, 33, 64, 256, 1), Case(2, 35, 33, 32, 32, 3)], ids=str)
def test_partial_weight_gradients_are_never_more_bytes_than_what_they_save(case, is_large):
    """Large images: one kernel computes both gradients. Small images: one kernel for each."""
    set_schedule(multiprocessors=1)
    case = case if is_large else case._replace(images=1, height=3, width=5)
    inputs = backward_inputs(case, torch.bfloat16)
    names = launches(lambda: call(kernels(), case, inputs, ALL))
    apart = ["norm_act_conv_backward_input", "norm_act_conv_weight_gradients"]
    kernel_names = ["norm_act_conv_backward"] if is_large else apart
    assert [n for n in names if n.startswith("norm_act_conv")] == kernel_names
    check_case(case, inputs, ALL)


def is_served(shape, dtype, pixels=None, **changes):
    same = Conv((1, 1), tuple(side // 2 for side in shape[2:]), (1, 1), 1)
    weight = torch.empty(shape, dtype=dtype, device=DEVICE)
    return not kernels().refusal(unit_of(weight, same._replace(**changes)), pixels)


SERVED = {
    (16, 64, 1, 1): True,
    (64, 256, 1, 1): True,
    (128, 128, 1, 1): True,
    (256, 256, 1, 1): False,  # a weight's gradient that no block can hold
    (24, 16, 1, 1): False,
    (16, 8, 1, 1): False,
    (16, 272, 1, 1): False,
    (16, 16, 3, 3): True,
    (64, 64, 3, 3): True,
    (16, 32, 3, 3): False,
    (48, 48, 3, 3): False,
    (16, 16, 5, 5): False,
    (16, 16, 1, 3): False,
}


def test_which_weights_are_served():
    for shape, expected in SERVED.items():
        for dtype in DTYPES if IS_CUDA_ON_HOST else DTYPES[:2]:  # else shared memory decides
            has_room = has_kernel(Case(1, 1, 1, shape[1], shape[0], shape[2]), dtype)
            assert is_served(shape, dtype) == (expected and has_room), (shape, dtype)
    for change in ({"stride": (2, 2)}, {"groups": 2}, {"padding": (2, 2)}):
        assert not is_served((16, 16, 3, 3), torch.bfloat16, **change), change


def test_fake_tensors_are_served_as_others():
    weight = torch.empty((16, 16, 3, 3), dtype=torch.bfloat16, device=DEVICE)
    unit = unit_of(weight, Conv((1, 1), (1, 1), (1, 1), 1))
    cuda._fits_shared_memory.cache_clear()
    with FakeTensorMode():
        assert not kernels().refusal(unit)


def test_large_images_are_left_to_pytorch_where_that_is_estimated_to_be_faster(monkeypatch):
    monkeypatch.setattr(cuda, "MOST_PIXELS", {(3, 16, 16): 2 * 7 * 6})
    found = [is_served((16, 16, 3, 3), torch.bfloat16, pixels) for pixels in (84, 85, None)]
    assert found == [True, False, True]
    assert is_served((32, 32, 3, 3), torch.bfloat16, 10**6)
    stage = pk.PreActStage([random_block("basic", 16, 16) for _ in range(2)]).to(DEVICE)
    stage = in_dtype(stage, torch.bfloat16)
    for images, is_fused in ((2, True), (3, False)):
        x = torch.randn(images, 16, 7, 6, device=DEVICE).bfloat16()
        with monkeypatch.context() as patch, pk.use_backend("cuda"):
            calls = recorded_calls(kernels(), "block_run_forward", patch)
            evaluate(stage, {"x": x})
        assert bool(calls) == is_fused


def test_convolutions_are_fused_up_to_as_many_pixels_as_the_stages_of_a_resnet_have():
    for inner, pixels in ((16, 2**17), (32, 2**15), (64, 2**13)):
        for shape in ((inner, 4 * inner, 1, 1), (4 * inner, inner, 1, 1), (inner, inner, 3, 3)):
            assert is_served(shape, torch.bfloat16, pixels)
    large = 128 * 56 * 56
    assert is_served((64, 256, 1, 1), torch.bfloat16, large)
    assert is_served((128, 128, 1, 1), torch.bfloat16, large)
    for shape in ((256, 64, 1, 1), (128, 64, 1, 1)):
        assert not is_served(shape, torch.bfloat16, large)


def test_float32_is_served_only_where_tf32_is_allowed(monkeypatch):
    assert is_served((16, 64, 1, 1), torch.float32)
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: False)
    assert not is_served((16, 64, 1, 1), torch.float32)
    assert is_served((16, 64, 1, 1), torch.bfloat16)


# Shared memory of a block, by compute capability.
SHARED_KIBIBYTES = {
    (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227,
    (11, 0): 227, (12, 0): 99, (12, 1): 99,
}  # fmt: skip


@on_host
@pytest.mark.parametrize(("capability", "kibibytes"), SHARED_KIBIBYTES.items())
def test_auto_prefers_triton_where_shared_memory_does_not_hold_the_tiles(capability, kibibytes):
    cuda._fits_shared_memory.cache_clear()
    serve_cpu.set_most_shared_bytes(kibibytes * 1024)
    try:
        is_fused = is_served((32, 32, 3, 3), torch.bfloat16)
    finally:
        serve_cpu.set_most_shared_bytes()
        cuda._fits_shared_memory.cache_clear()
    assert dispatch.fastest_on_gpu(capability) == ("cuda" if is_fused else "triton")


def test_the_library_names_what_it_does_not_take_before_a_kernel_reads_it():
    inputs = forward_inputs(Case(1, 2, 2, 16, 16, 1), torch.bfloat16)
    weight, residual, norm = inputs.conv_weight, inputs.residual, inputs.norm
    for change, message, *stride in (
        ({"conv_weight": weight[:8]}, "conv_weight: expected 16, 32, ... or 256"),
        ({"conv_weight": weight[:0]}, "conv_weight: expected 16, 32, ... or 256"),
        ({"conv_weight": weight.half()}, "conv_weight: expected the dtype of the convolution"),
        ({"conv_weight": weight.char()}, "conv_weight: expected the dtype of the convolution"),
        ({"conv_weight": weight.expand(-1, -1, 5, 5)}, "conv_weight: expected a 1x1 or a 3x3"),
        ({"residual": residual[:, :8]}, "residual: expected"),
        ({"norm": norm._replace(mean=norm.mean[:8])}, r"mean: expected shape \[16\], got \[8\]"),
        ({}, "stride: expected 1", 2, 1),
        ({}, "stride: expected 1", 1, 2),
    ):
        given = inputs._replace(**change)

        def call_op(given=given, stride=stride or (1, 1), message=message):
            x, norm, weight, residual = given
            with pytest.raises(RuntimeError, match=message):
                torch.ops.preact_kernels_cuda.norm_act_conv_forward(
                    x, *norm, weight, stride, None, residual, True, x.dtype
                )

        names = launches(call_op) if IS_CUDA_ON_HOST else call_op() or []
        assert {*names} <= {"fill_zeros"}, message  # no kernel
