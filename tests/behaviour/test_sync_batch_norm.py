"""Two processes with `SyncBatchNorm` equal one process with the whole batch."""

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preact_kernels as pk
from bench import foreign_models as foreign
from tests.cases import random_stage, randomised
from tests.oracle import (
    assert_same_bits,
    assert_within_budget,
    eager_errors,
    evaluate,
    evaluate_all,
    gradient_like,
    plain_copy,
    same_bits,
)


def modules():
    """What is synchronised: each with the number of its input channels."""
    torch.manual_seed(7)
    frozen = randomised(pk.BNReLUConv2d(10, 8, 3, padding=1))
    frozen.bn.eval()
    return {
        "bn_relu": randomised(pk.BNReLU2d(10)),
        "cumulative_average": randomised(pk.BNReLU2d(10, momentum=None)),
        "bn_relu_conv": randomised(pk.BNReLUConv2d(10, 8, 3, padding=1, bias=True)),
        "frozen": frozen,
        "stage": random_stage(),
        "rebuilt_stage": random_stage(memory="rebuild"),
        "checkpointed_stage": random_stage(memory="checkpoint"),
        "converted": pk.convert(randomised(foreign.FunctionalBottleneck(10, 4))),
        "wide_stage": random_stage("basic", width=16),
        "wide_checkpointed_stage": random_stage("basic", width=16, memory="checkpoint"),
    }


# Images of each process, and their size: one process may have one value a channel.
BATCHES = {
    "even": ((2, 2), (7, 6)),
    "uneven": ((1, 4), (7, 6)),
    "one_value": ((1, 32), (1, 1)),
    "none": ((0, 3), (7, 6)),
}


def problems(batch):
    """Several whole batches of all processes: see `oracle.py` for why they are judged together.

    Batch norm of few values magnifies the errors of some draws far more than of others: there it
    takes more values and more draws.
    """
    counts, size = BATCHES[batch]
    generator = torch.Generator().manual_seed(3)
    draws = 16 if size == (1, 1) else 8
    return [torch.randn(sum(counts), 10, *size, generator=generator) for _ in range(draws)]


def incoming(y):
    return gradient_like(y, seed=4)


def join_group(rank, folder):
    """Two processes over gloo; one that waits in vain fails."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=3)
    dist.init_process_group("gloo", f"file://{folder}/address", timeout, 2, rank)


def work(rank, folder, batch, backend):
    """One process: its share of every result."""
    join_group(rank, folder)
    try:
        counts, _ = BATCHES[batch]
        begin = sum(counts[:rank])
        share = slice(begin, begin + counts[rank])
        found = {}
        for name, module in modules().items():
            synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))
            for x in problems(batch):
                dy = incoming(plain_copy(module).eval()(x))[share]
                with pk.use_backend(backend):
                    results = evaluate(synchronised, {"x": x[share]}, dy)
                found.setdefault(name, []).append(results)
        torch.save(found, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def run(function, folder, *arguments):
    """`function` in two processes; what each saved, by rank."""
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=function, args=(rank, folder, *arguments)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def joined(first, second):
    """The results of both processes as those of one: images in a row, weights' gradients added."""
    whole = {}
    for name, value in first.items():
        other = second[name]
        if value is None:
            assert other is None, name
            whole[name] = None
        elif name in ("y", "dx"):
            whole[name] = torch.cat([value, other])
        elif name.startswith("d"):
            whole[name] = value + other
        else:
            assert same_bits(value, other), f"{name} differs between the processes"
            whole[name] = value
    return whole


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.parametrize("batch", BATCHES)
def test_two_processes_equal_one_with_the_whole_batch(batch, backend, tmp_path):
    first, second = run(work, tmp_path, batch, backend)
    for name, module in modules().items():
        plain = plain_copy(module)
        whole = [({"x": x}, incoming(plain_copy(plain).eval()(x))) for x in problems(batch)]
        truth = evaluate_all(plain, whole, dtype=torch.float64)
        errors = eager_errors(plain, whole, truth)
        results = [joined(*shares) for shares in zip(first[name], second[name], strict=True)]
        stacked = {n: torch.stack([r[n] for r in results]) for n in truth}
        assert_within_budget(stacked, truth, errors)


DDP = {
    "store": ("store", False),
    "checkpoint": ("checkpoint", False),
    "static_graph": ("checkpoint", True),
}


def ddp_stage(name):
    torch.manual_seed(7)
    return random_stage(memory=DDP[name][0])


def train_with_ddp(rank, folder):
    """Gradients after two steps on this process's images."""
    join_group(rank, folder)
    try:
        found = {}
        for name, (_, static_graph) in DDP.items():
            stage = ddp_stage(name)
            wrapped = DistributedDataParallel(stage, static_graph=static_graph)
            for step in range(2):
                stage.zero_grad()
                wrapped(ddp_images(step, rank)).square().mean().backward()
            found[name] = {n: p.grad for n, p in stage.named_parameters()}
        torch.save(found, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def ddp_images(step, rank):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 10, 7, 6, generator=generator)[rank * 2 : rank * 2 + 2]


def test_distributed_data_parallel_averages_the_gradients_of_its_processes(tmp_path):
    first, second = run(train_with_ddp, tmp_path)
    for name in DDP:
        stage, shares = ddp_stage(name), []
        for rank in range(2):
            stage.zero_grad()
            stage(ddp_images(1, rank)).square().mean().backward()
            shares.append({n: p.grad.clone() for n, p in stage.named_parameters()})
        expected = {n: (shares[0][n] + shares[1][n]) / 2 for n in shares[0]}
        assert_same_bits(first[name], expected)
        assert_same_bits(second[name], expected)
