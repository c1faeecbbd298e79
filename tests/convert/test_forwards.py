"""Forwards equal plain PyTorch; the report says what ran fused, or why not."""

import itertools
import random
import re
import types
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
from tests.convert.random_model_parts import SaveAndSquare, triple
from tests.convert.trial import Subject, assert_alike

pytestmark = pytest.mark.backends("cpu")

square = SaveAndSquare.apply


class Net(nn.Module):
    """Two units, called by a forward of the table."""

    def __init__(self, forward):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.0)
        self.function = [forward]
        self.state = types.SimpleNamespace(random=random.Random(5), cycle=itertools.cycle([1, 2.0]))

    def unit(self, x):
        return self.conv1(self.act(self.bn1(x)))

    def second(self, x):
        return self.conv2(F.relu(self.bn2(x)))

    def forward(self, x):
        return self.function[0](self, x)


FORWARDS = []


def runs(bn1="BN-ReLU-Conv", bn2="^; not called"):
    """Adds a forward to the table.

    Args:
        bn1: pattern of the report of `bn1`: what ran fused, and the reason.
        bn2: pattern of the report of `bn2`.
    """
    return lambda forward: FORWARDS.append((forward, {"bn1": bn1, "bn2": bn2})) or forward


# Fused.


@runs("^BN-ReLU-Conv(, 2 in a row)?$", "^BN-ReLU-Conv(, 2 in a row)?$")
def two_units(self, x):
    return self.second(self.unit(x))


def in_the_other_format(x):
    """A copy in channels_last or, of a channels_last image, in NCHW."""
    is_nchw = x.is_contiguous()
    return x.clone(memory_format=torch.channels_last if is_nchw else torch.contiguous_format)


@runs("^BN-ReLU-Conv", "^BN-ReLU-Conv")
def adds_images_of_another_format(self, x):
    other = in_the_other_format(x)
    y, z = other + self.unit(x), self.second(x)
    z += other
    return y, z, self.unit(x) + other


@runs("^BN-ReLU-Conv", "^BN-ReLU-Conv")
def adds_and_concatenates_rows_of_another_format(self, x):
    x = x[:, :, :1].clone()  # strides of axes of size 1 differ too
    other = in_the_other_format(x)
    y = torch.cat([other, self.unit(x)], 1)[:, 2:6] + other
    return other + self.second(y), self.unit(x) + other, other + self.unit(x)


@runs("^BN-ReLU-Conv$", "^BN-ReLU-Conv$")
def concatenates_images_of_two_formats(self, x):
    other = in_the_other_format(x)
    y, z = self.unit(x), self.unit(other)
    pairs = [torch.cat(p, 1) for p in ([y, other], [other, y], [y, z], [y, x])]
    weight = torch.cat([self.conv2.weight] * 2, 1)
    h = F.batch_norm(pairs[0], None, None, training=True)
    return self.second(z), F.conv2d(F.relu(h), weight), *pairs


# A convolution reads the input of a norm.


@runs("^BN-ReLU-Conv, BN-ReLU-Conv and residual add$", "^BN-ReLU-Conv$")
def convolves_a_contiguous_copy_of_a_result(self, x):
    h = self.unit(x)
    y = self.second(h)
    h = h.contiguous()
    return y, self.conv1(h) + self.unit(x)


@runs("^BN-ReLU-Conv and residual add$")
def returns_a_contiguous_copy(self, x):
    h = self.unit(x)
    copy = x.contiguous()
    return h + self.conv2(copy), copy, x


@runs()
def changes_a_result_after_its_copy(self, x):
    h, k = self.unit(x), self.unit(x)
    y, z = self.conv2(h.contiguous()), self.conv2(k.contiguous())
    h.mul_(2)
    k[:, 0] = 0
    return y + h, z + k


@runs("BN-ReLU|read by mul_")
def changes_an_image_after_its_copy(self, x):
    x = x * 1
    self.unit(x)
    y = self.conv2(x.contiguous())
    x.mul_(2)
    return y, x


@runs("^; it is frozen")
def changes_an_image_of_a_frozen_norm(self, x):
    self.bn1.eval().requires_grad_(False)
    x = x.detach().clone()
    y, z = self.unit(x), self.conv2(x.contiguous())

    def clear(_):
        x.data.zero_()

    y, z = y * 1, z * 1
    z.register_hook(clear)
    return y, z


