"""One process of test_distributed.py.

    torchrun -m tests.behaviour.distributed_worker FOLDER JOB:SEEDS ...

Writes what each job found to FOLDER, in a file by job and rank. The truth is computed by the same
functions, in one process that has the images of all.
"""

import argparse
import contextlib
import datetime
import faulthandler
import functools
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from bench import foreign_models as foreign
from preact_kernels.kernels import cuda
from preact_kernels.models.preact_resnet import PreActResNet
from preact_kernels.ops.memory_mode import MEMORY_MODES
from tests.cases import random_block, randomised

CLASSES = 5
IMAGES = 6  # of a batch, in all processes together
STEPS = 3  # of the optimizer

# Images of each process.
BATCHES = {
    2: {"even": (3, 3), "uneven": (1, 5), "none": (0, 6)},
    3: {"even": (2, 2, 2), "uneven": (1, 3, 2), "none": (4, 0, 2)},
}

Batch = tuple[Tensor, Tensor]  # images and labels


class Case(NamedTuple):
    """A way to train a network in several processes."""

    wrapper: str
    memory: str
    batch: str  # a key of BATCHES
    model: str = "stages"  # a key of NETWORKS

    @property
    def accumulates(self) -> bool:
        """Whether a step adds up the gradients of two batches."""
        return self.wrapper.endswith("_accumulated")


def cases(kind: str, is_quick: bool) -> list[Case]:
    """The cases of a kind; if quick, each wrapper, batch and model in one memory mode."""
    if kind == "converted":
        return converted_cases(is_quick)
    variants = {
        "ddp": (
            "static_graph",
            "unused",
            "small_buckets",
            "checkpointed",
            "accumulated",
            "reentrant_static_graph",  # a checkpoint that runs a backward inside the backward
        ),
        "fsdp": ("blocks", "accumulated"),
    }[kind]
    wrappers = [(kind, batch) for batch in BATCHES[2]]
    wrappers += [(f"{kind}_{variant}", "uneven") for variant in variants]
    return [
        Case(wrapper, memory, batch)
        for index, (wrapper, batch) in enumerate(wrappers)
        for mode, memory in enumerate(MEMORY_MODES)
        if not is_quick or mode == index % len(MEMORY_MODES)
    ]


# Of each model that is converted the ways to wrap it. It is converted before it is wrapped, if
# nothing else is named. Where FSDP2 wraps blocks of the dense network afterwards, its last batch
# norm is not fused, and needs a GPU as `SyncBatchNorm`.
DDP_OF_CONVERTED = (
    "ddp",
    "ddp_static_graph",
    "ddp_accumulated",
    "ddp_convert_inside",  # of the wrapper
    "ddp_convert_wrapper",
)
WRAPPERS_OF_CONVERTED = {
    "residual": (
        *DDP_OF_CONVERTED,
        "fsdp",
        "fsdp_convert_after",
        "fsdp_blocks",
        "fsdp_blocks_accumulated",
        "fsdp_blocks_convert_after",
    ),
    "dense": (
        *DDP_OF_CONVERTED,
        "fsdp",
        "fsdp_blocks_convert_after",
        "fsdp_blocks_convert_twice",  # before and after
    ),
}


def converted_cases(is_quick: bool) -> list[Case]:
    """The cases of converted models; if quick, each wrapper in one memory mode, with one batch."""
    wrappers = [
        (model, wrapper)
        for model, own in WRAPPERS_OF_CONVERTED.items()
        for wrapper in own
        if model == "residual"
        or not is_quick
        or wrapper in ("ddp", "fsdp", "fsdp_blocks_convert_twice")
    ]
    choices = list(itertools.product(MEMORY_MODES, BATCHES[2]))
    return [
        Case(wrapper, memory, batch, model)
        for index, (model, wrapper) in enumerate(wrappers)
        for choice, (memory, batch) in enumerate(choices)
        if not is_quick or choice == 4 * index % len(choices)
    ]


