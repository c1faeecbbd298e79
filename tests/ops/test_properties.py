"""`bn_relu_conv2d` keeps its budget for whatever shapes a search finds."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import preact_kernels as pk
from tests.cases import ConvCase, conv_inputs, plain_bn_relu_conv2d
from tests.oracle import check


@st.composite
def cases(draw):
    """Any small convolution of stride 1 or 2 whose windows all meet the image.

    Beyond that, and in bfloat16, PyTorch's own NHWC convolutions (2.13, oneDNN on AVX-512) read and
    write memory that is not theirs: wrong results at stride 3 and one column of outputs, a
    segmentation fault for a padded 1x1 of one-pixel images.
    """
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    kernel, stride, dilation = (
        (draw(st.integers(1, most)), draw(st.integers(1, most))) for most in (4, 2, 2)
    )
    extent = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = tuple(draw(st.integers(0, min(3, e))) for e in extent)
    smallest = [max(1, e + 1 - 2 * p) for e, p in zip(extent, padding, strict=True)]
    height, width = (n + draw(st.integers(0, 8)) for n in smallest)
    # Of two samples a channel the gradient is the difference of almost equal numbers.
    fewest = -(-8 // (height * width))
    batch = draw(st.integers(fewest, fewest + 3))
    return ConvCase(
        "found",
        (batch, groups * draw(st.integers(1, 24)), height, width),
        groups * draw(st.integers(1, 24)),
        kernel,
        stride,
        padding,
        dilation,
        groups,
        conv_bias=draw(st.booleans()),
        residual=draw(st.booleans()),
    )


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_any_convolution(training, wide_dtype, case, seed):
    torch.manual_seed(seed)
    arguments = {"training": training, **case.conv}
    fused, plain = (partial(f, **arguments) for f in (pk.bn_relu_conv2d, plain_bn_relu_conv2d))
    check(fused, plain, [conv_inputs(case, wide_dtype) for _ in range(12)])
