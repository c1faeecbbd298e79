"""What is particular to the Triton kernels: grids, partial results, addresses, choices."""

import itertools
import math
import os
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from tests.cases import (
    ConvCase,
    conv_inputs,
    device_of,
    in_dtype,
    plain_bn_relu_conv2d,
    random_block,
    random_stage,
)
from tests.oracle import (
    assert_same_bits,
    check,
    evaluate,
    plain_copy,
    weight_gradient_inside_the_image,
)
from tests.stage.test_preact_stage import recorded_calls, unit_by_unit

if "triton" not in pk.available_backends():
    pytest.skip("neither a GPU nor the interpreter of Triton", allow_module_level=True)

import triton
import triton.language as tl

from preact_kernels.kernels import reference
from preact_kernels.kernels import triton as kernels
from preact_kernels.kernels.contract import BlockRun, Conv, Norm, Wanted
from preact_kernels.kernels.triton import block_run, configurations, conv, launch, reduction
from preact_kernels.kernels.triton.bn_relu_conv_backward import BackwardLaunch

DEVICE = torch.device(device_of("triton"))
CASE = ConvCase("case", (3, 20, 9, 7), 24, padding=1, conv_bias=True, residual=True)
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def on_triton(poisoned_memory):
    with pk.use_backend("triton"), DEVICE:
        yield


def call(case=CASE):
    return partial(pk.bn_relu_conv2d, training=True, **case.conv)


def modules_with(name):
    """The kernels' modules that have imported a function of `launch` by name."""
    prefix = "preact_kernels.kernels.triton."
    return [m for n, m in sys.modules.items() if n.startswith(prefix) and hasattr(m, name)]


def replace(monkeypatch, name, function):
    for module in modules_with(name):
        monkeypatch.setattr(module, name, function)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("programs", [1, 2, 7])
