"""In-place changes and memory formats around fused calls are those of plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from tests.convert import published_models as foreign
from tests.convert.foreign_cases import MODES, Block, built, report_of

pytestmark = pytest.mark.backends("cpu", slow=("reference", "triton"))


class Images(nn.Module):
    """Returns images, and views of images, which have other strides."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(foreign.FunctionalBlock(8, 8), foreign.FunctionalBlock(8, 8))
        self.scale = foreign.SqueezeExcite(8)

    def forward(self, x):
        h = self.stem(x)
        y = F.max_pool2d(self.blocks(h), 2)
        z = self.scale(torch.cat([y, y + 1], 1)[:, 8:])
        return h, y, z, y.flatten(2), x.transpose(2, 3), self.viewed(y)

    def viewed(self, y):
        return y.permute(0, 2, 3, 1)


class ImagesOfAnySize(Images):
    """The same; asks for a size."""

    def viewed(self, y):
        assert y.shape[2] > 1
        return y.permute(0, 2, 3, 1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("build", [Images, ImagesOfAnySize])
def test_results_have_the_memory_format_of_plain_pytorch(memory_format, build):
    model = build()
    plain = copy.deepcopy(model)
    pk.convert(model)
    x = torch.randn(2, 3, 8, 6).contiguous(memory_format=memory_format)
    for m in (model, plain):
        m.to(memory_format=memory_format)
    for found, expected in zip(model(x), plain(x), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


class Gated(Images):
    """Images times gates, which change in place behind an `nn.Identity`."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Identity(), nn.ReLU(inplace=True))
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
        h = self.blocks(self.stem(x))
        size = ((2, 3), True)
        pooled = h.mean(*size) + h.sum(*size) + h.amax(*size) + h.amin(*size)
        pooled += torch.mean(h, *size) + torch.sum(h, *size)
        pooled += torch.amax(h, *size) + torch.amin(h, *size)
        return F.relu(self.bn(h * self.gate(pooled).expand_as(h)))


class Copies(TorchDispatchMode):
    """Counts copies of images into other memory formats."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.clone.default and y.dim() == 4:
            self.count += (args[0].stride(1) == 1) is not (y.stride(1) == 1)
        return y


def test_nchw_models_are_converted_where_the_program_sees_tensors():
    model, x = Gated(), torch.randn(2, 3, 8, 6)
    plain = copy.deepcopy(model)
    pk.convert(model)
    with Copies() as copies:
        y = model(x)
    assert copies.count == 4  # of the inputs and results of the blocks and of the last batch norm
    torch.testing.assert_close(y, plain(x))


class Units(nn.Module):
    """Units, and parts with names of methods of tensors."""

    def __init__(self):
        super().__init__()
        self.bns = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(4))
        self.identity = nn.Identity()
        self.sum = Flat()

    def unit(self, index, x):
        return self.convs[index](F.relu(self.bns[index](x)))


class Flat(nn.Module):
    """Reads strides."""

    def forward(self, x):
        return x.view(int(x.shape[0]), -1)


class ReturnsIdentity(Units):
    def forward(self, x):
        h = self.unit(0, x)
        same = self.identity(h)
        return self.unit(1, h) + same.flatten(2).mul(3).view_as(same), same


class ReturnsInput(Units):
    def forward(self, x):
        same = self.identity(x)
        return self.unit(1, self.unit(0, same)), same


class CallsSum(Units):
    def forward(self, x):
        return self.unit(1, x), self.sum(self.unit(0, x))


class AddsToTransposed(Units):
    def forward(self, x):
        h = self.unit(0, x)
        return self.unit(1, h), x.transpose(2, 3) + h


class Broadcasts(Units):
    def forward(self, x):
        h = self.unit(0, x)
        return self.unit(1, h), h * torch.ones(3, 1, 1, 1, 1, device=x.device)


class ReturnsAll(Units):
    def forward(self, x):
        found = [x]
        for index in range(4):
            found.append(self.unit(index, found[-1]))
        return tuple(found)


class Reduces(Units):
    def forward(self, x):
        h = self.unit(0, x)
        kinds = (torch.mean, torch.sum, torch.amax, torch.amin)
        found = [kind(h, (2, 3), keepdim=True) for kind in kinds]
        found += [h.mean(2), h.sum(2), h.amax((0, 2)), h.amin(1)]
        return self.unit(1, h), h, *found


@pytest.mark.parametrize(
    "build",
    [ReturnsIdentity, ReturnsInput, CallsSum, AddsToTransposed, Broadcasts, ReturnsAll, Reduces],
)
def test_results_are_those_of_plain_pytorch(build):
    """Values, strides, and gradients of and by what is returned."""
    model, x = build(), torch.randn(2, 4, 6, 6, requires_grad=True)
    plain = copy.deepcopy(model)
    found, expected = pk.convert(model)(x), plain(x)
    assert pk.conversion_report(model).fused
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z)
        assert y.stride() == z.stride()
        assert (y is x) is (z is x)
    of_found, of_expected = (
        torch.autograd.grad(y[0].square().sum(), (x, y[1]), allow_unused=True)
        for y in (found, expected)
    )
    torch.testing.assert_close(of_found, of_expected, rtol=1e-4, atol=1e-4)


