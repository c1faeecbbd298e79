"""Matrix instructions, conversions, copies, activations and exact sums, one by one.

With a GPU they are compiled by nvcc and run on it, else they run on the host, the instructions by
their emulation.
"""

import ctypes
import itertools
import math
import shutil

import pytest
import torch

from preact_kernels.activations import ACTIVATIONS, Activation, activate, activation_gradient
from testbed import cuda_programs
from testbed.cuda_on_host import build
from tests.kernels.cuda_conv_cases import LOW_NAN, as_tf32
from tests.oracle import same_bits

IS_ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_ON_GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # in the order of `Type`
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def fragments():
    """The library for the device of the tests."""
    if IS_ON_GPU:
        if cuda_programs.nvcc() is None:
            pytest.skip("nvcc is not installed")
        path = build.build_for_gpu(torch.cuda.get_device_capability())
    else:
        if shutil.which(build.CXX[0]) is None:
            pytest.skip(f"no C++ compiler: {build.CXX[0]} not found")
        path = build.build("fragments")
    library = ctypes.CDLL(str(path))
    entries = "product", "conversion", "shuffle", "copy", "division", "activation", "exact_sums"
    for entry in entries:
        getattr(library, entry).restype = ctypes.c_char_p
    return library


def pointers(*tensors):
    """Their addresses, when all work on them is done."""
    if IS_ON_GPU:
        torch.cuda.synchronize()
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def product(fragments, a, b, d, a_by_rows=False, b_by_rows=False, is_rounded=True):
    """`d + a @ b.t()` by matrix instructions, and the message."""
    stored = [a.t() if a_by_rows else a, b.t() if b_by_rows else b]
    stored = [t.contiguous().to(DEVICE) for t in stored]
    result = d.clone().to(DEVICE)
    kind, flags = DTYPES.index(a.dtype), (a_by_rows, b_by_rows, is_rounded)
    message = fragments.product(kind, *pointers(*stored, result), *flags)
    return result.cpu(), message.decode()


def depth_of(dtype):
    return 32 // dtype.itemsize


def exact_problems(dtype, depth):
    """`a`, `b` and `d` whose product no order of a sum rounds: integers, and numbers selected."""
    a, b = (torch.randint(-8, 9, (16, depth)).to(dtype) for _ in range(2))
    yield a, b, torch.randint(-8, 9, (16, 16)).float()
    selection = torch.eye(16, depth)[torch.randperm(16)].to(dtype)
    numbers = torch.randn(16, depth).to(dtype)
    yield selection, numbers, torch.zeros(16, 16)
    yield numbers, selection, torch.zeros(16, 16)


@every_dtype
def test_matrix_instructions_equal_a_matrix_product(fragments, dtype):
    is_stored_by_rows = itertools.product([False, True], repeat=2)
    if dtype == torch.float32:  # ldmatrix transposes elements of 16 bits
        is_stored_by_rows = [(False, False)]
    for by_rows in is_stored_by_rows:
        for a, b, d in exact_problems(dtype, depth_of(dtype)):
            found, message = product(fragments, a, b, d, *by_rows)
            assert not message
            if dtype == torch.float32:
                a, b = as_tf32(a), as_tf32(b)
            expected = d.double() + a.double() @ b.double().t()
            assert torch.equal(found, expected.float()), by_rows


@every_dtype
def test_a_nan_or_an_infinity_stays_one(fragments, dtype):
    values = {torch.float32: [LOW_NAN, LOW_NAN - 2**31, 0x7F800000], torch.bfloat16: [0x7F81]}
    for bits, operand in itertools.product(values.get(dtype, [0x7C01]), range(2)):
        given = [torch.ones(16, depth_of(dtype), dtype=dtype) for _ in range(2)]
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        given[operand].view(integers)[3, 2] = bits
        found, message = product(fragments, *given, torch.zeros(16, 16))
        assert not message
        expected = given[0].double() @ given[1].double().t()
        assert torch.equal(found.isnan(), expected.isnan()), (bits, operand)
        assert torch.equal(found.isinf(), expected.isinf()), (bits, operand)


