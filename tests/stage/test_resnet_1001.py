"""The blocks of ResNet-1001: many tiles a block of threads, on a GPU at the batches of training.

Without a GPU there are fewer images, and one multiprocessor: at least six tiles per block of
threads.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch

import preact_kernels as pk
from preact_kernels.ops import dispatch as backends
from testbed.cuda_on_host import serve_cpu
from tests.cases import (
    ConvCase,
    conv_inputs,
    device_of,
    in_dtype,
    plain_bn_relu_conv2d,
    random_block,
    recorded_calls,
)
from tests.oracle import assert_same_bits, check, evaluate, plain_copy
from tests.reruns import assert_runs_agree

pytestmark = pytest.mark.backends("cuda", slow=("triton",))

IS_ON_GPU = torch.cuda.is_available()
DRAWS = 3 if IS_ON_GPU else 1


class Stage(NamedTuple):
    """The width of a bottleneck, the side of its images, and how many suffice without a GPU."""

    width: int
    side: int
    images: int

    def __str__(self):
        return f"{4 * self.width}x{self.side}x{self.side}"


STAGES = (Stage(16, 32, 3), Stage(32, 16, 6), Stage(64, 8, 6))


def stages(*widths):
    """All stages; without a GPU, the quick suite takes those of the given widths."""
    slow = [() if IS_ON_GPU or s.width in widths else (pytest.mark.slow,) for s in STAGES]
    cases = [pytest.param(s, id=str(s), marks=m) for s, m in zip(STAGES, slow, strict=True)]
    return pytest.mark.parametrize("stage", cases)


every_batch = pytest.mark.parametrize("batch", [128, 64] if IS_ON_GPU else [None])


@pytest.fixture(autouse=True)
def one_multiprocessor(backend):
    if device_of("cuda") == "cpu":
        serve_cpu.set_schedule(multiprocessors=1)
    yield
    if device_of("cuda") == "cpu":
        serve_cpu.set_schedule()


def units(stage, batch=None):
    """The convolutions of a bottleneck."""
    wide, shape = 4 * stage.width, (stage.side, stage.side)
    for name, channels, out_channels, kernel in (
        ("conv1", wide, stage.width, 1),
        ("conv2", stage.width, stage.width, 3),
        ("conv3", stage.width, wide, 1),
    ):
        x = (batch or stage.images, channels, *shape)
        yield ConvCase(name, x, out_channels, kernel, padding=kernel // 2, residual=name == "conv3")


def images(stage, batch=None):
    return torch.randn(batch or stage.images, 4 * stage.width, stage.side, stage.side).bfloat16()


def blocks(stage, count=2, **options):
    made = [random_block("bottleneck", 4 * stage.width, stage.width) for _ in range(count)]
    return in_dtype(pk.PreActStage(made, **options), torch.bfloat16)


@every_batch
@stages(16, 64)
def test_every_unit_keeps_the_budget(stage, batch, backend):
    for case in units(stage, batch):
        call = partial(pk.bn_relu_conv2d, training=True, **case.conv)
        plain = partial(plain_bn_relu_conv2d, training=True, **case.conv)
        check(call, plain, conv_inputs(case, torch.bfloat16), DRAWS)


@every_batch
@stages(32)
def test_a_run_of_blocks_keeps_the_budget(stage, batch, backend, monkeypatch):
    fused = blocks(stage).to(device_of(backend))
    kernels = backends.select(backend, device_of(backend), torch.bfloat16)
    names = [n for n in ("block_run_forward", "block_run_backward") if hasattr(kernels, n)]
    calls = [recorded_calls(kernels, name, monkeypatch) for name in names]
    check(fused, plain_copy(fused), {"x": images(stage, batch)}, DRAWS)
    assert all(calls)
    assert backend != "cuda" or calls


@stages()
def test_runs_of_a_run_of_blocks_agree(stage, backend):
    fused = blocks(stage, memory="rebuild").to(device_of(backend))
    inputs = {"x": images(stage, 128 if IS_ON_GPU else None)}
    assert_runs_agree(backend, partial(evaluate, fused, inputs))


def exact_blocks(stage, **options):
    """Blocks that round nothing: of integers up to 8 they make integers up to 64."""
    made = blocks(stage, 3, **options).eval()
    for module in made.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = 0.25
            values = {"weight": 1.0, "running_var": 0.75}
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                t.detach().fill_(values.get(name, 0.0))
        elif isinstance(module, torch.nn.Conv2d):
            weight = module.weight.detach().zero_()
            for k in range(len(weight)):  # one tap each
                flat = weight[k].view(-1)
                flat[torch.randint(len(flat), ())] = 1 - 2 * (k % 2)
    return made


@every_batch
@stages()
def test_inputs_that_are_rebuilt_without_rounding_give_the_bits_of_stored_ones(
    stage, batch, backend
):
    stored = exact_blocks(stage).to(device_of(backend))
    x = torch.randint(-8, 9, images(stage, batch).shape).bfloat16()
    expected = evaluate(stored, {"x": x})
    assert expected["y"].equal(expected["y"].round()) and 16 < expected["y"].abs().max() <= 64
    rebuilt = pk.PreActStage(list(stored), memory="rebuild").eval()
    assert_same_bits(evaluate(rebuilt, {"x": x}), expected)
