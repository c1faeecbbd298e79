"""A call on the backend of a compiled library runs that library's ops."""

import pytest
import torch

import preact_kernels as pk
from tests.cases import ConvCase, conv_inputs, device_of, in_dtype, random_stage

DIRECT = ConvCase("direct", (2, 16, 5, 6), 16, padding=1, residual=True)


def run(call, **inputs):
    leaves = {n: None if t is None else t.clone() for n, t in inputs.items()}
    for name, leaf in leaves.items():
        if leaf is not None and "running" not in name:
            leaf.requires_grad_()
    call(**leaves).sum().backward()


def bn_relu(dtype):
    names = ("x", "bn_weight", "bn_bias", "running_mean", "running_var")
    inputs = {n: t for n, t in conv_inputs(DIRECT, dtype).items() if n in names}
    run(lambda **i: pk.bn_relu(**i, training=True), **inputs)


def fused_conv(dtype):
    inputs = conv_inputs(DIRECT, dtype)
    run(lambda **i: pk.bn_relu_conv2d(**i, training=True, **DIRECT.conv), **inputs)


def pytorch_conv(dtype):
    case = DIRECT._replace(padding=0)
    inputs = conv_inputs(case, dtype)
    run(lambda **i: pk.bn_relu_conv2d(**i, training=True, **case.conv), **inputs)


def residual_add(dtype):
    run(pk.residual_add, x=torch.randn(2, 4, 3, 5), branch=torch.randn(2, 4, 3, 5))


def stage(dtype):
    module = in_dtype(random_stage(width=16), dtype)
    run(module, x=torch.randn(3, 10, 7, 6).to(dtype))


CALLS = {
    bn_relu: ["bn_stats", "bn_relu_forward", "bn_relu_backward_sums", "bn_relu_backward_input"],
    fused_conv: ["bn_stats", "bn_relu_conv_forward", "bn_relu_conv_backward", "bn_input_gradient"],
    pytorch_conv: ["bn_relu_forward", "residual_add_forward", "bn_relu_backward_mask"],
    residual_add: ["residual_add_forward"],
    stage: ["preact_stage_forward", "preact_stage_backward"],
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(
            name,
            call,
            id=f"{name}-{call.__name__}",
            marks=pytest.mark.calls(*(f"preact_kernels_{name}::{op}" for op in ops)),
        )
        for name in ("cpu", "cuda")
        for call, ops in CALLS.items()
    ],
)
def test_a_call_runs_the_ops_of_the_library(name, call):
    dtype = torch.float32 if name == "cpu" else torch.bfloat16
    with pk.use_backend(name), torch.device(device_of(name)):
        call(dtype)


@pytest.mark.calls("preact_kernels_cpu::running_stats_update")
def test_running_statistics_are_updated_by_the_library():
    with pk.use_backend("cpu"):
        bn_relu(torch.float32)
