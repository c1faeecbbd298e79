"""`bn_relu_conv2d` keeps its budget for whatever shapes a search finds."""

from functools import partial

import pytest
import torch

import preact_kernels as pk
from tests.cases import ConvCase, conv_inputs, plain_bn_relu_conv2d
from tests.oracle import check


def drawn_case(draw, st):
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
    x = (batch, groups * draw(st.integers(1, 24)), height, width)
    out_channels = groups * draw(st.integers(1, 24))
    case = ConvCase("found", x, out_channels, kernel, stride, padding, dilation, groups)
    return case._replace(conv_bias=draw(st.booleans()), residual=draw(st.booleans()))


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
def test_any_convolution(training, wide_dtype):
    import hypothesis  # here, as it takes a second, in each test process
    from hypothesis import strategies as st

    @hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @hypothesis.given(data=st.data())
    def keeps_the_budget(data):
        case = drawn_case(data.draw, st)
        torch.manual_seed(data.draw(st.integers(0, 2**16)))
        arguments = {"training": training, **case.conv}
        fused, plain = (partial(f, **arguments) for f in (pk.bn_relu_conv2d, plain_bn_relu_conv2d))
        check(fused, plain, [conv_inputs(case, wide_dtype) for _ in range(8)])

    keeps_the_budget()
