"""A residual block equals the formula of the paper, on every backend."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from tests.cases import in_dtype, random_block
from tests.oracle import assert_same_bits, check, plain_copy, same_bits

BLOCKS = {
    "basic": ("basic", 16, 16),
    "basic_projected": ("basic", 10, 17),
    "basic_strided": ("basic", 16, 32, 2),
    "bottleneck": ("bottleneck", 64, 16),
    "bottleneck_projected": ("bottleneck", 16, 16),
    "bottleneck_strided": ("bottleneck", 12, 5, 2),
    "bottleneck_strided_equal_width": ("bottleneck", 32, 8, 2),
    "resnext": ("bottleneck", 48, 16, 1, 4, 32),
}
every_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
both_modes = pytest.mark.parametrize("training", [True, False])


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.covering(1)
@every_block
@both_modes
def test_equals_its_children_called_in_turn(block, training, training_dtype):
    module = in_dtype(random_block(*block), training_dtype).train(training)
    # In bfloat16 some pre-activations round to the other side of zero, in eager too, and pass or
    # stop a gradient each. It takes many problems to have the usual share of them in both.
    count = 8 if training_dtype == torch.bfloat16 else 3
    inputs = [{"x": torch.randn(3, block[1], 7, 6).to(training_dtype)} for _ in range(count)]
    check(module, plain_copy(module), inputs)


def written_out_block(block, x):
    """The residual block of the paper, from the tensors of `block`."""
    h = shortcut = x
    for index in range(1, 4 if hasattr(block, "conv3") else 3):
        bn, conv = getattr(block, f"bn{index}"), getattr(block, f"conv{index}")
        norm = (bn.running_mean, bn.running_var, bn.weight, bn.bias)
        a = F.relu(F.batch_norm(h, *norm, bn.training, bn.momentum, bn.eps))
        if index == 1 and hasattr(block, "shortcut"):
            shortcut = F.conv2d(a, block.shortcut.weight, None, block.shortcut.stride)
        h = F.conv2d(a, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return shortcut + h


@pytest.mark.covering(1)
@every_block
@both_modes
def test_children_called_in_turn_are_the_formula_of_the_paper(block, training):
    module = random_block(*block).train(training)
    formula = plain_copy(module)
    formula.forward = lambda x: written_out_block(formula, x)
    x = torch.randn(3, block[1], 7, 6)
    with torch.no_grad():
        assert same_bits(plain_copy(module)(x), formula(x))


@pytest.mark.backends("cpu")
def test_stride_on_conv1_as_in_the_released_network(backend):
    module = random_block("bottleneck", 16, 8, 2, stride_on="conv1")
    assert (module.conv1.stride, module.conv2.stride) == ((2, 2), (1, 1))
    check(module, plain_copy(module), {"x": torch.randn(3, 16, 7, 6)})


@pytest.mark.covering(1)
@pytest.mark.backends("cpu")
@pytest.mark.parametrize("shape", [(0, 16, 7, 6), (4, 16, 1, 1), (1, 16, 1, 3), (5, 16, 2, 2)])
@pytest.mark.parametrize("stride", [1, 2])
@both_modes
def test_tiny_images_and_an_empty_batch(shape, stride, training, backend):
    module = random_block("basic", 16, 16, stride).train(training)
    check(module, plain_copy(module), {"x": torch.randn(shape)})


@pytest.mark.covering(1)
@pytest.mark.backends("cpu")
@pytest.mark.parametrize(
    ("name", "child"),
    [
        ("bn2", lambda: nn.BatchNorm2d(16, affine=False)),
        ("bn2", lambda: nn.BatchNorm2d(16, track_running_stats=False)),
        ("bn2", lambda: nn.BatchNorm2d(16, momentum=None)),
        ("bn2", lambda: nn.BatchNorm2d(16, eps=0.1, momentum=1.0)),
        ("bn2", lambda: nn.GroupNorm(4, 16)),
        ("bn2", lambda: nn.Identity()),
        ("conv2", lambda: nn.Conv2d(16, 16, 3, padding=1, bias=True)),
        ("conv2", lambda: nn.Conv2d(16, 16, 3, padding="same", bias=False)),
        ("conv2", lambda: nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", bias=False)),
        ("conv2", lambda: nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=2, bias=False)),
    ],
)
@both_modes
def test_others_may_take_the_place_of_a_child(name, child, training, backend):
    module = random_block("basic", 16, 16)
    setattr(module, name, child())
    module.train(training)
    check(module, plain_copy(module), {"x": torch.randn(3, 16, 7, 6)})


def test_blocks_have_the_keys_of_the_paper_and_the_values_of_a_seed():
    kinds = {"basic": pk.PreActBasicBlock, "bottleneck": pk.PreActBottleneck}
    for name, (kind, *args) in BLOCKS.items():
        modules = []
        for _ in range(2):
            torch.manual_seed(1)
            modules.append(kinds[kind](*args))
        assert_same_bits(modules[0].state_dict(), plain_copy(modules[1]).state_dict())
        keys = [key.split(".")[0] for key in modules[0].state_dict()]
        units = range(1, 3 if kind == "basic" else 4)
        expected = [child for i in units for child in (f"bn{i}", f"conv{i}")]
        has_shortcut = args[0] != args[1] * modules[0].expansion or args[2:3] == [2]
        assert list(dict.fromkeys(keys)) == expected + ["shortcut"] * has_shortcut, name
