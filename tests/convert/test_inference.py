"""`fuse_for_inference`: which batch norms fold; results equal plain PyTorch."""

import copy
import functools
import importlib.util
import pickle
import random
import threading

import pytest
import torch
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import preact_kernels as pk
from testbed.published_models import (
    DenseLayer,
    FunctionalBlock,
    timm_model,
    torchvision_models,
)
from tests import oracle
from tests.cases import in_dtype, randomised
from tests.convert import random_model_parts
from tests.convert.models import PostActBlock, report_of
from tests.convert.random_model_parts import Same, triple


class Classifier(nn.Module):
    def __init__(self, channels, *features):
        super().__init__()
        self.features = nn.Sequential(*features)
        self.fc = nn.Linear(channels, 5)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def preact_net():
    blocks = FunctionalBlock(8, 8), FunctionalBlock(8, 12, 2), FunctionalBlock(12, 12)
    return Classifier(12, nn.Conv2d(3, 8, 3, 1, 1), *blocks, nn.BatchNorm2d(12), nn.ReLU())


def postact_net():
    stem = nn.Conv2d(3, 8, 3, padding=1), nn.Identity(), nn.BatchNorm2d(8), nn.Hardswish()
    return Classifier(12, *stem, PostActBlock(8, 12, 2), PostActBlock(12, 12))


def dense_net():
    layers = nn.Conv2d(3, 8, 3, padding=1), DenseLayer(8, 4), DenseLayer(12, 4)
    return Classifier(16, *layers, nn.BatchNorm2d(16), nn.ReLU())


# Constructor, number of batch norms, number of folded batch norms.
MODELS = {
    "preact": (preact_net, 7, 3),
    "postact": (postact_net, 7, 7),
    "dense": (dense_net, 5, 2),
    "own_plain": (lambda: pk.preact_resnet(20, fused=False), 19, 9),
    "own": (lambda: pk.preact_resnet(20), 19, 0),
}


def built(name):
    """Builds a model with random weights and statistics, in evaluation mode."""
    return randomised(MODELS[name][0]()).eval()


def count_norms(model):
    return sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def images(dtype=torch.float32):
    return torch.randn(3, 3, 12, 10).to(dtype)