def network(seed: int, memory: str = "store") -> PreActResNet:
    """Two stages with blocks that are rebuilt, and parameters far from any default."""
    torch.manual_seed(seed)
    basic = [random_block("basic", 16, 16) for _ in range(3)]
    bottleneck = [random_block("bottleneck", 16, 8, 2)]
    bottleneck += [random_block("bottleneck", 32, 8) for _ in range(2)]
    stages = [pk.PreActStage(blocks, memory) for blocks in (basic, bottleneck)]
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return randomised(PreActResNet(stem, nn.Identity(), stages, 32, CLASSES))


def residual_network(seed: int) -> nn.Sequential:
    """Residual blocks of a class that is not of this package, in two runs, and a head."""
    torch.manual_seed(seed)
    stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    blocks = [foreign.FunctionalBottleneck(4, 4)]
    blocks += [foreign.FunctionalBottleneck(16, 4) for _ in range(2)]
    blocks += [foreign.FunctionalBottleneck(16, 6, 2), foreign.FunctionalBottleneck(24, 6)]
    head = nn.Sequential(nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return randomised(nn.Sequential(stem, *blocks, head, nn.Linear(24, CLASSES)))


def dense_network(seed: int) -> foreign.DenseNet:
    """A small DenseNet-BC."""
    torch.manual_seed(seed)
    return randomised(foreign.DenseNet(10, 4))


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "stages": network,
    "residual": residual_network,
    "dense": dense_network,
}


def batches(seed: int, images: int = IMAGES, size: int = 6) -> list[list[Batch]]:
    """For every step of the optimizer two batches, of which most cases use the first."""
    generator = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        x = torch.randn(images, 3, size, size, generator=generator)
        return x, torch.randint(CLASSES, (images,), generator=generator)

    return [[batch(), batch()] for _ in range(STEPS)]


class Processes(NamedTuple):
    """What `train` must know of the others."""

    count: int = 1
    share: slice = slice(None)  # of a batch
    until_last: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    # What to return of a parameter or gradient, which may be sharded.
    as_tensor: Callable[[Tensor], Tensor] = lambda t: t


def train(
    model: nn.Module,
    steps: Iterable[list[Batch]],
    call: Callable[[Tensor], Tensor] | None = None,
    processes: Processes = Processes(),  # noqa: B008
) -> dict[str, Tensor]:
    """Trains with SGD.

    Wrappers average gradients over processes, and the loss of the joined batch is a mean over its
    images. So the loss of a process is the sum over its images, divided by the images of all and
    multiplied by the number of processes.

    Args:
        model: in training mode.
        steps: batches of every step, whose gradients are added up.
        call: `model`, wrapped.
        processes: which images are this process's, and what to return of a tensor that is sharded.

    Returns:
        Of every step this process's part of the loss, and the gradients; and the parameters and
        buffers after the last one.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, gradients = [], []
    for parts in steps:
        optimizer.zero_grad()
        total = 0.0
        for index, (images, labels) in enumerate(parts):
            scope = contextlib.nullcontext if index == len(parts) - 1 else processes.until_last
            with scope():
                logits = (call or model)(images[processes.share]).double()
                loss = F.cross_entropy(logits, labels[processes.share], reduction="sum")
                loss = loss / (len(labels) * len(parts))
                (loss * processes.count).backward()
            total = total + loss.detach()
        losses.append(total)
        gradients.append(
            {
                f"d{name}": processes.as_tensor(p.grad).clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
        optimizer.step()
    found = {"loss": torch.stack(losses)}
    found |= {name: torch.stack([g[name] for g in gradients]) for name in gradients[0]}
    found |= {name: processes.as_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    return found | {name: b.clone() for name, b in model.named_buffers()}


def device() -> torch.device:
    """The GPU of this process where each has its own, else the CPU."""
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def in_ddp(model: nn.Module, **options) -> DistributedDataParallel:
    """`model` with `SyncBatchNorm`, wrapped.

    On a CPU, DistributedDataParallel refuses a module that contains `SyncBatchNorm`. There the
    children are replaced afterwards; parameters and buffers stay the same objects.
    """
    if device().type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return DistributedDataParallel(model, device_ids=[device()], **options)
    wrapped = DistributedDataParallel(model, **options)
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return wrapped


def in_fsdp(model: PreActResNet, by_block: bool = False, **options) -> nn.Module:
    """`model` in FSDP2: each stage, or each block, and the rest.

    Parameters are sharded `DTensor`s outside the forward of what was wrapped, and plain tensors
    inside. `fully_shard` hooks that forward. A wrapped stage reads the plain parameters of its
    blocks and stays one autograd node. A wrapped block has hooks, so the stage calls it as a
    module: each block is a node of its own, which saves the inputs of its units, and the memory
    mode of the stage has no effect.
    """
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for stage in model.stages:
        for part in stage if by_block else [stage]:
            fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that is converted."""
    kinds = (foreign.FunctionalBottleneck, foreign.DenseLayer, foreign.Transition)
    return [module for module in model.modules() if isinstance(module, kinds)]


