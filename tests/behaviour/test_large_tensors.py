"""A batch of more than 2^31 elements gives what a small one gives.

The large batch repeats the small one: statistics and gradients of images are the same, gradients of
parameters larger by the number of copies. All copies of an image must have the same bits; plain
PyTorch judges one of each.
"""

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import preact_kernels as pk
from preact_kernels.kernels import cpu
from preact_kernels.kernels.contract import samples_of
from tests.cases import in_dtype, random_block
from tests.oracle import (
    Results,
    assert_within_budget,
    eager_errors,
    evaluate,
    evaluate_all,
    gradient_like,
    plain_copy,
    same_bits,
)

pytestmark = [pytest.mark.slow, pytest.mark.not_under_sanitizer]

DTYPE = torch.bfloat16
# Copies of the last image of the small batch all lie after 2^31 elements. It has larger values, so
# that statistics without them differ. No size is a power of two: an element that is read or written
# 2^31 or 2^32 elements from its place is another one.
IMAGES, HEIGHT, WIDTH = 65, 31, 33


class ResidualAdd(nn.Module):
    """`pk.residual_add` with a constant branch."""

    def forward(self, x: Tensor) -> Tensor:
        return pk.residual_add(x, x.detach())


class PlainAdd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.detach()


def narrowing_stage(memory: str) -> nn.Module:
    """Only the input of this stage is large."""
    return pk.PreActStage([random_block("basic", 128, 16), random_block("basic", 16, 16)], memory)


def wide_stage(memory: str) -> nn.Module:
    """A stage whose inner tensors are a quarter of its inputs."""
    return pk.PreActStage([random_block("bottleneck", 64, 16) for _ in range(2)], memory)


class Case(NamedTuple):
    """A step of a module of this package."""

    module: Callable[[], nn.Module]
    channels: int  # of its input
    tensors: float  # held at a time, in sizes of the input
    memory_format: torch.memory_format = torch.channels_last
    wants_dx: bool = True
    wants_backward: bool = True


NCHW = torch.contiguous_format
CASES = {
    "bn_relu-nhwc": Case(lambda: pk.BNReLU2d(16), 16, 3),
    "bn_relu-nchw": Case(lambda: pk.BNReLU2d(16), 16, 4, NCHW, wants_backward=False),
    "group_norm_relu": Case(lambda: pk.NormAct(nn.GroupNorm(4, 16), nn.ReLU()), 16, 3),
    "residual_add": Case(ResidualAdd, 16, 3),
    "bn_relu_conv2d-3x3": Case(lambda: pk.BNReLUConv2d(16, 16, 3, padding=1), 16, 4),
    "bn_relu_conv2d-1x1": Case(lambda: pk.BNReLUConv2d(16, 16, 1, bias=True), 16, 4),
    "bn_relu_conv2d-nchw": Case(
        lambda: pk.BNReLUConv2d(16, 16, 3, padding=1), 16, 4, NCHW, wants_backward=False
    ),
    "bottleneck": Case(lambda: random_block("bottleneck", 64, 16), 64, 4, wants_dx=False),
    "stage-store": Case(lambda: narrowing_stage("store"), 128, 4.3),
    "stage-checkpoint": Case(lambda: narrowing_stage("checkpoint"), 128, 4.3),
    # Rebuilds an input of more than 2^31 elements.
    "wide_stage-rebuild": Case(lambda: wide_stage("rebuild"), 64, 8.5),
}


def copies_of(channels: int) -> int:
    """Copies of the small batch that make more than 2^31 elements without its last images."""
    return 2**31 // ((IMAGES - 1) * channels * HEIGHT * WIDTH) + 1


def repeated(small: Tensor, copies: int) -> Tensor:
    """The large batch: the small one without its last image, again and again, then that image."""
    is_nhwc = small.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if is_nhwc else NCHW
    shape = copies * len(small), *small.shape[1:]
    large = torch.empty(shape, dtype=small.dtype, memory_format=memory_format)
    groups, last = parts(large, copies)
    groups.copy_(small[:-1])
    last.copy_(small[-1])
    return large


