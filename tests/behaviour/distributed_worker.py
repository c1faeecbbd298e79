"""One process of test_distributed.py: saves what training gives, and checks the rest itself.

The truth of training is computed by the same functions, in one process with all images.
"""

import contextlib
import datetime
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from preact_kernels.kernels import cuda
from preact_kernels.models.preact_resnet import PreActResNet
from preact_kernels.ops.memory_mode import MEMORY_MODES
from testbed import published_models as foreign
from tests.cases import random_block, randomised
from tests.oracle import plain_copy

CPU = torch.device("cpu")
CLASSES = 5
IMAGES = 6  # of a batch, in all processes together
STEPS = 2  # of the optimizer

# Images of each process.
BATCHES = {
    2: {"even": (3, 3), "uneven": (1, 5), "none": (0, 6)},
    3: {"even": (2, 2, 2), "uneven": (1, 3, 2), "none": (4, 0, 2)},
}

Batch = tuple[Tensor, Tensor]  # images and labels


class Case(NamedTuple):
    """A way to train a network in several processes."""

    model: str  # a key of NETWORKS
    wrapper: str
    memory: str
    batch: str  # a key of BATCHES

    @property
    def accumulates(self) -> bool:
        """Whether a step adds up the gradients of two batches."""
        return self.wrapper.endswith("_accumulated")


# Foreign models are converted before they are wrapped, if the wrapper's name says nothing else.
CASES = (
    Case("stages", "ddp_small_buckets", "checkpoint", "none"),
    Case("stages", "ddp_static_graph", "rebuild", "uneven"),
    Case("stages", "ddp_find_unused_parameters", "store", "even"),
    Case("stages", "ddp_checkpointed", "rebuild", "uneven"),
    # A checkpoint that runs a backward inside the backward.
    Case("stages", "ddp_reentrant_static_graph", "checkpoint", "uneven"),
    Case("stages", "ddp_accumulated", "checkpoint", "uneven"),
    Case("stages", "fsdp", "checkpoint", "none"),
    Case("stages", "fsdp_blocks_accumulated", "rebuild", "uneven"),
    Case("residual", "ddp_convert_inside", "checkpoint", "even"),  # inside the wrapper
    Case("residual", "ddp_convert_wrapper", "rebuild", "none"),
    Case("residual", "fsdp_convert_after", "store", "uneven"),
    Case("dense", "ddp", "checkpoint", "none"),
    # Converted before and after FSDP2 wraps the blocks. Its last batch norm is not fused.
    Case("dense", "fsdp_blocks_convert_twice", "store", "even"),
)


DDP_OPTIONS = ("static_graph", "find_unused_parameters")


def network(seed: int, memory: str = "store") -> PreActResNet:
    """Two stages with blocks that are rebuilt, and a batch norm that is frozen."""
    torch.manual_seed(seed)
    basic = [random_block("basic", 16, 16) for _ in range(3)]
    bottleneck = [random_block("bottleneck", 16, 8, 2)]
    bottleneck += [random_block("bottleneck", 32, 8) for _ in range(2)]
    bottleneck[1].bn2.eval()
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
# With these, no pre-activation is near zero: see `off_kinks` in oracle.py.
SEEDS = {"stages": 1, "residual": 0, "dense": 0}


def batches(seed: int, images: int = IMAGES, size: int = 6) -> list[list[Batch]]:
    """Two batches for every step of the optimizer; most cases use only the first."""
    generator = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        x = torch.randn(images, 3, size, size, generator=generator)
        return x, torch.randint(CLASSES, (images,), generator=generator)

    return [[batch(), batch()] for _ in range(STEPS)]


