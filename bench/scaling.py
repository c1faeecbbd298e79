"""Weak scaling of a data-parallel training step: `torchrun --nproc-per-node N -m bench`.

Every process trains the network on its own batch of --batch images, in DistributedDataParallel with
`SyncBatchNorm`. Three steps take turns, with the same number of threads (on a CPU, cores divided by
processes):

    alone     one process trains, the others wait
    apart     every process trains its own copy at the same time, without communication
    together  the data-parallel step: gradients and statistics are shared

Efficiency is alone / together; the share of sending and waiting is 1 - apart / together.
`torch.nn.SyncBatchNorm` does not run on a CPU: there the plain network uses the statistics of each
process.
"""

import argparse
import dataclasses
import datetime
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench import correctness, measure, records
from bench.contenders import Contender, Network, is_rival
from bench.network import TrainingStep
from bench.records import SCALING, ScalingRow, number, put, slug
from preact_kernels.study import data

CONTENDERS = ("eager-channels-last", "fused-store", "fused-rebuild", "fused-checkpoint")
SHARED, LOCAL = "of all processes", "of each process"


@dataclasses.dataclass(frozen=True)
class DataParallel(Contender):
    """A contender in DistributedDataParallel."""

    batch_norm: str = SHARED
    is_joined: bool = False  # takes the images of all processes and returns all logits

    @classmethod
    def of(cls, contender: Contender, batch_norm: str) -> "DataParallel":
        """Returns `contender` with the statistics of all processes or of each process."""
        fields = {**vars(contender), "same_function": batch_norm == SHARED}
        return cls(**fields, batch_norm=batch_norm)

    def build(self, network, state, device, dtype) -> nn.Module:
        """Builds the wrapped network."""
        model = super().build(network, state, device, dtype)
        is_shared, on_gpu = self.batch_norm == SHARED, device.type == "cuda"
        if is_shared and on_gpu:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        ddp = DistributedDataParallel(model, [device] if on_gpu else None)
        if is_shared and not on_gpu:  # DDP refuses a module with SyncBatchNorm on a CPU
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return _Joined(ddp) if self.is_joined else ddp


class _Joined(nn.Module):
    def __init__(self, ddp: nn.Module) -> None:
        super().__init__()
        self.ddp = ddp

    def forward(self, images: Tensor) -> Tensor:
        count, rank = dist.get_world_size(), dist.get_rank()
        own = self.ddp(images.chunk(count)[rank])
        logits = [torch.empty_like(own) for _ in range(count)]
        dist.all_gather(logits, own.detach())
        own.register_hook(lambda gradient: count * gradient)  # DDP divides it by the count
        logits[rank] = own
        return torch.cat(logits)


def chosen(a: argparse.Namespace) -> list[DataParallel]:
    """Returns the contenders of a run."""
    wanted = [c for c in a.usable if c.name in (a.contenders or CONTENDERS) and not c.graphed]
    on_cpu = a.device.type == "cpu"
    return [DataParallel.of(c, LOCAL if on_cpu and is_rival(c.name) else SHARED) for c in wanted]