@pytest.mark.skipif(IS_ON_GPU, reason="on a GPU the low bits are cut")
@pytest.mark.parametrize("bits", [LOW_NAN, 0x3F800001])
def test_an_operand_that_was_not_rounded_to_tf32_is_an_error(fragments, bits):
    b = torch.ones(16, 8)
    b.view(torch.int32)[5, 7] = bits
    message = product(fragments, torch.ones(16, 8), b, torch.zeros(16, 16), is_rounded=False)[1]
    assert message.startswith("product: mma_m16n8k8_tf32: an operand that to_tf32 did not round")


def special_numbers():
    """float32: NaN, infinity, halfway between numbers of every type, overflow, subnormal."""
    integers = [0x7FC00000, LOW_NAN, 0x7FFFFFFF, 0x7F800000]
    for end in (0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x1FFFF):
        integers += [high + end for high in (0x3F800000, 0x42280000, 0x7F7E0000, 0x33000000, 0)]
    numbers = torch.tensor(integers, dtype=torch.int32).view(torch.float32)
    numbers = torch.cat([numbers, -numbers, torch.tensor([65504.0, 65519.0, 65520.0, 6e-8, 2e-8])])
    return torch.cat([numbers, torch.randn(-len(numbers) % 64 + 64)])


def converted(fragments, dtype, numbers, is_mask=False):
    """The numbers, rounded, in float32: 64 in pairs, the next 64 one by one, and so on."""
    given, found = numbers.to(DEVICE), torch.empty_like(numbers, device=DEVICE)
    blocks = len(numbers) // 64
    message = fragments.conversion(DTYPES.index(dtype), *pointers(given, found), blocks, is_mask)
    assert not message
    return found.cpu()


