"""Contenders: ways to train the same network from the same weights.

The baseline is `pk.preact_resnet(..., fused=False)`: plain `torch.nn` modules with in-place ReLU.
Each rival is applied to it as its documentation recommends. In half precision, convolutions, the
linear layer and activations have that dtype, batch-norm parameters and statistics are float32, and
no contender casts weights.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import preact_kernels as pk
from bench.records import Row

State = dict[str, Tensor]


class Family(NamedTuple):
    """Networks that differ only in depth."""

    options: dict  # arguments of `pk.preact_resnet`
    image_size: int = 32  # height and width in pixels
    classes: int = 10
    suffix: str = ""  # end of the names


FAMILIES = {
    "resnet": Family({}),  # for CIFAR
    "preact-resnet": Family({"variant": "cifar-wide-stem"}),
    "wrn": Family({"block": "basic", "width": 10}, suffix="-10"),
    "imagenet-resnet": Family({"variant": "imagenet"}, image_size=224, classes=1000),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A pre-activation ResNet."""

    depth: int
    family: str = "resnet"  # a key of FAMILIES

    @classmethod
    @functools.cache
    def named(cls, name: str) -> "Network":
        """Returns the network called `name`, for example `"resnet-1001"` or `"wrn-28-10"`.

        Raises:
            ValueError: no family has such a name.
        """
        for key, family in FAMILIES.items():
            found = re.fullmatch(rf"{key}-(\d+){family.suffix}", name)
            if found:
                return cls(int(found[1]), key)
        known = ", ".join(f"{key}-DEPTH{family.suffix}" for key, family in FAMILIES.items())
        raise ValueError(f"network: expected one of {known}, got {name}")

    @property
    def name(self) -> str:
        """The name, for example `"resnet-1001"`."""
        return f"{self.family}-{self.depth}{FAMILIES[self.family].suffix}"

    @property
    def image_size(self) -> int:
        """Height and width of the images in pixels."""
        return FAMILIES[self.family].image_size

    def model(self, **options) -> nn.Module:
        """Builds the network, with further `options` of `pk.preact_resnet`."""
        family = FAMILIES[self.family]
        return pk.preact_resnet(self.depth, family.classes, **family.options, **options)

    @functools.cached_property  # building 10,001 layers takes seconds
    def block(self) -> str:
        """`"basic"` or `"bottleneck"`, as `pk.preact_resnet` chooses by depth."""
        with torch.device("meta"):
            first = self.model(fused=False).stages[0][0]
        return "basic" if isinstance(first, pk.PreActBasicBlock) else "bottleneck"

    def state(self) -> State:
        """Returns He-initialised weights, the same for all contenders."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model(fused=False).state_dict()


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to train a network."""

    name: str
    memory_mode: str  # tensors that it keeps for the backward
    fused: str | None = None  # memory mode of `pk.preact_resnet`; None: a plain network
    channels_last: bool = True  # memory format of weights and images
    prepare: Callable[[nn.Module], None] | None = None  # changes the model in place
    graphed: bool = False  # captures the training step in a CUDA graph
    hooks_see_all: bool = True  # saved-tensor hooks see all tensors that are kept

    def build(
        self, network: Network, state: State, device: torch.device, dtype: torch.dtype
    ) -> nn.Module:
        """Builds the network with the weights in `state`, ready to train on `device` in `dtype`."""
        options = {"fused": False} if self.fused is None else {"memory": self.fused}
        model = network.model(**options)
        model.load_state_dict(state)
        model.to(device)
        if dtype == torch.float64:
            model.double()
        elif dtype != torch.float32:
            for module in model.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    module.to(dtype)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
        if self.prepare is not None:
            self.prepare(model)
        return model.train()

    def input(self, images: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Converts `images` to the model's dtype, device and memory format."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.to(device, dtype).contiguous(memory_format=layout)


@functools.cache  # Dynamo caches code by backend: one backend for all blocks with a budget
def inductor(memory_budget: float) -> Callable:
    """Returns a torch.compile backend: Inductor with an activation memory budget."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def compile_within_budget(graph, example_inputs):
        with config.patch(activation_memory_budget=memory_budget):
            return compile_fx(graph, example_inputs)

    return compile_within_budget


def _compile_blocks(model: nn.Module, memory_budget: float = 1.0) -> None:
    from torch._dynamo import config

    # All blocks share a code object, which has a variant per block shape and batch. Above the limit
    # Dynamo would run it uncompiled: fail instead.
    config.recompile_limit = max(config.recompile_limit, 256)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 1024)
    config.fail_on_recompile_limit_hit = True
    for stage in model.stages:
        for block in stage:
            block.compile(backend=inductor(memory_budget), fullgraph=True, dynamic=False)


class CheckpointedBlocks(nn.Sequential):
    """Runs each `every` consecutive blocks under `torch.utils.checkpoint`.

    Recomputation updates running statistics a second time, as with plain modules.
    """

    def __init__(self, blocks: Sequence[nn.Module], every: int, context_fn=None) -> None:
        super().__init__(*blocks)
        self.every = every
        self.options = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, x: Tensor) -> Tensor:
        """Equals `nn.Sequential(*blocks)(x)`."""
        blocks = list(self)
        for start in range(0, len(blocks), self.every):
            run = functools.partial(_run, blocks[start : start + self.every])
            x = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, **self.options)
        return x


def _run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _keep_convolutions(ctx, op, *args, only_inner: bool = False, **kwargs) -> Policy:
    is_kept = op is torch.ops.aten.convolution.default
    if is_kept and only_inner:
        out_channels, in_channels = args[1].shape[:2]
        is_kept = out_channels <= in_channels
    return Policy.MUST_SAVE if is_kept else Policy.PREFER_RECOMPUTE


def _checkpoint_blocks(model: nn.Module, every: str, policy: Callable | None = None) -> None:
    context_fn = None
    if policy is not None:
        context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    total = sum(len(stage) for stage in model.stages)
    length = 1 if every == "block" else max(1, round(math.sqrt(total)))
    for index, stage in enumerate(model.stages):
        model.stages[index] = CheckpointedBlocks(list(stage), length, context_fn)


def _fused(name: str, memory: str, words: str, **options) -> Contender:
    return Contender(name, words, fused=memory, **options)


def _compiled(name: str, words: str, budget: float, **options) -> Contender:
    prepare = functools.partial(_compile_blocks, memory_budget=budget)
    return Contender(name, words, prepare=prepare, **options)


def _checkpointed(name: str, words: str, every: str, policy=None) -> Contender:
    prepare = functools.partial(_checkpoint_blocks, every=every, policy=policy)
    return Contender(name, words, prepare=prepare, hooks_see_all=policy is None)


_keep_inner_convolutions = functools.partial(_keep_convolutions, only_inner=True)

ALL = (
    Contender("eager-nchw", "everything", channels_last=False),
    Contender("eager-channels-last", "everything"),
    _compiled("compile-blocks", "everything", 1.0),
    _fused("fused-store", "store", "inputs of units"),
    _fused("fused-rebuild", "rebuild", "inner inputs of units, anchors"),
    _fused("fused-checkpoint", "checkpoint", "inputs of segments"),
    Contender("eager-graph", "everything", graphed=True),
    _compiled("compile-graph", "everything", 1.0, graphed=True),
    _fused("fused-graph", "store", "inputs of units", graphed=True),
    _fused("fused-rebuild-graph", "rebuild", "inner inputs of units, anchors", graphed=True),
    _checkpointed("checkpoint-block", "inputs of blocks", "block"),
    _checkpointed("checkpoint-sqrt", "inputs of sqrt(L) blocks", "sqrt"),
    _checkpointed("selective-convs", "convolutions", "block", _keep_convolutions),
    _checkpointed("selective-inner-convs", "inner convolutions", "block", _keep_inner_convolutions),
    _compiled("compile-budget-0.5", "as the budget allows", 0.5),
    _compiled("compile-budget-0.3", "as the budget allows", 0.3),
)

BY_NAME = {c.name: c for c in ALL}

ANCHOR = "fused-store"  # in every group, so that groups can be compared

_FUSED = ("fused-store", "fused-rebuild", "fused-checkpoint")

GROUPS = {
    "main": ("eager-nchw", "eager-channels-last", *_FUSED, "compile-blocks"),
    "uncompiled": (
        "eager-channels-last",
        "eager-graph",
        "fused-store",
        "fused-graph",
        "fused-rebuild-graph",
        "fused-rebuild",
        "fused-checkpoint",
    ),
    "compiled": ("fused-store", "eager-nchw", "compile-blocks"),
    "compiled and captured": ("fused-store", "fused-graph", "compile-graph"),
    "memory rivals": (
        "fused-store",
        "checkpoint-block",
        "checkpoint-sqrt",
        "selective-convs",
        "selective-inner-convs",
    ),
    "compile budgets": ("fused-store", "compile-budget-0.5", "compile-budget-0.3"),
    "wide networks": ("eager-channels-last", *_FUSED, "compile-blocks"),
    "against eager": ("eager-nchw", "eager-channels-last", "fused-store"),
}
"""Groups of contenders that are timed in turn, the most important first."""

MAIN_GROUPS = ("uncompiled", "compiled", "compiled and captured")
"""Groups for every network on a GPU, where compiling takes minutes; on a CPU: `main`."""

WIDE_GROUP = {"cpu": "against eager", "cuda": "wide networks"}
WIDE_NETWORKS = {
    "cpu": (
        ("preact-resnet-18", 16),
        ("preact-resnet-50", 16),
        ("wrn-28-10", 4),
        ("imagenet-resnet-18", 4),
        ("imagenet-resnet-50", 4),
    ),
    "cuda": (("imagenet-resnet-50", 256), ("imagenet-resnet-200", 64), ("wrn-28-10", 128)),
}
"""Further networks and batches, and their group, by device."""


def is_rival(name: str) -> bool:
    """Whether a contender does not use the fused kernels."""
    return BY_NAME[name].fused is None


def available(names: Sequence[str], device: torch.device) -> tuple[list[Contender], dict[str, str]]:
    """Returns the contenders that can run on `device`, and reasons for the others.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(
            f"contenders: expected some of {', '.join(BY_NAME)}, got {', '.join(unknown)}"
        )
    reasons = {}
    for name in names:
        if BY_NAME[name].graphed and device.type != "cuda":
            reasons[name] = "CUDA graphs: no GPU"
    return [BY_NAME[name] for name in names if name not in reasons], reasons


def _anchor_ms(row: Row, group: Sequence[Row]) -> float | None:
    """Returns the anchor's time in the rounds of a row: from its note, or from the anchor's row.

    A captured step takes the same time whatever the processor does, unlike the anchor: it is
    compared with the anchor's own row.
    """
    beside = re.search(rf"{ANCHOR} took ([\d.]+) ms beside this", row.note)
    contender = BY_NAME.get(row.contender)
    if beside and not (contender and contender.graphed):
        return float(beside[1])
    return next((r.median_ms for r in group if r.contender == ANCHOR), None)


def relative_times(group: Sequence[Row]) -> dict[str, float]:
    """Returns step times divided by the anchor's time in the same rounds, by contender."""
    anchors_ms = {r.contender: _anchor_ms(r, group) for r in group if r.median_ms is not None}
    return {r.contender: r.median_ms / ms for r in group if (ms := anchors_ms.get(r.contender))}
