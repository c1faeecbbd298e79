"""CUDA kernels of norms with rows, of every activation, and of the statistics of groups.

Without a GPU they run on the host (`testbed/cuda_on_host/`), by the same sources.
"""

import itertools

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import reference
from preact_kernels.kernels.contract import (
    ACTIVATIONS,
    Activation,
    AffineStep,
    Gradient,
    Inputs,
    Norm,
    Wanted,
)
from preact_kernels.kernels.reference.activations import activate
from testbed.cuda_on_host import serve_cpu
from tests.cases import device_of, gradient_on_gpu, served_by_vectors, unit_of
from tests.kernels.cuda_conv_cases import (
    Case,
    backward_inputs,
    conv,
    kernels,
    on_host,
    set_schedule,
)
from tests.kernels.cuda_op_cases import NORM_OPS, arguments, check_ops, random_images, run
from tests.oracle import assert_same_bits, assert_within_budget, unit_roundoff

if serve_cpu.missing():
    pytest.skip(f"backend cuda: {serve_cpu.missing()}", allow_module_level=True)

DEVICE = torch.device(device_of("cuda"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_ROWS = "mean var weight bias"
INF, NAN = float("inf"), float("nan")
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_cuda(first_schedule):
    with pk.use_backend("cuda"), DEVICE:
        yield


def with_activation(values, dy, name):
    """act(p) and dy * act'(p) of the kernels for p = `values`: a norm that changes nothing.

    Each with what PyTorch's operators give in float32 and in float64.
    """
    p = values.view(1, 1, 1, -1)
    activation = Activation(name, ACTIVATIONS[name])
    zero, one = torch.zeros(1), torch.ones(1)
    norm = Norm(zero, one, one.view(1, 1), zero, 0.0, *activation)  # with a row
    y = kernels().norm_act_forward(p, norm)
    g, _ = kernels().norm_act_backward(dy.view_as(p), p, norm, True)
    step = AffineStep(None, p, norm, torch.zeros(2, 1, 1), 0.0)
    dx = kernels().norm_input_gradient(Gradient(dy.view_as(p), step), True)
    assert_same_bits({"dx": dx}, {"dx": g})
    plain = [
        (activate(v, activation), gradient_on_gpu(w, v, activation))
        for v, w in ((values.float(), dy.float()), (values.double(), dy.double()))
    ]
    return [(own.flatten(), *right) for own, *right in zip((y, g), *plain, strict=True)]


# Ranges of p, each with a budget of its own: small results do not hide behind large ones.
RANGES = ((-60, -12), (-12, -4), (-4, -0.5), (-0.5, 0), (0, 0.5), (0.5, 4), (4, 12), (12, 60))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_and_its_gradient_equal_pytorch(name):
    for dtype, (low, high) in itertools.product(DTYPES, RANGES):
        values = torch.empty(1001).uniform_(low, high).to(dtype)
        for found, eager, truth in with_activation(values, torch.randn(1001).to(dtype), name):
            error = (eager.to(dtype).double() - truth).norm()
            assert_within_budget({"value": found}, {"value": truth}, {"value": float(error)})


def test_special_values_of_every_activation_are_those_of_pytorch():
    special = [NAN, INF, -INF, 0.0, 1e-40, -1e-40, 3, -3, 6, 88, -88, -90, -104, 1e19]
    for name in ACTIVATIONS:
        # PyTorch's operators for a CPU have another formula for a rest.
        values = torch.tensor(served_by_vectors(name, special)).repeat(64)
        for found, *right in with_activation(values, torch.full_like(values, 2.0), name):
            near = [
                torch.isclose(found.double(), t.double(), 2e-3, 1e-44, equal_nan=True)
                for t in right  # PyTorch's formula in float32 may lose what is left of a number
            ]
            assert (near[0] | near[1]).all(), (name, values[:14], found[:14], right[0][:14])
            assert torch.equal(found.isnan(), right[0].isnan()), name


def test_no_gradient_passes_where_an_activation_is_constant_even_if_dy_is_infinite():
    values = torch.tensor([-7.0, -1.0] * 32)
    for name in ("relu", "relu6"):
        _, (g, *_) = with_activation(values, torch.full_like(values, INF), name)
        assert not g.any()


# Dtype, shape, elements that memory is off, tables with rows, activation. Among the shapes are odd
# channels, images of one pixel, more images than blocks, and channels of several blocks.
CASES = (
    (torch.float32, (3, 1, 5, 7), 0, "mean", "silu"),
    (torch.bfloat16, (5, 17, 5, 4), 0, ALL_ROWS, "gelu"),
    (torch.float16, (2, 100, 3, 5), 0, "weight bias", "mish"),
    (torch.float32, (2, 16, 9, 11), 0, "bias", "gelu_tanh"),
    (torch.bfloat16, (3, 16, 9, 11), 0, "mean var", "elu"),
    (torch.float16, (33, 24, 1, 1), 0, ALL_ROWS, "leaky_relu"),
    (torch.bfloat16, (2, 520, 2, 3), 0, "var weight", "hardswish"),
    (torch.float16, (2, 16, 3, 5), 4, ALL_ROWS, "softplus"),
    (torch.float32, (2, 16, 3, 5), 1, ALL_ROWS, "sigmoid"),
    (torch.float32, (2, 12, 31, 33), 0, "mean var bias", "relu"),
    (torch.bfloat16, (2, 40, 5, 3), 0, "", "silu"),
    (torch.float16, (3, 7, 5, 3), 0, "", "tanh"),
    (torch.float32, (2, 24, 17, 9), 0, "", "relu6"),
    (torch.float32, (2, 24, 5, 3), 0, "weight", "identity"),
)


@pytest.mark.parametrize(("dtype", "shape", "offset", "rows", "activation"), CASES, ids=str)
def test_norm_ops_equal_their_specification(dtype, shape, offset, rows, activation):
    given = arguments(shape, dtype, None, offset, rows, activation)
    found = check_ops(given, NORM_OPS)
    assert_same_bits(
        {"sums": found["norm_act_backward without g 1"]}, {"sums": found["norm_act_backward 1"]}
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_ops_with_rows_in_evaluation_mode_equal_their_specification(dtype):
    given = arguments((2, 24, 5, 3), dtype, 0.0, 0, "weight bias", "silu")
    check_ops(given, NORM_OPS)
    given.x[0, 3] = INF
    assert kernels().norm_input_gradient(given.gradient).isfinite().all()


def test_no_gradient_passes_where_a_rounded_pre_activation_with_rows_is_zero():
    given = arguments((2, 16, 3, 5), torch.float16, 0.0, 0, "weight")
    norm = given.norm._replace(weight=torch.full((2, 16), 1e-9), bias=torch.zeros(16))
    given = given._replace(norm=norm, step=given.step._replace(norm=norm))
    for op in NORM_OPS:
        if "backward" in op or "activated" in op:
            assert not any(t.any() for t in run(kernels(), op, given).values()), op


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


def results_of_images(given):
    """The results of all ops, by image."""
    of_batch = {}
    for op in NORM_OPS:
        of_batch |= run(kernels(), op, given)
    images = range(given.x.shape[0])
    return [{n: t[:, i] if t.dim() == 3 else t[i] for n, t in of_batch.items()} for i in images]


@pytest.mark.parametrize("channels", [20, 11])
def test_the_results_of_an_image_do_not_depend_on_the_batch(channels):
    set_schedule(0, 8)
    given = arguments((3, channels, 41, 31), torch.float32, None, 0, ALL_ROWS, "silu")
    for index, found in enumerate(results_of_images(given)):
        (alone,) = results_of_images(given.image(index))
        assert_same_bits(found, alone)


def test_a_nan_stays_in_its_image_and_channel():
    given = arguments((3, 20, 41, 31), torch.float32, None, 0, ALL_ROWS, "silu")
    clean = results_of_images(given)
    given.x[1, 5, 7, 9] = NAN
    found = results_of_images(given)
    for image in (0, 2):
        assert_same_bits(found[image], clean[image])
    sums = found[1]["norm_act_backward 1"]
    assert sums[:, 5].isnan().all() and sums.isnan().sum() == 2


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


# Shape, groups, dtype, elements that memory is off.
GROUP_CASES = (
    ((3, 12, 5, 7), 3, torch.float32, 0),
    ((2, 17, 5, 4), 17, torch.bfloat16, 0),
    ((2, 100, 3, 5), 1, torch.float16, 0),
    ((5, 24, 1, 1), 2, torch.bfloat16, 0),
    ((2, 1040, 2, 3), 2, torch.bfloat16, 0),
    ((1, 640, 2, 3), 640, torch.float32, 0),
    ((2, 16, 57, 43), 4, torch.float16, 0),
    ((2, 16, 3, 5), 8, torch.float32, 1),
    ((9, 1, 3, 5), 1, torch.float32, 0),
)


@pytest.mark.parametrize(("shape", "groups", "dtype", "offset"), GROUP_CASES, ids=str)
def test_group_stats_equal_their_specification(shape, groups, dtype, offset):
    x = random_images(shape, dtype, offset) * 2 + torch.arange(shape[1]).view(-1, 1, 1) / 7
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    results = {}
    for seed, multiprocessors in itertools.product((0, 1), (1, 9)):
        set_schedule(seed, multiprocessors)
        found = kernels().group_stats(x, groups)._asdict()
        truth = reference.group_stats(x.double(), groups)._asdict()
        eager = reference.group_stats(x, groups)._asdict()
        errors = {n: float((t.double() - truth[n]).norm()) for n, t in eager.items()}
        assert_within_budget(found, truth, errors)
        assert_same_bits(found, results.setdefault(multiprocessors, found))
        for index in range(shape[0]):
            alone = kernels().group_stats(x[index : index + 1], groups)._asdict()
            assert_same_bits({n: t[index : index + 1] for n, t in found.items()}, alone)


def test_the_mean_of_a_constant_group_is_its_value():
    x = random_images((3, 24, 37, 29), torch.float32)
    values = torch.tensor([0.1, 1e15, -3e-39])
    for groups in (1, 3, 24):
        count = 24 // groups
        x[:, :count] = values.view(3, 1, 1, 1)
        mean, var = kernels().group_stats(x, groups)
        assert torch.equal(mean[:, :count], values.view(3, 1).expand(3, count))
        assert (var[:, :count].sqrt() <= 1e-8 * values.abs().view(3, 1)).all()


def test_a_large_mean_and_an_outlier_cost_no_accuracy():
    x = random_images((2, 8, 64, 64), torch.float32)
    x[0] += 1000
    x[1, 0, 0, 0] = 1e4
    mean, var = kernels().group_stats(x, 2)
    true_mean, true_var = reference.group_stats(x.double(), 2)
    allowed = 64 * unit_roundoff(torch.float32)
    assert ((mean - true_mean).abs() <= allowed * true_mean.abs().clamp(min=1)).all()
    assert ((var - true_var).abs() <= allowed * true_var).all()


@pytest.mark.parametrize(("value", "channel"), [(-INF, 4), (NAN, 5)])
def test_what_is_not_finite_stays_in_its_image_and_group(value, channel):
    x = random_images((3, 12, 31, 33), torch.float32)
    clean = kernels().group_stats(x, 3)
    x[1, channel, 3, 4] = value
    found = kernels().group_stats(x, 3)
    own = torch.zeros(3, 12, dtype=torch.bool)
    own[1, 4:8] = True
    for t, of_clean in zip(found, clean, strict=True):
        assert_same_bits({"others": t[~own]}, {"others": of_clean[~own]})
    assert torch.equal(found.mean[own].isnan(), x[1, 4:8].mean().isnan().expand(4))
    assert not found.mean[own].isfinite().any() and found.var[own].isnan().all()


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
