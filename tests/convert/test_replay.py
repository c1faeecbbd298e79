"""Later forwards are answered as the first one was recorded, and differences are noticed."""

import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.conversion import calls
from preact_kernels.conversion.region import Region
from preact_kernels.conversion.replay import Tapes
from tests.convert.changes import CHANGES
from tests.convert.trial import Subject, assert_alike, differences, run, train_step

pytestmark = pytest.mark.backends("cpu", "reference")


class Unit(nn.Sequential):
    def __init__(self, channels=4, out=4):
        conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), conv)


class Net(nn.Module):
    """Blocks, a concatenation, dropout, a gate of a pooled image, a group norm and a sum."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Sequential(Unit(), Unit()) for _ in range(2)])
        self.dense = Unit()
        self.norm, self.conv = nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)
        self.gate, self.dropout = nn.Conv2d(4, 4, 1), nn.Dropout(0.2)
        self.last, self.sum = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.act = nn.ReLU()

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        h = torch.cat([h, self.dense(h)], 1)
        h = self.conv(self.dropout(F.silu(self.norm(h))))
        a = self.act(self.last(h))
        h = a * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(a, 1)))
        return self.act(self.sum(self.gate(h)) + h)


def images(*shape):
    return torch.randn(shape or (2, 4, 6, 6), dtype=torch.float64)


def assert_same_step(plain, converted, x):
    for a, b in zip(train_step(plain, x), train_step(converted, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def recorded(monkeypatch):
    """Names of the operations that rules recorded."""
    found = []
    record = Region.record

    def noting(self, operation, *args, **kwargs):
        found.append(operation.name)
        return record(self, operation, *args, **kwargs)

    monkeypatch.setattr(Region, "record", noting)
    return found


@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_only_random_numbers_are_recorded_again(recorded, memory):
    net, x = pk.convert(Net().double(), memory=memory), images()
    train_step(net, x)
    first, report = len(recorded), str(pk.conversion_report(net))
    assert first > 20
    for _ in range(2):
        recorded.clear()
        train_step(net, x)
        assert recorded == ["dropout"]
        assert str(pk.conversion_report(net)) == report
    net.eval()
    with torch.no_grad():
        net(x)
        recorded.clear()
        net(x)
    assert not recorded


@pytest.mark.parametrize("memory", ["store", "rebuild"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_is_noticed(change, memory):
    subject = Subject(Net, MEMORY=memory, make_input=lambda randn: randn(2, 4, 6, 6))
    for seed in range(3):  # other modules
        plain, converted = (run(subject, seed, c, change=change) for c in (False, True))
        assert not (found := differences(plain, converted)), found
    assert converted.has_fused


def test_a_call_that_is_left_out_or_added():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.units, self.calls = nn.ModuleList([Unit() for _ in range(4)]), 0

        def forward(self, x):
            self.calls += 1
            for index, unit in enumerate(self.units):
                if index != self.calls % 5:
                    x = x + unit(x)
            return x

    net, x = Sometimes().double(), images()
    plain = copy.deepcopy(net)
    pk.convert(net)
    for _ in range(12):
        assert_same_step(plain, net, x)


def test_the_same_tensor_twice_is_not_two_tensors():
    """A residual is the input of its block only if it is the same tensor."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.unit = Unit()

        def forward(self, x, y):
            return self.unit(x) + y

    def call(net, x):
        net.calls = getattr(net, "calls", 0) + 1
        return net(x, x if net.calls == 2 else x.detach() * 2)

    assert_alike(Subject(Net, call=call))


def test_a_tensor_that_a_later_forward_drops():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1, self.bn2, self.calls = nn.BatchNorm2d(4), nn.BatchNorm2d(4), 0

        def forward(self, x):
            self.calls += 1
            a = self.bn1(x)
            if self.calls == 2:
                a = None
            b = self.bn2(x + 1)
            return F.relu(b) if a is None else F.relu(b + a)

    assert_alike(Subject(Drops))


@torch.jit.script
def doubled(x):
    """A scripted function holds deferred tensors in C++."""
    return x * 2.0


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 1) for _ in range(2))

    def forward(self, x):
        a = self.conv1(F.relu(self.bn1(x)))
        b = self.conv2(F.relu(self.bn2(x)))
        return doubled(a), doubled(b)


