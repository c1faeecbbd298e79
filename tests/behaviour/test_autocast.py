"""Under autocast: results in its dtype, statistics in float32, on every backend."""

from functools import partial

import pytest
import torch

import preact_kernels as pk
from tests.cases import (
    EVERY_MODULE,
    Autocast,
    ConvCase,
    NormCase,
    NormConvCase,
    conv_inputs,
    device_of,
    norm_conv_inputs,
    plain_bn_relu,
    plain_bn_relu_conv2d,
    random_block,
)
from tests.oracle import check, evaluate, plain_copy, same_bits

pytestmark = pytest.mark.backends("cpu")  # most dtypes are chosen above the backends

CASE = ConvCase("typical", (2, 16, 6, 5), 32, padding=1, conv_bias=True, residual=True)
every_input = pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)


def check_autocast(fused, plain, problems, **options):
    if isinstance(fused, torch.nn.Module):
        return check(Autocast(fused), Autocast(plain), problems, **options)
    return check(Autocast(function=fused), Autocast(function=plain), problems, **options)


@every_input
def test_bn_relu_keeps_the_dtype_of_its_input(x_dtype, backend):
    names = ("x", "bn_weight", "bn_bias", "running_mean", "running_var")
    inputs = {n: t for n, t in conv_inputs(CASE).items() if n in names}
    inputs["x"] = inputs["x"].to(x_dtype)
    fused, plain = (partial(f, training=True) for f in (pk.bn_relu, plain_bn_relu))
    results = check_autocast(fused, plain, inputs)
    assert results["y"].dtype == x_dtype
    assert results["running_mean"].dtype == torch.float32


@pytest.mark.backends("cpu", "triton", slow=("cuda",))  # which take float32 weights, or do not
@pytest.mark.covering(1)
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


NORMS = {
    "group": NormConvCase(NormCase((6, 16, 6, 5), 4), 32, conv_bias=True, residual=True),
    "group_of_volumes": NormConvCase(NormCase((4, 16, 3, 4, 5), 4), 16),
    "batch": NormConvCase(NormCase((6, 16, 6, 5)), 32, 1, padding=0),
}


@pytest.mark.covering(1)
@every_input
@pytest.mark.parametrize("modulation", [(), ("scale", "shift")], ids=["", "modulated"])
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_any_norm_and_activation_in_front_of_a_convolution(case, modulation, x_dtype, backend):
    problems = [norm_conv_inputs(case, torch.float32, modulation) for _ in range(4)]
    for inputs in problems:
        inputs["x"] = inputs["x"].to(x_dtype)
    fused, plain = (partial(f, activation="silu") for f in (case.fused, case.plain))
    results = check_autocast(fused, plain, problems)
    assert results["y"].dtype == (torch.float32 if case.residual else torch.bfloat16)
    assert results["dconv_weight"].dtype == torch.float32


def test_a_float32_scale_beside_half_precision_is_read_with_and_without_autocast(backend):
    case = NORMS["group"]
    fused, plain = (partial(f, activation="silu") for f in (case.fused, case.plain))
    problems = [norm_conv_inputs(case, torch.bfloat16, ("scale",), torch.float32) for _ in range(4)]
    for inputs in problems:
        inputs["scale"] = inputs["scale"].float()
    dtypes = [c(fused, plain, problems)["y"].dtype for c in (check, check_autocast)]
    assert dtypes == [torch.float32, torch.bfloat16]


# On a float32 input, autocast leaves blocks plain until one has a projection.
@pytest.mark.backends("cpu", slow=("triton", "cuda"))
@pytest.mark.parametrize(
    ("sizes", "x_dtype", "memory", "residual_dtype"),
    [
        ([("basic", 16, 16)], torch.bfloat16, "store", None),
        ([("bottleneck", 12, 8, 2), ("basic", 32, 32)], torch.float32, "checkpoint", None),
        ([("basic", 16, 16), ("basic", 16, 32, 2)], torch.bfloat16, "rebuild", torch.float32),
    ],
    ids=["plain", "projection", "float32_stream"],
)
def test_stages_equal_the_plain_ones(sizes, x_dtype, memory, residual_dtype, backend):
    blocks = [random_block(*s) for s in sizes]
    stage = pk.PreActStage(blocks, memory, residual_dtype=residual_dtype).to(device_of(backend))
    x = torch.randn(8, 3, sizes[0][1], 7, 6, device=device_of(backend)).to(x_dtype)
    check_autocast(stage, plain_copy(stage), [{"x": images} for images in x])


@pytest.mark.backends("reference")  # recomputes with convolutions that autocast would cast
@pytest.mark.parametrize("create_graph", [False, True])
def test_autocast_around_a_backward_alone_changes_no_gradient(create_graph, backend):
    """With `create_graph` the unit runs again in PyTorch's operators."""
    module = pk.PreActStage([random_block("bottleneck", 12, 8, 2)], "checkpoint")
    if create_graph:
        module = pk.BNReLUConv2d(12, 8, 3)
    x = torch.randn(3, 12, 7, 6, requires_grad=True)

    def gradients(enabled):
        loss = module(x).square().sum()
        inputs = [x, *module.parameters()]
        with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
            return torch.autograd.grad(loss, inputs, create_graph=create_graph)

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert same_bits(found, expected)


@every_input
@pytest.mark.parametrize("name", ["bn_relu_conv", "norm_act_conv", "checkpointed_network"])
def test_modules_have_the_dtypes_of_the_plain_ones(name, x_dtype, backend):
    module = Autocast(EVERY_MODULE[name]())
    inputs = {"x": torch.randn(3, 10, 7, 6).to(x_dtype)}
    results, expected = evaluate(module, inputs), evaluate(plain_copy(module), inputs)
    assert {n: t.dtype for n, t in results.items()} == {n: t.dtype for n, t in expected.items()}


def test_autocast_that_is_switched_off_and_float64_change_no_dtype(backend):
    module, x = pk.BNReLUConv2d(16, 8, 3), torch.randn(2, 16, 5, 6)
    with torch.autocast(x.device.type, torch.bfloat16):
        with torch.autocast(x.device.type, enabled=False):
            assert module(x).dtype == torch.float32
        assert module.double()(x.double()).dtype == torch.float64
