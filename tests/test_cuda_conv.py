"""The fused convolutions for narrow channels of the CUDA library, on the host or on a GPU.

In half precision the budget is that of `tests/oracle.py`. In float32 the kernels multiply operands
that were rounded to TF32, as eager does on a GPU where it may; so eager here rounds its operands to
TF32 (to nearest, the tighter of what convolutions on a GPU do), and the truth is float64 of what
was given, unrounded: the budget stays twice eager's own error and one rounding of float32.
"""

import collections
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import preact_kernels as pk
from preact_kernels.kernels import cuda, reference
from preact_kernels.kernels.contract import BlockRun, Conv, Epilogue, Fold, Norm, Wanted
from tests.cases import device_of, in_dtype, random_block, random_stage
from tests.conftest import IS_CUDA_ON_HOST
from tests.cuda_on_host import build, serve_cpu
from tests.oracle import (
    assert_same_bits,
    assert_within_budget,
    check,
    evaluate,
    plain_copy,
    weight_gradient_inside_the_image,
)
from tests.test_autocast import Autocast
from tests.test_preact_stage import recorded_calls, unit_by_unit

if serve_cpu.missing():
    pytest.skip(f"backend cuda: {serve_cpu.missing()}", allow_module_level=True)

DEVICE = device_of("cuda")
on_host = pytest.mark.skipif(not IS_CUDA_ON_HOST, reason="multiprocessors are chosen on the host")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Case(NamedTuple):
    """A convolution with stride 1 that keeps the image's size."""

    images: int
    height: int
    width: int
    in_channels: int
    out_channels: int
    side: int

    def __str__(self):
        n, h, w, c, k, side = self
        return f"{side}x{side}_{n}x{h}x{w}_{c}_to_{k}"


# Pixels that do not fill tiles, several tiles a block, images narrower and wider than a tile.
TYPICAL = (Case(3, 5, 7, 64, 16, 1), Case(2, 17, 9, 16, 16, 3))
QUICK = (
    *TYPICAL,
    Case(2, 15, 10, 16, 64, 1),
    Case(1, 3, 5, 128, 32, 1),
    Case(2, 7, 7, 32, 128, 1),
    Case(1, 6, 7, 64, 256, 1),
    Case(3, 1, 1, 256, 64, 1),
    Case(2, 5, 5, 48, 80, 1),
    Case(5, 1, 1, 16, 16, 3),
    Case(1, 3, 33, 16, 16, 3),
    Case(2, 3, 5, 32, 32, 3),
    Case(1, 8, 33, 32, 32, 3),
    Case(2, 8, 8, 64, 64, 3),
    Case(2, 7, 7, 64, 64, 3),
)
SLOW = (
    Case(1, 1, 1, 16, 16, 1),
    Case(2, 33, 31, 16, 16, 1),
    Case(9, 8, 8, 256, 64, 1),
    Case(4, 9, 9, 128, 128, 1),
    Case(3, 7, 9, 240, 64, 1),
    Case(1, 33, 65, 16, 16, 3),
    Case(3, 16, 16, 32, 32, 3),
    Case(1, 1, 17, 32, 32, 3),
    Case(1, 17, 1, 64, 64, 3),
    Case(2, 9, 33, 64, 64, 3),
    Case(1, 1, 1, 64, 64, 3),
)


def has_kernel(case: Case, dtype: torch.dtype) -> bool:
    """Whether a fused kernel serves a case of this file."""
    return dtype != torch.float32 or case.side == 1 or case.in_channels <= 32


def cases_and_dtypes(cases, slow=()):
    """All that have a kernel."""
    pairs = itertools.product((*cases, *slow), DTYPES)
    return pytest.mark.parametrize(
        ("case", "dtype"),
        [
            pytest.param(c, d, id=f"{c}-{name(d)}", marks=[pytest.mark.slow] * (c in slow))
            for c, d in pairs
            if has_kernel(c, d)
        ],
    )


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


every_case = cases_and_dtypes(QUICK, SLOW)
typical = pytest.mark.parametrize("case", TYPICAL, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)


@pytest.fixture(autouse=True)
def schedule(monkeypatch):
    """TF32 is allowed, and a run is one of the first schedule."""
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: True)
    set_schedule()
    yield
    set_schedule()