def noting(seen, name):
    return lambda gradient: seen.append(name)


def test_branches_have_backwards_of_their_own():
    net, x = Branches().double(), images()
    plain = copy.deepcopy(net)
    pk.convert(net)
    for _ in range(4):
        found = []
        for m in (plain, net):
            m.zero_grad()
            seen: list[str] = []
            handles = [p.register_hook(noting(seen, n)) for n, p in m.named_parameters()]
            a, b = m(x)
            a.sum().backward()
            first = sorted(seen)
            b.square().sum().backward()
            for handle in handles:
                handle.remove()
            found.append([first, sorted(seen), *[p.grad for p in m.parameters()]])
        torch.testing.assert_close(found[1][2:], found[0][2:])
        assert found[0][:2] == found[1][:2]


def test_a_convolution_whose_weight_changes_in_the_forward():
    """Its shape, or its place in the autograd graph."""

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            self.conv, self.last, self.calls = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), 0
            self.register_buffer("bias", torch.zeros(4))
            self.p = nn.Parameter(torch.randn(4))

        def forward(self, x):
            self.calls += 1
            a, r = F.relu(self.bn1(x)), 0
            if self.calls == 3:
                self.conv.weight.data = self.conv.weight.data[:, :, :1, :1].clone() * 2
                r = self.conv.weight.square().sum()
            b = self.conv(a)
            self.bias.add_(self.p * self.calls)
            y = F.conv2d(F.relu(self.bn2(b)), self.last.weight, self.bias)
            self.bias = self.bias.detach() * 0
            return y + r

    assert_alike(Subject(Grows), "grows")


@pytest.mark.parametrize("name", ["weight", "bias", "group_norm"])
def test_operations_that_read_updated_statistics(name):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            bn, conv = self.bn, self.conv
            h = conv(F.relu(bn(x)))
            if name == "weight":
                return F.group_norm(F.relu(h), 2, bn.running_var, bn.running_mean)
            if name == "bias":
                return F.conv2d(F.relu(h), conv.weight, bn.running_mean)
            return F.relu(F.group_norm(h, 2, bn.running_var, bn.running_mean))

    assert_alike(Subject(Reads), name)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
    "no_grad": torch.no_grad,
    "backend": lambda: pk.use_backend("reference"),
}


