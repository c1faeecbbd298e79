"""Several processes that torchrun starts, in DDP and FSDP2, equal one with the joined batch.

Batch norms are `SyncBatchNorm`. Jobs run over NCCL where each process has a GPU of its own, and
over gloo on the CPU elsewhere; `distributed_worker.py` has them.

There is no test of `DistributedDataParallel.join` that goes on with fewer processes: PyTorch does
not support it beside `SyncBatchNorm`, whose messages the processes that have left do not answer. A
process without images takes part with an empty batch: the cases "none".
"""

import functools
import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from filelock import FileLock

from tests.behaviour import distributed_worker as worker
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


class Run(NamedTuple):
    """One torchrun, which does the jobs of several tests: most of its time is for starting."""

    processes: int
    cases: str = "quick"
    backend: str = "auto"

    @property
    def seeds(self) -> dict[str, tuple[int, ...]]:
        """The jobs, with the seeds of each."""
        prefix = "quick-" if self.cases == "quick" else ""
        count = 1 if self.cases == "quick" else 2
        jobs = {f"{prefix}{kind}": seeds_off_kinks(kind, count) for kind in worker.KINDS}
        if self == QUICK:
            jobs |= {"messages": (0,), "nodes": (0,), "join": (0,)}
        if self in (QUICK, THREE_PROCESSES):
            jobs["mixed"] = tuple(range(24))  # errors of 6 losses can differ twofold by chance
        return jobs


QUICK = Run(2)
THREE_PROCESSES = Run(3, "all")
SLOW = pytest.mark.slow
RUNS = [
    QUICK,
    *(pytest.param(run, marks=SLOW) for run in (Run(2, "all"), THREE_PROCESSES)),
    pytest.param(Run(2, backend="reference"), marks=SLOW),
]


def name_of(run: Run) -> str:
    """The parameter of a test."""
    return "-".join(map(str, run))


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function of a run and a job: what each process found, by rank."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which the processes of pytest-xdist share

    def results(run, job):
        folder = root / f"distributed-{name_of(run)}"
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


def errors_of(run: Run, folder: Path) -> str:
    """Does the jobs of a run, which write to `folder`; what torchrun says of them."""
    jobs = [f"{job}:{','.join(map(str, seeds))}" for job, seeds in run.seeds.items()]
    arguments = ["tests.behaviour.distributed_worker", folder, *jobs]
    timeout_s = 240 if run.cases == "quick" else 900
    try:
        done = torchrun(run.processes, arguments, timeout_s=timeout_s, backend=run.backend)
    except subprocess.TimeoutExpired as error:
        return f"{error}\n{error.stderr}"
    return f"exit status {done.returncode}\n{done.stderr}"


def in_order(steps, *, dtype=None, channels_last=False, reversed_batch=False):
    """The batches in a dtype, and in another order of evaluation that is equally right."""

    def image_order(images, labels):
        images = images if dtype is None else images.to(dtype)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return (images.flip(0), labels.flip(0)) if reversed_batch else (images, labels)

    return [[image_order(*batch) for batch in parts] for parts in steps]


ORDERS = ({}, {"channels_last": True}, {"reversed_batch": True})


def alone(network, seed, accumulates, **order) -> Results:
    """One process with the joined batch, in plain PyTorch."""
    model = plain_copy(worker.NETWORKS[network](seed)).to(order.get("dtype"))
    steps = [parts if accumulates else parts[:1] for parts in worker.batches(seed)]
    return worker.train(model, in_order(steps, **order))


@functools.cache
def seeds_off_kinks(kind, count):
    """Seeds whose pre-activations all keep away from zero: see `off_kinks` in oracle.py."""
    networks = {case.model: None for case in worker.cases(kind, is_quick=False)}
    seeds = []
    for seed in itertools.count():
        with ReLUInputs() as seen:
            for network, accumulates in itertools.product(networks, (False, True)):
                alone(network, seed, accumulates, dtype=torch.float64)
        if seen.nearest > 50 * unit_roundoff(torch.float32):
            seeds.append(seed)
        if len(seeds) == count:
            return tuple(seeds)


def stacked(runs) -> Results:
    """The results of several seeds as one tensor by name."""
    return {name: torch.stack([run[name] for run in runs]) for name in runs[0]}


@functools.cache
def truth_and_errors(network, accumulates, seeds):
    """The joined batch in float64, and how far plain float32 is from it."""

    def joined(**order):
        return stacked([alone(network, seed, accumulates, **order) for seed in seeds])

    truth = joined(dtype=torch.float64)
    runs = [joined(**order) for order in ORDERS]
    errors = {name: max(distance(run[name], truth[name]) for run in runs) for name in truth}
    return truth, errors


