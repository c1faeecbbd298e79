"""float32 weights beside half precision: the GPU backends read them and write their gradients."""

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels.mixed_precision import MixedBlockKernels
from preact_kernels.ops import dispatch
from tests.behaviour.test_autocast import Autocast
from tests.cases import random_block
from tests.kernels.cuda_conv_cases import (
    ALL,
    DEVICE,
    TYPICAL,
    backward_inputs,
    call,
    dtype_name,
    forward_inputs,
    nhwc,
)
from tests.kernels.gpu_backends import on_gpu_backends
from tests.kernels.test_float32_stream import beside_stream
from tests.oracle import assert_same_bits, check, evaluate, plain_copy

pytestmark = pytest.mark.usefixtures("on_gpu_backend")


@pytest.mark.covering(1)
@on_gpu_backends
@pytest.mark.parametrize("case", TYPICAL, ids=str)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("stream", [None, "input", "output"])
def test_float32_weights_are_rounded_on_the_way(case, half, stream):
    kernels = dispatch.select(dispatch.current(), torch.device(DEVICE).type, half)
    if stream:
        kernels = MixedBlockKernels(kernels, kernels, half)
    for inputs, options in ((forward_inputs(case, half), True), (backward_inputs(case, half), ALL)):
        given = beside_stream(inputs, stream) if stream else inputs
        wide = torch.randn_like(inputs.conv_weight, dtype=torch.float32)
        expected = call(kernels, case, given._replace(conv_weight=wide.to(half)), options)
        for weight in (wide, nhwc(wide)):
            found = call(kernels, case, given._replace(conv_weight=weight), options)
            if "conv_weight" in found:
                assert found["conv_weight"].dtype == torch.float32
                found["conv_weight"] = found["conv_weight"].to(half)
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


@pytest.mark.covering(1, triton=0)
@on_gpu_backends
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize(
    ("x_dtype", "stream"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
)
def test_autocast_casts_no_weight_where_convolutions_are_fused(x_dtype, stream, memory):
    blocks = [random_block("bottleneck", 64, 16) for _ in range(2)]
    stage = Autocast(pk.PreActStage(blocks, memory, residual_dtype=stream)).to(DEVICE)
    plain = plain_copy(stage)
    weights = [p for p in stage.parameters() if p.dim() == 4]
    problems = [{"x": torch.randn(3, 64, 7, 6, device=DEVICE).to(x_dtype)} for _ in range(8)]
    counts = []
    for module in (stage, plain):
        with Casts(weights) as casts:
            evaluate(module, problems[0])
        counts.append(casts.count)
    results = check(stage, plain, problems)
    assert counts[0] == 0
    assert counts[1] >= 2 * len(weights)
    own = {n: t.dtype for n, t in results.items() if n != "dx" and n.startswith("d")}
    assert set(own.values()) == {torch.float32}
