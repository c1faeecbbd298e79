"""The rules of deferral: what is computed when, and what a program can observe."""

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import preact_kernels as pk
from preact_kernels.conversion import execution
from testbed import published_models as foreign
from tests.convert.models import Block, Chain, small
from tests.convert.random_model_parts import SaveAndSquare, triple
from tests.convert.trial import Copies, Subject, assert_alike

# True from torch 2.15 on: what such a function saves becomes plain when it is read.
IS_APPLIED_IN_C = not hasattr(torch.autograd.Function.apply, "__code__")

pytestmark = pytest.mark.backends("cpu")

square = SaveAndSquare.apply


def images(*shape):
    return torch.randn(*(shape or (2, 4, 6, 6)), requires_grad=True)


def gradients(y, *inputs):
    return torch.autograd.grad(y.square().sum(), inputs, allow_unused=True)


# Rules 1 and 7: deferred operations, their computation, and their results.


def test_metadata_is_known_without_computing():
    block, x = Block(), images()
    with pk.fuse():
        h = block.bn(x)
        assert (h.shape, h.dtype, h.dim(), h.size(1), len(h)) == (x.shape, x.dtype, 4, 4, 2)
        assert h.requires_grad and not h.is_leaf and h.device == x.device
        assert isinstance(h, torch.Tensor) and type(h) is not torch.Tensor
        assert type(h).__name__ == "Tensor"
    assert type(h) is torch.Tensor


def test_what_is_read_becomes_a_plain_tensor_and_keeps_what_refers_to_it():
    block, x = Block(), images()
    with pk.fuse():
        y = block(x)
        y.tag, reference = "mine", weakref.ref(y)
        mean = y.mean()
        assert type(y) is torch.Tensor and y.grad_fn is not None
    torch.testing.assert_close(mean, y.mean())
    assert reference() is y and vars(y) == {"tag": "mine"}
    torch.testing.assert_close(gradients(y * 1, x), gradients(block(x), x), rtol=1e-4, atol=1e-5)


def test_what_an_autograd_function_held_is_plain_when_it_lets_go():
    block, x = Block(), images()
    with pk.fuse():
        y = block(x)
        saved = [square(y)]
        y.mean()
        assert (type(y) is torch.Tensor) == IS_APPLIED_IN_C
        saved.clear()
        y.mean()
        assert type(y) is torch.Tensor


def test_backward_of_custom_functions_takes_linear_time(monkeypatch):
    """Each node is computed again only once, though blocks read their inputs twice."""

    class Residual(Block):
        def forward(self, x):
            return super().forward(x) + x

    blocks, x = nn.Sequential(*(Residual() for _ in range(12))), images()
    with pk.fuse():
        y = triple(blocks(x))
    batch_norm, calls = F.batch_norm, []
    monkeypatch.setattr(F, "batch_norm", lambda *args: calls.append(args) or batch_norm(*args))
    y.sum().backward()
    assert 12 <= len(calls) <= 2 * 12


def test_custom_functions_free_what_they_kept():
    block, x = Block(), images()
    with pk.fuse():
        h = F.relu(block.bn(x))
        y = triple(h)
    kept = weakref.ref(h)
    del h
    loss = y.sum()
    loss.backward()
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_call_that_differs_from_the_last_is_recorded_anew():
    """The cached result of a module's last call is used only for the same arguments."""

    class TwoUnits(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

        def forward(self, x):
            h = F.relu(self.bn2(self.conv1(F.relu(self.bn1(x)))))
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                self.conv2.weight.data = self.conv2.weight.data[:, :, 1:2, 1:2].clone()
                self.bn1.eps = 0.1
            y, z = (F.conv2d(h, self.conv2.weight, None, stride) for stride in (2, 1))
            return y * y.shape[2] + z.mean()

    counts = iter([2, 2, 3] * 2)
    assert_alike(Subject(TwoUnits, make_input=lambda randn: randn(next(counts), 4, 6, 6)))


# Rule 2: writes.


def overwrite(module, args, result):
    module.memory.fill_(0)


def swap(module, args, result):
    torch.utils.swap_tensors(module.weight, nn.Parameter(torch.zeros(4, 4, 3, 3)))


@pytest.mark.parametrize("hook", [overwrite, swap], ids=lambda f: f.__name__)
def test_hooks_of_a_convolution_run_after_it(hook):
    model, x = Block(), images()
    plain = copy.deepcopy(model)
    for conv in (plain.conv, model.conv):
        conv.memory = conv.weight.untyped_storage()  # writes to it do not bump the version
        conv.register_forward_hook(hook)
    with torch.no_grad():
        torch.testing.assert_close(pk.convert(model)(x), plain(x))


def test_swapped_inputs_are_refused():
    block, x = Block(), images()
    weight = nn.Parameter(torch.zeros(4, 4, 3, 3))
    with pytest.raises(RuntimeError, match="was modified"), torch.no_grad(), pk.fuse():
        for _ in range(block.conv.weight._version):
            weight.mul_(2)  # gives both weights the same version
        y = block(x)
        torch.utils.swap_tensors(block.conv.weight, weight)
        y.sum()


@pytest.mark.parametrize("has_relu", [True, False])
def test_a_version_that_plain_pytorch_checks_is_checked(has_relu):
    block, x = Block(), images().contiguous(memory_format=torch.channels_last)
    a = x * 1
    with pk.fuse():
        z = triple(block(a) if has_relu else block.bn(a))
    with torch.no_grad():
        a.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


# Rule 3: running statistics, also after exceptions.


def test_running_statistics_are_updated_after_an_exception():
    """No region stays open."""

    class Stops(Chain):
        stops = True

        def forward(self, x):
            y = super().forward(x)
            if self.stops:
                raise KeyboardInterrupt
            return y

    plain, x = Stops(Block(), Block()), images()
    model = pk.convert(copy.deepcopy(plain))
    for m in (model, plain):
        with pytest.raises(KeyboardInterrupt):
            m(x)
        m.stops = False
    y, expected = model(x), plain(x)
    assert type(F.relu(F.batch_norm(x, None, None, training=True))) is torch.Tensor
    torch.testing.assert_close(y, expected)
    assert type(y) is torch.Tensor and pk.conversion_report(model).fused
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)


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
        y = block(x)
        with pytest.raises(MemoryError, match="planted"):
            y.sum()
        total = y.sum()
    torch.testing.assert_close(total, plain(x).sum())
    torch.testing.assert_close(block.bn.running_mean, plain.bn.running_mean)