class Processes(NamedTuple):
    """The other processes, as far as `train` needs them."""

    count: int = 1
    share: slice = slice(None)  # of a batch
    until_last: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def train(
    model: nn.Module,
    steps: Iterable[list[Batch]],
    call: Callable[[Tensor], Tensor] | None = None,
    processes: Processes = Processes(),  # noqa: B008
) -> dict[str, Tensor]:
    """Trains with SGD; `call` is `model`, wrapped.

    Wrappers average gradients over processes, and the loss of the joined batch is a mean over its
    images. So the loss of a process is the sum over its images, divided by the images of all and
    multiplied by the number of processes.

    Returns:
        The logits of this process's images by batch, the gradients by step, and the parameters and
        buffers after the last step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outputs, gradients = [], []
    for parts in steps:
        optimizer.zero_grad()
        for index, (images, labels) in enumerate(parts):
            scope = contextlib.nullcontext if index == len(parts) - 1 else processes.until_last
            with scope():
                logits = (call or model)(images[processes.share])
                loss = F.cross_entropy(logits.double(), labels[processes.share], reduction="sum")
                (loss * processes.count / (len(labels) * len(parts))).backward()
            outputs.append(logits.detach())
        trained = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        gradients.append({f"d{name}": whole(gradient).clone() for name, gradient in trained})
        optimizer.step()
    found = {"logits": torch.stack(outputs)}
    found |= {name: torch.stack([g[name] for g in gradients]) for name in gradients[0]}
    found |= {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return found | {name: b.clone() for name, b in model.named_buffers()}


def whole(t: Tensor) -> Tensor:
    """The whole tensor, if each process has a shard."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def device() -> torch.device:
    """The GPU of this process where each has its own, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else CPU


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


def in_fsdp(model: nn.Module, parts: Iterable[nn.Module], **options) -> nn.Module:
    """`model` with `SyncBatchNorm` in FSDP2: each of `parts`, and the rest.

    A wrapped stage stays one autograd node. A wrapped block has hooks, so that it is a node of its
    own, and the memory mode of the stage has no effect.
    """
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for part in parts:
        fully_shard(part, mesh=mesh, **options)
    model = fully_shard(model, mesh=mesh, **options)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


@contextlib.contextmanager
def unsynchronised(model) -> Iterator[None]:
    """Within the context, FSDP2 adds up gradients in each process."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def wrapped(case: Case) -> tuple[nn.Module, Callable, Callable]:
    """The model of a case; in its wrapper; and the context in which gradients are not averaged."""
    model = NETWORKS[case.model](SEEDS[case.model]).to(device())
    blocks = (foreign.FunctionalBottleneck, foreign.DenseLayer, foreign.Transition)
    parts = [m for m in model.modules() if isinstance(m, blocks)]
    if case.model == "stages":
        for stage in model.stages:
            stage.memory = case.memory
        parts = [b for stage in model.stages for b in stage]
    elif "_convert_" not in case.wrapper or case.wrapper.endswith("_twice"):
        pk.convert(model, memory=case.memory)
    if case.wrapper.startswith("fsdp"):
        if "_blocks" not in case.wrapper:
            parts = model.stages if case.model == "stages" else []
        in_fsdp(model, parts)
        if "_convert_" in case.wrapper:
            pk.convert(model, memory=case.memory)
        return model, model, functools.partial(unsynchronised, model)
    options = {name: True for name in DDP_OPTIONS if case.wrapper.endswith(name)}
    if case.wrapper == "ddp_small_buckets":  # their messages alternate with those of batch norms
        options = {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}
    if case.wrapper in ("ddp_checkpointed", "ddp_reentrant_static_graph"):
        reentrant = {"use_reentrant": "reentrant" in case.wrapper}
        for stage in model.stages:
            stage.forward = functools.partial(checkpoint, stage.forward, **reentrant)
    ddp = in_ddp(model, **options)
    if "_convert_" in case.wrapper:
        pk.convert(ddp if case.wrapper.endswith("_wrapper") else ddp.module, memory=case.memory)
    return model, ddp, ddp.no_sync


def share_of(counts: tuple[int, ...]) -> slice:
    """This process's images of a batch."""
    begin = sum(counts[: dist.get_rank()])
    return slice(begin, begin + counts[dist.get_rank()])


def on_device(steps: Iterable[list[Batch]]) -> list[list[Batch]]:
    """The batches on the device of this process."""
    return [[(x.to(device()), y.to(device())) for x, y in parts] for parts in steps]


def train_every_case() -> dict:
    """The results of `train` by case."""
    return {tuple(case): train_case(case) for case in CASES}


def train_case(case: Case) -> dict[str, Tensor]:
    """The results of one case; asserts that wrapped models run as few autograd nodes."""
    model, call, until_last = wrapped(case)
    expected = {"PreActStage": 2, "Unit": 1}
    if case.model == "dense":
        expected = {"PreActStage": 3, "Unit": 3} if case.memory == "store" else {"Unit": 9}
    elif "_blocks" in case.wrapper:
        expected["PreActStage"] = 6
    if "reentrant" in case.wrapper:  # stages run in its nodes
        del expected["PreActStage"]

    def watched(x: Tensor) -> Tensor:
        y = call(x)
        assert fused_nodes(y) == expected
        return y

    share = share_of(BATCHES[dist.get_world_size()][case.batch])
    processes = Processes(dist.get_world_size(), share, until_last)
    steps = batches(SEEDS[case.model])
    steps = on_device(parts if case.accumulates else parts[:1] for parts in steps)
    try:
        return joined(train(model, steps, watched, processes))
    except Exception as error:
        raise RuntimeError(f"in {case}") from error


def fused_nodes(y: Tensor) -> dict[str, int]:
    """Counts the autograd nodes of this package that led to `y`, by name."""
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    names = (node.name().removesuffix("FunctionBackward") for node in seen)
    return dict(Counter(n for n in names if n in ("PreActStage", "Unit")))


