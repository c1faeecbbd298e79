"""Runs that must give the same bits; tests/behaviour/test_determinism.py says what differs."""

import contextlib

import torch

from testbed.cuda_on_host import serve_cpu
from tests.cases import device_of
from tests.oracle import assert_same_bits


@contextlib.contextmanager
def threads(count):
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@contextlib.contextmanager
def schedule(seed):
    serve_cpu.set_schedule(seed)
    try:
        yield
    finally:
        serve_cpu.set_schedule()


@contextlib.contextmanager
def reversed_programs():
    from triton.runtime.interpreter import interpreter_builder as builder

    set_grid_idx = type(builder).set_grid_idx

    def set_reversed(*index):
        set_grid_idx(builder, *(n - 1 - i for n, i in zip(builder.grid_dim, index, strict=True)))

    builder.set_grid_idx = set_reversed
    try:
        yield
    finally:
        del builder.set_grid_idx


def runs(backend):
    """A context for each run: the first is what the others are compared with."""
    if device_of(backend) != "cpu":
        return [contextlib.nullcontext() for _ in range(20)]
    return {
        "cpu": [threads(2) for _ in range(4)],
        "triton": [contextlib.nullcontext(), reversed_programs()],
        "cuda": [schedule(seed) for seed in range(3)],
    }[backend]


def assert_runs_agree(backend, run):
    """Every call of `run` gives the same bits."""
    results = []
    for context in runs(backend):
        with context:
            results.append(run())
    for other in results[1:]:
        assert_same_bits(other, results[0])