def set_schedule(seed: int = 0, multiprocessors: int = 2) -> None:
    if IS_CUDA_ON_HOST:
        serve_cpu.set_schedule(seed, multiprocessors)


def nhwc(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def kernels():
    return cuda.kernels()


def conv(case: Case) -> Conv:
    padding = case.side // 2
    return Conv((1, 1), (padding, padding), (1, 1), 1)


def random_norm(channels: int, eps: float = EPS) -> Norm:
    return Norm(
        mean=torch.randn(channels, device=DEVICE) / 3,
        var=torch.rand(channels, device=DEVICE) + 0.5,
        weight=torch.randn(channels, device=DEVICE),
        bias=torch.randn(channels, device=DEVICE) / 2,
        eps=eps,
    )


def images(n: int, c: int, case: Case, dtype: torch.dtype) -> Tensor:
    return nhwc(torch.randn(n, c, case.height, case.width, device=DEVICE).to(dtype))


class Forward(NamedTuple):
    """The tensors that `bn_relu_conv_forward` takes."""

    x: Tensor
    norm: Norm
    conv_weight: Tensor
    residual: Tensor | None


class Backward(NamedTuple):
    """The tensors that `bn_relu_conv_backward` takes."""

    dy: Tensor
    fold: Fold | None
    x: Tensor
    norm: Norm
    conv_weight: Tensor


def forward_inputs(case: Case, dtype: torch.dtype, has_residual: bool = True) -> Forward:
    n, _, _, c, k, side = case
    weight = torch.randn(k, c, side, side, device=DEVICE) / (c * side**2) ** 0.5
    residual = images(n, k, case, dtype) if has_residual else None
    return Forward(images(n, c, case, dtype), random_norm(c), weight.to(dtype), residual)


def backward_inputs(case: Case, dtype: torch.dtype, fold: str = "skip") -> Backward:
    """Tensors with a fold that is "none", "evaluation", "z" (without skip) or "skip"."""
    n, h, w, _, k, _ = case
    x, norm, conv_weight, _ = forward_inputs(case, dtype)
    dy, z, skip = (images(n, k, case, dtype) for _ in range(3))
    if fold == "none":
        return Backward(dy, None, x, norm, conv_weight)
    sums = torch.randn(2, k, device=DEVICE) * (n * h * w) ** 0.5
    inv_count = 0.0 if fold == "evaluation" else 1 / (n * h * w)
    folded = Fold(skip if fold == "skip" else None, z, random_norm(k, 1e-3), sums, inv_count)
    return Backward(dy, folded, x, norm, conv_weight)


def mapped(inputs, change):
    """The same named tuple, with `change` of every tensor inside."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, tuple):
        return type(inputs)(*(mapped(t, change) for t in inputs))
    return inputs


def call(backend, case: Case, inputs: Forward | Backward, options) -> dict[str, Tensor]:
    """The results by name, without those that are None.

    Args:
        backend: `Kernels`.
        case: shape.
        inputs: tensors.
        options: whether statistics are wanted, or a `Wanted`.
    """
    if isinstance(inputs, Backward):
        found = backend.bn_relu_conv_backward(*inputs, conv(case), options)._asdict()
    else:
        x, norm, weight, residual = inputs
        y, statistics = backend.bn_relu_conv_forward(
            x, norm, weight, conv(case), Epilogue(None, residual, options)
        )
        found = {"y": y, **(statistics._asdict() if statistics else {})}
    return {n: t for n, t in found.items() if t is not None}


def as_tf32(t: Tensor) -> Tensor:
    """To nearest."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).view_as(t)


class RoundedOperands(torch.utils._python_dispatch.TorchDispatchMode):
    """Convolutions of float32 see operands that are rounded to TF32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution_backward.default:
            args = (*(as_tf32(t) for t in args[:3]), *args[3:])
        elif function is torch.ops.aten.convolution.default:
            args = (*(as_tf32(t) for t in args[:2]), *args[2:])
        return function(*args, **kwargs or {})


def eager(case: Case, inputs: Forward | Backward, options) -> dict[str, Tensor]:
    """The reference in the dtype of the inputs."""
    if inputs.x.dtype != torch.float32:
        return call(reference, case, inputs, options)
    with RoundedOperands():
        return call(reference, case, inputs, options)


def reversed_batch(inputs):
    return mapped(inputs, lambda t: nhwc(t.flip(0)) if t.dim() == 4 and t.shape[0] > 0 else t)


ALL = Wanted(True, True, True)


def check_case(case: Case, inputs: Forward | Backward, options) -> dict[str, Tensor]:
    """Asserts the budget for every result, which has the dtype of eager's; returns the results."""
    found = call(kernels(), case, inputs, options)
    truth = call(reference, case, mapped(inputs, Tensor.double), options)
    errors = dict.fromkeys(truth, 0.0)
    weight = inputs.conv_weight
    for order in (lambda t: t, reversed_batch):
        run = eager(case, order(inputs)._replace(conv_weight=weight), options)
        if order is reversed_batch:
            run |= {n: run[n].flip(0) for n in ("y", "g", "dy") if n in run}
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in run.items()}
        for name in truth:
            error = float((run[name].double() - truth[name]).norm())
            errors[name] = max(errors[name], error)
    if "mean" in found:  # statistics are of y as stored
        truth |= reference.bn_stats(found["y"].double())._asdict()
        plain = reference.bn_stats(found["y"])._asdict()
        errors |= {n: float((t.double() - truth[n]).norm()) for n, t in plain.items()}
    assert_within_budget(found, truth, errors)
    return found


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_forward")
@every_case
def test_forward_and_statistics_keep_the_budget(case, dtype):
    check_case(case, forward_inputs(case, dtype), True)


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_backward")
@every_case
def test_backward_of_a_folded_gradient_keeps_the_budget(case, dtype):
    check_case(case, backward_inputs(case, dtype), ALL)


