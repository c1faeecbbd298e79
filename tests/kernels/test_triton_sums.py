"""Sums over programs in the Triton kernels: exact accumulators and statistics."""

import itertools
import math

import pytest
import torch

import preact_kernels as pk
from tests.cases import device_of

if "triton" not in pk.available_backends():
    pytest.skip("neither a GPU nor the interpreter of Triton", allow_module_level=True)

import triton
import triton.language as tl

from preact_kernels.kernels import reference
from preact_kernels.kernels import triton as backend
from preact_kernels.kernels.triton import reduction

kernels = backend.kernels()


@pytest.fixture(autouse=True)
def on_device(poisoned_memory):
    with torch.device(device_of("triton")):
        yield


@triton.jit
def sum_exactly_kernel(values, sums, results, COUNT: tl.constexpr):
    """Adds a row of float64 `values [programs, 2, COUNT]`, or reads the sums if there are none."""
    channel = tl.arange(0, 16)
    is_channel = channel < COUNT
    if results is None:
        row = values + tl.program_id(0) * 2 * COUNT + channel
        for i in tl.static_range(2):
            value = tl.load(row + i * COUNT, mask=is_channel, other=0.0)
            reduction.add_exact(sums + i * 6 * COUNT, value, channel, is_channel, COUNT)
    else:
        for i in tl.static_range(2):
            value = reduction.load_exact(sums + i * 6 * COUNT, channel, is_channel, COUNT)
            tl.store(results + i * COUNT + channel, value, mask=is_channel)


def exact_sums(values):
    """The sums over the first axis, and their accumulators."""
    sums = reduction.new_sums(values, values.shape[2])
    sum_exactly_kernel[(len(values),)](values, sums, None, values.shape[2])
    results = torch.empty_like(values[0])
    sum_exactly_kernel[(1,)](values, sums, results, values.shape[2])
    return results, sums


def test_exact_sums_do_not_depend_on_the_order_of_programs():
    exponents = torch.randint(-60, 120, (50, 2, 13), dtype=torch.float64)
    values = torch.randn(50, 2, 13, dtype=torch.float64) * 2.0**exponents
    values = torch.cat([values, -values[:30]])  # the sum is far smaller than its terms
    expected, words = exact_sums(values)
    found, other_words = exact_sums(values[torch.randperm(80)])
    assert torch.equal(words, other_words)
    assert torch.equal(found, expected)
    for index in itertools.product(range(2), range(13)):
        truth = math.fsum(values[(slice(None), *index)].tolist())
        assert abs(found[index].item() - truth) <= 2**-52 * abs(truth)


def test_a_value_of_any_size_is_cut_off_below_2_to_the_minus_96():
    for exponents in torch.arange(-117, 143, 5, dtype=torch.float64).split(26):
        values = (torch.rand(len(exponents), dtype=torch.float64) + 1) * 2.0**exponents
        values = (values * (-1.0) ** exponents).view(1, 2, 13)
        found, _ = exact_sums(values)
        assert torch.equal(found, (values[0] * 2.0**96).trunc() * 2.0**-96)


@triton.jit(do_not_specialize=["count"])
def divide_kernel(totals, quotients, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    inverse = reduction.reciprocal(count)
    tl.store(quotients + at, reduction.divided(tl.load(totals + at), count, inverse))


@pytest.mark.parametrize("count", [1, 3, 49, 1000, 2**31 - 1])
def test_sums_are_divided_by_a_count(count):
    totals = torch.randn(256, dtype=torch.float64) * 2.0 ** torch.randint(-90, 140, (256,))
    totals[:4] = torch.tensor([math.inf, -math.inf, math.nan, 0])
    quotients = torch.empty_like(totals)
    divide_kernel[(1,)](totals, quotients, count, 256)
    rtol = (
        0 if device_of("triton") == "cuda" else 2.0**-51
    )  # the interpreter rounds products in fma
    truth = totals / torch.full_like(totals, count)  # a GPU multiplies by 1 / count for a number
    torch.testing.assert_close(quotients, truth, rtol=rtol, atol=0, equal_nan=True)


def test_exact_sums_of_values_of_one_size():
    largest = 2.0**143 - 2.0**90
    values = torch.zeros(100, 2, 5, dtype=torch.float64)
    values[:, 0, 0] = largest
    values[:, 0, 1] = -largest
    values[:99, 0, 2] = 2.0**96 - 2.0**48  # 99 times 48 ones in a word, which float64 does not hold
    values[99, 0, 2] = -99 * 2.0**96
    values[:, 0, 3] = 2.0**-96
    values[:, 0, 4] = -(2.0**-90)
    found, _ = exact_sums(values)
    for channel in range(5):
        assert found[0, channel].item() == math.fsum(values[:, 0, channel].tolist())


def test_exact_sums_of_infinities_and_nan():
    values = torch.ones(3, 2, 16, dtype=torch.float64)
    inf, nan = torch.inf, torch.nan
    cases = ((inf, 1, 1), (1, -inf, 1), (inf, -inf, 1), (nan, 1, inf), (2e43, 1, 1), (-1e43, 1, 1))
    for channel, case in enumerate(cases):
        values[:, 0, channel] = torch.tensor(case, dtype=torch.float64)
    found, _ = exact_sums(values)
    expected = [inf, -inf, nan, nan, inf, -1e43]
    torch.testing.assert_close(found[0, :6].tolist(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[0, 6:], torch.full((10,), 3.0, dtype=torch.float64))


def test_a_first_tile_far_from_the_others_leaves_the_statistics_right():
    x = torch.randn(8, 16, 32, 32)
    x[0] += 1000  # the pivot is the mean of these
    x = x.contiguous(memory_format=torch.channels_last)
    mean, var = kernels.bn_stats(x)
    truth = reference.bn_stats(x.double())
    torch.testing.assert_close(mean.double(), truth.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(var.double(), truth.var, rtol=1e-6, atol=0)


@triton.jit
def moments_kernel(x, sums, pixels, FOLDED: tl.constexpr):
    """Adds the moments of x `[pixels, 16]` to accumulators."""
    channel = tl.arange(0, 16)
    moments = reduction.empty_moments(16)
    tiles = (pixels + 15) // 16
    begin, end = reduction.next_piece(moments, tiles)
    while begin < tiles:
        moments = reduction.begin_piece(moments, 16, 16, FOLDED)
        for tile in tl.range(begin, end):
            pixel = tile * 16 + tl.arange(0, 16)
            is_pixel = pixel < pixels
            at = pixel[:, None] * 16 + channel[None, :]
            value = tl.load(x + at, mask=is_pixel[:, None], other=0)
            moments = reduction.add_tile(moments, value, is_pixel, pixels - tile * 16)
        moments = reduction.end_piece(moments)
        begin, end = reduction.next_piece(moments, tiles)
    reduction.add_moments(moments, pixels, 16, sums, channel, channel < 16, 16)


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_first_tile_far_from_all_later_tiles_of_a_program_costs_no_accuracy(is_folded):
    pixels = 2000 * 16 + 5
    x = torch.randn(pixels, 16)
    x[:16] += 100
    sums = reduction.new_sums(x, 16)
    moments_kernel[(1,)](x, sums, pixels, is_folded)
    mean, var = reduction.finished_statistics(sums, pixels)
    truth = torch.var_mean(x.double(), 0, correction=0)
    torch.testing.assert_close(var[0].double(), truth[0], rtol=5e-6, atol=0)
    torch.testing.assert_close(mean[0].double(), truth[1], rtol=0, atol=2e-7)
