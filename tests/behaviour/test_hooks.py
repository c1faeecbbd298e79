"""What users do to the children goes on working: hooks, pruning, parametrisations."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import preact_kernels as pk
from tests.cases import random_stage, randomised
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
        ("register_forward_hook", "0", "store"),
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


@pytest.mark.parametrize("child", ["0.bn1", "1.shortcut", "2", "3.conv3"])
def test_a_hook_may_change_the_result_of_a_child(child, backend):
    stage = random_stage()
    stage.get_submodule(child).register_forward_hook(lambda module, args, y: y * 2)
    check(stage, plain_copy(stage), {"x": images()})


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


def test_hooks_on_parameters_and_inputs_fire(backend):
    stage, seen = random_stage(), []
    stage[2].conv2.weight.register_hook(lambda grad: seen.append(grad.shape))
    stage[2].conv3.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    x = images().requires_grad_()
    x.register_hook(lambda grad: seen.append(grad.shape))
    stage(x).sum().backward()
    assert len(seen) == 3
    assert set(seen) == {stage[2].conv2.weight.shape, stage[2].conv3.weight.shape, x.shape}


class DoubledConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class DoubledNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


CHANGES = {
    "pruned_conv_of_a_unit": lambda m: prune.l1_unstructured(m.conv, "weight", 0.5),
    "pruned_batch_norm_of_a_unit": lambda m: prune.random_unstructured(m.bn, "weight", 0.3),
    "weight_norm_of_a_unit": lambda m: parametrizations.weight_norm(m.conv),
    "pruned_channels": lambda m: prune.ln_structured(m[2].conv1, "weight", 0.5, n=2, dim=0),
    "subclass_of_conv": lambda m: setattr(m[2].conv1, "__class__", DoubledConv),
    "subclass_of_batch_norm": lambda m: setattr(m[2].bn1, "__class__", DoubledNorm),
}


@pytest.mark.parametrize("change", CHANGES)
def test_pruned_parametrised_and_subclassed_children_are_called(change, backend):
    is_unit = change.endswith("unit")
    module = randomised(pk.BNReLUConv2d(10, 16, 3, padding=1)) if is_unit else random_stage()
    with torch.no_grad():  # or pruned modules cannot be copied
        CHANGES[change](module)
    check(module, plain_copy(module), {"x": images()})


def test_pruning_made_permanent_is_fused_again_and_keeps_its_zeros(backend):
    stage = random_stage()
    prune.l1_unstructured(stage[2].conv2, "weight", 0.5)
    assert not stage[2].is_fusable()
    prune.remove(stage[2].conv2, "weight")
    assert stage[2].is_fusable()
    assert (stage[2].conv2.weight == 0).float().mean() == 0.5
    check(stage, plain_copy(stage), {"x": images()})


def circular(conv, x, weight, bias):
    """`_conv_forward` of a convolution with another padding."""
    x = F.pad(x, [p for p in reversed(conv.padding) for _ in range(2)], "circular")
    return F.conv2d(x, weight, bias, conv.stride, 0, conv.dilation, conv.groups)


def twice(module, x, *rest):
    return type(module).forward(module, x, *rest) * 2


def call_twice(module, *arguments):
    return type(module)._call_impl(module, *arguments) * 2


@pytest.mark.parametrize(
    ("child", "name", "function"),
    [
        ("0.conv2", "_conv_forward", circular),
        ("2.bn2", "forward", twice),
        ("1.shortcut", "forward", twice),
        ("2.conv1", "_call_impl", call_twice),
        ("2", "forward", twice),
    ],
)
def test_attributes_that_replace_methods_are_called(child, name, function, backend):
    stage = random_stage()
    module = stage.get_submodule(child)
    setattr(module, name, types.MethodType(function, module))
    check(stage, plain_copy(stage), {"x": images()})


def checks_sizes(bn, x):
    raise ValueError("checked by an attribute")


def test_an_attribute_that_replaces_the_size_check_of_a_batch_norm_is_called():
    for module in (pk.BNReLU2d(10), pk.BNReLUConv2d(10, 6, 1), random_stage()):
        bn = next(m for m in module.modules() if isinstance(m, nn.BatchNorm2d))
        bn._check_input_dim = types.MethodType(checks_sizes, bn)
        with pytest.raises(ValueError, match="checked by an attribute"):
            module(images())


class Doubled(pk.PreActBasicBlock):
    """A block whose forward does more than that of its class."""

    def forward(self, x):
        return super().forward(x) * 2


class Called(pk.PreActBasicBlock):
    """A block whose call does more than its forward."""

    def __call__(self, x):
        return super().__call__(x) * 2


class InTurn(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("kind", [Doubled, Called])
def test_blocks_of_other_classes_are_called(kind):
    stage = pk.PreActStage([kind(10, 10), pk.PreActBasicBlock(10, 10)])
    check(stage, InTurn(*plain_copy(stage)), {"x": images()})
