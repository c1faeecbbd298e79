"""The report of `tests/kernels/compile_triton.py` finds the faults that it is there to find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def lines_of(*command):
    """What a Python process prints, in which Triton compiles."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()


# Compiles ahead of a run of three blocks, and then runs it.
RUN = """
import torch, triton
from triton.backends.compiler import GPUTarget
from preact_kernels.kernels import triton as kernels
from preact_kernels.kernels.contract import BatchStatistics, BlockRun, Conv
from preact_kernels.kernels.triton import block_run, launch
from tests.kernels import compile_triton

class Driver(compile_triton.Driver):
    def get_current_device(self):
        return 0

triton.runtime.driver.set_active(Driver(GPUTarget("cuda", 90, 32)))
launch.properties = lambda device: launch.Device(90, 132)
norm = compile_triton.empty_norm(16)
weight = torch.empty(16, 16, 3, 3, dtype=torch.bfloat16, device="meta")
conv = Conv((1, 1), (1, 1), (1, 1), 1)
run = BlockRun([norm.weight, norm.bias, weight] * 6, [1e-5] * 6, 2, [conv] * 2, torch.bfloat16)
x = compile_triton.images(16, torch.STREAM, 7)
statistics = BatchStatistics(*norm[:2])
keeps = {"with_stats": WITH_STATS, "keep_inputs": True, "keep_block_inputs": KEPT}
block_run._compile_ahead(x, run, statistics, None, keeps)

def launch_kernel(kernel, grid, args, constants, num_warps, *_):
    caches = kernel.device_caches[0][0]
    before = len(caches)
    kernel.warmup(*args, grid=grid, **constants, num_warps=num_warps)
    print(kernel.__name__, "is new" if len(caches) > before else "was compiled")

compile_triton.replace_everywhere("launch_kernel", launch_kernel)
x = x[:IMAGES]
before = set(block_run._compiled_runs)
block_run._compile_ahead(x, run, statistics, None, keeps)
assert block_run._compiled_runs == before
y, _, found, inputs = kernels.block_run_forward(x, run, statistics, None, **keeps)
fold = None if FOLDED is None else compile_triton.folds(x if FOLDED else None, x)[0]
dy = x if fold is None else x.to(torch.bfloat16)
kernels.block_run_backward(dy, fold, run, inputs, found, 0.5, None if KEPT else y)
"""


# Folded: None, or whether the fold has a skip.
@pytest.mark.parametrize(
    ("kept", "images", "folded", "stream"),
    [
        (True, 128, None, "bfloat16"),
        (False, 127, None, "bfloat16"),
        (True, 127, True, "bfloat16"),
        (True, 128, False, "bfloat16"),
        (True, 128, True, "float32"),
        (True, 128, None, "float32"),  # in front of a block with a projection
    ],
)
def test_a_run_compiles_its_kernels_ahead_for_any_number_of_images(kept, images, folded, stream):
    text = RUN.replace("KEPT", str(kept)).replace("IMAGES", str(images)).replace("STREAM", stream)
    with_stats = folded is not None or stream == "float32"
    text = text.replace("WITH_STATS", str(with_stats)).replace("FOLDED", str(folded))
    found = lines_of("-c", text)
    assert len(found) > 12
    assert all(line.endswith("was compiled") for line in found)


# Runs blocks with a stand-in for what starts a compiled kernel.
REPEATED = (
    RUN[: RUN.index("keeps =")].replace("STREAM", "bfloat16")
    + """
import functools
from triton.compiler import CompiledKernel

lookups, starts = [], []
find = triton.runtime.jit.JITFunction.run
triton.runtime.jit.JITFunction.run = lambda *a, **k: (lookups.append(a), find(*a, **k))[1]

def start(compiled, *args):
    assert len(args) == 9 + len(compiled.src.fn.arg_names)
    starts.append(compiled)

CompiledKernel.run = property(lambda self: functools.partial(start, self))
CompiledKernel._init_handles = lambda self: None
CompiledKernel.function = None
for blocks in (32, 64, 64, 32):
    lookups.clear(), starts.clear()
    many = run._replace(parameters=run.parameters[:6] * blocks, eps=[1e-5] * 2 * blocks)
    keeps = {"with_stats": False, "keep_inputs": True, "keep_block_inputs": True}
    y, _, found, inputs = kernels.block_run_forward(x, many, statistics, None, **keeps)
    kernels.block_run_backward(x, None, many, inputs, found, 0.5, None)
    print(len(lookups), len(starts))
"""
)


def test_runs_look_up_each_kernel_once():
    lookups, starts = zip(
        *(map(int, line.split()) for line in lines_of("-c", REPEATED)), strict=True
    )
    assert lookups[0] < 20
    assert lookups[1] < lookups[0]  # some launches are for a number of blocks
    assert lookups[2:] == (0, 0)
    of_32, of_64, *again = starts
    assert of_64 - of_32 == 32 * (2 + 2)
    assert again == [of_64, of_32]


