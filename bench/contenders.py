"""Who is compared: ways to run the same network from the same weights.

Every baseline is `pk.preact_resnet(..., fused=False)`, plain `torch.nn` modules with in-place
ReLU, in the memory format that serves it best; every rival is applied to that network as its own
documentation says. Half precision means convolutions, linear layer and activations in that
dtype, batch-norm parameters and statistics in float32: no contender pays for casts of weights.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import preact_kernels as pk

State = dict[str, Tensor]


class Family(NamedTuple):
    """Networks that differ in depth alone.

    options: of `pk.preact_resnet`.
    image_size: pixels, height and width.
    classes: outputs; None takes those of the images.
    suffix: ends the names.
    """

    options: dict
    image_size: int = 32
    classes: int | None = None
    suffix: str = ""


FAMILIES = {
    "resnet": Family({}),  # the paper's for CIFAR
    "wrn": Family({"block": "basic", "width": 10}, suffix="-10"),
    "imagenet-resnet": Family({"variant": "imagenet"}, image_size=224, classes=1000),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A pre-activation ResNet by its depth, the number of classes of the images, and its family."""

    depth: int
    classes: int = 10
    family: str = "resnet"

    @classmethod
    def named(cls, name: str, classes: int = 10) -> "Network":
        """The network of a name, for example `"resnet-1001"`, `"wrn-28-10"`.

        Raises:
            ValueError: no family has such a name.
        """
        for family, of in FAMILIES.items():
            found = re.fullmatch(rf"{family}-(\d+){of.suffix}", name)
            if found:
                return cls(int(found[1]), classes, family)
        known = ", ".join(f"{family}-DEPTH{of.suffix}" for family, of in FAMILIES.items())
        raise ValueError(f"network: expected one of {known}, got {name}")

    @property
    def name(self) -> str:
        """For example `"resnet-1001"`."""
        return f"{self.family}-{self.depth}{FAMILIES[self.family].suffix}"

    @property
    def image_size(self) -> int:
        """Height and width of its images, in pixels."""
        return FAMILIES[self.family].image_size

    def model(self, **options) -> nn.Module:
        """The network, in the modes of `options` (of `pk.preact_resnet`)."""
        family = FAMILIES[self.family]
        return pk.preact_resnet(
            self.depth, family.classes or self.classes, **family.options, **options
        )

    @property
    def block(self) -> str:
        """`"basic"` or `"bottleneck"`, as `pk.preact_resnet` chooses by depth."""
        with torch.device("meta"):
            model = self.model(fused=False)
        return "basic" if isinstance(model.stages[0][0], pk.PreActBasicBlock) else "bottleneck"

    def state(self, seed: int = 0) -> State:
        """He-initialised weights, the same for a seed: what every contender starts from."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model(fused=False).state_dict()


@dataclasses.dataclass(frozen=True)
class Contender:
    """A named way to run a network.

    name: as in tables and on the command line.
    memory_mode: what it keeps for the backward, in a few words.
    fused: the memory mode of `pk.preact_resnet`, or None for a plain network.
    channels_last: the memory format of weights and images.
    prepare: changes the finished plain network in place.
    graphed: the whole training step is captured in a CUDA graph.
    hooks_see_all: whether saved-tensor hooks see everything that is kept.
    same_function: False where it computes something else by design.
    requires: a device to the reason why this contender cannot run there, or None.
    """

    name: str
    memory_mode: str
    fused: str | None = None
    channels_last: bool = True
    prepare: Callable[[nn.Module], None] | None = None
    graphed: bool = False
    hooks_see_all: bool = True
    same_function: bool = True
    requires: Callable[[torch.device], str | None] = lambda device: None

    def build(
        self, network: Network, state: State, device: torch.device, dtype: torch.dtype
    ) -> nn.Module:
        """The network with the weights of `state`, ready to train on `device` in `dtype`."""
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
        """`images` as this contender's network takes them."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.to(device, dtype).contiguous(memory_format=layout)


# torch.compile, block by block --------------------------------------------------------------------


