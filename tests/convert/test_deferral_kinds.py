"""Ordinary habits of forwards give what they give in plain PyTorch, and run fused."""

import copy
import itertools
import random
import types
from collections import deque
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import preact_kernels as pk

pytestmark = pytest.mark.backends("cpu")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 3  # so that a lost call of it shows


double = Double.apply


class Net(nn.Module):
    """A unit, a residual unit behind it, and what a subclass does with them in `habit`."""

    def __init__(self):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(4, 1, 1))
        self.setup()

    def setup(self):
        pass

    def unit(self, x):
        return self.conv1(self.act(self.bn1(x)))

    def forward(self, x):
        return self.habit(x)


def net(habit, setup=None):
    """A subclass of `Net` with these methods, and its name."""
    members = {"habit": habit} | ({"setup": setup} if setup else {})
    return type(habit.__name__, (Net,), members)


def custom_function(self, x):
    return double(self.unit(x)) + x


def custom_function_of_a_batch_norm(self, x):
    return self.conv1(F.relu(double(self.bn1(x))))


def asks_for_grad_mode(self, x):
    y = self.unit(x)
    return y * 2 if torch.is_grad_enabled() else y


def seeds(self, x):
    y = self.unit(x)
    torch.random.manual_seed(3)
    return F.dropout(y, 0.5, self.training)


def changes_a_buffer(self, x):
    y = self.unit(x)
    self.mean = torch.lerp(self.mean, y.detach().mean((0, 2, 3))[:, None, None], 0.5)
    return y - self.mean


def evaluates_a_batch_norm(self, x):
    y = self.unit(x)
    self.bn2.eval()
    return self.conv2(F.relu(self.bn2(y)))


def sets_an_attribute_of_a_child(self, x):
    h = self.bn1(x)
    self.drop.p = 0.5
    y = self.conv1(self.drop(self.act(h)))
    self.drop.p = 0.0
    self.act.seen = h
    return y


def freezes_a_weight(self, x):
    y = self.unit(x)
    self.conv1.weight.requires_grad = False
    return y.sum() + self.conv1(x)


def replaces_data(self, x):
    y = self.unit(x)
    self.conv1.weight.data = self.conv1.weight.data * 2
    return y + self.unit(x)


def changes_a_weight_in_place(self, x):
    with torch.no_grad():
        y = self.unit(x)
        self.conv1.weight.mul_(2)
        self.bn1.bias.data.add_(1)
    return y + self.unit(x)


def draws_numbers(self, x):
    y = self.unit(x)
    return y * self.random.random() * next(self.cycle)


def with_generators(self):
    self.random, self.cycle = random.Random(5), itertools.cycle([1.0, 2.0])


def appends(self, x):
    y = self.unit(x)
    self.seen.append(y.shape)
    self.log.values.append(float(y.detach().sum()))
    return y + len(self.seen)


def with_containers(self):
    self.seen, self.log = deque(), types.SimpleNamespace(values=[])


class Collects(nn.Module):
    def forward(self, x, found):
        found.append(x)


class Two(nn.Module):
    def forward(self, x):
        return x, x + 1


def calls_children_without_results(self, x):
    y, found = self.unit(x), []
    assert self.collects(y, found) is None
    a, b = self.two(found[0])
    return a * b


def with_collecting_children(self):
    self.collects, self.two = Collects(), Two()


def asks_for_the_dtype(self, x):
    y = self.unit(x)
    if y.dtype in {torch.float64} and str(y.dtype) == "torch.float64" and y.dtype is x.dtype:
        y = y * 2
    return y * {8: 3.0}.get(y.shape[-1], 1.0)


def asks_for_the_grad_fn(self, x):
    y = self.unit(x)
    return y if y.grad_fn is None else y * 2


def asks_for_the_type(self, x):
    y = self.unit(x)
    is_tensor = isinstance(y, torch.Tensor) and torch.is_tensor(y) and type(y).__name__ == "Tensor"
    match y:
        case torch.Tensor():
            is_tensor = is_tensor and issubclass(type(y), torch.Tensor)
        case _:
            is_tensor = False
    return y + x if is_tensor and torch.jit.isinstance(y, torch.Tensor) else y


