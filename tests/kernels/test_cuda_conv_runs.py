"""Runs of blocks in one call of the CUDA library."""

import collections

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels.contract import BlockRun, Norm, Wanted
from tests.cases import in_dtype, random_block, random_stage
from tests.kernels.cuda_conv_cases import (
    DEVICE,
    Case,
    backward_inputs,
    call,
    conv,
    kernels,
    launches,
    nhwc,
    on_host,
    set_schedule,
)
from tests.kernels.cuda_on_host import serve_cpu
from tests.oracle import assert_same_bits, evaluate
from tests.stage.test_preact_stage import recorded_calls, unit_by_unit

pytestmark = pytest.mark.usefixtures("fused_convolutions")


@pytest.mark.calls(
    "preact_kernels_cuda::preact_stage_forward", "preact_kernels_cuda::preact_stage_backward"
)
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory", ["store", "rebuild"])
def test_a_run_of_blocks_in_one_call_gives_the_bits_of_its_units(
    kind, training, memory, monkeypatch
):
    stage = random_stage(kind, 16, memory=memory)
    stage = in_dtype(stage, torch.bfloat16).train(training).to(DEVICE)
    inputs = {"x": torch.randn(3, 10, 7, 6, device=DEVICE).bfloat16()}
    names = ("block_run_forward", "block_run_backward")
    with pk.use_backend("cuda"):
        expected = unit_by_unit(evaluate, stage, inputs)
        calls = [recorded_calls(kernels(), name, monkeypatch) for name in names]
        assert_same_bits(evaluate(stage, inputs), expected)
    assert [len(c) for c in calls] == [1, 1]


