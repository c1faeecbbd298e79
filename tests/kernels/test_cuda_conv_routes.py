"""What the fused convolutions of the CUDA library serve, what they refuse, and with which words."""

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cuda
from preact_kernels.kernels.contract import Conv
from tests.cases import in_dtype, random_block
from tests.conftest import IS_CUDA_ON_HOST
from tests.kernels.cuda_conv_cases import (
    DEVICE,
    Case,
    every_dtype,
    forward_inputs,
    kernels,
    launches,
    on_host,
)
from tests.kernels.cuda_on_host import serve_cpu
from tests.oracle import check, plain_copy
from tests.stage.test_preact_stage import recorded_calls

pytestmark = pytest.mark.usefixtures("fused_convolutions")


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
            forward(x, *changed, rest[0], (1, 1), None, rest[1], True)
    with pytest.raises(RuntimeError, match="stride: expected 1"):
        forward(inputs.x, *norm, weight, (2, 1), None, None, True)


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
            forward(inputs.x, *inputs.norm, weight, (1, 1), None, None, True)

    assert not launches(call_op) if IS_CUDA_ON_HOST else call_op() is None