class ReturnsMuch(Units):
    def forward(self, x):
        g = F.relu(x)
        h = F.relu(g + 1)
        return self.unit(1, self.unit(0, h)), self.unit(2, h), g, h


def test_what_units_read_and_return_is_converted_once():
    model, x = pk.convert(ReturnsMuch()), torch.randn(2, 4, 6, 6)
    with Copies() as copies:
        model(x)
    assert copies.count == 3  # of `h` and of two results


@pytest.mark.parametrize("name", ["timm-resnetv2-50", "timm-wide-resnet-50-2"])
def test_runs_in_front_of_batch_norms_with_activations_are_not_copied(name):
    model, x = built(name)
    pk.convert(model)
    with Copies() as copies:
        model(x[:2])
    assert copies.count == 2  # of the first block's input and of the last one's result


class ChangesOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(foreign.FunctionalBlock(4, 4) for _ in range(3)))

    def forward(self, x):
        y = self.blocks(x)
        y.mul_(2)
        return y


@pytest.mark.parametrize("memory", MODES)
def test_the_output_of_a_run_may_change_in_place(memory):
    model = ChangesOutput().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    pk.convert(model, memory=memory)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    for m in (model, plain):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


class ChangesInput(Block):
    def forward(self, x):
        x.mul_(2)
        return self.conv(F.relu(self.bn(x)))


def test_a_forward_that_changes_its_input_changes_it():
    model = ChangesInput()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 4, 6, 6)
    own = x.clone()
    torch.testing.assert_close(pk.convert(model)(own), plain(x))
    assert torch.equal(own, x)
    assert pk.conversion_report(model).fused


class ClampsResult(Block):
    def forward(self, x):
        y = super().forward(x)
        y.clamp_(max=0.1)
        return y


class ScalesView(Block):
    def forward(self, x):
        y = super().forward(x)
        y[:, :2].mul_(3)
        return y


class DropsInPlace(Block):
    def forward(self, x):
        y = super().forward(x)
        F.dropout(y, 0.5, self.training, True)
        return y


class ChangesViewOfInput(Block):
    def forward(self, x):
        x = x * 1
        x.flatten(2).mul_(2)
        return super().forward(x)


class ScalesAfterView(Block):
    def forward(self, x):
        y = super().forward(x)
        rows = y.flatten(1)
        y.mul_(3)
        return y.sum() + rows


class AddsInPlace(Block):
    def forward(self, x):
        y = h = super().forward(x)
        y += x
        y *= 2
        half = x.shape[2]
        size = half
        half //= 2
        return y.sum() + h[:, :, :half] * size


class CallsInPlace(Block):
    def __init__(self):
        super().__init__()
        self.act = nn.Sequential(nn.ReLU(inplace=True))

    def forward(self, x):
        self.act(x)
        return super().forward(x) + x


class AddsOther(Block):
    def forward(self, x):
        other = x * 1
        y = super().forward(x)
        y += other
        return y


class MasksInPlace(Block):
    def forward(self, x):
        y = super().forward(x)
        mask = same = y > 0
        mask |= y < -0.5
        return y * same


class CallsOperator(Block):
    def forward(self, x):
        torch.ops.aten.add_.Scalar(x, 1)
        return super().forward(x) + x


class ChangesInputLater(Block):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4, affine=False)

    def forward(self, x):
        x = x * 1
        y = super().forward(x)
        x.add_(1)
        return x * y


class TakesIndices(Block):
    def forward(self, x):
        y, indices = F.max_pool2d(super().forward(x), 2, return_indices=True)
        return y + indices


class Taps(Block):
    def forward(self, x):
        h = super().forward(x)
        return h, h.mean((2, 3))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "build",
    [
        ClampsResult,
        ScalesView,
        DropsInPlace,
        ChangesViewOfInput,
        ScalesAfterView,
        AddsInPlace,
        CallsInPlace,
        CallsOperator,
        MasksInPlace,
        TakesIndices,
    ],
)
def test_in_place_changes_after_fused_calls_are_seen(build, memory_format):
    model = build().to(memory_format=memory_format)
    plain = copy.deepcopy(model)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=memory_format)
    assert report_of(pk.convert(model), x.clone()).fused
    found = []
    for m in (model, plain):
        torch.manual_seed(0)
        y = m(x.clone())
        y.square().sum().backward()
        found.append([y, *(p.grad for p in m.parameters()), *m.buffers()])
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def test_an_input_that_changes_later_is_not_kept():
    model, x = ChangesInputLater(), torch.randn(2, 4, 6, 6)
    plain = copy.deepcopy(model)
    pk.convert(model)(x).sum().backward()
    (site,) = pk.conversion_report(model)
    assert not site.fused
    assert "plain PyTorch saves nothing for it" in site.reason
    plain(x).sum().backward()
    torch.testing.assert_close(model.conv.weight.grad, plain.conv.weight.grad)


def test_sums_in_place_keep_the_dtype_of_autocast():
    model = pk.convert(AddsOther())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(2, 4, 6, 6)).dtype == torch.bfloat16
    assert pk.conversion_report(model).fused


def test_results_stay_in_the_graph_of_later_results():
    model = pk.convert(Taps())
    h, y = model(torch.randn(2, 4, 6, 6))
    (gradient,) = torch.autograd.grad(y.sum(), h)
    torch.testing.assert_close(gradient, torch.full_like(h, 1 / 36))
