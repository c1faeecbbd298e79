"""`fuse_for_inference`: what folds, what stays, and that the results are those of plain PyTorch."""

import copy
import functools
import importlib.util
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import preact_kernels as pk
from tests import oracle
from tests.cases import in_dtype, randomised
from tests.convert import random_model_helpers
from tests.convert.foreign_cases import report_of
from tests.convert.published_models import (
    DenseLayer,
    FunctionalBlock,
    timm_model,
    torchvision_models,
)
from tests.convert.test_deferral_kinds import Double


class PostActBlock(nn.Module):
    """A block of ResNet v1."""

    def __init__(self, in_channels, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(channels, affine=False)
        self.downsample = nn.Sequential(
            nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = F.dropout(self.bn2(self.conv2(out)), 0.3, self.training)
        return self.relu(out + self.downsample(x))


class Classifier(nn.Module):
    def __init__(self, features, channels):
        super().__init__()
        self.features = features
        self.fc = nn.Linear(channels, 5)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def preact_net():
    blocks = (
        FunctionalBlock(8, 8),
        FunctionalBlock(8, 12, 2),
        FunctionalBlock(12, 12),
        nn.BatchNorm2d(12),
    )
    return Classifier(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.ReLU()), 12)


def postact_net():
    stem = nn.Conv2d(3, 8, 3, padding=1), nn.Identity(), nn.BatchNorm2d(8), nn.Hardswish()
    return Classifier(nn.Sequential(*stem, PostActBlock(8, 12, 2), PostActBlock(12, 12)), 12)


def dense_net():
    layers = nn.Conv2d(3, 8, 3, padding=1), DenseLayer(8, 4), DenseLayer(12, 4)
    return Classifier(nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU()), 16)


# Built with random weights and statistics: a constructor, batch norms, and those that are folded.
MODELS = {
    "preact": (preact_net, 7, 3),
    "postact": (postact_net, 7, 7),
    "dense": (dense_net, 5, 2),
    "own_plain": (lambda: pk.preact_resnet(20, fused=False), 19, 9),
    "own": (lambda: pk.preact_resnet(20), 19, 0),
}


def built(name):
    return randomised(MODELS[name][0]()).eval()


def count_norms(model):
    return sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def images(dtype=torch.float32):
    return torch.randn(3, 3, 12, 10).to(dtype)


