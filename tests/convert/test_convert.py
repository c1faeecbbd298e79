"""Converted models train, evaluate and behave as the plain ones."""

import copy

import pytest
import torch
from torch import nn

import preact_kernels as pk
from tests.convert import published_models as foreign
from tests.convert.foreign_cases import (
    MODELS,
    MODES,
    PUBLISHED,
    SMALL,
    Block,
    built,
    results,
    small,
)
from tests.oracle import assert_same_bits, assert_within_budget, unit_roundoff

pytestmark = pytest.mark.backends("cpu", slow=("reference", "triton"))


def trained(model, x, steps=3):
    """What some steps of training leave: outputs, the whole gradient, parameters and buffers."""
    model, x = copy.deepcopy(model), x.to(next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    results = {}
    for step in range(steps):
        torch.manual_seed(step)  # of stochastic depth
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


def assert_trains_alike(converted, plain, x, backend, steps=3):
    """The budget of `oracle.py` for several steps, in float32, and in float64 where it is served.

    Errors of a deep network grow in proportion to the unit roundoff: those of float64 are judged
    by eager's errors in float32.
    """
    truth = trained(copy.deepcopy(plain).double(), x, steps)
    orders = [x, x.contiguous(memory_format=torch.channels_last)]
    eager = [trained(plain, order, steps) for order in orders]
    errors = {n: max(float((e[n] - t).norm()) for e in eager) for n, t in truth.items()}
    assert_within_budget(trained(converted, x, steps), truth, errors)
    if backend not in ("reference", "cpu"):
        return
    ratio = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    growth = (x.numel() / x.shape[1]) ** 0.5  # see oracle.py
    errors = {n: ratio * growth * e for n, e in errors.items()}
    wide = copy.deepcopy(converted).double()
    assert_within_budget(trained(wide, x, steps), truth, errors)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("name", SMALL)
def test_small_models_train_alike(name, memory, backend):
    model, x = built(name)
    converted = pk.convert(copy.deepcopy(model), memory=memory)
    assert_trains_alike(converted, model, x, backend)


LARGE = ("deep-1001", "wrn-28-10", "timm-resnetv2-101", "timm-wide-resnet-50-2")


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("memory", ["store", pytest.param("rebuild", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in PUBLISHED]
)
def test_published_models_train_alike(name, memory, backend):
    model, x = built(name)
    converted = pk.convert(copy.deepcopy(model), memory=memory)
    # More steps part from each other: the signs of inputs of ReLUs near zero differ.
    assert_trains_alike(converted, model, x[:2], backend, steps=1)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in MODELS]
)
def test_sites_are_found(name):
    _, _, count, fused = MODELS[name]
    model, x = built(name)
    reasons = [s.reason for s in pk.conversion_report(model)]
    assert reasons == ["the model is not converted"] * count
    reasons = [s.reason for s in pk.conversion_report(pk.convert(model))]
    assert reasons == ["not called since the model was converted"] * count
    model(x[:2])
    report = pk.conversion_report(model)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert [s.name for s in report] == names
    assert (len(report), len(report.fused)) == (count, fused)
    for site in report:
        assert bool(site.reason) == (site.into in ("", "BN-ReLU")), site
        assert site.name in str(report)


PRE_ACTIVATION = {
    "functional-basic": lambda: foreign.FunctionalNet(planes=8),
    "functional-bottleneck": lambda: foreign.FunctionalNet(foreign.FunctionalBottleneck, (6, 6), 8),
    "wide": lambda: foreign.WideResNet(16, 1),
    "dense": lambda: foreign.DenseNet(40, 12),
    "deep": lambda: foreign.DeepNet(110, 8),
}


@pytest.mark.parametrize("build", PRE_ACTIVATION.values(), ids=PRE_ACTIVATION)
def test_pre_activation_models_keep_half_of_the_bytes(build):
    model, x = build(), torch.randn(4, 3, 16, 16)
    kept = pk.saved_bytes(model, x)
    assert pk.saved_bytes(pk.convert(model), x) <= 0.55 * kept


@pytest.mark.parametrize("name", ["functional-bottleneck", "deep"])
def test_memory_modes_keep_less(name):
    model, x = PRE_ACTIVATION[name](), torch.randn(4, 3, 16, 16)
    kept = {mode: pk.saved_bytes(pk.convert(model, memory=mode), x) for mode in MODES}
    assert kept["rebuild"] < 0.6 * kept["store"]
    assert kept["checkpoint"] < 0.4 * kept["store"]
    assert pk.saved_bytes(pk.convert(model), x) == kept["store"]


