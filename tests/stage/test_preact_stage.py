"""A stage equals its blocks called in turn, in every memory mode."""

import copy
import re

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cpu
from preact_kernels.ops import dispatch as backends
from tests.cases import (
    device_of,
    in_dtype,
    random_block,
    random_stage,
    recorded_calls,
    unit_by_unit,
)
from tests.oracle import assert_same_bits, check, evaluate, plain_copy

NOTHING_REBUILT = {
    "rebuild": {"memory": "rebuild", "anchor_every": 1},
    "checkpoint": {"memory": "checkpoint", "anchor_every": 1},
    "three_segments": {"memory": "checkpoint", "segments": 3, "anchor_every": 1},
    "all_segments": {"memory": "checkpoint", "segments": 4},
}
MODES = [{}, {"memory": "rebuild"}, {"memory": "checkpoint"}]
PARTS = [{"memory": "rebuild", "anchor_every": 2}, {"memory": "checkpoint", "segments": 2}]
every_mode = pytest.mark.parametrize("memory", MODES, ids=str)
every_kind = pytest.mark.parametrize("kind", ["basic", "bottleneck"])
both_modes = pytest.mark.parametrize("training", [True, False])
on_cpu = pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
DIRECT_WIDTH = 16  # channels that the library's convolutions serve on every instruction set


def images(dtype=torch.float32):
    return torch.randn(3, 10, 7, 6).to(dtype)


def in_mode(stage, memory="store", segments=None, anchor_every=None):
    stage = copy.deepcopy(stage)
    stage.memory, stage.segments, stage.anchor_every = memory, segments, anchor_every
    return stage


@on_cpu
@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", [*MODES, *PARTS], ids=str)
@every_kind
@both_modes
def test_equals_its_blocks_called_in_turn(memory, kind, training, wide_dtype):
    stage = in_dtype(random_stage(kind, **memory), wide_dtype).train(training)
    # Gradients of few values: in several problems none is near eager's by luck.
    problems = [{"x": images(wide_dtype)} for _ in range(8)]
    results = check(stage, plain_copy(stage), problems)
    counters = [t for n, t in results.items() if n.endswith("num_batches_tracked")]
    assert all(t == int(training) for t in counters)


@on_cpu
@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", NOTHING_REBUILT.values(), ids=NOTHING_REBUILT)
@both_modes
def test_what_rebuilds_nothing_gives_the_bits_of_store(memory, training, dtype):
    stage = in_dtype(random_stage(), dtype).train(training)
    inputs = {"x": images(dtype)}
    expected = evaluate(stage, inputs)
    assert_same_bits(evaluate(in_mode(stage, **memory), inputs), expected)


@pytest.mark.backends("cpu")
@pytest.mark.covering(1)
@every_mode
@pytest.mark.parametrize("width", [6, DIRECT_WIDTH])
def test_two_backward_passes_add_up_and_update_statistics_once(memory, width, backend):
    stage = random_stage(width=width, **memory)
    x = images().requires_grad_()
    y = stage(x)
    statistics = {n: t.clone() for n, t in stage.named_buffers()}
    dy = torch.randn_like(y)
    y.backward(dy, retain_graph=True)
    once = [t.grad.clone() for t in (x, *stage.parameters())]
    y.backward(dy)
    for grad, t in zip(once, (x, *stage.parameters()), strict=True):
        assert torch.equal(t.grad, 2 * grad)
    assert_same_bits(dict(stage.named_buffers()), statistics)


def frozen_names(stage, pattern):
    """Names of the input and the parameters that begin with the pattern."""
    return [n for n in ("x", *dict(stage.named_parameters())) if re.match(pattern, n)]


@on_cpu
@pytest.mark.covering(1)
@every_mode
@pytest.mark.parametrize(
    "frozen",
    [
        r"0\.",
        r"x|[01]\.",
        r"x|3\.",
        ".*conv",
        "x|.*bn",
        "x|.*shortcut",
        "(?!0.conv1.weight)",  # all others
        "(?!1.shortcut.weight)",
        "(?!2.bn1.bias)",
    ],
)
def test_frozen_parameters_get_no_gradient_and_change_no_other(memory, frozen, backend):
    stage = random_stage(**memory)
    names = frozen_names(stage, frozen)
    check(stage, plain_copy(stage), {"x": images()}, frozen=names)