def resnet_1001_cases():
    """The convolutions of its blocks; without a GPU of as many images as make six tiles a block."""
    for width, side, images in ((16, 32, 3), (32, 16, 6), (64, 8, 6)):
        for batch in [images] if IS_CUDA_ON_HOST else [128, 64]:
            yield Case(batch, side, side, 4 * width, width, 1)
            yield Case(batch, side, side, width, width, 3)
            yield Case(batch, side, side, width, 4 * width, 1)


@pytest.mark.covering(1)
@pytest.mark.not_under_sanitizer
@every_dtype
@pytest.mark.parametrize("case", [*resnet_1001_cases()], ids=str)
def test_many_tiles_a_block_keep_the_budget(case, dtype):
    set_schedule(multiprocessors=1)
    check_case(case, forward_inputs(case, dtype), True)
    check_case(case, backward_inputs(case, dtype), ALL)


@pytest.mark.calls("preact_kernels_cuda::bn_relu_conv_forward")
@typical
@pytest.mark.parametrize(("residual", "stats"), [(False, False), (False, True), (True, False)])
def test_forward_with_and_without_residual_and_statistics(case, residual, stats):
    found = check_case(case, forward_inputs(case, torch.bfloat16, residual), stats)
    assert ("mean" in found) == stats


@pytest.mark.covering(2)
@typical
@pytest.mark.parametrize("fold", ["none", "evaluation", "z", "skip"])
@pytest.mark.parametrize("needs", [*itertools.product([False, True], repeat=3)], ids=str)
def test_every_combination_of_flags(case, fold, needs):
    wanted = Wanted(*needs)
    if fold == "none" and wanted.dy:
        pytest.skip("there is nothing to unfold")
    found = check_case(case, backward_inputs(case, torch.bfloat16, fold), wanted)
    names = ["g", "sums"] * wanted.input + ["conv_weight"] * wanted.weight + ["dy"] * wanted.dy
    assert list(found) == names


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize("case", [Case(3, 16, 16, 16, 64, 1), Case(3, 16, 16, 64, 64, 3)], ids=str)
def test_images_at_the_end_of_a_batch_do_not_depend_on_its_size(case):
    """On a GPU behind 2^31 elements."""
    if not IS_CUDA_ON_HOST:
        if torch.cuda.mem_get_info()[0] < 48 * 2**30:
            pytest.skip("needs 48 GiB of GPU memory")
        case = case._replace(images=2**17 + 3)
    for inputs, options, name in (
        (forward_inputs(case, torch.bfloat16), False, "y"),
        (backward_inputs(case, torch.bfloat16), Wanted(True, False), "g"),
    ):
        last = mapped(inputs, lambda t: t[-2:] if t.dim() == 4 else t)
        last = last._replace(conv_weight=inputs.conv_weight)
        expected = call(kernels(), case._replace(images=2), last, options)[name]
        found = call(kernels(), case, inputs, options)[name]
        assert_same_bits({name: found[-2:]}, {name: expected})


