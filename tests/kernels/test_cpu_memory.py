"""Memory of the tensors that the CPU library returns."""

import ctypes
import subprocess
import sys

import pytest
import torch

from preact_kernels.kernels import cpu

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

# Every other tensor is freed, and as many are computed again: the heap need not grow.
FREED_AND_COMPUTED_AGAIN = """
import ctypes
import torch
from preact_kernels.kernels import cpu

names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info

cpu.load_error()
torch.empty(2**22)  # from here on, glibc takes what is smaller than this from its heap
x = torch.randn(4, 64, 32, 32).contiguous(memory_format=torch.channels_last)
others = *torch.ones(4, 64), 1e-5, "relu", 0.0, None
compute = lambda: torch.ops.preact_kernels_cpu.norm_act_forward(x, *others)
tensors, small = [], []
for _ in range(40):
    tensors.append(compute())
    small += [bytearray(size) for size in range(64)]
before = mallinfo2().arena
for _ in range(3):
    for i in range(0, 40, 2):
        tensors[i] = None
    for i in range(0, 40, 2):
        tensors[i] = compute()
        small += [bytearray(size) for size in range(64)]
print((mallinfo2().arena - before) // x.nbytes)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc")
def test_a_freed_tensor_leaves_room_for_one_of_its_size():
    command = [sys.executable, "-c", FREED_AND_COMPUTED_AGAIN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2  # tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 1, 1), (2, 1, 1, 3), (1, 1, 1, 1)])
@pytest.mark.covering(1)
def test_results_are_aligned_and_dense(shape, dtype):
    x = torch.randn(shape).to(dtype, memory_format=torch.channels_last)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    vectors = torch.ones(4, shape[1], dtype=statistics)
    y = torch.ops.preact_kernels_cpu.norm_act_forward(x, *vectors, 1e-5, "relu", 0.0, None)
    expected = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    assert y.stride() == expected.stride()
    assert y.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert y.data_ptr() % 64 == 0


@pytest.mark.parametrize("images", [32, 64])  # 2**63 bytes, and 2**64, which overflow to 0
def test_a_result_of_more_bytes_than_can_be_counted_is_refused(images):
    x = torch.randn(images, 16, 1, 1).to(memory_format=torch.channels_last)
    weight = torch.ones(1).expand(2**56, 16, 1, 1)
    of_conv = (weight, [1, 1], None, None, False, torch.float32)
    with pytest.raises(RuntimeError, match=r"^CPU out of memory\. Tried to allocate 2\*\*63 bytes"):
        torch.ops.preact_kernels_cpu.norm_act_conv_forward(
            x, *torch.ones(4, 16), 1e-5, "relu", 0.0, *of_conv
        )
