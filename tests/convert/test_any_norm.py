"""Units of any norm, activation and convolution equal plain PyTorch, and run fused."""

import copy
import itertools
import re
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from tests.convert.trial import Copies, Subject, assert_alike
from tests.oracle import distance

pytestmark = pytest.mark.backends("cpu")


class Net(nn.Module):
    """Two norms and convolutions, called by a forward; images have 4 channels."""

    def __init__(self, forward, dims=2, norm=None, bias=True):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = norm or (lambda: nn.GroupNorm(2, 4))
        self.norm, self.conv = norm(), conv(4, 4, 3, padding=1, bias=bias)
        self.norm2, self.conv2 = norm(), conv(4, 4, 3, padding=1)
        self.rows = nn.Linear(4, 8)
        self.function = [forward]

    def scale_and_shift(self, x):
        """Returns two tensors [N, C, 1, ...]."""
        rows = self.rows(x.flatten(2).mean(2))
        return rows[(..., *[None] * (x.dim() - 2))].chunk(2, 1)

    def forward(self, x):
        return self.function[0](self, x)


def images(randn, size=(5, 6), channels_last=False):
    x = randn(2, 4, *size)
    if channels_last:
        x = x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()])
    return x.requires_grad_()


def assert_runs(forward, into, second="", dims=2, channels_last=False, norm=None):
    """Asserts that a forward behaves as in plain PyTorch, and what its norms ran as.

    Args:
        forward: takes the network and images.
        into: pattern of the report of the first norm: what ran fused, and the reason.
        second: likewise of the second norm.
        dims: dimensions of the images.
        channels_last: memory format of the network and the images.
        norm: builds a norm.
    """
    size = {1: (7,), 2: (5, 6), 3: (3, 4, 5)}[dims]
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}

    def before(net):
        if channels_last:
            net.to(memory_format=formats[dims])

    make_input = partial(images, size=size, channels_last=channels_last)
    trial = assert_alike(Subject(partial(Net, forward, dims, norm), before, make_input=make_input))
    for report in trial.reports:
        for site, expected in zip(report, (into, second), strict=True):
            text = f"{site.into}; {site.reason}" if site.reason else site.into
            assert re.search(expected, text), site
    return trial


def two_units(net, x, act=F.silu):
    return net.conv2(act(net.norm2(net.conv(act(net.norm(x))))))


# Norms and dimensions.

NORMS = {
    "GN": lambda dims: nn.GroupNorm(2, 4),
    "GN of one group": lambda dims: nn.GroupNorm(1, 4, affine=False),
    "BN": lambda dims: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](4),
    "IN": lambda dims: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1](4),
    "IN with statistics": lambda dims: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[
        dims - 1
    ](4, affine=True, track_running_stats=True),
}
FORMATS = [(1, False), (2, False), (2, True), (3, False), (3, True)]


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_any_dimensions_run_fused(name):
    expected = f"^{name[:2]}-SiLU-Conv$"
    for dims, channels_last in FORMATS:
        norm = partial(NORMS[name], dims)
        assert_runs(two_units, expected, expected, dims, channels_last, norm)


@pytest.mark.parametrize(("dims", "channels_last"), FORMATS)
def test_functions_between_units_stay_deferred(dims, channels_last):
    """Additions of a value per image and channel, products, interpolation and pooling."""

    def forward(net, x):
        scale, shift = net.scale_and_shift(x)
        h = net.conv(F.silu(net.norm(x))) + shift
        h = (h + x) / 1.5
        h = 0.7 * F.interpolate(h, scale_factor=2)
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
        h = pool(h, 2) + scale.detach()
        wide = F.silu(F.group_norm(torch.cat([h, x], 1), 2))
        conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        weight = net.conv2.weight.repeat(1, 2, *[1] * dims)
        return net.conv2(F.silu(net.norm2(h))) + conv(wide, weight, padding=1)

    assert_runs(forward, "^GN-SiLU-Conv$", "^GN-SiLU-Conv$", dims, channels_last)


