"""Converted models: state, copies, later changes, hooks, compilers."""

import concurrent.futures
import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from testbed import published_models as foreign
from tests.convert import random_model_parts
from tests.convert.models import Block, Chain, small
from tests.convert.trial import ignore, train_step
from tests.oracle import assert_same_bits, evaluate

pytestmark = pytest.mark.backends("cpu", slow=("reference", "triton"))


def results(model, x):
    """Runs one training step of a copy."""
    return evaluate(model, {"x": x})


def hooks_of(model):
    """Returns all forward hooks of the modules, with their options."""
    names = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    names += ("_forward_hooks", "_forward_hooks_always_called")
    return [list(getattr(m, n).values()) for m in model.modules() for n in names]


# State.


def test_nothing_of_the_model_is_replaced_and_reverting_removes_the_hooks():
    model, x = small()
    model.layer1.register_forward_hook(ignore)
    model.layer2[0].register_forward_pre_hook(ignore)
    plain, hooks, text = results(model, x), hooks_of(model), repr(model)
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    state = torch.get_rng_state()
    assert pk.convert(model) is model
    own = hooks_of(model)
    assert hooks_of(pk.convert(model)) == own
    model(x)
    assert pk.conversion_report(model).fused
    assert torch.equal(torch.get_rng_state(), state)
    assert (list(model.state_dict()), repr(model)) == (keys, text)
    assert [type(m) for m in model.modules()] == kinds
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    assert not any("forward" in vars(m) for m in model.modules())
    assert pk.revert(model) is model
    assert hooks_of(model) == hooks
    assert not any("preact" in name for m in model.modules() for name in vars(m))
    assert {s.reason for s in pk.conversion_report(model)} == {"the model is not converted"}
    model.load_state_dict(small()[0].state_dict(), strict=True)
    assert_same_bits(results(model, x), plain)


def test_wrong_arguments_leave_the_model_as_it_was():
    model, x = small()
    kept = pk.saved_bytes(pk.convert(model, memory="rebuild"), x)
    with pytest.raises(ValueError, match="memory: expected 'store'"):
        pk.convert(model, memory="all")
    assert pk.saved_bytes(model, x) == kept
    assert pk.conversion_report(model).fused
    with pytest.raises(ValueError, match="memory: expected 'store'"), pk.fuse(memory="all"):
        pass
    for function in (pk.convert, pk.revert, pk.conversion_report):
        with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got int"):
            function(3)


def test_the_report_is_that_of_the_last_call():
    model, x = pk.convert(Block()), torch.randn(2, 4, 6, 6)

    def reason_after_a_call():
        model(x)
        (site,) = pk.conversion_report(model)
        assert site.fused is not bool(site.reason)
        return site.reason

    assert not reason_after_a_call()
    assert "BN-ReLU-Conv, conv" in str(pk.conversion_report(model))
    hook = model.bn.register_forward_hook(ignore)
    assert pk.conversion_report(model).fused  # not called since
    assert reason_after_a_call() == "the norm has hooks"
    hook.remove()
    assert not reason_after_a_call()
    (site,) = pk.conversion_report(pk.convert(model))
    assert site.reason == "not called by a converted module since the model was converted"
    assert not reason_after_a_call()


@pytest.mark.parametrize("converts_all", [True, False])
def test_the_report_names_norms_that_code_outside_of_converted_modules_calls(converts_all):
    """`nn.Sequential(*list(model.children())[:-2])` is such code."""
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), Block())
    pk.convert(model if converts_all else model[2])
    outer = nn.Sequential(*model.children())
    outer(torch.randn(2, 4, 6, 6))
    outside = "not inside a converted module: convert the module that calls it"
    plain, fused = pk.conversion_report(outer)
    assert (plain.reason, fused.fused) == (outside, True)
    plain, fused = pk.conversion_report(model)
    uncalled = "not called by a converted module since the model was converted"
    assert (plain.reason, fused.fused) == (uncalled if converts_all else outside, True)


def test_lazy_modules_run_fused_once_they_have_shapes():
    def lazy():
        return nn.Sequential(nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(4, 3))

    model, plain, x = pk.convert(lazy()), lazy(), torch.randn(2, 3, 5, 5)
    found = []
    for m in (model, plain):
        torch.manual_seed(1)  # the first call draws the weights
        found.append([m(x), m(x), *m.buffers()])
    torch.testing.assert_close(*found)
    assert pk.conversion_report(model).fused


