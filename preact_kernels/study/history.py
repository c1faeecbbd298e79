"""Measurements of a training run."""

import dataclasses
from typing import Any, NamedTuple

from preact_kernels.study.diagnostics import BlockRow


class EpochRow(NamedTuple):
    """Results of an epoch."""

    epoch: int  # from 1
    train_loss: float  # mean over the epoch's steps
    train_accuracy: float  # on augmented images, while the weights change
    test_accuracy: float
    seconds: float  # training and evaluation, summed over interrupted attempts


@dataclasses.dataclass
class History:
    """Measurements of a run so far; part of its checkpoint."""

    losses: list[float] = dataclasses.field(default_factory=list)  # one per step
    epochs: list[EpochRow] = dataclasses.field(default_factory=list)
    signal: list[BlockRow] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # since the last whole epoch
    input_seconds: float = 0.0  # host time for preparing batches

    def state(self) -> dict[str, Any]:
        """Returns the history as lists and numbers."""
        state = dict(vars(self))
        return state | {name: list(map(tuple, state[name])) for name in ("epochs", "signal")}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "History":
        """Undoes `state`."""
        rows = {
            "epochs": [EpochRow(*row) for row in state["epochs"]],
            "signal": [BlockRow(*row) for row in state["signal"]],
        }
        return cls(**{**state, **rows})