class Named(nn.Module):
    """Any module, called with `x` by name."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def assert_equals_plain(fused, plain, x):
    """`fused` keeps the budget of tests/oracle.py beside `plain` in evaluation mode."""
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


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_model_in_evaluation_mode(name):
    model = built(name)
    _, norms, folded = MODELS[name]
    fused = pk.fuse_for_inference(model)
    assert (count_norms(model), count_norms(fused)) == (norms, norms - folded)
    assert_equals_plain(fused, model, images())


@pytest.mark.parametrize("name", ["preact", "postact", "dense"])
def test_folds_what_torch_fx_folds(name):
    model = built(name)
    left = count_norms(pk.fuse_for_inference(model))
    behind_identity = name == "postact"
    assert left == count_norms(fuse(copy.deepcopy(model))) - behind_identity


@pytest.mark.parametrize("name", MODELS)
def test_the_model_does_not_change(name):
    model = built(name).train()
    before = copy.deepcopy(model.state_dict())
    tensors = [*model.parameters(), *model.buffers()]
    fused = pk.fuse_for_inference(model)
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert all(
        a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True)
    )
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not any(m.training for m in fused.modules())
    assert not any(p.requires_grad for p in fused.parameters())
    with torch.no_grad():
        fused(images())


@pytest.mark.parametrize("name", ["preact", "dense", "own"])
def test_a_converted_model_stays_fused_and_folds_the_rest(name):
    model = built(name)
    converted = pk.convert(copy.deepcopy(model))
    fused = pk.fuse_for_inference(converted)
    reports = [report_of(m, images()) for m in (fused, converted)]
    assert len(reports[0].fused) == len(reports[1].fused) == MODELS[name][1]
    assert_equals_plain(fused, model, images())


def test_a_converted_model_folds_what_no_relu_follows():
    model = built("postact")
    fused = pk.fuse_for_inference(pk.convert(copy.deepcopy(model)))
    assert count_norms(fused) == 2  # bn1 of the two blocks: BN-ReLU-Conv
    assert len(report_of(fused, images()).fused) == 2
    assert_equals_plain(fused, model, images())


def test_what_was_not_converted_stays_so():
    model = built("preact")
    pk.convert(model.features[1])
    pk.convert(model.features[3])
    fused = pk.fuse_for_inference(model)
    sites = report_of(fused, images()).fused
    assert {s.name.rpartition(".")[0] for s in sites} == {"features.1", "features.3"}
    assert isinstance(fused.features[2].bn2, nn.Identity)
    assert_equals_plain(fused, model, images())


@pytest.mark.parametrize("name", ["preact", "dense"])
def test_what_is_left_can_be_converted(name):
    model = built(name)
    fused = pk.convert(pk.fuse_for_inference(model))
    report = report_of(fused, images())
    assert len(report.fused) == len(report) == count_norms(fused)
    assert not any(m.training for m in fused.modules())
    assert_equals_plain(fused, model, images())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_mixed", [False, True])
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
    fused = pk.fuse_for_inference(model)
    weight = fused.features[4].conv2.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    y = fused.features(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_equals_plain(fused, model, x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = fused(x), model(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    truth = copy.deepcopy(model).double()(x.double())
    assert (y - truth).norm() <= 2 * (expected - truth).norm() + 2**-9 * truth.norm()


class Composed(nn.Module):
    """A convolution and a batch norm, and a function of both that calls them."""

    def __init__(self, call, conv=None, bn=None):
        super().__init__()
        self.conv = conv or nn.Conv2d(3, 8, 3, padding=1)
        self.bn = bn or nn.BatchNorm2d(8)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


def in_order(m, x):
    return m.bn(m.conv(x))


def reads_output_twice(m, x):
    y = m.conv(x)
    return m.bn(y) + y


def calls_conv_twice(m, x):
    return m.bn(m.conv(x)) + m.conv(x + 1)


def calls_norm_twice(m, x):
    return m.bn(m.conv(x)) + m.bn(x.repeat(1, 8, 1, 1)[:, :8])


def reads_weight(m, x):
    return m.bn(m.conv(x)) * m.conv.weight.mean()


def reads_norm_weight(m, x):
    return m.bn(m.conv(x)) * m.bn.weight.mean()


def has_control_flow(m, x):
    return m.bn(m.conv(x)) if x.sum() > 1e6 else m.conv(x)


def active_dropout(m, x):
    return m.bn(F.dropout(m.conv(x), 1.0))


@pytest.mark.parametrize(
    "call",
    [
        reads_output_twice,
        calls_conv_twice,
        calls_norm_twice,
        reads_weight,
        reads_norm_weight,
        has_control_flow,
        active_dropout,
    ],
)
def test_stays_where_the_forward_does_more_than_the_chain(call):
    model = randomised(Composed(call)).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 1
    assert torch.equal(fused(x := images()), model(x))


doubles = Double.apply
is_grad_enabled = torch.is_grad_enabled


def calls_a_custom_function(m, x):
    y = m.conv(x)
    doubles(y)
    return m.bn(y)


def asks_for_the_grad_mode(m, x):
    y = m.conv(x)
    return y if is_grad_enabled() else m.bn(y)


def leaves_the_grad_mode(m, x):
    with torch.no_grad():
        return m.bn(m.conv(x))


@pytest.mark.parametrize(
    "call", [calls_a_custom_function, asks_for_the_grad_mode, leaves_the_grad_mode]
)
def test_stays_where_the_forward_calls_what_no_graph_holds(call):
    model = randomised(Composed(call)).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 1
    x = images()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert torch.equal(fused(x), model(x))


QUESTIONS = {
    **random_model_helpers.QUESTIONS,
    "type": lambda t: type(t) is torch.Tensor,
    "types": lambda t: type(t) in {torch.Tensor, nn.Parameter},
    "no_parameter": lambda t: not isinstance(t, nn.Parameter),
    "no_tuple": lambda t: not isinstance(t, (tuple, list)),
    "no_callable": lambda t: not callable(t),
    "text": lambda t: "grad_fn" in repr(t) or "tensor" in str(t),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_questions_about_types_are_answered_or_refused(question):
    """The second reader of the convolution is behind such a question."""

    def call(m, x):
        y = m.conv(x)
        z = m.bn(y)
        return z + y if question(y) else z

    model = randomised(Composed(call)).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 1
    assert torch.equal(fused(x := images()), model(x))


def test_a_question_that_is_answered_stops_no_folding():
    def call(m, x):
        y = m.bn(m.conv(x))
        return F.relu(y) if isinstance(y, torch.Tensor) else y

    model = randomised(Composed(call)).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 0
    assert_equals_plain(fused, model, images())


def test_threads_may_fold_at_once():
    call, models = nn.Module.__call__, [pk.preact_resnet(29, fused=False) for _ in range(4)]
    expected = count_norms(pk.fuse_for_inference(models[0]))
    found = []
    threads = [
        threading.Thread(target=lambda m=m: found.append(pk.fuse_for_inference(m))) for m in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [count_norms(m) for m in found] == [expected] * 4
    assert nn.Module.__call__ is call


def test_other_threads_run_meanwhile():
    """Tracing sees, and changes, calls of its own thread alone."""
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x, errors, is_done = images(), [], threading.Event()
    expected = other(x)

    def run():
        while not is_done.is_set():
            try:
                with torch.no_grad():
                    found = doubles(other(x))
                assert torch.equal(found, expected * 2) and not found.requires_grad
                assert isinstance(found, torch.Tensor) and torch.is_grad_enabled()
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        models = [pk.fuse_for_inference(pk.preact_resnet(110, fused=False)) for _ in range(2)]
    finally:
        is_done.set()
        thread.join()
    assert not errors
    assert [count_norms(m) for m in models] == [count_norms(models[0])] * 2


def reads_options_of_the_norm(m, x):
    y = m.bn(m.conv(x)).view(x.shape[0], m.bn.num_features, -1)
    return y + m.bn.eps if m.bn.affine and m.bn.track_running_stats else y + m.bn.momentum


def test_a_forward_may_read_options_of_a_folded_norm():
    model = randomised(Composed(reads_options_of_the_norm)).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 0
    assert_equals_plain(fused, model, images())
    assert_equals_plain(pickle.loads(pickle.dumps(fused)), model, images())


def with_hook(module):
    module.register_forward_hook(double_output)
    return module


def double_output(module, args, y):
    return 2 * y


class Conv(nn.Conv2d):
    pass


def with_given_weight(conv):
    """`conv` with a weight that is no parameter, as what another network computes."""
    weight = conv.weight.detach()
    del conv.weight
    conv.weight = weight
    return conv


@pytest.mark.parametrize(
    "children",
    [
        lambda: {"conv": with_hook(nn.Conv2d(3, 8, 3))},
        lambda: {"bn": with_hook(nn.BatchNorm2d(8))},
        lambda: {"bn": nn.BatchNorm2d(8, track_running_stats=False)},
        lambda: {"conv": parametrizations.weight_norm(nn.Conv2d(3, 8, 3))},
        lambda: {"conv": prune.l1_unstructured(nn.Conv2d(3, 8, 3), "weight", 0.3)},
        lambda: {"conv": Conv(3, 8, 3)},
        lambda: {"conv": with_given_weight(nn.Conv2d(3, 8, 3))},
        lambda: {"conv": nn.Sequential(nn.Conv2d(3, 8, 3), with_hook(nn.Identity()))},
        lambda: {"conv": nn.Sequential(nn.Conv2d(3, 8, 3), with_hook(nn.Dropout()))},
    ],
    ids=[
        "conv_hook",
        "norm_hook",
        "no_statistics",
        "weight_norm",
        "pruned",
        "subclass",
        "given_weight",
        "identity_hook",
        "dropout_hook",
    ],
)
def test_stays_where_a_module_is_not_plain(children):
    model = randomised(Composed(in_order, **children())).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 1
    assert torch.equal(fused(x := images()), model(x))


def has_option(m, x, is_normalised=True):
    return m.bn(m.conv(x)) if is_normalised else m.conv(x)


class Option(Composed):
    def forward(self, x, is_normalised=True):
        return has_option(self, x, is_normalised)


class Positional(Composed):
    def forward(self, x, *options):
        return has_option(self, x, *options)


class Keywords(Composed):
    def forward(self, x, **options):
        return has_option(self, x, **options)


@pytest.mark.parametrize(
    "kind, args, kwargs",
    [
        (Option, (False,), {}),
        (Positional, (False,), {}),
        (Keywords, (), {"is_normalised": False}),
    ],
)
def test_stays_in_forwards_with_optional_arguments(kind, args, kwargs):
    model = randomised(kind(in_order)).eval()
    fused = pk.fuse_for_inference(model)
    assert torch.equal(fused(x := images(), *args, **kwargs), model(x, *args, **kwargs))
    assert count_norms(pk.fuse_for_inference(nn.Sequential(model))) == 0  # called in one way


def test_stays_where_it_always_takes_the_statistics_of_its_batch():
    class Network(Composed):
        def eval(self):
            self.train(False)
            self.bn.train()
            return self

    model = randomised(Network(in_order)).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 1
    assert torch.equal(fused(x := images()), model(x))


def test_stays_where_a_child_is_called_in_parts():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

        def forward(self, x):
            y = self.pair[0](x)
            return y.abs() + self.pair[1](y)

    model = randomised(Parts()).eval()
    fused = pk.fuse_for_inference(model)
    assert torch.equal(fused(x := images()), model(x))


def test_stays_where_modules_have_several_places():
    conv, bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
    model = randomised(nn.Sequential(conv, bn, nn.ReLU(), conv, nn.BatchNorm2d(3))).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 2
    assert torch.equal(fused(x := images()), model(x))


class Steps(nn.Module):
    """Calls a convolution and a batch norm, which it holds in a list too."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.steps = [self.conv, self.bn]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


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
    """A convolution and a batch norm; another module holds what `held` says of them."""

    def __init__(self, held):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.tap = Tap(held(self.body))

    def forward(self, x):
        return self.body(x) + self.tap(x)


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)]
        self.head = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.head(self.steps[1](self.steps[0](x)))