@runs("^BN-ReLU-Conv")
def catches_an_error_of_a_weight(self, x):
    with torch.inference_mode():
        weight = self.conv2.weight * 1
    h = self.unit(x)
    try:
        y = F.conv2d(x, weight, padding=1)
    except RuntimeError:
        y = F.conv2d(x, weight.clone(), padding=1)
    return h + y


@runs("^BN-ReLU-Conv")
def adds_and_concatenates_one_image_of_unusual_strides(self, x):
    x = x[:1]
    odd = x[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]
    h = self.unit(x)
    return h + odd, odd + self.unit(x), torch.cat([self.unit(x), odd], 1)


@runs()
def convolves_and_changes_a_contiguous_copy(self, x):
    x = x * 1
    h = self.unit(x)
    copy = x.contiguous()
    y = self.conv2(copy)
    copy.mul_(2)
    copy = x.contiguous()
    z = self.conv2(copy) + h
    copy.mul_(2)
    return y, z, copy, x


@runs()
def convolves_between_two_modes(self, x):
    h = self.bn1(x)
    with torch.no_grad():
        y = self.conv2(x)
    with torch.enable_grad():
        z = self.conv2(x.contiguous())
    return self.conv1(F.relu(h)) + y, z


@runs("^BN-ReLU-Conv$")
def pads_evenly(self, x):
    return self.conv1(F.pad(F.relu(self.bn1(x)), (2, 2, 1, 1)))


@runs("^BN-ReLU; the program holds its activation$", "BN-ReLU-Conv")
def adds_an_activation_in_place(self, x):
    a = F.relu(self.bn1(x))
    y = self.second(self.conv1(a))
    y += a
    return y * a


@runs("run of 2", "run of 2")
def has_blocks_in_a_row(self, x):
    x = self.unit(x) + x
    y = self.second(x) + x
    y.mul_(2)
    return y


@runs("residual block", "residual block")
def taps_a_run_of_blocks(self, x):
    y = self.unit(x) + x
    z = self.second(y) + y
    z.mul_(2)
    return z, y


# Not fused.


@runs(r"^; read by selu \(test_forwards.py:\d+\)$")
def has_another_activation(self, x):
    return self.conv1(F.selu(self.bn1(x)))


@runs(r"^; read by mul \(test_forwards.py:\d+\)$", "BN-ReLU-Conv")
def has_no_activation(self, x):
    return self.second(self.bn1(x) * x)


@runs(
    "^BN-Add; a residual is added$", "^; another operation runs fused with the sum of its result$"
)
def adds_two_norms(self, x):
    return self.bn1(x) + self.bn2(x * 2)


@runs(r"^BN-ReLU; no convolution follows \(avg_pool2d\)$", "BN-ReLU-Conv")
def pools_an_activation(self, x):
    size = [2, 2]
    y = F.avg_pool2d(F.relu(self.bn1(x)), size)
    size[0] = 1
    return self.second(y)


@runs("^BN-ReLU; its activation is read again later$")
def reads_an_activation_again(self, x):
    a = F.relu(self.bn1(x))
    return self.conv1(a) * self.conv2(a)


@runs("^; it runs inside torch.utils.checkpoint")
def checkpoints(self, x):
    return checkpoint(self.unit, x, use_reentrant=False) + x


# Autograd.


@runs("", "BN-ReLU-Conv")
def checkpoints_selectively(self, x):
    h = self.second(x)

    def saves_convolutions(context, op, *args, **kwargs):
        is_saved = "conv" in str(op)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, saves_convolutions)
    call = lambda t: F.relu(self.conv1(t) * 1.5)  # noqa: E731
    return checkpoint(call, h, use_reentrant=False, context_fn=contexts)


