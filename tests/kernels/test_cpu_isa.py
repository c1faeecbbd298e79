"""The CPU kernels of every instruction set that this machine has."""

import os
import re
import subprocess
import sys

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cpu
from tests.oracle import distance

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

NAMES = ("generic", "avx2", "avx512", "avx512_bf16")  # from lesser to better


def run_with(isa, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PREACT_KERNELS_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


def skip_without(isa):
    if NAMES.index(isa) > NAMES.index(cpu.kernels().instruction_set):
        pytest.skip(f"needs {isa}")


@pytest.mark.parametrize("isa", NAMES)
def test_an_instruction_set_is_taken_by_name(isa):
    skip_without(isa)
    program = "from preact_kernels.kernels import cpu; cpu.load_error(); "
    done = run_with(isa, "-c", program + "print(cpu.kernels().instruction_set)")
    assert done.stdout.strip() == isa, done.stderr


# The best one runs in every other test.
@pytest.mark.parametrize("isa", NAMES[:-1])
def test_convolutions_of_an_instruction_set(isa):
    skip_without(isa)
    if cpu.kernels().instruction_set == isa:
        pytest.skip("all other tests run with it")
    names = ("ops/test_bn_relu_conv", "ops/test_bn_stats", "kernels/test_cpu_weight_stationary")
    files = [f"tests/{name}.py" for name in names]
    # What kernels compute, not what is the same above them.
    chosen = "cpu and (forward or strips or finite or mean or statistics)"
    options = ("-q", "-x", "-n", "0", "-m", "not slow", "-k", chosen, "-p", "no:cacheprovider")
    done = run_with(isa, "-m", "pytest", *files, *options)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100


def unit(x, weight, dy):
    norm = (torch.ones(x.shape[1]), torch.zeros(x.shape[1]))
    x, weight = (t.bfloat16().requires_grad_() for t in (x, weight))
    y = pk.bn_relu_conv2d(x, weight, *norm, None, None, padding=1, training=True)
    return y, *torch.autograd.grad(y, (x, weight), dy.bfloat16())


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18, 1e30])
def test_products_of_bfloat16_neither_vanish_nor_overflow(scale):
    """Weights and gradients far from 1, whose products are in the range of float32."""
    x, dy = torch.randn(2, 32, 6, 5), torch.randn(2, 32, 6, 5)
    weight = torch.randn(32, 32, 3, 3)
    with pk.use_backend("cpu"):
        assert pk.backend_for(weight.bfloat16(), padding=1) == "cpu: fused convolution"
        y, dx, dweight = unit(x, weight, dy)
        scaled_y, dx_of_scaled, _ = unit(x, weight * scale, dy)
        _, scaled_dx, scaled_dweight = unit(x, weight, dy * scale)
    for one, scaled in (
        (y, scaled_y),
        (dx, dx_of_scaled),
        (dx, scaled_dx),
        (dweight, scaled_dweight),
    ):
        error = distance(scaled.double() / scale, one.double()) / one.double().norm()
        assert error < 2 * 2**-8
