"""An op refuses a tensor that it cannot read, by the name of its argument."""

import re

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cpu
from testbed.cuda_on_host import serve_cpu
from tests.ops.damaged_calls import damaged_calls, valid_calls

needs_cpu_library = pytest.mark.skipif(
    bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"
)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("namespace", "backend"),
    [
        pytest.param("preact_kernels_cpu", "auto", marks=needs_cpu_library),
        ("preact_kernels_cuda", "auto"),
        ("preact_kernels", "reference"),
        pytest.param("preact_kernels", "cpu", marks=needs_cpu_library),
    ],
)
def test_a_tensor_that_an_op_cannot_read_is_refused_by_its_name(namespace, backend):
    if "cuda" in namespace and not serve_cpu.install():
        pytest.skip("the CUDA kernels do not run on the host here")
    wrong = []
    with pk.use_backend(backend):
        for valid in valid_calls(namespace):
            valid.run()
            for text, call, message in damaged_calls(valid, namespace != "preact_kernels"):
                found = call.error()
                if not re.match(message, found):
                    wrong.append(f"{text}: {found[:100]}")
    assert not wrong, "\n".join(wrong)


def double(value):
    return [t.double() for t in value] if isinstance(value, list) else value.double()


def planar(t):
    return t.contiguous()


def rows(t):
    return torch.stack([t, t])


def longer(tensors):
    return [torch.cat([t, t]) for t in tensors]