@pytest.mark.backends("cpu")
@every_mode
def test_gradients_of_frozen_parameters_are_not_computed(memory, backend, monkeypatch):
    stage = random_stage(**memory)
    stage[:2].requires_grad_(False)
    stage[3].conv2.requires_grad_(False)
    kernels = backends.select(backend, device_of(backend), torch.float32)
    calls = recorded_calls(kernels, "norm_act_conv_backward", monkeypatch)
    stage(images()).sum().backward()
    assert len(calls) == 2 * 3  # two bottlenecks with bare shortcuts
    assert sum(not wanted.weight for *_, wanted in calls) == 1


@on_cpu
@every_mode
def test_frozen_batch_norms_among_training_ones(memory, backend):
    stage = direct_stage(bare=4, **memory)
    for name in ("1", "2.bn2", "4"):
        stage.get_submodule(name).eval()
    results = check(stage, plain_copy(stage), {"x": images()})
    counted = [results[f"{n}.num_batches_tracked"] for n in ("1.bn1", "2.bn1", "2.bn2", "3.bn1")]
    assert counted == [0, 1, 0, 1]


@pytest.mark.backends("cpu")
@every_mode
def test_a_block_that_occurs_twice_is_run_and_updated_twice(memory, backend):
    block = random_block("basic", 10, 10)
    block.bn2.momentum = None
    stage = pk.PreActStage([block, random_block("basic", 10, 10), block, block], **memory)
    results = check(stage, plain_copy(stage), {"x": images()})
    assert results["0.bn1.num_batches_tracked"] == 3


@pytest.mark.backends("cpu")
@every_mode
def test_running_statistics_stay_when_a_forward_fails_midway(memory, backend, monkeypatch):
    stage = random_stage(**memory)
    before = {n: t.clone() for n, t in stage.named_buffers()}
    kernels = backends.select(backend, device_of(backend), torch.float32)
    function, calls = kernels.norm_act_conv_forward, []

    def fails_at_the_sixth(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 6:
            raise MemoryError
        return function(*arguments, **options)

    monkeypatch.setattr(kernels, "norm_act_conv_forward", fails_at_the_sixth)
    with pytest.raises(MemoryError):
        stage(images())
    assert_same_bits(dict(stage.named_buffers()), before)


FORWARD = "preact_kernels_cpu::block_run_forward"


@pytest.fixture
def cpu_backend(poisoned_memory):
    if cpu.load_error():
        pytest.skip(f"backend cpu: {cpu.load_error()}")
    with pk.use_backend("cpu"):
        yield


def direct_stage(kind="bottleneck", bare=2, **options):
    """A projected, a strided and bare blocks that the library runs, with an eps for each unit."""
    expansion = 4 if kind == "bottleneck" else 1
    blocks = [random_block(kind, 10, 8), random_block(kind, 8 * expansion, DIRECT_WIDTH, 2)]
    channels = DIRECT_WIDTH * expansion
    blocks += [random_block(kind, channels, DIRECT_WIDTH) for _ in range(bare)]
    stage = pk.PreActStage(blocks, **options)
    for block in stage:
        for index, (bn, _) in enumerate(block.units()):
            bn.eps = 1e-3 * (index + 1)
    return stage


@pytest.mark.calls(FORWARD, "preact_kernels_cpu::block_run_backward")
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("memory", "runs"),
    [
        ({}, 1),
        ({"memory": "rebuild"}, 1),
        ({"memory": "rebuild", "anchor_every": 2}, 1),
        ({"memory": "rebuild", "anchor_every": 3}, 1),
        ({"memory": "checkpoint"}, 2),
        ({"memory": "checkpoint", "segments": 3}, 2),
        ({"memory": "checkpoint", "segments": 8}, 6),
    ],
)
@every_kind
@both_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_runs_of_blocks_give_the_bits_of_their_units(
    memory, runs, kind, training, dtype, cpu_backend, monkeypatch
):
    stage = in_dtype(direct_stage(kind, 6, **memory), dtype).train(training)
    inputs = {"x": images(dtype)}
    expected = unit_by_unit(evaluate, stage, inputs)
    names = ("block_run_forward", "block_run_backward")
    forward, backward = (recorded_calls(cpu.kernels(), n, monkeypatch) for n in names)
    assert_same_bits(evaluate(stage, inputs), expected)
    assert forward and len(backward) == runs


