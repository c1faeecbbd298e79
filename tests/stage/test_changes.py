"""What a program changes between two calls of a stage is read at the next call.

The changes are made to the middle one of equal blocks: what holds for a block is not assumed of the
next one.
"""

import contextlib
import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import preact_kernels as pk
from preact_kernels.ops import block_arguments, checks
from tests.cases import random_block, unit_by_unit
from tests.oracle import assert_same_bits

pytestmark = pytest.mark.backends("cpu")

CHANNELS = {"units": 12, "run": 64}  # of the stream; the library runs blocks of 64 in one call
MIDDLE = 2


def equal_blocks(kind, seed=0):
    torch.manual_seed(seed)
    channels = CHANNELS[kind]
    blocks = [random_block("bottleneck", channels, channels // 4) for _ in range(5)]
    return pk.PreActStage(blocks)


def images(kind):
    return torch.randn(2, CHANNELS[kind], 5, 4, generator=torch.Generator().manual_seed(1))


def called(call, stage, x):
    """The output, gradients and buffers of a step, or the error that it raises."""
    stage.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    try:
        y = call(x)
    except (TypeError, ValueError, RuntimeError) as error:
        return {f"{type(error).__name__}: {error}": None}
    y.backward(torch.linspace(-1, 1, y.numel()).cos().view(y.shape).to(y.dtype))
    gradients = {f"d{name}": p.grad for name, p in stage.named_parameters()}
    strides = torch.tensor([y.stride(), x.grad.stride()])
    results = {"y": y.detach(), "dx": x.grad, "strides": strides, **gradients}
    return results | {name: t.clone() for name, t in stage.named_buffers()}


def no_key(*arguments):
    raise TypeError


@contextlib.contextmanager
def nothing_remembered():
    """All arguments are checked at each call."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(block_arguments, "_read", no_key)
        monkeypatch.setattr(checks, "described", no_key)
        yield


def one_by_one(stage):
    """Each block as a stage of its own, unit by unit."""

    def call(x):
        for block in nn.Sequential(*stage):
            x = block(x)
        return x

    return lambda x: unit_by_unit(call, x)


def unit_by_unit_of(stage):
    return lambda x: unit_by_unit(stage, x)


def doubled(function):
    return lambda *arguments, **options: function(*arguments, **options) * 2


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def double(module, name="forward"):
    setattr(module, name, doubled(getattr(module, name)))


def double_class(module):
    kind = type(module)
    module.__class__ = type("Doubled", (kind,), {"forward": doubled(kind.forward)})


def other(t):
    """Other values, of the same kind as `t`."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(t.shape, generator=generator).to(t.dtype) + 0.1


def replace(module, name, make=other):
    t = getattr(module, name)
    setattr(module, name, nn.Parameter(make(t)) if isinstance(t, nn.Parameter) else make(t))


def set_data(t, data):
    t.data = data


def shrink_under_offset(t):
    """Makes `t` end behind its storage, which keeps the size that `t` needs without an offset."""
    t.data = torch.ones(len(t) + 1)[1:]
    t.untyped_storage().resize_(t.nbytes)


def share(stage):
    stage[MIDDLE].conv1.weight = stage[MIDDLE + 1].conv1.weight


def without_statistics(bn):
    bn.running_mean = bn.running_var = None


def assign_state(stage):
    state = {
        name: other(t) if t.is_floating_point() else t for name, t in stage.state_dict().items()
    }
    stage.load_state_dict(state, assign=True)


def swapped(stage):
    stage[1], stage[MIDDLE] = stage[MIDDLE], stage[1]


def with_shortcut(block):
    channels = block.bn1.num_features
    block.shortcut = nn.Conv2d(channels, channels, 1, bias=False)
    set_data(block.shortcut.weight, other(block.shortcut.weight) / channels)


def group_norm(channels):
    return nn.GroupNorm(1, channels)


def new_conv(conv):
    found = copy.deepcopy(conv)
    set_data(found.weight, other(conv.weight))
    return found


def half_precision(stage):
    stage.residual_dtype = torch.float32
    for block in stage:
        block.residual_dtype = torch.float32
        for conv in (block.conv1, block.conv2, block.conv3):
            conv.bfloat16()


# A change, given the stage; `b` is the block in the middle.
CHANGES = {
    "weight_replaced": lambda s, b: replace(b.conv2, "weight"),
    "bn_weight_replaced": lambda s, b: replace(b.bn2, "weight"),
    "bn_bias_replaced": lambda s, b: replace(b.bn2, "bias"),
    "weight_in_place": lambda s, b: b.conv2.weight.detach().mul_(2),
    "data_replaced": lambda s, b: set_data(b.conv2.weight, other(b.conv2.weight)),
    "data_of_another_shape": lambda s, b: set_data(b.conv3.weight, torch.ones(64, 8, 1, 1)),
    "data_of_another_dtype": lambda s, b: set_data(b.conv2.weight, b.conv2.weight.double()),
    "bn_data_of_another_dtype": lambda s, b: set_data(b.bn2.weight, b.bn2.weight.double()),
    "bn_bias_of_another_dtype": lambda s, b: set_data(b.bn2.bias, b.bn2.bias.double()),
    "bn_weight_on_another_device": lambda s, b: replace(b.bn2, "weight", lambda t: t.to("meta")),
    "statistics_of_another_dtype": lambda s, b: set_data(
        b.bn2.running_var, b.bn2.running_var.bfloat16()
    ),
    "statistics_that_need_gradients": lambda s, b: (
        b.bn2.eval(),
        b.bn2.running_var.requires_grad_(),
    ),
    "bn_data_of_another_shape": lambda s, b: set_data(b.bn2.weight, torch.ones(2)),
    "bias_data_of_another_shape": lambda s, b: set_data(b.bn2.bias, torch.ones(2)),
    "data_with_gaps": lambda s, b: set_data(b.bn2.weight, other(torch.ones(32))[::2]),
    "channels_last": lambda s, b: b.to(memory_format=torch.channels_last),
    "freed_weight": lambda s, b: b.conv2.weight.untyped_storage().resize_(0),
    "freed_bn_bias": lambda s, b: b.bn2.bias.untyped_storage().resize_(0),
    "freed_running_var": lambda s, b: b.bn2.running_var.untyped_storage().resize_(0),
    "storage_freed_behind_an_offset": lambda s, b: shrink_under_offset(b.bn2.bias),
    "assigned_state": lambda s, b: assign_state(s),
    "moved_to_float64": lambda s, b: s.double(),
    "shared_weight": lambda s, b: share(s),
    "frozen_weight": lambda s, b: b.conv2.requires_grad_(False),
    "frozen_norm": lambda s, b: b.bn2.requires_grad_(False),
    "frozen_block": lambda s, b: b.requires_grad_(False),
    "running_mean_replaced": lambda s, b: (b.bn2.eval(), replace(b.bn2, "running_mean")),
    "statistics_removed": lambda s, b: without_statistics(b.bn2),
    "statistics_removed_in_evaluation": lambda s, b: (s.eval(), without_statistics(b.bn2)),
    "one_statistic_removed": lambda s, b: setattr(b.bn2, "running_var", None),
    "counter_removed": lambda s, b: setattr(b.bn2, "num_batches_tracked", None),
    "counter_replaced": lambda s, b: setattr(b.bn2, "num_batches_tracked", torch.tensor(7)),
    "evaluation": lambda s, b: s.eval(),
    "block_in_evaluation": lambda s, b: b.eval(),
    "norm_in_evaluation": lambda s, b: b.bn2.eval(),
    "untracked": lambda s, b: setattr(b.bn2, "track_running_stats", False),
    "momentum": lambda s, b: setattr(b.bn2, "momentum", 0.5),
    "cumulative_average": lambda s, b: setattr(b.bn2, "momentum", None),
    "momentum_of_another_type": lambda s, b: setattr(b.bn2, "momentum", "0.1"),
    "momentum_nan": lambda s, b: setattr(b.bn2, "momentum", float("nan")),
    "eps": lambda s, b: setattr(b.bn2, "eps", 0.1),
    "eps_zero": lambda s, b: setattr(b.bn2, "eps", 0.0),
    "padding_and_dilation": lambda s, b: (
        setattr(b.conv2, "padding", (2, 2)),
        setattr(b.conv2, "dilation", (2, 2)),
    ),
    "padding_of_another_type": lambda s, b: setattr(b.conv2, "padding", "valid"),
    "padding_mode": lambda s, b: setattr(b.conv2, "padding_mode", "circular"),
    "stride": lambda s, b: setattr(b.conv1, "stride", (2, 2)),
    "groups": lambda s, b: setattr(b.conv2, "groups", 2),
    "groups_of_another_type": lambda s, b: setattr(b.conv2, "groups", 1.0),
    "bias": lambda s, b: setattr(b.conv2, "bias", nn.Parameter(torch.ones(len(b.conv2.weight)))),
    "hook": lambda s, b: b.conv2.register_forward_hook(lambda m, x, y: y * 2),
    "pre_hook": lambda s, b: b.bn2.register_forward_pre_hook(lambda m, x: (x[0] + 1,)),
    "backward_hook": lambda s, b: b.conv2.register_full_backward_hook(
        lambda m, dx, dy: (2 * dx[0],)
    ),
    "backward_pre_hook": lambda s, b: b.bn2.register_full_backward_pre_hook(
        lambda m, dy: (2 * dy[0],)
    ),
    "hook_of_a_block": lambda s, b: b.register_forward_hook(lambda m, x, y: y * 2),
    "forward_of_conv": lambda s, b: double(b.conv2),
    "forward_of_norm": lambda s, b: double(b.bn2),
    "forward_of_block": lambda s, b: double(b),
    "conv_forward": lambda s, b: double(b.conv2, "_conv_forward"),
    "class_of_conv": lambda s, b: double_class(b.conv2),
    "class_of_norm": lambda s, b: double_class(b.bn2),
    "class_of_block": lambda s, b: double_class(b),
    "plain_block": lambda s, b: (setattr(b, "fused", False), double(b, "plain_forward")),
    "units_of_block": lambda s, b: setattr(b, "units", lambda: type(b).units(b)[:1] * 3),
    "conv_replaced": lambda s, b: setattr(b, "conv2", new_conv(b.conv2)),
    "norm_replaced": lambda s, b: setattr(b, "bn2", nn.BatchNorm2d(b.bn2.num_features, 0.1)),
    "norm_of_another_class": lambda s, b: setattr(b, "bn2", group_norm(b.bn2.num_features)),
    "synchronised_norm": lambda s, b: setattr(b, "bn2", nn.SyncBatchNorm(b.bn2.num_features, 0.1)),
    "shortcut_added": lambda s, b: with_shortcut(b),
    "parametrization": lambda s, b: parametrize.register_parametrization(
        b.conv2, "weight", Doubled()
    ),
    "pruning": lambda s, b: prune.l1_unstructured(b.conv2, "weight", 0.5),
    "weight_norm": lambda s, b: parametrizations.weight_norm(b.bn2, dim=None),
    "appended": lambda s, b: s.append(copy.deepcopy(b)),
    "inserted": lambda s, b: s.insert(1, copy.deepcopy(b)),
    "repeated": lambda s, b: s.append(b),
    "deleted": lambda s, b: s.__delitem__(MIDDLE),
    "swapped": lambda s, b: swapped(s),
    "bfloat16_with_a_float32_stream": lambda s, b: half_precision(s),
}


@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_two_calls_is_noticed(change, kind, backend):
    x, used, fresh = images(kind), equal_blocks(kind), equal_blocks(kind)
    before = called(used, used, x)
    for buffer, value in zip(used.buffers(), fresh.buffers(), strict=True):
        buffer.copy_(value)
    for stage in (used, fresh):
        change(stage, stage[MIDDLE])
    found = called(used, used, x)
    call = one_by_one if kind == "units" else unit_by_unit_of
    with nothing_remembered():
        expected = called(call(fresh), fresh, x)
    assert_same_bits(found, expected)
    with pytest.raises(AssertionError):
        assert_same_bits(found, before)


# What surrounds a call, or its input.
CALLS = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), None),
    "autocast_in_float16": (lambda: torch.autocast("cpu", torch.float16), None),
    "no_gradients": (torch.no_grad, None),
    "inference": (torch.inference_mode, None),
    "backend": (lambda: pk.use_backend("reference"), None),
    "more_images": (contextlib.nullcontext, lambda x: torch.cat([x, x + 1])),
    "larger_images": (contextlib.nullcontext, lambda x: torch.cat([x, x + 1], 3)),
    "other_strides": (contextlib.nullcontext, lambda x: x.to(memory_format=torch.channels_last)),
    "float64": (contextlib.nullcontext, lambda x: x.double()),
    "no_images": (contextlib.nullcontext, lambda x: x[:0]),
    "one_value": (contextlib.nullcontext, lambda x: x[:1, :, :1, :1]),
    "global_hook": (lambda: doubling_hook(), None),
}