@pytest.mark.parametrize("memory", ["store", "rebuild"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_change_within_a_forward(mode, memory):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.units, self.calls = nn.ModuleList([Unit() for _ in range(5)]), 0

        def forward(self, x):
            self.calls += 1
            for index, unit in enumerate(self.units):
                if index == self.calls % 3:
                    with MODES[mode]():
                        h = unit(x)
                else:
                    h = unit(x)
                x = x + h
            return x

    net, x = Changes().double(), images()
    plain = copy.deepcopy(net)
    pk.convert(net, memory=memory)
    for _ in range(10):
        assert_same_step(plain, net, x)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_call_in_a_dispatch_mode_is_not_one_behind_it():
    class InMode(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = Unit(), nn.GroupNorm(2, 4)

        def forward(self, x):
            h = self.first(x)
            with Seen() as self.seen:
                a = F.relu(self.norm(x))
            b = F.relu(self.norm(x))
            return h + a + b

    net, x = InMode().double(), images()
    plain = copy.deepcopy(net)
    pk.convert(net)
    for _ in range(4):
        assert_same_step(plain, net, x)
        assert net.seen.names == plain.seen.names


def test_a_tensor_that_is_kept_when_modes_change():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1, self.bn2, self.calls = nn.BatchNorm2d(4), nn.BatchNorm2d(4), 0

        def forward(self, x):
            self.calls, x2 = self.calls + 1, x * 2
            with torch.no_grad():
                n = self.bn1(x)
                a = F.relu(n)
                if self.calls >= 3:
                    self.kept = n
                del n
            return F.relu(self.bn2(x2)) + a

    net, x = Keeps().double(), images()
    plain = copy.deepcopy(net)
    pk.convert(net)
    for _ in range(6):
        assert_same_step(plain, net, x)


def test_weights_of_functional_calls_are_freed():
    net, x = pk.convert(nn.Sequential(Unit(), Unit()).double()), images()
    found = []
    weights = dict(net.named_parameters())
    for _ in range(5):
        y = torch.func.functional_call(net, weights, (x,))
        gradients = torch.autograd.grad(y.square().sum(), list(weights.values()), create_graph=True)
        pairs = zip(weights.items(), gradients, strict=True)
        weights = {name: w - 0.1 * g for (name, w), g in pairs}
        found += map(weakref.ref, weights.values())
    del weights, gradients, y, pairs
    gc.collect()
    assert not any(r() is not None for r in found)


def test_the_report_names_the_reader_of_this_call():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.calls = nn.BatchNorm2d(4), 0

        def forward(self, x):
            self.calls += 1
            h = self.bn(x)
            return torch.sin(h) if self.calls % 2 else torch.cos(h)

    net = pk.convert(nn.Sequential(Unit(), Reads()).double())
    for name in ("sin", "cos") * 3:
        net(images())
        assert f"({name})" in pk.conversion_report(net)[1].reason or name in str(
            pk.conversion_report(net)
        )


def tapes_of(net):
    return calls._tapes[net]._tapes


def test_few_tapes_are_kept():
    net = pk.convert(Net().double())
    for size in range(4, 4 + 3 * Tapes.MOST):
        net(images(2, 4, size, size))
    assert len(tapes_of(net)) <= Tapes.MOST
    counts = []
    for _ in range(4):
        for size in (6, 7):
            train_step(net, images(2, 4, size, size))
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[3] - counts[2] < 20


def test_alternating_shapes_are_not_recorded_again(recorded):
    net = pk.convert(nn.Sequential(Unit(), Unit()).double())
    batches = [images(n, 4, 6, 6) for n in (1, 2, 3)]
    for _ in range(2):
        for x in batches:
            net(x)
    count = 2 * len(batches) * 3
    assert len(recorded) == count
    net(batches[0])
    assert len(recorded) == count


def test_alternating_parts_are_not_recorded_again(recorded):
    class Alternates(nn.Module):
        def __init__(self):
            super().__init__()
            self.units, self.skips = nn.ModuleList([Unit() for _ in range(6)]), False

        def forward(self, x):
            for index, unit in enumerate(self.units):
                if index != 3 or not self.skips:
                    x = x + unit(x)
            return x

    net, x = Alternates().double(), images()
    plain = copy.deepcopy(net)
    pk.convert(net)
    for step in range(8):
        net.skips = plain.skips = step % 3 == 1
        recorded.clear()
        assert_same_step(plain, net, x)
        assert bool(recorded) == (step < 2)


def test_a_list_that_the_program_changes():
    class Pads(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.conv, self.sizes = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), [1, 1, 1, 1]

        def forward(self, x):
            y = self.conv(F.pad(F.relu(self.bn(x)), self.sizes))
            self.sizes[0] += 1
            return y

    assert_alike(Subject(Pads))


def test_keywords_are_no_positions():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.conv, self.calls = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), 0

        def forward(self, x):
            self.calls += 1
            h = F.relu(self.bn(x))
            # The number is a stride, then a dilation.
            kwargs = {"stride": 2} if self.calls == 1 else {"dilation": 2}
            return F.conv2d(h, self.conv.weight, self.conv.bias, **kwargs)

    assert_alike(Subject(Calls))


def test_replaced_parameters_are_freed():
    net, x = pk.convert(nn.Sequential(Unit(), Unit()).double()), images()
    for _ in range(2):
        net(x)
    old = [weakref.ref(p) for p in net.parameters()]
    state = {name: t.clone() for name, t in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    net(x)
    gc.collect()
    assert not any(r() is not None for r in old)


def test_threads_share_a_model():
    net, x = nn.Sequential(*[Unit() for _ in range(6)]).double().eval(), images()
    expected = net(x)
    pk.convert(net)
    found, errors = [], []

    def work():
        try:
            for _ in range(20):
                found.append(net(x))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(found) == 80
    for y in found:
        torch.testing.assert_close(y, expected)


def test_revert_drops_what_was_remembered():
    net = pk.convert(nn.Sequential(Unit(), Unit()).double())
    net(images())
    assert tapes_of(net)
    pk.revert(net)
    assert net not in calls._tapes


# Models in which nothing runs fused.


@pytest.fixture
def regions(monkeypatch):
    """The regions that were opened."""
    found = []
    enter = Region.__enter__

    def noting(self):
        found.append(weakref.ref(self))
        return enter(self)

    monkeypatch.setattr(Region, "__enter__", noting)
    return found


class Unfused(nn.Module):
    """Nothing fuses in training; in evaluation, the activation is a ReLU."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.conv, self.error = nn.Conv2d(4, 4, 1), None

    def forward(self, x):
        h = self.inner(x)
        if self.error is not None:
            raise self.error
        return self.conv(torch.selu(h) if self.training else torch.relu(h))


def test_a_model_without_fused_norms_runs_without_a_region(regions):
    net, x = Unfused().double(), images()
    plain = copy.deepcopy(net)
    pk.convert(net)
    for _ in range(5):
        for a, b in zip(train_step(plain, x), train_step(net, x), strict=True):
            assert torch.equal(a, b)
    assert len(regions) == 2
    assert [s.fused for s in pk.conversion_report(net)] == [False]
    net.eval()
    net(x)
    assert len(regions) == 3
    assert [s.fused for s in pk.conversion_report(net)] == [True]


def script(net):
    net.conv = torch.jit.script(net.conv)


def freeze(net):
    net.conv = torch.jit.freeze(torch.jit.script(net.conv.eval()))


def compile_child(net):
    net.conv = torch.compile(net.conv, backend="eager")


def has_no_child(net):
    net.register_module("none", None)


def make_cycle(net):
    net.conv.parent = net


def make_cycle_of_children(net):
    net.conv.other, net.inner[0].other = net.inner[0], net.conv


def share_containers(net):
    for _ in range(40):  # a walk that visits shared modules again would not end
        net.conv = nn.Sequential(net.conv)
        net.conv.register_module("again", net.conv[0])
        net.conv.forward = net.conv[0].forward


@pytest.mark.parametrize(
    "change",
    [
        script,
        freeze,
        compile_child,
        has_no_child,
        make_cycle,
        make_cycle_of_children,
        share_containers,
    ],
)
def test_models_that_run_plain_may_have_any_children(change, regions):
    net, x = Unfused().double(), images()
    change(net)
    expected = net(x)
    pk.convert(net)
    for _ in range(4):
        assert torch.equal(net(x), expected)
    assert len(regions) == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_plain_call_ends_with_an_error_or_an_interrupt(regions, error):
    net, other, x = pk.convert(Unfused().double()), pk.convert(Unit().double()), images()
    for _ in range(3):
        net(x)
    opened = len(regions)

    net.error = error
    with pytest.raises(error):
        net(x)
    other(x)
    assert len(regions) == opened + 1
    assert pk.conversion_report(other)[0].fused


def test_changes_of_a_model_that_runs_plain(regions):
    net, x = pk.convert(Unfused().double()), images()
    for _ in range(4):
        net(x)
    assert len(regions) == 2
    changes = [
        lambda: pk.convert(net.inner, memory="checkpoint"),
        lambda: net.inner.append(nn.ReLU()),
        lambda: net.conv.requires_grad_(False),
    ]
    for change in changes:
        opened = len(regions)
        change()
        net(x)
        assert len(regions) == opened + 1
    assert pk.conversion_report(net)[0].fused


def test_a_model_that_runs_plain_is_tried_again(regions, monkeypatch):
    monkeypatch.setattr(calls._Unfused, "FIRST", 4)
    monkeypatch.setattr(calls._Unfused, "LAST", 8)
    net, x = pk.convert(Unfused().double()), images()
    counts = []
    for _ in range(30):
        net(x)
        counts.append(len(regions))
    opened = [i for i, (a, b) in enumerate(itertools.pairwise([0, *counts]), 1) if a != b]
    assert opened == [1, 2, 7, 16, 25]
