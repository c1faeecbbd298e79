"""The CPU kernels of every instruction set that this machine has."""

import os
import subprocess
import sys

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cpu
from tests.oracle import distance

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

NAMES = ("generic", "avx2", "avx512", "avx512_bf16")


def run_with(isa, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PREACT_KERNELS_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


def skip_without(isa):
    if cpu.load_error() or NAMES.index(isa) > NAMES.index(cpu.kernels().instruction_set):
        pytest.skip(f"needs {isa}")


@pytest.mark.parametrize("isa", NAMES)
def test_an_instruction_set_is_taken_by_name(isa):
    skip_without(isa)
    name = "from preact_kernels.kernels import cpu; cpu.load_error(); "
    done = run_with(isa, "-c", name + "print(cpu.kernels().instruction_set)")
    assert done.stdout.strip() == isa, done.stderr


# The best one runs in every other test.
@pytest.mark.parametrize("isa", NAMES[:-1])
def test_convolutions_of_an_instruction_set(isa):
    skip_without(isa)
    if cpu.kernels().instruction_set == isa:
        pytest.skip("all other tests run with it")
    files = ("tests/test_bn_relu_conv.py", "tests/test_bn_stats.py")
    options = ("-q", "-x", "-n", "0", "-m", "not slow", "-k", "cpu", "-p", "no:cacheprovider")
    done = run_with(isa, "-m", "pytest", *files, *options)
    assert done.returncode == 0, done.stdout[-3000:]


def unit(x, weight, dy, dtype):
    channels = x.shape[1]
    x, weight = (t.to(dtype).requires_grad_() for t in (x, weight))
    norm = [torch.full((channels,), v, device=x.device) for v in (1.0, 0.0)]
    norm = [v.to(torch.promote_types(dtype, torch.float32)) for v in norm]
    y = pk.bn_relu_conv2d(x, weight, *norm, None, None, padding=1, training=True)
    return y, *torch.autograd.grad(y, (x, weight), dy.to(dtype))


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18, 1e30])
def test_products_of_bfloat16_neither_vanish_nor_overflow(scale):
    """Weights and gradients far from 1, whose products are in the range of float32."""
    x, dy = torch.randn(2, 32, 6, 5), torch.randn(2, 32, 6, 5)
    weight = torch.randn(32, 32, 3, 3)
    with pk.use_backend("cpu"):
        near = unit(x, weight, dy, torch.bfloat16)
        far = unit(x, weight * scale, dy, torch.bfloat16)
        far_dy = unit(x, weight, dy * scale, torch.bfloat16)
    for one, other, factor in (
        (near[0], far[0], scale),
        (near[2], far[2], 1.0),
        (near[2], far_dy[2], scale),
    ):
        error = distance(other.double() / factor, one.double()) / one.double().norm()
        assert error < 2 * 2**-8