def launches(run) -> list[str]:
    """The names of what `run()` launches, which does not run."""
    found = []
    with serve_cpu.without_running(lambda launch: found.append(launch.name)):
        run()
    return found


LARGE = (
    Case(1, 17, 33, 64, 16, 1),
    Case(1, 17, 33, 64, 256, 1),
    Case(2, 17, 33, 16, 16, 3),
    Case(2, 17, 33, 32, 32, 3),
    Case(2, 17, 35, 64, 64, 3),
)


@on_host
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_partial_weight_gradients_are_never_more_bytes_than_what_they_save(case, is_large):
    """Of a large image both gradients come from one kernel, of a small one each from its own."""
    set_schedule(multiprocessors=1)
    case = case if is_large else case._replace(images=1, height=3, width=5)
    inputs = backward_inputs(case, torch.bfloat16)
    names = launches(lambda: call(kernels(), case, inputs, ALL))
    apart = ["bn_relu_conv_backward_input", "bn_relu_conv_weight_gradients"]
    kernel_names = ["bn_relu_conv_backward"] if is_large else apart
    assert [n for n in names if n.startswith("bn_relu_conv")] == kernel_names
    check_case(case, inputs, ALL)


@on_host
@pytest.mark.parametrize("stream", [None, torch.float32], ids=str)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_run_of_blocks_has_three_launches_a_block_in_each_direction(is_large, stream):
    """And some for the whole run, which large weight gradients do not add to."""
    set_schedule(multiprocessors=1)
    blocks = [random_block("bottleneck", 64, 16) for _ in range(3)]
    stage = in_dtype(pk.PreActStage(blocks, residual_dtype=stream), torch.bfloat16)
    inputs = {"x": torch.randn(2, 64, *((17, 33) if is_large else (3, 3))).bfloat16()}
    with pk.use_backend("cuda"):
        names = launches(lambda: evaluate(stage, inputs))
        assert_same_bits(evaluate(stage, inputs), unit_by_unit(evaluate, stage, inputs))
    counts = collections.Counter(names)
    assert counts.pop("bn_relu_conv_forward") == 9
    kind = "bn_relu_conv_backward" if is_large else "bn_relu_conv_backward_input"
    assert counts.pop(kind) == 9
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


@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_schedules_change_no_bit(side, seed):
    case = Case(3, 9, 17, 32, 32, side)
    given = forward_inputs(case, torch.bfloat16)
    arriving = backward_inputs(case, torch.bfloat16)

    def results():
        return call(kernels(), case, given, True) | call(kernels(), case, arriving, ALL)

    expected = results()
    set_schedule(seed)
    assert_same_bits(results(), expected)


@typical
@pytest.mark.parametrize("multiprocessors", [1, 7])
def test_any_number_of_multiprocessors(case, multiprocessors):
    set_schedule(multiprocessors=multiprocessors)
    dtype = torch.bfloat16
    check_case(case, forward_inputs(case, dtype), True)
    check_case(case, backward_inputs(case, dtype), ALL)


@every_dtype
@pytest.mark.parametrize("case", [Case(2, 4, 5, 16, 32, 1), Case(2, 5, 4, 16, 16, 3)], ids=str)
def test_weights_stored_nhwc_and_tensors_that_begin_anywhere(case, dtype):
    def moved(t):
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return memory[1:].view(t.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2).copy_(t)

    for inputs, options in (
        (forward_inputs(case, dtype), True),
        (backward_inputs(case, dtype), ALL),
    ):
        expected = check_case(case, inputs, options)
        stored_nhwc = inputs._replace(conv_weight=nhwc(inputs.conv_weight))
        strayed = mapped(inputs, lambda t: moved(t) if t.dim() == 4 else t)
        for other in (stored_nhwc, strayed):
            assert_same_bits(call(kernels(), case, other, options), expected)