class Named(nn.Module):
    """Calls a module with its argument named `x`."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def assert_equals_plain(fused, plain, x):
    """Asserts the budget of tests/oracle.py; `plain` runs in evaluation mode."""
    plain = Named(copy.deepcopy(plain).eval())
    inputs = [{"x": x}, {"x": torch.randn_like(x)}]
    problems = [(i, oracle.gradient_like(plain(**i))) for i in inputs]
    frozen = ["x", *(n for n, _ in plain.named_parameters())]
    truth = oracle.evaluate_all(plain, problems, dtype=torch.float64, frozen=frozen)
    errors = oracle.eager_errors(plain, problems, truth, frozen=frozen)
    with torch.no_grad():
        found = torch.stack([fused(i["x"]) for i in inputs])
    assert found.dtype == plain(x).dtype
    oracle.assert_within_budget({"y": found}, {"y": truth["y"]}, errors)


def assert_folds(model, left=0):
    """Asserts that all but `left` batch norms fold and results do not change; returns the copy."""
    fused = pk.fuse_for_inference(randomised(model).eval())
    assert count_norms(fused) == left
    assert_equals_plain(fused, model, images())
    return fused


def assert_stays(model, left=1, *args, **kwargs):
    """Asserts that `left` batch norms stay and the results are the same bits."""
    fused, x = pk.fuse_for_inference(randomised(model).eval()), images()
    assert count_norms(fused) == left
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert torch.equal(fused(x, *args, **kwargs), model(x, *args, **kwargs))


# Whole models.


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_folds_and_equals_the_model_which_does_not_change(name):
    model = built(name).train()
    before = copy.deepcopy(model.state_dict())
    tensors = [*model.parameters(), *model.buffers()]
    fused = pk.fuse_for_inference(model)
    after = [*model.parameters(), *model.buffers()]
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    oracle.assert_same_bits(model.state_dict(), before)
    _, norms, folded = MODELS[name]
    assert (count_norms(model), count_norms(fused)) == (norms, norms - folded)
    assert not any(m.training for m in fused.modules())
    assert not any(p.requires_grad for p in fused.parameters())
    assert_equals_plain(fused, model.eval(), images())
    if name in ("preact", "dense"):
        assert count_norms(fused) == count_norms(fuse(copy.deepcopy(model)))  # torch.fx's fuse


# Number of batch norms that stay, and how many of them run fused.
@pytest.mark.parametrize(
    ("name", "left", "count"), [("preact", 7, 7), ("postact", 2, 2), ("own", 19, 19)]
)
def test_a_converted_model_stays_fused_and_folds_the_rest(name, left, count):
    model = built(name)
    fused = pk.fuse_for_inference(pk.convert(copy.deepcopy(model)))
    assert count_norms(fused) == left
    assert len(report_of(fused, images()).fused) == count
    assert_equals_plain(fused, model, images())


def test_what_was_not_converted_stays_so_and_what_is_left_can_be_converted():
    model = built("preact")
    pk.convert(model.features[1])
    pk.convert(model.features[3])
    fused = pk.fuse_for_inference(model)
    sites = report_of(fused, images()).fused
    assert {s.name.rpartition(".")[0] for s in sites} == {"features.1", "features.3"}
    assert isinstance(fused.features[2].bn2, nn.Identity)
    assert_equals_plain(fused, model, images())
    pk.convert(fused)
    assert len(report_of(fused, images()).fused) == count_norms(fused)
    assert not any(m.training for m in fused.modules())
    assert_equals_plain(fused, model, images())


@pytest.mark.parametrize(("dtype", "is_mixed"), [(torch.bfloat16, False), (torch.float16, True)])
def test_parameters_keep_their_dtype(dtype, is_mixed):
    model = built("postact")
    model = in_dtype(model, dtype) if is_mixed else model.to(dtype)
    model.fc.to(dtype)
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 0
    assert {p.dtype for p in fused.parameters()} == {dtype}
    assert_equals_plain(fused, model, images(dtype))


def test_memory_format_and_autocast():
    model = built("postact").to(memory_format=torch.channels_last)
    fused, x = pk.fuse_for_inference(model), images().to(memory_format=torch.channels_last)
    for t in (fused.features[4].conv2.weight, fused.features(x)):
        assert t.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = fused(x), model(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    truth = copy.deepcopy(model).double()(x.double())
    assert (y - truth).norm() <= 2 * (expected - truth).norm() + 2**-9 * truth.norm()


def test_gradients_of_inputs_are_those_of_the_model():
    model, x = built("preact").double(), images(torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad(pk.fuse_for_inference(model)(x).sum(), x)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(dx, expected)


def test_folds_models_without_data():
    with torch.device("meta"):
        model = postact_net()
    fused = pk.fuse_for_inference(model).state_dict()
    expected = pk.fuse_for_inference(postact_net()).state_dict()
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in expected.items()}
    assert all(t.is_meta for t in fused.values())


COPIES = {
    "itself": lambda m: m,
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
    "converted": lambda m: pk.convert(copy.deepcopy(m)),
    "loaded": lambda m: loaded(m),
}


def loaded(model):
    """Loads the state of `model` into the fused copy of another model."""
    other = pk.fuse_for_inference(built("postact"))
    other.load_state_dict(model.state_dict(), strict=True)
    return other


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_equal_and_stay_in_evaluation_mode(copied):
    model = built("postact")
    fused = copied(pk.fuse_for_inference(model))
    for module in (fused, nn.Sequential(fused), nn.Sequential(nn.Sequential(fused))):
        module.train()
        assert not any(m.training for m in fused.modules())
    assert_equals_plain(fused, model, images())


def test_compiles_exports_and_runs_in_inference_mode():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), pk.PreActBasicBlock(8, 8)
    fused, x = pk.fuse_for_inference(randomised(nn.Sequential(*layers))), images()
    y = fused(x)
    with torch.inference_mode():
        assert torch.equal(fused(x), y)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fused, fullgraph=True, backend="aot_eager")(x), y)
        torch.testing.assert_close(torch.export.export(fused, (x,)).module()(x), y)


def test_takes_scripts_as_children():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), torch.jit.script(nn.Linear(10, 4))).eval()
    torch.testing.assert_close(pk.fuse_for_inference(model)(x := images()), model(x))


def test_refuses_what_is_no_module():
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got function"):
        pk.fuse_for_inference(F.relu)


# Pairs of a convolution and a batch norm, which fold or stay.


class Composed(nn.Module):
    """A convolution and a batch norm; `call` is the forward."""

    def __init__(self, call=lambda m, x: m.bn(m.conv(x)), conv=None, bn=None):
        super().__init__()
        self.conv = conv or nn.Conv2d(3, 8, 3, padding=1)
        self.bn = bn or nn.BatchNorm2d(8)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


is_grad_enabled = torch.is_grad_enabled


def catches_an_error(m, x):
    try:
        is_large = bool(x.sum() > 1e6)
    except Exception:
        is_large = True
    y = m.conv(x)
    return y if is_large else m.bn(y)


FORWARDS = {
    "reads_output_twice": lambda m, x: m.bn(y := m.conv(x)) + y,
    "calls_conv_twice": lambda m, x: m.bn(m.conv(x)) + m.conv(x + 1),
    "calls_norm_twice": lambda m, x: m.bn(m.conv(x)) + m.bn(x.repeat(1, 8, 1, 1)[:, :8]),
    "reads_weight": lambda m, x: m.bn(m.conv(x)) * m.conv.weight.mean(),
    "reads_norm_weight": lambda m, x: m.bn(m.conv(x)) * m.bn.weight.mean(),
    "has_control_flow": lambda m, x: m.bn(m.conv(x)) if x.sum() > 1e6 else m.conv(x),
    "active_dropout": lambda m, x: m.bn(F.dropout(m.conv(x), 1.0)),
    "calls_a_custom_function": lambda m, x: m.bn(Same.apply(m.conv(x))),
    "asks_for_the_grad_mode": lambda m, x: m.bn(m.conv(x)) if is_grad_enabled() else m.conv(x),
    "leaves_the_grad_mode": torch.no_grad()(lambda m, x: m.bn(m.conv(x))),
    "draws_a_number": lambda m, x: m.bn(m.conv(x)) if random.random() < 2 else x,
    "computes_a_constant": lambda m, x: m.bn(m.conv(x)) * torch.ones(()).item(),
    "asks_for_another_type": lambda m, x: m.bn(m.conv(x)) if isinstance(x.shape[0], int) else x,
    "catches_an_error": catches_an_error,
}


def with_hook(module):
    module.register_forward_hook(lambda module, args, y: 2 * y)
    return module


def with_given_weight(conv):
    """Replaces the weight of `conv` by a plain tensor, such as another network may compute."""
    weight = conv.weight.detach()
    del conv.weight
    conv.weight = weight
    return conv


def conv(*behind):
    return nn.Sequential(nn.Conv2d(3, 8, 3), *behind) if behind else nn.Conv2d(3, 8, 3)


CHILDREN = {
    "conv_hook": lambda: {"conv": with_hook(conv())},
    "norm_hook": lambda: {"bn": with_hook(nn.BatchNorm2d(8))},
    "no_statistics": lambda: {"bn": nn.BatchNorm2d(8, track_running_stats=False)},
    "weight_norm": lambda: {"conv": parametrizations.weight_norm(conv())},
    "pruned": lambda: {"conv": prune.l1_unstructured(conv(), "weight", 0.3)},
    "given_weight": lambda: {"conv": with_given_weight(conv())},
    "identity_hook": lambda: {"conv": conv(with_hook(nn.Identity()))},
    "dropout_hook": lambda: {"conv": conv(with_hook(nn.Dropout()))},
}


class SetsAMode(nn.Sequential):
    """A container with a fixed mode of the second module."""

    def __init__(self, *layers, trains):
        super().__init__(*layers)
        self.trains = trains

    def train(self, mode=True):
        super().train(mode)
        self[1].train(self.trains)
        return self


class Parts(nn.Module):
    """Calls the children of a container one by one."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x):
        y = self.pair[0](x)
        return y.abs() + self.pair[1](y)


