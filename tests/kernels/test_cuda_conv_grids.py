"""The fused convolutions of the CUDA library: schedules, numbers of blocks, kernels, addresses."""

import pytest
import torch

from preact_kernels.kernels.contract import Wanted
from tests.conftest import IS_CUDA_ON_HOST
from tests.kernels.cuda_conv_cases import (
    ALL,
    Case,
    backward_inputs,
    call,
    check_case,
    every_dtype,
    forward_inputs,
    kernels,
    launches,
    mapped,
    nhwc,
    on_host,
    set_schedule,
    typical,
)
from tests.oracle import assert_same_bits

pytestmark = pytest.mark.usefixtures("fused_convolutions")


@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_schedules_change_no_bit(side, seed):
    case = Case(3, 9, 17, 32, 32, side)
    given = forward_inputs(case, torch.bfloat16)
    arriving = backward_inputs(case, torch.bfloat16)

    def results():
        return call(kernels(), case, given, True) | call(kernels(), case, arriving, ALL)

    expected = results()
    set_schedule(seed)
    assert_same_bits(results(), expected)


@typical
@pytest.mark.parametrize("multiprocessors", [1, 7])
def test_any_number_of_multiprocessors(case, multiprocessors):
    set_schedule(multiprocessors=multiprocessors)
    dtype = torch.bfloat16
    check_case(case, forward_inputs(case, dtype), True)
    check_case(case, backward_inputs(case, dtype), ALL)


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize("case", [Case(3, 16, 16, 16, 64, 1), Case(3, 16, 16, 64, 64, 3)], ids=str)
def test_images_at_the_end_of_a_batch_do_not_depend_on_its_size(case):
    """On a GPU behind 2^31 elements."""
    if not IS_CUDA_ON_HOST:
        if torch.cuda.mem_get_info()[0] < 48 * 2**30:
            pytest.skip("needs 48 GiB of GPU memory")
        case = case._replace(images=2**17 + 3)
    for inputs, options, name in (
        (forward_inputs(case, torch.bfloat16), False, "y"),
        (backward_inputs(case, torch.bfloat16), Wanted(True, False), "g"),
    ):
        last = mapped(inputs, lambda t: t[-2:] if t.dim() == 4 else t)
        last = last._replace(conv_weight=inputs.conv_weight)
        expected = call(kernels(), case._replace(images=2), last, options)[name]
        found = call(kernels(), case, inputs, options)[name]
        assert_same_bits({name: found[-2:]}, {name: expected})


@every_dtype
@pytest.mark.parametrize("case", [Case(2, 4, 5, 16, 32, 1), Case(2, 5, 4, 16, 16, 3)], ids=str)
def test_weights_stored_nhwc_and_tensors_that_begin_anywhere(case, dtype):
    def moved(t):
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return memory[1:].view(t.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2).copy_(t)

    for inputs, options in (
        (forward_inputs(case, dtype), True),
        (backward_inputs(case, dtype), ALL),
    ):
        expected = check_case(case, inputs, options)
        stored_nhwc = inputs._replace(conv_weight=nhwc(inputs.conv_weight))
        strayed = mapped(inputs, lambda t: moved(t) if t.dim() == 4 else t)
        for other in (stored_nhwc, strayed):
            assert_same_bits(call(kernels(), case, other, options), expected)


LARGE = (
    Case(1, 17, 33, 64, 16, 1),
    Case(1, 17, 33, 64, 256, 1),
    Case(2, 17, 33, 16, 16, 3),
    Case(2, 17, 33, 32, 32, 3),
    Case(2, 17, 35, 64, 64, 3),
)


@on_host
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_partial_weight_gradients_are_never_more_bytes_than_what_they_save(case, is_large):
    """Of a large image both gradients come from one kernel, of a small one each from its own."""
    set_schedule(multiprocessors=1)
    case = case if is_large else case._replace(images=1, height=3, width=5)
    inputs = backward_inputs(case, torch.bfloat16)
    names = launches(lambda: call(kernels(), case, inputs, ALL))
    apart = ["bn_relu_conv_backward_input", "bn_relu_conv_weight_gradients"]
    kernel_names = ["bn_relu_conv_backward"] if is_large else apart
    assert [n for n in names if n.startswith("bn_relu_conv")] == kernel_names
    check_case(case, inputs, ALL)
