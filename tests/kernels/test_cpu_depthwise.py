"""The gradient of the weight of a depthwise convolution, by the CPU library."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.kernels import cpu, layout
from tests.cases import INF, NAN
from tests.oracle import check

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

# Shape of x, kernel, stride, padding and dilation. No vector has more than 16 channels.
CASES = [
    ((2, 16, 9, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 40, 14, 13), (5, 5), (1, 1), (2, 2), (1, 1)),  # the last vector overlaps another
    ((2, 48, 11, 12), (7, 7), (1, 1), (3, 3), (1, 1)),
    ((2, 21, 8, 9), (5, 5), (2, 2), (2, 2), (1, 1)),
    ((1, 200, 7, 7), (3, 3), (2, 1), (1, 1), (1, 2)),
    ((2, 17, 1, 30), (1, 5), (1, 3), (0, 2), (1, 4)),  # a sequence
    ((2, 64, 2, 3), (5, 7), (1, 1), (6, 8), (3, 1)),  # most taps are outside of the image
    ((2, 33, 12, 3), (6, 3), (3, 2), (0, 0), (1, 1)),
    ((1, 16, 1, 1), (3, 5), (4, 4), (1, 2), (1, 1)),
    ((3, 150, 33, 35), (5, 3), (1, 1), (2, 1), (1, 1)),  # several parts and groups of channels
    ((1, 16, 2, 2500), (3, 3), (1, 1), (1, 1), (1, 1)),  # two parts of each row
]
OP = "preact_kernels_cpu::depthwise_weight_gradient"


def weight_gradient(dy, x, case):
    return torch.ops.preact_kernels_cpu.depthwise_weight_gradient(dy, x, *case[1:])


def plain(x, weight, *, case):
    return F.conv2d(x, weight, None, *case[2:], groups=x.shape[1])


class Convolution(torch.autograd.Function):
    """A convolution with the gradient of the library."""

    @staticmethod
    def forward(ctx, x, weight, case):
        ctx.save_for_backward(x)
        ctx.case = case
        return plain(x, weight, case=case)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return None, weight_gradient(layout.nhwc(dy), x, ctx.case), None


def problem(case, dtype=torch.float32):
    shape, kernel, *_ = case
    x = layout.nhwc(torch.randn(shape).to(dtype))
    return {"x": x, "weight": torch.randn(shape[1], 1, *kernel).to(dtype)}


@pytest.mark.calls(OP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_it_equals_the_gradient_of_pytorch(case, dtype):
    check(
        lambda x, weight: Convolution.apply(layout.nhwc(x), weight, case),
        lambda x, weight: plain(x, weight, case=case),
        [problem(case, dtype) for _ in range(4)],
        frozen=["x"],
    )


def test_long_rows_are_summed_in_parts():
    case = ((1, 16, 1, 100_000), (1, 5), (1, 1), (0, 2), (1, 1))
    inputs = problem(case)
    inputs["x"] += 1
    check(
        lambda x, weight: Convolution.apply(layout.nhwc(x), weight, case),
        lambda x, weight: plain(x, weight, case=case),
        inputs,
        draws=1,
        frozen=["x"],
    )


def test_the_number_of_threads_changes_no_bit():
    case, threads = CASES[-2], torch.get_num_threads()
    x, found = problem(case)["x"], []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(weight_gradient(x, x, case))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_taps_outside_of_the_image_are_left_out():
    case = ((2, 16, 6, 5), (3, 3), (1, 1), (1, 1), (1, 1))
    x = problem(case)["x"]
    dy = torch.ones_like(x)
    dy[0, 3, 0, 0], dy[1, 5, -1, -1], x[1, 7, 2, 2] = NAN, INF, NAN
    result = weight_gradient(dy, x, case)
    finite = result.isfinite()
    assert not finite[3, 0, 1:, 1:].any() and finite[3, 0, 0].all() and finite[3, 0, :, 0].all()
    assert not finite[5, 0, :2, :2].any() and finite[5, 0, 2].all() and finite[5, 0, :, 2].all()
    assert not finite[7].any()
    others = [c for c in range(16) if c not in (3, 5, 7)]
    assert finite[others].all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({1: [3, 2], 4: [1, 2]}, "kernel: expected 3, 5 or 7 columns, got 2"),
        ({1: [8, 3]}, "kernel: expected at most 7 rows, got 8"),
        ({1: [3]}, "kernel: expected 2 values, got 1"),
        ({2: [0, 1]}, "stride: expected values from 1 to 2147483647, got 0"),
        ({3: [-1, 1]}, "padding: expected values from 0 to"),
        ({4: [1, 0]}, "dilation: expected values from 1 to"),
        ({3: [2**62, 1]}, "padding: expected values from 0 to"),
        ({4: [1, 2**63 - 1]}, "dilation: expected values from 1 to"),
        ({3: [2, 1]}, "dy: expected a size of 11 on axis 2, got 9"),
        ({4: [9, 1]}, "dy: expected a size of 0 on axis 2, got 9"),
    ],
)
def test_arguments_are_checked(change, text):
    x = problem(CASES[0])["x"]
    case = [change.get(i, given) for i, given in enumerate(CASES[0])]
    with pytest.raises(RuntimeError, match=text):
        weight_gradient(x, x, case)


def test_tensors_are_checked():
    x = problem(CASES[0])["x"]
    with pytest.raises(RuntimeError, match="x: expected float32, bfloat16 or float16"):
        weight_gradient(x.double(), x.double(), CASES[0])
    with pytest.raises(RuntimeError, match="dy: expected shape"):
        weight_gradient(layout.nhwc(x[:, :8]), x, CASES[0])
    with pytest.raises(RuntimeError, match=r"x: expected at least \d+ channels, got 3"):
        weight_gradient(layout.nhwc(x[:, :3]), layout.nhwc(x[:, :3]), CASES[0])


class Unit(nn.Module):
    def __init__(self, channels, kernel, stride, padding):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, kernel, stride, padding, groups=channels)

    def forward(self, x):
        return self.conv(F.silu(self.norm(x)))


@pytest.mark.calls(OP)
@pytest.mark.parametrize("channels_last", [False, True])
def test_depthwise_units(channels_last):
    for kernel, stride in itertools.product((3, 5, 7), (1, 2)):
        unit, x = Unit(24, kernel, stride, kernel // 2), torch.randn(2, 24, 14, 13)
        if channels_last:
            unit, x = unit.to(memory_format=torch.channels_last), layout.nhwc(x)
        check(pk.convert(copy.deepcopy(unit)), unit, {"x": x}, draws=1)


# The images are dense in both formats; the convolutions run in NCHW.
@pytest.mark.parametrize(
    ("dtype", "kernel", "stride", "padding"),
    [
        (torch.float16, 3, 2, (2, 1)),
        (torch.bfloat16, 5, 2, (4, 2)),
        (torch.float32, 5, 1, 3),
    ],
)
def test_images_of_one_pixel(dtype, kernel, stride, padding):
    unit = Unit(16, kernel, stride, padding).to(dtype).eval()
    if stride == 1:
        unit.conv.weight.data = unit.conv.weight.data.mT.contiguous().mT
    inputs = [{"x": torch.randn(2, 16, 1, 1).to(dtype)} for _ in range(8)]
    check(pk.convert(copy.deepcopy(unit)), unit, inputs)
