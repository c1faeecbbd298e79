"""What users do to the children goes on working: hooks, pruning, parametrisations."""

import copy
import functools
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import preact_kernels as pk
from preact_kernels.modules import hooks
from tests.cases import EVERY_MODULE, random_stage, randomised
from tests.oracle import check, plain_copy

pytestmark = pytest.mark.backends("cpu")  # hooks are found above the backends


def images():
    return torch.randn(3, 10, 7, 6)


# By the name of the method that registers a hook: the tensor that the hook is given.
HOOKS = {
    "register_forward_hook": lambda args, output: output,
    "register_forward_pre_hook": lambda args: args[0],
    "register_full_backward_hook": lambda grad_input, dy: dy[0],
    "register_full_backward_pre_hook": lambda dy: dy[0],
}


@pytest.mark.parametrize(
    ("hook", "child", "memory"),
    [
        ("register_forward_hook", "1.shortcut", "rebuild"),
        ("register_forward_pre_hook", "3.bn3", "checkpoint"),
        ("register_full_backward_hook", "2.conv1", "rebuild"),
        ("register_full_backward_pre_hook", "2", "checkpoint"),
    ],
)
def test_a_hook_sees_what_it_sees_in_the_plain_stage(hook, child, memory):
    stage, seen = random_stage(memory=memory), []
    x = images()
    for module in (plain_copy(stage), copy.deepcopy(stage)):
        register = getattr(module.get_submodule(child), hook)
        register(lambda _, *given: seen.append(HOOKS[hook](*given).detach().clone()))
        module(x.clone().requires_grad_()).square().sum().backward()
    expected, found = seen
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_global_hook_sees_every_child():
    stage, seen = random_stage(), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(type(module))
    )
    try:
        stage(images())
    finally:
        handle.remove()
    assert seen.count(nn.BatchNorm2d) == 12
    assert seen.count(nn.Conv2d) == 12 + 2


def twice(function):
    return lambda *arguments: function(*arguments) * 2


def by_hook(module):
    module.register_forward_hook(lambda module, args, y: y * 2)


def by_class(module):
    module.__class__ = type("Doubled", (type(module),), {"forward": twice(type(module).forward)})


def by_attribute(module, name="forward"):
    setattr(module, name, types.MethodType(twice(getattr(type(module), name)), module))


def by_circular_padding(conv):
    def forward(conv, x, weight, bias):
        return F.conv2d(F.pad(x, 4 * conv.padding[:1], "circular"), weight, bias, conv.stride)

    conv._conv_forward = types.MethodType(forward, conv)


def unit():
    return randomised(pk.BNReLUConv2d(10, 16, 3, padding=1))


pruned = partial(prune.l1_unstructured, name="weight", amount=0.5)


@pytest.mark.parametrize(
    ("make", "child", "change"),
    [
        *((random_stage, child, by_hook) for child in ("0.bn1", "1.shortcut", "2")),
        *((random_stage, child, by_class) for child in ("2.bn1", "2.conv1")),
        *((random_stage, child, by_attribute) for child in ("2.bn2", "2")),
        (random_stage, "2.conv1", partial(by_attribute, name="_call_impl")),
        (random_stage, "0.conv2", by_circular_padding),
        *((unit, child, pruned) for child in ("conv", "bn")),
        (unit, "conv", parametrizations.weight_norm),
    ],
)
def test_changed_children_are_called(make, child, change, backend):
    module = make()
    with torch.no_grad():  # or pruned modules cannot be copied
        change(module.get_submodule(child))
    check(module, plain_copy(module), {"x": images()})


# A class of PyTorch, a method that its instances call, and a module with such a child.
METHODS_OF_CLASSES = {
    "forward of a convolution": (nn.Conv2d, "forward", random_stage),
    "convolution": (nn.Conv2d, "_conv_forward", random_stage),
    "forward of a norm": (nn.BatchNorm2d, "forward", random_stage),
    "forward of all batch norms": (nn.modules.batchnorm._BatchNorm, "forward", unit),
    "forward of a group norm": (nn.GroupNorm, "forward", EVERY_MODULE["norm_act_conv"]),
    "forward of an activation": (nn.GELU, "forward", EVERY_MODULE["norm_act"]),
}


@pytest.mark.parametrize(
    ("kind", "method", "make"), METHODS_OF_CLASSES.values(), ids=METHODS_OF_CLASSES
)
def test_methods_that_are_replaced_on_a_class_are_called(kind, method, make, monkeypatch):
    module = make()
    monkeypatch.setattr(kind, method, twice(getattr(kind, method)))
    check(module, plain_copy(module), {"x": images()})


def test_a_method_that_was_replaced_before_the_import_is_not_taken_for_the_original():
    forward = nn.Conv2d.forward
    replaced = functools.wraps(forward)(lambda *arguments: forward(*arguments) * 2)
    assert hooks._original(forward) is forward
    assert hooks._original(replaced) is not replaced


def test_pruning_made_permanent_is_fused_again_and_keeps_its_zeros(backend):
    stage = random_stage()
    prune.l1_unstructured(stage[2].conv2, "weight", 0.5)
    assert stage[2].arguments() is None
    prune.remove(stage[2].conv2, "weight")
    assert stage[2].arguments() is not None
    assert (stage[2].conv2.weight == 0).float().mean() == 0.5


def test_replaced_children_and_parameters_are_read_at_the_next_call(backend):
    stage, x = random_stage(), images()
    results = [stage(x)]
    stage[2].conv2 = copy.deepcopy(stage[3].conv2)
    results.append(stage(x))
    stage[2].conv1.weight = nn.Parameter(stage[3].conv1.weight.detach().clone())
    results.append(stage(x))
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


class InTurn(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("method", ["forward", "__call__"])
def test_blocks_of_other_classes_are_called(method):
    plain = pk.PreActBasicBlock
    doubled = type("Doubled", (plain,), {method: twice(getattr(plain, method))})
    stage = pk.PreActStage([doubled(10, 10), plain(10, 10)])
    check(stage, InTurn(*plain_copy(stage)), {"x": images()})