# Around the model.


def test_parameters_stay_the_same_objects_in_the_same_order():
    model, x = small()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    buffers = list(model.buffers())
    optimizer = torch.optim.SGD(parameters, 0.1)
    assert pk.convert(model) is model
    assert list(model.state_dict()) == keys
    for before, after in ((parameters, model.parameters()), (buffers, model.buffers())):
        assert all(a is b for a, b in zip(before, after, strict=True))
    before = [p.clone() for p in parameters]
    model(x).sum().backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_state_loads_both_ways():
    (model, x), (other, _) = small(), small()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) / 10)
    pk.convert(model).load_state_dict(other.state_dict(), strict=True)
    expected = results(pk.convert(copy.deepcopy(other)), x)
    assert_same_bits(results(model, x), expected)
    other.load_state_dict(model.state_dict(), strict=True)


def hooks_of(model):
    """All forward hooks of the modules, with their options."""
    names = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    names += ("_forward_hooks", "_forward_hooks_always_called")
    return [list(getattr(m, n).values()) for m in model.modules() for n in names]


def ignore(*args):
    """A hook."""


def test_classes_stay_and_reverting_removes_the_hooks_of_conversion():
    model, x = small()
    model.layer1.register_forward_hook(ignore)
    model.layer2[0].register_forward_pre_hook(ignore)
    plain, hooks, text = results(model, x), hooks_of(model), repr(model)
    kinds = [type(m) for m in model.modules()]
    pk.saved_bytes(pk.convert(model), x)
    assert pk.conversion_report(model).fused
    assert [type(m) for m in model.modules()] == kinds
    assert repr(model) == text
    assert pk.revert(model) is model
    assert hooks_of(model) == hooks
    assert not any("preact" in name for m in model.modules() for name in vars(m))
    assert {s.reason for s in pk.conversion_report(model)} == {"the model is not converted"}
    assert_same_bits(results(model, x), plain)


def test_converting_twice_changes_nothing():
    model, x = small()
    pk.convert(model)
    hooks, before = hooks_of(model), results(model, x)
    kept = pk.saved_bytes(model, x)
    report = list(pk.conversion_report(model))
    pk.convert(model)
    assert hooks_of(model) == hooks
    assert_same_bits(results(model, x), before)
    assert pk.saved_bytes(model, x) == kept
    assert list(pk.conversion_report(model)) == report


def test_a_conversion_that_fails_leaves_the_model_as_it_was():
    model, x = small()
    hooks = hooks_of(model)
    with pytest.raises(ValueError, match="memory: expected 'store'"):
        pk.convert(model, memory="all")
    assert hooks_of(model) == hooks
    kept = pk.saved_bytes(pk.convert(model, memory="rebuild"), x)
    with pytest.raises(ValueError, match="memory: expected 'store'"):
        pk.convert(model, memory="all")
    assert pk.saved_bytes(model, x) == kept
    assert pk.conversion_report(model).fused


def test_training_and_evaluation_mode():
    model = foreign.WideResNet(16, 1, dropout=0.3)
    x = torch.randn(4, 3, 16, 16)
    converted = pk.convert(copy.deepcopy(model))
    for _ in range(2):
        for training in (True, False):
            model.train(training), converted.train(training)
            torch.manual_seed(5)
            expected = model(x)
            torch.manual_seed(5)
            torch.testing.assert_close(converted(x), expected)
    converted.blocks[1].train()  # some modules in training mode
    model.blocks[1].train()
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(converted(x), expected)


def test_frozen_batch_norms():
    model, x = small()
    plain = copy.deepcopy(model)
    pk.convert(model)
    for m in (model, plain):
        m.layer1.eval()
        m.layer1.requires_grad_(False)
    expected = results(plain, x)
    for name, value in results(model, x).items():
        torch.testing.assert_close(value, expected[name], msg=name, rtol=1e-3, atol=1e-4)


