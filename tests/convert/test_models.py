"""Published models train alike plain and converted, run fused, and save less."""

import copy

import pytest
import torch
from torch import nn

import preact_kernels as pk
from testbed import published_models as foreign
from tests.convert.models import MODELS, MODES, PUBLISHED, SMALL, Block, Chain, built
from tests.convert.trial import Copies
from tests.oracle import assert_within_budget

pytestmark = pytest.mark.backends("cpu", slow=("reference", "triton"))


def trained(model, x, steps=2):
    """Trains some steps; returns outputs, whole gradients, parameters and buffers."""
    model, x = copy.deepcopy(model), x.to(next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    results = {}
    for step in range(steps):
        torch.manual_seed(step)  # for stochastic depth
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        results[f"y{step}"] = y.detach()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results[f"gradient{step}"] = torch.cat(gradients)
        optimizer.step()
    results["parameters"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    buffers = [b.flatten() for b in model.buffers() if b.is_floating_point()]
    results["running"] = torch.cat(buffers)
    with torch.no_grad():
        results["evaluated"] = model.eval()(x)
    return results


def assert_trains_alike_in_float64(converted, plain, x, steps=2):
    """In float32 rounding may change the mask of a ReLU, and with it whole gradients."""
    found, expected = (trained(m.double(), x, steps) for m in (converted, plain))
    for name, t in expected.items():
        assert (found[name] - t).norm() <= 1e-7 * t.norm(), name


def assert_trains_alike(converted, plain, x, backend):
    """Asserts the budget in float32, and equality in float64 on backends that serve it.

    The kernels of the CPU library fuse convolutions in float32, but not in float64.
    """
    truth = trained(copy.deepcopy(plain).double(), x)
    orders = [x, x.contiguous(memory_format=torch.channels_last)]
    eager = [trained(plain, order) for order in orders]
    errors = {n: max(float((e[n] - t).norm()) for e in eager) for n, t in truth.items()}
    assert_within_budget(trained(converted, x), truth, errors)
    if backend in ("reference", "cpu"):
        assert_trains_alike_in_float64(converted, plain, x)


def assert_sites_are_found(name, model, x):
    """Converts a model, calls a copy, and checks the report."""
    _, _, count, fused = MODELS[name]
    assert [s.reason for s in pk.conversion_report(model)] == ["the model is not converted"] * count
    reasons = [s.reason for s in pk.conversion_report(pk.convert(model))]
    assert reasons == ["not called by a converted module since the model was converted"] * count
    called = copy.deepcopy(model)
    called(x)
    report = pk.conversion_report(called)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert [s.name for s in report] == names
    assert (len(report), len(report.fused)) == (count, fused)
    for site in report:
        assert bool(site.reason) == (site.into in ("", "BN-ReLU", "BN-Add-ReLU")), site
        assert site.name in str(report)


@pytest.mark.parametrize("name", SMALL)
def test_small_models_run_fused_and_train_alike(name, backend):
    model, x = built(name)
    converted = copy.deepcopy(model)
    assert_sites_are_found(name, converted, x)
    assert_trains_alike(converted, model, x, backend)


@pytest.mark.parametrize("memory", MODES[1:])
def test_memory_modes_train_alike(memory, backend):
    model, x = built("functional-bottleneck")
    converted = pk.convert(copy.deepcopy(model), memory=memory)
    assert_trains_alike(converted, model, x, backend)


QUICK = ("preact-resnet-18", "densenet-bc-100-12")
COPIES = {
    "preact-resnet-18": 1,
    "densenet-bc-100-12": 65,  # concatenated tensors are NCHW
    "timm-resnetv2-50": 2,
    "timm-densenet-121": 2,
    "torchvision-resnet-50": 1,
}


@pytest.mark.backends("cpu")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in PUBLISHED]
)
def test_published_models_run_fused_and_train_alike(name, backend):
    model, x = built(name)
    converted, x = copy.deepcopy(model), x[:2]
    assert_sites_are_found(name, converted, x)
    if name in COPIES:
        called = copy.deepcopy(converted)
        with Copies() as copies:
            called(x)
        assert copies.count == COPIES[name]
    assert_trains_alike_in_float64(converted, model, x, steps=1)


# Memory.

PRE_ACTIVATION = {
    "bottleneck": lambda: foreign.FunctionalNet(foreign.FunctionalBottleneck, (6, 6), 8),
    "dense": lambda: foreign.DenseNet(40, 12),
    "deep": lambda: foreign.DeepNet(65, 8),
}


