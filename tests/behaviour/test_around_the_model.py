"""Checkpoints, replicas, inference mode and meta tensors: as with the plain model."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import preact_kernels as pk
from testbed.published_models import FunctionalBottleneck
from tests.cases import EVERY_MODULE, small_network
from tests.oracle import assert_same_bits, evaluate, plain_copy

pytestmark = pytest.mark.backends("cpu")  # what runs a forward is above the backends


def images(batch=3):
    return torch.randn(batch, 10, 7, 6)


def saves_half_of_all(context, op, *args, **kwargs):
    is_saved = len(str(op)) % 2 == 0 and not op._schema.is_mutable
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE


SELECTIVE = partial(
    checkpoint,
    use_reentrant=False,
    context_fn=partial(create_selective_checkpoint_contexts, saves_half_of_all),
)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (partial(checkpoint, use_reentrant=True), "checkpointed_network"),
        (partial(checkpoint, use_reentrant=False), "rebuilt_network"),
        (SELECTIVE, "bn_relu_conv"),
        (SELECTIVE, "batch_norm_act_conv"),
    ],
    ids=["reentrant", "not_reentrant", "selective", "any_selective"],
)
def test_checkpoints_change_no_bit_and_count_a_batch_once(call, name, backend):
    x, results = images(), []
    for is_checkpointed in (True, False):
        torch.manual_seed(0)
        module, leaf = EVERY_MODULE[name](), x.clone().requires_grad_()
        y = call(module, leaf) if is_checkpointed else module(leaf)
        y.sin().sum().backward()
        gradients = {f"d{n}": p.grad for n, p in module.named_parameters()}
        results.append({"y": y.detach(), "dx": leaf.grad, **gradients, **module.state_dict()})
    assert_same_bits(*results)
    counts = [t for n, t in results[0].items() if n.endswith("num_batches_tracked")]
    assert counts and all(n == 1 for n in counts)


CONVERTED = {
    "converted_block": lambda: pk.convert(FunctionalBottleneck(10, 4)),
    "converted_norm": lambda: pk.convert(nn.Sequential(nn.BatchNorm2d(10), nn.ReLU(), nn.Tanh())),
}


@pytest.mark.parametrize("name", [*EVERY_MODULE, *CONVERTED])
def test_the_graph_holds_tensors_alone(name, backend):
    """Code that draws the graph, as torchviz, reads what each function saved."""
    y = {**EVERY_MODULE, **CONVERTED}[name]()(images().requires_grad_())
    waiting, seen, own = [y.grad_fn], set(), 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        if saved := getattr(node, "saved_tensors", ()):
            own += 1
            assert all(isinstance(t, torch.Tensor) for t in saved), node.name()
    assert own


@pytest.mark.parametrize("name", ["bn_relu_conv", "batch_norm_act_conv", "checkpointed_network"])
def test_a_replica_of_data_parallel_computes_the_same(name, backend):
    module, x = EVERY_MODULE[name](), images()
    replica = replicated(module)
    expected = evaluate(module, {"x": x})["y"]
    y = replica(x)
    assert_same_bits({"y": y}, {"y": expected})
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def replicated(module):
    """A replica as `nn.DataParallel` makes it: parameters are plain tensors."""
    copies = {m: m._replicate_for_data_parallel() for m in module.modules()}
    for m, replica in copies.items():
        replica._modules.update(
            {name: copies[child] for name, child in m._modules.items() if child}
        )
        for name, p in m._parameters.items():
            setattr(replica, name, None if p is None else p.view_as(p))
        for name, buffer in m._buffers.items():
            replica._buffers[name] = None if buffer is None else buffer.clone()
    return copies[module]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_inference_mode_changes_nothing(training, backend):
    module = small_network().train(training)
    other, x = copy.deepcopy(module), images()
    with torch.inference_mode():
        y = module(x)
    expected = other(x).detach()
    assert y.is_inference()
    found = {"y": y.clone(), **dict(module.named_buffers())}
    assert_same_bits(found, {"y": expected, **dict(other.named_buffers())})
    assert_same_bits(evaluate(module, {"x": x}), evaluate(other, {"x": x}))


@pytest.mark.parametrize(
    "name", ["bn_relu_conv", "norm_act", "norm_act_conv", "float32_stream", "checkpointed_network"]
)
def test_meta_tensors_have_the_shapes_and_dtypes_of_the_plain_module(name):
    module, x = EVERY_MODULE[name](), images()
    expected = evaluate(plain_copy(module), {"x": x})
    module.to("meta")
    with torch.autocast("cpu", torch.bfloat16):  # of another device
        y = module(leaf := x.to("meta").requires_grad_())
    y.backward(torch.empty_like(y))
    found = {"y": y, "dx": leaf.grad, **{f"d{n}": p.grad for n, p in module.named_parameters()}}
    for result, t in found.items():
        assert (t.shape, t.dtype) == (expected[result].shape, expected[result].dtype), result