class OptionalParts(Parts):
    """With `features`, calls only the first child."""

    def forward(self, x, features=False):
        return self.pair[0](x) if features else super().forward(x)


class Steps(nn.Module):
    """Calls a convolution and a batch norm from a list."""

    def __init__(self, registers=True):
        super().__init__()
        self.steps = [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)]
        if registers:
            self.conv, self.bn = self.steps
        self.head = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.head(x)


class Tap(nn.Module):
    """Calls a module that it does not register."""

    def __init__(self, held):
        super().__init__()
        self.held = {"parts": (held,)}
        self.itself = [self]

    def forward(self, x):
        (held,) = self.held["parts"]
        return held[0](x) if isinstance(held, nn.Sequential) else held(x)


class Tapped(nn.Module):
    """A convolution and a batch norm; another module holds `held(body)`."""

    def __init__(self, held):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.tap = Tap(held(self.body))

    def forward(self, x):
        return self.body(x) + self.tap(x)


class Untraceable(nn.Module):
    def __init__(self, *steps):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, x):
        while x.norm() < 100:
            x = x + 1
        for step in self.steps:
            x = step(x)
        return x


class Part(nn.Sequential):
    """A container of another class than `nn.Sequential`."""


def with_shared_conv(container):
    shared = nn.Conv2d(3, 3, 3, padding=1)
    return container(*(Part(shared, nn.BatchNorm2d(3)) for _ in range(2)))


