"""`bn_relu` and `BNReLU2d` equal plain PyTorch on every backend.

Here too: inputs at the limits, for which `bn_relu_conv2d` is tested alike.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from tests.cases import (
    INF,
    NAN,
    SHAPES,
    ConvCase,
    Repeated,
    batch_norm_inputs,
    conv_inputs,
    enough,
    plain_bn_relu,
    plain_bn_relu_conv2d,
    randomised,
)
from tests.oracle import check, evaluate, same_bits

CASE = ConvCase("typical", (3, 16, 6, 5), 24, padding=1, conv_bias=True, residual=True)
OPS = {
    "bn_relu": (pk.bn_relu, plain_bn_relu, partial(batch_norm_inputs, CASE.x)),
    "bn_relu_conv2d": (
        partial(pk.bn_relu_conv2d, **CASE.conv),
        partial(plain_bn_relu_conv2d, **CASE.conv),
        partial(conv_inputs, CASE),
    ),
}
every_op = pytest.mark.parametrize(("fused", "plain", "make_inputs"), OPS.values(), ids=OPS)
on_kernels = pytest.mark.backends("cpu", "triton", "cuda", slow=("reference",))
both_modes = pytest.mark.parametrize("training", [True, False])


def check_op(fused, plain, inputs, frozen=(), **arguments):
    fused, plain = partial(fused, **arguments), partial(plain, **arguments)
    return check(fused, plain, inputs, frozen=frozen)


@on_kernels
@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES[1::3], ids=str)
@both_modes
def test_forward_backward_and_running_statistics(shape, training, dtype):
    problems = [batch_norm_inputs(shape, dtype) for _ in range(enough(shape))]
    check_op(pk.bn_relu, plain_bn_relu, problems, training=training)


@on_kernels
@every_op
@pytest.mark.covering(1, cpu=2)
@both_modes
def test_large_means(training, fused, plain, make_inputs, backend):
    check_op(fused, plain, make_inputs(mean_over_std=1000), training=training)


@pytest.mark.backends("cpu")
@every_op
def test_constant_channels(fused, plain, make_inputs, backend):
    inputs = make_inputs()
    for channel, value in ((0, 0.0), (3, 3.0), (6, -1e4)):
        inputs["x"][:, channel] = value
    check_op(fused, plain, inputs, training=True)


@on_kernels
@pytest.mark.covering(1)
@both_modes
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        *(("bn_relu", name) for name in ("x", "bn_weight", "bn_bias")),
        *(("bn_relu_conv2d", name) for name in ("x", "bn_weight", "bn_bias")),
        *(("bn_relu_conv2d", name) for name in ("conv_weight", "residual")),
    ],
)
def test_a_single_wanted_gradient_comes_alone(op, wanted, training, backend):
    fused, plain, make_inputs = OPS[op]
    inputs = make_inputs()
    frozen = [name for name in inputs if name != wanted]
    results = check_op(fused, plain, inputs, frozen, training=training)
    assert [n for n, t in results.items() if n.startswith("d") and t is not None] == [f"d{wanted}"]


@pytest.mark.backends("cpu")
@every_op
@both_modes
def test_without_gradients_nothing_is_recorded(training, fused, plain, make_inputs, backend):
    inputs, call = make_inputs(), partial(fused, training=training)
    expected = evaluate(call, inputs)["y"]
    frozen = evaluate(call, inputs, frozen=list(inputs))["y"]
    assert not frozen.requires_grad and same_bits(frozen, expected)
    with torch.no_grad():
        assert same_bits(call(**{n: t.clone() for n, t in inputs.items()}), expected)


@both_modes
def test_nan_and_inf_spread_as_in_eager(training, backend):
    for where, value in (("x", NAN), ("x", INF), ("x", -INF), ("bn_bias", NAN), ("bn_bias", -INF)):
        inputs = batch_norm_inputs(CASE.x)
        inputs[where].view(-1)[3] = value
        fused = evaluate(partial(pk.bn_relu, training=training), inputs)
        plain = evaluate(partial(plain_bn_relu, training=training), inputs)
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_no_gradient_passes_where_a_pre_activation_rounds_to_zero(backend):
    inputs = batch_norm_inputs(CASE.x, torch.float16)
    inputs["bn_weight"], inputs["bn_bias"] = torch.full((16,), 1e-9), torch.zeros(16)
    results = evaluate(partial(pk.bn_relu, training=True), inputs)
    assert not any(results[name].any() for name in ("y", "dx", "dbn_weight", "dbn_bias"))


@pytest.mark.covering(1)
@pytest.mark.backends("cpu")
@both_modes
@pytest.mark.parametrize(
    "options",
    [
        {"eps": 1e-2, "momentum": 0.6},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=lambda o: ",".join(f"{n}={v}" for n, v in o.items()),
)
def test_module_equals_its_child_and_a_relu(options, training, training_dtype):
    module = randomised(pk.BNReLU2d(16, **options)).train(training)
    check(module, PlainBNReLU2d(module.bn), {"x": torch.randn(CASE.x).to(training_dtype)})


class PlainBNReLU2d(nn.Module):
    """What `pk.BNReLU2d` equals, of the child given."""

    def __init__(self, bn):
        super().__init__()
        self.bn = bn
        self.training = bn.training

    def forward(self, x):
        return F.relu(self.bn(x))


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("momentum", [None, 0.1])
def test_running_statistics_follow_many_batches_as_in_eager(momentum, backend):
    module = randomised(pk.BNReLU2d(16, momentum=momentum))
    inputs = [{"x": torch.randn(3, 16, 5, 12) * 3 + 1} for _ in range(4)]
    results = check(Repeated(module), Repeated(PlainBNReLU2d(module.bn)), inputs)
    assert results["module.bn.num_batches_tracked"] == 3


@pytest.mark.backends("cpu")
def test_frozen_batch_norm_trains_its_weights_and_keeps_its_statistics(backend):
    module = randomised(pk.BNReLU2d(16))
    module.bn.eval()
    results = check(module, PlainBNReLU2d(module.bn), {"x": torch.randn(CASE.x)})
    assert results["dbn.weight"].abs().sum() > 0
    assert same_bits(results["bn.running_mean"], module.bn.running_mean)
    assert results["bn.num_batches_tracked"] == 0
