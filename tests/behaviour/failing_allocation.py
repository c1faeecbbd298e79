"""Runs training steps in which one allocation fails; prints what went wrong.

    LD_PRELOAD=... python -m tests.behaviour.failing_allocation bn_relu-nchw-1 ...

The arguments are cases: a module, the memory format of its input, and the number of threads.
failing_allocation.cpp is loaded before the C library, and makes the allocation fail. Each step runs
in a process of its own: steps do not share the buffers of the library, and survive a crash.
"""

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import preact_kernels as pk
from tests.cases import random_block
from tests.oracle import same_bits

# Counts activations, weights, gradients and the buffers of the library; not torch's small objects.
LEAST_BYTES = 8 * 1024


def bottlenecks(memory: str) -> nn.Module:
    """Two blocks with projections, and one without, whose input memory modes leave out."""
    sizes = (64, 32), (128, 16), (64, 16)
    return pk.PreActStage([random_block("bottleneck", *size) for size in sizes], memory)


# Inputs and outputs have 64 channels. The CPU library serves all units.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "bn_relu": lambda: pk.BNReLU2d(64),
    "bn_relu_conv2d": lambda: pk.BNReLUConv2d(64, 64, 3, padding=1),
    "basic": lambda: random_block("basic", 64, 64),
    "bottleneck": lambda: random_block("bottleneck", 64, 16),
    "store": lambda: bottlenecks("store"),
    "rebuild": lambda: bottlenecks("rebuild"),
    "checkpoint": lambda: bottlenecks("checkpoint"),
}
MEMORY_FORMATS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}


def step_of(case: str, size: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    """A module, its input and the gradient of its output; the same numbers in each process."""
    name, memory_format, _ = case.split("-")
    torch.manual_seed(0)
    module = MODULES[name]()
    x, dy = torch.randn(2, 2, 64, size, size)
    x = x.contiguous(memory_format=MEMORY_FORMATS[memory_format])
    return module, x.requires_grad_(), dy


def copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tensors}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients of the parameters that have one."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


class Attempt(NamedTuple):
    """The outcome of a step in which an allocation failed."""

    failed_bytes: int  # 0: there were fewer allocations
    error: str
    faults: list[str]


def attempt(case: str, index: int) -> Attempt:
    """The step, in which the allocation after `index` others fails, and the step again."""
    torch.set_num_threads(int(case.split("-")[2]))
    torch.ones(2**20).exp_()  # starts the threads, which have memory of their own
    module, x, dy = step_of(case)
    expected, expected_x, _ = step_of(case)
    allocator = ctypes.CDLL(None)
    before, error = copies(module.named_buffers()), ""
    stage = "forward"
    allocator.fail_allocation(ctypes.c_long(index), ctypes.c_size_t(LEAST_BYTES))
    try:
        y = module(x)
        stage = "backward"
        y.backward(dy)
        del y
    except (RuntimeError, MemoryError) as raised:
        error = f"{type(raised).__name__} in the {stage}: {raised}"
    failed_bytes = allocator.failed_bytes()
    after, found = copies(module.named_buffers()), gradients(module)

    expected(expected_x).backward(dy)
    buffers = copies(expected.named_buffers())
    faults = []
    if not equal(after, before if error and stage == "forward" else buffers):
        faults.append("running statistics")
    if found and not equal(found, gradients(expected)):
        faults.append("gradients after the failure")
    module.load_state_dict(step_of(case)[0].state_dict())
    module.zero_grad()
    x.grad = None
    module(x).backward(dy)
    results = gradients(module) | copies(module.named_buffers()) | {"dx": x.grad}
    if not equal(results, gradients(expected) | buffers | {"dx": expected_x.grad}):
        faults.append("results of the next call")
    return Attempt(failed_bytes, error, faults)


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether all bits are the same."""
    return found.keys() == expected.keys() and all(same_bits(found[n], expected[n]) for n in found)


def in_a_process(case: str, index: int) -> Attempt:
    """`attempt` in a process of its own, which inherits this one's memory."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(attempt(case, index)).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    if not found:
        ended = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"{case}, allocation {index}: no result, ended with {ended}")
    return Attempt(*json.loads(found))


def attempts(case: str) -> list[Attempt]:
    """One attempt for each allocation of a step, and a last one in which none fails."""
    found = [in_a_process(case, 0)]
    while found[-1].failed_bytes:
        found.append(in_a_process(case, len(found)))
    return found


def main() -> None:
    torch.set_num_threads(1)  # a process with a pool of threads cannot be forked
    for name in MODULES:  # modules are imported by the first call
        module, x, dy = step_of(f"{name}-nhwc-1", size=2)
        module(x).backward(dy)
    print(json.dumps({case: attempts(case) for case in sys.argv[1:]}))


if __name__ == "__main__":
    main()
