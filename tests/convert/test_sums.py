"""A norm, the addition of a residual, and perhaps ReLU run fused: `act(norm(x) + residual)`."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from tests.convert.test_memory_modes import Alive
from tests.convert.trial import Subject, assert_alike

pytestmark = pytest.mark.backends("cpu")

C = 6
SMALL = 512  # bytes of statistics of channels
NORMS = {
    "batch": lambda dims: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](C),
    "group": lambda dims: nn.GroupNorm(2, C),
    "instance": lambda dims: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1](
        C, affine=True
    ),
    "without parameters": lambda dims: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](
        C, affine=False, track_running_stats=False
    ),
}


class Net(nn.Module):
    """Layers for a `forward` that a test gives."""

    def __init__(self, forward, norm="batch", dims=2):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.own = forward
        self.norms = nn.ModuleList(NORMS[norm](dims) for _ in range(3))
        self.convs = nn.ModuleList(conv(C, C, 3, padding=1, bias=False) for _ in range(3))

    def part(self, i, x):
        return self.norms[i](self.convs[i](x))

    def forward(self, x):
        return self.own(self, x)


# Forwards, and what of the norms of the report runs fused.


def basic_block(net, x):
    h = F.relu(net.part(0, x))
    h = net.part(1, h)
    return F.relu(h + x)


def in_place(net, x):
    x = net.convs[2](x)
    h = net.part(0, x)
    h += x
    return F.relu_(h) * 2


def into_the_shortcut(net, x):
    shortcut = net.part(1, x)
    shortcut += net.part(0, x)
    return F.relu(shortcut) + F.relu(shortcut) * 2


def projection(net, x):
    h, shortcut = net.part(0, x), net.part(1, x)
    return F.relu(h + shortcut)


def without_activation(net, x):
    y = net.part(0, x) + x
    return net.part(1, y) + y


def other_activation(net, x):
    return F.silu(net.part(0, x) + x)


def several_readers(net, x):
    y = F.relu(x + net.part(0, x))
    return net.convs[1](y) + F.relu(net.norms[2](y)) + y


def holds_the_sum(net, x):
    y = net.part(0, x) + x
    return F.relu(y), y


def chains(net, x):
    for i in range(3):
        x = F.relu(net.part(i, x) + x)
    return x


def frozen_norm(net, x):
    net.requires_grad_(False)
    return F.relu(net.part(0, x.detach()) + x)


def frozen_residual(net, x):
    return F.relu(net.part(0, x) + x.detach())


def evaluates(net, x):
    net.eval()
    return F.relu(net.part(0, x) + x)


def twice_the_norm(net, x):
    h = net.part(0, x)
    return F.relu(h + h)


def broadcasts(net, x):
    return F.relu(net.part(0, x) + x.mean(tuple(range(2, x.dim())), keepdim=True))


def pre_activation_beside_it(net, x):
    """Both parts of the sum could run fused with it."""
    return F.relu(net.part(0, x) + net.convs[1](F.relu(net.norms[1](x))))


def changes_the_result(net, x):
    y = F.relu(net.part(0, x) + x)
    z = net.convs[1](y)
    y.mul_(2)
    return z


def rep_vgg(net, x):
    return F.relu(net.part(0, x) + net.part(1, x) + net.norms[2](x))


def beside_its_input(net, x):
    h = net.convs[0](x)
    return net.norms[0](h) + F.silu(h)


def saves_its_result(net, x):
    y = basic_block(net, x)
    return y * y


def is_saved_later(net, x):
    """A sum runs with a unit, and the program saves their results."""
    h = F.relu(net.part(1, x))
    y = F.relu(net.part(0, h) + x)
    assert y.detach().isfinite().all()  # computes both
    return net.convs[2](y) * h


def is_saved_by_fused_operations(net, x):
    y = basic_block(net, x)
    return net.convs[2](F.relu(net.norms[2](y))), y


ACT, SUM = "Norm-Add-ReLU", "Norm-Add"
FUSED = {
    basic_block: [ACT],
    in_place: [ACT],
    into_the_shortcut: [SUM],
    projection: [ACT],
    without_activation: [SUM, SUM],
    other_activation: [SUM],
    several_readers: [ACT],
    holds_the_sum: [SUM],
    chains: [ACT] * 3,
    frozen_norm: [],
    frozen_residual: [ACT],
    evaluates: [ACT],
    twice_the_norm: [],
    broadcasts: [],
    changes_the_result: [ACT],
    rep_vgg: [SUM, ACT],
    beside_its_input: [SUM],
    saves_its_result: [ACT],
    is_saved_later: [ACT],
    is_saved_by_fused_operations: [ACT],
}


def images(randn, dims=2, memory_format=torch.contiguous_format):
    x = randn(2, C, *[5, 4, 3][:dims])
    return x.contiguous(memory_format=memory_format).requires_grad_()


def sums_in(report):
    return [site.into for site in report.fused if "Add" in site.into]


@pytest.mark.parametrize("forward", [*FUSED, pre_activation_beside_it], ids=lambda f: f.__name__)
def test_sums_equal_plain_pytorch(forward):
    for memory in ("store", "rebuild", "checkpoint"):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            make_input = partial(images, memory_format=memory_format)
            subject = Subject(partial(Net, forward), make_input=make_input, MEMORY=memory)
            trial = assert_alike(subject, (memory, memory_format))
            if forward in FUSED:
                expected = [name.replace("Norm", "BN") for name in FUSED[forward]]
                assert sums_in(trial.reports[0]) == expected, trial.reports[0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_norms_and_dimensions(norm, dims):
    for forward in (basic_block, without_activation):
        subject = Subject(partial(Net, forward, norm, dims), make_input=partial(images, dims=dims))
        trial = assert_alike(subject, forward.__name__)
        assert sums_in(trial.reports[0])


@pytest.mark.parametrize("forward", FUSED, ids=lambda f: f.__name__)
def test_sums_keep_no_more_than_plain_pytorch(forward):
    """Counted in live storages: some are only read by the program."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        net = Net(forward).to(memory_format=memory_format)
        x = images(torch.randn, memory_format=memory_format).detach().requires_grad_()
        kept = []
        for model in (net, pk.convert(copy.deepcopy(net))):
            with Alive(x, *model.parameters(), *model.buffers()) as alive:
                y = model(x)
            kept.append(alive.bytes())
            del y
        assert kept[1] <= kept[0] + SMALL, (memory_format, kept)


