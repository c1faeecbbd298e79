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

NAMES = ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16")  # from lesser to better


def test_kernels_of_lesser_instruction_sets():
    """The best one runs in every other test."""
    lesser = NAMES[: NAMES.index(cpu.kernels().instruction_set)]
    if not lesser:
        pytest.skip("needs avx2")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.each_instruction_set", *lesser],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = [int(n) for n in re.findall(r"(\d+) passed", done.stdout)]
    assert len(counts) == len(lesser) and min(counts) > 50


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
