"""Running statistics follow each batch once, whatever holds them and whatever runs the forward."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.kernels.running_stats import scaled
from testbed import published_models as foreign
from tests.cases import CalledOps, random_stage
from tests.oracle import assert_within_budget, distance, evaluate, plain_copy, same_bits

pytestmark = pytest.mark.backends("cpu")


def norms(module):
    return [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.backends("cpu", "triton", "cuda")
def test_strided_vectors_serve_as_dense_ones_do(backend):
    x, conv_weight = torch.randn(2, 16, 5, 4), torch.randn(8, 16, 1, 1)
    vectors = {
        "bn_weight": torch.ones(1).expand(16),
        "bn_bias": torch.randn(32)[::2],
        "running_mean": torch.zeros(32)[::2],
        "running_var": torch.ones(32)[::2],
        "conv_bias": torch.randn(16)[::2],
    }
    dense = {name: v.clone().contiguous() for name, v in vectors.items()}
    for training in (True, False):
        results = [
            pk.bn_relu_conv2d(x, conv_weight, **v, training=training) for v in (vectors, dense)
        ]
        assert same_bits(*results)
    for name, v in vectors.items():
        torch.testing.assert_close(v, dense[name], rtol=2**-23, atol=2**-24)


def test_a_block_used_twice_takes_two_batches_into_the_cumulative_average(backend):
    block = pk.PreActBasicBlock(6, 6)
    for bn in norms(block):
        bn.momentum = None
    other = copy.deepcopy(block)
    x = torch.randn(2, 6, 5, 4)
    pk.PreActStage([block, block])(x)
    other(other(x))
    for bn, expected in zip(norms(block), norms(other), strict=True):
        assert bn.num_batches_tracked == expected.num_batches_tracked == 2
        torch.testing.assert_close(bn.running_mean, expected.running_mean)


@pytest.mark.backends("cpu", "reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cumulative_average_is_computed_on_the_device(dtype, backend):
    """It equals PyTorch's, of which a CUDA graph would keep the first momentum."""
    unit = pk.BNReLU2d(6, momentum=None).to(dtype)
    eager, plain = plain_copy(unit), plain_copy(unit).double()
    for index in range(4):
        x = (torch.randn(3, 6, 5, 4) * (index + 1)).to(dtype)
        with CalledOps() as called:
            unit(x)
        assert "aten::_local_scalar_dense" not in called.names
        eager(x)
        plain(x.double())
    results, in_dtype, truth = (dict(m.named_buffers()) for m in (unit, eager, plain))
    errors = {name: distance(in_dtype[name], t) for name, t in truth.items()}
    assert_within_budget(results, truth, errors)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("names", [("running_mean", "running_var"), ("num_batches_tracked",)])
