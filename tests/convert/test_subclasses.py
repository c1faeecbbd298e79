"""Converted models take subclasses of Tensor and give what plain PyTorch gives."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from preact_kernels.conversion import rules
from testbed.packages import monai
from tests.convert.random_model_parts import HalveInPlace, Marked, marked
from tests.convert.trial import Subject, assert_alike

pytestmark = pytest.mark.backends("cpu")


class Inherited(Tensor):
    """A class without a function of its own."""


class WithoutFunction(Tensor):
    """A class whose results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Doubling(Tensor):
    """A class that doubles the results of ReLU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        y = super().__torch_function__(func, types, args, kwargs or {})
        return y * 2 if func in (F.relu, F.selu) else y


class Halving(Tensor):
    """A class that halves the inputs of ReLU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.relu:
            args = (args[0].as_subclass(Tensor) / 2, *args[1:])
        return super().__torch_function__(func, types, args, kwargs or {})


class Adding(Tensor):
    """A class that adds random numbers to the results of ReLU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        y = super().__torch_function__(func, types, args, kwargs or {})
        return y + torch.rand(y.shape, dtype=y.dtype) if func is F.relu else y


class Keeping(Tensor):
    """A class whose results of ReLU keep what `read` returns, for the argument and the result."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        y = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(y, Keeping) and func is F.relu:
            y.mark = cls.read(args[0], y)
        return y


def value_of(x, y):
    try:
        return bool((y.as_subclass(Tensor).detach() > 0).any())
    except RuntimeError:
        return None


def devices_of_history(x, y, kept=[]):  # noqa: B006
    kept[:] = [*kept[-3:], x]
    return {t.device.type for t in kept}


READS = {
    "KeepsArgument": lambda x, y: x.numel() if x.grad_fn is None else int(x.device.type == "cpu"),
    "KeepsDevice": lambda x, y: str(y.device),
    "KeepsGradient": lambda x, y: (y.requires_grad, torch.is_grad_enabled()),
    "KeepsValue": value_of,
    "KeepsHistory": devices_of_history,
}
KEEPING = [type(name, (Keeping,), {"read": staticmethod(read)}) for name, read in READS.items()]


