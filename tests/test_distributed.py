"""Several processes that torchrun starts, in DDP and FSDP2, equal one with the joined batch.

Batch norms are `SyncBatchNorm`. Jobs run over NCCL where each process has a GPU of its own, and
over gloo on the CPU elsewhere; `distributed_worker.py` has them.

There is no test of `DistributedDataParallel.join` that goes on with fewer processes: PyTorch does
not support it beside `SyncBatchNorm`, whose messages the processes that have left do not answer. A
process without images takes part with an empty batch: the cases "none".
"""

import functools
import itertools

import pytest
import torch

from tests import distributed_worker as worker
from tests.oracle import (
    ReLUInputs,
    Results,
    assert_within_budget,
    distance,
    plain_copy,
    unit_roundoff,
)
from tests.torchrun import torchrun

pytestmark = pytest.mark.not_under_sanitizer


def results_of(processes, folder, *jobs, seeds=(0,), backend="auto"):
    """What each process found, by rank."""
    arguments = ["tests.distributed_worker", folder, *jobs, "--seeds", *seeds]
    done = torchrun(processes, arguments, timeout_s=240, backend=backend)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


def in_order(steps, *, dtype=None, channels_last=False, reversed_batch=False):
    """The batches in a dtype, and in another order of evaluation that is equally right."""

    def image_order(images, labels):
        images = images if dtype is None else images.to(dtype)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return (images.flip(0), labels.flip(0)) if reversed_batch else (images, labels)

    return [[image_order(*batch) for batch in parts] for parts in steps]


ORDERS = ({}, {"channels_last": True}, {"reversed_batch": True})


def alone(seed, accumulates, **order) -> Results:
    """One process with the joined batch, in plain PyTorch."""
    model = plain_copy(worker.network(seed)).to(order.get("dtype"))
    steps = [parts if accumulates else parts[:1] for parts in worker.batches(seed)]
    return worker.train(model, in_order(steps, **order))


@functools.cache
def seeds_off_kinks(count):
    """Seeds whose pre-activations all keep away from zero: see `off_kinks` in oracle.py."""
    seeds = []
    for seed in itertools.count():
        with ReLUInputs() as seen:
            for accumulates in (False, True):
                alone(seed, accumulates, dtype=torch.float64)
        if seen.nearest > 50 * unit_roundoff(torch.float32):
            seeds.append(seed)
        if len(seeds) == count:
            return tuple(seeds)


def stacked(runs) -> Results:
    """The results of several seeds as one tensor by name."""
    return {name: torch.stack([run[name] for run in runs]) for name in runs[0]}


@functools.cache
def truth_and_errors(accumulates, seeds):
    """The joined batch in float64, and how far plain float32 is from it."""
    truth = stacked([alone(seed, accumulates, dtype=torch.float64) for seed in seeds])
    runs = [stacked([alone(seed, accumulates, **order) for seed in seeds]) for order in ORDERS]
    errors = {name: max(distance(run[name], truth[name]) for run in runs) for name in truth}
    return truth, errors


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("processes", "cases", "backend"),
    [
        (2, "quick", "auto"),
        pytest.param(2, "all", "auto", marks=SLOW),
        pytest.param(3, "all", "auto", marks=SLOW),
        pytest.param(2, "quick", "reference", marks=SLOW),
    ],
)
def test_training_in_processes_equals_training_on_the_joined_batch(
    processes, cases, backend, kind, tmp_path
):
    job = kind if cases == "all" else f"quick-{kind}"
    seeds = seeds_off_kinks(1 if cases == "quick" else 2)
    ranks = results_of(processes, tmp_path, job, seeds=seeds, backend=backend)
    expected = [tuple(case) for case in worker.cases(kind, cases == "quick")]
    wrong = []
    for found in (rank[job] for rank in ranks):
        assert list(found) == expected
        for case, runs in found.items():
            truth, errors = truth_and_errors(worker.Case(*case).accumulates, seeds)
            try:
                assert_within_budget(stacked(runs), truth, errors)
            except AssertionError as error:
                wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """The results of the jobs that count, by rank."""
    return results_of(2, tmp_path_factory.mktemp("counted"), "messages", "nodes", "join")