def test_replicas_of_data_parallel_use_their_own_parameters():
    model, x = small()
    pk.convert(model).eval()
    zeros = foreign.replicated(model, torch.zeros_like)
    same = foreign.replicated(model, torch.clone)
    with torch.no_grad():
        assert not zeros(x).any()
        assert_same_bits({"y": same(x)}, {"y": model(x)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, x = small()
    plain, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    pk.convert(model).to(dtype)
    assert model(x).dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("name", SMALL)
def test_autocast_gives_the_same_dtypes(name):
    model, x = built(name)
    plain = copy.deepcopy(model)
    pk.convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        y = model(x)
        torch.manual_seed(0)
        expected = plain(x)
    assert y.dtype == expected.dtype
    y.float().sum().backward()
    assert (y.float() - expected.float()).norm() < 0.5 * expected.float().norm()


# What is not converted.


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got int"):
        pk.convert(3)
    with pytest.raises(ValueError, match="memory: expected 'store'"):
        pk.convert(nn.Identity(), memory="all")
    for function in (pk.revert, pk.conversion_report):
        with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
            function(None)


@pytest.mark.parametrize("frozen", [0, 0.5])
@pytest.mark.parametrize("name", ["functional-bottleneck", "deep", "dense"])
def test_memory_of_converted_models_is_planned(name, frozen):
    model, x = PRE_ACTIVATION[name](), torch.randn(4, 3, 16, 16)
    parameters = list(model.parameters())
    for p in parameters[: int(frozen * len(parameters))]:
        p.requires_grad_(False)
    kept = pk.saved_bytes(pk.convert(model), x)
    plan = pk.plan_memory(model, x, kept)
    least = plan.other_bytes + sum(min(o.saved_bytes for o in s.options) for s in plan.stages)
    assert least <= (0.9 if frozen else 0.7) * kept
    for share in (1.0, 0.8, 0.7):
        budget = max(least, int(share * kept))
        plan = pk.plan_memory(model, x, budget)
        plan.apply(model)
        assert pk.saved_bytes(model, x) == plan.predicted_bytes <= budget
    assert pk.saved_bytes(copy.deepcopy(model), x) == plan.predicted_bytes
    with pytest.raises(ValueError, match="expected the stages"):
        plan.apply(pk.preact_resnet(20))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["functional-bottleneck", "deep", "dense"])
def test_frozen_parts_keep_no_more_than_in_plain_pytorch(name, memory_format):
    model = PRE_ACTIVATION[name]().to(memory_format=memory_format)
    x = torch.randn(4, 3, 16, 16).contiguous(memory_format=memory_format)
    converted = pk.convert(copy.deepcopy(model))
    for p, q in zip(model.parameters(), converted.parameters(), strict=True):
        assert pk.saved_bytes(converted, x) <= pk.saved_bytes(model, x)
        p.requires_grad_(False)
        q.requires_grad_(False)
    assert pk.saved_bytes(converted, x) == 0


@pytest.mark.parametrize("name", ["functional-bottleneck", "wide", "biased-wide", "dense", "deep"])
def test_converted_models_compile_into_one_graph(name):
    torch._dynamo.reset()
    model, x = built(name)
    model, x = model.double(), x.double()
    plain = copy.deepcopy(model)
    pk.convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for m in (compiled, plain):
        y = m(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in m.parameters()), *m.buffers()])
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("name", ["functional-bottleneck", "dense", "deep"])
def test_tracers_see_plain_operators(name):
    model, x = built(name)
    model.eval()
    expected = model(x)
    pk.convert(model)
    exported = torch.export.export(model, (x,))
    assert not any("preact" in str(node.target) for node in exported.graph.nodes)
    traced = (
        exported.module(),
        torch.fx.symbolic_trace(model),
        torch.jit.trace(model, x),
        torch.vmap(model.__call__, in_dims=0),
    )
    for call in traced[:3]:
        assert_same_bits({"y": call(x)}, {"y": expected})
    torch.testing.assert_close(traced[3](x[None])[0], expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_functional_transforms():
    model, x = built("functional-basic")
    model.double().eval()
    plain, x = copy.deepcopy(model), x.double()
    pk.convert(model)

    def per_sample(m):
        def loss(parameters, image):
            y = torch.func.functional_call(m, parameters, (image[None],))
            return y.square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(m.named_parameters()), x)

    found, expected = per_sample(model), per_sample(plain)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_scripts_are_those_of_the_plain_model():
    model = pk.convert(Block()).eval()
    x = torch.randn(2, 4, 6, 6)
    script = torch.jit.script(pk.revert(copy.deepcopy(model)))
    torch.testing.assert_close(script(x), model(x))
    around = pk.convert(nn.Sequential(model, torch.jit.script(nn.Dropout(0.5)))).eval()
    assert not around[1].training
    assert torch.equal(around(x), model(x))
    assert pk.conversion_report(around).fused
