"""The tests' own tools tell apart what they are there to tell apart."""

import itertools

import pytest
import torch

from tests.cases import covering
from tests.oracle import assert_same_bits, same_bits

NAN = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(1), -torch.zeros(1)),
        (NAN, OTHER_NAN),
        (torch.ones(1), torch.ones(1).double()),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(1), torch.ones(1) + 2**-23),
    ],
    ids=["signs_of_zero", "payloads_of_nan", "dtypes", "shapes", "last_bits"],
)
def test_other_bits_are_not_the_same(a, b):
    assert not same_bits(a, b)
    assert same_bits(a, a.clone())
    with pytest.raises(AssertionError, match="other bits in y"):
        assert_same_bits({"y": a}, {"y": b})


def test_strides_are_no_bits():
    t = torch.randn(2, 3, 4, 5)
    assert same_bits(t, t.contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_covering_cases_have_every_combination(strength):
    sizes = {"a": 5, "b": 3, "c": 2}
    product = list(itertools.product(*map(range, sizes.values())))
    cases = [dict(zip(sizes, values, strict=True)) for values in product]
    chosen = [cases[i] for i in covering(cases, strength)]
    for names in itertools.combinations(sizes, strength):
        found = {tuple(case[n] for n in names) for case in chosen}
        assert found == set(itertools.product(*(range(sizes[n]) for n in names)))
    assert len(chosen) == [5, 15, 30][strength - 1]