# What is changed of a valid call, and what the error says.
WRONG = {
    "preact_kernels_cpu": [
        ("block_run_backward", {"eps": [1e-5]}, "eps: expected 4 values, got 1"),
        ("block_run_backward", {"inputs": double}, "inputs: expected the dtype of"),
        ("block_run_backward", {"kept_blocks": [2]}, "kept_blocks: expected ascending"),
        ("block_run_backward", {"means": [], "variances": []}, "means: expected 4 tensors"),
        ("block_run_backward", {"units_per_block": 1}, "kept_blocks: expected all 4 blocks if"),
        ("block_run_backward", {"y": None}, "y: expected the output"),
        ("block_run_backward", {"y": double}, "y: expected the dtype of g or step_x"),
        ("block_run_forward", {"kept_blocks": [-1]}, "kept_blocks: expected ascending indices"),
        ("block_run_forward", {"kept_blocks": [0, 0]}, "kept_blocks: expected ascending indices"),
        ("block_run_forward", {"kept_blocks": [2]}, "kept_blocks: expected ascending indices"),
        ("block_run_forward", {"units_per_block": 0}, "units_per_block: expected a divisor of 4"),
        ("block_run_forward", {"units_per_block": 3}, "units_per_block: expected a divisor of 4"),
        ("bn_stats", {"x": None}, "x: expected a tensor, got none"),
        ("conv_route", {"x": double}, "x: expected float32, bfloat16 or float16"),
        ("group_stats", {"groups": 0}, "groups: expected a divisor of the channels 32"),
        ("group_stats", {"groups": 3}, "groups: expected a divisor of the channels 32"),
        ("norm_act_backward_input", {"mean": rows}, r"sums: expected \[2, N, C\] for a norm"),
        ("norm_act_backward_input", {"sums": torch.flatten}, r"sums: expected \[2, C\] or"),
        ("norm_act_backward_mask", {"activation": "silu"}, "activation: expected relu with y, got"),
        ("norm_act_backward_mask", {"y": planar}, "y: expected memory dense in NHWC order"),
        ("norm_act_backward_sums", {"activation": "identity"}, "activation: expected relu with y"),
        ("norm_act_conv_backward", {"g": double}, "g: expected the dtype of the convolution"),
        ("norm_act_conv_backward", {"skip": None, "step_x": None}, "step_x: expected one where dy"),
        ("norm_act_conv_backward", {"step_var": None}, "step_mean, step_var, step_weight"),
        ("norm_act_conv_backward", {"step_x": None}, "skip: expected none without a step"),
        ("norm_act_conv_forward", {"activation": "swish"}, "activation: expected a known name"),
        ("norm_act_conv_forward", {"conv_weight": lambda w: w[..., :2]}, "conv_weight: .* odd"),
        ("norm_act_conv_forward", {"conv_weight": lambda w: w[:, :16]}, "conv_weight: .* 32 to"),
        (
            "norm_act_conv_forward",
            {"conv_weight": lambda w: w[..., :1, :1], "stride": [2, 1]},
            "stride: expected 1 for a 1x1 kernel",
        ),
        ("norm_act_conv_forward", {"dtype": torch.float16}, "dtype: expected that of x"),
        ("norm_act_conv_forward", {"dtype": torch.float64}, "dtype: expected float32, bfloat16"),
        ("norm_act_conv_forward", {"residual": double}, "residual, g, step_x: expected the dtype"),
        ("norm_act_conv_forward", {"stride": [0, 1]}, "stride: expected 1 or more, got 0"),
        ("norm_act_conv_forward", {"stride": [1]}, "stride: expected 2 values, got 1"),
        ("norm_act_forward", {"activation": "silu"}, "activation: expected relu or identity"),
        ("norm_act_forward", {"residual": double}, "residual: expected the dtype of x"),
        ("norm_act_forward", {"residual": planar}, "residual: expected memory dense in NHWC order"),
        ("norm_act_forward", {"x": planar}, "residual: expected memory dense in NCHW order"),
        ("norm_input_gradient", {"g": double}, "g: expected the dtype of x"),
        ("norm_input_gradient", {"skip": None, "step_x": None}, "step_x: expected a tensor, got"),
        ("scaled_running_stats_update", {"batch": longer}, r"batch: expected shape \["),
        ("scaled_running_stats_update", {"factors": [1.0]}, "factors: expected 2 values to match"),
    ],
    "preact_kernels": [
        ("group_stats", {"groups": 0}, "groups: expected"),
        ("group_stats", {"groups": 3}, "groups: expected a divisor of the channels 32 of x, got 3"),
        ("group_stats", {"x": lambda x: x[:0]}, "x: expected at least one value, got none"),
        ("norm_act_conv_backward", {"skip": None, "step_x": None}, "step_x: expected a tensor"),
        ("norm_act_conv_backward", {"step_x": None, "wants_dy": False}, "skip: expected None"),
        ("norm_act_conv_forward", {"dtype": torch.int64}, "dtype: expected a floating point"),
        ("norm_act_conv_forward", {"padding": [1]}, "padding: expected an int or a pair of ints"),
        ("norm_act_backward_mask", {"activation": "silu"}, "activation: expected relu with y, got"),
        ("norm_act_backward_sums", {"activation": "identity"}, "activation: expected relu with y"),
        ("norm_act_forward", {"activation": "silu"}, "activation: expected relu or identity"),
        ("norm_act_forward", {"activation": "swish"}, "activation: expected a known name"),
        ("norm_act_forward", {"residual": double}, "residual: expected dtype float32, got float64"),
        ("running_stats_update", {"batch": longer}, r"batch\[0\]: expected shape \[32\], got"),
    ],
}


@pytest.mark.parametrize(
    ("namespace", "op", "changes", "message"),
    [
        pytest.param(namespace, *case, marks=needs_cpu_library if "cpu" in namespace else ())
        for namespace, cases in WRONG.items()
        for case in cases
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(namespace, op, changes, message):
    (call,) = [call for call in valid_calls(namespace) if call.op == op]
    changes = {
        name: change(call.arguments[name]) if callable(change) else change
        for name, change in changes.items()
    }
    with pk.use_backend("reference"):  # for the registered ops
        assert re.match(message, call.changed(**changes).error())


def test_running_statistics_that_share_memory_are_refused_before_any_is_written():
    running = [torch.zeros(8), torch.zeros(1).expand(8)]
    with pytest.raises(ValueError, match=r"^running\[1\]: expected elements that share no memory"):
        torch.ops.preact_kernels.running_stats_update(running, [torch.ones(8)] * 2, 0.1)
    assert not running[0].any()
