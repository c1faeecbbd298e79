"""Memory modes of whole converted networks: equal to plain PyTorch, and what they keep."""

import gc
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.conversion import recomputation, user_modules
from preact_kernels.conversion.policy import POLICIES
from tests.convert import random_model_parts
from tests.convert.trial import Subject, assert_alike

pytestmark = pytest.mark.backends("cpu")

C = 8
MODES = ("rebuild", "checkpoint")
FORMATS = (torch.contiguous_format, torch.channels_last)


class Net(nn.Module):
    """Layers for a `forward` that a test gives."""

    def __init__(self, forward, layers=4):
        super().__init__()
        self.own = forward
        self.stem = nn.Conv2d(C, C, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(C) for _ in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(C, C, 3, padding=1) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Conv2d(C, 4 * C, 1, bias=False) for _ in range(layers))
        self.wide_norms = nn.ModuleList(nn.BatchNorm2d(4 * C) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Conv2d(4 * C, C, 1, bias=False) for _ in range(layers))
        self.gate = nn.Conv2d(C, C, 1)
        self.scale = nn.Parameter(torch.rand(1, C, 1, 1))

    def forward(self, x):
        return self.own(self, self.stem(x))

    def unit(self, i, x):
        return self.convs[i](F.relu(self.norms[i](x)))

    def act(self, i, x):
        """Convolution, norm, activation."""
        return F.silu(self.norms[i](self.convs[i](x)))


def bottlenecks(net, x):
    x = F.relu(net.wide_norms[3](net.wide[3](x)))
    for i in range(3):
        h = F.relu(net.norms[i](net.narrow[i](x)))
        h = net.wide_norms[i](net.wide[i](h))
        h += x
        x = F.relu_(h)
    return net.narrow[3](x)


def basic_blocks(net, x):
    for i in (0, 2):
        h = net.norms[i + 1](net.convs[i + 1](net.act(i, x)))
        x = F.relu(x + h)
    return net.convs[3](x)


def dense_block(net, x):
    pieces = [net.act(0, x)]
    for i in range(3):
        h = torch.cat([*pieces, *[pieces[0]] * (3 - i)], 1)
        h = net.narrow[i](F.relu(net.wide_norms[i](h)))
        pieces.append(h.cumsum(2))  # runs once
    h = torch.cat(pieces, 1)
    return net.narrow[3](F.relu(net.wide_norms[3](h)))


def growing(net, x):
    x = net.act(0, x)
    x = torch.cat([x, net.act(1, x)], 1)
    x = torch.cat([x, x], 1)
    return net.narrow[0](F.relu(net.wide_norms[0](x)))


def gates(net, x):
    for i in range(3):
        a = net.act(i, x)
        s = torch.sigmoid(net.gate(a.mean((2, 3), keepdim=True)))
        x = x + a * s * net.scale
    return net.convs[3](x)


