"""A stage equals its blocks called in turn, in every memory mode."""

import copy

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cpu
from preact_kernels.kernels.contract import Conv
from preact_kernels.ops import block_runs
from preact_kernels.ops import dispatch as backends
from tests.cases import (
    Repeated,
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
every_mode = pytest.mark.parametrize(
    "memory", [{}, {"memory": "rebuild"}, {"memory": "checkpoint"}], ids=str
)
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
@pytest.mark.covering(2)
@every_mode
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@both_modes
def test_equals_its_blocks_called_in_turn(memory, kind, training, wide_dtype):
    stage = in_dtype(random_stage(kind, **memory), wide_dtype).train(training)
    results = check(stage, plain_copy(stage), {"x": images(wide_dtype)})
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


@on_cpu
@pytest.mark.covering(1)
@every_mode
@pytest.mark.parametrize(
    "frozen",
    [("0.",), ("0.", "1."), ("2.",), ("3.",), ("conv",), ("bn",), ("shortcut",), ("weight",)],
    ids="".join,
)
@pytest.mark.parametrize("wants_x", [True, False])
def test_frozen_parameters_get_no_gradient_and_change_no_other(memory, frozen, wants_x, backend):
    stage = random_stage(**memory)
    names = [n for n, _ in stage.named_parameters() if any(f in n for f in frozen)]
    plain = plain_copy(stage)
    frozen = names if wants_x else ["x", *names]
    check(stage, plain, {"x": images()}, frozen=frozen)


@on_cpu
@pytest.mark.covering(1)
@every_mode
@pytest.mark.parametrize(
    "kept", ["0.conv1.weight", "1.shortcut.weight", "2.bn1.bias", "3.bn3.weight"]
)
def test_one_trained_parameter_alone(memory, kept, backend):
    stage = random_stage(**memory)
    frozen = ["x", *(n for n, _ in stage.named_parameters() if n != kept)]
    results = check(stage, plain_copy(stage), {"x": images()}, frozen=frozen)
    assert [n for n, t in results.items() if n.startswith("d") and t is not None] == [f"d{kept}"]


@pytest.mark.backends("cpu")
@every_mode
def test_blocks_ahead_of_the_first_trained_one_run_no_backward(memory, backend, monkeypatch):
    stage = random_stage(**memory)
    stage[:2].requires_grad_(False)
    calls = count_calls(backend, "bn_relu_conv_backward", monkeypatch)
    stage(images()).sum().backward()
    assert len(calls) == 2 * 3  # two bottlenecks with bare shortcuts


@pytest.mark.backends("cpu")
def test_frozen_weights_run_no_weight_gradient(backend, monkeypatch):
    stage = random_stage()
    for block in stage:
        block.conv2.requires_grad_(False)
    calls = count_calls(backend, "bn_relu_conv_backward", monkeypatch)
    stage(images()).sum().backward()
    assert sum(not arguments[-1].weight for arguments in calls) == 4


def count_calls(backend, name, monkeypatch):
    kernels = backends.select(backend, device_of(backend), torch.float32)
    return recorded_calls(kernels, name, monkeypatch)


@pytest.mark.backends("cpu")
@every_mode
def test_no_grad_gives_the_bits_of_a_recorded_forward(memory, backend):
    stage, x = random_stage(**memory), images()
    expected = evaluate(stage, {"x": x})["y"]
    with torch.no_grad():
        y = stage(x)
    assert not y.requires_grad
    assert torch.equal(y, expected)


@on_cpu
@every_mode
def test_frozen_batch_norms_among_training_ones(memory, backend):
    stage = random_stage(**memory)
    stage[1].eval()
    stage[2].bn2.eval()
    results = check(stage, plain_copy(stage), {"x": images()})
    assert results["1.bn1.num_batches_tracked"] == results["2.bn2.num_batches_tracked"] == 0
    assert results["2.bn1.num_batches_tracked"] == results["3.bn1.num_batches_tracked"] == 1


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("momentum", [None, 0.3])
def test_running_statistics_follow_several_batches(momentum, backend):
    stage = random_stage(memory="checkpoint")
    for module in stage.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = momentum
    results = check(Repeated(stage), Repeated(plain_copy(stage)), {"x": torch.randn(3, 10, 7, 15)})
    assert results["module.3.bn2.num_batches_tracked"] == 3


@pytest.mark.backends("cpu")
@every_mode
def test_a_block_that_occurs_twice_is_run_and_updated_twice(memory, backend):
    block = random_block("basic", 10, 10)
    stage = pk.PreActStage([block, random_block("basic", 10, 10), block, block], **memory)
    results = check(stage, plain_copy(stage), {"x": images()})
    assert results["0.bn1.num_batches_tracked"] == 3


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("count", [1, 2, 7])
def test_checkpointing_any_number_of_blocks(count, backend):
    blocks = [random_block("basic", 10, 10) for _ in range(count)]
    stage = pk.PreActStage(blocks, memory="checkpoint", anchor_every=1)
    inputs = {"x": images()}
    assert_same_bits(evaluate(stage, inputs), evaluate(in_mode(stage), inputs))


@pytest.mark.backends("cpu")
@every_mode
def test_running_statistics_stay_when_a_forward_fails_midway(memory, backend, monkeypatch):
    stage = random_stage(**memory)
    before = {n: t.clone() for n, t in stage.named_buffers()}
    kernels = backends.select(backend, device_of(backend), torch.float32)
    function, calls = kernels.bn_relu_conv_forward, []

    def fails_at_the_sixth(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 6:
            raise MemoryError
        return function(*arguments, **options)

    monkeypatch.setattr(kernels, "bn_relu_conv_forward", fails_at_the_sixth)
    with pytest.raises(MemoryError):
        stage(images())
    assert_same_bits(dict(stage.named_buffers()), before)


FORWARD = "preact_kernels_cpu::preact_stage_forward"
runs_natively = pytest.mark.calls(FORWARD, "preact_kernels_cpu::preact_stage_backward")


@pytest.fixture
def cpu_backend(poisoned_memory):
    with pk.use_backend("cpu"):
        yield


def direct_stage(kind="bottleneck", bare=2, **options):
    """A projected, a strided and bare blocks that the library runs, each norm with its own eps."""
    expansion = 4 if kind == "bottleneck" else 1
    blocks = [random_block(kind, 10, 8), random_block(kind, 8 * expansion, DIRECT_WIDTH, 2)]
    channels = DIRECT_WIDTH * expansion
    blocks += [random_block(kind, channels, DIRECT_WIDTH) for _ in range(bare)]
    stage = pk.PreActStage(blocks, **options)
    norms = [m for m in stage.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for index, bn in enumerate(norms):
        bn.eps = 1e-3 * (index + 1)
    return stage


@runs_natively
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("memory", "runs"),
    [
        ({}, 1),
        ({"memory": "rebuild"}, 1),
        ({"memory": "rebuild", "anchor_every": 2}, 6),
        ({"memory": "checkpoint"}, 3),
        ({"memory": "checkpoint", "segments": 3}, 4),
        ({"memory": "checkpoint", "segments": 8}, 6),
    ],
)
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
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


@runs_natively
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@both_modes
def test_a_native_run_of_blocks_equals_its_blocks_called_in_turn(kind, training, cpu_backend):
    stage = direct_stage(kind).train(training)
    check(stage, plain_copy(stage), {"x": images()})


@runs_natively
@pytest.mark.covering(1)
@every_mode
@pytest.mark.parametrize("frozen", ["2.conv1.weight", "2.bn2.bias", "3.bn1.weight"])
@pytest.mark.parametrize("wants_x", [True, False])
def test_a_native_run_stops_at_a_frozen_parameter(
    memory, frozen, wants_x, cpu_backend, monkeypatch
):
    stage = direct_stage(**memory)
    calls = recorded_calls(cpu.kernels(), "block_run_backward", monkeypatch)
    frozen = [frozen] if wants_x else ["x", frozen]
    check(stage, plain_copy(stage), {"x": images()}, frozen=frozen)
    # The units of the other block without a projection.
    assert calls and all(len(run.eps) == 3 for _, _, run, *_ in calls)


@runs_natively
@pytest.mark.covering(1)
@every_mode
@pytest.mark.parametrize("frozen", ["3", "3.bn2"])
def test_a_native_run_of_batch_norms_in_different_modes(memory, frozen, cpu_backend):
    stage = direct_stage(**memory)
    stage.get_submodule(frozen).eval()
    check(stage, plain_copy(stage), {"x": images()})


@pytest.mark.calls(FORWARD)
@pytest.mark.covering(1)
@every_mode
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_native_run_behind_frozen_blocks(memory, blocks, cpu_backend):
    stage = direct_stage(**memory)
    names = [n for n, _ in stage.named_parameters() if int(n[0]) < blocks]
    check(stage, plain_copy(stage), {"x": images()}, frozen=["x", *names])


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
def test_a_stage_split_by_a_hook_keeps_within_its_segments(backend):
    stage = pk.PreActStage([pk.PreActBasicBlock(6, 6) for _ in range(5)], "checkpoint", 5)
    expected = copy.deepcopy(stage)
    calls = []
    stage[2].register_forward_hook(lambda *_: calls.append(1))
    x = images()[:, :6]
    for s in (stage, expected):
        s(x).square().sum().backward()
    assert calls
    for found, other in zip(stage.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad)


@pytest.mark.backends("cpu")
def test_a_recomputation_keeps_the_precision_of_its_forward(backend):
    stage, x = random_stage(memory="checkpoint"), images().requires_grad_()
    (expected,) = torch.autograd.grad(stage(x).sum(), x)
    y = stage(x)
    with torch.autocast(device_of(backend), torch.bfloat16):
        (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)


def test_a_backend_is_asked_about_the_pixels_of_each_unit():
    asked = []

    class Kernels:
        block_run_forward = None

        def serves_conv(self, weight_shape, conv, dtype, device, pixels):
            asked.append(pixels)
            return True

    wide, narrow = (Conv((1, 1), (p, p), (1, 1), 1) for p in (1, 0))
    strided = Conv((2, 2), (1, 1), (1, 1), 1)

    def unit(conv):
        return block_runs.UnitSpec(1e-5, True, conv)

    projected = block_runs.BlockSpec((unit(strided), unit(wide)), strided)
    plain = block_runs.BlockSpec((unit(wide), unit(narrow)), None)
    point, square = torch.empty(8, 8, 1, 1), torch.empty(8, 8, 3, 3)
    weights = [square, square, point, square]
    values = [t for w in weights for t in (torch.empty(8), torch.empty(8), w)]
    blocks = block_runs.Blocks([projected, plain], [*values, square])
    keys = block_runs.run_keys(Kernels(), blocks, torch.empty(2, 8, 12, 6))
    assert [key is None for key in keys] == [True, False]
    assert asked == [2 * 6 * 3, 2 * 8 * 5]
