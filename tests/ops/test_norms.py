"""The classes of `NORMS` agree with PyTorch, and no place that knows norms lacks one."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.norms import NORM_MODULES, NORMS, BatchNorm, GroupNorm
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
    whole, vector = (8, 5, 6), torch.ones(8, 5, 6)
    for shape, *rest in (((6,),), ((5, 6),), (whole, vector), (whole, None, vector), (8,)):
        assert read(x, shape, *rest)[1] is None
    assert read(x[:, :, 0, 0], (8,))[1] is None


def test_layer_norms_with_parameters_are_called():
    for name in ("weight", "bias"):
        norm = nn.LayerNorm((8, 5, 6), elementwise_affine=False)
        unit, x = pk.NormAct(norm, "relu"), torch.randn(2, 8, 5, 6)
        setattr(norm, name, nn.Parameter(torch.randn(8, 5, 6)))
        torch.testing.assert_close(unit(x), F.relu(norm(x)))


# Norms, and inputs of the fewest values that they take in PyTorch.
FEW_VALUES = {
    "batch norm in evaluation": (nn.BatchNorm2d(8).eval(), (1, 8, 1, 1)),
    "group norm": (nn.GroupNorm(4, 8), (1, 8, 1, 1)),
    "layer norm": (nn.LayerNorm((1, 1, 1), elementwise_affine=False), (1, 1, 1, 1)),
    "instance norm in evaluation": (
        nn.InstanceNorm2d(8, track_running_stats=True).eval(),
        (2, 8, 1, 1),
    ),
    "instance norm of no image": (nn.InstanceNorm2d(8), (0, 8, 5, 6)),
}


@pytest.mark.parametrize(("norm", "shape"), FEW_VALUES.values(), ids=FEW_VALUES)
def test_few_values_are_normalised_as_in_pytorch(norm, shape):
    x = torch.randn(shape)
    torch.testing.assert_close(pk.NormAct(norm, "relu")(x), F.relu(norm(x)))


DIMENSIONS = {
    nn.BatchNorm1d: {2, 3},
    nn.BatchNorm2d: {4},
    nn.BatchNorm3d: {5},
    nn.SyncBatchNorm: {2, 3, 4, 5},
    nn.GroupNorm: {2, 3, 4, 5},
    nn.InstanceNorm1d: {3},
    nn.InstanceNorm2d: {4},
    nn.InstanceNorm3d: {5},
    nn.LayerNorm: {2, 3, 4, 5},
}


def test_dimensions_are_those_of_pytorch():
    found = {kind: set(norm.modules[kind]) for kind, norm in NORM_MODULES.items()}
    assert found == DIMENSIONS


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8),
        nn.GroupNorm(4, 8),
        nn.InstanceNorm2d(8),
        nn.LayerNorm((8, 5, 6), elementwise_affine=False),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_the_format_of_the_result_is_known(norm):
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    arguments = NORM_MODULES[type(norm)].of_module(norm, x)
    assert arguments.is_channels_last(x) is not norm(x).is_contiguous()
    assert pk.NormAct(norm, "silu")(x).stride() == F.silu(norm(x)).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_dtypes_of_parameters_a_group_norm_refuses(dtype):
    x, weight, bias = torch.randn(2, 8, 5, 6).bfloat16(), torch.ones(8), torch.ones(8, dtype=dtype)
    try:
        F.group_norm(x, 2, weight, bias)
        is_refused = False
    except RuntimeError:
        is_refused = True
    assert GroupNorm(weight, bias, groups=2).refuses_dtypes(x) is is_refused


# Arguments of functions that have no default.
REQUIRED = {
    F.batch_norm: VECTORS,
    F.instance_norm: VECTORS,
    F.group_norm: (2,),
    torch.group_norm: (2,),
    F.layer_norm: ((8, 5, 6),),
}


def test_defaults_of_functions_are_read():
    for norm in NORMS:
        for function, read in norm.calls.items():
            x, given = torch.randn(2, 8, 5, 6) / 100, REQUIRED[function]  # eps matters
            _, described = read(x, *given)
            described = described.with_copied_statistics()
            copies = [t.clone() if isinstance(t, torch.Tensor) else t for t in given]
            assert torch.equal(described.plain(x), function(x, *copies)), function
            assert all(map(torch.equal, described.running(), copies)), function


def uncounted():
    norm = nn.BatchNorm2d(8, momentum=None)
    norm.num_batches_tracked = None
    return norm


def untracked():
    norm = nn.BatchNorm2d(8)
    norm.track_running_stats = False
    return norm


@pytest.mark.parametrize(
    "make",
    [uncounted, untracked, lambda: nn.InstanceNorm2d(8, momentum=None, track_running_stats=True)],
)
def test_modules_without_momentum_counter_or_tracking(make):
    x, (norm, plain) = torch.randn(2, 8, 5, 6), (make(), make())
    torch.testing.assert_close(pk.NormAct(norm, "relu")(x), F.relu(plain(x)))
    for found, expected in zip(norm.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("training", [True, False])
def test_half_precision_is_read_in_float32(training):
    norm = nn.BatchNorm2d(8).bfloat16().train(training)
    arguments = BatchNorm.of_module(norm).in_float32()
    statistics = torch.bfloat16 if training else torch.float32  # updated, or read
    expected = [torch.float32] * 2 + [statistics] * 2
    assert [t.dtype for t in arguments[:4]] == expected


def test_documentation_has_a_row_for_each_norm():
    text = (ROOT / "docs/norms.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for norm in NORMS:
        names = [kind.__name__ for kind in norm.modules]
        ends = [f"`{n[-2:]}`" if n[-2:] in ("2d", "3d") else f"`nn.{n}`" for n in names]
        assert any(all(end in row for end in ends) for row in rows), norm


def test_documentation_names_every_module():
    for text in ((ROOT / "docs/norms.md").read_text(), inspect.getdoc(pk.NormAct)):
        for kind in NORM_MODULES:
            base, end = kind.__name__[:-2], kind.__name__[-2:]
            is_family = end in ("2d", "3d")  # `nn.BatchNorm1d`, `2d`, `3d`
            names = (f"`nn.{base}1d`", f"`{end}`") if is_family else (f"`nn.{kind.__name__}`",)
            assert all(name in text for name in names), kind