@pytest.mark.parametrize("name", PRE_ACTIVATION)
def test_pre_activation_models_keep_half_of_the_bytes(name):
    model, x = PRE_ACTIVATION[name](), torch.randn(2, 3, 16, 16)
    plain = pk.saved_bytes(model, x)
    kept = {mode: pk.saved_bytes(pk.convert(model, memory=mode), x) for mode in MODES}
    assert kept["store"] <= 0.55 * plain
    if name != "dense":  # no residual blocks
        assert kept["rebuild"] < 0.6 * kept["store"]
        assert kept["checkpoint"] < 0.4 * kept["store"]
    assert pk.saved_bytes(pk.convert(model), x) == kept["store"]


def test_parts_have_memory_modes_of_their_own():
    halves = [Chain(*(foreign.FunctionalBlock(8, 8) for _ in range(3))) for _ in range(2)]
    model, x = Chain(*halves), torch.randn(2, 8, 16, 16)
    store, rebuild = (pk.saved_bytes(pk.convert(model, memory=m), x) for m in MODES[:2])
    pk.convert(pk.convert(model)[0], memory="rebuild")
    assert rebuild < pk.saved_bytes(model, x) < store


@pytest.mark.parametrize("is_frozen", [True, False])
def test_memory_of_converted_models_is_planned(is_frozen):
    model, x = PRE_ACTIVATION["bottleneck"](), torch.randn(2, 3, 16, 16)
    parameters = list(model.parameters())
    for p in parameters[: len(parameters) // 2 if is_frozen else 0]:
        p.requires_grad_(False)
    kept = pk.saved_bytes(pk.convert(model), x)
    plan = pk.plan_memory(model, x, kept)
    least = plan.other_bytes + sum(min(o.saved_bytes for o in s.options) for s in plan.stages)
    assert least <= (0.9 if is_frozen else 0.7) * kept
    for share in (1.0, 0.7):
        budget = max(least, int(share * kept))
        plan = pk.plan_memory(model, x, budget)
        plan.apply(model)
        assert pk.saved_bytes(model, x) == plan.predicted_bytes <= budget
    assert pk.saved_bytes(copy.deepcopy(model), x) == plan.predicted_bytes
    assert pk.saved_bytes(pk.convert(pk.revert(copy.deepcopy(model))), x) == kept
    with pytest.raises(ValueError, match="expected the stages"):
        plan.apply(pk.preact_resnet(20))


@pytest.mark.parametrize(
    ("name", "memory_format"),
    [("functional-bottleneck", torch.channels_last), ("dense", torch.contiguous_format)],
)
def test_frozen_parts_keep_no_more_than_in_plain_pytorch(name, memory_format):
    model, x = built(name)
    model, x = (t.to(memory_format=memory_format) for t in (model, x[:2]))
    converted = pk.convert(copy.deepcopy(model))
    for i, (p, q) in enumerate(zip(model.parameters(), converted.parameters(), strict=True)):
        if i % 4 == 0 or i < 12:
            assert pk.saved_bytes(converted, x) <= pk.saved_bytes(model, x), i
        p.requires_grad_(False)
        q.requires_grad_(False)
    assert pk.saved_bytes(converted, x) == 0


# Dtypes.


@pytest.mark.parametrize("name", ["dense", "between blocks"])
def test_autocast_gives_the_same_dtypes(name):
    model, x = built(name)
    results = []
    for m in (model, pk.convert(copy.deepcopy(model))):
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        y.float().sum().backward()
        results.append((y, torch.cat([p.grad.flatten() for p in m.parameters()])))
    for value, expected in zip(results[1], results[0], strict=True):
        assert value.dtype == expected.dtype
        assert (value.float() - expected.float()).norm() < 0.5 * expected.float().norm()


class Sums(Block):
    """Adds a float32 image to results under autocast, also in place."""

    def forward(self, x):
        y = super().forward(x)
        z = super().forward(x) + x
        y += x
        return y, z


def test_sums_of_two_dtypes_under_autocast():
    model, x, found = Sums(), torch.randn(2, 4, 6, 6), []
    converted = pk.convert(copy.deepcopy(model))
    for m in (converted, model):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(m(x))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
    assert pk.conversion_report(converted)[0].into == "BN-ReLU-Conv"  # without the addition


class CastsAPart(Block):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        return y, super().forward(x)


def test_autocast_of_a_part():
    model, x = CastsAPart(), torch.randn(2, 4, 6, 6)
    outputs = [m(x) for m in (pk.convert(copy.deepcopy(model)), model)]
    torch.testing.assert_close(*outputs)


def test_converted_models_may_change_their_dtype():
    model, x = built("functional-bottleneck")
    pk.convert(model).to(torch.bfloat16)
    assert model(x.bfloat16()).dtype == torch.bfloat16
    assert len(pk.conversion_report(model).fused) == 15
