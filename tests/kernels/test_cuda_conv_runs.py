"""A run of blocks in one call of the CUDA library gives the same bits as its units one by one."""

import collections

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels.contract import (
    BlockRun,
    Gradient,
    Norm,
    Parameters,
    Statistics,
    Wanted,
)
from testbed.cuda_on_host import serve_cpu
from tests.cases import in_dtype, random_block, random_stage, recorded_calls, unit_by_unit
from tests.kernels.cuda_conv_cases import (
    DEVICE,
    Case,
    backward_inputs,
    call,
    kernels,
    launches,
    nhwc,
    on_host,
    set_schedule,
    unit,
)
from tests.oracle import assert_same_bits, evaluate

pytestmark = pytest.mark.usefixtures("fused_convolutions")


@on_host
@pytest.mark.parametrize(
    ("is_large", "width", "stream"),
    [(False, 16, None), (True, 16, torch.float32)],
    ids=str,
)
def test_a_run_of_blocks_has_three_launches_a_block_in_each_direction(is_large, width, stream):
    """The whole run has some more launches; large weight gradients do not add to them."""
    set_schedule(multiprocessors=1)
    blocks = [random_block("bottleneck", 4 * width, width) for _ in range(3)]
    stage = in_dtype(pk.PreActStage(blocks, residual_dtype=stream), torch.bfloat16)
    inputs = {"x": torch.randn(2, 4 * width, *((width + 1, 40) if is_large else (3, 3))).bfloat16()}
    with pk.use_backend("cuda"):
        names = launches(lambda: evaluate(stage, inputs))
        assert_same_bits(evaluate(stage, inputs), unit_by_unit(evaluate, stage, inputs))
    counts = collections.Counter(names)
    assert counts.pop("norm_act_conv_forward") == 9
    suffix = "" if is_large else "_input"
    assert counts.pop(f"norm_act_conv_backward{suffix}") == 9
    weight_gradients = 0 if is_large else 3  # shapes of convolutions in a block
    assert counts.pop("norm_act_conv_weight_gradients", 0) == weight_gradients
    assert counts == {
        "bn_stats": 1,
        "fill_zeros": 3,  # for bn_stats, and sums in each direction
        "pack_weights": 2,
        "finish_statistics": 1,
        "finish_gradients": 1,
        "norm_input_gradient": 1,  # dx
    }


@on_host
@pytest.mark.parametrize(
    ("blocks", "height", "width", "apart", "finished"),
    [
        # All weight gradients have their own launches, when there are 48 and at the end.
        (17, 3, 3, 6, 2),
        # The 3x3 weight gradients have a launch, at the end. Partial sums of the 1x1 weight
        # gradients are added up when there are 64.
        (33, 7, 8, 1, 2),
        # The partial sums of a launch for 48 join 31 others: two launches add them up.
        pytest.param(48, 8, 8, 1, 4, marks=pytest.mark.slow),
    ],
)
def test_weight_gradients_of_a_long_run_are_computed_now_and_then(
    blocks, height, width, apart, finished
):
    set_schedule(multiprocessors=1)
    stage = pk.PreActStage([random_block("bottleneck", 64, 16) for _ in range(blocks)])
    stage = in_dtype(stage, torch.bfloat16)
    inputs = {"x": torch.randn(1, 64, height, width).bfloat16()}
    with pk.use_backend("cuda"):
        counts = collections.Counter(launches(lambda: evaluate(stage, inputs)))
        assert_same_bits(evaluate(stage, inputs), unit_by_unit(evaluate, stage, inputs))
    assert counts["norm_act_conv_weight_gradients"] == apart
    assert counts["finish_gradients"] == finished


@on_host
@pytest.mark.parametrize(
    ("memory", "multiprocessors", "apart", "finished"),
    [
        # Weight gradients keep each dy of 8 MiB: they are launched when there are nine, and at the
        # end.
        ("store", 2000, 2, 2),
        # They also keep the rebuilt x of a block's first unit: they are launched when there are
        # six, and at the end.
        ("rebuild", 2000, 3, 3),
        # None have their own launch. Their partial sums, 7.9 MiB each, are added up when there
        # are ten.
        ("store", 56, 0, 2),
    ],
)
def test_what_a_run_keeps_for_later_is_never_much(
    memory, multiprocessors, apart, finished, monkeypatch
):
    """Tensors have addresses and no memory."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    set_schedule(multiprocessors=multiprocessors)
    blocks = [random_block("basic", 64, 64) for _ in range(8)]
    stage = in_dtype(pk.PreActStage(blocks, memory=memory), torch.bfloat16)
    inputs = {"x": torch.zeros(4, 64, 128, 128).bfloat16()}
    with pk.use_backend("cuda"):
        counts = collections.Counter(launches(lambda: evaluate(stage, inputs)))
    assert counts["norm_act_conv_weight_gradients"] == apart
    assert counts["finish_gradients"] == finished


@on_host
def test_kernels_are_dependent_behind_kernels_of_their_run_alone():
    """A kernel after PyTorch's copy of an unaligned tensor is not dependent."""
    stage = in_dtype(pk.PreActStage([random_block("bottleneck", 64, 16)] * 2), torch.bfloat16)
    memory = torch.randn(2 * 5 * 7 * 64 + 1, device=DEVICE).bfloat16()
    found = []
    for offset in (0, 1):
        x = memory[offset:][: 2 * 5 * 7 * 64].view(2, 5, 7, 64).permute(0, 3, 1, 2)
        are_dependent = []

        def listen(launch, to=are_dependent):
            if launch.name == "norm_act_conv_forward":
                to.append(launch.is_dependent)

        with pk.use_backend("cuda"), torch.no_grad(), serve_cpu.without_running(listen):
            stage(x)
        found.append(are_dependent)
    # A block's last convolution adds x, which is copied ahead of it.
    assert found == [[False, *[True] * 5], [False, True, False, True, True, True]]