def with_replaced_forward():
    block = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    block.forward = functools.partial(lambda m, x: m[0](x) + m[1](m[0](x)), block)
    return block


# Constructor, and number of batch norms that stay.
STAY = {
    **{name: (functools.partial(Composed, call), 1) for name, call in FORWARDS.items()},
    **{name: (lambda own=own: Composed(**own()), 1) for name, own in CHILDREN.items()},
    "mode": (lambda: SetsAMode(conv(), nn.BatchNorm2d(8), trains=True), 1),
    "parts": (Parts, 1),
    "list": (Steps, 1),
    "unregistered": (lambda: Steps(registers=False), 0),
    "held_conv": (lambda: Tapped(lambda body: body[0]), 1),
    "held_norm": (lambda: Tapped(lambda body: body[1]), 1),
    "held_container": (lambda: Tapped(lambda body: body), 1),
    "held_in_held": (lambda: Tapped(lambda body: Tap(body[0])), 1),
    "held_in_untraceable": (lambda: Untraceable(Tapped(lambda body: body[0])), 1),
    "places": (lambda: with_shared_conv(nn.Sequential), 2),
    "places_in_untraceable": (lambda: with_shared_conv(Untraceable), 2),
    "replaced_forward": (with_replaced_forward, 1),
    "replaced_forward_inside": (lambda: nn.Sequential(with_replaced_forward()), 1),
}


@pytest.mark.parametrize(("model", "left"), STAY.values(), ids=STAY)
def test_stays_where_it_is_no_plain_pair_that_nothing_else_reads(model, left):
    assert_stays(model(), left)


