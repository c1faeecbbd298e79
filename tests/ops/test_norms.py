"""The classes of `NORMS` agree with PyTorch, and no place that knows norms lacks one."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.norms import NORM_MODULES, NORMS
from tests.cases import randomised

ROOT = Path(__file__).parents[2]
SHAPES = {2: (5, 8), 3: (3, 8, 7), 4: (3, 8, 5, 6), 5: (2, 8, 3, 4, 5)}
# Arguments of modules, other than the number of channels.
MODULES = {
    nn.GroupNorm: lambda shape: nn.GroupNorm(4, shape[1], eps=1e-3),
    nn.LayerNorm: lambda shape: nn.LayerNorm(shape[1:], eps=1e-3, elementwise_affine=False),
    nn.InstanceNorm1d: lambda shape: nn.InstanceNorm1d(
        shape[1], affine=True, track_running_stats=True
    ),
}
# Arguments of functions after the input, for 8 channels.
VECTORS = torch.linspace(-1, 1, 8), torch.linspace(0.5, 1.5, 8)
CALLS = {
    F.batch_norm: lambda shape: (*(v.clone() for v in VECTORS), *VECTORS, True, 0.3, 1e-3),
    F.instance_norm: lambda shape: (*(v.clone() for v in VECTORS), *VECTORS, True, 0.3, 1e-3),
    F.group_norm: lambda shape: (2, *VECTORS, 1e-3),
    torch.group_norm: lambda shape: (2, *VECTORS, 1e-3),
    F.layer_norm: lambda shape: (shape[1:], None, None, 1e-3),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NORM_MODULES, ids=lambda kind: kind.__name__)
def test_modules_are_read(kind, training):
    norm = NORM_MODULES[kind]
    shape = SHAPES[norm.modules[kind][-1]]
    module = MODULES.get(kind, lambda shape: kind(shape[1]))(shape)
    module = randomised(module).train(training)
    x = torch.randn(shape)
    assert norm.is_readable(module) and norm.channels_of(module) == 8
    assert x.dim() in norm.dimensions_of(module)
    arguments = norm.of_module(module, x)
    assert type(arguments) is norm
    before = [b.clone() for b in arguments.running()]
    found = arguments.plain(x)
    after = [b.clone() for b in arguments.running()]
    for b, value in zip(arguments.running(), before, strict=True):
        b.copy_(value)
    if kind is nn.SyncBatchNorm and training:  # it refuses tensors on a CPU
        assert torch.equal(found, F.batch_norm(x, None, None, *module.parameters(), training=True))
        return
    assert torch.equal(found, module(x))
    assert all(map(torch.equal, after, arguments.running()))


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.title)
def test_calls_are_read(norm, dims):
    for function, read in norm.calls.items():
        x, arguments = torch.randn(SHAPES[dims]), CALLS[function](SHAPES[dims])
        found, described = read(x, *arguments)
        assert found is x
        if dims == 2 and function in (F.layer_norm, F.instance_norm):  # no image
            continue
        assert type(described) is norm
        copied = described.with_copied_statistics()
        expected = function(x, *arguments)
        assert torch.equal(copied.plain(x), expected)
        assert all(map(torch.equal, copied.running(), described.running()))


def test_other_layer_norms_are_not_described():
    (read,) = (norm.calls[F.layer_norm] for norm in NORMS if F.layer_norm in norm.calls)
    x = torch.randn(2, 8, 5, 6)
    for shape, *rest in (((6,),), ((5, 6),), ((8, 5, 6), torch.ones(8, 5, 6)), (8,)):
        assert read(x, shape, *rest)[1] is None


def test_documentation_names_every_module():
    for text in ((ROOT / "docs/norms.md").read_text(), inspect.getdoc(pk.NormAct)):
        for kind in NORM_MODULES:
            base, end = kind.__name__[:-2], kind.__name__[-2:]
            is_family = end in ("2d", "3d")  # `nn.BatchNorm1d`, `2d`, `3d`
            names = (f"`nn.{base}1d`", f"`{end}`") if is_family else (f"`nn.{kind.__name__}`",)
            assert all(name in text for name in names), kind