def shuffles(net, x):
    for i in range(3):
        a, b = net.act(i, x).chunk(2, 1)
        h = torch.cat([a, F.hardswish(b)], 1)
        n, c, *size = h.shape
        x = h.view(n, 2, c // 2, *size).transpose(1, 2).reshape(n, c, *size)
    return net.convs[3](x)


def pads(net, x):
    for i, mode in enumerate(("reflect", "replicate", "circular")):
        x = net.convs[i](F.pad(net.act(i, x), (1, 1, 1, 1), mode=mode))[:, :, 1:-1, 1:-1]
    return x


def resamples(net, x):
    a = net.act(0, x)
    b = F.interpolate(F.avg_pool2d(a, 2), scale_factor=2.0)
    c = F.interpolate(F.max_pool2d(a, 3, 2, 1), size=a.shape[2:], mode="bilinear")
    d = F.adaptive_avg_pool2d(a, 1) * b
    return net.convs[1](b) + net.convs[2](F.relu(c)) + net.convs[3](d)


def shared(net, x):
    a = net.act(0, x)
    return net.convs[1](a) + net.convs[2](a) * 0.5 + F.avg_pool2d(net.convs[3](a), 1), a


def drops(net, x):
    for i in range(3):
        x = net.convs[3](F.dropout(net.act(i, x), 0.3, net.training))
    return x


def u_net(net, x):
    a = net.act(0, x)
    b = net.act(1, F.max_pool2d(a, 2))
    b = F.interpolate(net.act(2, b), scale_factor=2.0)
    return net.narrow[0](torch.cat([a, b, a, b], 1))


def frozen_parts(net, x):
    net.norms[1].requires_grad_(False).eval()
    net.convs[1].requires_grad_(False)
    return net.convs[3](net.act(2, net.act(1, net.act(0, x.detach()))))


def changes_in_place(net, x):
    a = net.act(0, x)
    y = net.convs[1](a * 2)
    b = a.detach().clone()
    b.mul_(3)
    piece = net.convs[2](a)
    whole = torch.cat([piece, a, a, a], 1)
    z = net.narrow[0](whole)
    with torch.no_grad():
        piece.add_(1)  # saved by nothing in plain PyTorch
    return y + z, b


# What "rebuild" keeps at most, as a share of plain PyTorch.
KEPT = {
    bottlenecks: 0.45,
    basic_blocks: 0.62,
    dense_block: 0.4,
    growing: 0.45,
    gates: 0.5,
    shuffles: 0.5,
    pads: 0.6,
    resamples: 0.4,
    shared: 0.62,
    drops: 0.7,
    u_net: 0.45,
    frozen_parts: 1.0,
    changes_in_place: 0.6,
}


def images(randn, memory_format=torch.contiguous_format):
    return randn(2, C, 12, 12).contiguous(memory_format=memory_format).requires_grad_()


@pytest.mark.parametrize("forward", KEPT, ids=lambda f: f.__name__)
def test_modes_are_equal_and_keep_less(forward):
    for memory in MODES:
        for memory_format in FORMATS:
            make_input = partial(images, memory_format=memory_format)
            subject = Subject(partial(Net, forward), make_input=make_input, MEMORY=memory)
            assert_alike(subject, (memory, memory_format))
    x = images(torch.randn, torch.channels_last)
    net = Net(forward).to(memory_format=torch.channels_last)
    plain = pk.saved_bytes(net, x)
    kept = [pk.saved_bytes(pk.convert(net, memory=memory), x) for memory in ("store", *MODES)]
    assert kept[1] <= KEPT[forward] * plain, kept[1] / plain
    assert kept[2] <= kept[1] <= kept[0] <= plain


def a_slice(x):
    return x[:, 2:, 1:]


# Functions of an activation that a product saves.
FUNCTIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "pow": lambda x: (x + 2) ** 1.5,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "lerp": lambda x: torch.lerp(x, x.flip(2), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "maximum": lambda x: torch.maximum(x, x.roll(1, 3)),
    "division": lambda x: 2 / (3 + x.square()),
    "slices": lambda x: torch.cat([a_slice(x), a_slice(x) * 2], 2),
    "indices": lambda x: x[:, torch.tensor([1, 0, 2, 2])],
    "stack": lambda x: torch.stack([x, x], 2).flatten(1, 2),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "permute": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "layer norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (C,)),
    "adaptive pooling": lambda x: F.adaptive_max_pool2d(x, 5),
    "strided max pooling": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max pooling with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "transposed convolution": lambda x: F.conv_transpose2d(x, x[0, :, None, :2, :2].detach()),
    "linear": lambda x: F.linear(x.movedim(1, -1), x[0, :, 0, :C].detach().clone()),
    "dtype": lambda x: x.float().double(),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_an_activation(name):
    function = FUNCTIONS[name]

    def forward(net, x):
        y = function(net.act(0, x))
        return (y * y.detach().cos() + y.sin()).mean()

    for memory in MODES:
        for memory_format in FORMATS:
            make_input = partial(images, memory_format=memory_format)
            assert_alike(Subject(partial(Net, forward), make_input=make_input, MEMORY=memory))


class Changes(nn.Module):
    """Changes an image that plain PyTorch does not save."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(C), nn.Conv2d(C, C, 1)

    def forward(self, x, piece):
        y = self.conv(F.relu(self.norm(x)))
        with torch.no_grad():
            piece.add_(1)
        return y


@pytest.mark.parametrize("memory", MODES)
def test_modules_of_other_modes_change_images(memory):
    class Mixed(Net):
        def __init__(self):
            super().__init__(forward)
            self.changes = Changes()

    def forward(net, x):
        a = net.act(0, x)
        piece = a.cumsum(2)  # runs once
        z = net.narrow[0](torch.cat([piece, a, a, a], 1))
        return net.changes(z, piece)

    def after(net):
        if user_modules.is_converted(net):
            user_modules.set_module_memory(net.changes, "store")

    assert_alike(Subject(Mixed, after=after, make_input=images, MEMORY=memory))


class Alive(TorchDispatchMode):
    """Finds the storages of results that are alive, except those of given tensors."""

    def __init__(self, *given):
        super().__init__()
        self.given = {t.untyped_storage()._cdata for t in given}
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.given:
                    self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes(self):
        return sum(size for reference, size in self.found.values() if not reference.expired())


@pytest.mark.parametrize("name", [*KEPT, *FUNCTIONS], ids=lambda f: getattr(f, "__name__", f))
def test_what_is_not_kept_is_freed(name):
    def of_function(net, x):
        y = FUNCTIONS[name](net.act(0, x))
        return y * (y * 2).cos()

    x = images(torch.randn, torch.channels_last)
    for memory in MODES:
        net = Net(of_function if name in FUNCTIONS else name).to(memory_format=torch.channels_last)
        kept = pk.saved_bytes(pk.convert(net, memory=memory), x)
        with Alive(x, *net.parameters(), *net.buffers()) as alive:
            y = net(x)
        returned = sum(t.untyped_storage().nbytes() for t in (y if type(y) is tuple else (y,)))
        assert alive.bytes() <= kept + returned, (alive.bytes(), kept, returned)
        assert kept <= alive.bytes() + x.nbytes  # as much with hooks of saved tensors
        del y
        assert alive.bytes() == 0


def test_saved_bytes_leaves_nothing():
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sigmoid()), torch.randn(2, 3, 8, 8)
    with Alive(x, *net.parameters()) as alive:
        assert pk.saved_bytes(net, x) > 0
    assert alive.bytes() == 0


@pytest.mark.parametrize("memory", MODES)
def test_max_pooling_saves_no_indices(memory):
    dtypes = set()

    def pack(t):
        dtypes.add(t.dtype)
        return t

    net = pk.convert(Net(u_net), memory=memory)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(images(torch.randn))
    assert torch.int64 not in dtypes


class Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted_backward(forward, memory, layers=4):
    net = pk.convert(Net(forward, layers), memory=memory).to(memory_format=torch.channels_last)
    y = net(images(torch.randn, torch.channels_last))
    with Counting() as mode:
        y.sum().backward()
    return mode.counts


def test_a_shared_activation_is_computed_once():
    def forward(net, x):
        a = F.hardswish(net.norms[0](net.convs[0](x)) * 2)
        return net.convs[1](a) + net.convs[2](a) + net.convs[3](a)

    for memory in MODES:
        assert counted_backward(forward, memory)["hardswish"] == 1


def test_a_segment_is_computed_once():
    """The backward of the last block computes the inputs of the others, which it then keeps."""

    def forward(net, x):
        x = F.hardswish(x)
        for i in range(6):
            h = net.norms[i](net.convs[i](x))
            x = F.softsign(x + h)
        return x * x

    def sums(net, x):
        for i in range(6):
            x = F.relu(net.norms[i](net.convs[i](x)) + x)
        return x * x

    counts = counted_backward(sums, "rebuild", layers=6)
    assert 0 < counts["norm_act_forward"] <= 6
    counts = counted_backward(forward, "rebuild", layers=6)
    assert counts["native_batch_norm"] <= 6


def test_long_skips_are_kept_if_they_take_work(monkeypatch):
    monkeypatch.setattr(recomputation, "_WINDOW", 1)

    def forward(net, x):
        a = x
        for i in range(4):
            a = net.act(i, a)
        h = a
        for i in range(4, 40):
            h = net.act(i, h)
        return net.narrow[0](torch.cat([a, h, h, h], 1))

    counts = counted_backward(forward, "checkpoint", layers=40)
    assert counts["convolution"] <= 44


def test_what_many_results_read_is_kept():
    """Each layer of a dense block reads the pooled image, which nothing saves."""

    def forward(net, x):
        pieces = [F.max_pool2d(x, 2)]
        for i in range(3):
            h = F.relu(net.wide_norms[i](torch.cat([*pieces, *[pieces[0]] * (3 - i)], 1)))
            pieces.append(net.narrow[i](h).cumsum(2))
        return torch.cat(pieces, 1)

    assert counted_backward(forward, "rebuild")["max_pool2d_with_indices"] <= 1
    assert counted_backward(forward, "checkpoint")["max_pool2d_with_indices"] <= 1


@pytest.mark.parametrize(("memory", "runs"), [("rebuild", 0), ("checkpoint", 2)])
@pytest.mark.parametrize("groups", [2, C])
def test_convolutions_in_groups_run_once_with_rebuild(memory, runs, groups):
    def forward(net, x):
        weights = [conv.weight[:, : C // groups] for conv in net.convs]
        for i in range(2):
            x = net.norms[i](F.conv2d(F.hardswish(x), weights[i], groups=groups))
        return F.hardswish(x)

    stem = 1  # a convolution of few channels
    assert counted_backward(forward, memory)["convolution"] == stem + runs


@pytest.mark.parametrize(("memory", "is_kept"), [("rebuild", True), ("checkpoint", False)])
def test_small_tensors_are_kept_with_rebuild(monkeypatch, memory, is_kept):
    """To compute one again takes longer in Python than in its kernel."""

    def forward(net, x):
        x = F.hardswish(x)
        x = F.avg_pool2d(x, 8)
        for i in range(3):
            x = F.hardswish(net.norms[i](x) * 2)
        return x

    def saved_bytes():
        net = pk.convert(Net(forward), memory=memory)
        return pk.saved_bytes(net, torch.randn(2, C, 64, 64))

    small = 2 * C * 8 * 8 * 4
    found = saved_bytes()
    monkeypatch.setitem(POLICIES, memory, POLICIES[memory]._replace(least=0.0))
    kept = found - saved_bytes()
    assert kept >= 3 * small if is_kept else kept == 0


def test_costly_results_are_kept_while_there_is_room(monkeypatch):
    def forward(net, x):
        for i in range(8):
            x = F.relu(net.norms[i](net.convs[i](x)))
        return x

    def run_again(spare):
        changed = POLICIES["checkpoint"]._replace(costly=6.0, spare=spare)
        monkeypatch.setitem(POLICIES, "checkpoint", changed)
        return counted_backward(forward, "checkpoint", layers=8)["convolution"]

    most, some, none = map(run_again, (0.0, 0.5, 1.0))
    assert most >= 7 > some > none == 0


@pytest.mark.parametrize(("dims", "channels", "kept"), [(2, 41, 3), (3, 14, 1)])
def test_convolutions_of_few_channels_run_again_in_3d(dims, channels, kept):
    """Both networks move 25 bytes for each byte that a convolution writes."""
    conv, norm = ((nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d))[dims - 2]
    unit = conv(channels, channels, 3, padding=1), norm(channels), nn.SiLU()
    net = pk.convert(nn.Sequential(*unit, *unit), memory="rebuild")
    x = torch.randn(1, channels, *[8] * dims)
    assert kept <= pk.saved_bytes(net, x) / x.nbytes < kept + 0.1


@pytest.mark.parametrize("memory", MODES)
def test_statistics_change_once(memory):
    net = Net(bottlenecks)
    plain, converted = Net(bottlenecks), pk.convert(net, memory=memory)
    plain.load_state_dict(net.state_dict())
    x = images(torch.randn)
    for model in (plain, converted):
        model(x).square().sum().backward()
    torch.testing.assert_close(dict(plain.named_buffers()), dict(converted.named_buffers()))


def counted_objects():
    kinds = recomputation.Value, recomputation.Recomputation
    return Counter(type(o) for o in gc.get_objects() if type(o) in kinds)


@pytest.mark.parametrize("memory", MODES)
def test_nothing_is_left_without_the_garbage_collector(memory):
    held = []

    def forward(net, x):
        a = net.act(0, x)
        held.append(weakref.ref(a))
        y = net.convs[1](a)
        del a
        held.append(weakref.ref(y))
        return F.relu(net.norms[1](y)).square()

    net = pk.convert(Net(forward), memory=memory)
    gc.collect()
    before = counted_objects()
    gc.disable()
    try:
        y = net(images(torch.randn))
        assert held[0]() is None
        y.sum().backward()
        del y
        assert [r() for r in held] == [None, None]
        assert counted_objects() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("memory", MODES)
def test_sharded_parameters(memory):
    """FSDP2 frees parameters between forward and backward."""
    try:
        net = pk.convert(nn.Sequential(Net(basic_blocks), Net(gates)), memory=memory)
        plain = nn.Sequential(Net(basic_blocks), Net(gates))
        plain.load_state_dict(net.state_dict())
        random_model_parts.start_process_group()
        for block in net:
            torch.distributed.fsdp.fully_shard(block)
        torch.distributed.fsdp.fully_shard(net)  # it does not free the parameters of the root
        x = images(torch.randn)
        found = []
        for model in (plain, net):
            model(x).square().mean().backward()
            found.append([p.grad for p in model.parameters()])
        for expected, own in zip(*found, strict=True):
            if expected is not None:
                torch.testing.assert_close(own.full_tensor(), expected, rtol=1e-3, atol=1e-5)
    finally:
        random_model_parts.end_process_group()
