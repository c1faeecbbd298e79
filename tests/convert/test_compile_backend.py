"""`torch.compile(model, backend="preact_kernels")` equals plain PyTorch and saves as eager does."""

import collections
import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.conversion.compile_backend import compile_fused, fused_graph
from preact_kernels.torch_compat import storage_id
from testbed import published_models as foreign
from testbed.norm_act_models import SwishFunction
from tests.cases import needs_entry_points
from tests.convert import models, test_norm_act_models
from tests.convert.trial import tensors_of, train_step

pytestmark = pytest.mark.backends("cpu")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def traced(model, outcomes, **options):
    """Compiles a model into fused graphs, which run as traced: Inductor takes much longer."""
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        found = []
        compiled = aot_eager(fused_graph(graph, "store", found), inputs)
        outcomes.extend(found)
        return compiled

    return torch.compile(model, backend=backend, **options)


def step(model, state, x):
    """Returns the gradient of the input of a training step, and `tensors_of` it."""
    x = x.detach().clone().requires_grad_()
    tensors = train_step(state, x, model)
    return [x.grad, *tensors]


def assert_equal(found, expected):
    # The gradient of a bias before a batch norm is zero: atol.
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert found[1].stride() == expected[1].stride()


PUBLISHED = test_norm_act_models.CASES | models.MODELS
QUICK = ("ADM, 2-D",)


def built(name):
    """Returns a model of the suite in float64, without random numbers, and its input."""
    source = test_norm_act_models if name in test_norm_act_models.CASES else models
    given = source.CASES[name] if source is test_norm_act_models else name
    model, x = source.built(given)
    for module in model.modules():
        # In the graph a mask may be drawn in another memory format.
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model.double(), x[:2].double()


def marked(name):
    return pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))


@pytest.mark.parametrize("name", [marked(name) for name in PUBLISHED])
def test_published_models_run_fused_in_graphs_and_equal_plain_pytorch(name):
    """They run fused as they do converted."""
    model, x = built(name)
    plain, converted = copy.deepcopy(model), pk.convert(copy.deepcopy(model))
    outcomes = []
    found = step(traced(model, outcomes), model, x)
    assert_equal(found, step(plain, plain, x))
    step(converted, converted, x)
    expected = collections.Counter(s.into for s in pk.conversion_report(converted))
    assert collections.Counter(o.into for o in outcomes) == expected


# Two take too long. For the third, Inductor without this package computes other values: it pools,
# repeats, cuts and convolves a sequence (torch 2.13 on a CPU).
NOT_IN_INDUCTOR = "deep-1001", "wrn-28-10", "CAM-DenseNet"


@pytest.mark.slow
@needs_entry_points
@pytest.mark.parametrize("name", [n for n in PUBLISHED if n not in NOT_IN_INDUCTOR])
def test_published_models_run_fused_in_inductor_and_equal_plain_pytorch(name, caplog):
    model, x = built(name)
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.INFO, "preact_kernels"):
        found = step(torch.compile(model, backend="preact_kernels"), model, x)
    assert_equal(found, step(plain, plain, x))
    assert "norms of a graph are fused" in caplog.text


class Calls(models.Block):
    """Calls a function of the result of its norm and of itself."""

    def __init__(self, function):
        super().__init__()
        self.function = [function]

    def forward(self, x):
        return self.function[0](self, self.bn(x * 2))


