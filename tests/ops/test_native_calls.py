"""A call on the backend of a compiled library runs that library's ops."""

import pytest
import torch

import preact_kernels as pk
from tests.cases import ConvCase, conv_inputs, device_of, in_dtype, random_stage
from tests.oracle import evaluate

DIRECT = ConvCase("direct", (2, 16, 5, 6), 16, padding=1, residual=True)


def bn_relu(dtype):
    names = ("x", "bn_weight", "bn_bias", "running_mean", "running_var")
    inputs = {n: t for n, t in conv_inputs(DIRECT, dtype).items() if n in names}
    evaluate(lambda **i: pk.bn_relu(**i, training=True), inputs)


def fused_conv(dtype):
    inputs = conv_inputs(DIRECT, dtype)
    evaluate(lambda **i: pk.bn_relu_conv2d(**i, training=True, **DIRECT.conv), inputs)


def stage(dtype):
    evaluate(in_dtype(random_stage(width=16), dtype), {"x": torch.randn(3, 10, 7, 6).to(dtype)})


CALLS = {
    bn_relu: ["bn_stats", "norm_act_forward", "norm_act_backward_sums", "norm_act_backward_input"],
    fused_conv: [
        "bn_stats",
        "norm_act_conv_forward",
        "norm_act_conv_backward",
        "norm_input_gradient",
    ],
    stage: ["block_run_forward", "block_run_backward"],
}


def case(library, call):
    own = ["scaled_running_stats_update"] if (library, call) == ("cpu", bn_relu) else []
    names = [f"preact_kernels_{library}::{op}" for op in (*CALLS[call], *own)]
    marks = pytest.mark.calls(*names)
    return pytest.param(library, call, id=f"{library}-{call.__name__}", marks=marks)


@pytest.mark.parametrize(
    ("name", "call"), [case(library, call) for library in ("cpu", "cuda") for call in CALLS]
)
def test_a_call_runs_the_ops_of_the_library(name, call):
    dtype = torch.float32 if name == "cpu" else torch.bfloat16
    with pk.use_backend(name), torch.device(device_of(name)):
        call(dtype)
