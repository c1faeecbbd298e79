"""Rebuilt inputs, wide residual streams and recomputed segments: what each mode promises."""

import copy
import itertools
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import preact_kernels as pk
from preact_kernels.kernels import cpu
from preact_kernels.ops import block_runs
from preact_kernels.ops import dispatch as backends
from preact_kernels.ops.memory_mode import MemoryMode
from tests.cases import device_of, in_dtype, random_block, random_stage
from tests.oracle import assert_same_bits, check, evaluate, plain_copy, unit_roundoff

DIRECT_WIDTH = 16  # fills the vectors of every instruction set
MODES = {
    "store": {},
    "rebuild": {"memory": "rebuild"},
    "anchors": {"memory": "rebuild", "anchor_every": 2},
    "checkpoint": {"memory": "checkpoint"},
    "two_segments": {"memory": "checkpoint", "segments": 2},
}
every_mode = pytest.mark.parametrize("options", MODES.values(), ids=MODES)
every_kind = pytest.mark.parametrize("kind", ["basic", "bottleneck"])


def images(dtype=torch.float32, channels=10):
    return torch.randn(3, channels, 7, 6).to(dtype)


def bare_stage(kind="bottleneck", count=4, width=8, **options):
    """Blocks without projections, for 32 channels of bottlenecks and 8 of basic blocks."""
    channels = width * 4 if kind == "bottleneck" else width
    return pk.PreActStage([random_block(kind, channels, width) for _ in range(count)], **options)


@pytest.mark.parametrize(
    ("bare", "every", "dtype", "kept"),
    [
        ("-+++++", None, torch.float32, [0]),
        ("++++++", None, torch.float64, [0]),
        ("++-+++", None, torch.float32, [0, 2]),
        ("++++++", 2, torch.float32, [0, 2, 4]),
        ("++++++", 3, torch.float32, [0, 3]),
        ("++++-+", 3, torch.float32, [0, 1, 4]),
        ("++++++", 1, torch.float32, [0, 1, 2, 3, 4, 5]),
        ("+" * 20, None, torch.bfloat16, [0, 4, 12]),
        ("+" * 20, None, torch.float16, [0, 4, 12]),
        ("+" * 20, 20, torch.bfloat16, [0]),
        ("+", None, torch.float32, [0]),
    ],
)
def test_which_inputs_are_kept(bare, every, dtype, kept):
    for name in ("rebuild", "checkpoint"):
        keeps = MemoryMode(name, None, every).keeps_input([b == "+" for b in bare], dtype)
        assert [i for i, is_kept in enumerate(keeps) if is_kept] == kept


@pytest.mark.parametrize(("count", "starts"), [(1, 1), (2, 1), (9, 2), (18, 3), (111, 7)])
def test_segments_are_near_the_root_of_half_the_blocks(count, starts):
    assert len(MemoryMode("checkpoint").segment_starts(count)) == starts


@pytest.mark.calls(
    "preact_kernels_cpu::preact_stage_forward", "preact_kernels_cpu::preact_stage_backward"
)
@pytest.mark.covering(1)
@pytest.mark.usefixtures("poisoned_memory")
@every_mode
@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_many_bare_blocks_in_native_calls_give_the_bits_of_their_units(options, kind, training):
    stage = bare_stage(kind, 7, DIRECT_WIDTH, **options).train(training)
    inputs = {"x": images(channels=stage[0].bn1.num_features)}
    results = evaluate(stage, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_runs, "run_keys", unit_by_unit)
        assert_same_bits(results, evaluate(stage, inputs))


@pytest.mark.backends(slow=("triton", "cuda"))
@pytest.mark.covering(1)
@every_mode
@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_four_bare_blocks_equal_the_plain_ones(options, kind, training, wide_dtype):
    stage = in_dtype(bare_stage(kind, **options), wide_dtype).train(training)
    problems = [{"x": images(wide_dtype, stage[0].bn1.num_features)} for _ in range(2)]
    check(stage, plain_copy(stage), problems)