class NormsInside(torch.autograd.Function):
    """A group norm whose gradient is that of a square."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.group_norm(x, 2)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0] * 2


@torch._dynamo.allow_in_graph
def calls_a_custom_function(x):
    return SwishFunction.apply(F.group_norm(x, 2))


FUNCTIONS = {
    "custom function": lambda net, h: net.conv(SwishFunction.apply(h)),
    "norm in a custom function": lambda net, h: net.conv(F.relu(NormsInside.apply(h))),
    "function that is not traced": lambda net, h: net.conv(calls_a_custom_function(h)),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_pass_through_functions_that_the_backend_does_not_see_into(function):
    model = Calls(function).double()
    plain, x = copy.deepcopy(model), torch.randn(2, 4, 6, 6).double()
    assert_equal(step(traced(model, []), model, x), step(plain, plain, x))


# Sizes that change.

SIZES = {
    1: ((2, 8, 12), (3, 8, 10)),
    2: ((2, 8, 4, 6), (2, 8, 6, 4), (3, 8, 5, 7)),
    3: ((2, 8, 4, 6, 6), (2, 8, 6, 4, 6), (3, 8, 5, 4, 6)),
}
NORMS = {
    "batch": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "group": (lambda channels: nn.GroupNorm(2, channels),) * 3,
    "instance": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
}


def test_inductor_keeps_the_memory_format_of_volumes_of_any_size(monkeypatch):
    """Without that it fails, as the next test shows; this one does not run it."""
    options = []

    def compile_fx(graph, inputs, **given):
        options.append(given.get("config_patches", {}))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    for dims, dynamic in ((3, True), (3, False), (2, True)):
        torch._dynamo.reset()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2](8, 8, 3, padding=1)
        model = nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(), conv)
        torch.compile(model, backend=compile_fused, dynamic=dynamic)(torch.randn(SIZES[dims][0]))
    assert options == [{"layout_optimization": False}, {}, {}]


@pytest.mark.slow
@needs_entry_points
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("norm", NORMS)
def test_inductor_trains_images_of_any_size(norm, dims, dynamic, caplog):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](8, 8, 3, padding=1)
    model = nn.Sequential(NORMS[norm][dims - 1](8), nn.ReLU(), conv).double()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="preact_kernels", fullgraph=True, dynamic=dynamic)
    with caplog.at_level(logging.INFO, "preact_kernels"):
        for shape in SIZES[dims]:
            x = torch.randn(shape).double()
            assert_equal(step(compiled, model, x), step(plain, plain, x))
    graphs = [m for m in caplog.messages if "norms of a graph" in m]
    assert graphs and set(graphs) == {"1 of 1 norms of a graph are fused"}


def network():
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1)
    return nn.Sequential(stem, foreign.FunctionalBottleneck(16, 4), nn.BatchNorm2d(16), nn.ReLU())


def kept(model, state, x):
    """Returns the bytes that a compiled forward saves without parameters and buffers, and y."""
    own = {storage_id(t) for t in (*state.parameters(), *state.buffers())}
    found = {}

    def pack(t):
        if storage_id(t) not in own:
            found[storage_id(t)] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    return sum(found.values()), y


@pytest.mark.parametrize(
    ("memory", "dynamic", "generates_code"),
    [
        ("store", None, False),
        pytest.param("store", None, True, marks=pytest.mark.slow),
        pytest.param("store", True, True, marks=pytest.mark.slow),
        pytest.param("rebuild", None, True, marks=pytest.mark.slow),
    ],
)
@needs_entry_points
def test_compiled_models_train_alike_and_keep_as_much_as_in_eager(
    memory, dynamic, generates_code, monkeypatch
):
    if not generates_code:  # Inductor decides what is saved, and runs that in eager
        decides = torch._dynamo.lookup_backend("aot_eager_decomp_partition")
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", decides)
    model = network().double()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8).double()
    eager = pk.saved_bytes(pk.convert(copy.deepcopy(model), memory=memory), x)
    options = {"fullgraph": True, "dynamic": dynamic, "options": {"memory": memory}}
    compiled = torch.compile(model, backend="preact_kernels", **options)
    size, y = kept(compiled, model, x)
    copied = model[0].weight.nbytes  # Inductor may save a copy in another memory format
    assert 0.9 * eager < size < 1.01 * eager + copied
    assert 1.05 * eager < 0.6 * pk.saved_bytes(plain, x)
    expected = plain(x)
    assert y.stride() == expected.stride()
    for t in (y, expected):
        t.square().sum().backward()
    # The gradient of a bias before a batch norm is zero: atol.
    found = (tensors_of(model, (y,)), tensors_of(plain, (expected,)))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


@needs_entry_points
def test_a_unit_trains_in_inductor():
    """Inductor generates no kernel for this unit: compiling one takes seconds."""
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    unit = nn.Sequential(norm, nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False)).double()
    plain = copy.deepcopy(unit)
    x = torch.randn(2, 8, 6, 5).double().contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(unit, backend="preact_kernels", fullgraph=True)
    assert_equal(step(compiled, unit, x), step(plain, plain, x))


def test_graphs_of_images_of_any_size():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1))
    model.double().eval()
    outcomes = []
    compiled = traced(model, outcomes, fullgraph=True, dynamic=True)
    for shape in ((2, 4, 8, 12), (3, 4, 10, 6)):
        x = torch.randn(shape).double()
        torch.testing.assert_close(compiled(x), model(x))
    assert [o.into for o in outcomes] == ["BN-ReLU"]


@needs_entry_points
def test_options_are_checked():
    compiled = torch.compile(network(), backend="preact_kernels", options={"memory": "all"})
    with pytest.raises(Exception, match="memory: expected 'store'"):
        compiled(torch.randn(2, 3, 8, 8))