class Refusing(Tensor):
    """A class that has no sums."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.add, Tensor.add):
            raise NotImplementedError("no sums")
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Marked):
    """A class with methods of its own, and others than those of Tensor."""

    @property
    def title(self):
        return f"mark {self.mark}"

    @title.setter
    def title(self, text):
        self.mark = len(text)

    def clone(self, **kwargs):
        return super().clone(**kwargs) * 2

    def __len__(self):
        return 7

    def __mul__(self, other):
        return super().__mul__(other) + 1


class Slots(Tensor):
    """A class without a dictionary of attributes."""

    __slots__ = ("note",)


class Dispatching(Tensor):
    """A class whose operations are its own."""

    @staticmethod
    def __new__(cls, t):
        self = Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)
        self.inner = t
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = lambda t: t.inner if type(t) is cls else t  # noqa: E731
        args = torch.utils._pytree.tree_map(inner, args)
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Two units; `between` is called with what the first one returns."""

    def __init__(self, between, dims=2, norm=None):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = norm or (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.stem = conv(2, 4, 3, padding=1)
        self.norm1, self.conv1 = norm(4), conv(4, 4, 3, padding=1)
        self.norm2, self.conv2 = norm(4), conv(4, 4, 1)
        self.between = [between]

    def forward(self, x):
        x = self.stem(x)
        h = self.conv1(F.relu(self.norm1(x)))
        h = self.between[0](self, h)
        return x + self.conv2(F.relu(self.norm2(h)))


def same(net, h):
    return h


def images(randn, kind=Marked, size=(5, 6), channels_last=False):
    x = randn(2, 2, *size)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    return marked(x, kind).requires_grad_()


def run(between=same, kind=Marked, fused=2, dims=2, norm=None, **options):
    """Compares a converted network with the plain one; returns the last report."""
    size = {1: (7,), 2: (5, 6), 3: (3, 4, 5)}[dims]
    make = partial(images, kind=kind, size=size, channels_last=options.pop("channels_last", False))
    trial = assert_alike(Subject(partial(Net, between, dims, norm), make_input=make, **options))
    report = trial.reports[-1]
    assert len(report.fused) == fused, str(report)
    return report


@pytest.mark.parametrize("kind", [Marked, Inherited, WithoutFunction, Named])
def test_results_have_the_class_and_the_attributes_of_plain_pytorch(kind):
    run(kind=kind)


def under_autocast(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x)


OPTIONS = {
    "rebuild": {"MEMORY": "rebuild"},
    "checkpoint": {"MEMORY": "checkpoint"},
    "sequences": {"dims": 1},
    "volumes": {"dims": 3},
    "channels_last": {"channels_last": True},
    "group norm": {"norm": partial(nn.GroupNorm, 2)},
    "instance norm": {"norm": nn.InstanceNorm2d},
    "autocast": {"call": under_autocast},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_all_kinds_of_models(options):
    run(**options)


def keep(net, h):
    net.kept = h
    return h


def write_to_plain(net, h):
    plain = F.relu(net.norm1(torch.ones(2, 4, 5, 6, dtype=h.dtype, requires_grad=True) * 0.5))
    net.kept = other = plain
    plain += h
    return plain + other


def add_modulation(net, h):
    rows = h.mean((2, 3), keepdim=True)
    return F.silu(torch.addcmul(rows, net.norm1(h), 1 + rows))


def multiply_by_sigmoid(net, h):
    h = net.norm1(h)
    h = h * torch.sigmoid(h)
    return torch.cat([h, h], 1)[:, :4]


class Square(torch.autograd.Function):
    """A function that sees the class of its argument."""

    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t * t * (2 if isinstance(t, Marked) else 1)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0]


@pytest.mark.parametrize(
    "between",
    [
        write_to_plain,
        add_modulation,
        multiply_by_sigmoid,
        lambda net, h: F.max_pool2d(h, 1),
        lambda net, h: F.leaky_relu_(input=net.norm1(input=h), negative_slope=0.1),
        lambda net, h: torch.cat(tensors=[h, h], dim=1)[:, :4].contiguous(),
        lambda net, h: F.interpolate(h, scale_factor=2)[..., ::2, ::2].contiguous(),
        lambda net, h: Square.apply(h),
        lambda net, h: keep(net, HalveInPlace.apply(h)),
        lambda net, h: F.dropout(F.relu(net.norm1(h)), 0.3, net.training),
    ],
)
def test_models_that_use_results(between):
    run(between)


def set_title(net, h):
    h.title = "four"
    return h


def copy_attributes(net, h):
    other = marked(torch.ones(1, dtype=h.dtype))
    other.__dict__ = h.__dict__.copy()
    net.kept = sorted(vars(other))
    return h * other.mark


@pytest.mark.parametrize(
    "between", [lambda net, h: h.clone(), lambda net, h: h * len(h), set_title, copy_attributes]
)
def test_what_a_class_adds_or_overrides(between):
    run(between, Named)


@pytest.mark.parametrize("kind", [Doubling, Halving, Adding, *KEEPING])
def test_a_class_that_does_more_than_pass_on_results_runs_plain(kind):
    report = run(kind=kind, fused=0)
    assert f"a {kind.__name__}, whose __torch_function__ does more than call relu" in str(report)
    run()  # others are served


class Recomputed(Net):
    def forward(self, x):
        h = F.selu(self.norm1(self.between[0](self, self.stem(x))))
        return self.conv1(h) * (2 if isinstance(h, Marked | Doubling) else 1)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [Doubling, Marked])