@functools.cache
def _inductor(memory_budget: float) -> Callable:
    """Inductor under an activation memory budget, as a backend of its own.

    Dynamo finds compiled code by the code object and the backend: one backend a budget lets all
    blocks of a network share what was compiled, and keeps networks of other budgets apart.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def compile_within_budget(graph, example_inputs):
        with config.patch(activation_memory_budget=memory_budget):
            return compile_fx(graph, example_inputs)

    return compile_within_budget


def _compile_blocks(model: nn.Module, memory_budget: float = 1.0) -> None:
    from torch._dynamo import config

    # All blocks run one code object, in as many variants as there are block shapes and batches;
    # beyond the limit Dynamo would go on uncompiled, so that is made an error.
    config.recompile_limit = max(config.recompile_limit, 256)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 1024)
    config.fail_on_recompile_limit_hit = True
    for stage in model.stages:
        for block in stage:
            block.compile(backend=_inductor(memory_budget), fullgraph=True, dynamic=False)


def _compiler_missing(device: torch.device) -> str | None:
    compilers = [os.environ.get("CXX"), os.environ.get("CC"), "g++", "gcc", "clang++", "clang"]
    if not any(c and shutil.which(c.split()[0]) for c in compilers):
        return "torch.compile: no C++ compiler found"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile: Triton is not installed"
    return None


# torch.utils.checkpoint ---------------------------------------------------------------------------


class CheckpointedBlocks(nn.Sequential):
    """Blocks in a row, each run of `every` blocks under `torch.utils.checkpoint`.

    The recomputation updates the running statistics of the plain modules a second time: that is
    what checkpointing does to them.
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


def _keep_convolutions(ctx, op, *args, **kwargs) -> Policy:
    if op is torch.ops.aten.convolution.default:
        return Policy.MUST_SAVE
    return Policy.PREFER_RECOMPUTE


def _keep_inner_convolutions(ctx, op, *args, **kwargs) -> Policy:
    if op is torch.ops.aten.convolution.default and args[1].shape[0] <= args[1].shape[1]:
        return Policy.MUST_SAVE
    return Policy.PREFER_RECOMPUTE


def _checkpoint_blocks(model: nn.Module, every: str, policy: Callable | None = None) -> None:
    context_fn = None
    if policy is not None:
        context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    total = sum(len(stage) for stage in model.stages)
    length = 1 if every == "block" else max(1, round(math.sqrt(total)))
    for index, stage in enumerate(model.stages):
        model.stages[index] = CheckpointedBlocks(list(stage), length, context_fn)


# InPlace-ABN --------------------------------------------------------------------------------------


def _inplace_abn_missing(device: torch.device) -> str | None:
    if importlib.util.find_spec("inplace_abn") is None:
        return "InPlace-ABN: the package inplace_abn is not installed"
    return None


def _use_inplace_abn(model: nn.Module) -> None:
    """InPlaceABN in place of every inner norm and ReLU.

    The first norm of a block stays: its input is the residual stream, which the addition needs
    and InPlaceABN would overwrite. A ReLU cannot be inverted, so the package has a leaky one.
    """
    from inplace_abn import InPlaceABN

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        h = nn.functional.relu(block.bn1(x), inplace=True)
        shortcut = block.shortcut(h) if hasattr(block, "shortcut") else x
        h = block.conv1(h)
        for bn, conv in list(block.units())[1:]:
            h = conv(bn(h))
        return shortcut + h

    for stage in model.stages:
        for block in stage:
            for index in range(2, block.unit_count + 1):
                old = getattr(block, f"bn{index}")
                new = InPlaceABN(old.num_features, activation="leaky_relu", activation_param=0.01)
                new.load_state_dict(old.state_dict(), strict=False)
                setattr(block, f"bn{index}", new.to(old.weight.device))
            block.forward = functools.partial(forward, block)


# The table ----------------------------------------------------------------------------------------


