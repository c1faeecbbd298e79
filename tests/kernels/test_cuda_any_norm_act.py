"""Tests that only the CUDA kernels of norms with rows and of any activation need.

Without a GPU they run on the host (`testbed/cuda_on_host/`), by the same sources.
"""

import itertools

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import reference
from preact_kernels.kernels.contract import (
    Gradient,
    Inputs,
    Norm,
    Wanted,
)
from testbed.cuda_on_host import serve_cpu
from tests.cases import device_of, unit_of
from tests.kernels.cuda_conv_cases import (
    Case,
    backward_inputs,
    conv,
    kernels,
    on_host,
    set_schedule,
)
from tests.kernels.op_cases import NORM_OPS, arguments, check_ops, random_images, run
from tests.oracle import assert_same_bits

if serve_cpu.missing():
    pytest.skip(f"backend cuda: {serve_cpu.missing()}", allow_module_level=True)

DEVICE = torch.device(device_of("cuda"))
ALL_ROWS = "mean var weight bias"
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_cuda(first_schedule):
    with pk.use_backend("cuda"), DEVICE:
        yield


def test_no_gradient_passes_where_an_activation_is_constant_even_if_dy_is_infinite():
    x = torch.tensor([-7.0, -1.0] * 32).view(1, 1, 1, -1)
    zero, one = torch.zeros(1), torch.ones(1)
    for name in ("relu", "relu6"):
        norm = Norm(zero, one, one.view(1, 1), zero, 0.0, name)  # with a row
        g, _ = kernels().norm_act_backward(torch.full_like(x, torch.inf), x, norm, True)
        assert not g.any()


@on_host
@pytest.mark.parametrize(("rows", "multiprocessors"), [(ALL_ROWS, 1), (ALL_ROWS, 8), ("", 8)])
def test_blocks_in_any_order_give_the_same_bits(rows, multiprocessors):
    given = arguments((3, 44, 29, 25), torch.bfloat16, None, 0, rows, "silu")
    serve_cpu.set_schedule(0, multiprocessors)
    expected = check_ops(given, NORM_OPS)
    for seed in (1, 2):
        serve_cpu.set_schedule(seed, multiprocessors)
        for op in NORM_OPS:
            found = run(kernels(), op, given)
            assert_same_bits(found, {name: expected[name] for name in found})


@on_host
def test_more_images_than_a_grid_may_have_take_several_launches():
    shape = (65535 + 3, 4, 1, 2)
    found = []
    with serve_cpu.without_running(lambda launch: found.append((launch.name, launch.blocks))):
        given = arguments(shape, torch.float32, None, 0, "weight", "silu")
        for op in NORM_OPS:
            run(kernels(), op, given)
        kernels().group_stats(given.x, 2)
    images = [(name, blocks[2]) for name, blocks in found if name != "fill_zeros"]
    names = "norm_act_forward", "norm_act_backward_mask", "norm_input_gradient", "group_stats"
    assert set(images) == set(itertools.product(names, (65535, 3)))


@on_host
def test_the_blocks_that_add_up_an_image_do_not_depend_on_the_batch():
    set_schedule(0, 8)
    found = {}
    for images in (1, 7):
        with serve_cpu.without_running(
            lambda launch, images=images: found.setdefault((images, launch.name), launch.blocks[:2])
        ):
            given = arguments((images, 20, 41, 31), torch.float32, None, 0, ALL_ROWS, "silu")
            kernels().norm_act_backward(*given[:3], True)
            kernels().group_stats(given.x, 2)
    for name in ("norm_act_backward_mask", "group_stats"):
        assert found[1, name] == found[7, name] and found[1, name][0] > 1


@needs_gpu
@pytest.mark.not_under_sanitizer
def test_the_last_of_many_images_are_computed():
    given = arguments((65535 + 3, 4, 1, 2), torch.float32, None, 0, ALL_ROWS, "silu")
    check_ops(given, NORM_OPS)
    found, expected = (k.group_stats(given.x, 2) for k in (kernels(), reference))
    for t, right in zip(found, expected, strict=True):
        torch.testing.assert_close(t, right)


CASE = Case(3, 5, 7, 64, 16, 1)


def test_a_fused_convolution_takes_the_gradient_of_a_norm_with_rows():
    given = backward_inputs(CASE, torch.bfloat16)
    step = given.dy.step
    n, k = step.x.shape[:2]
    norm = step.norm._replace(mean=torch.randn(n, k) / 3, weight=torch.randn(n, k))
    step = step._replace(norm=norm, sums=torch.randn(2, n, k), inv_count=1 / 35)
    dy = Gradient(given.dy.g, step)
    unit = unit_of(given.conv_weight, conv(CASE), torch.bfloat16, torch.bfloat16)
    assert kernels().serves(unit)
    inputs = Inputs(given.x, given.norm, given.conv_weight)
    whole = kernels().norm_input_gradient(dy)
    expected = kernels().norm_act_conv_backward(unit, Gradient(whole), inputs, Wanted(True, True))
    found = kernels().norm_act_conv_backward(unit, dy, inputs, Wanted(True, True, True))
    assert_same_bits(found._asdict(), expected._replace(dy=whole)._asdict())


def test_a_fused_convolution_refuses_rows_and_other_activations():
    x, weight = random_images((2, 16, 3, 5), torch.bfloat16), torch.randn(16, 16, 1, 1).bfloat16()
    ops = torch.ops.preact_kernels_cuda
    for rows, activation in (("", "silu"), ("weight", "relu")):
        norm = arguments((2, 16, 3, 5), torch.bfloat16, rows=rows, activation=activation).norm
        with pytest.raises(RuntimeError, match="activation: expected relu without rows"):
            ops.norm_act_conv_forward(x, *norm, weight, [1, 1], None, None, False, torch.bfloat16)
