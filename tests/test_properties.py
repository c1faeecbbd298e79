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
    """Any small convolution of stride 1 or 2.

    Not of 3: for outputs one column wide PyTorch's own convolution (2.13, oneDNN on AVX-512) then
    reads and writes memory that is not its own, forward and backward.
    """
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    kernel, stride, dilation = (
        (draw(st.integers(1, most)), draw(st.integers(1, most))) for most in (4, 2, 2)
    )
    padding = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    smallest = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    height, width = (n + draw(st.integers(0, 8)) for n in smallest)
    batch = draw(st.integers(1 if height * width > 1 else 2, 4))
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


@pytest.mark.parametrize("training", [True, False])
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_any_convolution(training, training_dtype, case, seed):
    torch.manual_seed(seed)
    arguments = {"training": training, **case.conv}
    fused, plain = (partial(f, **arguments) for f in (pk.bn_relu_conv2d, plain_bn_relu_conv2d))
    check(fused, plain, [conv_inputs(case, training_dtype) for _ in range(16)])