def test_replicas_of_data_parallel_use_their_own_parameters():
    model, x = small()
    pk.convert(model).eval()
    zeros = foreign.replicated(model, torch.zeros_like)
    same = foreign.replicated(model, torch.clone)
    with torch.no_grad():
        assert not zeros(x).any()
        assert_same_bits({"y": same(x)}, {"y": model(x)})


# Copies.


def reloaded(model):
    """Saves and loads a model."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), reloaded]
)
def test_copies_stay_converted_and_are_independent(copied):
    model, x = small()
    pk.convert(model, memory="rebuild")
    kept = pk.saved_bytes(model, x)
    other = copied(model)
    assert "not called" in pk.conversion_report(other)[0].reason
    assert pk.saved_bytes(other, x) == kept
    assert list(pk.conversion_report(other)) == list(pk.conversion_report(model))
    assert_same_bits(results(other, x), results(model, x))
    for p in other.parameters():
        p.detach().zero_()
    assert not other(x).any() and model(x).any()


class CopiesWhatItHas(Block):
    def __deepcopy__(self, memo):
        other = type(self).__new__(type(self))
        other.__dict__.update({n: copy.deepcopy(v, memo) for n, v in vars(self).items()})
        return other


class WithSharedNorm(Block):
    def __init__(self):
        super().__init__()
        self.inner = Block()
        self.inner.bn = self.bn

    def forward(self, x):
        return self.inner(super().forward(x))


@pytest.mark.parametrize("kind", [CopiesWhatItHas, WithSharedNorm])
def test_copies_of_modules_with_states_of_their_own(kind):
    model, x = pk.convert(kind()), torch.randn(2, 4, 6, 6)
    for copied in (copy.copy, copy.deepcopy, reloaded):
        other = copied(model)
        assert isinstance(other, kind)
        assert_same_bits(results(other, x), results(model, x))
        assert pk.saved_bytes(other, x) == pk.saved_bytes(model, x)
        other.eval()(x)
        assert len(pk.conversion_report(other).fused) == 1
    if kind is WithSharedNorm:
        assert other.bn is other.inner.bn


def test_hooks_of_unpickled_models_keep_their_arguments(monkeypatch):
    """Another process numbers hooks from 0."""
    data = pickle.dumps(pk.convert(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))))
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)
    model, calls = pickle.loads(data), []
    for m in model.modules():
        for _ in range(5):
            m.register_forward_pre_hook(lambda m, a: calls.append(m))
            m.register_forward_hook(lambda m, a, y: calls.append(m))
    assert type(model(torch.randn(2, 4, 6, 6))) is torch.Tensor
    assert len(calls) == 4 * 2 * 5


# Modules that run plain inside.


@pytest.mark.parametrize("raises", [False, True])
def test_transformers_take_their_fast_path(raises):
    """The fast path computes zeros for padding; also after a hook of the encoder raised."""

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

    model, x = Detector().eval(), torch.randn(2, 4, 6, 6)
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


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "Module.compile"])
def test_compiled_parts_are_compiled_as_in_plain_pytorch(in_place):
    """They may be called in another thread, under two names, and alone."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    class Net(Chain):
        def __init__(self):
            block = Block()
            if in_place:
                block.compile(backend=backend)
            else:
                block = torch.compile(block, backend=backend)
            super().__init__(Block(), block, Block())
            self.again = block

        def forward(self, x):
            h = self[1](self[0](x))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                h = pool.submit(self[1], h).result()
            return self.again(self[2](h))

    x, found = torch.randn(2, 4, 6, 6), []
    for converts in (True, False):
        torch._dynamo.reset()
        graphs.clear()
        torch.manual_seed(0)
        model = Net()
        if converts:
            pk.convert(model)
        tensors = train_step(model, x)
        model.eval()
        found.append(([*tensors, model(x), model.again(x)], len(graphs)))
        if converts:
            assert [s.fused for s in pk.conversion_report(model)] == [True, False, True]
            assert "compiled" in pk.conversion_report(model)[1].reason
            call = pk.revert(model)[1]._compiled_call_impl
            assert (call is None) != in_place and "preact_kernels" not in type(call).__module__
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    assert found[0][1] == found[1][1]


def test_a_compiled_part_may_forbid_new_attributes():
    class Locked(Block):
        def __setattr__(self, name, value):
            assert "is_locked" not in self.__dict__
            super().__setattr__(name, value)

    model, x = Chain(Locked()), torch.randn(2, 4, 6, 6)
    model[0].compile(backend="eager")
    model[0].is_locked = True
    expected = model(x)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(pk.convert(model)(x), expected)
    pk.revert(model)


