"""Under autocast: results in its dtype, statistics in float32, on every backend."""

import copy
from functools import partial

import pytest
import torch

import preact_kernels as pk
from preact_kernels.norms import GroupNorm
from preact_kernels.ops import checks, unit
from preact_kernels.ops.activation import activation_of
from preact_kernels.ops.arguments import UnitArguments
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.memory_mode import MEMORY_MODES
from preact_kernels.ops.node import run_unit
from tests.cases import (
    EVERY_MODULE,
    INF,
    NAN,
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
from tests.oracle import assert_same_bits, check, evaluate, plain_copy, same_bits

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


@pytest.fixture
def float32_group_norms(monkeypatch):
    """Autocast computes group norms in float32, as it does on CUDA."""

    def result_dtype(norm, x):
        return torch.float32 if is_autocast(x) else x.dtype

    monkeypatch.setattr(GroupNorm, "result_dtype", result_dtype)
    monkeypatch.setattr(unit, "_passed", checks.Passed())


def group_norm_act(x, weight, bias, residual=None, activation="silu"):
    given = UnitArguments(GroupNorm(weight, bias, groups=4), activation_of(activation))
    return run_unit(x, given, residual)


def test_a_float32_scale_leaves_the_saved_input_in_half_precision(backend):
    x, scale = torch.randn(2, 8, 6, 5).bfloat16().requires_grad_(), torch.randn(2, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = pk.group_norm_act(x, 4, activation="silu", scale=scale)
    wide = pk.group_norm_act(x.float(), 4, activation="silu", scale=scale)
    assert [t.dtype for t in saved if t.numel() == x.numel()] == [torch.bfloat16]
    results = [{"y": t, "dx": torch.autograd.grad(t.sin().sum(), x)[0]} for t in (y, wide)]
    assert_same_bits(*results)


def channels_last(x):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()])


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "double_backward"])
@pytest.mark.parametrize("residual", [None, "relu", "identity"])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 8, 6, 5),
        channels_last(torch.randn(3, 8, 6, 5)),
        channels_last(torch.randn(2, 8, 3, 4, 5)),
        torch.randn(3, 8, 7),
        torch.randn(3, 16, 12, 5)[:, ::2, ::2],
        torch.randn(0, 8, 6, 5),
        torch.tensor([NAN, INF, -0.0, 1e-40, 3e38]).repeat(1, 8, 5, 1),
    ],
    ids=["nchw", "nhwc", "volume", "sequence", "slice", "empty", "not_finite"],
)
@pytest.mark.backends("reference", "cpu")
def test_a_float32_norm_saves_its_half_precision_input(
    x, residual, create_graph, backend, float32_group_norms
):
    call = partial(group_norm_act, activation=residual or "silu")
    inputs = [x.to(torch.bfloat16), torch.randn(8), torch.randn(8)]
    inputs += [] if residual is None else [torch.randn(x.shape)]
    saved = []

    def results(is_saved_in_half):
        leaves = [t.clone().requires_grad_() for t in inputs]
        x, *rest = leaves
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
            torch.autocast("cpu", torch.bfloat16, enabled=is_saved_in_half),
        ):
            y = call(x if is_saved_in_half else x.float(), *rest)
        dy = torch.linspace(-1, 2, y.numel()).view(y.shape)
        found = torch.autograd.grad(y, leaves, dy, create_graph=create_graph)
        if create_graph and x.numel():
            loss = sum((g.float() * (g.float() + 1)).sum() for g in found)
            second = torch.autograd.grad(loss, leaves, allow_unused=True)
            # Payloads of NaN depend on the order of sums.
            found += tuple(t if t is None else t.where(~t.isnan(), 7.0) for t in second)
        return {str(index): t for index, t in enumerate([y, *found])}

    expected = results(False)
    saved.clear()
    assert_same_bits(results(True), expected)
    of_sum = [torch.float32] if residual == "relu" else []
    if x.numel():
        assert [t.dtype for t in saved if t.numel() == x.numel()] == [torch.bfloat16, *of_sum]


class NormNet(torch.nn.Module):
    """Three group norms and SiLUs without convolutions; `is_explicit` casts their inputs."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(4, 16) for _ in range(3))
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 1) for _ in range(3))
        self.is_explicit = False

    def forward(self, x):
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = conv(x)
            h = torch.nn.functional.silu(norm(h.float() if self.is_explicit else h))
            x = x + h.cumsum(2)
        return x


@pytest.mark.parametrize("memory", MEMORY_MODES)
def test_models_save_half_precision_inputs_of_float32_norms(memory, backend, float32_group_norms):
    net, x = NormNet(), torch.randn(2, 16, 8, 9).to(torch.bfloat16)

    def results(is_explicit):
        model = copy.deepcopy(net)
        model.is_explicit = is_explicit
        model = Autocast(pk.convert(model, memory=memory))
        kept = pk.saved_bytes(model, x)
        return evaluate(model, {"x": x}), kept

    (found, kept), (expected, kept_explicit) = results(False), results(True)
    assert_same_bits(found, expected)
    assert found["dx"].dtype == torch.bfloat16
    if memory == "store":
        assert kept_explicit - kept == 3 * 2 * x.numel()
    else:
        assert kept <= kept_explicit