def converted(case: Case, model: nn.Module) -> tuple[nn.Module, Callable]:
    """`model`, converted and wrapped, and the context in which gradients are not averaged."""
    if "_convert_" not in case.wrapper or case.wrapper.endswith("_twice"):
        pk.convert(model, memory=case.memory)
    if case.wrapper.startswith("fsdp"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        for block in blocks_of(model) if "_blocks" in case.wrapper else ():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if "_convert_" in case.wrapper:
            pk.convert(model, memory=case.memory)
        return model, functools.partial(unsynchronised, model)
    options = {"static_graph": True} if case.wrapper.endswith("static_graph") else {}
    ddp = in_ddp(model, **options)
    if case.wrapper.endswith("_convert_inside"):
        pk.convert(ddp.module, memory=case.memory)
    if case.wrapper.endswith("_convert_wrapper"):
        pk.convert(ddp, memory=case.memory)
    return ddp, ddp.no_sync


@contextlib.contextmanager
def unsynchronised(model: Any) -> Iterator[None]:
    """Within the context, FSDP2 adds up gradients in each process."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def checkpoint_stages(model: PreActResNet, use_reentrant: bool) -> None:
    """Puts every stage under `torch.utils.checkpoint`."""
    for stage in model.stages:
        stage.forward = functools.partial(checkpoint, stage.forward, use_reentrant=use_reentrant)


def wrapped(case: Case, seed: int) -> tuple[nn.Module, nn.Module, Callable]:
    """The model of a case; in its wrapper; and the context in which gradients are not averaged."""
    if case.model == "stages":
        model = network(seed, case.memory).to(device())
        return model, *wrapped_stages(case, model)
    model = NETWORKS[case.model](seed).to(device())
    return model, *converted(case, model)


def wrapped_stages(case: Case, model: PreActResNet) -> tuple[nn.Module, Callable]:
    """`model`, wrapped, and the context in which gradients are not averaged."""
    if case.wrapper.startswith("fsdp"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        in_fsdp(model, by_block=case.wrapper == "fsdp_blocks")
        return model, functools.partial(unsynchronised, model)
    options = {}
    if case.wrapper.endswith("static_graph"):
        options["static_graph"] = True
    if case.wrapper == "ddp_unused":
        model.unused = nn.Linear(3, 3).to(device())
        options["find_unused_parameters"] = True
    if case.wrapper == "ddp_small_buckets":  # whose messages alternate with those of batch norms
        options |= {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}
    if case.wrapper == "ddp_checkpointed":
        checkpoint_stages(model, use_reentrant=False)
    if case.wrapper == "ddp_reentrant_static_graph":
        checkpoint_stages(model, use_reentrant=True)
    ddp = in_ddp(model, **options)
    return ddp, ddp.no_sync


def share_of(counts: tuple[int, ...]) -> slice:
    """This process's images of a batch."""
    begin = sum(counts[: dist.get_rank()])
    return slice(begin, begin + counts[dist.get_rank()])


def on_device(steps: Iterable[list[Batch]]) -> list[list[Batch]]:
    """The batches on the device of this process."""
    return [[(x.to(device()), y.to(device())) for x, y in parts] for parts in steps]


def whole(t: Tensor) -> Tensor:
    """The tensor of which each process has a shard."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def shard(t: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def summed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """`found` on the CPU, with the losses of all processes added."""
    dist.all_reduce(found["loss"])
    return {name: value.cpu() for name, value in found.items()}


def train_in(kind: str, is_quick: bool, seeds: list[int]) -> dict:
    """The results of the cases of a kind, for every seed."""
    found = {}
    for case, seed in itertools.product(cases(kind, is_quick), seeds):
        with named(str(case)):
            found.setdefault(tuple(case), []).append(train_case(case, seed))
    return found


def train_case(case: Case, seed: int) -> dict[str, Tensor]:
    """The results of one case, see `train`."""
    model, call, until_last = wrapped(case, seed)
    share = share_of(BATCHES[dist.get_world_size()][case.batch])
    processes = Processes(dist.get_world_size(), share, until_last, whole)
    steps = on_device(parts if case.accumulates else parts[:1] for parts in batches(seed))
    result = summed(train(model, steps, call, processes))
    assert not any(name.startswith("dunused") for name in result)
    return {name: value for name, value in result.items() if "unused" not in name}


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Names what raised an exception within the context."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"in {name}: {error}") from error


class Messages(TorchDispatchMode):
    """The messages between processes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.names.append(function.name())
        return function(*args, **kwargs or {})


def count_messages(seeds: list[int]) -> dict:
    """By model and memory mode: messages of a forward, those of its backward, and batch norms.

    "first stage" is one on its own, whose input wants no gradient.
    """
    found = {}
    ((images, _), *_), *_ = on_device(batches(seeds[0]))
    for name, memory in itertools.product(NETWORKS, MEMORY_MODES):
        model = network(seeds[0], memory) if name == "stages" else NETWORKS[name](seeds[0])
        if name != "stages":
            pk.convert(model, memory=memory)
        nn.SyncBatchNorm.convert_sync_batchnorm(model.to(device()))
        found[name, memory] = messages(model, images)
        if isinstance(model, PreActResNet):
            x = model.stem(images).detach()
            found["first stage", memory] = messages(model.stages[0], x)
    return found


def messages(model: nn.Module, x: Tensor) -> tuple[list[str], list[str], int]:
    """The messages of a forward and of its backward, and the number of batch norms."""
    with Messages() as forward:
        loss = model(x).square().mean()
    with Messages() as backward:
        loss.backward()
    norms = sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    return forward.names, backward.names, norms


def count_nodes(seeds: list[int]) -> dict:
    """The numbers of fused autograd nodes, by model and wrapper."""
    found = {}
    ((images, _), *_), *_ = on_device(batches(seeds[0]))
    for name, by_block in (("stages", False), ("blocks", True)):
        model = in_fsdp(network(seeds[0]).to(device()), by_block)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        found["stages", name] = fused_nodes(model(images))
    for name, wrappers in WRAPPERS_OF_CONVERTED.items():
        for wrapper in wrappers:
            _, call, _ = wrapped(Case(wrapper, "store", "even", name), seeds[0])
            found[name, wrapper] = fused_nodes(call(images))
    return found


def fused_nodes(y: Tensor) -> dict[str, int]:
    """How many autograd nodes of this package led to `y`, by name."""
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    names = (node.name().removesuffix("FunctionBackward") for node in seen)
    return dict(Counter(name for name in names if name in ("PreActStage", "BNReLUConv", "BNReLU")))


def run_out_of_images(seeds: list[int]) -> dict:
    """What DistributedDataParallel.join says where the last process has one more batch."""
    found = {}
    for memory in MEMORY_MODES:
        ddp = in_ddp(network(seeds[0], memory).to(device()))
        ((images, _), *_), *_ = on_device(batches(seeds[0]))
        try:
            with ddp.join(throw_on_early_termination=True):
                for _ in range(2 if dist.get_rank() == dist.get_world_size() - 1 else 1):
                    ddp(images).square().mean().backward()
        except RuntimeError as error:
            found[memory] = str(error)
    return found


def die(how: str, seeds: list[int]) -> dict:
    """Trains a step, in whose midst the last process dies; writes nothing."""
    called = {"exit": "all_reduce", "raise": "all_gather"}[how]  # backward, forward
    send, count = getattr(dist, called), itertools.count()

    def send_or_die(*args, **options):
        if dist.get_rank() == dist.get_world_size() - 1 and next(count) == 3:
            if how == "exit":
                os._exit(1)
            raise RuntimeError("this process dies in the middle of a step")
        return send(*args, **options)

    setattr(dist, called, send_or_die)
    model = network(seeds[0]).to(device())
    ddp = in_ddp(model)
    train(model, on_device(batches(seeds[0])), ddp, Processes(dist.get_world_size()))
    return {}


def wait_for_minutes() -> None:
    """Waits for torchrun to end this process, as another has failed."""
    dist.barrier()
    time.sleep(300)


def fail_beside_others(seeds: list[int]) -> dict:
    """The last process fails while the others wait; writes nothing."""
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.barrier()
        raise RuntimeError("this process fails")
    wait_for_minutes()
    return {}


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train_in_mixed_precision(seeds: list[int]) -> dict:
    """A step of FSDP2 with parameters in bfloat16, plain and fused.

    Each process returns its shards of parameters and gradients: to gather them would take eight
    times as many messages.

    Batch norms use the statistics of each process, and in "shared" those of all.
    `torch.nn.BatchNorm2d` needs its running statistics in the dtype of its parameters on a CPU. The
    plain modules run twice, once with each process's images in reverse: how far two orders that are
    equally right are from the truth is the budget.
    """
    found = {}
    count = dist.get_world_size()
    share = slice(dist.get_rank() * IMAGES, (dist.get_rank() + 1) * IMAGES)
    for name, seed in itertools.product(("plain", "reversed", *MEMORY_MODES, "shared"), seeds):
        model = mixed_network(seed, name).to(device())
        if name == "shared":
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        in_fsdp(model, mp_policy=MIXED)
        (batch, _), *_ = mixed_batches(seed, count)
        if name == "reversed":
            batch = tuple(t.unflatten(0, (count, IMAGES)).flip(1).flatten(0, 1) for t in batch)
        result = train(model, on_device([[batch]]), None, Processes(count, share, as_tensor=shard))
        found.setdefault(name, []).append(summed(result))
    return found


def mixed_network(seed: int, name: str) -> PreActResNet:
    """The network in a memory mode, or with shared statistics, or plain."""
    is_fused = name in (*MEMORY_MODES, "shared")
    model = network(seed, name if name in MEMORY_MODES else "checkpoint")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_mean.bfloat16()
            module.running_var = module.running_var.bfloat16()
        elif hasattr(module, "fused"):
            module.fused = is_fused
    return model


def mixed_batches(seed: int, processes: int) -> list[list[Batch]]:
    """Larger batches: in bfloat16 many signs of pre-activations are decided by rounding."""
    return batches(seed, IMAGES * processes, size=12)


KINDS = ("ddp", "fsdp", "converted")
JOBS: dict[str, Callable[[list[int]], dict]] = {
    **{kind: functools.partial(train_in, kind, False) for kind in KINDS},
    **{f"quick-{kind}": functools.partial(train_in, kind, True) for kind in KINDS},
    "messages": count_messages,
    "nodes": count_nodes,
    "mixed": train_in_mixed_precision,
    "join": run_out_of_images,
    "exit": functools.partial(die, "exit"),
    "raise": functools.partial(die, "raise"),
    "fail": fail_beside_others,
}


def job_with_seeds(argument: str) -> tuple[str, list[int]]:
    """A job and its seeds: "mixed:0,1"."""
    job, _, seeds = argument.partition(":")
    if job not in JOBS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(JOBS)}, got {job}")
    return job, [int(seed) for seed in seeds.split(",")]


@record  # torchrun ends with the tracebacks of all processes
def main() -> None:
    """Joins the other processes, does the jobs, and saves what each returned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", nargs="+", type=job_with_seeds, metavar="JOB:SEED,...")
    a = parser.parse_args()
    # When another process has failed, torchrun ends this one: say where it was.
    faulthandler.register(signal.SIGTERM, chain=True)
    torch.set_num_threads(1)
    if device().type == "cuda":
        torch.cuda.set_device(device())
        torch.backends.cudnn.allow_tf32 = False
        cuda._may_round_to_tf32 = lambda: False
    backend = "nccl" if device().type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=3))
    for job, seeds in a.jobs:
        with named(f"job {job}"):
            found = JOBS[job](seeds)
        torch.save(found, a.folder / f"{job}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
