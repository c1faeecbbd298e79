"""What is kept for the backward, to the byte."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import preact_kernels as pk
from tests.cases import in_dtype, random_stage, randomised
from tests.oracle import assert_same_bits

pytestmark = pytest.mark.backends("cpu")  # what is saved is chosen above the backends

FLOAT = 4  # bytes


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


def unit():
    return pk.BNReLUConv2d(16, 24, 3, padding=1)


# A module, the channels of its input, and the elements and statistics that it keeps of 2 images of
# 8x6 pixels.
KEPT = {
    "bn_relu": (lambda: pk.BNReLU2d(16), 16, 16 * 96, 16),
    "bn_relu_conv": (unit, 16, 16 * 96, 16),
    "evaluation": (lambda: unit().eval(), 16, 16 * 96, 0),
    "half_precision": (lambda: in_dtype(unit(), torch.bfloat16), 16, 16 * 96, 16),
    "float64": (lambda: unit().double(), 16, 16 * 96, 16),
    "bottleneck": (
        lambda: pk.PreActBottleneck(64, 16, stride=2),
        *(64, (64 + 16) * 96 + 16 * 24, 64 + 16 + 16),
    ),
}


@pytest.mark.parametrize(("build", "channels", "elements", "statistics"), KEPT.values(), ids=KEPT)
def test_units_keep_their_inputs_and_the_statistics_of_their_batch(
    build, channels, elements, statistics, backend
):
    module = build()
    dtype = next((p.dtype for p in module.parameters() if p.dim() == 4), torch.float32)
    x = channels_last(torch.randn(2, channels, 8, 6).to(dtype))
    expected = elements * dtype.itemsize + 2 * statistics * max(FLOAT, dtype.itemsize)
    assert pk.saved_bytes(module, x) == expected
    with torch.no_grad():
        assert pk.saved_bytes(module, x) == expected


@pytest.mark.parametrize("size", [1, 5])  # a fused convolution, and PyTorch's
def test_a_float32_weight_is_kept_rounded_unless_kernels_read_it(size, backend):
    reads_float32 = size == 1 and backend in ("triton", "cuda")
    unit = in_dtype(pk.BNReLUConv2d(16, 16, size), torch.float32)
    unit.bn.track_running_stats = False
    unit.bn.running_mean = unit.bn.running_var = None
    x = channels_last(torch.randn(2, 16, 8, 6).bfloat16())
    statistics = 2 * 16 * FLOAT
    rounded = 0 if reads_float32 else 16 * 16 * size**2
    assert pk.saved_bytes(unit, x) == (x.numel() + rounded) * 2 + statistics
    y = unit(x)
    with torch.no_grad():
        unit.conv.weight.add_(1)
    refusal = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with refusal if reads_float32 else nullcontext():
        y.sum().backward()  # which autocast allows where it rounds a copy


def test_modes_keep_inner_tensors_and_the_inputs_of_some_blocks(backend):
    stage = pk.PreActStage([pk.PreActBottleneck(64, 16) for _ in range(18)], memory="checkpoint")
    x = channels_last(torch.randn(2, 64, 4, 4))
    statistics = 18 * 2 * (64 + 16 + 16)
    inner = 18 * 2 * x.numel() // 4
    for segments, count in ((None, 3), (1, 1), (6, 6)):
        stage.segments = segments
        assert pk.saved_bytes(stage, x) == (count * x.numel() + statistics) * FLOAT
    stage.memory = "store"
    assert pk.saved_bytes(stage, x) == (18 * x.numel() + inner + statistics) * FLOAT
    stage.memory = "rebuild"  # the first input and the output
    assert pk.saved_bytes(stage, x) == (2 * x.numel() + inner + statistics) * FLOAT
    stage.anchor_every = 8
    assert pk.saved_bytes(stage, x) == ((2 + 2) * x.numel() + inner + statistics) * FLOAT
    stage.anchor_every = None  # in bfloat16 the inputs of blocks 2 and 10 too
    kept = ((2 + 2) * x.numel() + inner) * 2 + statistics * FLOAT
    assert pk.saved_bytes(in_dtype(stage, torch.bfloat16), x.bfloat16()) == kept


@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_frozen_blocks_ahead_of_the_first_trained_one_keep_nothing(memory, backend):
    stage = pk.PreActStage([pk.PreActBottleneck(64, 16) for _ in range(8)], memory)
    x = channels_last(torch.randn(2, 64, 8, 8))
    stage[6:].eval()  # keeps no statistics
    alone = pk.saved_bytes(pk.PreActStage(stage[6:], memory).eval(), x)
    stage[:6].requires_grad_(False)
    assert pk.saved_bytes(stage, x) == alone > 0
    stage.requires_grad_(False)
    assert pk.saved_bytes(stage, x) == 0
    stage[7].conv2.requires_grad_(True)
    kept = pk.saved_bytes(stage, x)
    assert kept == pk.saved_bytes(stage[7:], x)
    inputs_of_the_last_units = 2 * x.numel() // 4
    assert kept == FLOAT * (x.numel() if memory == "checkpoint" else inputs_of_the_last_units)


@pytest.mark.parametrize(
    ("depth", "rebuild", "with_anchors", "checkpoint"),
    [(326, 0.19, 0.23, 0.04), pytest.param(1001, 0.18, 0.22, 0.03, marks=pytest.mark.slow)],
)
def test_many_layers_keep_a_small_share_of_eager(depth, rebuild, with_anchors, checkpoint):
    x = torch.randn(16, 3, 32, 32, device="meta")
    with torch.device("meta"):
        ours, eager = (pk.preact_resnet(depth, fused=fused) for fused in (True, False))
    for dtype, shares in (
        (torch.float32, {"rebuild": rebuild, "checkpoint": checkpoint}),
        (torch.bfloat16, {"rebuild": with_anchors, "checkpoint": checkpoint}),
    ):
        images, expected = channels_last(x.to(dtype)), in_dtype(eager, dtype)
        expected = pk.saved_bytes(expected.to(memory_format=torch.channels_last), images)
        for memory, share in shares.items():
            for stage in in_dtype(ours, dtype).stages:
                stage.memory = memory
            assert pk.saved_bytes(ours, images) <= share * expected, (dtype, memory)


def test_a_storage_counts_once_and_parameters_do_not():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return (x @ self.weight) * (x.t() @ self.weight)

    x = torch.randn(4, 4)
    products = 2 * 16 * FLOAT
    assert pk.saved_bytes(Twice(), x) == products + 16 * FLOAT


@pytest.mark.parametrize("training", [True, False])
def test_buffers_modes_gradients_and_random_state_are_left_as_they_were(training, backend):
    stage = randomised(random_stage()).train(training)
    model = nn.Sequential(stage, nn.Dropout())
    before = {n: t.clone() for n, t in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    pk.saved_bytes(model, torch.ones(2, 10, 8, 6).to(stage[0].conv1.weight))
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert_same_bits(dict(model.state_dict()), before)
    assert all(p.grad is None for p in model.parameters())
    assert stage.training == training


def test_buffers_are_put_back_after_a_forward_that_fails():
    class Fails(nn.Module):
        def forward(self, x):
            raise MemoryError

    model = nn.Sequential(pk.BNReLU2d(10), Fails())
    with pytest.raises(MemoryError):
        pk.saved_bytes(model, torch.randn(2, 10, 8, 6))
    assert model[0].bn.num_batches_tracked == 0
    assert torch.equal(model[0].bn.running_mean, torch.zeros(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((abs, torch.ones(1)), "model: expected an nn.Module, got builtin_function_or_method"),
        ((nn.ReLU(), [1.0]), "x: expected a torch.Tensor, got list"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        pk.saved_bytes(*arguments)