QUESTIONS = {
    **random_model_parts.QUESTIONS,
    "type": lambda t: type(t) is torch.Tensor,
    "types": lambda t: type(t) in {torch.Tensor, nn.Parameter},
    "no_parameter": lambda t: not isinstance(t, nn.Parameter),
    "no_tuple": lambda t: not isinstance(t, (tuple, list)),
    "no_callable": lambda t: not callable(t),
    "text": lambda t: "grad_fn" in repr(t) or "tensor" in str(t),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_questions_about_types_are_answered_or_refused(question):
    """The convolution has a second reader only if the question is answered with yes."""

    def call(m, x):
        y = m.conv(x)
        z = m.bn(y)
        return z + y if question(y) else z

    assert_stays(Composed(call))


class Option(Composed):
    def forward(self, x, is_normalised=True):
        return self.bn(self.conv(x)) if is_normalised else self.conv(x)


class Positional(Option):
    def forward(self, x, *options):
        return super().forward(x, *options)


class Keywords(Option):
    def forward(self, x, **options):
        return super().forward(x, **options)


@pytest.mark.parametrize(
    "kind, args, kwargs",
    [
        (OptionalParts, (), {}),
        (OptionalParts, (True,), {}),
        (Option, (False,), {}),
        (Positional, (False,), {}),
        (Keywords, (), {"is_normalised": False}),
    ],
)
def test_stays_in_forwards_with_optional_arguments(kind, args, kwargs):
    assert_stays(kind(), 1, *args, **kwargs)
    if kind is not OptionalParts:
        assert_folds(nn.Sequential(kind()))  # called in one way


class Stages(nn.Module):
    """Holds its stages in a list, as models of Detectron2 do."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = Part(nn.Conv2d(3, 12, 1)), nn.BatchNorm2d(12)
        self.stage = nn.Sequential(PostActBlock(12, 12))
        self.stages = [self.stem, self.stage]

    def forward(self, x):
        stem, stage = self.stages
        return stage(self.norm(stem(x)))


def with_tied_weights():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    model[2].weight = model[0].weight
    return model


def untraceable():
    inner = Part(nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.5), nn.SyncBatchNorm(3))
    return Untraceable(inner, copy.deepcopy(inner))


def graph_module():
    conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
    return torch.fx.symbolic_trace(nn.Sequential(conv, nn.BatchNorm2d(8)))


def asks_what_is_answered(m, x):
    y = m.bn(m.conv(x))
    return F.relu(y) if isinstance(y, torch.Tensor) else y


def reads_options_of_the_norm(m, x):
    y = m.bn(m.conv(x)).view(x.shape[0], m.bn.num_features, -1)
    return y + m.bn.eps if m.bn.affine and m.bn.track_running_stats else y + m.bn.momentum


FOLDED = {
    "stages": (Stages, 1),  # another reader of the list could call the stem
    "tied": (with_tied_weights, 0),
    "untraceable": (untraceable, 0),
    "in_a_row": (lambda: nn.Sequential(conv(), *(nn.BatchNorm2d(8) for _ in range(3))), 0),
    "graph_module": (graph_module, 0),
    "question": (lambda: Composed(asks_what_is_answered), 0),
    "options_of_the_norm": (lambda: Composed(reads_options_of_the_norm), 0),
}


@pytest.mark.parametrize(("build", "left"), FOLDED.values(), ids=FOLDED)
def test_folds_where_no_other_reader_is_possible(build, left):
    model = build()
    fused = assert_folds(model, left)
    if build is FOLDED["options_of_the_norm"][0]:
        assert_equals_plain(pickle.loads(pickle.dumps(fused)), model, images())


def test_stays_where_folded_weights_leave_their_range():
    for scale, bias, dtype in (
        (1e-6, 0.0, torch.float16),
        (1e6, 0.0, torch.float16),
        (1.0, 1e6, torch.float16),
        (float("nan"), 0.0, torch.float32),
    ):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
        model[0].to(dtype)
        model[1].weight.detach().fill_(scale)
        model[1].bias.detach().fill_(bias)
        assert count_norms(pk.fuse_for_inference(model)) == 1, (scale, bias)


def test_threads_may_fold_at_once_while_others_run():
    """Tracing affects only calls of its own thread."""
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x, errors, found, is_done = images(), [], [], threading.Event()
    call, expected = nn.Module.__call__, other(x)

    def run():
        while not is_done.is_set():
            try:
                with torch.no_grad():
                    y = triple(other(x))
                assert torch.equal(y, expected * 3) and not y.requires_grad
                assert isinstance(y, torch.Tensor) and torch.is_grad_enabled()
            except Exception as error:
                errors.append(error)
                return

    def fold(model):
        found.append(count_norms(pk.fuse_for_inference(model)))

    runner = threading.Thread(target=run)
    runner.start()
    models = [pk.preact_resnet(56, fused=False) for _ in range(3)]
    threads = [threading.Thread(target=fold, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    is_done.set()
    runner.join()
    assert not errors and nn.Module.__call__ is call
    assert found == [28] * 3


def test_converted_models_that_set_their_own_modes_run_fused():
    layers = nn.Identity(), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3)
    model = randomised(SetsAMode(*layers, trains=False)).eval()
    fused = pk.fuse_for_inference(pk.convert(copy.deepcopy(model)))
    assert report_of(fused, images()).fused
    assert_equals_plain(fused, model, images())


def test_stays_behind_a_dropout_in_training_mode():
    layers = nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.BatchNorm2d(8)
    model = randomised(SetsAMode(*layers, trains=True)).eval()
    fused, x = pk.fuse_for_inference(model), images()
    assert count_norms(fused) == 1
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(fused(x), expected)


def test_a_dropout_that_refuses_images_still_does():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout1d(0.0), nn.ReLU(), nn.Conv2d(3, 8, 3))
    for changed in (pk.convert(copy.deepcopy(model)), pk.fuse_for_inference(model)):
        with pytest.raises(RuntimeError, match="dropout1d"):
            changed(images())


# Model libraries, if installed.


def calibrated(model):
    """Sets running statistics from a random batch; returns `model` in evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 64, 64))
    return model.eval()