@on_host
@pytest.mark.parametrize(
    ("width", "stream"),
    [(16, None), (16, torch.float32), pytest.param(32, None, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_run_of_blocks_has_three_launches_a_block_in_each_direction(is_large, width, stream):
    """And some for the whole run, which large weight gradients do not add to."""
    set_schedule(multiprocessors=1)
    blocks = [random_block("bottleneck", 4 * width, width) for _ in range(3)]
    stage = in_dtype(pk.PreActStage(blocks, residual_dtype=stream), torch.bfloat16)
    inputs = {"x": torch.randn(2, 4 * width, *((width + 1, 40) if is_large else (3, 3))).bfloat16()}
    with pk.use_backend("cuda"):
        names = launches(lambda: evaluate(stage, inputs))
        assert_same_bits(evaluate(stage, inputs), unit_by_unit(evaluate, stage, inputs))
    counts = collections.Counter(names)
    assert counts.pop("bn_relu_conv_forward") == 9
    suffix = "" if is_large else "_input"
    assert counts.pop(f"bn_relu_conv_backward{suffix}") == 7
    assert counts.pop(f"bn_relu_conv_backward_recomputed{suffix}") == 2  # below another block
    weight_gradients = 0 if is_large else 3  # shapes of convolutions in a block
    assert counts.pop("bn_relu_conv_weight_gradients", 0) == weight_gradients
    assert counts == {
        "bn_stats": 1,
        "fill_zeros": 3,  # for bn_stats, and sums in each direction
        "pack_weights": 2,
        "finish_statistics": 1,
        "finish_gradients": 1,
        "bn_input_gradient": 1,  # dx
    }


@on_host
@pytest.mark.parametrize(
    ("blocks", "side", "apart", "finished"),
    [
        # All weight gradients are apart: launched when there are 48, and at the end.
        (17, 3, 6, 2),
        # Those of 3x3 are: launched at the end. Parts of others are added up when there are 64.
        (33, 8, 1, 2),
        # Parts of those launched when there are 48 join 31 others: two launches add them up.
        pytest.param(48, 8, 1, 4, marks=pytest.mark.slow),
    ],
)
def test_weight_gradients_of_a_long_run_are_computed_now_and_then(blocks, side, apart, finished):
    set_schedule(multiprocessors=1)
    stage = pk.PreActStage([random_block("bottleneck", 64, 16) for _ in range(blocks)])
    stage = in_dtype(stage, torch.bfloat16)
    inputs = {"x": torch.randn(1, 64, side, side).bfloat16()}
    with pk.use_backend("cuda"):
        counts = collections.Counter(launches(lambda: evaluate(stage, inputs)))
        assert_same_bits(evaluate(stage, inputs), unit_by_unit(evaluate, stage, inputs))
    assert counts["bn_relu_conv_weight_gradients"] == apart
    assert counts["finish_gradients"] == finished


@on_host
@pytest.mark.parametrize(
    ("memory", "multiprocessors", "apart", "finished"),
    [
        # Weight gradients keep each dy of 8 MiB: they are launched when there are eight.
        ("store", 2000, 2, 3),
        # And x of a block's first unit, which is rebuilt: when there are six, and at the end. The
        # first block, whose x is stored, is a run of its own.
        ("rebuild", 2000, 4, 4),
        # None are apart. Their parts, 7.9 MiB each, are added up when there are nine.
        ("store", 56, 0, 2),
    ],
)
def test_what_a_run_keeps_for_later_is_never_much(memory, multiprocessors, apart, finished):
    set_schedule(multiprocessors=multiprocessors)
    blocks = [random_block("basic", 64, 64) for _ in range(8)]
    stage = in_dtype(pk.PreActStage(blocks, memory=memory), torch.bfloat16)
    inputs = {"x": torch.zeros(4, 64, 128, 128).bfloat16()}
    with pk.use_backend("cuda"):
        counts = collections.Counter(launches(lambda: evaluate(stage, inputs)))
    assert counts["bn_relu_conv_weight_gradients"] == apart
    assert counts["finish_gradients"] == finished


@on_host
def test_all_dependent_launches_of_a_run_start_early_on_the_host():
    """Or no test would see what a kernel reads before it waits."""
    stage = in_dtype(pk.PreActStage([random_block("bottleneck", 64, 16)] * 2), torch.bfloat16)
    inputs = {"x": torch.randn(2, 64, 5, 7).bfloat16()}
    dependent = []
    with pk.use_backend("cuda"):
        with serve_cpu.without_running(lambda launch: dependent.append(launch.is_dependent)):
            evaluate(stage, inputs)
        before = serve_cpu.early_starts()
        evaluate(stage, inputs)
    assert serve_cpu.early_starts() - before == sum(dependent) >= 10


@on_host
def test_kernels_are_dependent_behind_kernels_of_their_run_alone():
    """Not behind PyTorch's, which copy tensors that are not aligned."""
    stage = in_dtype(pk.PreActStage([random_block("bottleneck", 64, 16)] * 2), torch.bfloat16)
    memory = torch.randn(2 * 5 * 7 * 64 + 1, device=DEVICE).bfloat16()
    found = []
    for offset in (0, 1):
        x = memory[offset:][: 2 * 5 * 7 * 64].view(2, 5, 7, 64).permute(0, 3, 1, 2)
        are_dependent = []

        def listen(launch, to=are_dependent):
            if launch.name == "bn_relu_conv_forward":
                to.append(launch.is_dependent)

        with pk.use_backend("cuda"), torch.no_grad(), serve_cpu.without_running(listen):
            stage(x)
        found.append(are_dependent)
    # A block's last convolution adds x, which is copied ahead of it.
    assert found == [[False, *[True] * 5], [False, True, False, True, True, True]]


def test_a_gradient_is_stored_for_a_convolution_that_reads_float32(monkeypatch):
    """Of the values that a half precision has: it gives the same bits."""
    blocks = [random_block("bottleneck", 64, 16) for _ in range(2)]
    stage = in_dtype(pk.PreActStage(blocks), torch.bfloat16).to(DEVICE)
    x = torch.randn(2, 64, 5, 7, device=DEVICE).bfloat16()
    with pk.use_backend("cuda"):
        calls = recorded_calls(kernels(), "block_run_backward", monkeypatch)
        evaluate(stage, {"x": x})
    monkeypatch.undo()
    ((dy, fold, run, inputs, *others),) = calls
    wide = [t.float() if i % 3 == 2 else t for i, t in enumerate(inputs)]
    found, expected = (
        kernels().block_run_backward(dy, fold, run, given, *others) for given in (wide, inputs)
    )
    for name in ("g", "dy", "conv_weights", "sums"):
        parts, of_half = getattr(found, name), getattr(expected, name)
        if isinstance(parts, torch.Tensor):
            parts, of_half = [parts], [of_half]
        numbered = {f"{name} {i}": t for i, t in enumerate(parts)}
        assert_same_bits(numbered, {f"{name} {i}": t for i, t in enumerate(of_half)})


@on_host
def test_other_weight_gradients_of_a_run_do_not_change_its_bits():
    """Of partial sums that no order but one adds up to the same."""
    set_schedule(multiprocessors=5)
    case = Case(10, 16, 16, 16, 16, 1)
    inputs = backward_inputs(case, torch.bfloat16, "none")
    dy = torch.zeros(10, 16, 16, 16).bfloat16()
    for image, value in ((0, 2.0**60), (8, -(2.0**60)), (9, 1.0)):
        dy[image] = value / 256
    unit = Norm(torch.zeros(16), torch.ones(16), torch.ones(16), torch.zeros(16), 0.0)
    inputs = inputs._replace(dy=nhwc(dy), x=nhwc(torch.ones_like(dy)), norm=unit)
    alone = call(kernels(), case, inputs, Wanted(True, True))["conv_weight"]
    affine = (unit.weight, unit.bias)
    run = BlockRun((*affine, inputs.conv_weight) * 2, (0.0, 0.0), 2, (conv(case),) * 2)
    moments = (unit.mean, unit.var) * 2
    found = kernels().block_run_backward(
        inputs.dy, None, run, (inputs.x, inputs.x), moments, 1 / 2560, None
    )
    assert torch.equal(found.conv_weights[1], alone)