def _slowest(value: float, device: torch.device) -> float:
    """Returns the largest value of all processes."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def verdict_of(contender: DataParallel, network: Network, images: data.Images, a) -> tuple:
    """Compares with one process on the joined batch; wrong: it is wrong in any process."""
    count = dist.get_world_size()
    batch = count * max(1, 16 // count)
    joined = dataclasses.replace(contender, is_joined=True)
    try:
        found = correctness.judge(joined, network, images, batch, a.device, a.dtype)
        correct, note = found.correct, found.note
    except Exception as error:  # the other processes wait for the result of this one
        correct, note = "no", measure.first_line(error)
    if _slowest(float(correct == "no"), a.device):
        correct, note = "no", note or "wrong in another process"
    return correct, note


def measure_scaling(
    a: argparse.Namespace, network: Network, images: data.Images, stamp: Callable, deadline_s: float
) -> list[ScalingRow]:
    """Checks the contenders against one process on the joined batch, then times them in turn.

    After `deadline_s` (a value of `time.monotonic()`) no round starts, except the first.
    """
    rank, device, batch = dist.get_rank(), a.device, a.batch[0]
    batches = data.Batches(images, batch, seed=2 + rank, size=network.image_size)
    drawn, state = [batches[i] for i in range(4)], network.state()
    rows, steps = [], []
    for contender in chosen(a):
        correct, note = verdict_of(contender, network, images, a)
        row = stamp(
            ScalingRow(
                contender.name,
                network.name,
                contender.batch_norm,
                batch,
                measure.dtype_name(a.dtype),
                dist.get_world_size(),
                correct=correct,
                note=note,
            )
        )
        rows.append(row)
        if correct == "no":
            continue
        inputs = [(contender.input(x, device, a.dtype), y.to(device)) for x, y in drawn]
        own = TrainingStep(Contender.build(contender, network, state, device, a.dtype), inputs)
        shared = TrainingStep(contender.build(network, state, device, a.dtype), inputs)
        own()
        shared()
        steps.append((row, own, shared, ([], [], [])))
    for index in range(a.steps):
        if index and _slowest(float(time.monotonic() > deadline_s), device):
            break
        for _, own, shared, (alone, apart, together) in steps:
            for step, times in ((own, alone), (own, apart), (shared, together)):
                dist.barrier()
                waits = times is alone and rank > 0
                times.append(_slowest(0 if waits else measure.time_once_ms(step, device), device))
    for row, _, _, times in steps:
        row.set_times(*map(statistics.median, times))
    return rows


def table(rows: list[ScalingRow]) -> str:
    """Formats times, images per second and efficiency of every row."""
    columns = {
        "network": ("case", ""),
        "contender": ("contender", ""),
        "batch statistics": ("batch_norm", ""),
        "alone, ms": ("alone_ms", ",.1f"),
        "apart, ms": ("apart_ms", ",.1f"),
        "together, ms": ("together_ms", ",.1f"),
        "images/s": ("images_per_s", ",.1f"),
        "efficiency": ("efficiency", ".2f"),
        "sending and waiting": ("sending_share", ".0%"),
    }
    lines = [
        {name: number(getattr(row, field), form) for name, (field, form) in columns.items()}
        for row in rows
    ]
    return records.table(lines)


def main(a: argparse.Namespace) -> int:
    """Measures the networks of the command line in the processes that torchrun started.

    Returns:
        1 if the results of a contender are wrong, else 0.
    """
    deadline_s = time.monotonic() + a.time_limit
    local, on_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if a.device.type == "cuda":
        if torch.cuda.device_count() < on_node:
            raise SystemExit(
                f"bench: expected a GPU for each of {on_node} processes, got "
                f"{torch.cuda.device_count()}; --device cpu measures the CPU"
            )
        a.device = torch.device("cuda", local)
        torch.cuda.set_device(a.device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // on_node))
    backend, timeout = "nccl" if a.device.type == "cuda" else "gloo", datetime.timedelta(minutes=5)
    dist.init_process_group(backend, timeout=timeout)
    processes = dist.get_world_size()
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    command = f"torchrun --nproc-per-node {on_node} -m bench {shlex.join(sys.argv[1:])}"
    images, machine = data.load(a.data), measure.Machine.of(a.device, command)
    say(f"{machine.device}; {machine.versions}; commit {machine.commit}; data: {images.name}")
    say(f"weak scaling: {processes} processes, each with {a.batch[0]} images", flush=True)
    path = a.out / f"{slug(machine.device)}-{processes}-processes{SCALING}"
    if dist.get_rank() == 0:
        path.unlink(missing_ok=True)
    rows: list[ScalingRow] = []
    for name in a.networks:
        if _slowest(float(time.monotonic() > deadline_s), a.device):
            say(f"left out: {name}: no time left")
            continue
        network = Network.named(name, images.classes)
        rows += measure_scaling(a, network, images, machine.stamp, deadline_s)
        if dist.get_rank() == 0:
            put(path, *rows)
    wrong = [row for row in rows if row.correct == "no"]
    say(table(rows))
    for row in wrong:
        say(f"WRONG: {row.contender} on {row.case}: {row.note}")
    say(f"results in {path}")
    dist.destroy_process_group()
    return 1 if wrong else 0