def test_what_runs_plain_in_a_recomputation_has_its_class(kind, use_reentrant):
    plain = Recomputed(lambda net, h: h[:, :, ::2]).double()
    net = pk.convert(copy.deepcopy(plain))
    x, gradients = torch.randn(2, 2, 5, 6, dtype=torch.float64), []
    for model in (plain, net):

        def call(x, model=model):
            return model(marked(x * 1, kind)).as_subclass(Tensor)

        given = x.clone().requires_grad_()
        checkpoint(call, given, use_reentrant=use_reentrant).square().sum().backward()
        gradients.append([given.grad, model.norm1.weight.grad, model.stem.weight.grad])
    torch.testing.assert_close(*gradients)
    assert net.norm1.num_batches_tracked == 1


def test_a_class_is_asked_once_if_it_runs_plain():
    calls = []

    class Counting(Doubling):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    net = pk.convert(Net(same))
    for expected in (2, 1):
        calls.clear()
        net(marked(torch.randn(2, 2, 5, 6), Counting))
        assert calls.count(F.relu) == 2 + expected - 1


def test_errors_of_a_class_are_raised():
    net = pk.convert(Net(same))
    with pytest.raises(NotImplementedError, match="no sums"):
        net(torch.randn(2, 2, 5, 6).as_subclass(Refusing))
    assert net.norm2.num_batches_tracked == 1


@pytest.mark.parametrize("kind", [Slots, Dispatching])
def test_reports_name_a_class_that_is_not_served(kind):
    class Unit(nn.Sequential):
        def forward(self, x):
            x = x.as_subclass(Slots) if kind is Slots else Dispatching(x)
            return super().forward(x)

    net = pk.convert(Unit(nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 4, 3)))
    x = torch.randn(2, 2, 5, 6)
    y = net(x)
    torch.testing.assert_close(y.as_subclass(Tensor), copy.deepcopy(pk.revert(net))(x))
    net = pk.convert(net)
    net(x)
    (site,) = pk.conversion_report(net)
    assert not site.fused and kind.__name__ in site.reason and "pass " in site.reason


def test_parameters_of_a_class_are_named():
    net = pk.convert(nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()))
    net[0].weight = nn.Parameter(torch.ones(2).as_subclass(Inherited))
    net(torch.randn(2, 2, 5, 6))
    (site,) = pk.conversion_report(net)
    assert site.reason == "its parameters are of the class Inherited"


def test_no_operations_on_the_meta_device_are_seen():
    for probe in (rules._geometry, rules._called):
        probe.cache_clear()
    found = set()

    class Devices(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            found.update(t.device.type for t in (*args, y) if isinstance(t, Tensor))
            pools.append(func is torch.ops.aten.max_pool2d_with_indices.default)
            return y

    net, pools = pk.convert(Net(lambda net, h: F.max_pool2d(h, 1))), []
    with Devices():
        y = net(images(torch.randn))
    assert len(pk.conversion_report(net).fused) == 2 and type(y) is Marked
    assert found == {"cpu"} and sum(pools) == 1


def test_meta_tensors_of_monai():
    pytest.importorskip("monai")
    from monai.data import MetaTensor

    model = monai("SegResNet", spatial_dims=3, init_filters=8, blocks_down=(1, 2), blocks_up=(1,))
    x, affine = torch.randn(2, 1, 8, 8, 8), 2 * torch.eye(4)
    results = []
    for net in (copy.deepcopy(model), pk.convert(model)):
        image = MetaTensor(x, affine, meta={"name": "scan"})
        image.is_batch = True
        results.append(net.double()(image.double()))
        results[-1].sum().backward()
    plain, fused = results
    assert len(pk.conversion_report(model).fused) == 9
    assert type(fused) is MetaTensor and fused.is_batch and fused.meta.keys() == plain.meta.keys()
    assert torch.equal(fused.affine, affine.double()) and fused.meta["name"] == "scan"
    torch.testing.assert_close(fused.as_tensor(), plain.as_tensor())