def unit_by_unit(kernels, blocks, x):
    """In place of `run_keys`: no blocks run in one call."""
    return [None] * len(blocks.specs)


def record_rebuilt(record, monkeypatch):
    """Calls `record` with each input that a backward rebuilds.

    No blocks run in one call then, which gives the same bits (tests/stage/test_preact_stage.py).
    """
    function = block_runs.rebuilt_input

    def recorded(*arguments):
        x = function(*arguments)
        record(x)
        return x

    monkeypatch.setattr(block_runs, "rebuilt_input", recorded)
    monkeypatch.setattr(block_runs, "run_keys", unit_by_unit)


def rebuilt(stage, x, monkeypatch):
    """The inputs that a backward rebuilds, the last block's first, after one on `x`."""
    found = []
    record_rebuilt(found.append, monkeypatch)
    stage(x).sum().backward()
    return found


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@every_kind
def test_rebuilding_forty_blocks_is_off_by_a_few_roundings(kind, wide_dtype, monkeypatch):
    stage = in_dtype(bare_stage(kind, 40, memory="rebuild"), wide_dtype)
    x = images(wide_dtype, stage[0].bn1.num_features)
    found = rebuilt(stage, x, monkeypatch)
    expected = []
    with torch.no_grad():
        for block in list(stage)[:-1]:
            x = block(x)
            expected.append(x)
    assert len(found) == 39
    for a, b in zip(reversed(found), expected, strict=True):
        assert (a - b).norm() <= 10 * torch.finfo(wide_dtype).eps * b.norm()


@pytest.mark.covering(2)
@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@every_kind
def test_a_rebuilt_input_is_off_by_two_roundings(kind, dtype, monkeypatch):
    """That of the output, and its own: what is subtracted is what was added, to the bit."""
    stage = in_dtype(bare_stage(kind, 2, memory="rebuild"), dtype)
    x = images(dtype, stage[0].bn1.num_features)
    (found,) = rebuilt(stage, x, monkeypatch)
    with torch.no_grad():
        expected = stage[0](x)
        y = stage[1](expected)
    allowed = unit_roundoff(dtype) * (y.double().abs() + found.double().abs())
    assert ((found.double() - expected.double()).abs() <= 1.001 * allowed).all()


@pytest.mark.backends("cpu")
def test_no_more_than_two_rebuilt_inputs_are_held_at_once(backend, monkeypatch):
    alive, most = weakref.WeakSet(), 0

    def record(x):
        nonlocal most
        alive.add(x.untyped_storage())
        most = max(most, len(alive))

    record_rebuilt(record, monkeypatch)
    bare_stage(count=8, memory="rebuild")(images(channels=32)).sum().backward()
    assert most == 2