def test_a_batch_norm_sends_one_message_forward_and_one_backward_in_every_memory_mode(counted):
    for found in (rank["messages"] for rank in counted):
        assert list(found) == list(worker.MEMORY_MODES)
        for forward, backward, norms, stage_backward in found.values():
            assert norms == 16
            assert forward == ["c10d::allgather_"] * norms
            assert backward == ["c10d::allreduce_"] * norms
            assert stage_backward == ["c10d::allreduce_"] * 5  # of 6, as the first needs no sums


def test_a_stage_in_fsdp_is_one_node_unless_its_blocks_are_wrapped(counted):
    assert [rank["nodes"] for rank in counted] == [{"stages": 2, "blocks": 6}] * 2


def test_ddp_tells_every_process_when_one_has_no_batch_left(counted):
    for errors in (rank["join"] for rank in counted):
        assert list(errors) == list(worker.MEMORY_MODES)
        assert all("exhausted" in error for error in errors.values())


@functools.cache
def mixed_parts(seed, processes):
    """A step in float64 on what FSDP2 rounds to bfloat16: the part of every process."""
    parts = []
    for rank in range(processes):
        model = worker.mixed_network(seed, "plain").bfloat16().double()
        (images, labels), _ = worker.mixed_batches(seed, processes)[0]
        share = slice(rank * worker.IMAGES, (rank + 1) * worker.IMAGES)
        steps = [[(images.bfloat16().double(), labels)]]
        parts.append(worker.train(model, steps, None, worker.Processes(share=share)))
    return parts


def mixed_truth(seed, processes, rank) -> Results:
    """The loss and its gradients, of all processes; and the running statistics of one."""
    parts = mixed_parts(seed, processes)
    truth = {n: v for n, v in parts[rank].items() if n.endswith(("running_mean", "running_var"))}
    sums = [name for name in parts[0] if name == "loss" or name.startswith("d")]
    return truth | {name: sum(part[name] for part in parts) for name in sums}


@functools.cache
def mixed_joined(seeds, processes):
    """A step on the joined batch in float64, and how far plain bfloat16 is from it."""

    def step(seed, **order):
        model = worker.mixed_network(seed, "plain").bfloat16().to(order["dtype"])
        (batch, _), *_ = worker.mixed_batches(seed, processes)
        rounded = [[(batch[0].bfloat16(), batch[1])]]
        return worker.train(model, in_order(rounded, **order))

    def steps(**order):
        found = stacked([step(seed, **order) for seed in seeds])
        return {n: v for n, v in found.items() if n in names}

    parameters = {name for name, _ in worker.mixed_network(0, "plain").named_parameters()}
    names = step(seeds[0], dtype=torch.float64).keys() - parameters
    truth = steps(dtype=torch.float64)
    runs = [steps(dtype=torch.bfloat16, **order) for order in ORDERS]
    return truth, {n: max(distance(run[n], t) for run in runs) for n, t in truth.items()}


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=SLOW)])
def test_fsdp_in_mixed_precision_is_as_close_to_float64_as_plain_modules_in_it(processes, tmp_path):
    seeds = range(6)
    ranks = results_of(processes, tmp_path, "mixed", seeds=seeds)
    for rank, results in enumerate(ranks):
        truth = stacked([mixed_truth(seed, processes, rank) for seed in seeds])
        found = {}
        for name, runs in results["mixed"].items():
            found[name] = {n: v for n, v in stacked(runs).items() if n in truth}
        plain = found["plain"], found["reversed"]
        errors = {n: max(distance(run[n], t) for run in plain) for n, t in truth.items()}
        for memory in worker.MEMORY_MODES:
            assert_within_budget(found[memory], truth, errors)
        truth, errors = mixed_joined(seeds, processes)
        shared = stacked(results["mixed"]["shared"])
        assert_within_budget({name: shared[name] for name in truth}, truth, errors)


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_process_that_dies_ends_the_job_with_an_error(how, tmp_path):
    done = torchrun(2, ["tests.distributed_worker", tmp_path, how], timeout_s=60)
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []  # no process came to the end
    assert "local_rank: 1" in done.stderr