@pytest.mark.calls(FORWARD, "preact_kernels_cpu::block_run_backward")
@every_kind
def test_a_native_run_may_end_with_an_input_that_is_kept(kind, cpu_backend, monkeypatch):
    stage = direct_stage(kind, 6, memory="rebuild", anchor_every=2)
    inputs, frozen = {"x": images()}, ["5.bn1.weight"]
    expected = unit_by_unit(evaluate, stage, inputs, frozen=frozen)
    calls = recorded_calls(cpu.kernels(), "block_run_backward", monkeypatch)
    assert_same_bits(evaluate(stage, inputs, frozen=frozen), expected)
    units = 2 if kind == "basic" else 3
    kept = [[t is not None for t in inputs[::units]] for _, _, inputs, _ in calls]
    assert kept == [[True, False], [True, False, True]]
    assert [y is None for *_, y in calls] == [False, True]


@pytest.mark.calls(FORWARD)
def test_native_runs_stop_at_a_projection_that_keeps_the_shape(cpu_backend, monkeypatch):
    stage = direct_stage("basic", 3)
    stage[3].shortcut = torch.nn.Conv2d(DIRECT_WIDTH, DIRECT_WIDTH, 1, bias=False)
    inputs = {"x": images()}
    expected = unit_by_unit(evaluate, stage, inputs)
    calls = recorded_calls(cpu.kernels(), "block_run_backward", monkeypatch)
    assert_same_bits(evaluate(stage, inputs), expected)
    assert {len(run.parameters) for run, *_ in calls} == {2}  # a block each


@pytest.mark.calls(FORWARD)
def test_native_runs_take_rounded_weights_under_autocast(cpu_backend, monkeypatch):
    stage = direct_stage()
    calls = recorded_calls(cpu.kernels(), "block_run_forward", monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        stage(images())
    ((run, *_),) = calls
    assert {unit.weight_dtype for unit in run.units} == {torch.bfloat16}
    assert {p.conv_weight.dtype for p in run.parameters} == {torch.bfloat16}


@pytest.mark.calls(FORWARD)
@pytest.mark.covering(1)
@every_mode
@pytest.mark.parametrize(
    ("frozen", "blocks"),
    [
        ("2.conv1.weight", [1]),
        ("x|2.bn2.bias", [1]),
        ("3.bn1.weight", [1]),
        (r"x|0\.", [2]),
        (r"x|[01]\.", [1]),
        (r"x|[012]\.", []),
    ],
)
def test_native_runs_stop_at_frozen_parameters(memory, frozen, blocks, cpu_backend, monkeypatch):
    stage, inputs = direct_stage(**memory), {"x": images()}
    names = frozen_names(stage, frozen)
    expected = unit_by_unit(evaluate, stage, inputs, frozen=names)
    calls = recorded_calls(cpu.kernels(), "block_run_backward", monkeypatch)
    assert_same_bits(evaluate(stage, inputs, frozen=names), expected)
    assert {len(run.parameters) for run, *_ in calls} == {3 * count for count in blocks}


def test_a_stage_has_the_keys_of_a_sequential():
    stage = random_stage()
    plain = torch.nn.Sequential(*copy.deepcopy(list(stage)))
    assert_same_bits(stage.state_dict(), plain.state_dict())


def test_a_slice_of_a_stage_is_a_stage_of_the_same_blocks():
    stage = random_stage(memory="checkpoint")
    part = stage[1:3]
    assert isinstance(part, pk.PreActStage)
    assert list(part) == [stage[1], stage[2]]
    assert part.memory == "checkpoint"


@pytest.mark.backends("cpu")
def test_a_recomputation_keeps_the_precision_of_its_forward(backend):
    stage, x = random_stage(memory="checkpoint"), images().requires_grad_()
    (expected,) = torch.autograd.grad(stage(x).sum(), x)
    y = stage(x)
    with torch.autocast(device_of(backend), torch.bfloat16):
        (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)


def test_a_backend_is_asked_about_the_pixels_of_each_unit(cpu_backend, monkeypatch):
    stage, asked = direct_stage("basic")[2:], []
    stage[0].conv1.padding, stage[0].conv2.padding = (2, 2), (0, 0)
    kernels = cpu.kernels()
    monkeypatch.setattr(kernels, "refusal", lambda *a: asked.append(a[-1]))
    monkeypatch.setattr(kernels, "block_run_forward", None)  # ends it
    with pytest.raises(TypeError):
        stage(torch.randn(3, 16, 7, 6))
    assert asked == [3 * 7 * 6, 3 * 9 * 8, 3 * 7 * 6, 3 * 7 * 6]