def test_norms_of_a_stage_may_share_buffers(names, momentum, backend):
    stage = random_stage()
    for bn in norms(stage):
        bn.momentum = momentum
    for name in names:
        setattr(stage[2].bn2, name, getattr(stage[3].bn2, name))
    plain, x = plain_copy(stage), torch.randn(3, 10, 7, 6)
    for module in (stage, plain, stage, plain):
        module(x)
    for found, expected in zip(stage.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_variances_are_scaled_as_each_alone_is(dtype):
    counts = [12, 12, 7, 12, 1, 1]  # of samples
    variances = [torch.rand(channels, dtype=dtype) for channels in (8, 3, 8, 1, 2, 2)]
    variances[1][2] = torch.nan
    factors = [1.0 if count == 1 else 1.0 / (1.0 - 1 / count) for count in counts]
    found = scaled(variances, factors)
    for variance, factor, ours in zip(variances, factors, found, strict=True):
        assert same_bits(ours, variance * factor)


@pytest.mark.backends("cpu", "triton", "cuda")
def test_an_infinite_value_leaves_the_mean_infinite_as_in_eager(backend):
    for pixel in (0, 17):
        x = torch.randn(2, 16, 5, 5)
        x[0, 3].view(-1)[pixel] = torch.inf
        found, expected = ([torch.zeros(16), torch.ones(16)] for _ in range(2))
        pk.bn_relu(x, None, None, *found, training=True)
        F.batch_norm(x, *expected, training=True)
        assert found[0][3] == expected[0][3] == torch.inf
        assert found[1][3].isnan() and expected[1][3].isnan()


@pytest.mark.backends("cpu", "triton", "cuda")
def test_an_update_equals_pytorchs_and_bumps_the_versions_of_all_buffers(backend):
    module, x = pk.BNReLU2d(6), torch.randn(2, 6, 5, 4)
    plain = plain_copy(module)
    before = [t._version for t in module.buffers()]
    module(x), plain(x)
    assert [t._version for t in module.buffers()] == [version + 1 for version in before]
    for (name, found), expected in zip(module.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    assert int(next(t for n, t in module.named_buffers() if "num_batches" in n)) == 1


@pytest.mark.backends("cpu", "triton", "cuda")
def test_buffers_that_share_memory_are_updated_in_turn(backend):
    x, momentum = torch.randn(3, 6, 5, 4), 0.25
    found, expected = torch.zeros(6), torch.zeros(6)
    pk.bn_relu(x, None, None, found, found.view(6), training=True, momentum=momentum)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    for batch in (mean, var):
        expected = (1 - momentum) * expected + momentum * batch
    torch.testing.assert_close(found, expected)


@pytest.mark.backends("cpu", "triton", "cuda")
def test_buffers_made_in_inference_mode_are_refused_outside(backend):
    module = pk.BNReLU2d(6)
    with torch.inference_mode():
        for name, t in list(module.named_buffers()):
            module.get_submodule(name.rpartition(".")[0]).register_buffer(
                name.rpartition(".")[2], t.clone()
            )
    with pytest.raises(RuntimeError, match="inference tensor"):
        module(torch.randn(2, 6, 5, 4))


def test_a_backward_refuses_running_statistics_that_have_moved_since(backend):
    module = pk.BNReLU2d(6).eval()
    y = module(torch.randn(2, 6, 5, 4, requires_grad=True))
    module.train()(torch.randn(2, 6, 5, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


FUSED = {
    "bn_relu_conv": lambda: pk.BNReLUConv2d(10, 6, 3),
    "stage": lambda: random_stage(memory="rebuild"),
    "float32_stream": lambda: random_stage(residual_dtype=torch.float32),
    "converted_block": lambda: pk.convert(foreign.FunctionalBottleneck(10, 4)),
}


def without_statistics(module):
    for bn in norms(module):
        bn.running_mean = bn.running_var = None


def without_count(module):
    for bn in norms(module):
        bn.momentum = bn.num_batches_tracked = None


def with_stale_sizes(module):
    """As after channels were pruned from the tensors alone."""
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.num_features += 3
        elif isinstance(child, nn.Conv2d):
            child.in_channels, child.out_channels = child.in_channels + 3, child.out_channels + 3


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_batch_norms_changed_by_hand_run_as_in_eager(make, backend):
    for configure, training in (
        (without_statistics, True),
        (without_statistics, False),
        (without_count, True),
        (with_stale_sizes, False),
    ):
        module = make().double().train(training)
        configure(module)
        x = torch.randn(3, 10, 5, 4, dtype=torch.float64)
        found, expected = (evaluate(m, {"x": x}) for m in (module, plain_copy(module)))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def with_one_channel_more(name, bn):
    setattr(bn, name, torch.ones(len(getattr(bn, name)) + 1))


INVALID = {
    "no_mean": lambda bn: setattr(bn, "running_mean", None),
    "no_variance": lambda bn: setattr(bn, "running_var", None),
    "no_eps": lambda bn: setattr(bn, "eps", 0.0),
    "longer_mean": partial(with_one_channel_more, "running_mean"),
    "longer_variance": partial(with_one_channel_more, "running_var"),
}


@pytest.mark.parametrize("name", ["bn_relu_conv", "stage", "converted_block"])
def test_batch_norms_that_eager_refuses_are_refused(name, backend):
    for configure in INVALID.values():
        module = FUSED[name]()
        configure(norms(module)[-1])
        x = torch.randn(3, 10, 5, 4)
        with pytest.raises((RuntimeError, ValueError)):
            plain_copy(module)(x)
        with pytest.raises((RuntimeError, ValueError)):
            module(x)