@pytest.mark.parametrize("kind", worker.KINDS)
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_training_in_processes_equals_training_on_the_joined_batch(run, kind, results_of):
    is_quick = run.cases == "quick"
    job = f"quick-{kind}" if is_quick else kind
    expected, seeds = worker.cases(kind, is_quick), run.seeds[job]
    wrong = []
    for found in results_of(run, job):
        assert list(found) == list(map(tuple, expected))
        for case, runs in zip(expected, found.values(), strict=True):
            truth, errors = truth_and_errors(case.model, case.accumulates, seeds)
            try:
                assert_within_budget(stacked(runs), truth, errors)
            except AssertionError as error:
                wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_batch_norm_sends_one_message_forward_and_one_backward_in_every_memory_mode(results_of):
    norms = {"stages": 16, "first stage": 6, "residual": 16, "dense": 9}
    for found in results_of(QUICK, "messages"):
        assert set(found) == set(itertools.product(norms, worker.MEMORY_MODES))
        for (name, _), (forward, backward, count) in found.items():
            assert count == norms[name]
            assert forward == ["c10d::allgather_"] * count
            # The sums of the first batch norm make the gradient of its input alone.
            needed = count - (name == "first stage")
            assert backward == ["c10d::allreduce_"] * needed, name


def test_a_stage_in_fsdp_is_one_node_unless_its_blocks_are_wrapped(results_of):
    for nodes in results_of(QUICK, "nodes"):
        assert nodes["stages", "stages"] == {"PreActStage": 2, "BNReLU": 1}
        assert nodes["stages", "blocks"] == {"PreActStage": 6, "BNReLU": 1}


@pytest.mark.parametrize("model", worker.WRAPPERS_OF_CONVERTED)
def test_wrapped_models_run_what_was_converted(model, results_of):
    for nodes in results_of(QUICK, "nodes"):
        for wrapper in worker.WRAPPERS_OF_CONVERTED[model]:
            runs = 5 if "_blocks" in wrapper else 2
            expected = {
                "residual": {"PreActStage": runs, "BNReLU": 1},
                "dense": {"PreActStage": 3, "BNReLUConv": 2, "BNReLU": 1},
            }
            assert nodes[model, wrapper] == expected[model], wrapper


def test_ddp_tells_every_process_when_one_has_no_batch_left(results_of):
    for errors in results_of(QUICK, "join"):
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


def with_whole_gradients(results) -> list[dict[str, Results]]:
    """The results of each process by model, with gradients joined from the shards of all.

    The dimensions before those of a gradient are seeds and steps.
    """
    stacks = [{model: stacked(runs) for model, runs in found.items()} for found in results]

    def joined(model):
        names = [name for name in stacks[0][model] if name.startswith("d")]
        return {n: torch.cat([found[model][n] for found in stacks], dim=2) for n in names}

    gradients = {model: joined(model) for model in stacks[0]}
    return [{model: found[model] | gradients[model] for model in found} for found in stacks]


@pytest.mark.parametrize("run", [QUICK, pytest.param(THREE_PROCESSES, marks=SLOW)], ids=name_of)
def test_fsdp_in_mixed_precision_is_as_close_to_float64_as_plain_modules_in_it(run, results_of):
    processes, seeds = run.processes, run.seeds["mixed"]
    for rank, found in enumerate(with_whole_gradients(results_of(run, "mixed"))):
        truth = stacked([mixed_truth(seed, processes, rank) for seed in seeds])
        plain = found["plain"], found["reversed"]
        errors = {n: max(distance(run[n], t) for run in plain) for n, t in truth.items()}
        for memory in worker.MEMORY_MODES:
            assert_within_budget({n: found[memory][n] for n in truth}, truth, errors)
        truth, errors = mixed_joined(seeds, processes)
        assert_within_budget({n: found["shared"][n] for n in truth}, truth, errors)


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_process_that_dies_ends_the_job_with_an_error(how, tmp_path):
    done = torchrun(2, ["tests.behaviour.distributed_worker", tmp_path, f"{how}:0"], timeout_s=60)
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []  # no process came to the end
    summary = done.stderr.rpartition("ChildFailedError")[2]
    assert "local_rank: 1" in summary
    assert how == "exit" or "dies in the middle of a step" in summary


def test_a_process_that_is_ended_beside_one_that_failed_says_where_it_was(tmp_path):
    done = torchrun(2, ["tests.behaviour.distributed_worker", tmp_path, "fail:0"], timeout_s=60)
    assert done.returncode != 0
    assert re.search(r"line \d+ in wait_for_minutes\n.*line \d+ in fail_beside_others", done.stderr)
