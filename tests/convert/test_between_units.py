"""Operations between the units of any norm: additions, resampling, computed weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.conversion.deferred import Deferred
from tests.convert.any_norm import Net, assert_runs, images
from tests.convert.random_model_parts import QUESTIONS
from tests.convert.trial import Copies
from tests.oracle import distance

pytestmark = pytest.mark.backends("cpu")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_bias_added_after_the_convolution_is_its_own(dims, in_place):
    def convolved(net, x, norm, conv):
        conv_nd = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        y = conv_nd(F.silu(norm(x)), conv.weight, padding=1)
        bias = conv.bias.reshape(1, -1, *[1] * dims)
        return y.add_(bias) if in_place else y + bias

    def forward(net, x):
        h = convolved(net, x, net.norm, net.conv)
        return convolved(net, h, net.norm2, net.conv2) + x

    into = "^GN-SiLU-Conv$", "^GN-SiLU-Conv and residual add$"
    assert_runs(forward, *into, dims=dims)
    net, x = pk.convert(Net(forward, dims)), images(torch.randn, (5, 6, 4)[:dims])
    y = net(x)
    waiting, names = [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [n for n, _ in node.next_functions]
    assert not any("Add" in n for n in names), names


@pytest.mark.parametrize("memory", ["store", "checkpoint"])
@pytest.mark.parametrize(
    ("dtype", "bias_dtype", "autocast"),
    [
        (torch.float32, torch.bfloat16, False),
        (torch.float64, torch.float32, False),
        (torch.float32, torch.bfloat16, True),
    ],
)
def test_a_bias_in_a_narrower_dtype(dtype, bias_dtype, autocast, memory):
    def forward(net, x):
        h = F.conv2d(F.silu(net.norm(x)), net.conv.weight, padding=1)
        h = h + net.conv.bias.to(bias_dtype).view(1, -1, 1, 1)
        return net.conv2(F.silu(net.norm2(h)))

    net, x = Net(forward).to(dtype), torch.randn(2, 4, 5, 6, dtype=dtype)
    found = []
    for model in (net, pk.convert(copy.deepcopy(net), memory=memory)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert distance(a, b) <= (0.02 if autocast else 1e-5) * b.double().norm()


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_bias_may_change_after_the_convolution(is_inference):
    def forward(net, x):
        with torch.inference_mode(is_inference):
            bias = torch.ones(1, 4, 1, 1)
        y = F.conv2d(F.silu(net.norm(x)), net.conv.weight, padding=1) + bias
        with torch.inference_mode(is_inference):
            bias.zero_()
        return y + net.conv2(F.silu(net.norm2(y)))

    net, x = Net(forward), torch.randn(2, 4, 5, 6)
    converted = pk.convert(copy.deepcopy(net))
    results = [model(x) for model in (net, converted)]
    for model, y in zip((net, converted), results, strict=True):
        with torch.no_grad():
            model.conv2.bias.add_(1)
        y.sum().backward()
    torch.testing.assert_close(*results)
    expected, found = ([p.grad for p in m.parameters()] for m in (net, converted))
    torch.testing.assert_close(found, expected)


def test_other_additions_after_a_convolution_stay():
    def forward(net, x):
        _, shift = net.scale_and_shift(x)
        h = F.conv2d(F.silu(net.norm(x)), net.conv.weight, padding=1)
        h = h + shift
        return net.conv2(F.silu(net.norm2(h))) + net.conv.bias[:, None, None]

    assert_runs(forward, "^GN-SiLU-Conv$", "^GN-SiLU-Conv$")


def test_resampling_before_a_convolution():
    def forward(net, x):
        h = F.interpolate(F.silu(net.norm(x)), scale_factor=2, mode="nearest")
        h = F.silu(net.norm2(F.avg_pool2d(net.conv(h), 2)))
        return net.conv2(F.pad(h, (0, 1, 0, 1)))

    reason = "^GN-SiLU; the padding differs between two sides$"
    assert_runs(forward, r"^GN-SiLU; no convolution follows \(interpolate\)$", reason)


def test_a_dropout_that_refuses_images_still_does():
    model = pk.convert(nn.Sequential(nn.BatchNorm2d(3), nn.Dropout1d(0.0), nn.ReLU()))
    with pytest.raises(RuntimeError, match="dropout1d"):
        model(torch.randn(2, 3, 4, 4))


def test_deferred_tensors_answer_questions_about_types_as_tensors_do():
    norm, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)
    for name, ask in QUESTIONS.items():
        with pk.fuse():
            y = norm(x)
            assert type(y) is Deferred
            assert ask(y), name


def test_standardising_a_weight_is_not_deferred():
    """A batch norm of `[1, K, ...]`, as in the convolutions of BiT."""

    def forward(net, x):
        weight = net.conv.weight
        rows = F.batch_norm(weight.reshape(1, len(weight), -1), None, None, training=True)
        assert type(rows) is torch.Tensor
        h = F.conv2d(F.relu(net.norm(x)), rows.view_as(weight), net.conv.bias, padding=1)
        return net.conv2(F.relu(net.norm2(h)))

    assert_runs(forward, "^GN-ReLU-Conv$", "^GN-ReLU-Conv$")


def test_a_norm_of_one_sequence():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = pk.convert(nn.Sequential(norm, nn.ReLU(), nn.Conv1d(4, 4, 3)))
    model(torch.randn(1, 4, 8))
    assert [site.into for site in pk.conversion_report(model)] == ["BN-ReLU-Conv"]


def test_images_stay_in_nhwc_between_units():
    def forward(net, x):
        scale, shift = net.scale_and_shift(x)
        for _ in range(3):
            h = net.conv(F.silu(net.norm(x))) + scale
            x = (net.conv2(F.silu(net.norm2(h) + shift)) + x) * 0.5
            x = F.avg_pool2d(F.interpolate(x, scale_factor=2), 2)
        return x

    net, x = pk.convert(Net(forward)), torch.randn(2, 4, 6, 6)
    with Copies() as copies:
        net(x)
    assert copies.count == 2  # of the input and of the output
