"""`revert` leaves a model as it was: it computes, compiles and exports as one never converted."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.conversion.compile_backend import fused_graph
from testbed import published_models as foreign
from tests.convert.models import Block, Chain
from tests.convert.trial import ignore, train_step
from tests.oracle import assert_same_bits

pytestmark = pytest.mark.backends("cpu")


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class AsksForTheType(Block):
    """Runs plain in a converted model: deferred tensors would change its result."""

    def forward(self, x):
        h = self.bn(x)
        return self.conv(F.relu(h * 2 if type(h) is torch.Tensor else h))


def network():
    """Returns blocks with functional calls, in containers, with a sequence of modules; images."""
    units = nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.GroupNorm(2, 4), Swish()
    blocks = foreign.FunctionalBlock(3, 8, 2), foreign.FunctionalBlock(8, 8)
    return Chain(*blocks, *units, Chain(Block(), AsksForTheType())), torch.randn(3, 3, 8, 6)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def fused(graph, inputs):
    """The backend "preact_kernels" without Inductor, which takes much longer."""
    return torch._dynamo.lookup_backend("aot_eager")(fused_graph(graph, "store", []), inputs)


OF_DYNAMO = ("_dynamo_static_input_type", "_is_torch_compile")


def attributes_of(model):
    """Returns classes and attributes but Dynamo's; of dictionaries, such as of hooks, the keys."""
    return [
        (
            type(owner),
            {
                name: list(value) if isinstance(value, dict) else type(value)
                for name, value in vars(owner).items()
                if name not in OF_DYNAMO
            },
        )
        for owner in (*model.modules(), *model.parameters(), *model.buffers())
    ]


def objects_of(model):
    """Returns the ids of all attributes of modules, and of the items of dictionaries."""
    return [
        {n: {k: id(i) for k, i in v.items()} if isinstance(v, dict) else id(v)}
        for module in model.modules()
        for n, v in vars(module).items()
        if n not in OF_DYNAMO
    ]


def test_a_reverted_model_equals_one_that_was_never_converted():
    model, x = network()
    plain, found, objects = copy.deepcopy(model), [], objects_of(model)
    pk.convert(model, activations={Swish: "silu"}, example_inputs=x)
    pk.plan_memory(model, x, 1 << 30).apply(model)
    for call in (model, torch.compile(model, backend=fused)):
        train_step(model, x, call)
    report = pk.conversion_report(model)
    assert len(report.fused) == len(report) - 1
    with pytest.raises(RuntimeError):
        model(x[:, :1])
    assert objects_of(pk.revert(model)) == objects
    model.load_state_dict(plain.state_dict())
    assert attributes_of(model) == attributes_of(plain)
    for m in (model, plain):
        computed = train_step(m, x, compiled(m))
        with torch.no_grad():
            computed += [compiled(m.eval())(x), torch.export.export(m, (x,)).module()(x)]
        found.append({str(i): t for i, t in enumerate(computed)})
    assert_same_bits(*found)


def test_a_model_is_reverted_after_an_interrupt():
    """An interrupt skips the hooks that end a call."""

    def interrupt(module, args):
        raise KeyboardInterrupt

    model, x = network()
    plain = copy.deepcopy(model)
    # A call adds hooks to modules with a backward hook.
    handles = [m[1].register_full_backward_hook(ignore) for m in (model, plain)]
    handles.append(model[1].bn2.register_forward_pre_hook(interrupt))
    pk.convert(model, activations={Swish: "silu"})
    with pytest.raises(KeyboardInterrupt):
        model(x)
    for handle in handles:
        handle.remove()
    pk.revert(model)
    assert attributes_of(model) == attributes_of(plain)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(compiled(model.eval())(x), compiled(plain.eval())(x))