def joined(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """`found` on the CPU, with the logits of all processes."""
    found = {name: value.cpu() for name, value in found.items()}
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, found["logits"])
    return found | {"logits": torch.cat(shares, dim=1)}


# On a GPU, the processor waits for the result of these.
READ_BY_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")


class Messages(TorchDispatchMode):
    """The messages between processes and what the host reads, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" or function.name().startswith(READ_BY_HOST):
            self.names.append(function.name())
        return function(*args, **kwargs or {})


def check_messages() -> None:
    """A batch norm sends one message forward and one backward in every memory mode.

    The host reads no tensor.
    """
    ((images, _), *_), *_ = on_device(batches(0))
    for memory in MEMORY_MODES:
        stages, dense = network(0, memory), pk.convert(dense_network(0), memory=memory)
        for model in (stages, dense):
            nn.SyncBatchNorm.convert_sync_batchnorm(model.to(device()))
        with torch.no_grad():
            x = stages.stem(images)
        # The sums of the first batch norm make only the gradient of x, which is not wanted.
        for model, t, unwanted in (
            (stages, images, 0),
            (stages.stages[0], x, 1),
            (dense, images, 0),
        ):
            with Messages() as forward:
                loss = model(t).square().mean()
            with Messages() as backward:
                loss.backward()
            norms = sum(isinstance(m, nn.SyncBatchNorm) and m.training for m in model.modules())
            assert forward.names == ["c10d::_allgather_base_"] * norms
            assert backward.names == ["c10d::allreduce_"] * (norms - unwanted)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MIXED_SEEDS = range(4)


def train_in_mixed_precision() -> list[dict[str, Tensor]]:
    """By seed: the results of a step of FSDP2 with parameters in bfloat16."""
    found = []
    count = dist.get_world_size()
    for seed in MIXED_SEEDS:
        model = mixed_network(seed).to(device())
        in_fsdp(model, model.stages, mp_policy=MIXED)
        steps = on_device([mixed_batch(seed, count)])
        processes = Processes(count, share_of((IMAGES,) * count))
        found.append(joined(train(model, steps, None, processes)))
    return found


def mixed_network(seed: int) -> PreActResNet:
    """The network, with running statistics in the dtype of parameters, as plain modules need."""
    model = network(seed, MEMORY_MODES[seed % len(MEMORY_MODES)])
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.data = buffer.bfloat16()
    return model


def mixed_batch(seed: int, processes: int) -> list[Batch]:
    """A larger batch: in bfloat16 many signs of pre-activations are decided by rounding."""
    return batches(seed, IMAGES * processes, size=12)[0][:1]


def check_one_value() -> None:
    """One of the processes may have one value a channel. The unit averages over all batches."""
    unit, share = pk.BNReLU2d(2, momentum=None).to(device()), share_of((1, 3))
    x = torch.arange(8.0, device=device()).sin().view(4, 2, 1, 1)
    plain, results = plain_copy(unit), []
    for module, part in ((plain, x), (nn.SyncBatchNorm.convert_sync_batchnorm(unit), x[share])):
        leaf = part.clone().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        results.append((y, module.bn.running_var, leaf.grad))
    (y, variance, dx), (found_y, found_variance, found_dx) = results
    torch.testing.assert_close((found_y, found_variance), (y[share], variance))
    torch.testing.assert_close(found_dx, dx[share], rtol=1e-4, atol=1e-5)


def on_reference(job: Callable[[], None]) -> None:
    """Runs a job on the backend that is all PyTorch operators: other libraries may read scalars."""
    with pk.use_backend("reference"):
        job()


JOBS: dict[str, Callable[[], object]] = {
    "train": train_every_case,
    "mixed": train_in_mixed_precision,
    "messages": functools.partial(on_reference, check_messages),
    "one value": check_one_value,
}


def main(rank: int, processes: int, backend: str, folder: Path) -> None:
    """Joins the other processes, does the jobs, and saves what each returned."""
    torch.set_num_threads(1)
    pk.set_backend(backend)
    is_on_gpus = torch.cuda.device_count() >= processes
    if is_on_gpus:
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False
        cuda._may_round_to_tf32 = lambda: False
    dist.init_process_group(
        "nccl" if is_on_gpus else "gloo",
        init_method=f"file://{folder}/rendezvous",
        timeout=datetime.timedelta(minutes=3),
        rank=rank,
        world_size=processes,
    )
    jobs = JOBS if (processes, backend) == (2, "auto") else ["train"]
    torch.save({job: JOBS[job]() for job in jobs}, folder / f"{rank}.pt")
    dist.destroy_process_group()
