"""The gradient of the weight of a depthwise convolution, by the CPU library."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.kernels import cpu, layout
from tests.cases import INF, NAN
from tests.oracle import distance

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

# Shape of x, kernel, stride, padding and dilation.
CASES = [
    ((2, 16, 9, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 40, 14, 13), (5, 5), (1, 1), (2, 2), (1, 1)),  # the last vector overlaps another
    ((2, 48, 11, 12), (7, 7), (1, 1), (3, 3), (1, 1)),
    ((2, 5, 8, 9), (5, 5), (2, 2), (2, 2), (1, 1)),  # fewer channels than a vector has
    ((1, 200, 7, 7), (3, 3), (2, 1), (1, 1), (1, 2)),
    ((2, 17, 1, 30), (1, 5), (1, 3), (0, 2), (1, 4)),  # a sequence
    ((2, 64, 2, 3), (5, 7), (1, 1), (6, 8), (3, 1)),  # most taps are outside of the image
    ((2, 33, 12, 3), (6, 3), (3, 2), (0, 0), (1, 1)),
    ((9, 24, 33, 35), (5, 3), (1, 1), (2, 1), (1, 1)),  # several parts
]


def problem(case, dtype=torch.float32):
    shape, kernel, *geometry = case
    x = layout.nhwc(torch.randn(shape).to(dtype))
    weight = torch.zeros(shape[1], 1, *kernel, dtype=dtype)
    y = F.conv2d(x.double(), weight.double(), None, *geometry, groups=shape[1])
    return layout.nhwc(torch.randn_like(y).to(dtype)), x, weight


def expected(dy, x, weight, case):
    weight = weight.double().requires_grad_()
    _, _, *geometry = case
    y = F.conv2d(x.double(), weight, None, *geometry, groups=x.shape[1])
    return torch.autograd.grad(y, weight, dy.double())[0]


def error(result, right):
    return distance(result, right) / right.norm()


def found(dy, x, case):
    return torch.ops.preact_kernels_cpu.depthwise_weight_gradient(dy, x, *case[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_it_equals_the_gradient_in_float64(case, dtype):
    dy, x, weight = problem(case, dtype)
    right, result = expected(dy, x, weight, case), found(dy, x, case)
    assert result.dtype == dtype and result.is_contiguous() and result.shape == weight.shape
    assert error(result, right) <= (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
    assert torch.equal(found(dy, x, case), result)


def test_taps_outside_of_the_image_are_left_out():
    case = ((2, 16, 6, 5), (3, 3), (1, 1), (1, 1), (1, 1))
    dy, x, _ = problem(case)
    dy[0, 3, 0, 0], dy[1, 5, -1, -1], x[1, 7, 2, 2] = NAN, INF, NAN
    result = found(dy, x, case)
    finite = result.isfinite()
    assert not finite[3, 0, 1:, 1:].any() and finite[3, 0, 0].all() and finite[3, 0, :, 0].all()
    assert not finite[5, 0, :2, :2].any() and finite[5, 0, 2].all() and finite[5, 0, :, 2].all()
    assert not finite[7].any()
    others = [c for c in range(16) if c not in (3, 5, 7)]
    assert finite[others].all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({1: [3, 2], 4: [1, 2]}, "kernel: expected rows of 3, 5 or 7 taps, got 2"),
        ({1: [8, 3]}, "kernel: expected 1 to 7 taps, got 8"),
        ({1: [3]}, "expected 2 values, got 1"),
        ({2: [0, 1]}, "stride: expected positive values, got 0"),
        ({3: [-1, 1]}, "padding: expected values of 0 or more, got -1"),
        ({4: [1, 0]}, "dilation: expected positive values, got 0"),
        ({3: [2, 1]}, "dy: expected a size of 11 on axis 2, got 9"),
        ({4: [9, 1]}, "dy: expected a size of 0 on axis 2, got 9"),
    ],
)
def test_arguments_are_checked(change, text):
    dy, x, _ = problem(CASES[0])
    case = [change.get(i, given) for i, given in enumerate(CASES[0])]
    with pytest.raises(RuntimeError, match=text):
        found(dy, x, case)
    with pytest.raises(RuntimeError, match="x: expected float32, bfloat16 or float16"):
        found(dy.double(), x.double(), CASES[0])
    with pytest.raises(RuntimeError, match="dy: expected shape"):
        found(dy[:, :8].contiguous(memory_format=torch.channels_last), x, CASES[0])


class Unit(nn.Module):
    def __init__(self, channels, kernel, stride, groups):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=groups)

    def forward(self, x):
        return self.conv(F.silu(self.norm(x)))


@pytest.mark.calls("preact_kernels_cpu::depthwise_weight_gradient")
@pytest.mark.parametrize("channels_last", [False, True])
def test_depthwise_units_call_it(channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    for kernel, stride in itertools.product((3, 5, 7), (1, 2)):
        net = Unit(24, kernel, stride, 24).to(memory_format=memory_format)
        x = torch.randn(2, 24, 14, 13).to(memory_format=memory_format)
        plain = Unit(24, kernel, stride, 24).double()
        plain.load_state_dict(net.state_dict())
        pk.convert(net)(x).square().sum().backward()
        plain(x.double()).square().sum().backward()
        for own, right in zip(net.parameters(), plain.parameters(), strict=True):
            assert error(own.grad, right.grad) <= 1e-5
        assert net.conv.weight.grad.stride() == net.conv.weight.stride()