class RunsUnit(torch.autograd.Function):
    """A function that calls a norm and what follows it."""

    @staticmethod
    def forward(ctx, x, net):
        return net.unit(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * 5, None


@runs("^; it runs inside .* a custom autograd function", "BN-ReLU-Conv")
def calls_a_unit_in_a_custom_function(self, x):
    return self.second(RunsUnit.apply(x, self))


@runs("", "")
def passes_sums_to_custom_functions(self, x):
    y = self.unit(x)
    y += x
    return square(self.second(x) + x * 2) + square(y)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return dy * b, dy * a


@runs("")
def passes_a_norm_and_its_activation_to_a_custom_function(self, x):
    h = self.bn1(x)
    return Product.apply(h, F.relu(h))


@runs()
def calls_a_vmap(self, x):
    y = self.unit(x)
    return torch.vmap(lambda t: t * y.mean())(y)


@runs()
def reads_a_weight_before_it_is_frozen(self, x):
    y = triple(self.unit(x))
    self.conv1.weight.requires_grad_(False)
    return y


# Writes.


@runs()
def changes_weights_in_place(self, x):
    with torch.no_grad():
        y = self.unit(x)
        self.conv1.weight.mul_(2)
        self.bn1.bias.data.add_(1)
        self.bn1.running_mean.add_(0.5)
    return y + self.unit(x)


@runs("BN-ReLU-Conv", "BN-ReLU-Conv")
def writes_to_what_it_read(self, x):
    h = x.detach() * 1
    with torch.no_grad():
        y = self.second(h)
        torch.ops.aten.add_.Scalar(h, 1)
        z = self.unit(h)
        F.elu(h, 1.0, True)
        z = z + self.second(h)
        h.flatten(2).mul_(2)
    return y + z + h + self.unit(x)


@runs()
def reads_a_view_after_a_change(self, x):
    y = self.unit(x)
    rows = y.flatten(1)
    y.mul_(3)
    return y.sum() + rows


@runs("", "")
def trains_behind_an_evaluation(self, x):
    self.bn1.training = False
    y = self.bn1(x)
    self.bn1.training = self.training
    return self.bn1(x + 3).mean() + self.conv1(F.relu(y))


@runs("", "")
def changes_statistics_that_an_evaluation_reads(self, x):
    self.bn1.training = False
    y = self.bn1(x)
    with torch.no_grad():
        self.bn1.running_mean.add_(1)
    self.bn1.training = self.training
    return self.conv1(F.relu(y))


@runs()
def reads_running_statistics(self, x):
    before = self.bn1.running_mean.clone()
    y = self.unit(x)
    return y + (self.bn1.running_mean - before).sum()


# Python.


@runs("^; its momentum is no plain number$")
def goes_on_without_momentum(self, x):
    bn = self.bn1
    try:
        h = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, True, None)
    except TypeError:
        h = bn(x)
    return self.conv1(F.relu(h))


@runs("^; read by an inner region")
def nests_regions(self, x):
    a = self.bn1(x)
    with pk.fuse():
        b = self.second(x * 2 + 1)
    return F.relu(a) + b


@pytest.mark.parametrize(("forward", "sites"), FORWARDS, ids=lambda v: getattr(v, "__name__", "_"))
def test_forwards_behave_as_in_plain_pytorch(forward, sites):
    for memory_format, memory in (
        (torch.contiguous_format, "rebuild"),
        (torch.channels_last, "checkpoint"),
        (torch.channels_last, "store"),
    ):

        def images(randn, memory_format=memory_format):
            return randn(2, 4, 8, 8).contiguous(memory_format=memory_format).requires_grad_()

        def before(net, memory_format=memory_format):
            net.to(memory_format=memory_format)

        subject = Subject(partial(Net, forward), before, make_input=images, MEMORY=memory)
        trial = assert_alike(subject, (memory_format, memory))
        for site in (*trial.reports[0], *trial.reports[-1]):
            text = f"{site.into}; {site.reason}" if site.reason else site.into
            assert re.search(sites[site.name], text), (memory_format, memory, site)


@pytest.mark.parametrize(
    "place", ["norm", "relu", "conv", "second norm", "in-place relu", "frozen", "other", "twice"]
)
def test_a_custom_function_in_the_second_call_alone(place):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        is_second, seen = self.calls == 2, []

        def at(name, h):
            if name == place and is_second:
                seen.append(triple(h))
            return h

        a = at("relu", F.relu(at("norm", self.bn1(x))))
        self.conv1.weight.requires_grad_(place != "frozen" or not is_second)
        conv = self.conv2 if place == "other" and is_second else self.conv1
        h = at("second norm", self.bn2(at("conv", conv(a))))
        y = self.conv2(at("in-place relu", h.relu_()))
        return sum(seen, y) + (triple(self.conv2(a)) if place == "twice" else 0)

    assert_alike(Subject(partial(Net, forward)))


def test_a_weight_that_changes_its_place_in_the_autograd_graph():
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            self.weight.mul_(self.bn2.weight[0])
        else:
            self.weight = self.conv1.weight.detach().requires_grad_() + 0
        a = F.relu(self.bn1(x))
        return triple(F.conv2d(a, self.weight))

    assert not assert_alike(Subject(partial(Net, forward))).errors