def peak_bytes(call):
    """The most that `call` holds on the CPU at a time, beside what there was before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held)


@pytest.mark.calls(
    "preact_kernels_cpu::preact_stage_forward", "preact_kernels_cpu::preact_stage_backward"
)
@pytest.mark.skipif(bool(cpu.load_error()), reason="the CPU library was not built")
@pytest.mark.parametrize("memory", ["rebuild", "checkpoint"])
def test_a_native_run_holds_no_more_of_many_blocks_than_of_few(memory):
    x = images(channels=64).repeat(8, 1, 4, 4).contiguous(memory_format=torch.channels_last)
    peaks = []
    for count in (6, 24):
        segments = 1 if memory == "checkpoint" else None
        stage = bare_stage(count=count, width=DIRECT_WIDTH, memory=memory, segments=segments)
        with pk.use_backend("cpu"):
            y = stage(x)
            calls = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cpu.kernels(), "block_run_backward", counted(calls))
                peaks.append(peak_bytes(y.sum().backward))
        assert calls
        peaks[-1] -= sum(p.nbytes for p in stage.parameters())  # their gradients
        if memory == "checkpoint":  # what runs again
            peaks[-1] -= count * x.nbytes // 2
    assert peaks[1] <= peaks[0] + 2 * x.nbytes


def counted(calls):
    function = cpu.kernels().block_run_backward

    def call(*arguments):
        calls.append(len(arguments))
        return function(*arguments)

    return call


@pytest.mark.covering(1)
@pytest.mark.backends("cpu")
@every_mode
@pytest.mark.parametrize("frozen", ["1.conv1", "3.", "0."])
def test_partial_gradients_of_bare_blocks(options, frozen, backend):
    stage = bare_stage(**options)
    names = [n for n, _ in stage.named_parameters() if n.startswith(frozen)]
    problems = [{"x": images(channels=32)} for _ in range(2)]
    check(stage, plain_copy(stage), problems, frozen=["x", *names])


@pytest.mark.backends("cpu")
@every_mode
def test_evaluation_statistics_in_the_middle_of_a_stage(options, backend):
    stage = bare_stage(**options)
    stage[2].eval()
    stage[3].bn3.eval()
    check(stage, plain_copy(stage), [{"x": images(channels=32)} for _ in range(8)])


def short_stage(kind, **options):
    """A projected block and a bare one: half precision magnifies its errors from block to block."""
    width = 8 * (4 if kind == "bottleneck" else 1)
    return pk.PreActStage([random_block(kind, 10, 8), random_block(kind, width, 8)], **options)


@pytest.mark.covering(2)
@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.parametrize("options", [{}, MODES["rebuild"], MODES["checkpoint"]], ids=str)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@every_kind
def test_a_wide_residual_stream_beside_half_precision(options, half, kind, backend):
    stage = in_dtype(short_stage(kind, residual_dtype=torch.float32, **options), half)
    problems = [{"x": images(half)} for _ in range(8)]
    results = check(stage, plain_copy(stage), problems)
    assert results["y"].dtype == torch.float32
    assert results["dx"].dtype == half


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@every_mode
def test_a_wide_residual_stream_beside_batch_norms_in_half_precision(options, backend):
    stage = short_stage("basic", residual_dtype=torch.float32, **options).bfloat16()
    problems = [{"x": images(torch.bfloat16)} for _ in range(8)]
    results = check(stage, plain_copy(stage), problems)
    assert results["y"].dtype == torch.float32
    assert results["0.bn1.running_mean"].dtype == torch.bfloat16


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.parametrize("frozen", ["conv1", "bn", "0."])
def test_partial_gradients_beside_a_wide_residual_stream(frozen, backend):
    stage = in_dtype(short_stage("bottleneck", residual_dtype=torch.float32), torch.bfloat16)
    names = [n for n, _ in stage.named_parameters() if frozen in n]
    problems = [{"x": images(torch.bfloat16)} for _ in range(8)]
    check(stage, plain_copy(stage), problems, frozen=names)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_a_network_with_a_wide_stream_can_be_in_half_precision_throughout(half, training):
    network = pk.preact_resnet(20, residual_dtype=torch.float32).to(half).train(training)
    plain = pk.preact_resnet(20, residual_dtype=torch.float32, fused=False).to(half)
    plain.load_state_dict(network.state_dict())
    plain.train(training)
    x = torch.randn(4, 3, 16, 16).to(half)
    logits = [n(x) for n in (network, plain)]
    assert logits[0].dtype == logits[1].dtype == half
    assert (logits[0] - logits[1]).norm() <= 0.05 * logits[1].norm()
    logits[0].float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())
    assert network.norm.bn.num_batches_tracked == int(training)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("memory", ["store", "rebuild"])
def test_a_wide_residual_stream_under_autocast(memory, backend):
    stage = random_stage(residual_dtype=torch.float32, memory=memory)
    x = images().requires_grad_()
    with torch.autocast(device_of(backend), torch.bfloat16):
        y, expected = stage(x), plain_copy(stage)(x)
    assert y.dtype == expected.dtype == torch.float32
    assert (y - expected).norm() <= 0.02 * expected.norm()
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in stage.parameters())


@pytest.mark.backends("cpu")
def test_a_wide_residual_stream_changes_nothing_beside_wide_weights(wide_dtype):
    stage = in_dtype(random_stage(), wide_dtype)
    wide = pk.PreActStage(list(copy.deepcopy(stage)), residual_dtype=torch.float32)
    inputs = {"x": images(wide_dtype)}
    assert_same_bits(evaluate(wide, inputs), evaluate(stage, inputs))


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_a_hooked_block_keeps_the_wide_stream(backend):
    stage = in_dtype(random_stage(width=8, residual_dtype=torch.float32), torch.bfloat16)
    plain = plain_copy(stage)
    for s in (stage, plain):
        s[1].register_forward_hook(lambda module, args, y: None)
    check(stage, plain, [{"x": images(torch.bfloat16)} for _ in range(8)])


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_a_network_with_a_wide_stream_gives_logits_in_the_dtype_of_its_weights(backend):
    network = pk.preact_resnet(20, residual_dtype=torch.float32)
    plain = pk.preact_resnet(20, residual_dtype=torch.float32, fused=False)
    plain.load_state_dict(network.state_dict())
    x = torch.randn(4, 3, 16, 16).bfloat16()
    logits = []
    for n in (network, plain):
        for module in n.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                module.bfloat16()
        logits.append(n(x))
    assert logits[0].dtype == logits[1].dtype == torch.bfloat16
    assert (logits[0] - logits[1]).norm() <= 0.05 * logits[1].norm()


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("memory", ["rebuild", "checkpoint"])
def test_an_output_changed_in_place_is_an_error_and_not_a_wrong_gradient(memory, backend):
    stage, other = bare_stage(memory=memory), bare_stage(memory=memory)
    other.load_state_dict(stage.state_dict())
    x = images(channels=32).contiguous(memory_format=torch.channels_last)
    y = stage(x)
    y.mul_(2)
    if memory == "checkpoint":
        y.sum().backward()
        (2 * other(x)).sum().backward()
        for p, q in zip(stage.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def keep_nothing(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selective(torch.nn.Module):
    """A module under selective checkpointing."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, keep_nothing)
        return checkpoint(self.stage, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.backends("cpu")
@every_mode
def test_selective_checkpointing_updates_statistics_once(options, backend):
    stage, inputs = random_stage(**options), {"x": images()}
    results = evaluate(Selective(stage), inputs)
    expected = evaluate(stage, inputs)
    assert_same_bits({n.replace("stage.", ""): t for n, t in results.items()}, expected)
    assert results["stage.3.bn1.num_batches_tracked"] == 1


@pytest.mark.backends("cpu")
@every_mode
def test_a_backward_that_fails_midway_can_be_run_again(options, backend, monkeypatch):
    stage, x = bare_stage(**options), images(channels=32).requires_grad_()
    parameters = (x, *stage.parameters())
    y = stage(x)
    expected = torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    buffers = {n: t.clone() for n, t in stage.named_buffers()}
    kernels = backends.select(backend, device_of(backend), torch.float32)
    with monkeypatch.context() as patch:

        def fails(*arguments):
            raise MemoryError

        patch.setattr(kernels, "bn_input_gradient", fails)
        with pytest.raises(MemoryError):
            torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    found = torch.autograd.grad(y.sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_same_bits(dict(stage.named_buffers()), buffers)


def test_a_mode_is_checked_again_when_it_was_set():
    stage = bare_stage(memory="checkpoint", segments=2)
    stage.memory = "store"
    assert stage[1:].segments is None
    stage.memory = "chekpoint"
    with pytest.raises(ValueError, match=r"memory: expected 'store' or .*, got 'chekpoint'"):
        stage(images(channels=32))


@pytest.mark.covering(1)
@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@every_mode
def test_modes_take_part_in_one_network(options, wide_dtype):
    """Stages of different modes behind one another, and a norm that keeps the last output."""
    first = random_stage("basic", memory="rebuild")
    stages = torch.nn.Sequential(first, bare_stage("basic", 3, 6, **options), pk.BNReLU2d(6))
    model = Called(in_dtype(stages, wide_dtype))
    check(model, plain_copy(model), [{"x": images(wide_dtype)} for _ in range(2)])


class Called(torch.nn.Module):
    """A module whose argument is called x."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)
