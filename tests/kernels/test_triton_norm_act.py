"""What is particular to the Triton kernels for any activation and for norms with rows."""

import pytest
import torch

import preact_kernels as pk
from tests.cases import device_of, unit_of
from tests.kernels.op_cases import NORM_OPS, arguments, random_images, run
from tests.oracle import assert_same_bits, assert_within_budget

if "triton" not in pk.available_backends():
    pytest.skip("neither a GPU nor the interpreter of Triton", allow_module_level=True)

from preact_kernels.kernels import reference
from preact_kernels.kernels import triton as kernels
from preact_kernels.kernels.contract import Activation, Conv, Gradient, Inputs, Norm, Wanted
from tests.kernels.compile_triton import replace


@pytest.fixture(autouse=True)
def on_triton(poisoned_memory):
    with torch.device(device_of("triton")):
        yield


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
        found = {"y": y, **gradients._asdict()}
        return {name: t for name, t in found.items() if t is not None}

    truth, eager = results(reference, torch.float64), results(reference, torch.float32)
    errors = {name: float((t.double() - truth[name]).norm()) for name, t in eager.items()}
    assert_within_budget(results(kernels, torch.float32), truth, errors)


def test_which_activations_a_fused_convolution_serves():
    weight = torch.empty(20, 10, 1, 1)
    unit = unit_of(weight, Conv((1, 1), (0, 0), (1, 1), 1))
    for name, is_served in (("leaky_relu", True), ("identity", True), ("silu", False)):
        assert kernels.serves(unit._replace(activation=Activation(name))) == is_served
    assert not kernels.serves(unit._replace(has_rows=True))