@pytest.mark.parametrize(
    "model",
    [
        Steps,
        lambda: Tapped(lambda body: body[0]),
        lambda: Tapped(lambda body: body[1]),
        lambda: Tapped(lambda body: body),
        lambda: Tapped(lambda body: Tap(body[0])),
        lambda: Untraceable(Tapped(lambda body: body[0])),
        Unregistered,
    ],
    ids=["list", "conv", "norm", "container", "nested", "untraceable", "unregistered"],
)
def test_stays_where_modules_are_held_in_lists(model):
    model = randomised(model()).eval()
    fused = pk.fuse_for_inference(model)
    assert torch.equal(fused(x := images()), model(x))


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


def test_folds_within_what_a_list_holds():
    model = randomised(Stages()).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 1  # another reader of the list could call the stem
    assert_equals_plain(fused, model, images())


def test_stays_where_folded_weights_leave_their_range():
    for scale in (1e-6, 1e6):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
        model[0].half()
        model[1].weight.detach().fill_(scale)
        assert count_norms(pk.fuse_for_inference(model)) == 1
    model[1].weight.detach().fill_(1.0)
    model[1].bias.detach().fill_(1e6)
    assert count_norms(pk.fuse_for_inference(model)) == 1
    model[1].weight.detach().fill_(float("nan"))
    assert count_norms(pk.fuse_for_inference(model.float())) == 1


