"""Conversions between NCHW and NHWC by the CPU library."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.kernels import cpu, layout
from preact_kernels.kernels.layout import CHANNELS_LAST

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

# Whole squares of every vector size; parts of them, and several tasks; volumes; one channel or
# pixel; no images; and a small image, which PyTorch converts.
SHAPES = [
    (16, 64, 8, 8),
    (2, 130, 23, 25),
    (9, 17, 25, 19),
    (20, 17, 9, 8, 7),
    (9, 1, 100, 100),
    (100, 777, 1, 1),
    (0, 16, 4, 4),
    (3, 17, 5, 9),
]
LARGE = (2, 32, 32, 32)


class Transposed(TorchDispatchMode):
    """Lists the dtypes of the tensors that the library converts."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.preact_kernels_cpu.transpose.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_is_kept(shape):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        limits = torch.iinfo(word)
        x = torch.randint(limits.min, limits.max, shape, dtype=word).view(dtype)
        expected = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        for t in (x, expected, x.transpose(0, -1).contiguous().transpose(0, -1)):
            y, back, plain = layout.nhwc(t), layout.nchw(t), layout.with_plain_strides(t)
            assert y.is_contiguous(memory_format=CHANNELS_LAST[x.dim()]) and back.is_contiguous()
            assert plain.stride() == x.stride()
            for result in (y, back, plain):
                assert torch.equal(result.view(word), x.view(word))


def test_sequences():
    x = torch.randn(4, 128, 150)
    t = x.mT.contiguous().mT
    with Transposed() as transposed:
        found = layout.nchw(t), layout.with_plain_strides(t), layout.dense(x).squeeze(2)
    assert len(transposed.dtypes) == 3
    assert [y.stride() for y in found] == [x.stride(), x.stride(), t.stride()]
    assert all(torch.equal(y, x) for y in found)


def test_the_library_converts_large_images_of_two_and_four_bytes():
    single = [torch.float32, torch.bfloat16, torch.float16]
    with Transposed() as transposed:
        for dtype in (*single, torch.float64):
            layout.nchw(layout.nhwc(torch.randn(LARGE).to(dtype)))
        layout.nhwc(torch.ones(2, 32, 32, 31))
        layout.nhwc(torch.ones(2, 15, 64, 64))
        layout.nhwc(torch.ones(LARGE, dtype=torch.int8))
    assert transposed.dtypes == [dtype for dtype in single for _ in range(2)]


def test_what_has_a_derivative_is_converted_by_pytorch():
    x = torch.randn(LARGE, requires_grad=True)
    with torch.no_grad(), Transposed() as transposed:
        layout.nhwc(x)
    assert len(transposed.dtypes) == 1
    dy = torch.randn(LARGE)
    (dx,) = torch.autograd.grad(layout.nhwc(x * 1), x, dy)
    assert torch.equal(dx, dy)
    x = layout.nhwc(x.detach())
    images = torch.stack([x, x + 1])
    with Transposed() as transposed:
        assert torch.equal(torch.vmap(layout.nchw)(images), images)
        found = torch.func.grad(lambda x: (layout.nchw(x) * dy).sum())(x)
    assert torch.equal(found, dy) and not transposed.dtypes
    with forward_ad.dual_level():
        y = layout.nchw(forward_ad.make_dual(x, dy))
        assert torch.equal(forward_ad.unpack_dual(y).tangent, dy)


def test_subclasses_and_fake_tensors_are_converted_by_pytorch():
    class Own(torch.Tensor):
        pass

    x = torch.randn(LARGE)
    with Transposed() as transposed:
        assert type(layout.nhwc(x.as_subclass(Own))) is Own
        layout.nhwc(torch.nn.Parameter(x))
    assert not transposed.dtypes
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(layout.nhwc(x), FakeTensor)


def test_negative_values():
    x = torch.randn(LARGE)
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    assert torch.equal(layout.nhwc(negative.contiguous()), -x)
    assert torch.equal(layout.nhwc(torch._neg_view(x)), -x)


def test_results_are_no_views():
    x = torch.randn(LARGE)
    for y in (
        layout.nhwc(x),
        layout.nchw(layout.nhwc(x)),
        layout.with_plain_strides(layout.nhwc(x)),
    ):
        assert not y._is_view()
    net = pk.convert(nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)))
    with torch.no_grad(), Transposed() as transposed:
        y = net(x)
    assert transposed.dtypes
    y += torch.ones(1, requires_grad=True)
    y.sum().backward()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(net(x).sum(), x)
    assert not dx._is_view()


def test_native_calls_check_their_matrices():
    transpose = torch.ops.preact_kernels_cpu.transpose
    with pytest.raises(RuntimeError, match=r"contiguous matrices \[M, R, C\]"):
        transpose(torch.ones(2, 3, 4).mT)
    with pytest.raises(RuntimeError, match=r"contiguous matrices \[M, R, C\]"):
        transpose(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="2 or 4 bytes"):
        transpose(torch.ones(2, 3, 4, dtype=torch.float64))