# Rule 4: errors.


def test_errors_are_raised_where_they_are_made():
    block, x = Block(), images()
    with pk.fuse():
        h = F.relu(block.bn(x))
        with pytest.raises(RuntimeError):
            F.conv2d(h, torch.randn(4, 3, 1, 1))
        with pytest.raises(RuntimeError):
            h + torch.randn(2, 3, 5, 5)
        with pytest.raises(ValueError, match="4D input"):
            block.bn(x[0])
        with pytest.raises(ValueError, match="more than 1 value"):
            F.batch_norm(torch.randn(1, 4, 1, 1), None, None, training=True)
        y = block.conv(h)
    torch.testing.assert_close(y, block(x))


# Rule 5: weights that are read later; hooks.


def test_a_weight_that_was_freed_raises():
    """FSDP frees the weights of a block if it finds no tensor in its result."""
    block, x = Block(), images()
    for context in (pk.fuse(), contextlib.nullcontext()):
        with context:
            y = block(x)
        size = block.bn.weight.untyped_storage().nbytes()
        block.bn.weight.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"freed|not allocated"):
            y.sum().backward()
        block.bn.weight.untyped_storage().resize_(size)


@pytest.mark.parametrize("is_before", [True, False])
def test_hooks_that_come_first_see_computed_tensors(is_before):
    """FSDP hooks the modules that it wraps, and passes their inputs to a custom function."""

    class Features(Chain):
        def forward(self, x):
            h = self[0](x)
            return self[3](self[2](self[1](h))), h

    def add_hook(net):
        if is_before:
            net[2].register_forward_pre_hook(lambda m, args: (triple(args[0]),), prepend=True)
        else:
            net[2].register_forward_hook(lambda m, args, y: triple(y), prepend=True)

    assert_alike(Subject(lambda: Features(*(Block() for _ in range(4))), after=add_hook))


# Rule 6: other modes of PyTorch.


def test_other_function_modes_see_every_call():
    calls = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Calls():
        pk.convert(Chain(Block()))(images())
    assert calls.count(F.relu) == 1


def test_removed_hooks_open_no_region():
    model = pk.convert(Chain(Block()))
    for m in model.modules():
        m._forward_hooks.clear()
    assert type(model(images())) is torch.Tensor
    assert type(F.batch_norm(images(), None, None, training=True)) is torch.Tensor


# Rule 8: threads.


def test_regions_belong_to_their_threads():
    model, x = small()
    plain = copy.deepcopy(model).eval()
    pk.convert(model).eval()
    results = []
    threads = [threading.Thread(target=lambda: results.append(model(x))) for _ in range(4)]
    with pk.fuse():
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for y in results:
        torch.testing.assert_close(y, plain(x))
    assert len(results) == 4


def test_another_thread_may_read_a_deferred_tensor():
    block, x, results = Block().eval(), images(), []
    with pk.fuse():
        y = block(x)
        threads = [threading.Thread(target=lambda: results.append(y.sum())) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, block(x).sum())


# Memory formats.


def test_what_units_read_and_return_is_converted_once():
    class ReturnsMuch(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            h = F.relu(F.relu(x) + 1)
            g = self.blocks[0](h)
            return self.blocks[1](g), self.blocks[2](h), g, h

    model, x = ReturnsMuch(), images()
    expected = model(x)
    with Copies() as copies:
        y = pk.convert(copy.deepcopy(model))(x)
    assert copies.count == 4  # `h` and three results
    for a, b in zip(y, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_the_output_of_a_stage_that_rebuilds_may_change_in_place():
    class ChangesOutput(Chain):
        def forward(self, x):
            return super().forward(x).mul_(2)

    def in_nhwc(t):
        return t.to(memory_format=torch.channels_last)

    subject = Subject(
        lambda: in_nhwc(ChangesOutput(*(foreign.FunctionalBlock(4, 4) for _ in range(3)))),
        make_input=lambda randn: in_nhwc(randn(2, 4, 6, 6)),
        MEMORY="rebuild",
    )
    assert_alike(subject)


def test_the_profiler_may_record_shapes():
    """It holds weak references to tensors, which then keep their class."""
    model, x = small()
    expected = model(x)
    with torch.profiler.profile(record_shapes=True):
        y = pk.convert(model)(x)
    torch.testing.assert_close(y, expected)
    assert type(y) is torch.Tensor


# Garbage.


def test_models_are_freed_at_once_and_calls_leave_no_garbage():
    model, x = small()
    modules = [weakref.ref(m) for m in pk.convert(model).modules()]
    model(x).sum().backward()
    while gc.collect():  # what other tests left may need several passes
        pass
    gc.disable()
    try:
        model(x)
        garbage = gc.collect()
        pk.conversion_report(model)
        del model
        assert not any(m() for m in modules)
    finally:
        gc.enable()
    assert garbage <= 50