def test_tied_weights_are_folded_apart():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    model[2].weight = model[0].weight
    model = randomised(model).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 0
    assert_equals_plain(fused, model, images())


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
    """A container with a class of its own."""


class OptionalTaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x, features=False):
        f = self.body[0](x)
        y = self.body[1](f)
        return f if features else y


def test_stays_where_a_forward_may_read_parts_of_a_container():
    model = randomised(OptionalTaps()).eval()
    fused = pk.fuse_for_inference(model)
    for features in (False, True):
        assert torch.equal(fused(x := images(), features), model(x, features))


@pytest.mark.parametrize("inside", [False, True])
def test_stays_where_a_forward_is_replaced(inside):
    block = randomised(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    block.forward = functools.partial(lambda m, x: m[0](x) + m[1](m[0](x)), block)
    model = nn.Sequential(block).eval() if inside else block.eval()
    assert torch.equal(pk.fuse_for_inference(model)(x := images()), model(x))


def test_takes_scripts_as_children():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), torch.jit.script(nn.Linear(10, 4))).eval()
    torch.testing.assert_close(pk.fuse_for_inference(model)(x := images()), model(x))


def test_folds_inside_what_cannot_be_traced():
    inner = Part(nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.5), nn.SyncBatchNorm(3))
    model = randomised(Untraceable(inner, copy.deepcopy(inner))).eval()
    fused = pk.fuse_for_inference(model)
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in fused.modules())
    assert_equals_plain(fused, model, images())


