"""In a run of blocks of the CUDA library, g of a block's first unit is recomputed where it is read.

Unit by unit, every g is stored: the bits are the same.
"""

import collections

import pytest
import torch

import preact_kernels as pk
from preact_kernels.ops import block_runs
from tests.cases import in_dtype, random_block
from tests.conftest import IS_CUDA_ON_HOST
from tests.kernels.cuda_conv_cases import DEVICE, kernels, launches, on_host, set_schedule
from tests.kernels.cuda_on_host import serve_cpu
from tests.oracle import assert_same_bits, evaluate, gradient_like
from tests.stage.test_preact_stage import recorded_calls, unit_by_unit

pytestmark = pytest.mark.usefixtures("fused_convolutions")

# Of the operands, and of the residual stream.
DTYPES = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float32": (torch.float32, None),
    "bfloat16_stream": (torch.bfloat16, torch.float32),
    "float16_stream": (torch.float16, torch.float32),
}
every_dtype = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
BFLOAT16 = DTYPES["bfloat16"]


def stage_of(blocks, dtypes, **options):
    operands, stream = dtypes
    stage = pk.PreActStage(blocks, residual_dtype=stream, **options)
    return in_dtype(stage, operands).to(DEVICE)


def bottlenecks(width, count=3):
    return [random_block("bottleneck", 4 * width, width) for _ in range(count)]


def images(dtypes, *shape):
    operands, stream = dtypes
    return torch.randn(*shape, device=DEVICE).to(stream or operands)


def assert_bits_of_a_stored_gradient(stage, x, dy=None):
    """Returns the results, by name."""
    inputs = {"x": x}
    with pk.use_backend("cuda"), pytest.MonkeyPatch.context() as monkeypatch:
        runs = recorded_calls(kernels(), "block_run_backward", monkeypatch)
        found = evaluate(stage, inputs, dy)
        assert runs
        assert_same_bits(found, unit_by_unit(evaluate, stage, inputs, dy))
    return found


def recomputing_kernels(stage, x):
    """How many kernels of a step recompute g."""
    with pk.use_backend("cuda"):
        names = launches(lambda: evaluate(stage, {"x": x}))
    counts = collections.Counter(n for n in names if n.startswith("bn_relu_conv_backward"))
    assert counts.total() == sum(len(list(block.units())) for block in stage)
    return sum(count for name, count in counts.items() if "recomputed" in name)


def shared_bytes(run):
    """The most of a block, by the names of what `run()` launches, which does not run."""
    found = collections.Counter()

    def listen(launch):
        found[launch.name] = max(found[launch.name], launch.shared_bytes)

    with pk.use_backend("cuda"), serve_cpu.without_running(listen):
        run()
    return found


@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory", ["store", "rebuild"])
def test_the_bits_are_those_of_a_gradient_that_is_stored(dtypes, training, memory):
    """Of several tiles a block of threads, the last of them not full."""
    set_schedule(multiprocessors=1)
    stage = stage_of(bottlenecks(16), dtypes, memory=memory).train(training)
    x = images(dtypes, 3, 64, 17, 11)
    assert_bits_of_a_stored_gradient(stage, x)
    if IS_CUDA_ON_HOST:
        # With "rebuild", the first block is a run of its own.
        assert recomputing_kernels(stage, x) == (2 if memory == "store" else 1)


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize(
    ("name", "width", "shape"),
    [
        (name, width, shape)
        for name in DTYPES
        for width, shape in ((16, (2, 1, 1)), (32, (3, 9, 8)), (64, (2, 5, 5)))
        if name != "float32" or width < 64  # no kernel serves its 3x3 convolution
    ],
)
def test_stages_of_other_sizes_give_those_bits(name, width, shape):
    """Those of inner width 64, and of 32 in float32, store it."""
    dtypes = DTYPES[name]
    count, *size = shape
    stage, x = stage_of(bottlenecks(width, 2), dtypes), images(dtypes, count, 4 * width, *size)
    assert_bits_of_a_stored_gradient(stage, x)
    if IS_CUDA_ON_HOST:
        assert recomputing_kernels(stage, x) == (
            width <= (16 if dtypes[0] == torch.float32 else 32)
        )


