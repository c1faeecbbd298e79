"""What a training run has measured so far."""

import dataclasses
from typing import Any, NamedTuple

from preact_kernels.study.diagnostics import BlockRow


class EpochRow(NamedTuple):
    """Results of an epoch."""

    epoch: int  # from 1
    train_loss: float  # mean over the epoch's steps
    train_accuracy: float  # of the augmented images, while the weights changed
    test_accuracy: float
    seconds: float  # of the epoch and its evaluation, summed over interrupted attempts


@dataclasses.dataclass
class History:
    """What a run has measured so far; a part of its checkpoint."""

    losses: list[float] = dataclasses.field(default_factory=list)  # of each step
    epochs: list[EpochRow] = dataclasses.field(default_factory=list)
    signal: list[BlockRow] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # since the last whole epoch
    input_seconds: float = 0.0  # the host's time to make batches

    def state(self) -> dict[str, Any]:
        """The history out of plain lists and numbers."""
        state = dict(vars(self))
        return state | {name: list(map(tuple, state[name])) for name in ("epochs", "signal")}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "History":
        """The inverse of `state`."""
        rows = {
            "epochs": [EpochRow(*row) for row in state["epochs"]],
            "signal": [BlockRow(*row) for row in state["signal"]],
        }
        return cls(**{**state, **rows})