# Runs blocks whose tensors begin at any address, and says which launches from `prepared` Triton
# would give another kernel, grid or stream. Prints the kernels that were launched so.
REUSED = """
import inspect, random, torch, triton, weakref
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from preact_kernels.kernels.contract import BatchStatistics, BlockRun, Conv, Fold, Norm
from preact_kernels.kernels.triton import block_run, conv, launch, packing
from tests.kernels import compile_triton

class Driver(compile_triton.Driver):
    stream = 0

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return Driver.stream

triton.runtime.driver.set_active(Driver(GPUTarget("cuda", 90, 32)))
launch.properties = lambda device: launch.Device(90, 132)
compile_triton.replace_everywhere("costs_less_apart", lambda *_: IS_APART)
any_offset = random.Random(0)
reused, lookups = set(), []

def chosen(kernel, grid, args, constants, num_warps, *_):
    debug = triton.knobs.runtime.debug
    binder = kernel.device_caches[0][-1]
    _, types, _ = binder(*args, **constants, num_warps=num_warps, debug=debug)
    choice = {"kernel": kernel, "grid": grid, "warps": num_warps}
    choice |= {"stream": Driver.stream, "debug": debug}
    return choice | dict(zip(kernel.arg_names, types, strict=True))

last_request, precisions = [], []  # what `launch_kernel` was asked for
real_launch_kernel = launch.launch_kernel

def launch_kernel(*request):
    last_request[:] = request
    if request[3].get("PRECISION", precisions[-1]) != precisions[-1]:
        print(request[0].__name__, "has another precision than", precisions[-1])
    real_launch_kernel(*request)

compile_triton.replace_everywhere("launch_kernel", launch_kernel)

class Compiled:
    function = packed_metadata = None

    def __init__(self):
        self.choice = chosen(*last_request)

    @property
    def run(self):
        alive = weakref.ref(self)  # as Triton's: what starts a kernel does not keep its code

        def start(*args):
            kernel, grid, requested, constants, *_ = last_request
            reused.add(kernel.__name__)
            if alive() is None:
                return print(kernel.__name__, "is gone")
            choice = chosen(*last_request)
            for name, value in alive().choice.items():
                if choice.get(name) != value:
                    print(kernel.__name__, name, value, choice.get(name))
            requested = (*requested, *constants.values())
            are_those = len(args) == 9 + len(requested) and args[:4] == (*grid, Driver.stream)
            if not are_those or any(a is not b for a, b in zip(args[9:], requested)):
                print(kernel.__name__, "is started with other arguments")

        return start

def look_up(kernel, *args, **options):
    lookups.append(kernel)
    return Compiled()

JITFunction.run = look_up

def at_any_address(shape, dtype=torch.float32):
    whole = torch.empty(torch.Size(shape).numel() + 1, dtype=dtype)
    return whole[any_offset.randrange(2) :][: whole.numel() - 1].view(shape)

def run_once(blocks, sides, is_nhwc=True, weight_dtype=torch.bfloat16, dtype=torch.bfloat16,
             stream=None, groups=(None,)):
    def image(channels, dtype=stream or dtype):
        return at_any_address((3, 5, 1, channels), dtype).permute(0, 3, 1, 2)

    def folded(skip):
        norm = Norm(*(at_any_address((20,)) for _ in range(3)), None, 1)
        return Fold(skip, image(20), norm, at_any_address((2, 20)), 0.5)

    precisions.append(conv.precision(dtype))
    parameters, inputs, known = [], [], []
    for index, (out_channels, in_channels, side) in enumerate(blocks * sides):
        weight = at_any_address((out_channels, side, side, in_channels), weight_dtype)
        weight = weight.permute(0, 3, 1, 2)
        parameters += [at_any_address((in_channels,)), at_any_address((in_channels,))]
        parameters.append(weight if is_nhwc else weight.contiguous())
        inputs.append(image(in_channels, *[] if index % len(sides) == 0 else [dtype]))
        known += [at_any_address((in_channels,)) for _ in range(2)]
    convs = [Conv((1, 1), (side // 2, side // 2), (1, 1), 1) for *_, side in sides]
    eps = [1, *[1e-5] * (len(inputs) - 1)]
    run = BlockRun(parameters, eps, len(sides), convs, dtype)
    for statistics in (None, known):
        for with_stats in (True, False):
            first = BatchStatistics(*known[:2])
            block_run._forward(image(20), run, first, statistics, with_stats, True, True)
    for fold, y, inv_count in (
        (None, None, 0.5),
        (None, image(20), 0.5),
        (None, None, 0.0),
        *((folded(skip), None, 0.5) for skip in (image(20), None, image(20), None)),
    ):
        dy = image(20) if fold is None else image(20, dtype)
        for group in groups:
            group = group or block_run._group(blocks)
            block_run._backward(dy, fold, run, inputs, known, inv_count, y, group)

bottleneck, basic = [(5, 20, 1), (5, 5, 3), (20, 5, 1)], [(20, 20, 3)] * 2
small = [(5, 20, 1), (5, 5, 1), (20, 5, 1)]  # two kernels of one grid
FAULT

for blocks in (1, 2, 5, 5, 65, 5, 1):
    groups = (None, 2) if blocks == 5 else (None,)
    run_once(blocks, bottleneck, weight_dtype=torch.float32, groups=groups)
for sides in (bottleneck, basic, basic[:1], small):
    for is_nhwc in (True, False):
        for weight_dtype in (torch.bfloat16, torch.float32):
            run_once(5, sides, is_nhwc, weight_dtype)
    run_once(5, sides, weight_dtype=torch.float32, stream=torch.float32)
    for allow_tf32 in (True, False, True):
        torch.backends.cudnn.allow_tf32 = allow_tf32
        run_once(5, sides, True, torch.float32, torch.float32)
for Driver.stream in (1, 0):
    run_once(5, bottleneck)
for triton.knobs.runtime.debug in (True, False):
    run_once(5, bottleneck)
lookups.clear()
run_once(5, bottleneck)
print(*sorted(reused), len(lookups))
"""
REUSABLE = [
    "bn_relu_conv_backward_kernel",
    "bn_relu_conv_backward_weight_kernel",
    "bn_relu_conv_forward_kernel",
    "finish_sums_kernel",
    "pack_weights_kernel",
    "sum_partials_kernel",
]


