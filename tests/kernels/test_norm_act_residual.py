"""`act(norm(x) + residual)` and its backward from y, by the kernels of every library.

Without a GPU the CUDA kernels run on the host (`testbed/cuda_on_host/`).
"""

import pytest
import torch

from preact_kernels.kernels.contract import Norm, statistics_dtype
from preact_kernels.ops import dispatch
from tests.cases import INF, NAN, SERVED_DTYPES
from tests.kernels.op_cases import NORM_OPS, arguments, check_ops, random_images
from tests.oracle import assert_same_bits, assert_within_budget
from tests.reruns import assert_runs_agree

pytestmark = [
    pytest.mark.backends("reference", "cpu", "triton", "cuda"),
    pytest.mark.usefixtures("first_schedule"),
]

# Shape, elements that memory is off, whether the bias has rows. Among the shapes are images of one
# pixel and of several tiles, whole vectors, parts of them, and more channels than a block has.
CASES = (
    ((2, 3, 5, 7), 0, False),
    ((3, 10, 4, 3), 0, True),
    ((2, 17, 29, 19), 0, False),
    ((2, 48, 7, 6), 0, True),
    ((2, 16, 3, 5), 1, False),
    ((2, 1041, 2, 3), 0, False),
    ((5, 24, 1, 1), 0, True),
)
every_case = pytest.mark.parametrize(("shape", "offset", "has_rows"), CASES, ids=str)


def kernels():
    """The kernels of the backend under test."""
    return dispatch.kernels_for(torch.empty(1))


def with_special_values(t, seed):
    """The same tensor with NaN, infinities and zeros at places that depend on the seed."""
    special = torch.tensor([NAN, INF, -INF, 0.0], dtype=t.dtype)
    at = torch.randperm(t.shape[1], generator=torch.Generator().manual_seed(seed))
    for value, channel in zip(special, at, strict=False):
        t[-1, channel, -1, -1] = value
    return t


def special_images(shape, dtype, offset, seed):
    return with_special_values(random_images(shape, dtype, offset), seed)


def unit_norm(shape, dtype, has_rows, activation="relu"):
    """A norm for which `p = x + bias` without another rounding."""
    wide = statistics_dtype(dtype)
    zero, one = torch.zeros(shape[1], dtype=wide), torch.ones(shape[1], dtype=wide)
    bias = torch.randn(shape[:2] if has_rows else shape[1:2], dtype=wide)
    return Norm(zero, one, one, bias, 0.0, activation)


def layouts(*images):
    """The images in every memory order that the kernels take."""
    yield images
    if kernels().serves_planes:
        yield tuple(t.contiguous() for t in images)


def assert_equal_but_for_nan(found, expected):
    """Equal numbers in the same memory order, and NaN at the same places."""
    strides = zip(found.shape, found.stride(), expected.stride(), strict=True)
    assert all(size == 1 or stride == other for size, stride, other in strides)
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@every_case
def test_a_residual_is_added_to_the_rounded_pre_activation(shape, offset, has_rows, backend):
    for dtype in SERVED_DTYPES[backend]:
        images = (special_images(shape, dtype, offset, seed) for seed in (1, 2))
        for x, residual in layouts(*images):
            norm = unit_norm(shape, dtype, has_rows)
            p = (x.to(norm.bias.dtype) + norm.bias.view(-1, shape[1], 1, 1)).to(dtype)
            y = kernels().norm_act_forward(x, norm, residual)
            assert_equal_but_for_nan(y, torch.relu(p + residual))
            norm = norm._replace(activation="identity")
            y = kernels().norm_act_forward(x, norm, residual)
            assert_equal_but_for_nan(y, p + residual)


@every_case
def test_the_gradient_passes_where_y_is_positive_or_nan(shape, offset, has_rows, backend):
    for dtype in SERVED_DTYPES[backend]:
        images = [special_images(shape, dtype, offset, seed) for seed in (1, 2, 3)]
        for t in images:
            t.copy_(t.to(torch.bfloat16))  # sums in float64 are then exact
        images[2].relu_()
        for dy, x, y in layouts(*images):
            norm = unit_norm(shape, dtype, has_rows)
            g, sums = kernels().norm_act_backward(dy, x, norm, True, y)
            assert_equal_but_for_nan(g, torch.ops.aten.threshold_backward(dy, y, 0))
            axes = (2, 3) if has_rows else (0, 2, 3)
            wide = g.double()
            truth = torch.stack([wide.sum(axes), (wide * x.double()).sum(axes)])
            assert torch.equal(sums.isfinite(), truth.isfinite())
            wide, finite = g.to(sums.dtype), truth.isfinite()
            eager = torch.stack([wide.sum(axes), (wide * x.to(sums.dtype)).sum(axes)])
            error = float((eager.double() - truth)[finite].norm())
            assert_within_budget({"sums": sums[finite]}, {"sums": truth[finite]}, {"sums": error})
            _, alone = kernels().norm_act_backward(dy, x, norm, False, y)
            assert_same_bits({"sums": alone}, {"sums": sums})


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("rows", ["", "mean var weight bias"])
def test_planes_equal_their_specification(rows, backend):
    for shape in ((2, 3, 5, 7), (3, 10, 4, 3), (2, 5, 31, 33), (2, 48, 1, 2)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            given = arguments(shape, dtype, None, 0, rows)
            x, dy, residual, y = (t.contiguous() for t in (*given[:2], *given[4:]))
            step = given.step._replace(x=x, skip=given.step.skip.contiguous())
            given = given._replace(x=x, dy=dy, step=step, residual=residual, y=y)
            found = check_ops(given, NORM_OPS, kernels())
            assert all(t.is_contiguous() for t in found.values())


@pytest.mark.backends("cpu", "triton", "cuda")
def test_runs_give_the_same_bits(backend):
    images = [random_images((3, 20, 29, 31), torch.float32) for _ in range(4)]
    for x, residual, dy, y in layouts(*images):
        norm = unit_norm(x.shape, x.dtype, False)

        def run(x=x, residual=residual, dy=dy, y=y, norm=norm):
            g, sums = kernels().norm_act_backward(dy, x, norm, True, y)
            return {"y": kernels().norm_act_forward(x, norm, residual), "g": g, "sums": sums}

        assert_runs_agree(backend, run)


@pytest.mark.backends("reference", "triton")
def test_other_activations_take_no_residual(backend):
    x, residual = (random_images((2, 3, 2, 2), torch.float32) for _ in range(2))
    silu = unit_norm(x.shape, x.dtype, False, "silu")
    with pytest.raises((AssertionError, ValueError)):
        kernels().norm_act_forward(x, silu, residual)
    with pytest.raises((AssertionError, ValueError)):
        kernels().norm_act_backward(x, x, silu, True, residual)


@pytest.mark.backends("cpu")
def test_a_batch_of_no_images_has_results_without_values(backend):
    x = torch.empty(0, 3, 2, 2)
    norm = unit_norm(x.shape, x.dtype, False)
    served = dispatch.kernels_for(x)
    assert served.norm_act_forward(x, norm, x).shape == x.shape
    g, sums = served.norm_act_backward(x, x, norm, True, x)
    assert g.shape == x.shape and torch.equal(sums, torch.zeros(2, 3))