@typical
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=name)
def test_float32_weights_beside_half_precision_are_rounded_on_the_way(case, dtype):
    for inputs, options in (
        (forward_inputs(case, dtype), True),
        (backward_inputs(case, dtype), ALL),
    ):
        wide = torch.randn_like(inputs.conv_weight, dtype=torch.float32)
        expected = call(kernels(), case, inputs._replace(conv_weight=wide.to(dtype)), options)
        for weight in (wide, nhwc(wide)):
            found = call(kernels(), case, inputs._replace(conv_weight=weight), options)
            if "conv_weight" in found:
                assert found["conv_weight"].dtype == torch.float32
                found["conv_weight"] = found["conv_weight"].to(dtype)
            assert_same_bits(found, expected)


class Casts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the casts of weights, and of gradients of their shape."""

    def __init__(self, weights):
        super().__init__()
        self.shapes, self.count = {w.shape for w in weights}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += 1
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=name)
def test_autocast_casts_no_weight_where_convolutions_are_fused(x_dtype, memory):
    blocks = [random_block("bottleneck", 64, 16) for _ in range(2)]
    stage = Autocast(pk.PreActStage(blocks, memory)).to(DEVICE)
    plain = plain_copy(stage)
    weights = [p for p in stage.parameters() if p.dim() == 4]
    problems = [{"x": torch.randn(3, 64, 7, 6, device=DEVICE).to(x_dtype)} for _ in range(8)]
    counts = []
    with pk.use_backend("cuda"):
        for module in (stage, plain):
            with Casts(weights) as casts:
                evaluate(module, problems[0])
            counts.append(casts.count)
        check(stage, plain, problems)
    if x_dtype == torch.bfloat16:  # a float32 stream stays float32 until it is projected
        assert counts[0] == 0
    assert counts[1] >= 2 * len(weights)


@typical
def test_nan_passes_through(case):
    dtype = torch.bfloat16
    given, arriving = forward_inputs(case, dtype), backward_inputs(case, dtype)
    middle = (0, 3, case.height // 2, case.width // 2)
    for inputs in (given, arriving):
        inputs.x[middle] = torch.nan
    y = call(kernels(), case, given, False)["y"]
    expected = call(reference, case, given, False)["y"]
    assert expected.isnan().any()
    assert torch.equal(y.isnan(), expected.isnan())
    wanted = Wanted(True, True)
    found = call(kernels(), case, arriving, wanted)
    expected = call(reference, case, arriving, wanted)
    assert not expected["g"].isnan().any()  # a NaN lets the gradient pass, and does not join it
    assert expected["conv_weight"].isnan().any()
    assert expected["sums"].isnan().any()
    for name, t in expected.items():
        assert torch.equal(found[name].isnan(), t.isnan())
    torch.testing.assert_close(found["g"][middle], expected["g"][middle], rtol=0.02, atol=0)


LOW_NAN = 0x7F800001  # infinite without the low bits that TF32 does not have


@typical
@pytest.mark.parametrize("name", ["x", "dy", "conv_weight"])
def test_a_nan_with_a_payload_in_the_low_bits_alone_stays_nan(case, name):
    for inputs, options in (
        (forward_inputs(case, torch.float32, False), False),
        (backward_inputs(case, torch.float32, "none"), Wanted(True, True)),
    ):
        if name not in inputs._fields:
            continue
        changed = getattr(inputs, name)
        changed.view(torch.int32)[0, 3, case.side // 2, case.side // 2] = LOW_NAN
        assert changed.isnan().sum() == 1
        found = call(kernels(), case, inputs, options)
        expected = call(reference, case, inputs, options)
        assert any(t.isnan().any() for t in expected.values())
        for result, t in expected.items():
            assert torch.equal(found[result].isnan(), t.isnan()), result
            assert torch.equal(found[result].isinf(), t.isinf()), result


@pytest.mark.parametrize("changed", ["x", "dy"])
@cases_and_dtypes([Case(2, 17, 9, 16, 16, 3), Case(1, 8, 16, 32, 32, 3), Case(1, 9, 5, 64, 64, 3)])
def test_padding_takes_no_part_in_the_gradient_of_the_weight(case, changed, dtype):
    inputs = backward_inputs(case, dtype, "none")
    inputs.norm.weight.abs_()
    tensor = getattr(inputs, changed)
    tensor[-1, 3, 0, 0] = torch.inf
    tensor[0, 5, -1, -1] = torch.nan
    found = call(kernels(), case, inputs, Wanted(True, True))["conv_weight"]
    wide = mapped(inputs, Tensor.double)
    a = reference.bn_relu_forward(wide.x, wide.norm)
    expected = weight_gradient_inside_the_image(a, wide.dy)
    assert not expected.isfinite().all()
    assert expected.isfinite().any()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@typical
@pytest.mark.parametrize("value", [3.0, -1e4])
def test_statistics_of_constant_channels_are_exact(case, value):
    inputs = forward_inputs(case, torch.float32)
    inputs.conv_weight.zero_()
    inputs.residual.fill_(value)
    found = call(kernels(), case, inputs, True)
    assert torch.equal(found["mean"], torch.full_like(found["mean"], value))
    assert torch.equal(found["var"], torch.zeros_like(found["var"]))


@typical
def test_statistics_of_large_means_keep_the_budget(case):
    inputs = forward_inputs(case, torch.float32)
    inputs.residual.add_(1000)
    check_case(case, inputs, True)


@typical
@pytest.mark.parametrize("scale", [-1e-12, 1e-3, 1e9, -1e17])
def test_sums_keep_the_budget_at_any_magnitude(case, scale):
    inputs = forward_inputs(case, torch.float32)
    inputs.conv_weight.zero_()
    inputs.residual.add_(1).mul_(scale)
    check_case(case, inputs, True)
    inputs = backward_inputs(case, torch.float32)
    for t in (inputs.dy, inputs.fold.skip, inputs.fold.sums):
        t.add_(1).mul_(scale)
    inputs.fold.norm.weight.mul_(1e-3 if abs(scale) > 1 else 0)  # beside which skip counts
    check_case(case, inputs, ALL)


@pytest.mark.parametrize(
    "values", [(torch.inf,), (-torch.inf,), (torch.inf, -torch.inf), (torch.nan,)]
)
def test_statistics_of_what_is_not_finite_are_those_of_pytorch(values):
    case = Case(2, 9, 17, 16, 16, 1)
    inputs = forward_inputs(case, torch.float32)
    for i, value in enumerate(values):
        inputs.residual[i, 3, 8 * i, 5] = value
    found = call(kernels(), case, inputs, True)
    expected = reference.bn_stats(found["y"])
    torch.testing.assert_close(found["mean"], expected.mean, equal_nan=True)
    assert torch.equal(found["var"].isfinite(), expected.var.isfinite())


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


SERVED = {
    (16, 64, 1, 1): True,
    (64, 256, 1, 1): True,
    (128, 128, 1, 1): True,
    (256, 256, 1, 1): False,  # a weight's gradient that no block can hold
    (24, 16, 1, 1): False,
    (16, 8, 1, 1): False,
    (16, 272, 1, 1): False,
    (16, 16, 3, 3): True,
    (64, 64, 3, 3): True,
    (16, 32, 3, 3): False,
    (48, 48, 3, 3): False,
    (16, 16, 5, 5): False,
    (16, 16, 1, 3): False,
}


@pytest.mark.covering(1)
@every_dtype
@pytest.mark.parametrize("shape", SERVED, ids=str)
def test_which_weights_are_served(shape, dtype):
    same = Conv((1, 1), tuple(side // 2 for side in shape[2:]), (1, 1), 1)

    def is_served(conv):
        return kernels().serves_conv(shape, conv, dtype, torch.device(DEVICE))

    has_weights = dtype != torch.float32 or shape != (64, 64, 3, 3)  # room for them
    if IS_CUDA_ON_HOST or dtype != torch.float32:  # else a question of shared memory
        assert is_served(same) == (SERVED[shape] and has_weights)
    padded = tuple(p + 1 for p in same.padding)
    for change in ({"stride": (2, 2)}, {"groups": 2}, {"padding": padded}):
        assert not is_served(same._replace(**change))


def test_large_images_are_left_to_pytorch_where_that_is_estimated_to_be_faster(monkeypatch):
    monkeypatch.setattr(cuda, "MOST_PIXELS", {(3, 16): 2 * 7 * 6})
    same = Conv((1, 1), (1, 1), (1, 1), 1), torch.bfloat16, torch.device(DEVICE)
    found = [kernels().serves_conv((16, 16, 3, 3), *same, pixels) for pixels in (84, 85, None)]
    assert found == [True, False, True]
    assert kernels().serves_conv((32, 32, 3, 3), *same, 10**6)
    stage = pk.PreActStage([random_block("basic", 16, 16) for _ in range(2)]).to(DEVICE)
    stage = in_dtype(stage, torch.bfloat16)
    for images, is_fused in ((2, True), (3, False)):
        problems = [{"x": torch.randn(images, 16, 7, 6, device=DEVICE).bfloat16()}]
        with monkeypatch.context() as patch, pk.use_backend("cuda"):
            calls = recorded_calls(kernels(), "block_run_forward", patch)
            check(stage, plain_copy(stage), problems * 8)
        assert bool(calls) == is_fused


def test_float32_is_served_only_where_tf32_is_allowed(monkeypatch):
    rest = Conv((1, 1), (0, 0), (1, 1), 1), torch.float32, torch.device(DEVICE)
    assert kernels().serves_conv((16, 64, 1, 1), *rest)
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: False)
    assert not kernels().serves_conv((16, 64, 1, 1), *rest)
    assert kernels().serves_conv((16, 64, 1, 1), rest[0], torch.bfloat16, rest[2])


def test_the_library_names_what_it_does_not_take():
    inputs = forward_inputs(Case(1, 2, 2, 16, 16, 1), torch.bfloat16)
    forward = torch.ops.preact_kernels_cuda.bn_relu_conv_forward
    weight, residual, norm = inputs.conv_weight, inputs.residual, inputs.norm
    for change, message in (
        ({"conv_weight": weight[:8]}, "conv_weight: expected 16, 32, ... or 256"),
        ({"conv_weight": weight.half()}, "conv_weight: expected the dtype of x, or float32"),
        ({"residual": residual[:, :8]}, "residual: expected"),
        ({"norm": norm._replace(mean=norm.mean[:8])}, "mean: expected 16 values, got 8"),
    ):
        x, changed, *rest = inputs._replace(**change)
        with pytest.raises(RuntimeError, match=message):
            forward(x, *changed, rest[0], None, rest[1], True)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(16, 16, 1, 1, dtype=torch.int8), "conv_weight: expected the dtype of x"),
        (torch.zeros(16, 16, 5, 5, dtype=torch.bfloat16), "conv_weight: expected a 1x1 or a 3x3"),
        (torch.zeros(0, 16, 1, 1), "conv_weight: expected 16, 32, ... or 256"),
    ],
    ids=("dtype", "kernel", "empty"),
)
def test_a_weight_is_checked_before_a_kernel_reads_it(weight, message):
    inputs = forward_inputs(Case(1, 2, 2, 16, 16, 1), torch.bfloat16, False)
    forward = torch.ops.preact_kernels_cuda.bn_relu_conv_forward
    weight = weight.to(DEVICE)

    def call_op():
        with pytest.raises(RuntimeError, match=message):
            forward(inputs.x, *inputs.norm, weight, None, None, True)

    assert not launches(call_op) if IS_CUDA_ON_HOST else call_op() is None


@on_host
def test_the_kernel_that_adds_up_a_weight_gradient_does_not_change_its_bits():
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


MOST_SHARED_BYTES = {"8.0": 163, "8.6": 99, "9.0": 227}


@on_host
@pytest.mark.parametrize("capability", MOST_SHARED_BYTES)
def test_auto_yields_where_shared_memory_does_not_hold_the_tiles(capability, monkeypatch):
    monkeypatch.setattr(cuda, "load_error", lambda: "")
    monkeypatch.setattr(torch, "device", lambda name: DEVICE)
    serve_cpu.set_most_shared_bytes(MOST_SHARED_BYTES[capability] * 1024)
    cuda._fits_shared_memory.cache_clear()
    try:
        assert cuda.lacks_shared_memory() == (capability == "8.6")
    finally:
        serve_cpu.set_most_shared_bytes()
        cuda._fits_shared_memory.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(not IS_CUDA_ON_HOST, reason="on a GPU, compute-sanitizer is what there is")
@pytest.mark.skipif("PK_SANITIZE" in os.environ, reason="is what runs")
def test_under_the_sanitizer_the_quick_tests_pass():
    build.build("kernels", sanitize=True)
    files = [__file__, str(Path(__file__).with_name("test_cuda_float32_stream.py"))]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m"]
    process = subprocess.run(
        [sys.executable, *command, "not slow", *files],
        cwd=build.ROOT,
        env={**os.environ, **build.sanitizer_environment(), "PK_SANITIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