def lines_of_reused(is_apart, fault=""):
    text = REUSED.replace("IS_APART", str(is_apart))
    return lines_of("-c", text.replace("FAULT", fault))


VARYING = """
import itertools
from preact_kernels.kernels.triton.conv import Sizes
from preact_kernels.kernels.triton.bn_relu_conv_forward import ForwardLaunch
heights = itertools.cycle(({}))
numbers = property(lambda _: (Sizes(next(heights), 1, 5, 1), 15, 15), lambda *_: None)
ForwardLaunch._numbers = numbers
"""


WITHOUT_IN_KEY = """
key_of = block_run._run_key
block_run._run_key = lambda *a: key_of(*a)._replace({})
"""


PREPARED = """
prepared_launch = launch.PreparedLaunch
launch.PreparedLaunch = lambda compiled, run, before, after: prepared_launch({})
"""
OWN_KEY = """
text = inspect.getsource(real_launch_kernel)
changed = text.replace("own_key = kernel.__name__, grid, key", "own_key = {}")
assert changed != text
exec(changed, vars(launch))
real_launch_kernel = launch.launch_kernel
"""


@pytest.mark.parametrize("is_apart", [True, False])
def test_launches_of_a_known_kernel_are_those_that_triton_would_choose(is_apart):
    (line,) = lines_of_reused(is_apart)
    assert line.split() == [*REUSABLE, "4"]  # lookups: one for each fold of a caller


QUICK_FAULTS = [
    "block_run.all_aligned = lambda tensors: tensors",
    VARYING.format("16, 17"),
    WITHOUT_IN_KEY.format("precision=''"),
    WITHOUT_IN_KEY.format("context=key_of(*a).context._replace(stream=0)"),
    PREPARED.format("None, run, before, after"),
    PREPARED.format("compiled, run, (1, 1, 1, *before[3:]), after"),
    PREPARED.format("compiled, run, before, after[::-1]"),
    OWN_KEY.format("kernel.__name__, key"),
]
SLOW_FAULTS = [
    "block_run.aligned = lambda t: t",
    "block_run.aligned_rows = packing.aligned_rows = "
    "lambda t, n, size, dtype: t.new_empty((n, size), dtype=dtype)",
    "block_run.float = lambda eps: eps",
    "block_run._packed = lambda weights, launch: ["
    "w if i % 3 else w.to(torch.float64) for i, w in enumerate(weights)]",
    "packing.all_aligned = lambda tensors: tensors",
    VARYING.format("1, 2"),
    WITHOUT_IN_KEY.format("parameter_dtypes=()"),
    WITHOUT_IN_KEY.format("context=key_of(*a).context._replace(options=())"),
    PREPARED.format("compiled, lambda *a: run(*a[:9], *a[9:][::-1]), before, after"),
    OWN_KEY.format("grid, key"),
    OWN_KEY.format("kernel.__name__, grid"),
]


@pytest.mark.parametrize(
    "fault", [*QUICK_FAULTS, *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW_FAULTS)]
)
def test_another_choice_of_triton_is_found(fault):
    *found, _ = lines_of_reused(False, fault)
    assert found


def test_the_report_finds_planted_faults():
    found = lines_of("-m", "tests.kernels.planted_triton")
    expected = (
        ("product_kernel", "1 buffers where 2 stages were asked for"),
        ("product_kernel", "resident programs, not 64"),
        ("gather_kernel", "loads of 2 bytes"),
        ("spilling_kernel", "a stack frame of"),
    )
    assert len(found) == len(expected)
    for line, parts in zip(found, expected, strict=True):
        assert all(part in line for part in parts)