with_models = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torchvision", "timm"))),
    reason="torchvision or timm is not installed",
)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@with_models
def test_folds_batch_norms_of_timm_unless_they_do_something_between():
    torchvision_models()
    kind = importlib.import_module("timm.layers").BatchNormAct2d
    for drop, is_folded in ((None, True), (nn.Dropout, True), (Doubled, False)):
        model = randomised(nn.Sequential(nn.Conv2d(3, 8, 3), kind(8, drop_layer=drop))).eval()
        fused = pk.fuse_for_inference(model)
        assert (type(fused[1]) is nn.ReLU) is is_folded
        assert_equals_plain(fused, model, images())


def of_torchvision(name):
    return lambda: getattr(torchvision_models(), name)()


@with_models
@pytest.mark.parametrize(
    "build, norms, folded",
    [
        (of_torchvision("mobilenet_v3_small"), 34, 34),
        pytest.param(lambda: timm_model("resnetv2_50"), 49, 32, marks=pytest.mark.slow),
        pytest.param(of_torchvision("resnet18"), 20, 20, marks=pytest.mark.slow),
        (of_torchvision("densenet121"), 121, 59),
        pytest.param(lambda: timm_model("efficientnet_b0"), 49, 49, marks=pytest.mark.slow),
    ],
    ids=["mobilenet_v3_small", "resnetv2_50", "resnet18", "densenet121", "efficientnet_b0"],
)
def test_folds_published_models(build, norms, folded):
    model = calibrated(build())
    fused = pk.fuse_for_inference(model)
    assert (count_norms(model), count_norms(fused)) == (norms, norms - folded)
    assert_equals_plain(fused, model, torch.randn(2, 3, 64, 64))