def test_stays_where_modules_have_several_places_in_what_cannot_be_traced():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    pairs = [nn.Sequential(conv, nn.BatchNorm2d(3)) for _ in range(2)]
    model = randomised(Untraceable(*pairs)).eval()
    fused = pk.fuse_for_inference(model)
    assert torch.equal(fused(x := images()), model(x))


def test_folds_batch_norms_in_a_row():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *(nn.BatchNorm2d(8) for _ in range(3)))
    fused = pk.fuse_for_inference(model := randomised(model).eval())
    assert count_norms(fused) == 0
    assert_equals_plain(fused, model, images())


def test_circular_padding_and_a_graph_module():
    conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
    model = randomised(torch.fx.symbolic_trace(nn.Sequential(conv, nn.BatchNorm2d(8)))).eval()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 0
    assert_equals_plain(fused, model, images())


COPIES = {
    "itself": lambda m: m,
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
    "converted": lambda m: pk.convert(copy.deepcopy(m)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_stays_in_evaluation_mode(copied):
    model = built("postact")
    fused = copied(pk.fuse_for_inference(model))
    for module in (fused, nn.Sequential(fused), nn.Sequential(nn.Sequential(fused))):
        module.train()
        assert not any(m.training for m in fused.modules())
    assert_equals_plain(fused, model, images())


class KeepsNormsInEvaluation(nn.Module):
    """Sets its own mode, as those do that freeze batch norms."""

    def __init__(self):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x):
        return self.conv(F.relu(self.bn(x)))


def test_converted_models_that_set_their_own_modes_run_fused():
    model = randomised(KeepsNormsInEvaluation())
    fused = pk.fuse_for_inference(pk.convert(copy.deepcopy(model)))
    assert report_of(fused, images()).fused
    assert_equals_plain(fused, model, images())


class DropsAlways(nn.Sequential):
    """Monte Carlo dropout."""

    def train(self, mode=True):
        super().train(mode)
        self[1].train()
        return self


def test_stays_behind_a_dropout_in_training_mode():
    model = randomised(DropsAlways(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.BatchNorm2d(8)))
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 1
    x = images()
    torch.manual_seed(1)
    expected = model.eval()(x)
    torch.manual_seed(1)
    torch.testing.assert_close(fused(x), expected)


def test_a_dropout_that_refuses_images_still_does():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout1d(0.0), nn.ReLU(), nn.Conv2d(3, 8, 3))
    for changed in (pk.convert(copy.deepcopy(model)), pk.fuse_for_inference(model)):
        with pytest.raises(RuntimeError, match="dropout1d"):
            changed(images())


