"""Several processes, in DDP and FSDP2, equal one with the joined batch.

Batch norms are `SyncBatchNorm`. Processes communicate over NCCL if each has a GPU of its own, else
over gloo on the CPU; `distributed_worker.py` has what they do. A process without images takes part
with an empty batch: the cases "none".
"""

import functools
import multiprocessing

import pytest
import torch
from torch.multiprocessing import start_processes

from tests.behaviour import distributed_worker as worker
from tests.oracle import (
    ReLUInputs,
    Results,
    assert_within_budget,
    distance,
    plain_copy,
    stacked,
    unit_roundoff,
)

pytestmark = pytest.mark.not_under_sanitizer


def results_of(processes, backend, folder):
    """What each process found, by job."""
    # A process that has called a GPU cannot be forked. On a CPU, the modules are imported once.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload([worker.__name__])
    arguments = processes, backend, folder
    start_processes(worker.main, arguments, nprocs=processes, start_method=method)
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


def train_alone(
    model, steps, dtype=torch.float32, channels_last=False, reversed_batch=False
) -> Results:
    """One process with the joined batch, in plain PyTorch; in orders that are equally right."""

    def in_order(images, labels):
        images = images.to(dtype)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return (images.flip(0), labels.flip(0)) if reversed_batch else (images, labels)

    ordered = [[in_order(*batch) for batch in parts] for parts in steps]
    found = worker.train(plain_copy(model).to(dtype), ordered)
    return found | {"logits": found["logits"].flip(1)} if reversed_batch else found


ORDERS = ({}, {"channels_last": True}, {"reversed_batch": True})


def errors_in_any_order(truth, results_in) -> dict[str, float]:
    """How far plain PyTorch is from the truth, at most, in orders that are equally right."""
    runs = [results_in(**order) for order in ORDERS]
    return {name: max(distance(run[name], truth[name]) for run in runs) for name in truth}


@functools.cache
def truth_and_errors(network, accumulates):
    """The joined batch in float64, and how far plain float32 is from it."""
    seed = worker.SEEDS[network]
    steps = [parts if accumulates else parts[:1] for parts in worker.batches(seed)]
    run = functools.partial(train_alone, worker.NETWORKS[network](seed), steps)
    with ReLUInputs() as seen:
        truth = run(dtype=torch.float64)
    assert seen.nearest > 50 * unit_roundoff(torch.float32), "take another seed"
    return truth, errors_in_any_order(truth, run)


@pytest.mark.parametrize(
    ("processes", "backend"),
    [
        pytest.param(3, "auto", marks=pytest.mark.slow),
        pytest.param(2, "reference", marks=pytest.mark.slow),
    ],
)
def test_training_in_more_processes_and_on_another_backend(processes, backend, tmp_path):
    check_training([found["train"] for found in results_of(processes, backend, tmp_path)])


def test_processes_equal_one_with_the_joined_batch(tmp_path):
    """One test: most of the time is for starting the processes."""
    found = results_of(2, "auto", tmp_path)
    check_training([of_rank["train"] for of_rank in found])
    check_mixed_precision([of_rank["mixed"] for of_rank in found])


def check_training(found):
    """Logits, gradients and parameters keep the budget."""
    wrong = []
    for of_rank in found:
        assert list(of_rank) == list(map(tuple, worker.CASES))
        for case, results in zip(worker.CASES, of_rank.values(), strict=True):
            truth, errors = truth_and_errors(case.model, case.accumulates)
            try:
                assert_within_budget(results, truth, errors)
            except AssertionError as error:
                wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


def check_mixed_precision(found):
    """FSDP2 in mixed precision is as close to float64 as the joined batch in bfloat16."""

    def step(seed, **order):
        ((images, labels),) = worker.mixed_batch(seed, 2)
        model = worker.mixed_network(seed).bfloat16()
        return train_alone(model, [[(images.bfloat16(), labels)]], **order)

    def steps(dtype=torch.bfloat16, **order):
        return stacked([step(seed, dtype=dtype, **order) for seed in worker.MIXED_SEEDS])

    parameters = {name for name, _ in worker.mixed_network(0).named_parameters()}
    truth = {n: t for n, t in steps(torch.float64).items() if n not in parameters}
    errors = errors_in_any_order(truth, steps)
    for of_rank in map(stacked, found):
        assert_within_budget({n: of_rank[n] for n in truth}, truth, errors)