def _gpu_only(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "CUDA graphs: no GPU"


def _gpu_and_compiler(device: torch.device) -> str | None:
    return _gpu_only(device) or _compiler_missing(device)


def _mode_missing(memory: str, device: torch.device) -> str | None:
    try:
        pk.preact_resnet(11, block="bottleneck", memory=memory)
    except ValueError as error:
        return f"preact_kernels: {error}"
    return None


def _fused(name: str, memory: str, words: str, **options) -> Contender:
    options.setdefault("requires", functools.partial(_mode_missing, memory))
    return Contender(name, words, fused=memory, **options)


def _compiled(name: str, words: str, budget: float, **options) -> Contender:
    options.setdefault("requires", _compiler_missing)
    prepare = functools.partial(_compile_blocks, memory_budget=budget)
    return Contender(name, words, prepare=prepare, **options)


def _checkpointed(name: str, words: str, every: str, policy=None) -> Contender:
    prepare = functools.partial(_checkpoint_blocks, every=every, policy=policy)
    return Contender(name, words, prepare=prepare, hooks_see_all=policy is None)


ALL = (
    Contender("eager-nchw", "everything", channels_last=False),
    Contender("eager-channels-last", "everything"),
    _compiled("compile-blocks", "everything", 1.0),
    _fused("fused-store", "store", "inputs of units"),
    _fused("fused-rebuild", "rebuild", "inner inputs of units, anchors"),
    _fused("fused-checkpoint", "checkpoint", "inputs of segments"),
    Contender("eager-graph", "everything", graphed=True, requires=_gpu_only),
    _compiled("compile-graph", "everything", 1.0, graphed=True, requires=_gpu_and_compiler),
    _fused("fused-graph", "store", "inputs of units", graphed=True, requires=_gpu_only),
    _checkpointed("checkpoint-block", "inputs of blocks", "block"),
    _checkpointed("checkpoint-sqrt", "inputs of sqrt(L) blocks", "sqrt"),
    _checkpointed("selective-convs", "convolutions", "block", _keep_convolutions),
    _checkpointed("selective-inner-convs", "inner convolutions", "block", _keep_inner_convolutions),
    Contender(
        "inplace-abn",
        "outputs of inner norms",
        prepare=_use_inplace_abn,
        same_function=False,
        requires=_inplace_abn_missing,
    ),
    _compiled("compile-budget-0.5", "as the budget allows", 0.5),
    _compiled("compile-budget-0.3", "as the budget allows", 0.3),
)

BY_NAME = {c.name: c for c in ALL}

ANCHOR = "fused-store"  # takes part in every group, so that groups can be compared

GROUPS = {
    "main": (
        "eager-nchw", "eager-channels-last", "compile-blocks", "fused-store", "fused-rebuild",
        "fused-checkpoint",
    ),
    "uncompiled": (
        "eager-channels-last", "eager-graph", "fused-store", "fused-graph", "fused-rebuild",
        "fused-checkpoint",
    ),
    "compiled": ("fused-store", "eager-nchw", "compile-blocks"),
    "compiled and captured": ("fused-store", "fused-graph", "compile-graph"),
    "memory rivals": (
        "fused-store", "checkpoint-block", "checkpoint-sqrt", "selective-convs",
        "selective-inner-convs", "inplace-abn",
    ),
    "compile budgets": ("fused-store", "compile-budget-0.5", "compile-budget-0.3"),
    "wide networks": (
        "eager-channels-last", "compile-blocks", "fused-store", "fused-rebuild", "fused-checkpoint",
    ),
}  # fmt: skip
"""Contenders that are timed in turn with one another, in order of importance."""

MAIN_GROUPS = {"cpu": ("main",), "cuda": ("uncompiled", "compiled", "compiled and captured")}
"""Who is measured on every network, by device. Compilers for a GPU take minutes: they come last."""


WIDE_NETWORKS = (("imagenet-resnet-50", 256), ("imagenet-resnet-200", 64), ("wrn-28-10", 128))
"""Networks, and batches of them, that are measured on a GPU beside the deep narrow ones."""

COUNTED_BY_DEPTH = ("eager-channels-last", "fused-store", "fused-rebuild", "fused-checkpoint")
DEPTHS_COUNTED = (29, 83, 164, 326, 1001, 2999, 10_001)
"""Who is counted, for memory against depth, on which networks of bottlenecks."""


def is_rival(name: str) -> bool:
    """Whether a contender is something other than this package."""
    return BY_NAME[name].fused is None


def available(names: Sequence[str], device: torch.device) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that can run on `device`, and the reasons of those that cannot.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(
            f"contenders: expected some of {', '.join(BY_NAME)}, got {', '.join(unknown)}"
        )
    usable, reasons = [], {}
    for name in names:
        reason = BY_NAME[name].requires(device)
        if reason is None:
            usable.append(BY_NAME[name])
        else:
            reasons[name] = reason
    return usable, reasons
