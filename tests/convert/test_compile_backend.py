"""`torch.compile(model, backend="preact_kernels")` equals plain PyTorch and saves as eager does."""

import copy

import pytest
import torch
from torch import nn

import preact_kernels as pk
from preact_kernels.torch_compat import storage_id
from tests.cases import needs_entry_points
from tests.convert import published_models as foreign
from tests.convert.trial import tensors_of

pytestmark = [pytest.mark.backends("cpu"), needs_entry_points]


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
    ("memory", "dynamic"),
    [
        ("store", None),
        pytest.param("store", True, marks=pytest.mark.slow),
        pytest.param("rebuild", None, marks=pytest.mark.slow),
    ],
)
def test_compiled_models_train_alike_and_keep_as_much_as_in_eager(memory, dynamic):
    torch._dynamo.reset()
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


def test_images_of_any_size():
    torch._dynamo.reset()
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1))
    model.double().eval()
    compiled = torch.compile(model, backend="preact_kernels", fullgraph=True, dynamic=True)
    for shape in ((2, 4, 8, 8), (3, 4, 10, 6)):
        x = torch.randn(shape).double()
        torch.testing.assert_close(compiled(x), model(x))


def test_options_are_checked():
    torch._dynamo.reset()
    compiled = torch.compile(network(), backend="preact_kernels", options={"memory": "all"})
    with pytest.raises(Exception, match="memory: expected 'store'"):
        compiled(torch.randn(2, 3, 8, 8))
