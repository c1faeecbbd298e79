"""Masks of dropout: the CPU kernels against PyTorch's operations."""

import pytest
import torch

from preact_kernels.kernels import cpu, dropout

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
# Parts of a byte, of a vector and of a block, and several tasks.
COUNTS = 1, 8, 63, 77, 128, 3 * 16 * 1024 + 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_masks_of_any_length(count, dtype):
    kernels = cpu.kernels()
    drawn = torch.empty(count, dtype=dtype).bernoulli_(0.6)
    mask = dropout.Mask(kernels.dropout_bits(drawn), 1 / 0.6)
    kept = drawn.bool().tolist()
    packed = [sum(k << i for i, k in enumerate(kept[at : at + 8])) for at in range(0, count, 8)]
    assert mask.bits.tolist() == packed
    values = torch.randn(1, count, 1, 1, dtype=dtype)
    values.view(-1)[:: count // 2 + 1] = torch.inf  # infinite times 0 is NaN
    expected = values * (drawn * torch.tensor(1 / 0.6, dtype=dtype)).view_as(values)
    found = kernels.dropout(values, mask)
    assert found is values
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_mask_of_another_length_is_refused():
    values = torch.ones(1, 17, 1, 1)
    with pytest.raises(RuntimeError, match=r"bits: expected shape \[3\], got \[2\]"):
        cpu.kernels().dropout(values, dropout.Mask(torch.zeros(2, dtype=torch.uint8), 2.0))
    assert values.sum() == 17
