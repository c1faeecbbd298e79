"""Under autocast: results in its dtype, statistics in float32, on every backend."""

from functools import partial

import pytest
import torch

import preact_kernels as pk
from tests.cases import (
    ConvCase,
    conv_inputs,
    device_of,
    plain_bn_relu,
    plain_bn_relu_conv2d,
    random_block,
    random_stage,
    randomised,
)
from tests.oracle import check, evaluate, plain_copy

pytestmark = pytest.mark.backends("cpu")  # most dtypes are chosen above the backends

CASE = ConvCase("typical", (6, 16, 6, 5), 32, padding=1, conv_bias=True, residual=True)
every_input = pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)


class Autocast(torch.nn.Module):
    """A module or function under bfloat16 autocast, and as it is for float64."""

    def __init__(self, module=None, function=None):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, **inputs):
        enabled = inputs["x"].dtype != torch.float64
        with torch.autocast(inputs["x"].device.type, torch.bfloat16, enabled=enabled):
            return (self.module or self.function)(**inputs)


def check_autocast(fused, plain, problems, **options):
    if isinstance(fused, torch.nn.Module):
        return check(Autocast(fused), Autocast(plain), problems, **options)
    return check(Autocast(function=fused), Autocast(function=plain), problems, **options)


@every_input
@pytest.mark.parametrize("training", [True, False])
def test_bn_relu_keeps_the_dtype_of_its_input(x_dtype, training, backend):
    names = ("x", "bn_weight", "bn_bias", "running_mean", "running_var")
    inputs = {n: t for n, t in conv_inputs(CASE).items() if n in names}
    inputs["x"] = inputs["x"].to(x_dtype)
    fused, plain = (partial(f, training=training) for f in (pk.bn_relu, plain_bn_relu))
    results = check_autocast(fused, plain, inputs)
    assert results["y"].dtype == x_dtype
    assert results["running_mean"].dtype == torch.float32


@pytest.mark.backends("cpu", "triton", "cuda")  # which take float32 weights, or do not
@pytest.mark.covering(2)
@every_input
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
def test_convolutions_run_in_the_autocast_dtype(x_dtype, residual, training, backend):
    problems = [conv_inputs(CASE) for _ in range(4)]
    for inputs in problems:
        inputs["x"] = inputs["x"].to(x_dtype)
        inputs["residual"] = None if residual is None else inputs["residual"].to(residual)
    arguments = {"training": training, **CASE.conv}
    fused, plain = (partial(f, **arguments) for f in (pk.bn_relu_conv2d, plain_bn_relu_conv2d))
    results = check_autocast(fused, plain, problems)
    assert results["y"].dtype == (residual or torch.bfloat16)
    assert results["running_var"].dtype == torch.float32
    assert results["dconv_weight"].dtype == torch.float32


@pytest.mark.backends("cpu", "triton", "cuda")
@pytest.mark.covering(1, cpu=2)
@every_input
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "block",
    [("basic", 16, 16), ("basic", 16, 32, 2), ("bottleneck", 32, 8), ("bottleneck", 12, 8, 2)],
    ids=lambda b: "-".join(map(str, b)),
)
def test_blocks_equal_the_plain_ones(block, training, x_dtype, backend):
    module = random_block(*block).train(training).to(device_of(backend))
    x = torch.randn(8, 3, block[1], 7, 6, device=device_of(backend)).to(x_dtype)
    problems = [{"x": images} for images in x]
    check_autocast(module, plain_copy(module), problems)


@pytest.mark.backends("cpu", "triton", "cuda")
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_a_stage_beside_a_float32_stream_equals_the_plain_one(memory, backend):
    """Some of its convolutions are fused, others are PyTorch's."""
    blocks = [random_block("basic", 16, 16), random_block("basic", 16, 32, 2)]
    stage = pk.PreActStage(blocks, memory, residual_dtype=torch.float32).to(device_of(backend))
    x = torch.randn(8, 3, 16, 7, 6, device=device_of(backend)).to(torch.bfloat16)
    problems = [{"x": images} for images in x]
    check_autocast(stage, plain_copy(stage), problems)


@every_input
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_a_stage_has_the_dtypes_of_the_plain_one(memory, x_dtype, backend):
    stage = Autocast(random_stage(memory=memory))
    inputs = {"x": torch.randn(3, 10, 7, 6).to(x_dtype)}
    results, expected = evaluate(stage, inputs), evaluate(plain_copy(stage), inputs)
    assert {n: t.dtype for n, t in results.items()} == {n: t.dtype for n, t in expected.items()}


def test_a_whole_network_trains_with_finite_gradients_in_float32(backend):
    network = Autocast(pk.preact_resnet(29))
    results = evaluate(network, {"x": torch.randn(4, 3, 16, 16)})
    assert results["y"].dtype == torch.bfloat16
    for name, gradient in results.items():
        assert gradient.isfinite().all(), name
        assert name in ("y", "dx") or gradient.dtype in (torch.float32, torch.int64), name


def test_a_module_equals_the_plain_one_where_autocast_is_switched_off(backend):
    module = randomised(pk.BNReLUConv2d(16, 8, 3))
    x = torch.randn(2, 16, 5, 6)
    with (
        torch.autocast(x.device.type, torch.bfloat16),
        torch.autocast(x.device.type, enabled=False),
    ):
        y = module(x)
    assert y.dtype == torch.float32