@on_host
def test_other_weight_gradients_of_a_run_do_not_change_its_bits():
    """The partial sums add up to other bits in any other order."""
    set_schedule(multiprocessors=5)
    case = Case(10, 16, 16, 16, 16, 1)
    inputs = backward_inputs(case, torch.bfloat16, "none")
    dy = torch.zeros(10, 16, 16, 16).bfloat16()
    for image, value in ((0, 2.0**60), (8, -(2.0**60)), (9, 1.0)):
        dy[image] = value / 256
    norm = Norm(torch.zeros(16), torch.ones(16), torch.ones(16), torch.zeros(16), 0.0)
    inputs = inputs._replace(dy=Gradient(nhwc(dy)), x=nhwc(torch.ones_like(dy)), norm=norm)
    alone = call(kernels(), case, inputs, Wanted(True, True))["conv_weight"]
    units = [unit(case, inputs)._replace(eps=0.0)] * 2
    parameters = [Parameters(norm.weight, norm.bias, inputs.conv_weight)] * 2
    run = BlockRun(units, parameters, [Statistics(norm.mean, norm.var)] * 2)
    found = kernels().block_run_backward(run, inputs.dy, [inputs.x] * 2, None)
    assert torch.equal(found.parameters[1].conv_weight, alone)


# Dtypes of the products and of the residual stream.
DTYPES = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float32": (torch.float32, None),
    "bfloat16_stream": (torch.bfloat16, torch.float32),
    "float16_stream": (torch.float16, torch.float32),
}


def stage_of(blocks, dtypes, **options):
    operands, stream = dtypes
    stage = pk.PreActStage(blocks, residual_dtype=stream, **options)
    return in_dtype(stage, operands).to(DEVICE)


def bottlenecks(width, count=3):
    return [random_block("bottleneck", 4 * width, width) for _ in range(count)]


def images(dtypes, *shape):
    operands, stream = dtypes
    return torch.randn(*shape, device=DEVICE).to(stream or operands)


def assert_bits_of_units(stage, x, dy=None, multiprocessors=2):
    """The units run in another schedule. Returns the results, by name."""
    inputs = {"x": x}
    with pk.use_backend("cuda"), pytest.MonkeyPatch.context() as monkeypatch:
        runs = recorded_calls(kernels(), "block_run_backward", monkeypatch)
        set_schedule(1, multiprocessors)
        found = evaluate(stage, inputs, dy)
        assert runs
        set_schedule(0, multiprocessors)
        assert_same_bits(found, unit_by_unit(evaluate, stage, inputs, dy))
    return found


MEMORY = ({}, *({"memory": "rebuild", "anchor_every": n} for n in (4, 2)), {"memory": "checkpoint"})


@pytest.mark.covering(1)
@pytest.mark.calls(
    "preact_kernels_cuda::block_run_forward", "preact_kernels_cuda::block_run_backward"
)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_runs_give_the_bits_of_units(dtypes, kind, training, memory):
    """A block of threads has several tiles; the last is partial.

    The last two blocks are a run. In mode "rebuild" it keeps no inputs of blocks, or the first.
    """
    stage = random_stage(kind, 16, residual_dtype=dtypes[1], **memory).train(training)
    stage = in_dtype(stage, dtypes[0]).to(DEVICE)
    found = assert_bits_of_units(stage, images(dtypes, 2, 10, 33, 21), multiprocessors=1)
    assert found["y"].dtype == (dtypes[1] or dtypes[0])


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize(
    ("name", "width", "shape"), [("bfloat16", 16, (2, 1, 1)), ("float16_stream", 64, (2, 5, 5))]
)
def test_stages_of_other_sizes_give_those_bits(name, width, shape):
    dtypes = DTYPES[name]
    count, *size = shape
    stage, x = stage_of(bottlenecks(width, 2), dtypes), images(dtypes, count, 4 * width, *size)
    assert_bits_of_units(stage, x)


@pytest.mark.parametrize(
    ("name", "where", "value"),
    [
        ("bfloat16", "x", torch.nan),
        ("float32", "dy", torch.inf),
    ],
)
def test_what_is_not_finite_gives_those_bits(name, where, value):
    """In evaluation mode a value that is not finite spreads to its neighbours alone."""
    dtypes = DTYPES[name]
    stage = stage_of(bottlenecks(16), dtypes).eval()
    x = images(dtypes, 2, 64, 9, 11)
    given = {"x": x, "dy": torch.randn_like(x)}
    given[where][0, 5, 3, 4] = value
    given[where][1, 17, 8, 10] = value
    found = assert_bits_of_units(stage, x, given["dy"])
    assert not all(t.isfinite().all() for t in found.values())
    assert found["dx"].isfinite().any()
