"""The rules that make deferral sound: what is computed when, and what a program can see of it."""

import concurrent.futures
import contextlib
import copy
import gc
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import preact_kernels as pk
from preact_kernels.conversion import execution
from tests.convert import published_models as foreign
from tests.convert.foreign_cases import MODES, Block, Chain, small
from tests.convert.test_deferral_kinds import Double

pytestmark = pytest.mark.backends("cpu")


def images(*shape):
    return torch.randn(*(shape or (2, 4, 6, 6)), requires_grad=True)


def unit(block, x):
    return block.conv(F.relu(block.bn(x)))


def gradients(y, *inputs):
    return torch.autograd.grad(y.square().sum(), inputs, allow_unused=True)


def assert_same_gradients(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Computing.


@pytest.mark.parametrize("memory", MODES)
def test_a_context_fuses_any_code(memory):
    block, x = foreign.FunctionalBottleneck(4, 4), images()
    plain = copy.deepcopy(block)
    with pk.fuse(memory=memory):
        y = block(x)
    expected = plain(x)
    torch.testing.assert_close(y, expected)
    assert type(y) is torch.Tensor
    assert_same_gradients(
        gradients(y, x, *block.parameters()), gradients(expected, x, *plain.parameters())
    )
    for found, buffer in zip(block.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, buffer)


def test_a_context_checks_its_arguments():
    with pytest.raises(ValueError, match="memory: expected 'store'"), pk.fuse(memory="all"):
        pass


def test_metadata_is_known_without_computing():
    block, x = Block(), images()
    with pk.fuse():
        h = block.bn(x)
        assert (h.shape, h.dtype, h.dim(), h.size(1), len(h)) == (x.shape, x.dtype, 4, 4, 2)
        assert h.requires_grad and not h.is_leaf and h.device == x.device
        assert isinstance(h, torch.Tensor) and type(h) is not torch.Tensor
    assert type(h) is torch.Tensor


def test_what_is_read_becomes_a_plain_tensor():
    block, x = Block(), images()
    with pk.fuse():
        y = unit(block, x)
        y.mean()
        assert type(y) is torch.Tensor
        assert y.grad_fn is not None


def test_attributes_of_tensors_stay():
    block, x = Block(), images()
    with pk.fuse():
        y = unit(block, x)
        y.tag = "mine"
    assert y.tag == "mine" and vars(y) == {"tag": "mine"}


def test_a_tensor_with_weak_references_is_computed():
    block, x = Block(), images()
    with pk.fuse():
        y = unit(block, x)
        reference = weakref.ref(y)
        mean = y.mean()
    torch.testing.assert_close(mean, y.mean())
    assert reference() is y and type(y) is torch.Tensor
    assert_same_gradients(gradients(y * 1, x), gradients(unit(block, x), x))


def test_numpy_and_item_see_the_values():
    block, x = Block().eval(), images()
    expected = unit(block, x)
    with pk.fuse(), torch.no_grad():
        y = unit(block, x)
        assert float(y[0, 0, 0, 0]) == pytest.approx(float(expected[0, 0, 0, 0]), rel=1e-4)
        assert unit(block, x).numpy().shape == y.shape


# Autograd.


class Seen(torch.autograd.Function):
    """Reads its input only in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.zeros(())

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


@pytest.mark.parametrize("function", [Double, Seen], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", ["norm", "relu", "in-place relu", "conv", "sum", "in-place sum"])
def test_custom_functions_pass_gradients_on(place, function):
    block, x = Block().double(), images().double()

    def call():
        h = block.bn(x)
        if place == "norm":
            return function.apply(h)
        h = h.relu_() if place == "in-place relu" else F.relu(h)
        if "relu" in place:
            return function.apply(h)
        y = block.conv(h)
        if place == "sum":
            y = y + x
        elif place == "in-place sum":
            y += x
        return function.apply(y)

    with pk.fuse():
        y = call()
    expected = call()
    torch.testing.assert_close(y, expected)
    inputs = (x, *block.parameters())
    found, wanted = (torch.autograd.grad(t.sum(), inputs, allow_unused=True) for t in (y, expected))
    assert_same_gradients(found, wanted)


def test_both_readers_of_a_tensor_get_its_gradient():
    block, x = Block().double(), images().double()

    def call():
        h = F.relu(block.bn(x))
        return block.conv(h) + Double.apply(h)

    with pk.fuse():
        y = call()
    inputs = (x, *block.parameters())
    assert_same_gradients(gradients(y, *inputs), gradients(call(), *inputs))


def test_backward_of_custom_functions_takes_linear_time():
    """Each node is computed once again, though blocks read their inputs twice."""
    blocks = nn.Sequential(*(Residual() for _ in range(24)))
    x = images()
    with pk.fuse():
        y = Double.apply(blocks(x))
    with Calls(F.batch_norm) as calls:
        y.sum().backward()
    assert calls.count <= 2 * 24


class Residual(Block):
    def forward(self, x):
        return super().forward(x) + x


class Calls(TorchFunctionMode):
    def __init__(self, function):
        super().__init__()
        self.function, self.count = function, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is self.function
        return func(*args, **(kwargs or {}))


class TwoUnits(nn.Module):
    """What a call does with `place` and so on differs from call to call."""

    def __init__(self):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.conv1, self.conv2, self.other = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x, place="", other=False, freezes=False, twice=False):
        seen = []

        def at(name, h):
            if name == place:
                seen.append(Double.apply(h))
            return h

        h = at("norm", self.bn1(x))
        activation = at("relu", F.relu(h))
        if freezes:
            self.conv1.weight.requires_grad_(False)
        h = at("conv", self.other(activation) if other else self.conv1(activation))
        h = at("second norm", self.bn2(h))
        h = at("in-place relu", h.relu_())
        h = at("second conv", self.conv2(h))
        if twice:
            return h * Double.apply(self.other(activation))
        return sum(seen, h)


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"place": place}
            for place in ("norm", "relu", "conv", "second norm", "in-place relu", "second conv")
        ),
        *({name: True, "place": "second conv"} for name in ("other", "freezes")),
        {"twice": True},
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()),
)
def test_custom_functions_in_a_call_that_differs_from_the_last(options):
    model = TwoUnits().double()
    plain = copy.deepcopy(model)
    pk.convert(model)
    for count, given in ((2, {}), (2, options), (2, options), (2, {}), (1, options)):
        x, results = images(count, 4, 6, 6).double(), []
        for net in (model, plain):
            net.zero_grad()
            net.requires_grad_()
            own = x.detach().requires_grad_()
            net(own, **given).square().sum().backward()
            results.append([own.grad, *(p.grad for p in net.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def overwrite(module, args, result):
    module.memory.fill_(0)


def swap(module, args, result):
    torch.utils.swap_tensors(module.weight, nn.Parameter(torch.zeros(4, 4, 3, 3)))


@pytest.mark.parametrize("converts", [True, False], ids=["convert", "fuse"])
@pytest.mark.parametrize("hook", [overwrite, swap], ids=lambda f: f.__name__)
def test_hooks_of_a_convolution_run_after_it(hook, converts):
    model, x = Block(), images()
    plain = copy.deepcopy(model)
    for conv in (plain.conv, model.conv):
        conv.memory = conv.weight.untyped_storage()  # PyTorch counts no change through it
        conv.register_forward_hook(hook)
    if converts:
        pk.convert(model)
    with torch.no_grad(), contextlib.nullcontext() if converts else pk.fuse():
        y = model(x)
    with torch.no_grad():
        torch.testing.assert_close(y, plain(x))


def test_a_weight_that_was_freed_raises():
    """As after FSDP freed the weights of a block whose result it did not find."""
    block, x = Block(), images()
    for context in (pk.fuse(), contextlib.nullcontext()):
        with context:
            y = unit(block, x)
        size = block.bn.weight.untyped_storage().nbytes()
        block.bn.weight.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"freed|not allocated"):
            y.sum().backward()
        block.bn.weight.untyped_storage().resize_(size)


def test_swapped_inputs_are_refused():
    block, x = Block(), images()
    with pytest.raises(RuntimeError, match="was modified"), torch.no_grad(), pk.fuse():
        y = unit(block, x)
        torch.utils.swap_tensors(block.conv.weight, nn.Parameter(torch.zeros(4, 4, 3, 3)))
        y.sum()


def test_a_weight_may_be_frozen_before_backward():
    block, x = Block().double(), torch.randn(2, 4, 6, 6).double().requires_grad_()
    inputs = (x, *block.parameters())
    results = []
    for context in (pk.fuse(), contextlib.nullcontext()):
        block.requires_grad_()
        with context:
            y = Double.apply(unit(block, x))
        block.conv.weight.requires_grad_(False)
        y.sum().backward()
        results.append([t.grad for t in inputs])
        x.grad = None
        block.zero_grad()
    assert_same_gradients(*results)


def test_a_weight_that_changes_its_place_in_the_autograd_graph():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.scale = nn.BatchNorm2d(4), nn.Parameter(torch.ones(()))
            self.weight = torch.full((4, 4, 1, 1), 0.5, requires_grad=True) + 0

        def forward(self, x, scales):
            h = F.relu(self.bn(x))
            if scales:
                self.weight.mul_(self.scale)
            return Double.apply(F.conv2d(h, self.weight))

    models, x = (Scaled(), Scaled()), images()
    pk.convert(models[0])
    for model in models:
        model(x, False).sum().backward()
        model(x, True).sum().backward()
    torch.testing.assert_close(models[0].scale.grad, models[1].scale.grad)


def test_a_tensor_that_an_autograd_function_lets_go():
    """Its values are read by a recorded operation, and are what a converted child returned."""

    class Inner(Block):
        def forward(self, x):
            self.kept = [super().forward(x)]
            self.seen = [Seen.apply(self.kept[0])]
            self.kept[0].mean()
            return self.kept[0]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.block = Inner(), Block()

        def forward(self, x):
            h = self.inner(x)
            y = self.block(self.inner.kept[0])
            self.inner.seen.clear()
            return y + h + self.inner.kept.pop().sum(), h

    model, x = Outer().double(), images().double()
    plain = copy.deepcopy(model)
    (y, h), (expected, plain_h) = pk.convert(model)(x), plain(x)
    torch.testing.assert_close((y, h), (expected, plain_h))
    assert type(y) is type(h) is torch.Tensor
    found = gradients(y, h, x, *model.parameters())
    assert_same_gradients(found, gradients(expected, plain_h, x, *plain.parameters()))


def test_custom_functions_free_what_they_kept():
    block, x = Block(), images()
    with pk.fuse():
        h = F.relu(block.bn(x))
        y = Double.apply(h)
    kept = weakref.ref(h)
    del h
    loss = y.sum()
    loss.backward()
    gc.collect()
    assert kept() is None


def test_a_version_that_plain_pytorch_checks_is_checked():
    block, x = Block(), images().contiguous(memory_format=torch.channels_last)
    a = x * 1
    with pk.fuse():
        h = unit(block, a)
        z = torch.utils.checkpoint.checkpoint(lambda t: t * 2, h, use_reentrant=False)
    with torch.no_grad():
        a.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_results_of_custom_functions_are_deferred_right():
    """A function whose forward returns a deferred tensor."""
    block, x = Block().double(), images().double()

    class Unit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return unit(block, x)

        @staticmethod
        def backward(ctx, dy):
            return dy * 5

    def call():
        return unit(block, Unit.apply(x))

    with pk.fuse():
        y = call()
    torch.testing.assert_close(gradients(y, x), gradients(call(), x))


def test_gradients_of_tensors_in_between():
    block, x = Chain(*(Block() for _ in range(3))).double(), images().double()

    def call():
        h = block[0](x)
        y = block[1](h)
        return y, block[2](y), h

    with pk.fuse():
        y, z, h = call()
    py, pz, ph = call()
    assert y.stride() == py.stride() and h.stride() == ph.stride()
    assert_same_gradients(gradients(z, y, h, x), gradients(pz, py, ph, x))


@pytest.mark.parametrize("is_before", [True, False])
def test_hooks_that_come_first_see_computed_tensors(is_before):
    """FSDP hooks the modules that it wraps, and passes their inputs to a custom function."""

    class Features(Chain):
        def forward(self, x):
            h = self[0](x)
            return self[3](self[2](self[1](h))), h

    def doubled_input(module, args):
        return (Double.apply(args[0]),)

    plain, x = Features(*(Block() for _ in range(4))).double(), images().double()
    found = []
    for model in (plain, pk.convert(copy.deepcopy(plain))):
        if is_before:
            model[2].register_forward_pre_hook(doubled_input, prepend=True)
        else:
            model[2].register_forward_hook(lambda m, args, y: Double.apply(y), prepend=True)
        for _ in range(2):  # hooks are sorted as a call finds them
            y, h = model(x)
        found.append(gradients(y, h, x))
    assert_same_gradients(*found)


def test_double_backward():
    block, x = Block().double(), images().double()

    def second(y):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return gradients(dx, x, *block.parameters())

    with pk.fuse():
        y = unit(block, x)
    assert_same_gradients(second(y), second(unit(block, x)))


def test_frozen_batch_norms_keep_no_image():
    block = Block()
    block.bn.requires_grad_(False)
    x = images().detach()
    with pk.fuse():
        y = unit(block, x)
    x.add_(1)  # saved by no plain operator
    y.sum().backward()


# Running statistics.


def test_running_statistics_are_updated_before_they_are_read():
    block, x = Block(), images()
    plain = copy.deepcopy(block)
    with pk.fuse():
        y = unit(block, x)
        mean = block.bn.running_mean.clone()
        unit(block, x)
        del y
    unit(plain, x)
    torch.testing.assert_close(mean, plain.bn.running_mean)
    unit(plain, x)
    torch.testing.assert_close(block.bn.running_var, plain.bn.running_var)


def test_running_statistics_are_updated_after_an_exception():
    class Fails(Block):
        def forward(self, x):
            super().forward(x)
            raise KeyError("planted")

    model, x = pk.convert(Fails()), images()
    plain = pk.revert(copy.deepcopy(model))
    for m in (model, plain):
        with pytest.raises(KeyError, match="planted"):
            m(x)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_interrupt_leaves_no_region_open():
    class Interrupts(Chain):
        stops = True

        def forward(self, x):
            y = super().forward(x)
            if self.stops:
                raise KeyboardInterrupt
            return y

    model, x = pk.convert(Interrupts(Block(), Block())), images()
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model.stops = False
    y = model(x)
    assert type(y) is torch.Tensor
    other = F.relu(F.batch_norm(x, None, None, training=True))
    assert type(other) is torch.Tensor
    assert pk.conversion_report(model).fused


def test_a_step_that_failed_updates_statistics_once(monkeypatch):
    block, x = Block(), images()
    plain = copy.deepcopy(block)
    store, calls = execution._Execution._store, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("planted")
        return store(*args)

    monkeypatch.setattr(execution._Execution, "_store", fails_once)
    with pk.fuse():
        y = unit(block, x)
        with pytest.raises(MemoryError, match="planted"):
            y.sum()
        total = y.sum()
    torch.testing.assert_close(total, unit(plain, x).sum())
    torch.testing.assert_close(block.bn.running_mean, plain.bn.running_mean)


# Errors.


def test_errors_are_raised_where_they_are_made():
    block, x = Block(), images()
    with pk.fuse():
        h = F.relu(block.bn(x))
        with pytest.raises(RuntimeError):
            F.conv2d(h, torch.randn(4, 3, 1, 1))
        with pytest.raises(RuntimeError):
            h + torch.randn(2, 3, 5, 5)
        with pytest.raises(ValueError, match="more than 1 value"):
            F.batch_norm(torch.randn(1, 4, 1, 1), None, None, training=True)
        y = block.conv(h)
    torch.testing.assert_close(y, unit(block, x))


# Around the model.


def test_nothing_of_the_model_is_replaced():
    model, x = small()
    kinds = [type(m) for m in model.modules()]
    pk.convert(model)(x)
    assert [type(m) for m in model.modules()] == kinds
    assert not any("forward" in vars(m) for m in model.modules())
    pk.revert(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("preact" in name for m in model.modules() for name in vars(m))


def test_random_states_do_not_change():
    import random

    model, x = small()
    states = random.getstate(), torch.get_rng_state()
    pk.convert(model)(x)
    pk.conversion_report(model)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


HOOKED = {"norm": "0.bn", "conv": "0.conv", "block": "0", "relu": "0.act"}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", HOOKED.values(), ids=HOOKED)
def test_hooks_see_what_they_see_in_plain_pytorch(name, before):
    class Part(Block):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.conv(self.act(self.bn(x))) + x

    def hooked(model):
        seen = []
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda m, args: seen.append(args[0].view(2, -1).clone()))
        module.register_forward_hook(lambda m, args, y: seen.append((y.stride(), y.view(2, -1))))
        module.register_full_backward_hook(
            lambda m, dx, dy: seen.append((dy[0].clone(), dx[0].clone()))
        )
        return seen

    model = Chain(Part(), Part())
    plain, x = copy.deepcopy(model), images()
    seen = hooked(model) if before else None
    pk.convert(model)
    seen = hooked(model) if seen is None else seen
    expected = hooked(plain)
    for m in (model, plain):
        m(x).square().sum().backward()
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


def test_hooks_of_unpickled_models_keep_their_arguments():
    """In another process, whose hooks are numbered from 0."""
    code = (
        "import pickle, sys, torch\n"
        "model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "for m in model.modules():\n"
        "    for _ in range(5):\n"
        "        m.register_forward_pre_hook(lambda m, a: None)\n"
        "        m.register_forward_hook(lambda m, a, y: None)\n"
        "y = model(torch.randn(2, 4, 6, 6))\n"
        "assert type(y) is torch.Tensor\n"
    )
    model = pk.convert(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model")
        path.write_bytes(pickle.dumps(model))
        process = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_removed_hooks_open_no_region():
    model = pk.convert(Chain(Block()))
    for m in model.modules():
        m._forward_hooks.clear()
    assert type(model(images())) is torch.Tensor
    assert type(F.batch_norm(images(), None, None, training=True)) is torch.Tensor


def test_other_function_modes_see_every_call():
    model = pk.convert(Chain(Block()))
    with Calls(F.relu) as calls:
        model(images())
    assert calls.count == 1


def test_parts_have_memory_modes_of_their_own():
    model, x = pk.convert(foreign.DeepNet(29, 8)), torch.randn(2, 3, 16, 16)
    kept = pk.saved_bytes(model, x)
    pk.convert(model.stages[0], memory="rebuild")
    assert pk.saved_bytes(model, x) < kept


def test_hooks_may_replace_results():
    model = pk.convert(Chain(Block(), Block()))
    model[0].bn.register_forward_hook(lambda m, args, y: y * 0)
    model[1].conv.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    plain, x = pk.revert(copy.deepcopy(model)), images()
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_converted(copied):
    model, x = small()
    pk.convert(model, memory="rebuild")
    other = copied(model)
    assert pk.saved_bytes(other, x) == pk.saved_bytes(model, x)
    assert len(pk.conversion_report(other).fused) == 15


def test_models_are_freed_at_once():
    model, x = small()
    reference = weakref.ref(model)
    pk.convert(model)(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        pk.conversion_report(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_a_call_leaves_no_garbage():
    model, x = small()
    pk.convert(model)(x)
    gc.collect()
    gc.disable()
    try:
        y = model(x)
        del y
        garbage = gc.collect()
    finally:
        gc.enable()
    plain = pk.revert(model)
    gc.collect()
    plain(x)
    assert garbage <= gc.collect() + 50


@pytest.mark.parametrize("raises", [False, True])
def test_transformers_take_their_fast_path(raises):
    """Which computes zeros for padding; also after a hook raised before the encoder ran."""

    class Detector(Chain):
        def __init__(self):
            super().__init__(Block(), Block())
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x):
            tokens = self[0](x).flatten(2).transpose(1, 2)
            padding = torch.arange(36).expand(2, 36) > 30
            for _ in range(3):
                with contextlib.suppress(ZeroDivisionError):
                    encoded = self.encoder(tokens, src_key_padding_mask=padding)
            tokens = encoded
            return self[1](tokens.transpose(1, 2).reshape(x.shape))

    model, x = Detector().eval(), images()
    calls = []

    def hook(module, args):
        calls.append(module)
        if raises and len(calls) % 3 == 1:
            raise ZeroDivisionError

    model.encoder.register_forward_pre_hook(hook)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(pk.convert(model)(x), expected)
    assert len(pk.conversion_report(model).fused) == 2


def test_parts_may_be_compiled():
    class Net(Chain):
        def __init__(self):
            super().__init__(Block(), torch.compile(Block(), backend="aot_eager"), Block())
            self.function = torch.compile(lambda x: x.sigmoid() * 2, backend="aot_eager")

        def forward(self, x):
            return super().forward(self.function(self[0](x)) + x)

    torch._dynamo.reset()
    model, x = Net(), images()
    plain = copy.deepcopy(model)
    y, expected = pk.convert(model)(x), plain(x)
    torch.testing.assert_close(y, expected)
    assert_same_gradients(
        gradients(y, x, *model.parameters()), gradients(expected, x, *plain.parameters())
    )
    report = pk.conversion_report(model)
    assert [s.fused for s in report] == [True, False, True]
    assert "compiled" in report[1].reason


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "Module.compile"])
def test_a_compiled_block_is_compiled_as_in_plain_pytorch(in_place):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def net():
        model = nn.Sequential(foreign.FunctionalBottleneck(4, 1), Block())
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        return model

    def compiled(model):
        torch._dynamo.reset()
        graphs.clear()
        if in_place:
            model[0].compile(backend=backend)
        else:
            model[0] = torch.compile(model[0], backend=backend)
        y = model(x)
        model(x)
        return y, len(graphs)

    x = images()
    y, count = compiled(pk.convert(net()))
    expected, expected_count = compiled(net())
    torch.testing.assert_close(y, expected)
    assert count == expected_count
    assert_same_gradients(gradients(y, x), gradients(expected, x))


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "Module.compile"])
def test_a_compiled_block_may_be_called_anywhere(in_place):
    """In another thread, under two names, and on its own after a call of the model."""

    class Net(Chain):
        def __init__(self):
            block = Block()
            if in_place:
                block.compile(backend="eager")
            else:
                block = torch.compile(block, backend="eager")
            super().__init__(Block(), block)
            self.again = block

        def forward(self, x):
            h = self[1](self[0](x))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                h = pool.submit(self[1], h).result()
            return self.again(h)

    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, x = Net().eval(), images()
    torch.manual_seed(0)
    model = pk.convert(Net().eval())
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model.again(x), plain.again(x))
    call = pk.revert(model)[1]._compiled_call_impl
    assert (call is None) != in_place and "preact_kernels" not in type(call).__module__


def test_regions_belong_to_their_threads():
    model, x = small()
    plain = copy.deepcopy(model)
    pk.convert(model)
    results = {}

    def run(index):
        results[index] = model(x)

    model.eval(), plain.eval()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    with pk.fuse():
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for y in results.values():
        torch.testing.assert_close(y, plain(x))


def test_another_thread_may_read_a_deferred_tensor():
    block, x, results = Block().eval(), images(), []
    with pk.fuse():
        y = unit(block, x)
        threads = [threading.Thread(target=lambda: results.append(y.sum())) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for result in results:
        torch.testing.assert_close(result, unit(block, x).sum())


def test_the_report_names_what_forced_a_result():
    class Gelu(Block):
        def forward(self, x):
            return self.conv(F.gelu(self.bn(x)))

    model = pk.convert(Chain(Block(), Gelu()))
    assert "not called" in pk.conversion_report(model)[0].reason
    model(images())
    fused, forced = pk.conversion_report(model)
    assert (fused.into, fused.conv) == ("BN-ReLU-Conv", "0.conv")
    assert "gelu" in forced.reason and "test_deferral.py" in forced.reason
    assert "0.conv" in str(pk.conversion_report(model))


def test_convolutions_of_few_channels_stay_in_nchw():
    """PyTorch 2.13 corrupts memory in channels_last ones of stride 2."""

    class Few(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)
            self.down = nn.Conv2d(3, 8, 1, 2)

        def forward(self, x):
            return self.down(self.conv(F.relu(self.bn(x))))

    model, x = Few(), images(2, 3, 9, 9)
    expected = model(x)
    for _ in range(20):
        torch.testing.assert_close(pk.convert(model)(x), expected)