def reads_options_of_children(self, x):
    h = F.batch_norm(
        x,
        self.bn1.running_mean,
        self.bn1.running_var,
        self.bn1.weight,
        self.bn1.bias,
        self.training,
        eps=self.bn1.eps,
    )
    return F.conv2d(F.dropout(F.relu(h), self.drop.p), self.conv1.weight, padding=1)


def adds_a_number(self, x):
    return self.conv1(F.relu(self.bn1(x))) + x.size(0)


def broadcasts(self, x):
    return self.unit(x) + x.mean((2, 3), keepdim=True)


def returns_a_list_subclass(self, x):
    return Found([self.unit(x), x])


class Found(list):
    pass


def returns_a_dictionary(self, x):
    self.result["y"] = self.unit(x)
    return self.result


def with_result(self):
    self.result = {}


def changes_the_result_in_place(self, x):
    y = self.unit(x)
    y.mul_(2)
    y[:, 0] = 1
    return y + self.conv2(F.relu(self.bn2(y)))


def changes_the_input_of_a_unit(self, x):
    h = x.detach() * 1
    with torch.no_grad():
        y = self.conv2(F.relu(self.bn2(h)))
        h.add_(1)
    return y + h + self.unit(x)


def writes_through_a_view(self, x):
    h = x.detach() * 1
    with torch.no_grad():
        y = self.conv2(F.relu(self.bn2(h)))
        h.flatten(2).mul_(2)
    return y + h + self.unit(x)


def calls_twice(self, x):
    return self.unit(self.unit(x))


def evaluates_after_training(self, x):
    y = self.unit(x)
    self.bn1.training = False
    y = self.unit(y)
    self.bn1.training = self.training
    return y


def reads_running_statistics(self, x):
    before = self.bn1.running_mean.clone()
    y = self.unit(x)
    return y + (self.bn1.running_mean - before).sum()


def checkpoints(self, x):
    return checkpoint(self.unit, x, use_reentrant=False) + x


def checkpoints_reentrantly(self, x):
    return checkpoint(self.unit, self.unit(x), use_reentrant=True) + x


def updates_behind_a_checkpoint(self, x):
    y = checkpoint(self.bn2, x, use_reentrant=True)
    y = self.unit(y)
    self.bn1.training = False
    y = self.unit(y)
    self.bn1.training = self.training
    return y


def takes_gradients(self, x):
    with torch.enable_grad():
        h = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.unit(h).sum(), h)
    return self.unit(x) + gradient


def has_tensor_hooks(self, x):
    y = self.unit(x)
    if y.requires_grad:
        y.register_hook(lambda dy: dy * 2)
    return self.conv2(F.relu(self.bn2(y))) + y


def runs_without_grad(self, x):
    with torch.no_grad():
        y = self.unit(x)
    return self.conv2(F.relu(self.bn2(y))) + y


def casts(self, x):
    y = self.unit(x)
    with torch.autocast("cpu", torch.bfloat16):
        z = self.conv2(F.relu(self.bn2(y)))
    return y + z.to(y.dtype)


def trains_after_evaluation(self, x):
    self.bn1.training = False
    teacher = self.bn1(x)
    self.bn1.training = self.training
    y = self.unit(x).flatten(1)
    return y + teacher.detach().flatten(1)


def changes_a_sum_of_what_it_reads(self, x):
    y = self.bn1(x)
    z = y + x * 2
    F.relu_(y)
    return double(z) + y


def nests_regions(self, x):
    a = self.bn1(x)
    with pk.fuse():
        b = self.conv1(F.relu(self.bn1(x * 2 + 1)))
    return F.relu(a) + b


def checkpoints_selectively(self, x):
    h = self.unit(x)

    def saves_convolutions(context, op, *args, **kwargs):
        is_saved = "conv" in str(op)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, saves_convolutions)
    call = lambda t: F.relu(self.conv2(t) * 1.5)  # noqa: E731
    return checkpoint(call, h, use_reentrant=False, context_fn=contexts)


def shares_an_addition(self, x):
    return self.unit(x) + self.conv2(F.relu(self.bn2(x)))


