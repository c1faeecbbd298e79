"""Conversions between NCHW and NHWC by the CPU library."""

from types import SimpleNamespace

import pytest
import torch

from preact_kernels.kernels import cpu
from preact_kernels.kernels.layout import CHANNELS_LAST

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

# Whole squares of every vector size; parts of them, and several tasks; volumes; one channel or
# pixel; no images; and a small image, which PyTorch converts.
SHAPES = [
    (16, 64, 8, 8),
    (2, 130, 23, 25),
    (9, 17, 25, 19),
    (20, 7, 9, 8, 7),
    (9, 1, 100, 100),
    (100, 777, 1, 1),
    (0, 16, 4, 4),
    (3, 17, 5, 9),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_is_kept(shape):
    kernels = cpu.kernels()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        limits = torch.iinfo(word)
        x = torch.randint(limits.min, limits.max, shape, dtype=word).view(dtype)
        expected = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        for t in (x, expected, x.transpose(0, -1).contiguous().transpose(0, -1)):
            y, back = kernels.nhwc(t), kernels.nchw(t)
            assert y.is_contiguous(memory_format=CHANNELS_LAST[x.dim()]) and back.is_contiguous()
            assert torch.equal(y.view(word), x.view(word))
            assert torch.equal(back.view(word), x.view(word))


def test_the_library_converts_large_images_of_two_and_four_bytes():
    converted = []
    transpose = torch.ops.preact_kernels_cpu.transpose.default

    def counted(x):
        converted.append(x.dtype)
        return transpose(x)

    kernels = cpu.CPUKernels(SimpleNamespace(transpose=SimpleNamespace(default=counted)))
    single = [torch.float32, torch.bfloat16, torch.float16]
    for dtype in (*single, torch.float64):
        kernels.nchw(kernels.nhwc(torch.randn(2, 32, 32, 32).to(dtype)))
    kernels.nhwc(torch.ones(2, 32, 32, 31))
    kernels.nhwc(torch.ones(2, 32, 32, 32, dtype=torch.int8))
    assert converted == [dtype for dtype in single for _ in range(2)]


def test_native_calls_check_their_matrices():
    transpose = torch.ops.preact_kernels_cpu.transpose
    with pytest.raises(RuntimeError, match=r"contiguous matrices \[M, R, C\]"):
        transpose(torch.ones(2, 3, 4).mT)
    with pytest.raises(RuntimeError, match=r"contiguous matrices \[M, R, C\]"):
        transpose(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="2 or 4 bytes"):
        transpose(torch.ones(2, 3, 4, dtype=torch.float64))