def test_any_number_of_programs_merges_right(programs, kernel, monkeypatch):
    replace(monkeypatch, "persistent_programs", lambda x, tiles, *_: min(tiles, programs))
    case = CASE._replace(x=(2, 20, 9, 17), kernel=kernel, padding=kernel // 2)
    plain = partial(plain_bn_relu_conv2d, training=True, **case.conv)
    check(call(case), plain, conv_inputs(case), draws=2)


@pytest.mark.parametrize("kernel", [1, 3])
def test_wide_addresses_change_no_bit(kernel, monkeypatch):
    case = CASE._replace(kernel=kernel, padding=kernel // 2)
    inputs = conv_inputs(case)
    expected = evaluate(call(case), inputs)
    replace(monkeypatch, "needs_int64", lambda *_: True)
    assert_same_bits(evaluate(call(case), inputs), expected)


def test_addresses_are_wide_before_two_to_the_31_elements():
    assert not launch.needs_int64(2**31 - 2**17, 1)
    assert launch.needs_int64(1, 2**31 - 1)


# Blocks of every capability, and both ways to a weight's gradient.
@pytest.mark.covering(2)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "channels", "out_channels"),
    [(1, 16, 64), (1, 256, 40), (1, 64, 256), (3, 16, 16), (3, 64, 32), (3, 17, 60)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_blocks_of_every_gpu(capability, kernel, channels, out_channels, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as is PyTorch's default
    assert configurations.is_fused(
        (out_channels, channels, kernel, kernel), 1, conv.precision(dtype)
    )
    monkeypatch.setattr(launch, "properties", lambda device: launch.Device(capability, 2))
    case = ConvCase(
        "any", (2, channels, 5, 6), out_channels, kernel, padding=kernel // 2, residual=True
    )
    plain = partial(plain_bn_relu_conv2d, training=True, **case.conv)
    check(call(case), plain, conv_inputs(case, dtype))


# 16 channels in half precision: the gradients of x and of the weight in one pass.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["x", "dy"])
def test_padding_takes_no_part_in_the_gradient_of_the_weight(name, dtype):
    x, dy = torch.randn(2, 16, 9, 5), torch.randn(2, 16, 9, 5)
    changed = x if name == "x" else dy
    changed[-1, 3, 0, 0] = torch.inf
    changed[0, 5, -1, -1] = torch.nan
    x, dy = (t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (x, dy))
    norm = Norm(torch.randn(16), torch.rand(16) + 0.5, torch.rand(16), torch.randn(16), 1e-5)
    weight = torch.randn(16, 16, 3, 3).to(dtype)
    padded = Conv((1, 1), (1, 1), (1, 1), 1)
    found = kernels.bn_relu_conv_backward(dy, None, x, norm, weight, padded, Wanted(True, True))
    wide = Norm(*(t.double() for t in norm[:4]), norm.eps)
    a = reference.bn_relu_forward(x.double(), wide)
    expected = weight_gradient_inside_the_image(a, dy.double())
    assert not expected.isfinite().all()
    assert expected.isfinite().any()
    assert torch.equal(found.conv_weight.isnan(), expected.isnan())
    assert torch.equal(found.conv_weight.isinf(), expected.isinf())


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_a_stage_whose_gradients_stay_folded(kind):
    stage = random_stage(kind).to(DEVICE)
    check(stage, plain_copy(stage), {"x": torch.randn(3, 10, 7, 6)}, draws=1)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("depth", "block"), [(11, "bottleneck"), (20, "basic")])
def test_a_network_forward_and_backward(depth, block):
    network = pk.preact_resnet(depth, block=block).to(DEVICE)
    check(network, plain_copy(network), {"x": torch.randn(2, 3, 8, 8)}, draws=1)


@pytest.mark.parametrize("dtype", HALF)
def test_a_stage_in_half_precision_runs_again_to_the_same_bits(dtype):
    stage = in_dtype(random_stage(), dtype).to(DEVICE)
    inputs = {"x": torch.randn(3, 10, 7, 6).to(dtype)}
    expected = evaluate(stage, inputs)
    stage.memory, stage.anchor_every = "checkpoint", 1  # no input is rebuilt
    assert_same_bits(evaluate(stage, inputs), expected)


# 17 channels do not fill vectors. The gradients of weights are cut into groups of two blocks and of
# one.
MEMORY = ({}, {"memory": "rebuild"}, {"memory": "checkpoint", "segments": 2})


def plain_stage(kind="bottleneck", channels=17, blocks=3, **options):
    """Blocks without projections, every batch norm with an eps of its own."""
    width = channels // 4 if kind == "bottleneck" else channels
    if kind == "bottleneck":
        channels = 4 * width
    stage = pk.PreActStage([random_block(kind, channels, width) for _ in range(blocks)], **options)
    norms = [m for m in stage.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for index, bn in enumerate(norms):
        bn.eps = 1e-3 * (index + 1)
    return stage.to(DEVICE), torch.randn(3, channels, 7, 6)


@pytest.fixture(autouse=True)
def no_prepared_launches():
    """Tests replace what launches are built from, so none is reused across tests."""
    block_run._launches.cache_clear()
    yield
    block_run._launches.cache_clear()


@pytest.fixture
def groups_of_two(monkeypatch):
    monkeypatch.setattr(block_run, "_GROUPS", 2)
    monkeypatch.setattr(block_run, "_SMALLEST_GROUP", 1)


@pytest.mark.covering(1)
@pytest.mark.usefixtures("groups_of_two")
@pytest.mark.parametrize("memory", MEMORY, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "dtype", "in_one_pass"),
    [
        ("basic", torch.float32, False),  # no 3x3 convolution of 17 channels is in one pass
        ("basic", torch.bfloat16, False),
        ("bottleneck", torch.float32, True),  # but for its 3x3 convolution
        ("bottleneck", torch.float32, False),
        ("bottleneck", torch.bfloat16, True),
        ("bottleneck", torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize("is_nhwc", [True, False])
def test_a_run_of_blocks_gives_the_bits_of_its_units(
    memory, training, kind, dtype, in_one_pass, is_nhwc, monkeypatch
):
    compare_with_units(memory, kind, training, in_one_pass, dtype, is_nhwc, monkeypatch)


@pytest.mark.usefixtures("groups_of_two")
def test_gradients_of_weights_in_one_pass_are_those_of_their_blocks(monkeypatch):
    compare_with_units({}, "bottleneck", True, True, torch.bfloat16, True, monkeypatch)


def compare_with_units(memory, kind, training, in_one_pass, dtype, is_nhwc, monkeypatch):
    replace(monkeypatch, "costs_less_apart", lambda *_: not in_one_pass)
    stage, x = plain_stage(kind, **memory)
    stage = in_dtype(stage, dtype).train(training)
    if is_nhwc:
        stage = stage.to(memory_format=torch.channels_last)
    inputs = {"x": x.to(dtype)}
    expected = unit_by_unit(evaluate, stage, inputs)
    apart = set()  # numbers of taps
    weight = BackwardLaunch.weight

    def recorded(launch, *args):
        apart.add(launch._geometry.R * launch._geometry.S)
        weight(launch, *args)

    monkeypatch.setattr(BackwardLaunch, "weight", recorded)
    names = ("block_run_forward", "block_run_backward")
    forward, backward = (recorded_calls(kernels, n, monkeypatch) for n in names)
    assert_same_bits(evaluate(stage, inputs), expected)
    assert forward and backward
    if in_one_pass:
        assert apart == ({9} if dtype == torch.float32 else set())
    else:
        assert apart == ({9} if kind == "basic" else {1, 9})


@triton.jit
def sum_exactly_kernel(values, sums, results, COUNT: tl.constexpr):
    """Adds a row of float64 `values [programs, 2, COUNT]`, or reads the sums if there are none."""
    channel = tl.arange(0, 16)
    is_channel = channel < COUNT
    if results is None:
        row = values + tl.program_id(0) * 2 * COUNT + channel
        for i in tl.static_range(2):
            value = tl.load(row + i * COUNT, mask=is_channel, other=0.0)
            reduction.add_exact(sums + i * 6 * COUNT, value, channel, is_channel, COUNT)
    else:
        for i in tl.static_range(2):
            value = reduction.load_exact(sums + i * 6 * COUNT, channel, is_channel, COUNT)
            tl.store(results + i * COUNT + channel, value, mask=is_channel)


def exact_sums(values):
    """The sums over the first axis, and their accumulators."""
    sums = reduction.new_sums(values, values.shape[2])
    sum_exactly_kernel[(len(values),)](values, sums, None, values.shape[2])
    results = torch.empty_like(values[0])
    sum_exactly_kernel[(1,)](values, sums, results, values.shape[2])
    return results, sums


def test_exact_sums_do_not_depend_on_the_order_of_programs():
    exponents = torch.randint(-60, 120, (50, 2, 13), dtype=torch.float64)
    values = torch.randn(50, 2, 13, dtype=torch.float64) * 2.0**exponents
    values = torch.cat([values, -values[:30]])  # what is left is far smaller than what was added
    expected, words = exact_sums(values)
    found, other_words = exact_sums(values[torch.randperm(80)])
    assert torch.equal(words, other_words)
    assert torch.equal(found, expected)
    for index in itertools.product(range(2), range(13)):
        truth = math.fsum(values[(slice(None), *index)].tolist())
        assert abs(found[index].item() - truth) <= 2**-52 * abs(truth)


def test_exact_sums_of_values_of_one_size():
    largest = 2.0**143 - 2.0**90
    values = torch.zeros(800, 2, 4, dtype=torch.float64)
    values[:, 0, 0] = largest
    values[:, 0, 1] = -largest
    values[:99, 0, 2] = 2.0**96 - 2.0**48  # 99 times 48 ones in a word, which float64 does not hold
    values[99, 0, 2] = -99 * 2.0**96
    values[:, 0, 3] = 2.0**-96
    found, _ = exact_sums(values)
    for channel in range(4):
        assert found[0, channel].item() == math.fsum(values[:, 0, channel].tolist())


def test_exact_sums_of_infinities_and_nan():
    values = torch.ones(3, 2, 16, dtype=torch.float64)
    inf, nan = torch.inf, torch.nan
    cases = ((inf, 1, 1), (1, -inf, 1), (inf, -inf, 1), (nan, 1, inf), (2e43, 1, 1), (-1e43, 1, 1))
    for channel, case in enumerate(cases):
        values[:, 0, channel] = torch.tensor(case, dtype=torch.float64)
    found, _ = exact_sums(values)
    expected = [inf, -inf, nan, nan, inf, -1e43]
    torch.testing.assert_close(found[0, :6].tolist(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[0, 6:], torch.full((10,), 3.0, dtype=torch.float64))


def test_statistics_of_large_means():
    deviation = torch.randn(8, 16, 33, 31)
    x = (deviation + 1000).contiguous(memory_format=torch.channels_last)
    mean, var = kernels.bn_stats(x)
    truth = reference.bn_stats(x.double())
    torch.testing.assert_close(mean.double(), truth.mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(var.double(), truth.var, rtol=1e-6, atol=0)


def recorded_launches(monkeypatch):
    """The names of kernels that are launched from here on; none of them runs."""
    found = []

    def record(kernel, grid, args, constants, num_warps, *_):
        # What a launch of a known kernel relies on.
        assert list(constants) == kernel.arg_names[len(args) :]
        assert len(grid) == 3
        found.append(kernel.__name__)

    replace(monkeypatch, "launch_kernel", record)
    return found


class WritingOps(TorchDispatchMode):
    """The names of called operators that write memory: on a GPU, a launch each."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.name():
            self.names.append(function.name())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("in_one_pass", [True, False])
@pytest.mark.parametrize("memory", ["store", "rebuild"])
def test_a_block_takes_three_launches_each_way(memory, in_one_pass, monkeypatch):
    replace(monkeypatch, "costs_less_apart", lambda *_: not in_one_pass)
    monkeypatch.setattr(kernels, "running_stats_update", lambda *_: None)
    counts = {}
    for blocks in (32, 64):
        anchors = {"anchor_every": blocks} if memory == "rebuild" else {}
        stage, x = plain_stage(blocks=blocks, memory=memory, **anchors)
        launched = recorded_launches(monkeypatch)
        with WritingOps() as called:
            y = stage(x.requires_grad_())
            forward, launched[:] = list(launched), []
            y.backward(x)
        counts[blocks] = len(forward), len(launched), called.names
    (forward, backward, ops), (forward2, backward2, ops2) = counts.values()
    assert forward2 - forward == 3 * 32
    rebuilt = 1 if memory == "rebuild" else 0  # the last convolution once more
    assert backward2 - backward == (3 + rebuilt) * 32
    assert ops2 == ops


needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
MANY = CASE._replace(x=(32, 20, 64, 64), kernel=3, padding=1)


@needs_gpu
def test_many_programs_at_once_give_the_same_bits_every_time():
    inputs = conv_inputs(MANY)
    expected = evaluate(call(MANY), inputs)
    for _ in range(20):
        assert_same_bits(evaluate(call(MANY), inputs), expected)


@needs_gpu
def test_streams_do_not_disturb_one_another():
    stage, x = random_stage().to(DEVICE), torch.randn(16, 10, 64, 64)
    expected = stage(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for stream in streams * 5:
        with torch.cuda.stream(stream):
            found.append(stage(x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)


@needs_gpu
def test_a_captured_step_replays_to_the_same_bits():
    stage, x = random_stage().to(DEVICE), torch.randn(16, 10, 64, 64)

    def step():
        y = stage(x)
        return y, *torch.autograd.grad(y.square().sum(), list(stage.parameters()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        for t in found:
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "groups", "fused"),
    [
        ((64, 256, 1, 1), 1, True),
        ((257, 64, 1, 1), 1, False),
        ((64, 64, 3, 3), 1, True),
        ((65, 64, 3, 3), 1, False),
        ((16, 8, 3, 3), 2, False),
        ((16, 16, 5, 5), 1, False),
        ((16, 16, 1, 7), 1, True),
    ],
)
def test_wide_grouped_and_large_convolutions_are_left_to_pytorch(shape, groups, fused):
    assert configurations.is_fused(shape, groups, "tf32") == fused


def test_float32_follows_the_setting_of_pytorch(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert conv.precision(torch.float32) == "tf32"
    assert conv.precision(torch.bfloat16) == "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert conv.precision(torch.float32) == "ieee"
    assert conv.precision(torch.bfloat16) == "tf32"
    assert configurations.is_fused((64, 16, 1, 1), 1, "ieee")
    assert not configurations.is_fused((128, 32, 1, 1), 1, "ieee")


@pytest.mark.parametrize("value", [3.0, 0.1, -1e4])
def test_the_mean_of_a_constant_is_that_constant(value):
    x = torch.full((5, 3, 19, 17), value).contiguous(memory_format=torch.channels_last)
    mean, var = kernels.bn_stats(x)
    assert torch.equal(mean, torch.full((3,), value))
    assert (var.sqrt() <= 1e-7 * abs(value)).all()


@pytest.mark.parametrize(
    ("images", "side", "channels", "out_channels", "kernel", "dy_is_whole", "in_one_pass"),
    [
        (128, 32, 16, 16, 3, False, True),  # 4 programs a multiprocessor
        (64, 32, 16, 16, 3, False, False),
        (128, 32, 16, 16, 3, True, False),  # dy is stored in any case
        (256, 32, 16, 16, 3, True, True),
        (128, 8, 256, 64, 1, False, True),  # 4 columns, and so few programs in each
        (16, 8, 256, 64, 1, False, False),
    ],
)
def test_gradients_of_weights_are_computed_where_they_move_fewer_bytes(
    images, side, channels, out_channels, kernel, dy_is_whole, in_one_pass, monkeypatch
):
    def programs(x, tiles, columns, resident):
        return min(tiles, resident * 132 // columns)

    replace(monkeypatch, "persistent_programs", programs)
    monkeypatch.setattr(launch, "properties", lambda device: launch.Device(90, 132))
    replace(monkeypatch, "_TILES_PER_PROGRAM", 8)
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    shapes = [(images, c, side, side) for c in (channels, out_channels)]
    conv = Conv((1, 1), (kernel // 2, kernel // 2), (1, 1), 1)
    dtypes = configurations.ConvDtypes(*[like.dtype] * 3)
    weight_shape = (out_channels, channels, kernel, kernel)
    found = BackwardLaunch(like, dtypes, *shapes, weight_shape, conv, dy_is_whole=dy_is_whole)
    assert found.in_one_pass == in_one_pass
    # Partial results are written and read; x and dy are read, dy is written where it is not whole.
    partial = 8 * found.weights
    x_bytes, dy_bytes = (2 * math.prod(shape) for shape in shapes)
    apart = x_bytes + (2 - dy_is_whole) * dy_bytes + partial * found.weight_programs
    assert in_one_pass == (partial * found.input_programs <= apart)


def test_a_run_is_compiled_again_only_for_other_kernels(monkeypatch):
    compiled = []
    monkeypatch.setattr(block_run, "compile_only", compiled.append)
    monkeypatch.setattr(block_run, "_compiled_runs", set())
    replace(monkeypatch, "costs_less_apart", lambda *_: False)
    norm, conv = [torch.empty(16, device="meta")] * 2, Conv((1, 1), (1, 1), (1, 1), 1)
    keeps = {"with_stats": False, "keep_inputs": True, "keep_block_inputs": True}

    def is_compiled(images=4, height=5, width=7, blocks=4, dtype=torch.bfloat16):
        weight = torch.empty(16, 16, 3, 3, dtype=dtype, device="meta")
        run = BlockRun([*norm, weight] * 2 * blocks, [1e-5] * 2 * blocks, 2, [conv] * 2)
        x = torch.empty(images, 16, height, width, dtype=dtype, device="meta")
        compiled.clear()
        block_run._compile_ahead(x, run, None, None, keeps)
        return not compiled

    assert not is_compiled()
    assert all(is_compiled(images=n) for n in range(1, 600))
    assert block_run._launches.cache_info().currsize <= 256
    assert is_compiled(height=11, width=3)
    assert not is_compiled(height=16)
    assert not is_compiled(height=1)
    assert not is_compiled(blocks=40)
    assert not is_compiled(dtype=torch.float16)
    replace(monkeypatch, "costs_less_apart", lambda *_: True)
    block_run._launches.cache_clear()
    assert not is_compiled()


def test_properties_of_meta_tensors_are_those_of_the_current_gpu(monkeypatch):
    gpus = {0: (8, 0, 108), 1: (9, 0, 132)}
    names = ("major", "minor", "multi_processor_count")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(**dict(zip(names, gpus[index], strict=True))),
    )
    launch._properties.cache_clear()
    try:
        for index, found in ((0, launch.Device(80, 108)), (1, launch.Device(90, 132))):
            monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
            assert launch.properties(torch.device("meta")) == found
            assert launch.properties(torch.device("cuda")) == found
        assert launch.properties(torch.device("cuda", 0)) == launch.Device(80, 108)
    finally:
        launch._properties.cache_clear()


def test_as_many_kernels_are_compiled_at_once_as_cpus_and_memory_allow(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for gigabytes, count in ((64, 3), (1, 2), (0.1, 1)):
        monkeypatch.setattr(launch, "_available_bytes", lambda n=gigabytes: int(n * 2**30))
        assert launch._parallel_compilations() == count


def test_the_memory_that_is_left_is_found():
    assert 2**20 < launch._available_bytes() < 2**63


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("is_chain", [True, False])
def test_a_profiler_sees_launches_of_known_kernels(name, is_chain, monkeypatch):
    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid):
            return lambda *args, **options: lookups.append(grid) or compiled

    lookups, prepared = [], {}
    compiled = SimpleNamespace(run=lambda *args: None, function=None, packed_metadata=None)
    driver = SimpleNamespace(get_current_stream=lambda device: 0, get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)

    def looked_up():
        lookups.clear()
        launch.launch_kernel(Kernel(), (1, 1, 1), (), {}, 4, prepared)
        return bool(lookups)

    hook = SimpleNamespace(calls=[print]) if is_chain else print
    with monkeypatch.context() as profiled:
        profiled.setattr(triton.knobs.runtime, name, hook)
        assert looked_up()
        assert looked_up()
        assert not prepared
    assert looked_up()
    assert not looked_up()
    monkeypatch.setattr(triton.knobs.runtime, name, hook)
    assert looked_up()


def test_the_arguments_of_a_launch_for_many_blocks_are_few():
    assert [block_run._group(blocks) for blocks in (1, 5, 110, 5000)] == [1, 4, 14, 64]


def test_a_weight_gradient_in_one_pass_keeps_no_tensors_of_its_block():
    weight = torch.randn(16, 16, 1, 1)
    kept = {}
    for in_one_pass in (True, False):
        launch_of_unit = SimpleNamespace(
            in_one_pass=in_one_pass, input_programs=2, weight_programs=2, weights=256
        )
        unit = block_run.UnitOfBlock([weight] * 4, [weight] * 4, [], None, launch_of_unit)
        gradients = block_run._WeightGradients(unit, 4, 4, weight)
        whole, h = torch.randn(2, 16, 3, 3), torch.randn(2, 16, 3, 3)
        alive = weakref.ref(h)
        gradients.add(3, whole, h, Norm(weight, weight, weight, weight, 0.0))
        del h
        kept[in_one_pass] = alive() is not None
    assert kept == {True: False, False: True}