# Compilers and transforms around the model.


def test_converted_models_compile_into_one_graph():
    torch._dynamo.reset()
    model = Chain(Block(), foreign.FunctionalBlock(4, 4), foreign.DenseLayer(4, 4)).double()
    plain, x = copy.deepcopy(model), torch.randn(2, 4, 6, 6).double()
    compiled = torch.compile(pk.convert(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(train_step(model, x, compiled), train_step(plain, x))


def test_tracers_see_plain_operators():
    model, x = small()
    expected = model.eval()(x)
    pk.convert(model)
    exported = torch.export.export(model, (x,))
    assert not any("preact" in str(node.target) for node in exported.graph.nodes)
    assert "not called" in pk.conversion_report(model)[0].reason  # nothing was recorded
    for call in (exported.module(), torch.fx.symbolic_trace(model), torch.jit.trace(model, x)):
        assert_same_bits({"y": call(x)}, {"y": expected})
    torch.testing.assert_close(torch.vmap(model)(x[None])[0], expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_functional_transforms():
    model, x = Chain(Block(), Block()).double().eval(), torch.randn(2, 4, 6, 6).double()
    converted, found = pk.convert(copy.deepcopy(model)), []
    for m in (converted, model):

        def loss(parameters, image, m=m):
            return torch.func.functional_call(m, parameters, (image[None],)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
        found.append(per_sample(dict(m.named_parameters()), x))
    torch.testing.assert_close(*found)
    assert "not called" in pk.conversion_report(converted)[0].reason  # nothing was recorded


def test_scripts_of_reverted_models_and_as_children():
    block, x = Block().eval(), torch.randn(2, 4, 6, 6)
    model = pk.convert(nn.Sequential(block, torch.jit.script(nn.Dropout(0.5)))).eval()
    assert not model[1].training
    y = model(x)
    assert pk.conversion_report(model).fused
    torch.testing.assert_close(torch.jit.script(pk.revert(model)[0])(x), y)


class Nested(nn.Module):
    """Calls blocks that are converted, too."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


def test_hooks_of_inner_modules_see_plain_tensors():
    model, x = pk.convert(Nested()), torch.randn(2, 4, 6, 6)
    kinds = []
    model.second.register_forward_pre_hook(lambda m, args: kinds.append(type(args[0])))
    model.second.register_forward_hook(lambda m, args, y: kinds.append(type(y)))
    model(x)
    assert kinds == [torch.Tensor, torch.Tensor]


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("register", ["register_backward_hook", "register_full_backward_hook"])
def test_backward_hooks_see_the_gradients_of_their_child(register):
    plain, found = Nested().double(), []
    x = torch.randn(2, 4, 6, 6).double()
    for model in (plain, pk.convert(copy.deepcopy(plain))):
        seen = []
        hook = getattr(model.second[1], register)
        hook(lambda m, dx, dy, seen=seen: seen.extend((*dx, *dy)))
        model(x.clone().requires_grad_()).square().sum().backward()
        found.append(seen)
    torch.testing.assert_close(found[1], found[0])
    assert pk.conversion_report(model)[1].reason.startswith("read by a hook")


@pytest.fixture
def process_group():
    random_model_parts.start_process_group()
    yield
    random_model_parts.end_process_group()


@pytest.mark.parametrize("tracks", [True, False])
def test_synchronised_batch_norms_count_a_batch_once(process_group, tracks):
    """On a CPU, PyTorch has none: the truth is the norm of one process."""
    plain, x = Block(), torch.randn(2, 4, 6, 6).double().requires_grad_()
    plain.bn = nn.BatchNorm2d(4, track_running_stats=tracks)
    model = pk.convert(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).double())
    y = checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(y, plain.double()(x))
    y.sum().backward()
    if tracks:
        assert model.bn.num_batches_tracked == 1


def test_a_synchronised_batch_norm_refuses_empty_batches_in_all_processes(process_group):
    mean, var = torch.zeros(4), torch.ones(4)
    options = {"training": True, "process_group": torch.distributed.group.WORLD}
    with pytest.raises(ValueError, match="empty batches in all"):
        pk.batch_norm_act(torch.randn(0, 4, 6, 6), None, None, mean, var, **options)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))
