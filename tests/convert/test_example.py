"""`convert(model, example_inputs=...)` lets parts that differ from plain PyTorch run plain."""

import copy
import dataclasses
import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from preact_kernels.conversion import execution
from tests.convert.random_model_parts import TensorList, raises_value_error
from tests.convert.trial import ignore, train_step
from tests.oracle import assert_same_bits

pytestmark = pytest.mark.backends("cpu")


class Block(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        h = self.between(self.conv1(F.relu(self.bn1(x))))
        return self.conv2(F.relu(self.bn2(self.drop(h)))) + x

    def between(self, h):
        return h


class AsksForTheType(Block):
    """Checks `type(h) is torch.Tensor`: deferred tensors differ only here."""

    def between(self, h):
        return h * 2 if type(h) is torch.Tensor else h


class Net(nn.Module):
    """A network with a given forward; the default returns logits."""

    def __init__(self, *odd, count=3, function=lambda net, x: net.logits(x)):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        kinds = [AsksForTheType if i in odd else Block for i in range(count)]
        self.stage = nn.Sequential(*(kind() for kind in kinds))
        self.fc = nn.Linear(8, 3)
        self.function = function

    def logits(self, x):
        return self.fc(self.stage(self.stem(x)).mean((2, 3)))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def images():
    return torch.randn(3, 3, 6, 6)


def given_back(model):
    return [s.name for s in pk.conversion_report(model) if "differs from plain" in s.reason]


def test_the_parts_that_differ_run_plain():
    odd = 0, 2
    plain, x = Net(*odd), images()
    model = pk.convert(copy.deepcopy(plain), example_inputs=(x,))
    assert given_back(model) == [f"stage.{i}.bn{j}" for i in odd for j in (1, 2)]
    for found, expected in zip(train_step(model, x), train_step(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert len(pk.conversion_report(model).fused) == 6 - 2 * len(odd)
    for again in (copy.deepcopy(model), pk.convert(copy.deepcopy(model), example_inputs=x)):
        assert given_back(again) == given_back(model)
    assert given_back(pk.convert(model)) == []
    assert given_back(pk.revert(model)) == []


def test_the_model_and_random_states_do_not_change():
    model, x = Net(1), images().requires_grad_()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    with torch.inference_mode():
        pk.convert(model, example_inputs=(x,))
    assert given_back(model) == ["stage.1.bn1", "stage.1.bn2"]
    assert_same_bits(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert x.grad is None and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 2.0), (torch.bfloat16, 1.0), (torch.bfloat16, 2.0)]
)
def test_a_kernel_that_is_wrong_in_one_dtype_is_found(dtype, scale, monkeypatch):
    run = execution.run_unit

    def wrong(x, *rest, **options):
        y = run(x, *rest, **options)
        return y * scale if x.dtype == dtype else y

    monkeypatch.setattr(execution, "run_unit", wrong)
    model = pk.convert(Net(count=2).to(dtype), example_inputs=images().to(dtype))
    assert len(given_back(model)) == (4 if scale != 1.0 else 0)


@dataclasses.dataclass
class Output:
    """An object that `torch.utils._pytree` does not look into."""

    logits: torch.Tensor


FUNCTIONS = {
    "takes keywords": lambda net, x, *, scale: {"y": net.logits(x) * scale},
    "returns objects": lambda net, x: TensorList([{"y": Output(net.logits(x))}]),
    "evaluates only": lambda net, x: raises_value_error(x) if net.training else net.logits(x),
    "trains only": lambda net, x: net.logits(x) if net.training else raises_value_error(x),
    "trains in part": lambda net, x: (
        net.logits(x) if net.training and not net.stage[0].training else raises_value_error(x)
    ),
    "returns complex numbers": lambda net, x: torch.fft.fft2(net.stage(net.stem(x))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_and_results_of_all_kinds_are_compared(name):
    example = {"x": images(), "scale": 2} if name == "takes keywords" else (images(),)
    model = Net(1, count=2, function=FUNCTIONS[name])
    if name == "trains in part":
        model.stage[0].eval()
    pk.convert(model, example_inputs=example)
    assert given_back(model) == ["stage.1.bn1", "stage.1.bn2"]


def test_a_batch_that_a_checkpoint_counts_once_is_no_difference():
    def checkpoints(net, x):
        h = net.stem(x)
        for block in net.stage:
            h = checkpoint(block, h, use_reentrant=False)
        return net.fc(h.mean((2, 3)))

    model = pk.convert(Net(function=checkpoints), example_inputs=(images(),))
    model(images())
    assert len(pk.conversion_report(model).fused) == 6


def test_a_model_without_float64_is_judged_in_its_own_dtype():
    for odd in ((), range(3)):
        model = Net(*odd, function=lambda net, x: net.logits(x.float()))
        pk.convert(model, example_inputs=(images(),))
        assert bool(given_back(model)) is bool(odd)


def test_a_model_that_does_not_repeat_itself_stays_plain():
    counts = itertools.count()
    model = Net(function=lambda net, x: net.logits(x) * next(counts))
    pk.convert(model, example_inputs=(images(),))
    assert {s.reason for s in pk.conversion_report(model)} == {
        "plain PyTorch does not repeat its results on the example"
    }


def test_a_closure_over_the_model_is_refused_and_changes_nothing():
    model = Net()
    model.call = lambda x: model.stage(x)
    model.forward = lambda x: model.fc(model.call(model.stem(x)).mean((2, 3)))
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    pk.convert(model, example_inputs=(images(),))
    assert_same_bits(model.state_dict(), before)
    assert (model.fc.weight.grad == 1).all() and model.fc.bias.grad is None
    assert {"refer to the model itself" in s.reason for s in pk.conversion_report(model)} == {True}


class CannotBeCopied(Net):
    def __deepcopy__(self, memo):
        raise RuntimeError("one of a kind")


def raises(net, x):
    raise RuntimeError("no way")


@pytest.mark.parametrize(
    ("model", "example", "error", "message"),
    [
        (Net(function=raises), (images(),), ValueError, "got RuntimeError in training: no way"),
        (Net(function=ignore), (images(),), ValueError, "returns tensors, got no tensor"),
        (CannotBeCopied(), (images(),), ValueError, "one that can be copied.*one of a kind"),
        (Net(), (images(), 1), ValueError, "got TypeError in training"),
        (Net(), 3, TypeError, "example_inputs: expected a tensor, a tuple or a dictionary"),
    ],
)
def test_examples_that_cannot_be_judged_are_refused(model, example, error, message):
    pk.convert(model, memory="rebuild")
    hooks = [dict(m._forward_hooks) for m in model.modules()]
    with pytest.raises(error, match=message):
        pk.convert(model, example_inputs=example)
    assert [dict(m._forward_hooks) for m in model.modules()] == hooks
