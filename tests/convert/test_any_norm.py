"""Units of any norm, activation and convolution equal plain PyTorch, and run fused."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels import activations
from preact_kernels.kernels import cpu, pytorch_conv
from tests.convert.any_norm import Net, assert_runs, images, two_units
from tests.convert.random_model_parts import Same
from tests.convert.trial import Subject, assert_alike

pytestmark = pytest.mark.backends("cpu")


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
        trial = assert_runs(two_units, expected, expected, dims, channels_last, norm)
        assert "2 of 2 norms are fused" in str(trial.reports[0])


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


class DelegatingNorm(nn.GroupNorm):
    """Calls the function of the norm through four others, and has no weight to find it by."""

    def forward(self, x):
        def delegate(depth):
            return delegate(depth - 1) if depth else F.group_norm(x, self.num_groups)

        return delegate(4)


def test_norms_that_are_called_through_other_functions_are_in_the_report():
    norm = partial(DelegatingNorm, 2, 4, affine=False)
    trial = assert_runs(two_units, "^GN-SiLU-Conv$", "^GN-SiLU-Conv$", norm=norm)
    assert "2 of 2 norms are fused" in str(trial.reports[0])


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
    "Softsign": [F.softsign, nn.Softsign()],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_run_fused(name):
    for act in ACTIVATIONS[name]:
        assert_runs(partial(two_units, act=act), f"^GN-{name}-Conv$", f"^GN-{name}-Conv$")


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_every_function_of_an_activation_runs_fused(name):
    row = activations.ACTIVATIONS[name]
    options = {"approximate": "tanh"} if name == "gelu_tanh" else {}
    for function in row.calls:
        arguments = (2.0,) if row.parameter else ()
        if function in (F.hardtanh, F.hardtanh_):
            arguments = 0, 6
        act = partial(call, function, arguments, options)
        assert_runs(partial(two_units, act=act), *[f"^GN-{row.title}-Conv$"] * 2)


def call(function, arguments, options, h):
    return function(h, *arguments, **options)


@pytest.mark.parametrize("function", [F.relu, F.silu, F.leaky_relu])
def test_a_norm_that_an_activation_changed_in_place_may_be_read_again(function):
    def forward(net, x):
        h = net.norm(x)
        a = function(h, inplace=True)
        return net.conv2(F.silu(net.norm2(net.conv(a) + h)))

    assert_runs(forward, "", "^GN-SiLU-Conv$")


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
    """Products with a whole image, and with a value for each column."""

    def forward(net, x):
        h = net.norm(x) * x
        y = net.norm2(x) * torch.rand(6, dtype=x.dtype)
        return net.conv(F.silu(h)) + net.conv2(F.silu(y))

    assert_runs(forward, "^; read by mul", "^; read by mul")


def test_a_scale_of_a_wider_dtype_gives_its_dtype():
    net, x = Net(two_units).bfloat16(), torch.randn(2, 4, 5, 6, dtype=torch.bfloat16)
    found = []

    def forward(net, x):
        h = net.norm(x) * torch.full((1, 4, 1, 1), 1 / 3)
        found.append(h.dtype)
        return net.conv(F.silu(h).to(x.dtype))

    net.function = [forward]
    net(x), pk.convert(net)(x)
    assert found == [torch.float32, torch.float32]


def test_a_scale_that_changes_in_place_is_read_before():
    def forward(net, x):
        scale, shift = (t.detach() * 1 for t in net.scale_and_shift(x))
        h = net.norm(x) * scale + shift
        scale.mul_(2)
        return net.conv(F.silu(h)) * scale + net.norm2(x)

    assert_runs(forward, "^GN-Scale-Shift", "")


# Dropout.


@pytest.mark.parametrize(("dims", "channels_last"), FORMATS)
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_draws_the_numbers_of_plain_pytorch(p, dims, channels_last):
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


# Bytes that are kept for the backward.


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_input_of_a_projection_is_kept_once(channels_last):
    """diffusers copies an input to NCHW before the projection."""

    def forward(net, x):
        x = x.requires_grad_()
        h = two_units(net, x)
        x = x.contiguous()
        x = net.conv(x)
        return x + h

    net = Net(forward, bias=False)
    x = images(torch.randn, (16, 16), channels_last)
    if channels_last:
        net.to(memory_format=torch.channels_last)
    kept = pk.saved_bytes(pk.convert(net), x)
    assert 2 * x.nbytes <= kept < 2.1 * x.nbytes


def strided(kernel, net, x):
    y = net.conv(F.silu(net.norm(x)))
    weight = net.conv.weight[:, :1, :kernel, :kernel]
    return y, F.conv2d(x, weight, stride=2, groups=4)


@pytest.mark.parametrize(("norm", "act"), [(None, F.silu), (lambda: nn.BatchNorm2d(4), F.relu)])
def test_images_of_units_without_convolutions_are_not_copied(norm, act):
    """The program reads the input and the result of a unit between other operations."""

    def forward(net, x):
        x = torch.sin(net.conv2(x))
        h = Same.apply(act(net.norm(x)))
        return net.conv(h) + x * x

    assert_runs(forward, "; read by a custom autograd function", "", norm=norm)
    net, x = Net(forward, norm=norm), images(torch.randn, (16, 16))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        net, x = net.to(memory_format=memory_format), x.contiguous(memory_format=memory_format)
        kept = pk.saved_bytes(pk.convert(net), x)
        assert kept < 4.1 * x.nbytes, memory_format  # x, and what sin, the unit and conv read


def alone(net, x):
    """A unit that no convolution runs with."""
    return torch.sin(F.relu(net.norm(torch.sin(x))))


@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_one_volume_is_not_copied(memory):
    net, x = pk.convert(Net(alone, dims=3), memory=memory), torch.randn(1, 4, 4, 5, 6)
    x.requires_grad_()
    assert pk.saved_bytes(net, x) < (3.1 if memory == "store" else 2.1) * x.nbytes
    assert net(x).stride() == x.stride()


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_units_alone_keep_the_strides_of_images(norm, dims):
    """Gradient penalties call `view` on them."""
    plain = Net(alone, dims, partial(NORMS[norm], dims))
    converted, found = pk.convert(copy.deepcopy(plain)), []
    x = torch.randn(2, 4, *[12, 3, 5][:dims]).requires_grad_()
    for net in (plain, converted):
        (dx,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        assert dx.stride() == x.stride()
        found.append([dx, *torch.autograd.grad(dx.view(2, -1).norm(dim=1).sum(), x)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("size", "runs_in_planes"), [((8, 8), True), ((2, 3), False)])
def test_images_of_few_pixels_run_in_nhwc(size, runs_in_planes, monkeypatch):
    seen, run = [], cpu.CPUKernels.norm_act_forward

    def norm_act_forward(self, x, *rest):
        seen.append(x.is_contiguous())
        return run(self, x, *rest)

    monkeypatch.setattr(cpu.CPUKernels, "norm_act_forward", norm_act_forward)
    pk.convert(Net(alone))(images(torch.randn, size))
    assert seen == [runs_in_planes]


@pytest.mark.parametrize("kernel", [1, 3])
def test_an_image_of_a_strided_convolution_is_not_copied(kernel):
    """PyTorch may corrupt memory where strided 1x1 convolutions of few channels run in NHWC."""
    net, x = Net(partial(strided, kernel), bias=False), images(torch.randn, (16, 16))
    for memory in ("store", "rebuild", "checkpoint"):
        copies = memory == "store" and kernel == 1
        kept = pk.saved_bytes(pk.convert(net, memory=memory), x)
        assert kept < (1.1 + copies) * x.nbytes, memory


# Autograd, modes and shapes.


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


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_backward_reads_the_data_that_replaced_those_of_a_convolution(dims):
    """Plain PyTorch saves the parameter itself."""

    def forward(net, x):
        y = two_units(net, x)
        net.conv.weight.data = net.conv.weight.data * 0.9
        return y

    assert_runs(forward, "GN-SiLU-Conv", "GN-SiLU-Conv", dims=dims)


# The report.

# Norm, convolution and dropout for 32 channels; what the report says of the convolution on a CPU.
CONVOLUTIONS = {
    "fused": (nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, padding=1), 0.0, "^$"),
    "rows": (nn.GroupNorm(4, 32), nn.Conv2d(32, 16, 1), 0.0, "^$"),
    "sequence": (nn.BatchNorm1d(32), nn.Conv1d(32, 16, 1), 0.0, "^$"),
    "groups": (nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1, groups=2), 0.0, "^groups: .* 1, got 2$"),
    "channels": (
        nn.InstanceNorm2d(32, affine=True),
        nn.Conv2d(32, 20, 1),
        0.0,
        "^conv_weight: .* 32 to 20$",
    ),
    "padding": (nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3), 0.0, r"^padding: .* got \(0, 0\)$"),
    "dropout": (nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1), 0.5, "^dropout: "),
    "volume": (nn.BatchNorm3d(32), nn.Conv3d(32, 32, 1), 0.0, "^x: .* got volumes$"),
    "sequence with groups": (nn.GroupNorm(4, 32), nn.Conv1d(32, 8, 3, groups=4), 0.0, "^groups: "),
}


class ReportedNet(nn.Module):
    def __init__(self, norm, conv, p):
        super().__init__()
        self.norm, self.drop, self.conv = norm, nn.Dropout(p), conv

    def forward(self, x):
        return self.conv(self.drop(F.silu(self.norm(x))))


@pytest.mark.parametrize(("norm", "conv", "p", "expected"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_the_report_says_why_a_convolution_runs_in_pytorch(
    norm, conv, p, expected, backend, monkeypatch
):
    model, ran = pk.convert(ReportedNet(norm, conv, p)), []
    convolve = pytorch_conv._convolve
    monkeypatch.setattr(pytorch_conv, "_convolve", lambda *a: ran.append(a) or convolve(*a))
    model(torch.randn(2, 32, *[4] * (conv.weight.dim() - 2)))
    (site,) = report = pk.conversion_report(model)
    assert re.search(expected, site.refusal)
    assert bool(site.refusal) == bool(ran) == ("PyTorch convolution" in str(report))
    with pk.use_backend("reference"):
        model(torch.randn(2, 32, *[4] * (conv.weight.dim() - 2)))
    assert pk.conversion_report(model)[0].refusal


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_report_of_a_backend_by_name_on_another_device(device, backend):
    model = pk.convert(ReportedNet(nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1), 0.0).to(device))
    with pk.use_backend("cpu"):
        model(torch.randn(2, 32, 4, 4, device=device))
        assert bool(pk.conversion_report(model)[0].refusal) is (device == "meta")


def test_the_report_says_why_a_projection_runs_in_pytorch(backend):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1, bias=False)
            self.projection = nn.Conv2d(32, 32, 1, groups=2, bias=False)

        def forward(self, x):
            a = F.relu(self.norm(x))
            return self.conv(a) + self.projection(a)

    model = pk.convert(Block())
    model(torch.randn(2, 32, 4, 4))
    (site,) = pk.conversion_report(model)
    assert (site.into, site.conv) == ("residual block", "conv")
    assert re.search("^groups: .* got 2$", site.refusal)


def test_the_report_names_the_dtype_that_a_convolution_does_not_serve(backend):
    model = pk.convert(ReportedNet(nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1), 0.0))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 32, 4, 4))
    assert re.search("^x: .* got float32$", pk.conversion_report(model)[0].refusal)