@contextlib.contextmanager
def doubling_hook():
    def hook(module, args, y):
        return y * 2 if isinstance(module, nn.Conv2d) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def stepped(stage, context, x):
    """The output of a call inside a context, gradients if it has them, and buffers."""
    stage.zero_grad()
    try:
        with context():
            y = stage(x)
    except (TypeError, ValueError) as error:
        return {f"{type(error).__name__}: {error}": None}
    if y.requires_grad:
        y.backward(torch.ones_like(y))
    gradients = {f"d{name}": p.grad for name, p in stage.named_parameters()}
    buffers = {name: t.clone() for name, t in stage.named_buffers()}
    results = {"y": y.detach().clone(), "strides": torch.tensor(y.stride())}
    return {**results, **gradients, **buffers}


@pytest.mark.parametrize(("context", "change"), CALLS.values(), ids=CALLS)
def test_a_call_of_another_kind_is_what_it_is_alone(context, change, backend):
    x, used = images("run"), equal_blocks("run")
    other = x if change is None else change(x)
    before = stepped(used, contextlib.nullcontext, x)
    used.load_state_dict(equal_blocks("run").state_dict())
    found = stepped(used, context, other)
    with nothing_remembered():
        expected = stepped(equal_blocks("run"), context, other)
    assert_same_bits(found, expected)
    with pytest.raises(AssertionError):
        assert_same_bits(found, before)
    used.load_state_dict(equal_blocks("run").state_dict())
    assert_same_bits(stepped(used, contextlib.nullcontext, x), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_used_stage_reads_its_own_parameters(copied, backend):
    x, used = images("run"), equal_blocks("run")
    size = len(pickle.dumps(used))
    used(x)
    assert len(pickle.dumps(used)) == size  # nothing that a call read
    other = copied(used)
    expected = other(x)
    for t in used.parameters():
        t.detach().zero_()
    assert torch.equal(other(x), expected)
    assert not torch.equal(used(x), expected)


def test_calls_in_two_threads_do_not_change_each_other(backend):
    stages = equal_blocks("run").eval(), equal_blocks("units").eval()
    stages[1].add_module("again", stages[1][0])
    inputs = [(images(kind), (images(kind)[:1] + 1)) for kind in CHANNELS][::-1]
    expected = [[stage(x) for x in xs] for stage, xs in zip(stages, inputs, strict=True)]
    wrong = []

    def repeat(place):
        for _ in range(50):
            for stage, xs, ys in zip(stages, inputs, expected, strict=True):
                if not torch.equal(stage(xs[place]), ys[place]):
                    wrong.append(place)

    threads = [threading.Thread(target=repeat, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_stage_may_call_itself(backend):
    x, stage = images("run"), equal_blocks("run").eval()
    expected = stage(x + stage(x + 1).mean())
    inner = []

    def call_again(module, args):
        if not inner:
            inner.append(None)
            inner[0] = stage(x + 1).mean()
            return (args[0] + inner[0],)

    stage[0].register_forward_pre_hook(call_again)
    assert torch.allclose(stage(x), expected)


def test_fused_is_read_at_each_call(backend, monkeypatch):
    x, stage = images("run"), equal_blocks("run")
    stage(x)
    plain, function = [], pk.PreActBottleneck.plain_forward
    monkeypatch.setattr(
        pk.PreActBottleneck, "plain_forward", lambda b, x: plain.append(b) or function(b, x)
    )
    stage[MIDDLE].fused = False
    stage(x)
    assert plain == [stage[MIDDLE]]


def test_a_memory_mode_is_read_at_each_call(backend):
    x, stage = images("run").to(memory_format=torch.channels_last), equal_blocks("run")
    saved = []
    for memory in ("store", "rebuild", "checkpoint"):
        stage.memory = memory
        y = stage(x)
        saved.append(sum(t.nbytes for t in y.grad_fn.saved_tensors))
    assert saved[0] > saved[1] > saved[2]
