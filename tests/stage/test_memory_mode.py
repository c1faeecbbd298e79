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
from preact_kernels.ops import dispatch as backends
from preact_kernels.ops.memory_mode import MemoryMode
from tests.cases import (
    device_of,
    in_dtype,
    random_block,
    random_stage,
    rebuilt,
    record_rebuilt,
    recorded_calls,
    unit_by_unit,
)
from tests.oracle import assert_same_bits, check, evaluate, plain_copy, unit_roundoff

MODES = {
    "store": {},
    "rebuild": {"memory": "rebuild"},
    "anchors": {"memory": "rebuild", "anchor_every": 2},
    "checkpoint": {"memory": "checkpoint"},
    "two_segments": {"memory": "checkpoint", "segments": 2},
}


def modes(*names):
    return pytest.mark.parametrize("options", [MODES[n] for n in names], ids=names)


every_kind = pytest.mark.parametrize("kind", ["basic", "bottleneck"])
on_cpu = pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))


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
        ("++-+++", None, torch.float64, [0, 2]),
        ("++++++", 2, torch.float32, [0, 2, 4]),
        ("++++-+", 3, torch.float32, [0, 1, 4]),
        ("+" * 20, None, torch.bfloat16, [0, 4, 12]),
        ("+" * 20, None, torch.float16, [0, 4, 12]),
        ("+" * 20, 20, torch.bfloat16, [0]),
    ],
)
def test_which_inputs_are_kept(bare, every, dtype, kept):
    for name in ("rebuild", "checkpoint"):
        keeps = MemoryMode(name, None, every).keeps_input([b == "+" for b in bare], dtype)
        assert [i for i, is_kept in enumerate(keeps) if is_kept] == kept


def test_segments_are_near_the_root_of_half_the_blocks():
    counts = [len(MemoryMode("checkpoint").segment_starts(n)) for n in (1, 2, 9, 18, 111)]
    assert counts == [1, 1, 2, 3, 7]
    assert MemoryMode("checkpoint", 5).segment_starts(2) == [0, 1]  # blocks before one with a hook


@on_cpu
@pytest.mark.covering(1)
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
    stage = bare_stage(count=8, memory="rebuild")
    unit_by_unit(lambda: stage(images(channels=32)).sum().backward())
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


@pytest.mark.calls("preact_kernels_cpu::block_run_backward")
@pytest.mark.parametrize("memory", ["rebuild", "checkpoint"])
def test_a_native_run_holds_no_more_of_many_blocks_than_of_few(memory, monkeypatch):
    x = images(channels=64).repeat(8, 1, 4, 4).contiguous(memory_format=torch.channels_last)
    segments = 1 if memory == "checkpoint" else None
    calls = recorded_calls(cpu.kernels(), "block_run_backward", monkeypatch)
    peaks = []
    for count in (6, 24):
        stage = bare_stage(count=count, width=16, memory=memory, segments=segments)
        with pk.use_backend("cpu"):
            y = stage(x)
            peaks.append(peak_bytes(y.sum().backward))
        assert calls
        calls.clear()
        peaks[-1] -= sum(p.nbytes for p in stage.parameters())  # their gradients
        if memory == "checkpoint":  # what runs again
            peaks[-1] -= count * x.nbytes // 2
    assert peaks[1] <= peaks[0] + 2 * x.nbytes


def short_stage(kind, **options):
    """A projected block and a bare one: half precision magnifies its errors from block to block."""
    width = 8 * (4 if kind == "bottleneck" else 1)
    return pk.PreActStage([random_block(kind, 10, 8), random_block(kind, width, 8)], **options)


@on_cpu
@pytest.mark.covering(1)
@modes("store", "rebuild", "checkpoint")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@every_kind
@pytest.mark.parametrize("frozen", ["nothing", "conv1", "bn", "0."])
def test_a_wide_residual_stream_beside_half_precision(options, half, kind, frozen, backend):
    stage = in_dtype(short_stage(kind, residual_dtype=torch.float32, **options), half)
    names = [n for n, _ in stage.named_parameters() if frozen in n]
    # In large images, a ReLU that rounding turns on or off is a small part of each sum. Of four
    # problems a gradient was 2.04 times as far off as eager's by chance.
    problems = [{"x": torch.randn(6, 10, 16, 16).to(half)} for _ in range(8)]
    results = check(stage, plain_copy(stage), problems, frozen=names)
    assert results["y"].dtype == torch.float32
    assert results["dx"].dtype == half


@on_cpu
@pytest.mark.covering(1)
@pytest.mark.parametrize("has_half_norms", [True, False])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_a_network_with_a_wide_stream_gives_logits_in_the_dtype_of_its_weights(
    has_half_norms, half, training, backend
):
    network = pk.preact_resnet(8, residual_dtype=torch.float32).train(training)
    if has_half_norms:
        network.to(half)
    else:
        in_dtype(network, half).fc.to(half)
    x = torch.randn(4, 3, 16, 16).to(half)
    logits = [n(x) for n in (network, plain_copy(network))]
    assert logits[0].dtype == logits[1].dtype == half
    assert (logits[0] - logits[1]).norm() <= 0.05 * logits[1].norm()
    logits[0].float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())
    assert network.norm.bn.num_batches_tracked == int(training)
    assert network.norm.bn.running_mean.dtype == (half if has_half_norms else torch.float32)


@pytest.mark.backends("cpu")
@modes("store", "rebuild")
def test_a_wide_residual_stream_under_autocast(options, backend):
    stage = random_stage(residual_dtype=torch.float32, **options)
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


@on_cpu
def test_a_hooked_block_keeps_the_wide_stream(backend):
    stage = in_dtype(random_stage(width=8, residual_dtype=torch.float32), torch.bfloat16)
    plain = plain_copy(stage)
    for s in (stage, plain):
        s[1].register_forward_hook(lambda module, args, y: None)
    check(stage, plain, [{"x": images(torch.bfloat16)} for _ in range(8)])


@pytest.mark.backends("cpu")
def test_an_output_that_is_kept_and_changed_in_place_is_an_error(backend):
    x = images(channels=32).contiguous(memory_format=torch.channels_last)
    y = bare_stage(memory="rebuild")(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.backends("cpu")
def test_an_output_that_is_not_kept_may_be_changed_in_place(backend):
    stage = bare_stage(memory="checkpoint")
    stage.register_forward_hook(lambda module, args, y: y.mul_(2))
    check(stage, plain_copy(stage), {"x": images(channels=32)})


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
@modes("rebuild", "two_segments")
def test_selective_checkpointing_updates_statistics_once(options, backend):
    stage, inputs = random_stage(**options), {"x": images()}
    results = evaluate(Selective(stage), inputs)
    expected = evaluate(stage, inputs)
    assert_same_bits({n.replace("stage.", ""): t for n, t in results.items()}, expected)
    assert results["stage.3.bn1.num_batches_tracked"] == 1


@pytest.mark.backends("cpu")
@modes("store", "rebuild", "checkpoint")
def test_a_backward_that_fails_midway_can_be_run_again(options, backend, monkeypatch):
    stage, x = bare_stage(**options), images(channels=32).requires_grad_()
    parameters = (x, *stage.parameters())
    y = stage(x)
    expected = torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    buffers = {n: t.clone() for n, t in stage.named_buffers()}
    kernels = backends.select(backend, device_of(backend), torch.float32)
    with monkeypatch.context() as patch:

        def fails(*arguments, **options):
            raise MemoryError

        patch.setattr(kernels, "norm_input_gradient", fails)
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
