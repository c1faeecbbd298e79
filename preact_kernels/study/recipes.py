"""Learning rates and the optimizer of a training run."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

WARM_UP_SHARE = 0.05  # share of the steps of "warmup-cosine"


class Recipe(NamedTuple):
    """Defaults of a recipe."""

    epochs: int
    batch: int
    lr: float
    warm_up_steps: int | None  # None: `WARM_UP_SHARE`


RECIPES = {
    "paper": Recipe(epochs=200, batch=128, lr=0.1, warm_up_steps=400),
    "warmup-cosine": Recipe(epochs=30, batch=64, lr=0.1, warm_up_steps=None),
}
"""`"paper"` (arXiv 1603.05027): a tenth of the rate for 400 steps, then the full rate, divided by
10 after 32,000 and again after 48,000 steps (epochs 82 and 123 of CIFAR); 200 epochs, as in the
authors' code (github.com/KaimingHe/resnet-1k-layers). Runs of other lengths divide after the same
shares of the steps. `"warmup-cosine"`: a linear warm-up, then half a cosine to zero
(arXiv 1608.03983)."""
_PAPER_MILESTONES = (82 / 200, 123 / 200)


def learning_rate(recipe: str, lr: float, step: int, total_steps: int, warm_up_steps: int) -> float:
    """Returns the learning rate of a step.

    Args:
        recipe: a key of `RECIPES`.
        lr: the highest rate.
        step: the step, counted from 0.
        total_steps: steps of the whole run.
        warm_up_steps: steps of the warm-up.
    """
    if recipe == "paper":
        if step < warm_up_steps:
            return lr / 10
        passed = sum(step >= share * total_steps for share in _PAPER_MILESTONES)
        return lr / 10**passed
    if step < warm_up_steps:
        return lr * (step + 1) / warm_up_steps
    done = (step - warm_up_steps) / max(1, total_steps - warm_up_steps)
    return lr * 0.5 * (1 + math.cos(math.pi * done))


def warm_up_steps(recipe: str, given: int | None, total_steps: int) -> int:
    """Returns `given`, or the recipe's warm-up steps, at most a tenth of the run."""
    if given is not None:
        return given
    steps = RECIPES[recipe].warm_up_steps
    if steps is None:
        return round(WARM_UP_SHARE * total_steps)
    return min(steps, total_steps // 10)


class Group(NamedTuple):
    """Parameters with one learning rate."""

    name: str
    factor: float  # multiplies the learning rate
    parameters: list[nn.Parameter]


def parameter_groups(model: nn.Module, first_factor: float) -> list[Group]:
    """Groups parameters by depth: stem, each stage, head; the factor rises geometrically to 1.

    Args:
        model: a network with a child `stages`.
        first_factor: factor of the stem's learning rate. With 1 there is one group.
    """
    if first_factor == 1:
        return [Group("all", 1.0, list(model.parameters()))]
    named: dict[str, list[nn.Parameter]] = {}
    seen_stage = False
    for name, p in model.named_parameters():
        parts = name.split(".")
        seen_stage |= parts[0] == "stages"
        place = f"stage {int(parts[1]) + 1}" if parts[0] == "stages" else "head"
        named.setdefault(place if seen_stage else "stem", []).append(p)
    last = len(named) - 1
    return [
        Group(name, first_factor ** (1 - i / last), parameters)
        for i, (name, parameters) in enumerate(named.items())
    ]


def sgd(
    groups: Iterable[Group],
    *,
    momentum: float,
    weight_decay: float,
    is_captured: bool,
    device: torch.device,
) -> torch.optim.SGD:
    """Returns SGD with one parameter group per `Group`; `set_learning_rate` sets the rates.

    Args:
        groups: see `parameter_groups`.
        momentum: momentum of SGD.
        weight_decay: weight decay of all parameters, as in the paper.
        is_captured: the step runs in a CUDA graph, which needs the rate as a tensor.
        device: device of the parameters.
    """
    options = [
        {"params": g.parameters, "lr": torch.zeros((), device=device) if is_captured else 0.0}
        for g in groups
    ]
    return torch.optim.SGD(
        options,
        lr=0.0,
        momentum=momentum,
        weight_decay=weight_decay,
        fused=is_captured or None,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, groups: list[Group], lr: float) -> None:
    """Sets the learning rate of each group, in place if it is a tensor."""
    for options, group in zip(optimizer.param_groups, groups, strict=True):
        if isinstance(options["lr"], torch.Tensor):
            options["lr"].fill_(lr * group.factor)
        else:
            options["lr"] = lr * group.factor