def changes_an_argument(self, x):
    size = [2, 2]
    y = F.avg_pool2d(F.relu(self.bn1(x)), size)
    size[0] = 1
    return self.conv2(F.relu(self.bn2(y)))


def catches_an_error(self, x):
    h = F.relu(self.bn1(x))
    try:
        h = F.conv2d(h, self.conv1.weight[:, :2])
    except RuntimeError:
        h = self.conv1(h)
    return h


def calls_a_vmap(self, x):
    y = self.unit(x)
    return torch.vmap(lambda t: t * y.mean())(y)


def keeps_a_projection(self, x):
    a = F.relu(self.bn1(x))
    y = self.conv2(F.relu(self.bn2(self.conv1(a))))
    y += a
    return y * a


HABITS = [
    net(custom_function),
    net(custom_function_of_a_batch_norm),
    net(asks_for_grad_mode),
    net(seeds),
    net(changes_a_buffer),
    net(evaluates_a_batch_norm),
    net(sets_an_attribute_of_a_child),
    net(freezes_a_weight),
    net(replaces_data),
    net(changes_a_weight_in_place),
    net(draws_numbers, with_generators),
    net(appends, with_containers),
    net(calls_children_without_results, with_collecting_children),
    net(asks_for_the_dtype),
    net(asks_for_the_grad_fn),
    net(asks_for_the_type),
    net(reads_options_of_children),
    net(adds_a_number),
    net(broadcasts),
    net(returns_a_list_subclass),
    net(returns_a_dictionary, with_result),
    net(changes_the_result_in_place),
    net(changes_the_input_of_a_unit),
    net(writes_through_a_view),
    net(calls_twice),
    net(evaluates_after_training),
    net(reads_running_statistics),
    net(checkpoints),
    net(checkpoints_reentrantly),
    net(updates_behind_a_checkpoint),
    net(takes_gradients),
    net(has_tensor_hooks),
    net(runs_without_grad),
    net(casts),
    net(trains_after_evaluation),
    net(changes_a_sum_of_what_it_reads),
    net(nests_regions),
    net(checkpoints_selectively),
    net(shares_an_addition),
    net(changes_an_argument),
    net(catches_an_error),
    net(calls_a_vmap),
    net(keeps_a_projection),
]

UNFUSED = {
    "changes_a_sum_of_what_it_reads",
    "checkpoints",
    "custom_function_of_a_batch_norm",
    "nests_regions",
    "sets_an_attribute_of_a_child",
    "trains_after_evaluation",
}


def observed(model, x):
    """What two training steps, an evaluation step and their gradients leave."""
    found = {}
    for step, training in enumerate((True, True, False)):
        model.train(training)
        torch.manual_seed(step)
        leaf = x.detach().clone().requires_grad_()
        outputs = model(leaf)
        outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        for i, y in enumerate(outputs):
            assert type(y) is torch.Tensor
            found[f"{step} y{i}"] = y.detach().clone()
            found[f"{step} strides{i}"] = torch.tensor(y.stride())
            found[f"{step} is_x{i}"] = torch.tensor(y is leaf)
        loss = sum(
            (y * y).sum() for y in (outputs if isinstance(outputs, list | tuple) else [outputs])
        )
        model.zero_grad()
        try:
            loss.backward()
        except RuntimeError as error:
            found[f"{step} {str(error)[:40]}"] = torch.ones(())
        found[f"{step} dx"] = leaf.grad
        found |= {f"{step} d{n}": p.grad for n, p in model.named_parameters()}
        found |= {f"{step} {n}": b.clone() for n, b in model.named_buffers()}
        found[f"{step} random"] = torch.rand(1)
    return found


def assert_behaves_alike(converted, plain, x):
    found, expected = observed(converted, x), observed(plain, x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", HABITS, ids=lambda k: k.__name__)
def test_habits_of_forwards(kind, memory_format):
    plain = kind().double().to(memory_format=memory_format)
    x = torch.randn(2, 4, 8, 8).double().contiguous(memory_format=memory_format)
    converted = pk.convert(copy.deepcopy(plain), memory="rebuild")
    assert_behaves_alike(converted, plain, x)
    if kind.__name__ not in UNFUSED:
        assert pk.conversion_report(converted).fused