def parts(large: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """The copies of all images but the last, and the copies of the last."""
    first, last = large.split((copies * (IMAGES - 1), copies))
    return first.unflatten(0, (copies, IMAGES - 1)), last


def single(large: Tensor, copies: int) -> Tensor:
    """The small batch; asserts that its copies in `large` are equal."""
    groups, last = parts(large, copies)
    for of_image in (groups, last):
        differing = [i for i, t in enumerate(of_image) if not same_bits(t, of_image[0])]
        assert not differing, f"{len(differing)} copies differ, the first at {differing[0]}"
    return torch.cat([groups[0], last[:1]])


class Loss(torch.autograd.Function):
    """Stands for a loss that keeps no large tensor from forward to backward."""

    @staticmethod
    def forward(ctx, y, dy, copies):
        ctx.dy, ctx.copies = dy, copies
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return repeated(ctx.dy, ctx.copies), None, None


def step(module: nn.Module, x: Tensor, dy: Tensor | None, case: Case) -> Results:
    """The results of `evaluate` for the small batch, from a step of the large one."""
    module, copies = copy.deepcopy(module), copies_of(case.channels)
    large = repeated(x, copies).requires_grad_(case.wants_dx)
    assert large[:-copies].numel() > 2**31
    y = module(large)
    assert y.is_contiguous(memory_format=case.memory_format)
    results = {"y": single(y.detach(), copies)}
    if dy is not None:
        loss = Loss.apply(y, dy, copies)
        del y
        loss.backward()
    results["dx"] = single(large.grad, copies) if large.grad is not None else None
    for name, p in module.named_parameters():
        results[f"d{name}"] = None if p.grad is None else p.grad.double() / copies
    results |= dict(module.named_buffers())
    return results


def pixels_of_norms(plain: nn.Module, x: Tensor) -> dict[str, int]:
    """How many pixels each batch norm sees."""
    plain, found = copy.deepcopy(plain).float(), {}
    for name, child in plain.named_modules():
        if isinstance(child, nn.BatchNorm2d):
            child.register_forward_pre_hook(
                lambda _, args, name=name: found.update({name: samples_of(args[0].shape)})
            )
    plain(x.float())
    return found


def available_bytes() -> int:
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024


@pytest.fixture
def all_threads():
    torch.set_num_threads(os.cpu_count())
    yield
    torch.set_num_threads(1)  # as in other tests


@pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")
@pytest.mark.parametrize("name", CASES)
def test_more_than_two_to_the_31_elements_give_what_a_small_batch_gives(name, all_threads):
    case = CASES[name]
    needed = (case.tensors + 0.3) * 2**31 * DTYPE.itemsize
    if available_bytes() < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of memory")
    module = in_dtype(case.module(), DTYPE)
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.momentum = 1.0  # the running statistics are those of the batch
    plain = PlainAdd() if name == "residual_add" else plain_copy(module)
    x = torch.randn(IMAGES, case.channels, HEIGHT, WIDTH)
    x[-1] = 8 * x[-1] + 4
    x = x.to(DTYPE).contiguous(memory_format=case.memory_format)
    dy = None
    if case.wants_backward:
        dy = gradient_like(evaluate(plain, {"x": x})["y"])
        dy = dy.contiguous(memory_format=case.memory_format)
    frozen = [] if case.wants_dx else ["x"]
    problems = [({"x": x}, dy)]
    truth = evaluate_all(plain, problems, dtype=torch.float64, frozen=frozen)
    errors = eager_errors(plain, problems, truth, frozen=frozen)
    with pk.use_backend("cpu"):
        results = step(module, x, dy, case)
    copies = copies_of(case.channels)
    for norm, pixels in pixels_of_norms(plain, x).items():  # variances are unbiased by them
        key = f"{norm}.running_var"
        results[key] = results[key].double() * (1 - 1 / (copies * pixels)) / (1 - 1 / pixels)
    if dy is None:
        results = {n: t for n, t in results.items() if not n.startswith("d")}
    truth = {n: truth[n][0] if truth[n] is not None else None for n in results}
    assert_within_budget(results, truth, errors)
