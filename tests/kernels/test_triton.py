"""Tests of the Triton backend alone: grids, partial results, addresses, choices of blocks."""

import math
import weakref
from contextlib import nullcontext
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
    recorded_calls,
    unit_by_unit,
    unit_of,
)
from tests.oracle import (
    assert_same_bits,
    assert_within_budget,
    check,
    evaluate,
    same_bits,
)

if "triton" not in pk.available_backends():
    pytest.skip("neither a GPU nor the interpreter of Triton", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from preact_kernels.activations import Activation
from preact_kernels.kernels import reference
from preact_kernels.kernels import triton as backend
from preact_kernels.kernels.contract import (
    AffineStep,
    Conv,
    Epilogue,
    Gradient,
    Inputs,
    Norm,
    Wanted,
)
from preact_kernels.kernels.triton import (
    configurations,
    conv,
    launch,
    reduction,
    run_units,
    run_weight_gradients,
)
from preact_kernels.kernels.triton.norm_act_conv_backward import BackwardLaunch
from preact_kernels.kernels.triton.weight_gradient import WeightGradientLaunch
from tests.kernels.compile_triton import replace
from tests.kernels.cuda_conv_cases import LOW_NAN, RoundedOperands, as_tf32
from tests.kernels.op_cases import NORM_OPS, arguments, check_ops, random_images, run

DEVICE = torch.device(device_of("triton"))
kernels = backend.kernels()
CASE = ConvCase("case", (3, 20, 9, 7), 24, padding=1, conv_bias=True, residual=True)


@pytest.fixture(autouse=True)
def on_triton(poisoned_memory):
    with pk.use_backend("triton"), DEVICE:
        yield


def call(case=CASE):
    return partial(pk.bn_relu_conv2d, training=True, **case.conv)


@pytest.mark.parametrize(("programs", "kernel"), [(1, 3), (7, 1)])
def test_any_number_of_programs_merges_right(programs, kernel, monkeypatch):
    replace(monkeypatch, "persistent_programs", lambda device, tiles, *_: min(tiles, programs))
    case = CASE._replace(x=(2, 20, 9, 17), kernel=kernel, padding=kernel // 2)
    plain = partial(plain_bn_relu_conv2d, training=True, **case.conv)
    check(call(case), plain, conv_inputs(case), draws=1)


def test_wide_addresses_change_no_bit(monkeypatch):
    assert not launch.needs_int64(2**31 - 2**17, 1)
    assert launch.needs_int64(1, 2**31 - 1)
    inputs = conv_inputs(CASE)
    expected = evaluate(call(), inputs)
    replace(monkeypatch, "needs_int64", lambda *_: True)
    assert_same_bits(evaluate(call(), inputs), expected)


@pytest.mark.parametrize(
    ("capability", "kernel", "channels", "out_channels", "dtype"),
    [
        (90, 1, 16, 160, torch.bfloat16),  # gradients in one pass, of two blocks of channels
        (90, 1, 256, 40, torch.bfloat16),  # several blocks of input channels
        (100, 1, 64, 256, torch.float32),  # several blocks of output channels
        (80, 3, 17, 60, torch.bfloat16),
        (90, 3, 16, 16, torch.bfloat16),  # gradients in one pass
        (90, 3, 24, 32, torch.bfloat16),  # and with products of fewer taps
        (80, 2, 16, 24, torch.float16),
        (90, 3, 32, 24, torch.float32),
        (100, 3, 64, 32, torch.float32),
    ],
)
def test_the_blocks_of_every_gpu(capability, kernel, channels, out_channels, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as is PyTorch's default
    weight_shape = out_channels, channels, kernel, kernel
    assert not configurations.conv_refusal(weight_shape, 1, conv.precision(dtype))
    replace(monkeypatch, "properties", lambda device: launch.Device(capability, 2, 227 * 1024))
    replace(monkeypatch, "costs_less_apart", lambda *_: False)
    case = ConvCase(
        "any", (2, channels, 5, 6), out_channels, kernel, padding=kernel // 2, residual=True
    )
    plain = partial(plain_bn_relu_conv2d, training=True, **case.conv)
    # On a GPU some of PyTorch's convolutions round to TF32; in the interpreter nothing does.
    with RoundedOperands() if DEVICE.type == "cuda" else nullcontext():
        check(call(case), plain, conv_inputs(case, dtype), draws=1)


@triton.jit
def round_kernel(x, rounded, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(rounded + index, conv.round_to_tf32(tl.load(x + index)))


def test_operands_are_rounded_to_the_nearest_tf32_and_nan_stays_nan():
    special = [0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0x7F7FFFFF, 0x7F800000, 1, 0]
    special += [LOW_NAN, 0x7FC00000, 0x7FFFFFFF]
    special = torch.tensor(special, dtype=torch.int32).view(torch.float32)
    x = torch.cat([special, -special, torch.randn(256 - 2 * len(special))])
    rounded = torch.empty_like(x)
    round_kernel[1,](x, rounded, COUNT=256)
    assert same_bits(rounded[~x.isnan()], as_tf32(x)[~x.isnan()])
    cut = (rounded.view(torch.int32) & ~0x1FFF).view(torch.float32)  # as tensor cores read it
    assert torch.equal(cut.isnan(), x.isnan())


def random_norm(channels):
    mean, weight, bias = torch.randn(3, channels)
    return Norm(mean, torch.rand(channels) + 0.5, weight, bias, 1e-5)


def tensors_by_name(results):
    """The tensors of a named tuple."""
    return {n: t for n, t in results._asdict().items() if isinstance(t, torch.Tensor)}


@pytest.mark.parametrize(
    ("channels", "out_channels", "kernel", "padding", "dtype"),
    [
        (16, 256, 1, 0, torch.bfloat16),  # several blocks of output channels, in one pass
        (64, 256, 1, 0, torch.float32),  # and apart
        (16, 24, 3, 2, torch.float32),
        (16, 12, 3, 2, torch.bfloat16),  # in one pass
        (32, 24, 3, 1, torch.bfloat16),
    ],
)
def test_a_deferred_step_gives_the_bits_of_the_whole_gradient(
    channels, out_channels, kernel, padding, dtype, monkeypatch
):
    replace(monkeypatch, "costs_less_apart", lambda *_: False)

    def image(channels, *size):
        return torch.randn(2, channels, *size).to(dtype, memory_format=torch.channels_last)

    weight = torch.randn(out_channels, channels, kernel, kernel).to(dtype)
    unit = unit_of(weight, Conv((1, 1), (padding, padding), (1, 1), 1), dtype)
    x = image(channels, 5, 6)
    g, skip, z = (image(*unit.conv.output_shape(x.shape, weight.shape)[1:]) for _ in range(3))
    rest = Inputs(x, random_norm(channels), weight), Wanted(True, True, dy=True)
    sums = torch.randn(2, out_channels)
    dy = Gradient(g, AffineStep(skip, z, random_norm(out_channels), sums, 0.1))
    whole = Gradient(kernels.norm_input_gradient(dy))
    found = kernels.norm_act_conv_backward(unit, dy, *rest)
    expected = kernels.norm_act_conv_backward(unit, whole, *rest)
    assert_same_bits(tensors_by_name(found), tensors_by_name(expected))


def plain_stage(kind="bottleneck", channels=17, blocks=3, **options):
    """Blocks without projections. The batch norms of a block have different eps."""
    width = channels // 4 if kind == "bottleneck" else channels
    if kind == "bottleneck":
        channels = 4 * width
    stage = pk.PreActStage([random_block(kind, channels, width) for _ in range(blocks)], **options)
    for block in stage:
        for index, (bn, _) in enumerate(block.units()):
            bn.eps = 1e-3 * (index + 1)
    return stage.to(DEVICE), torch.randn(2, channels, 3, 5)


@pytest.fixture(autouse=True)
def no_prepared_launches():
    """Tests replace what launches are built from, so none is reused across tests."""
    run_units._launches.cache_clear()
    yield
    run_units._launches.cache_clear()


STREAM = {"residual_dtype": torch.float32}


# 17 channels do not fill vectors, and no 3x3 convolution of 17 channels is in one pass, nor one in
# float32. Apart: the numbers of taps of convolutions with a separate launch for the weight.
@pytest.mark.parametrize(
    ("kind", "dtype", "memory", "training", "is_nhwc", "in_one_pass", "apart"),
    [
        ("basic", torch.bfloat16, {"memory": "rebuild", "blocks": 2}, False, True, False, {9}),
        # The inputs of the first and third block are kept.
        (
            *("bottleneck", torch.float32, {"memory": "rebuild", "anchor_every": 2}),
            *(True, True, True, {9}),
        ),
        ("bottleneck", torch.bfloat16, {}, True, True, True, set()),
        (
            *("bottleneck", torch.bfloat16, {"memory": "checkpoint", "segments": 2} | STREAM),
            *(True, False, False, {1, 9}),
        ),
    ],
)
def test_a_run_of_blocks_gives_the_bits_of_its_units(
    kind, dtype, memory, training, is_nhwc, in_one_pass, apart, monkeypatch
):
    replace(monkeypatch, "costs_less_apart", lambda *_: not in_one_pass)
    # Gradients of weights of three blocks are cut into groups of two and of one.
    monkeypatch.setattr(run_weight_gradients, "_MOST_GROUPS", 2)
    monkeypatch.setattr(run_weight_gradients, "_SMALLEST_GROUP", 1)
    stage, x = plain_stage(kind, **memory)
    stage = in_dtype(stage, dtype).train(training)
    if is_nhwc:
        stage = stage.to(memory_format=torch.channels_last)
    inputs = {"x": x.to(dtype)}
    expected = unit_by_unit(evaluate, stage, inputs)
    found_apart = set()
    launch_weight = WeightGradientLaunch.__call__

    def recorded(launch, *args):
        found_apart.add(math.prod(launch.unit.weight_shape[2:]))
        launch_weight(launch, *args)

    monkeypatch.setattr(WeightGradientLaunch, "__call__", recorded)
    names = ("block_run_forward", "block_run_backward")
    calls = [recorded_calls(kernels, name, monkeypatch) for name in names]
    assert_same_bits(evaluate(stage, inputs), expected)
    assert [len(c) for c in calls] == ([4, 2] if "segments" in memory else [1, 1])
    assert found_apart == apart


def test_a_run_may_begin_with_an_input_that_is_rebuilt_and_end_with_one_that_is_kept(monkeypatch):
    stage, x = plain_stage("basic", 8, memory="rebuild", anchor_every=2, blocks=4)
    frozen = ["0.bn1.weight", "3.bn1.weight"]
    expected = unit_by_unit(evaluate, stage, {"x": x}, frozen=frozen)
    calls = recorded_calls(kernels, "block_run_backward", monkeypatch)
    assert_same_bits(evaluate(stage, {"x": x}, frozen=frozen), expected)
    ((_, _, inputs, y),) = calls
    assert [t is not None for t in inputs[::2]] == [False, True]
    assert y is None


class WritingOps(TorchDispatchMode):
    """The names of called operators that write memory: on a GPU, a launch each."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.name():
            self.names.append(function.name())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("memory", "in_one_pass"), [("store", True), ("rebuild", False)])
def test_launches_of_a_block(memory, in_one_pass, monkeypatch):
    replace(monkeypatch, "costs_less_apart", lambda *_: not in_one_pass)
    launched = []  # names of kernels, none of which runs
    replace(monkeypatch, "launch_kernel", lambda kernel, *_: launched.append(kernel.__name__))
    monkeypatch.setattr(kernels, "running_stats_update", lambda *_: None)
    counts = {}
    for blocks in (32, 64):
        anchors = {"anchor_every": blocks} if memory == "rebuild" else {}
        stage, x = plain_stage(blocks=blocks, memory=memory, **anchors)
        launched.clear()
        with WritingOps() as called:
            y = stage(x.requires_grad_())
            forward = len(launched)
            y.backward(x)
        counts[blocks] = forward, len(launched) - forward, called.names
    (forward, backward, ops), (forward2, backward2, ops2) = counts.values()
    assert forward2 - forward == 3 * 32
    rebuilt = 1 if memory == "rebuild" else 0  # the last convolution once more
    # Three units, and the whole dy of the convolution over several taps.
    assert backward2 - backward == (3 + 1 + rebuilt) * 32
    assert ops2 == ops


@pytest.mark.parametrize("rows", [False, True])
def test_statistics_and_sums_take_two_launches_and_no_fill(rows, monkeypatch):
    launched = []  # names of kernels, none of which runs
    replace(monkeypatch, "launch_kernel", lambda kernel, *_: launched.append(kernel.__name__))
    size = (2, 16) if rows else (16,)
    norm = Norm(*torch.ones(4, *size), 1e-5)

    def launches_of(op, x):
        launched.clear()
        with WritingOps() as called:
            op(x)
        return len(launched) + len(called.names)

    def images(side):
        return random_images((2, 16, side, side), torch.float32)

    for side, of_sums in ((80, 2), (4, 1)):  # of several programs, and of one
        x = images(side)
        assert launches_of(lambda x: kernels.norm_act_backward(x, x, norm, True), x) == of_sums
        assert launches_of(lambda x: kernels.norm_act_recompute(x, x, norm), x) == of_sums
        assert launches_of(lambda x: kernels.group_stats(x, 4), x) == 2
        assert launches_of(kernels.bn_stats, x) == 2
        assert launches_of(lambda x: kernels.residual_add_forward(x, x, True), x) == 2


def within_float32(found, truth, ulps):
    error = (found.double() - truth).abs()
    return bool((error <= ulps * 2.0**-24 * truth.abs().clamp(min=1)).all())


@pytest.mark.parametrize("op", ["bn_stats", "group_stats", "residual_add_forward"])
def test_statistics_of_programs_with_many_tiles(op, monkeypatch):
    """The first pixels of each program are far from its mean, which is large."""
    monkeypatch.setattr(configurations, "MAX_IMAGE_PROGRAMS", 2)
    replace(monkeypatch, "persistent_programs", lambda *_: 2)
    x = random_images((1, 16, 256, 128), torch.float32) + 1000
    x.flatten(2)[..., :200] = x.flatten(2)[..., 16384:16600] = 0
    if op == "residual_add_forward":
        branch = torch.ones_like(x)
        y, found = kernels.residual_add_forward(x, branch, True)
        assert same_bits(y, x + branch)
    else:
        found, y = getattr(kernels, op)(x, *[4] * (op == "group_stats")), x
    mean, var = reference.group_stats(y.double(), 4 if op == "group_stats" else 16)
    assert within_float32(found.mean.view(-1), mean.view(-1), 2)
    assert within_float32(found.var.view(-1), var.view(-1), 8)


def test_partial_results_of_many_programs_are_merged(monkeypatch):
    monkeypatch.setattr(configurations, "MIN_IMAGE_TILES", 1)
    shape = (2, 64, 67, 67)
    given = arguments(shape, torch.bfloat16, rows="mean var", activation="silu")
    launch_of = launch.reducing_launch(given.x, by_image=True).launch
    assert launch_of.programs * 64 > 2 * 2048  # several tiles of the merge
    mean, var = kernels.group_stats(given.x, 1)
    true_mean, true_var = reference.group_stats(given.x.double(), 1)
    assert within_float32(mean, true_mean, 4)
    assert within_float32(var, true_var, 4)
    check_ops(given, ("norm_act_backward", "norm_act_recompute"), kernels)


def test_tiles_fit_the_image_and_the_device():
    for channels, itemsize, images, pixels, multiprocessors, expected in (
        (128, 2, 128, 1024, 132, (32, 128)),  # 64 bytes a thread
        (128, 4, 128, 1024, 132, (16, 128)),
        (128, 2, 1, 4096, 132, (8, 128)),  # few programs
        (128, 2, 4096, 9, 132, (16, 128)),  # small images
        (17, 2, 1, 1 << 20, 132, (128, 32)),
    ):
        found = configurations.elementwise(channels, itemsize, images, pixels, multiprocessors)
        assert found[:2] == expected
    assert configurations.tiles_of_program(8, 1) == configurations.MIN_IMAGE_TILES
    assert configurations.tiles_of_program(65536, 4) == 1024


def tensors_of(arguments):
    """The tensors of the arguments of a kernel, which may be nested."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_of(argument)


def test_kernels_that_add_up_pixels_take_images_that_begin_at_multiples_of_16_bytes(monkeypatch):
    launched = {}  # images by name of the kernel, none of which runs

    def record(kernel, grid, arguments, *_):
        images = [t for t in tensors_of(arguments) if t.numel() >= 2 * 16 * 5 * 7]
        launched.setdefault(kernel.__name__, []).extend(images)

    def image():
        return torch.randn(1 + 2 * 5 * 7 * 16)[1:].view(2, 5, 7, 16).permute(0, 3, 1, 2)

    replace(monkeypatch, "launch_kernel", record)
    weight = torch.randn(16, 16, 1, 1)
    unit = unit_of(weight, Conv((1, 1), (0, 0), (1, 1), 1))
    norm, with_rows = random_norm(16), Norm(*torch.ones(4, 2, 16), 1e-5)
    inputs = Inputs(image(), norm, weight)
    step = AffineStep(image(), image(), norm, torch.zeros(2, 16), 0.1)
    assert image().data_ptr() % 16
    kernels.bn_stats(image())
    kernels.group_stats(image(), 4)
    kernels.residual_add_forward(image(), image(), True)
    kernels.norm_act_backward(image(), image(), norm, True)
    kernels.norm_act_backward(image(), image(), with_rows, True)
    for given in (norm, with_rows):
        kernels.norm_act_backward(image(), image(), given, True, image())
    kernels.norm_act_conv_forward(unit, inputs, Epilogue(None, image(), True))
    kernels.norm_act_conv_backward(unit, Gradient(image(), step), inputs, Wanted(True, True))
    counts = {name: len(images) for name, images in launched.items()}
    assert counts["moments_kernel"] == 5
    assert counts["norm_act_conv_forward_kernel"] == 3
    assert not [n for n, images in launched.items() if any(t.data_ptr() % 16 for t in images)]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
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


def test_wide_grouped_and_large_convolutions_are_left_to_pytorch(monkeypatch):
    fused = {
        ((64, 256, 1, 1), 1, "tf32"): True,
        ((257, 64, 1, 1), 1, "tf32"): False,
        ((64, 64, 3, 3), 1, "tf32"): True,
        ((65, 64, 3, 3), 1, "tf32"): False,
        ((16, 8, 3, 3), 2, "tf32"): False,
        ((16, 16, 5, 5), 1, "tf32"): False,
        ((16, 16, 1, 7), 1, "tf32"): True,
        ((64, 16, 1, 1), 1, "ieee"): True,
        ((128, 32, 1, 1), 1, "ieee"): False,
    }
    assert {case: not configurations.conv_refusal(*case) for case in fused} == fused
    for is_allowed, of_float32 in ((True, "tf32"), (False, "ieee")):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", is_allowed)
        assert conv.precision(torch.float32) == of_float32
        assert conv.precision(torch.bfloat16) == "tf32"


@pytest.mark.parametrize(
    ("images", "side", "channels", "out_channels", "kernel", "dy_is_whole", "in_one_pass"),
    [
        (128, 32, 16, 16, 3, False, True),  # 4 programs a multiprocessor
        (16, 32, 16, 16, 3, True, False),
        (128, 8, 256, 64, 1, False, True),  # 4 columns, and so few programs in each
        (16, 8, 256, 64, 1, False, False),
    ],
)
def test_gradients_of_weights_are_computed_where_they_move_fewer_bytes(
    images, side, channels, out_channels, kernel, dy_is_whole, in_one_pass, monkeypatch
):
    def programs(device, tiles, columns, resident):
        return min(tiles, resident * 132 // columns)

    replace(monkeypatch, "persistent_programs", programs)
    replace(monkeypatch, "properties", lambda device: launch.Device(90, 132, 227 * 1024))
    replace(monkeypatch, "_TILES_PER_PROGRAM", 8)
    weight = torch.empty(out_channels, channels, kernel, kernel, dtype=torch.bfloat16)
    geometry = Conv((1, 1), (kernel // 2, kernel // 2), (1, 1), 1)
    unit = unit_of(weight, geometry, torch.bfloat16)
    shapes = [(images, c, side, side) for c in (channels, out_channels)]
    sizes = conv.unit_sizes(unit, shapes[0])
    found = BackwardLaunch(sizes, Wanted(True, True), dy_is_whole)
    assert found.in_one_pass == in_one_pass
    assert not BackwardLaunch(sizes, Wanted(True, False), dy_is_whole).in_one_pass


def test_tiles_are_small_where_large_ones_leave_multiprocessors_idle():
    device = launch.Device(90, 132, 227 * 1024)
    config = configurations.ConvTiles(128, 64, 64, 8, 1, 3)
    small = config._replace(tile_pixels=64)
    for pixels, columns, expected in ((131 * 128, 1, small), (131 * 128 + 1, 1, config)):
        assert configurations.filling(config, device, pixels, columns) == expected
    assert configurations.filling(config, device, 66 * 128, 2) == config
    assert configurations.filling(small, device, 64, 1) == small


def test_properties_are_those_of_the_device(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    gpu = {"multi_processor_count": 84, "shared_memory_per_block_optin": 101376}
    gpu = SimpleNamespace(major=8, minor=6, **gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {torch.device("cuda", 0): gpu}.get)
    found = launch.properties.__wrapped__(torch.device("cuda", 0))
    assert found == launch.Device(capability=86, multiprocessors=84, shared_bytes=101376)


@pytest.mark.parametrize(
    ("name", "is_chain"), [("launch_enter_hook", True), ("launch_exit_hook", False)]
)
def test_a_profiler_sees_launches_of_known_kernels(name, is_chain, monkeypatch):
    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid):
            return lambda *args, **options: lookups.append(grid) or compiled

    lookups, prepared = [], {}
    compiled = SimpleNamespace(run=lambda *args: None, function=None, packed_metadata=None)
    driver = SimpleNamespace(
        get_current_stream=lambda device: 0,
        get_current_device=lambda: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
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
    sizes = [run_weight_gradients.group_size(blocks, 1) for blocks in (1, 5, 110, 5000)]
    assert sizes == [1, 4, 14, 64]


@pytest.mark.parametrize(
    ("memory", "in_one_pass", "limit"),
    [
        ("store", True, 1200),
        ("store", False, 6000),
        ("rebuild", False, 6000),
        ("rebuild", False, 1),  # less than of one block
    ],
)
def test_weight_gradients_of_a_run_hold_as_many_blocks_as_the_limit_allows(
    memory, in_one_pass, limit, monkeypatch
):
    replace(monkeypatch, "costs_less_apart", lambda *_: not in_one_pass)
    replace(monkeypatch, "launch_kernel", lambda *_: None)
    monkeypatch.setattr(run_weight_gradients, "_MOST_GROUPS", 1)
    monkeypatch.setattr(run_weight_gradients, "_MOST_BYTES", limit)
    stage, x = plain_stage(blocks=5, memory=memory)
    first = stage[0].conv1.weight.shape  # of the unit whose input is rebuilt
    read: dict = {}  # bytes of a block that its launch alone keeps alive, by shape of the weight
    groups: dict = {}  # blocks of each group, and bytes of a block
    launch_weight, launch_sums = WeightGradientLaunch.__call__, reduction.launch_sum_partials

    def recorded_weight(launch, units, *args):
        dy, h, _ = units[0]
        shape = launch.unit.weight_shape
        read[shape] = dy.nbytes + (h.nbytes if memory == "rebuild" and shape == first else 0)
        launch_weight(launch, units, *args)

    def recorded_sums(partials, results, prepared):
        shape = results.shape[1:]
        block_bytes = partials[0].nbytes + read.get(shape, 0)
        groups.setdefault((shape, block_bytes), []).append(len(partials))
        launch_sums(partials, results, prepared)

    monkeypatch.setattr(WeightGradientLaunch, "__call__", recorded_weight)
    replace(monkeypatch, "launch_sum_partials", recorded_sums)
    evaluate(stage, {"x": x})
    assert len(groups) == 3
    for (_, block_bytes), sizes in groups.items():
        assert max(sizes) == min(5, max(1, limit // block_bytes))
    assert any(len(sizes) > 1 for sizes in groups.values())


def test_sums_of_an_image_have_one_order_in_every_batch(monkeypatch):
    found = []
    monkeypatch.setattr(reduction, "INTERPRETED", False)  # it has other tiles
    monkeypatch.setattr(reduction, "launch_kernel", lambda *given: found.append(given[3]))
    for images in (1, 64):
        sums = torch.empty(1, 2 * images, 128, 1, 1)
        reduction.launch_sum_partials(torch.empty(1, 256, 2 * images * 128), sums, of_image=256)
    assert found[0] == found[1]


def test_a_weight_gradient_in_one_pass_keeps_no_tensors_of_its_block():
    weight = torch.randn(16, 16, 1, 1)
    kept = {}
    for in_one_pass in (True, False):
        sizes = SimpleNamespace(x_bytes=0, y_bytes=0)
        backward = SimpleNamespace(in_one_pass=in_one_pass, programs=2, sizes=sizes)
        unit = SimpleNamespace(conv_weights=[weight] * 4, backward=backward)
        gradients = run_weight_gradients.RunWeightGradients(unit, 4, weight, False)
        whole, h = torch.randn(2, 16, 3, 3), torch.randn(2, 16, 3, 3)
        alive = weakref.ref(h)
        gradients.add(3, whole, h, Norm(weight, weight, weight, weight, 0.0))
        del h
        kept[in_one_pass] = alive() is not None
    assert kept == {True: False, False: True}


@pytest.mark.parametrize("rows", [False, True])
def test_pixels_beyond_an_image_take_no_part_in_sums(rows):
    """There, and only there, p is so large that its gradient is not a number."""
    size = (2, 3) if rows else (3,)
    mean, one = torch.full(size, 1e20), torch.ones(size)
    norm = Norm(mean, one, one, one, 0.0, "gelu_tanh")
    dy = random_images((2, 3, 5, 1), torch.float32)
    x = torch.full_like(dy, 1e20)
    g, sums = kernels.norm_act_backward(dy, x, norm, True)
    torch.testing.assert_close(sums[0], g.sum((2, 3) if rows else (0, 2, 3)))


def test_wide_addresses_change_no_bit_of_images(monkeypatch):
    given = arguments((2, 10, 9, 17), torch.float32, rows="mean var bias", activation="silu")

    def results():
        found = kernels.group_stats(given.x, 5)._asdict()
        for op in NORM_OPS:
            found |= run(kernels, op, given)
        return found

    expected = results()
    replace(monkeypatch, "needs_int64", lambda *_: True)
    assert_same_bits(results(), expected)


@pytest.mark.parametrize("activation", [Activation("leaky_relu", 0.2), Activation("identity")])
@pytest.mark.parametrize(("kernel", "in_one_pass"), [(1, True), (3, False)])
def test_fused_convolutions_of_other_activations(activation, kernel, in_one_pass, monkeypatch):
    replace(monkeypatch, "costs_less_apart", lambda *_: not in_one_pass)
    given = arguments((2, 10, 9, 5), torch.float32)
    dy, weight = random_images((2, 20, 9, 5), torch.float32), torch.randn(20, 10, kernel, kernel)
    geometry = Conv((1, 1), (kernel // 2, kernel // 2), (1, 1), 1)

    def results(k, dtype):
        norm = Norm(*given.to(dtype).norm[:5], *activation)
        unit = unit_of(weight.to(dtype), geometry)._replace(activation=activation)
        inputs = Inputs(given.x.to(dtype), norm, weight.to(dtype))
        gradients = k.norm_act_conv_backward(
            unit, Gradient(dy.to(dtype)), inputs, Wanted(True, True)
        )
        y = k.norm_act_conv_forward(unit, inputs).y
        return {"y": y, **tensors_by_name(gradients)}

    plain = reference.kernels()
    truth, eager = results(plain, torch.float64), results(plain, torch.float32)
    errors = {name: float((t.double() - truth[name]).norm()) for name, t in eager.items()}
    assert_within_budget(results(kernels, torch.float32), truth, errors)


def test_which_activations_a_fused_convolution_serves():
    weight = torch.empty(20, 10, 1, 1)
    unit = unit_of(weight, Conv((1, 1), (0, 0), (1, 1), 1))
    for name, is_served in (("leaky_relu", True), ("identity", True), ("silu", False)):
        assert (not kernels.refusal(unit._replace(activation=Activation(name)))) == is_served
    assert kernels.refusal(unit._replace(has_rows=True)).startswith("norm: ")
