"""What users do to the children goes on working: hooks, pruning, parametrisations, checkpoints."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from tests.cases import random_stage, randomised
from tests.oracle import assert_same_bits, check, evaluate, plain_copy

pytestmark = pytest.mark.backends("cpu")  # hooks are found above the backends

CHILDREN = ["0", "0.bn1", "0.conv2", "1.shortcut", "2", "3.bn3", "3.conv3"]


def images():
    return torch.randn(3, 10, 7, 6)


def record(stage, register):
    """Output of one forward and backward, and the shapes that a hook saw."""
    seen = []
    stage = copy.deepcopy(stage)
    handle = register(stage, seen)
    x = torch.ones(3, 10, 7, 6).cumsum(1).cumsum(3).sin().requires_grad_()
    stage(x).square().sum().backward()
    handle.remove()
    return seen


def doubled(module, args, output):
    return output * 2


HOOKS = {
    "forward": lambda name: (
        lambda stage, seen: stage.get_submodule(name).register_forward_hook(
            lambda module, args, output: seen.append((args[0].shape, output.detach().clone()))
        )
    ),
    "forward_pre": lambda name: (
        lambda stage, seen: stage.get_submodule(name).register_forward_pre_hook(
            lambda module, args: seen.append((args[0].shape, args[0].detach().clone()))
        )
    ),
    "full_backward": lambda name: (
        lambda stage, seen: stage.get_submodule(name).register_full_backward_hook(
            lambda module, grad_input, dy: seen.append((dy[0].shape, dy[0].clone()))
        )
    ),
    "full_backward_pre": lambda name: (
        lambda stage, seen: stage.get_submodule(name).register_full_backward_pre_hook(
            lambda module, dy: seen.append((dy[0].shape, dy[0].clone()))
        )
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_sees_what_it_sees_in_the_plain_stage(hook, child, memory):
    stage = random_stage(memory=memory)
    seen = record(stage, hook(child))
    expected = record(plain_copy(stage), hook(child))
    assert len(seen) == len(expected) == 1
    assert seen[0][0] == expected[0][0]
    torch.testing.assert_close(seen[0][1], expected[0][1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("child", CHILDREN)
def test_a_hook_may_change_the_result_of_a_child(child, backend):
    stage = random_stage()
    stage.get_submodule(child).register_forward_hook(doubled)
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
    expected = {stage[2].conv2.weight.shape, stage[2].conv3.weight.shape, x.shape}
    assert set(seen) == expected
    assert len(seen) == 3


CHANGES = {
    "pruned": lambda m: prune.l1_unstructured(m.conv2, "weight", 0.5),
    "pruned_channels": lambda m: prune.ln_structured(m.conv1, "weight", 0.5, n=2, dim=0),
    "pruned_batch_norm": lambda m: prune.random_unstructured(m.bn2, "weight", 0.3),
    "weight_norm": lambda m: parametrizations.weight_norm(m.conv3),
    "orthogonal": lambda m: parametrizations.orthogonal(m.conv1),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_pruned_and_parametrised_children_are_called_in_turn(change, memory, backend):
    stage = random_stage(memory=memory)
    with torch.no_grad():  # or pruned modules cannot be copied
        change(stage[2])
    check(stage, plain_copy(stage), {"x": images()})


def circular(conv, x, weight, bias):
    """`_conv_forward` of a convolution with another padding."""
    x = F.pad(x, [p for p in reversed(conv.padding) for _ in range(2)], "circular")
    return F.conv2d(x, weight, bias, conv.stride, 0, conv.dilation, conv.groups)


def twice(module, x, *rest):
    return type(module).forward(module, x, *rest) * 2


def checks_sizes(bn, x):
    raise ValueError("checked by an attribute")


def counts(module, *arguments):
    module.register_buffer("calls", torch.ones(()))
    return type(module)._call_impl(module, *arguments)


SHADOWS = [
    *((f"{block}.conv2", "_conv_forward", circular) for block in range(4)),
    ("2.bn2", "forward", twice),
    ("2.conv3", "forward", twice),
    ("1.shortcut", "forward", twice),
    ("2", "forward", twice),
    ("2", "units", lambda block: [*type(block).units(block)] * 2),
    ("2.bn1", "_call_impl", counts),
    ("2.conv1", "_call_impl", counts),
    ("2", "_call_impl", counts),
]


@pytest.mark.parametrize(("child", "name", "function"), SHADOWS)
def test_attributes_that_replace_methods_are_called(child, name, function, backend):
    stage = random_stage()
    module = stage.get_submodule(child)
    setattr(module, name, types.MethodType(function, module))
    check(stage, plain_copy(stage), {"x": images()})
    stage(images())
    assert name != "_call_impl" or module.calls == 1


@pytest.mark.parametrize(
    ("child", "name", "function"),
    [("conv", "_conv_forward", circular), ("conv", "forward", twice), ("bn", "forward", twice)],
)
def test_attributes_that_replace_methods_of_a_units_children_are_called(child, name, function):
    unit = pk.BNReLUConv2d(10, 6, 3, padding=1)
    module = unit.get_submodule(child)
    setattr(module, name, types.MethodType(function, module))
    check(unit, plain_copy(unit), {"x": images()})


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


def test_pruning_made_permanent_is_fused_again_and_keeps_its_zeros(backend):
    stage = random_stage()
    prune.l1_unstructured(stage[2].conv2, "weight", 0.5)
    assert not stage[2].is_fusable()
    prune.remove(stage[2].conv2, "weight")
    assert stage[2].is_fusable()
    assert (stage[2].conv2.weight == 0).float().mean() == 0.5
    check(stage, plain_copy(stage), {"x": images()})


def test_a_replaced_parameter_is_read_at_the_next_call(backend):
    module = randomised(pk.BNReLUConv2d(4, 6, 1))
    x = torch.randn(2, 4, 3, 3)
    before = module(x)
    module.conv.weight = nn.Parameter(module.conv.weight.detach() * 2)
    torch.testing.assert_close(module(x), 2 * before)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_torch_checkpoint_updates_running_statistics_once(use_reentrant, memory, backend):
    stage = random_stage(memory=memory)
    inputs = {"x": images()}
    expected = evaluate(stage, inputs)
    results = evaluate(Checkpointed(stage, use_reentrant), inputs)
    assert_same_bits({n.replace("stage.", ""): t for n, t in results.items()}, expected)


class Checkpointed(nn.Module):
    """A module that `torch.utils.checkpoint` runs again in the backward."""

    def __init__(self, stage, use_reentrant):
        super().__init__()
        self.stage, self.use_reentrant = stage, use_reentrant

    def forward(self, x):
        return checkpoint(self.stage, x, use_reentrant=self.use_reentrant)