def test_a_sum_that_fused_operations_save_is_kept_once():
    kept = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        net = pk.convert(Net(is_saved_by_fused_operations).to(memory_format=memory_format))
        kept.append(pk.saved_bytes(net, images(torch.randn, memory_format=memory_format)))
    assert kept[0] == kept[1]


def test_sums_of_sequences_keep_what_sums_of_images_keep():
    def forward(net, x):
        h = F.relu(net.norms[1](x))
        y = F.relu(net.part(0, h) + x)
        return net.convs[2](y) * h * torch.exp(-y)

    for memory in ("rebuild", "checkpoint"):
        kept = []
        for dims in (1, 2):
            net = pk.convert(Net(forward, dims=dims), memory=memory)
            kept.append(pk.saved_bytes(net, torch.randn(4, C, *[(64,), (8, 8)][dims - 1])))
        assert kept[0] == kept[1]


def test_sums_in_nchw_run_plain_where_they_would_be_copied():
    for memory_format, expected in ((torch.contiguous_format, 0), (torch.channels_last, 1)):
        net = pk.convert(Net(without_activation).to(memory_format=memory_format))
        x = images(torch.randn, memory_format=memory_format)
        with pk.use_backend("reference"):
            net(x)
        report = pk.conversion_report(net)
        assert len(sums_in(report)) == 2 * expected, report
        plan = pk.plan_memory(net, x, 2**30)
        assert plan.predicted_bytes == pk.saved_bytes(net, x)


@pytest.mark.parametrize("forward", [basic_block, without_activation])
def test_second_derivatives(forward):
    net, x = Net(forward).double(), images(partial(torch.randn, dtype=torch.float64))
    converted = pk.convert(net)

    def run(x, *weights):
        names = [name for name, _ in converted.named_parameters()]
        return torch.func.functional_call(converted, dict(zip(names, weights, strict=True)), x)

    weights = [p.detach().clone().requires_grad_() for p in converted.parameters()]
    assert torch.autograd.gradgradcheck(run, (x, *weights))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value):
    def forward(net, x):
        return F.relu(net.norms[0](x) + x * 0.5 + spike)

    spike = torch.zeros(2, C, 5, 4, dtype=torch.float64)
    spike[1, 2, 3, 1] = value
    for memory in ("store", "rebuild"):
        assert_alike(Subject(partial(Net, forward), make_input=images, MEMORY=memory), memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Within the error of plain PyTorch in the same dtype, of float64."""
    torch.manual_seed(0)
    net = Net(chains).to(memory_format=torch.channels_last)
    x = torch.randn(4, C, 9, 9).contiguous(memory_format=torch.channels_last).to(dtype)
    errors = []
    exact = None
    for kind in (torch.float64, dtype, None):
        own = Net(chains)
        own.load_state_dict(net.state_dict())
        own = own.to(memory_format=torch.channels_last)
        own.convs.to(kind or dtype)
        own.norms.to(torch.float64 if kind == torch.float64 else torch.float32)
        own = pk.convert(own) if kind is None else own
        image = x.to(kind or dtype, copy=True).requires_grad_()
        own(image).square().mean().backward()
        found = [image.grad, *[p.grad for p in own.parameters()]]
        found = [t.double() for t in found]
        if exact is None:
            exact = found
        else:
            pairs = zip(found, exact, strict=True)
            errors.append(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]))
    assert (errors[1] <= 2 * errors[0] + torch.finfo(dtype).eps / 2).all(), errors


def test_a_residual_of_another_dtype_runs_plain():
    def forward(net, x):
        return F.relu(net.part(0, x) + x.float())

    net = pk.convert(Net(forward).double())
    net(images(partial(torch.randn, dtype=torch.float64)))
    assert not sums_in(pk.conversion_report(net))
