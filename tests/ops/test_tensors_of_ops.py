"""An op refuses a tensor that it cannot read, by the name of its argument."""

import re

import pytest
import torch

from preact_kernels.kernels import cpu
from testbed.cuda_on_host import serve_cpu
from tests.ops import random_calls
from tests.ops.random_arguments import tensors_in


def cut(t, left=-1):
    t = t.clone()
    t.untyped_storage().resize_(left % t.nbytes)
    return t


def cut_behind_an_offset(t):
    """The storage has enough bytes for a tensor that begins it."""
    t = t.new_empty(t.numel() + 1).as_strided(t.shape, t.stride(), 1).copy_(t)
    t.untyped_storage().resize_(t.nbytes)
    return t


def cut_with_gaps(t):
    """The storage has enough bytes for a dense tensor."""
    spread = strided(t)
    spread.untyped_storage().resize_(t.nbytes)
    return spread


def freed(t):
    return cut(t, 0)


def flat(t):
    return t.flatten()


def of_integers(t):
    return t.to(torch.int64)


def other_float(t):
    return t.to(torch.float16 if t.dtype == torch.float32 else torch.float32)


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


def sparse(t):
    return t.to_sparse()


def meta(t):
    return t.to("meta")


# Damage, and what the errors say.
REGISTERED = {
    cut: "a storage of",
    cut_behind_an_offset: "a storage of",
    cut_with_gaps: "a storage of",
    flat: "",
    of_integers: "",
    other_float: "",
    freed: "a storage of",
}
# PyTorch's dispatcher refuses sparse tensors for the registered ops, and takes meta tensors.
NATIVE = {**REGISTERED, strided: "", sparse: "a strided tensor", meta: "a CPU tensor"}
DAMAGE = {
    "preact_kernels_cpu": NATIVE,
    "preact_kernels_cuda": NATIVE,
    "preact_kernels:reference": REGISTERED,
    "preact_kernels:cpu": REGISTERED,
}
LEFT_OUT = {  # that no valid call has; what `resident_run_is_served` need not read
    ("preact_kernels_cuda", "conv_bias"),
    ("resident_run_backward", "y"),
    ("resident_run_backward", "negated"),
    ("resident_run_is_served", "conv_weights"),
}
TAKE_ANY_SHAPE = ("dropout_", "dropout_bits", "norm_act_conv_is_served")
TAKE_ANY_STRIDES = ("conv_weight", "conv_weights", "negated")
TAKE_ANY_FLOAT = ("x", "g", "step_x", "residual", "conv_weight", "conv_weights", "running", "batch")


def is_valid(damaged, op, name, t):
    """Whether the op takes the tensor with this damage too."""
    if damaged is flat:
        is_vector = t.dim() < 3 and "sums" not in name  # with a row for each image, or without
        return op.name in TAKE_ANY_SHAPE or is_vector
    if damaged is other_float:
        return op.name.startswith("dropout") or name in TAKE_ANY_FLOAT
    return damaged is strided and name in TAKE_ANY_STRIDES


def doubles(tensors):
    return [t.double() for t in tensors]


def longer(tensors):
    return [torch.cat([t, t]) for t in tensors]


def no_tensors(_):
    return []


def no_tensor(_):
    return None


def valid_call(name, ops, index):
    """A call with as many as possible of the tensors that may be None."""
    calls = [random_calls.draw(name, ops, 0, index + i * len(ops), damages=0) for i in range(40)]
    return max(calls, key=lambda call: sum(map(bool, map(tensors_in, call.arguments.values()))))


def refusal(call, name, value):
    """The error of a call with another value of an argument, or what it returned instead."""
    try:
        random_calls.run(call._replace(arguments={**call.arguments, name: value}))
    except Exception as error:
        return str(error)
    return "returned"


@pytest.mark.parametrize("name", DAMAGE)
def test_a_tensor_that_an_op_cannot_read_is_refused_by_its_name(name):
    if "cuda" in name and not serve_cpu.install():
        pytest.skip("the CUDA kernels do not run on the host here")
    if "cpu" in name and cpu.load_error():
        pytest.skip(f"backend cpu: {cpu.load_error()}")
    wrong = []
    with random_calls.selected(name) as ops:
        for index, op in enumerate(ops):
            call = valid_call(name, ops, index)
            random_calls.run(call)
            for p in op.parameters:
                if "Tensor" not in p.kind or {(name, p.name), (op.name, p.name)} & LEFT_OUT:
                    continue
                given = call.arguments[p.name]
                first, *others = tensors_in(given)
                for damaged, message in DAMAGE[name].items():
                    if is_valid(damaged, op, p.name, first):
                        continue
                    t = damaged(first)
                    found = refusal(call, p.name, [t, *others] if isinstance(given, list) else t)
                    if not re.match(rf"{p.name}(\[0\])?: expected {message}", found):
                        wrong.append(f"{op.name}, {p.name} {damaged.__name__}: {found[:100]}")
                        break  # the next may end the process
                if isinstance(given, list):
                    found = refusal(call, p.name, others)
                    if not re.match(r"\w+: expected \d+ tensors", found):
                        wrong.append(f"{op.name}, {p.name} shorter: {found[:100]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")
@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        (
            "norm_act_conv_forward",
            {"conv_weight": lambda w: torch.cat([w, w], 1)},
            "conv_weight: expected in_channels",
        ),
        ("block_run_backward", {"y": torch.Tensor.double}, "y: expected the dtype of g or step_x"),
        ("block_run_backward", {"inputs": doubles}, "inputs: expected the dtype of"),
        ("block_run_backward", {"means": no_tensors, "variances": no_tensors}, "means: expected"),
        (
            "block_run_backward",
            {"units_per_block": lambda _: 1, "kept_blocks": lambda _: [0]},
            r"kept_blocks: expected all \d+ blocks if units_per_block is 1, got 1",
        ),
        *(
            ("block_run_forward", {"kept_blocks": lambda _, given=given: given}, message)
            for given, message in (
                ([0, 0], "kept_blocks: expected ascending indices below .*, got 0"),
                ([9], "kept_blocks: expected ascending indices below .*, got 9"),
                ([-1], "kept_blocks: expected ascending indices below .*, got -1"),
            )
        ),
        ("block_run_backward", {"kept_blocks": lambda _: [9]}, "kept_blocks: expected ascending"),
        ("block_run_backward", {"y": no_tensor}, "y: expected the output"),
        ("norm_act_conv_backward", {"step_x": no_tensor}, "skip: expected none without a step"),
        ("running_stats_update", {"batch": longer}, r"batch: expected shape \["),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(op, changes, message):
    name = "preact_kernels_cpu"
    with random_calls.selected(name) as ops:
        call = valid_call(name, ops, [o.name for o in ops].index(op))
        changed = {n: change(call.arguments[n]) for n, change in changes.items()}
        call = call._replace(arguments=call.arguments | changed)
        with pytest.raises(RuntimeError, match=f"^{message}"):
            random_calls.run(call)


def test_running_statistics_that_share_memory_are_refused_before_any_is_written():
    running = [torch.zeros(8), torch.zeros(1).expand(8)]
    with pytest.raises(ValueError, match=r"^running\[1\]: expected elements that share no memory"):
        torch.ops.preact_kernels.running_stats_update(running, [torch.ones(8)] * 2, 0.1)
    assert not running[0].any()