@every_dtype
def test_conversions_round_as_pytorch_does(fragments, dtype):
    numbers = special_numbers().view(-1, 64).repeat_interleave(2, 0).flatten()  # in pairs, singly
    found = converted(fragments, dtype, numbers)
    if dtype == torch.float32:
        found = (found.view(torch.int32) & ~0x1FFF).view(dtype)  # what matrix instructions read
    expected = as_tf32(numbers) if dtype == torch.float32 else numbers.to(dtype).float()
    is_nan = numbers.isnan()
    assert found[is_nan].isnan().all()
    assert same_bits(found[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_mask_is_of_what_is_not_zero(fragments, dtype):
    numbers = special_numbers()
    numbers = torch.cat([numbers, numbers.roll(1)]).view(-1, 64)  # in both halves of a pair
    pairs = torch.stack([numbers, torch.zeros_like(numbers)], 1)
    found = converted(fragments, dtype, pairs.flatten(), True).view_as(pairs)[:, 0]
    assert same_bits(found, (numbers.to(dtype) != 0).float())
    assert numbers.isnan().any() and (found == 0).any()


def test_a_lane_reads_the_value_of_another(fragments):
    values, lanes = torch.randn(32), torch.randint(32, (32,), dtype=torch.int32)
    given, found = [t.to(DEVICE) for t in (values, lanes)], torch.empty(32, device=DEVICE)
    assert not fragments.shuffle(*pointers(*given, found))
    assert same_bits(found.cpu(), values[lanes.long()])


def test_copies_land_at_their_waits_and_zeros_where_there_is_nothing(fragments):
    values = torch.randn(2, 32, 4)
    given, found = values.to(DEVICE), torch.empty_like(values, device=DEVICE)
    assert not fragments.copy(*pointers(given, found))
    values[:, ::5] = 0
    assert torch.equal(found.cpu(), values)


def exactly_summed(fragments, values):
    """The sums of `values` [count, channels] over the first dimension."""
    count, channels = values.shape
    words = torch.zeros(6, 2, channels, dtype=torch.int64, device=DEVICE)
    out = torch.full((2, channels), torch.nan, dtype=torch.float64, device=DEVICE)
    values = values.to(DEVICE)
    message = fragments.exact_sums(*pointers(words, values, out), count, channels)
    assert not message, message
    assert not out[0].any()  # nothing was added there
    return out[1].cpu()


def test_sums_are_exact_in_any_order(fragments):
    exponents = torch.tensor([-96, -80, -52, 0, 20, 60, 90]).repeat(3000, 1)
    exponents = torch.cat([exponents, torch.randint(-96, 91, (3000, 1))], 1)
    values = torch.randint(-(2**52), 2**52, (3000, 8)).double() * 2.0 ** exponents.double()
    values[1000:2000, :4] = -values[:1000, :4]  # which leaves the rest
    expected = [math.fsum(column) for column in values.t().tolist()]
    found = exactly_summed(fragments, values)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=2**-51, atol=0
    )
    assert same_bits(exactly_summed(fragments, values[torch.randperm(3000)]), found)


def test_what_is_left_of_large_sums_is_exact(fragments):
    large = 2.0**142
    columns = ([large, 1.0, -large], [large, 2.0**-60, -large], [-large, -3.0, large], [0.0] * 3)
    found = exactly_summed(fragments, torch.tensor(columns, dtype=torch.float64).t().contiguous())
    assert found.tolist() == [1.0, 2.0**-60, -3.0, 0.0]


def test_sums_of_what_is_not_finite_are_those_of_pytorch(fragments):
    inf, nan = math.inf, math.nan
    columns = [
        [1.0, inf, 2.0],
        [-inf, 1.0, -inf],
        [inf, -inf, 1.0],
        [nan, 1.0, inf],
        [1.0, nan, nan],
    ]
    values = torch.tensor(columns, dtype=torch.float64).t().contiguous()
    found = exactly_summed(fragments, values)
    torch.testing.assert_close(found, values.sum(0), equal_nan=True)
    many = torch.full((2000, 2), inf, dtype=torch.float64)
    many[:, 1] = nan
    found = exactly_summed(fragments, many)
    assert found[0] == inf and found[1].isnan()


@pytest.mark.skipif(cuda_programs.nvcc() is None, reason="nvcc is not installed")
def test_nvcc_compiles_what_a_gpu_runs():
    assert build.build_for_gpu((9, 0)).exists()


def test_division_is_exact(fragments):
    generator = torch.Generator().manual_seed(0)
    most = 2**31 - 1
    divisors = [*range(1, 40), 1023, 1024, 1025, 2**30 - 1, 2**30, 2**30 + 1, most]
    divisors += torch.randint(1, most, (40,), generator=generator).tolist()
    for divisor in divisors:
        multiples = torch.randint(1, most // divisor + 1, (30,), generator=generator) * divisor
        edges = torch.tensor([0, 1, divisor, most // divisor * divisor, most])
        n = torch.cat([multiples, edges, multiples - 1, edges[2:] - 1]).int().to(DEVICE)
        found = torch.empty_like(n)
        assert not fragments.division(divisor, *pointers(n, found), n.numel())
        assert found.tolist() == [i // divisor for i in n.tolist()], divisor


# The largest relative error of a float32 result: 1/128 of half a unit in the last place of float16,
# 1/256 of that of bfloat16, whose numbers reach exp(-88).
MOST_ERROR = {torch.float16: 2**-19, torch.bfloat16: 2**-17}


@pytest.mark.parametrize("dtype", MOST_ERROR, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_far_more_exact_than_half_precision(fragments, name, dtype):
    parameter = {"leaky_relu": 0.25, "elu": 1.5, "softplus": 2.0}.get(name, 0.0)
    every_number = torch.arange(-(2**15), 2**15).short().view(dtype).float()
    p = every_number[every_number.abs() < 1e18]  # beyond, PyTorch's formulas overflow in float32
    given, values, derivatives = (t.to(DEVICE) for t in (p, *torch.empty(2, len(p))))
    type_and_kind = DTYPES.index(dtype), list(ACTIVATIONS).index(name), ctypes.c_float(parameter)
    tensors = pointers(given, values, derivatives)
    assert not fragments.activation(*type_and_kind, *tensors, len(p))
    wide, activation = p.double(), Activation(name, parameter)
    exact = activate(wide, activation)
    slope = activation_gradient(torch.ones_like(wide), wide, activation)
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    allowed = MOST_ERROR[dtype] * exact.abs() + subnormal / 256
    if "gelu" in name:  # the formula in float64 is a difference of two numbers
        allowed += 2**-50 * wide.abs()
    assert ((values.cpu() - exact).abs() <= allowed).all()
    assert ((derivatives.cpu() - slope).abs() <= MOST_ERROR[dtype] * slope.abs().clamp(min=1)).all()