@pytest.mark.parametrize("seed", [1, 2])
def test_schedules_change_no_bit(seed):
    set_schedule(multiprocessors=1)
    stage, x = stage_of(bottlenecks(16), BFLOAT16), images(BFLOAT16, 3, 64, 17, 11)
    dy = gradient_like(x)
    expected = assert_bits_of_a_stored_gradient(stage, x, dy)
    set_schedule(seed, multiprocessors=1)
    with pk.use_backend("cuda"):
        assert_same_bits(evaluate(stage, {"x": x}, dy), expected)


@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "dy"])
def test_what_is_not_finite_gives_those_bits(dtypes, value, where):
    """In evaluation mode, where it spreads to its neighbours alone."""
    stage = stage_of(bottlenecks(16), dtypes).eval()
    x = images(dtypes, 2, 64, 9, 11)
    given = {"x": x, "dy": gradient_like(x)}
    given[where][0, 5, 3, 4] = value
    given[where][1, 17, 8, 10] = value
    found = assert_bits_of_a_stored_gradient(stage, x, given["dy"])
    assert not all(t.isfinite().all() for t in found.values())
    assert found["dx"].isfinite().any()


@every_dtype
def test_no_gradient_passes_activations_that_are_rounded_to_zero(dtypes):
    """And passes the next greater ones: of a batch norm whose output is its bias."""
    stage = stage_of(bottlenecks(16, 2), dtypes).eval()
    info = torch.finfo(dtypes[0])
    least = info.smallest_normal * info.eps
    if dtypes[0] == torch.float32:
        least *= 2**13  # operands are TF32, which has so many fewer bits
    bn = stage[1].bn1
    with torch.no_grad():
        stage[0].conv3.weight.zero_()
        bn.weight.fill_(1)
        bn.bias.copy_((torch.tensor([0.25, 0.5, 0.75, 1, 2]) * least).repeat(13)[:64])
        bn.running_mean.zero_()
        bn.running_var.fill_(1 - bn.eps)
    assert_bits_of_a_stored_gradient(stage, torch.zeros_like(images(dtypes, 2, 64, 9, 11)))


@on_host
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: bottlenecks(16, 1), 0),
        (lambda: bottlenecks(16, 4), 3),
        (lambda: [random_block("basic", 16, 16) for _ in range(3)], 0),
    ],
    ids=["one_block", "bottlenecks", "basic"],
)
def test_the_first_block_of_a_run_and_basic_blocks_store_it(make, expected):
    stage = stage_of(make(), BFLOAT16)
    channels = next(stage[0].units())[1].in_channels
    assert recomputing_kernels(stage, images(BFLOAT16, 2, channels, 5, 7)) == expected


@on_host
@pytest.mark.parametrize("name", [name for name in DTYPES if name != "float32"])
def test_it_is_stored_where_fewer_blocks_of_threads_would_fit(name):
    set_schedule(multiprocessors=1)
    stage = stage_of(bottlenecks(32, 2), DTYPES[name])
    x = images(DTYPES[name], 2, 128, 9, 8)
    reserved = 1024  # of each block
    sizes = shared_bytes(lambda: evaluate(stage, {"x": x}))
    (most,) = (count for kernel, count in sizes.items() if "recomputed" in kernel)
    suffices = 2 * (most + reserved) - reserved
    try:
        for limit, expected in ((suffices, 1), (suffices - 16, 0)):
            serve_cpu.set_most_shared_bytes(limit)
            assert recomputing_kernels(stage, x) == expected
            assert_bits_of_a_stored_gradient(stage, x)
    finally:
        serve_cpu.set_most_shared_bytes()


@on_host
def test_blocks_of_different_widths_store_it(monkeypatch):
    """Which are not in one run: one that is given them is right none the less."""
    blocks = [random_block("bottleneck", 64, 16, base_width=w) for w in (64, 128, 64)]
    stage, x = stage_of(blocks, BFLOAT16), images(BFLOAT16, 2, 64, 9, 8)
    with pk.use_backend("cuda"):
        expected = evaluate(stage, {"x": x})
    monkeypatch.setattr(block_runs, "run_keys", lambda _, blocks, x: [(True,)] * len(blocks.specs))
    with pk.use_backend("cuda"):
        assert_same_bits(evaluate(stage, {"x": x}), expected)
    assert recomputing_kernels(stage, x) == 0