@pytest.mark.parametrize("name", ["preact", "own"])
@pytest.mark.parametrize("is_converted", [False, True])
def test_copies_pickles_and_state_dicts(name, is_converted):
    model = built(name)
    model = pk.convert(model) if is_converted else model
    fused, x = pk.fuse_for_inference(model), images()
    y = fused(x)
    assert torch.equal(copy.deepcopy(fused)(x), y)
    loaded = pickle.loads(pickle.dumps(fused))
    assert torch.equal(loaded(x), y)
    assert not any(m.training for m in loaded.modules())
    saved = io.BytesIO()
    torch.save(fused.state_dict(), saved)
    saved.seek(0)
    other = pk.fuse_for_inference(randomised(copy.deepcopy(model)))
    assert not torch.equal(other(x), y)
    other.load_state_dict(torch.load(saved))
    assert torch.equal(other(x), y)


@pytest.mark.parametrize("name", ["preact", "own"])
def test_compiles_exports_and_runs_in_inference_mode(name):
    fused, x = pk.fuse_for_inference(built(name)), images()
    y = fused(x)
    with torch.inference_mode():
        assert torch.equal(fused(x), y)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fused, fullgraph=True, backend="aot_eager")(x), y)
        torch.testing.assert_close(torch.export.export(fused, (x,)).module()(x), y)


def test_gradients_of_inputs_are_those_of_the_model():
    model = built("preact").double()
    x = images(torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad(pk.fuse_for_inference(model)(x).sum(), x)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(dx, expected)


def test_folds_models_without_data():
    with torch.device("meta"):
        model = postact_net()
    fused = pk.fuse_for_inference(model)
    assert count_norms(fused) == 0
    shapes = {n: t.shape for n, t in pk.fuse_for_inference(postact_net()).state_dict().items()}
    assert {n: t.shape for n, t in fused.state_dict().items()} == shapes
    assert all(t.is_meta for t in fused.state_dict().values())


def test_refuses_what_is_no_module():
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got function"):
        pk.fuse_for_inference(F.relu)


# Libraries of models, where installed.


def calibrated(model):
    """`model` with running statistics of a random batch, in evaluation mode."""
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


@with_models
@pytest.mark.parametrize(
    "name, norms, folded",
    [("resnet18", 20, 20), ("densenet121", 121, 59), ("mobilenet_v3_small", 34, 34)],
)
def test_folds_models_of_torchvision(name, norms, folded):
    model = calibrated(getattr(torchvision_models(), name)())
    fused = pk.fuse_for_inference(model)
    assert (count_norms(model), count_norms(fused)) == (norms, norms - folded)
    assert count_norms(fuse(copy.deepcopy(model))) == norms - folded
    assert_equals_plain(fused, model, torch.randn(2, 3, 64, 64))


def norm_act(drop):
    torchvision_models()
    return importlib.import_module("timm.layers").BatchNormAct2d(8, drop_layer=drop)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@with_models
def test_folds_batch_norms_of_timm_unless_they_do_something_between():
    for drop, is_folded in ((None, True), (nn.Dropout, True), (Doubled, False)):
        model = randomised(nn.Sequential(nn.Conv2d(3, 8, 3), norm_act(drop))).eval()
        fused = pk.fuse_for_inference(model)
        assert (type(fused[1]) is nn.ReLU) is is_folded
        assert_equals_plain(fused, model, images())


@with_models
@pytest.mark.parametrize(
    "name, norms, folded", [("resnetv2_50", 49, 32), ("efficientnet_b0", 49, 49)]
)
def test_folds_models_of_timm(name, norms, folded):
    model = calibrated(timm_model(name))
    fused = pk.fuse_for_inference(model)
    assert (count_norms(model), count_norms(fused)) == (norms, norms - folded)
    assert_equals_plain(fused, model, torch.randn(2, 3, 64, 64))
