"""Several processes, in DDP and FSDP2, equal one with the joined batch.

Batch norms are `SyncBatchNorm`. Jobs run over NCCL where each process has a GPU of its own, and
over gloo on the CPU elsewhere; `distributed_worker.py` has them.

A process without images takes part with an empty batch: the cases "none".
"""

import functools
import itertools
import multiprocessing
import os
from typing import NamedTuple

import pytest
import torch
from filelock import FileLock
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from tests.behaviour import distributed_worker as worker
from tests.oracle import (
    ReLUInputs,
    Results,
    assert_within_budget,
    distance,
    plain_copy,
    same_bits,
    stacked,
    unit_roundoff,
)

pytestmark = pytest.mark.not_under_sanitizer


class Run(NamedTuple):
    """Processes that do the jobs of several tests: most of their time is for starting."""

    processes: int = 2
    backend: str = "auto"


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function of a run and a job: what each process found, by rank."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which the processes of pytest-xdist share

    def results(job, run=Run()):  # noqa: B008
        folder = root / f"distributed-{run.processes}-{run.backend}"
        errors = folder / "errors.txt"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                errors.write_text(errors_of(run, folder))
        files = [folder / f"{job}-{rank}.pt" for rank in range(run.processes)]
        is_finished = all(file.exists() for file in files)
        assert is_finished, f"{job} did not finish: {errors.read_text()}"
        return [torch.load(file) for file in files]

    return results


def errors_of(run: Run, folder) -> str:
    """Does the jobs of a run, which write to `folder`; returns the traceback of a failure."""
    # A process that has called a GPU cannot be forked. On a CPU, the modules are imported once.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload([worker.__name__])
    try:
        start_processes(worker.main, (*run, folder), nprocs=run.processes, start_method=method)
    except (ProcessRaisedException, ProcessExitedException) as error:
        return str(error)
    return ""


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


RUNS = [Run(), *(pytest.param(r, marks=pytest.mark.slow) for r in (Run(3), Run(2, "reference")))]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run)))
def test_training_in_processes_equals_training_on_the_joined_batch(run, results_of):
    wrong = []
    for found in results_of("train", run):
        assert list(found) == list(map(tuple, worker.CASES))
        for case, (_, results) in zip(worker.CASES, found.values(), strict=True):
            truth, errors = truth_and_errors(case.model, case.accumulates)
            try:
                assert_within_budget(results, truth, errors)
            except AssertionError as error:
                wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


def test_wrapped_models_run_as_few_nodes(results_of):
    blocks = {"stages": 6, "residual": 5}
    for case, (nodes, _) in itertools.chain(*(found.items() for found in results_of("train"))):
        model, wrapper, *_ = case
        expected = {"PreActStage": 2, "NormAct": 1}
        if model == "units":
            has_images = case[3] != "none" or nodes["NormActConv"] == 2
            expected = {"NormActConv": 2 if has_images else 1, "NormAct": 1}
        elif model == "dense":
            expected = {"PreActStage": 3, "NormActConv": 2, "NormAct": 1}
        elif "_blocks" in wrapper:
            expected["PreActStage"] = blocks[model]
        if "reentrant" in wrapper:  # stages run in its nodes
            del expected["PreActStage"]
        assert nodes == expected, case


def test_a_batch_norm_sends_one_message_forward_and_one_backward_in_every_memory_mode(results_of):
    norms = {"stages": 15, "first stage": 6, "residual": 16, "dense": 9, "units": 2}
    for found in results_of("messages"):
        assert set(found) == set(itertools.product(norms, worker.MEMORY_MODES))
        for (name, _), (forward, backward, count) in found.items():
            assert count == norms[name]
            assert forward == ["c10d::allgather_"] * count
            # The sums of the first batch norm make the gradient of its input alone.
            needed = count - (name == "first stage")
            assert backward == ["c10d::allreduce_"] * needed, name


def test_fsdp_in_mixed_precision_is_as_close_to_float64_as_the_joined_batch_in_bfloat16(results_of):
    def step(seed, **order):
        ((images, labels),) = worker.mixed_batch(seed, 2)
        model = worker.mixed_network(seed).bfloat16()
        return train_alone(model, [[(images.bfloat16(), labels)]], **order)

    def steps(dtype=torch.bfloat16, **order):
        return stacked([step(seed, dtype=dtype, **order) for seed in worker.MIXED_SEEDS])

    parameters = {name for name, _ in worker.mixed_network(0).named_parameters()}
    truth = {n: t for n, t in steps(torch.float64).items() if n not in parameters}
    errors = errors_in_any_order(truth, steps)
    for found in map(stacked, results_of("mixed")):
        assert_within_budget({n: found[n] for n in truth}, truth, errors)


def test_one_process_may_have_one_value_a_channel(results_of):
    outputs, gradients, variances = zip(*results_of("one value"), strict=True)
    unit, x = plain_copy(worker.one_value_unit()), worker.one_value_batch().requires_grad_()
    y = unit(x)
    y.square().sum().backward()
    torch.testing.assert_close(torch.cat(outputs), y.detach())
    torch.testing.assert_close(torch.cat(gradients), x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(variances[0], unit.bn.running_var)
    assert same_bits(*variances)
