"""Matrix instructions and conversions of `csrc/cuda/device.cuh` against PyTorch.

With a GPU the wrappers are compiled by nvcc and run on it, else their emulation runs on the host.
"""

import ctypes
import re
import shutil

import pytest
import torch

from tests.cuda_on_host import build
from tests.oracle import same_bits

IS_ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_ON_GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # in the order of `Type`
WRAPPERS = (build.ROOT / "csrc" / "cuda" / "device.cuh").read_text()
needs_nvcc = pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not installed")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def fragments():
    if IS_ON_GPU:
        if build.nvcc() is None:
            pytest.skip("nvcc is not installed")
        path = build.build_for_gpu("fragments", torch.cuda.get_device_capability())
    else:
        if shutil.which(build.CXX[0]) is None:
            pytest.skip(f"no C++ compiler: {build.CXX[0]} not found")
        path = build.build("fragments")
    library = ctypes.CDLL(str(path))
    for name in ("product", "conversion"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def product(fragments, a, b, d, a_by_rows=False, b_by_rows=False, is_rounded=True):
    """`d + a @ b.t()` by matrix instructions, and the message."""
    stored = [a.t() if a_by_rows else a, b.t() if b_by_rows else b]
    stored = [t.contiguous().to(DEVICE) for t in stored]
    result = d.clone().to(DEVICE)
    torch.cuda.synchronize() if IS_ON_GPU else None
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (*stored, result))
    kind = DTYPES.index(a.dtype)
    message = fragments.product(kind, *pointers, a_by_rows, b_by_rows, is_rounded).decode()
    return result.cpu(), message


def depth_of(dtype):
    return 32 // dtype.itemsize


def as_tf32(t):
    """To nearest, ties away from zero, of what is no NaN."""
    bits = t.contiguous().view(torch.int32)
    is_infinite = (bits & 0x7FFFFFFF) == 0x7F800000
    return torch.where(is_infinite, bits, (bits + 0x1000) & ~0x1FFF).view(torch.float32)


def exact_problems(dtype, depth):
    """`a`, `b` and `d` whose product no order of a sum rounds: integers, and numbers selected."""
    a, b = (torch.randint(-8, 9, (16, depth)).to(dtype) for _ in range(2))
    yield a, b, torch.randint(-8, 9, (16, 16)).float()
    selection = torch.eye(16, depth)[torch.randperm(16)].to(dtype)
    numbers = torch.randn(16, depth).to(dtype)
    yield selection, numbers, torch.zeros(16, 16)
    yield numbers, selection, torch.zeros(16, 16)


@every_dtype
@pytest.mark.parametrize("b_by_rows", [False, True])
@pytest.mark.parametrize("a_by_rows", [False, True])
def test_matrix_instructions_equal_a_matrix_product(fragments, dtype, a_by_rows, b_by_rows):
    if dtype == torch.float32 and (a_by_rows or b_by_rows):
        pytest.skip("ldmatrix transposes elements of 16 bits")
    for a, b, d in exact_problems(dtype, depth_of(dtype)):
        found, message = product(fragments, a, b, d, a_by_rows, b_by_rows)
        assert not message
        if dtype == torch.float32:
            a, b = as_tf32(a), as_tf32(b)
        expected = d.double() + a.double() @ b.double().t()
        assert torch.equal(found, expected.float())


# What is a NaN in float32, and infinity without the low 13 bits, which TF32 does not have.
LOW_NAN = 0x7F800001


@every_dtype
@pytest.mark.parametrize("operand", [0, 1])
def test_a_nan_or_an_infinity_stays_one(fragments, dtype, operand):
    values = {torch.float32: [LOW_NAN, LOW_NAN - 2**31, 0x7F800000], torch.bfloat16: [0x7F81]}
    for bits in values.get(dtype, [0x7C01]):
        given = [torch.ones(16, depth_of(dtype), dtype=dtype) for _ in range(2)]
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        given[operand].view(integers)[3, 2] = bits
        found, message = product(fragments, *given, torch.zeros(16, 16))
        assert not message
        expected = given[0].double() @ given[1].double().t()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.skipif(IS_ON_GPU, reason="on a GPU the low bits are cut")
@pytest.mark.parametrize("bits", [LOW_NAN, 0x3F800001])
def test_an_operand_that_was_not_rounded_to_tf32_is_an_error(fragments, bits):
    b = torch.ones(16, 8)
    b.view(torch.int32)[5, 7] = bits
    message = product(fragments, torch.ones(16, 8), b, torch.zeros(16, 16), is_rounded=False)[1]
    assert message.startswith("product: mma_m16n8k8_tf32: an operand that to_tf32 did not round")


def special_numbers():
    """Of float32: NaN, infinity, halfway between numbers of every type, overflow, subnormal."""
    integers = [0x7FC00000, LOW_NAN, 0x7FFFFFFF, 0x7F800000]
    for end in (0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x1FFFF):
        integers += [high + end for high in (0x3F800000, 0x42280000, 0x7F7E0000, 0x33000000, 0)]
    numbers = torch.tensor(integers, dtype=torch.int32).view(torch.float32)
    numbers = torch.cat([numbers, -numbers, torch.tensor([65504.0, 65519.0, 65520.0, 6e-8, 2e-8])])
    return torch.cat([numbers, torch.randn(-len(numbers) % 64 + 64)])


@every_dtype
def test_conversions_round_as_pytorch_does(fragments, dtype):
    numbers = special_numbers().view(-1, 64).repeat_interleave(2, 0).flatten()  # in pairs, singly
    given, found = numbers.to(DEVICE), torch.empty_like(numbers, device=DEVICE)
    torch.cuda.synchronize() if IS_ON_GPU else None
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (given, found))
    assert not fragments.conversion(DTYPES.index(dtype), *pointers, len(numbers) // 64)
    found = found.cpu()
    if dtype == torch.float32:
        found = (found.view(torch.int32) & ~0x1FFF).view(dtype)  # what matrix instructions read
    expected = as_tf32(numbers) if dtype == torch.float32 else numbers.to(dtype).float()
    is_nan = numbers.isnan()
    assert found[is_nan].isnan().all()
    assert same_bits(found[~is_nan], expected[~is_nan])


@needs_nvcc
def test_nvcc_compiles_what_a_gpu_runs():
    assert build.build_for_gpu("fragments", (9, 0)).exists()


def test_every_matrix_instruction_is_tested():
    wrappers = set(re.findall(r"inline void ((?:ldmatrix|mma)\w*)\(", WRAPPERS))
    assert len(wrappers) >= 4
    tested = (build.HERE / "fragments.cpp").read_text()
    assert not [name for name in wrappers if not re.search(rf"\b{name}\(", tested)]
