"""Two runs give the same bits, whatever the machine does differently the second time.

What differs between the runs, and what is promised:

- cpu: timing, on several threads; equal bits for equal numbers of threads. Another number of
  threads changes only weight gradients of convolutions, where each thread has a partial sum.
- cuda on the host: the order of blocks, warps and threads; equal bits.
- triton in the interpreter: the order of programs; equal bits. Another number of programs changes
  only sums over pixels.
- cuda and triton on a GPU: timing; equal bits.
"""

import math
from functools import partial

import pytest
import torch

import preact_kernels as pk
from tests.cases import (
    ConvCase,
    NormCase,
    NormConvCase,
    conv_inputs,
    device_of,
    in_dtype,
    norm_conv_inputs,
    norm_inputs,
    random_stage,
)
from tests.oracle import assert_same_bits, evaluate, same_bits
from tests.reruns import assert_runs_agree, threads

pytestmark = pytest.mark.backends("cpu", "triton", "cuda")

LARGE = ConvCase("large", (8, 32, 19, 17), 32, padding=1, residual=True)
# Every way through the libraries, each with several tiles for every thread and every block.
CASES = (
    LARGE,
    LARGE._replace(name="1x1", kernel=1, padding=0),
    LARGE._replace(name="wider", x=(6, 16, 9, 11), out_channels=64, kernel=1, padding=0),
    LARGE._replace(name="strided", stride=2),
    LARGE._replace(name="no_vectors", x=(8, 17, 12, 11), out_channels=10),
    LARGE._replace(name="groups", groups=4),
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.covering(1)
def test_runs_of_bn_relu_conv2d_agree(case, dtype, backend):
    if backend != "cpu" and device_of(backend) == "cpu":  # where a few tiles take long
        case = case._replace(x=(2, case.x[1], 9, 11))
    inputs = conv_inputs(case, dtype)
    call = partial(pk.bn_relu_conv2d, training=True, **case.conv)
    assert_runs_agree(backend, partial(evaluate, call, inputs))


@dtypes
@pytest.mark.parametrize("kernel", [None, 1, 3])  # None: no convolution
@pytest.mark.parametrize("num_groups", [8, None])
@pytest.mark.covering(1)
@pytest.mark.backends("cpu", slow=("triton", "cuda"))
def test_runs_of_any_norm_agree(num_groups, kernel, dtype, backend):
    is_slow = backend != "cpu" and device_of(backend) == "cpu"
    norm = NormCase((2, 32, 9, 11) if is_slow else (8, 32, 19, 17), num_groups)
    modulation = ("scale",) if num_groups else ()
    if kernel is None:
        inputs, fused = norm_inputs(norm, dtype, modulation), norm.norm_act
    else:
        case = NormConvCase(norm, 32, kernel, padding=kernel // 2, residual=True)
        inputs, fused = norm_conv_inputs(case, dtype, modulation), case.fused
    assert_runs_agree(backend, partial(evaluate, partial(fused, activation="silu"), inputs))


@pytest.mark.parametrize(
    ("width", "memory", "dtype"),
    [(6, "rebuild", torch.float32), (16, "checkpoint", torch.bfloat16)],
)
@pytest.mark.backends("cpu", slow=("triton", "cuda"))
def test_runs_of_a_stage_agree(width, memory, dtype, backend):
    stage = in_dtype(random_stage(width=width, memory=memory), dtype)
    inputs = {"x": torch.randn(8, 10, 17, 13).to(dtype)}
    assert_runs_agree(backend, partial(evaluate, stage, inputs))


MANY = ConvCase("many", (80, 16, 5, 6), 16, padding=1, residual=True)
# With 1, 2 or 5 threads, a strip has 4, 2 or 1 images.
SMALL = ConvCase("small", (17, 32, 3, 5), 64, padding=1, residual=True)


@pytest.mark.parametrize(
    ("case", "count", "dtype"),
    [
        (MANY._replace(kernel=1, padding=0), 2, torch.bfloat16),
        (MANY, 70, torch.float32),
        (SMALL, 5, torch.bfloat16),
        (SMALL._replace(stride=2), 2, torch.float32),
    ],
)
@pytest.mark.backends("cpu")
def test_threads_change_only_the_order_of_weight_gradients(case, count, dtype, backend):
    inputs = conv_inputs(case, dtype)
    call = partial(pk.bn_relu_conv2d, training=True, **case.conv)
    single = evaluate(call, inputs)
    with threads(count):
        several = evaluate(call, inputs)
    one, other = single.pop("dconv_weight"), several.pop("dconv_weight")
    assert_same_bits(several, single)
    # The gradient of a weight is a sum over pixels, here in another order.
    pixels = math.prod(single["y"].shape) / case.out_channels
    assert (other - one).norm() <= torch.finfo(dtype).eps * math.sqrt(pixels) * one.norm()


@dtypes
@pytest.mark.backends("cpu")
def test_threads_change_only_weight_gradients_of_a_stage(dtype, backend):
    blocks = list(random_stage(width=16))[2:]
    stage = in_dtype(pk.PreActStage(blocks, memory="checkpoint"), dtype)
    inputs = {"x": torch.randn(8, 64, 9, 7).to(dtype)}
    results = []
    for count in (1, 3):
        with threads(count):
            found = evaluate(stage, inputs)
        results.append({n: t for n, t in found.items() if "conv" not in n})
    assert_same_bits(*results)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.backends("triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter counts two multiprocessors")
def test_programs_change_only_sums_over_pixels(kernel, backend, monkeypatch):
    """In evaluation mode, where outputs and input gradients depend on no such sum."""
    pytest.importorskip("triton")
    from tests.kernels.compile_triton import replace

    case = LARGE._replace(x=(2, 20, 9, 11), kernel=kernel, padding=kernel // 2)
    inputs = conv_inputs(case)
    call = partial(pk.bn_relu_conv2d, training=False, **case.conv)
    results = []
    for most in (2, 3):
        replace(
            monkeypatch,
            "persistent_programs",
            lambda x, tiles, *columns, most=most: min(tiles, most),
        )
        found = evaluate(call, inputs)
        results.append({n: found[n] for n in ("y", "dx", "dresidual")})
    assert_same_bits(*results)


def test_an_image_does_not_depend_on_its_batch_in_evaluation(backend):
    inputs = conv_inputs(LARGE._replace(residual=False))
    call = partial(pk.bn_relu, training=False)
    names = ("bn_weight", "bn_bias", "running_mean", "running_var")
    norm = {n: inputs[n] for n in names}
    whole = call(inputs["x"], **norm)
    for i in range(len(whole)):
        assert same_bits(call(inputs["x"][i : i + 1], **norm), whole[i : i + 1])


def test_bits_tell_apart_what_compares_equal_or_close():
    zero, one = torch.zeros(1), torch.ones(1)
    pairs = (zero, -zero), (zero.half(), zero.bfloat16()), (zero, zero[0]), (one, one + 2**-23)
    assert not any(same_bits(a, b) for a, b in pairs)
    assert all(same_bits(a, a.clone()) for a, _ in pairs)