class CenteredNorm(nn.Module):
    """A group norm whose weight is stored minus one."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return F.group_norm(x, 2, self.weight + 1, self.bias)


def test_norms_of_other_classes_run_fused():
    """The report lists them, although their weights are computed."""
    assert_runs(two_units, "^GN-SiLU-Conv$", "^GN-SiLU-Conv$", norm=CenteredNorm)


class CallsANorm(nn.Module):
    """A norm and a convolution without modules of PyTorch."""

    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4, 1, 1))

    def forward(self, x):
        return F.conv2d(F.silu(F.group_norm(x, 2, self.scale)), self.weight)


def test_modules_that_call_a_norm_run_fused():
    net, x = CallsANorm(), torch.randn(2, 4, 8, 8)
    plain = pk.saved_bytes(net, x)
    assert pk.saved_bytes(pk.convert(net), x) < 0.4 * plain
    assert len(pk.conversion_report(net)) == 0  # no module is a norm


class Flagged(nn.Module):
    """Has attributes with the names of norms, and calls none."""

    def __init__(self):
        super().__init__()
        self.group_norm, self.bias = False, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.conv.batch_norm if self.group_norm else x) + self.bias[:, None, None]


def test_attributes_with_the_name_of_a_norm_are_none():
    net = pk.convert(nn.Sequential(Flagged(), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 1)))
    net(torch.randn(2, 4, 5, 6))
    assert [site.name for site in pk.conversion_report(net)] == ["1"]


def test_a_batch_norm_that_nothing_reads_counts_its_batch():
    def forward(net, x):
        h = net.norm(x)
        net.norm2(h)
        return F.relu(h).cumsum(1)

    assert_runs(forward, "", "", norm=lambda: nn.BatchNorm2d(4))


def test_layer_norms_of_images_run_fused():
    def forward(net, x):
        h = net.conv(F.gelu(F.layer_norm(x, x.shape[1:])))
        return F.layer_norm(h, h.shape[2:]) + F.layer_norm(h, h.shape[1:], torch.ones_like(h[0]))

    trial = assert_alike(Subject(partial(Net, forward), make_input=images))
    assert not trial.errors
    net, x = Net(forward), torch.randn(2, 4, 5, 6, requires_grad=True)
    norm = net.norm  # so that the region opens
    assert pk.saved_bytes(pk.convert(net), x) < pk.saved_bytes(pk.revert(net), x)
    assert norm is net.norm


# Activations.

ACTIVATIONS = {
    "ReLU": [F.relu, torch.relu, lambda h: h.relu_()],
    "ReLU6": [F.relu6, nn.ReLU6(True), lambda h: F.hardtanh(h, 0.0, 6), nn.Hardtanh(0, 6)],
    "LeakyReLU": [F.leaky_relu, F.leaky_relu_, nn.LeakyReLU(0.3), nn.LeakyReLU(-0.2)],
    "SiLU": [
        *(F.silu, nn.SiLU(inplace=True), lambda h: h * torch.sigmoid(h)),
        *(lambda h: h.sigmoid() * h, lambda h: h.mul_(h.sigmoid()), lambda h: h * F.sigmoid(h)),
    ],
    "GELU": [F.gelu, nn.GELU("tanh"), lambda h: F.gelu(h, approximate="tanh")],
    "ELU": [F.elu, nn.ELU(0.5, inplace=True), lambda h: F.elu_(h, 2.0), lambda h: F.elu(h, -1)],
    "Hardswish": [F.hardswish, nn.Hardswish(inplace=True)],
    "Mish": [F.mish, nn.Mish(inplace=True)],
    "Softplus": [F.softplus, nn.Softplus(2.0), lambda h: F.softplus(h, beta=3, threshold=20)],
    "Sigmoid": [torch.sigmoid, lambda h: h.sigmoid_(), nn.Sigmoid(), torch.special.expit],
    "Tanh": [torch.tanh, lambda h: h.tanh_(), nn.Tanh(), F.tanh],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_run_fused(name):
    for act in ACTIVATIONS[name]:
        assert_runs(partial(two_units, act=act), f"^GN-{name}-Conv$", f"^GN-{name}-Conv$")


def test_a_norm_before_a_convolution_runs_fused():
    assert_runs(partial(two_units, act=lambda h: h), "^GN-Conv$", "^GN-Conv$")


OTHERS = {
    "clamp": lambda h: h.clamp(0, 6),  # has another gradient at 0 and 6
    "softplus": lambda h: F.softplus(h, 1, 10),
    "leaky_relu": lambda h: F.leaky_relu_(h, float("inf")),
    "hardtanh": F.hardtanh,
    "selu": F.selu,
    "prelu": lambda h: F.prelu(h, torch.tensor(0.1, dtype=h.dtype)),
    "mul": lambda h: h * h,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_run_plain(name):
    reason = f"^; (read by {name}|its output is used more than once)"
    assert_runs(partial(two_units, act=OTHERS[name]), reason, reason)


def test_a_sigmoid_that_is_read_again_stays():
    def forward(net, x):
        h = net.norm(x)
        gate = torch.sigmoid(h)
        y = h * gate
        return net.conv(y) + net.conv2(F.silu(net.norm2(x))) * gate

    assert_runs(forward, "^; its output is used more than once$", "^GN-SiLU-Conv$")


def test_a_negative_slope_in_place_raises_as_in_plain_pytorch():
    """Its gradient does not follow from its result."""
    plain = Net(partial(two_units, act=lambda h: F.leaky_relu_(h, -0.5)))
    for net in (plain, pk.convert(plain)):
        with pytest.raises(RuntimeError, match="negative slope"):
            net(torch.randn(2, 4, 5, 6)).sum().backward()


# Scale and shift.

SCALES_AND_SHIFTS = {
    "GN-Scale-Shift-SiLU-Conv": [
        lambda h, scale, shift: h * (1 + scale) + shift,
        lambda h, scale, shift: shift + (scale + 1) * h,
        lambda h, scale, shift: torch.addcmul(shift, h, scale + 1),
        lambda h, scale, shift: h.mul_(scale.exp()).add_(shift),
        lambda h, scale, shift: h * scale[:1] + shift.mean(0, keepdim=True),
    ],
    "GN-Scale-SiLU-Conv": [lambda h, scale, shift: h * scale],
    "GN-Shift-SiLU-Conv": [lambda h, scale, shift: h + shift],
}


@pytest.mark.parametrize("name", SCALES_AND_SHIFTS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_scale_and_shift_run_fused(name, dims):
    for function in SCALES_AND_SHIFTS[name]:

        def forward(net, x, function=function):
            h = function(net.norm(x), *net.scale_and_shift(x))
            return net.conv2(F.silu(net.norm2(net.conv(F.silu(h)))))

        assert_runs(forward, f"^{name}$", "^GN-SiLU-Conv$", dims)


def test_other_products_run_plain():
    """Of a norm and a tensor with a value per pixel, per channel of sequences, or of two norms."""

    def forward(net, x):
        h = net.norm(x) * x
        y = net.norm2(x) * torch.rand(6, dtype=x.dtype)
        return net.conv(F.silu(h)) + net.conv2(F.silu(y))

    assert_runs(forward, "^; read by mul", "^; read by mul")


def test_a_scale_that_changes_in_place_is_read_before():
    def forward(net, x):
        scale, shift = (t.detach() * 1 for t in net.scale_and_shift(x))
        h = net.norm(x) * scale + shift
        scale.mul_(2)
        return net.conv(F.silu(h)) * scale + net.norm2(x)

    assert_runs(forward, "^GN-Scale-Shift", "")


# Dropout.


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_draws_the_numbers_of_plain_pytorch(p):
    for dims, channels_last in FORMATS:
        check_dropout(p, dims, channels_last)


def check_dropout(p, dims, channels_last):
    """`assert_alike` compares the values, and the state of the generator at the end."""

    def forward(net, x):
        h = F.dropout(F.silu(net.norm(x)), p, net.training, inplace=dims == 2)
        h = net.conv(h) + torch.rand_like(x)
        return net.conv2(F.dropout(net.norm2(h), 0.5, net.training))

    trial = assert_runs(forward, "^GN-SiLU", "^GN-", dims, channels_last)
    for report, dropout in zip(trial.reports, ("-Dropout", "-Dropout", ""), strict=True):
        for site, into in zip(report, (f"GN-SiLU{dropout}-Conv", f"GN{dropout}-Conv"), strict=True):
            assert site.into.startswith(into)


def test_dropout_without_a_convolution():
    def forward(net, x):
        h = F.dropout(F.silu(net.norm(x)), 0.5, net.training)
        y = F.dropout(F.silu(net.norm2(x)), 0.5, net.training)
        return F.avg_pool2d(h, 2), y * 2, net.conv(h)

    assert_runs(forward, "^GN-SiLU; ", "^GN-SiLU; ")


def test_feature_dropout_runs_plain():
    def forward(net, x):
        return net.conv(F.dropout2d(F.silu(net.norm(x)), 0.5)) + net.norm2(x)

    assert_runs(forward, "^GN-SiLU; read by ", "")


# Residual additions, and what else stands between.


def test_residual_additions_run_fused():
    def forward(net, x):
        h = two_units(net, x)
        return (x + h) / 2**0.5 + two_units(net, h) * 0.5

    assert_runs(forward, "^GN-SiLU-Conv$", "^GN-SiLU-Conv( and residual add)?")


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


def test_casts_that_change_nothing():
    class GroupNorm32(nn.GroupNorm):
        def forward(self, x):
            return super().forward(x.double()).type(x.dtype)

    into = "^GN-SiLU-Conv$"
    assert_runs(two_units, into, into, norm=lambda: GroupNorm32(2, 4))


def test_weights_that_are_computed():
    def forward(net, x):
        weight = net.conv.weight
        weight = weight / weight.flatten(1).std(1)[:, None, None, None]
        h = F.conv2d(F.relu(net.norm(x)), weight, net.conv.bias, padding=1)
        return net.conv2(F.relu(net.norm2(h)))

    assert_runs(forward, "^GN-ReLU-Conv$", "^GN-ReLU-Conv$")


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


# Bytes that are kept for the backward.


def kept_share(forward, size=(16, 16), p=None):
    net, x = Net(forward, bias=False).train(), torch.randn(2, 4, *size)
    plain = pk.saved_bytes(net, x)
    return pk.saved_bytes(pk.convert(net), x) / plain


def test_a_diffusion_block_keeps_a_third():
    def forward(net, x):
        x = x.requires_grad_()
        scale, shift = net.scale_and_shift(x)
        for _ in range(4):
            h = net.conv(F.silu(net.norm(x)))
            h = F.silu(net.norm2(h) * (1 + scale) + shift)
            x = (x + net.conv2(F.dropout(h, 0.1, True))) / 1.4
        return x

    # Plain, in images of 4 bytes an element: 3 for the first unit; for the second one its input,
    # the results of norm and scale, activation (or dropped), and noise: 5. Fused: 2, and bits.
    assert kept_share(forward) < 0.3


def test_a_unit_keeps_a_third():
    assert kept_share(two_units) < 0.36


def test_an_activation_that_is_read_twice_is_kept_once():
    def forward(net, x):
        a = F.silu(net.norm(x))
        y, means = net.conv(a), F.avg_pool2d(a, 2).abs()
        return y + (a.mean((2, 3)) + means.mean((2, 3)))[..., None, None]

    # Plain: the input, the result of the norm, the activation. Fused: input and activation.
    assert kept_share(forward) < 0.75


# Autograd, modes and shapes.


def test_custom_functions_pass_gradients_on():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t * t

        @staticmethod
        def backward(ctx, dy):
            return 3 * dy * ctx.saved_tensors[0]

    def forward(net, x):
        scale, shift = net.scale_and_shift(x)
        h = net.norm(x)
        a = F.silu(h * scale + shift)
        y = Square.apply(F.silu(net.norm2(x)))
        return Square.apply(a) + F.dropout(a, 0.5, net.training) + Square.apply(net.conv(y) + shift)

    assert_runs(forward, "", "")


def test_inputs_that_are_no_images_run_plain():
    def forward(net, x):
        rows = F.group_norm(x.mean((2, 3)), 2)
        single = F.group_norm(x[:, :, :1, :1], 4)
        turned = F.silu(net.norm(x.transpose(2, 3)))
        return net.conv(turned).mean() * rows.sum() + single.sum() + net.norm2(x)

    assert_runs(forward, "^; its input is no image", "")


def test_errors_are_those_of_plain_pytorch():
    for call in (
        lambda x: F.group_norm(x, 3),
        lambda x: F.instance_norm(x[:, :, :1, :1]),
        lambda x: F.instance_norm(x, use_input_stats=False),
        lambda x: F.conv1d(F.silu(F.group_norm(x, 2)), x[0]),
    ):
        found = []
        for context in (pk.fuse(), torch.enable_grad()):
            with pytest.raises((RuntimeError, ValueError)) as error, context:
                call(torch.randn(2, 4, 5, 6))
            found.append(str(error.value))
        assert found[0] == found[1]


def test_autocast_gives_the_same_dtypes():
    def forward(net, x):
        scale, shift = net.scale_and_shift(x)
        h = net.conv(F.silu(net.norm(x)))
        return h, net.conv2(F.silu(net.norm2(h) * (1 + scale) + shift)) + x

    net, x, found = Net(forward), torch.randn(2, 4, 5, 6), []
    for m in (net, pk.convert(copy.deepcopy(net))):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(m(x))
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
    assert len(pk.conversion_report(m).fused) == 2


def test_the_compile_backend_fuses_any_norm():
    def forward(net, x):
        scale, shift = net.scale_and_shift(x)
        h = net.conv(F.silu(net.norm(x))) + shift
        return (net.conv2(F.silu(net.norm2(h) * (1 + scale) + shift)) + x) / 2

    net, x = Net(forward), torch.randn(2, 4, 8, 8)
    results = []
    for call in (net, torch.compile(net, backend="preact_kernels")):
        net.zero_grad()
        y = call(x)
        y.square().sum().backward()
        results.append([y, *(p.grad.clone() for p in net.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


# Named activations.


class SwishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * s * (1 + x * (1 - s))


class SubFunction(SwishFunction):
    @staticmethod
    def forward(ctx, x):
        return SwishFunction.forward(ctx, x) * 2


class Swish(nn.Module):
    def forward(self, x):
        return SwishFunction.apply(x)


class Doubled(Swish):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(Net):
    """A network with opaque activations."""

    def __init__(self, first, second):
        super().__init__(
            lambda net, x: net.conv2(second(net.norm2(net.conv(net.act(net.norm(x))))))
        )
        self.act = nn.Sequential(first())


NAMES = [{Swish: "silu"}, {SwishFunction: "silu"}, {SwishFunction: ("elu", 1.0), Swish: "silu"}]


@pytest.mark.parametrize("names", NAMES)
def test_named_activations_run_fused(names):
    x, results = torch.randn(2, 4, 5, 6, dtype=torch.float64), []
    for first, second in ((Swish, Swish()), (Doubled, SwishFunction.apply)):
        torch.manual_seed(1)
        net = Named(first, second).double()
        for m in (net, pk.convert(net, activations=names)):
            net.zero_grad()
            y = m(x)
            y.square().sum().backward()
            results.append([y, *(p.grad for p in net.parameters() if p.grad is not None)])
        if len(names) == 1:
            torch.testing.assert_close(*results[-2:])
        sites = pk.conversion_report(net)
        is_seen = first is Swish or SwishFunction in names
        assert sites[0].fused is is_seen
    assert "forward" not in net.act[0].__dict__ and "apply" not in SwishFunction.__dict__
    assert not pk.conversion_report(pk.revert(net)).fused


def test_subclasses_of_named_functions_have_no_name():
    net, x = Named(Swish, SubFunction.apply), torch.randn(2, 4, 5, 6)
    y = net(x)
    torch.testing.assert_close(pk.convert(net, activations={SwishFunction: "silu"})(x), y)
    assert [s.fused for s in pk.conversion_report(net)] == [True, False]


def test_operators_are_named():
    with torch.library._scoped_library("preact_test", "FRAGMENT") as library:
        library.define("swish(Tensor x) -> Tensor")
        library.impl("swish", lambda x: x * torch.sigmoid(x), "CompositeImplicitAutograd")
        swish = torch.ops.preact_test.swish
        net, x = Named(Swish, swish), torch.randn(2, 4, 5, 6)
        y = net(x)
        for name in (swish, swish.default):
            pk.convert(net, activations={name: "silu"})
            torch.testing.assert_close(net(x), y)
            assert [s.fused for s in pk.conversion_report(net)] == [False, True]


def test_wrong_names_of_activations_are_refused():
    net = Named(Swish, F.silu)
    with pytest.raises(ValueError, match=r"activation: expected one of 'relu', .*got 'swish'"):
        pk.convert(net, activations={Swish: "swish"})
    with pytest.raises(TypeError, match="activations: expected classes of modules"):
        pk.convert(net, activations={F.silu: "silu"})
    assert not pk.conversion_report(net).fused


def test_a_name_that_is_wrong_is_found_on_an_example():
    net = Named(Swish, Swish())
    pk.convert(net, activations={Swish: "gelu"}, example_inputs=torch.randn(2, 4, 5, 6))
    assert not pk.conversion_report(net).fused


def test_named_functions_on_two_threads():
    """`apply` is restored when the last region ends, whichever thread it is on."""
    net = pk.convert(Named(Swish, SwishFunction.apply), activations={SwishFunction: "silu"})
    expected, results = None, []
    x = torch.randn(2, 4, 5, 6)
    expected = net(x)

    def run():
        results.extend(net(x) for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60 and all(torch.equal(r, expected) for r in results)
    assert "apply" not in SwishFunction.__dict__


# The report.


def test_the_report_lists_norms_without_parameters():
    def forward(net, x):
        return net.conv(F.silu(net.norm(x))) + net.conv2(F.elu(net.norm2(x)))

    norms = itertools.cycle([nn.InstanceNorm2d(4), nn.GroupNorm(2, 4, affine=False)])
    into = "^IN-SiLU-Conv", "^GN-ELU-Conv"
    net = pk.convert(Net(forward, norm=lambda: next(norms)))
    net(torch.randn(2, 4, 5, 6, requires_grad=True))
    report = pk.conversion_report(net)
    for site, expected in zip(report, into, strict=True):
        assert re.search(expected, site.into) and site.name in str(report)
    assert "2 of 2 norms are fused" in str(report)
