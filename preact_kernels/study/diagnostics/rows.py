"""Measurements of residual blocks: rows, warnings in words, CSV files."""

import csv
import math
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from preact_kernels.study.files import csv_text, write_atomically


class BlockRow(NamedTuple):
    """Measurements of one block at one step; weights are parameters with two or more axes.

    Attributes:
        step: number of the training step; 0 outside of training.
        block: number of the block in the network, from 1.
        name: name of the module.
        stage: number of the stage, from 1, if the name ends with `stages.<i>.<j>`; else 0.
        activation_mean: mean of all elements of the block's output.
        activation_std: standard deviation of all elements, without Bessel's correction.
        activation_gradient_norm: L2 norm of d loss / d output; None if not measured.
        gradient_norm: L2 norm of the gradients of all parameters of the block.
        weight_norm: L2 norm of the weights before the step.
        gradient_to_weight: L2 norm of the weights' gradients / `weight_norm`; None if no weight
            requires a gradient.
        update_to_weight: L2 norm of the weights' change / `weight_norm`; None if not measured.
    """

    step: int
    block: int
    name: str
    stage: int
    activation_mean: float
    activation_std: float
    activation_gradient_norm: float | None
    gradient_norm: float
    weight_norm: float
    gradient_to_weight: float | None
    update_to_weight: float | None


class Thresholds(NamedTuple):
    """Limits for `warnings_of`.

    Attributes:
        gradient_to_weight_low: below it, a block may be dead. Healthy ratios are 1e-3 to 1e-2.
        gradient_to_weight_high: above it, a block may be unstable.
        activation_std_low: below it, the signal may vanish.
        activation_std_high: above it, the signal may explode.
    """

    gradient_to_weight_low: float = 1e-4
    gradient_to_weight_high: float = 1e-1
    activation_std_low: float = 1e-3
    activation_std_high: float = 1e3


_LABELS = {
    "activation_mean": "activation mean",
    "activation_std": "activation standard deviation",
    "activation_gradient_norm": "activation gradient norm",
    "gradient_norm": "gradient norm",
    "weight_norm": "weight norm",
    "gradient_to_weight": "gradient-to-weight ratio",
    "update_to_weight": "update-to-weight ratio",
}


def _text(value: float) -> str:
    """Formats a value with two digits: 3e-6, 0.25, 1.5e3."""
    if value and not 1e-2 <= abs(value) < 1e3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if exponent else mantissa
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def _findings(row: BlockRow, thresholds: Thresholds) -> Iterator[tuple[str, str, float | None]]:
    """Yields the text before a value, the text after it, and the value."""
    values = {n: v for n in _LABELS if (v := getattr(row, n)) is not None}
    if broken := [_LABELS[n] for n, v in values.items() if not math.isfinite(v)]:
        yield f"not finite: {', '.join(broken)}", "", None
    for name, low, high, if_low, if_high in (
        (
            "gradient_to_weight",
            thresholds.gradient_to_weight_low,
            thresholds.gradient_to_weight_high,
            "may be dead",
            "may be unstable",
        ),
        (
            "activation_std",
            thresholds.activation_std_low,
            thresholds.activation_std_high,
            "signal may vanish",
            "signal may explode",
        ),
    ):
        value = values.get(name, math.nan)
        if not math.isfinite(value):
            continue
        if value < low:
            yield f"{_LABELS[name]} ", f", below {_text(low)}: {if_low}", value
        elif value > high:
            yield f"{_LABELS[name]} ", f", above {_text(high)}: {if_high}", value


def warnings_of(rows: Iterable[BlockRow], thresholds: Thresholds | None = None) -> list[str]:
    """Reports crossed thresholds in words, by step and block.

    For example "block 12: gradient-to-weight ratio 3e-6, below 1e-4: may be dead". Neighbouring
    blocks share a line: "step 50: blocks 3 to 12: gradient-to-weight ratio 1e-6 to 3e-6, below
    1e-4: may be dead".
    """
    thresholds = Thresholds() if thresholds is None else thresholds
    warnings = []
    for step, step_rows in groupby(rows, lambda row: row.step):
        runs: dict[tuple[str, str], list[list[tuple[int, float | None]]]] = {}
        for row in step_rows:
            for ahead, behind, value in _findings(row, thresholds):
                found = runs.setdefault((ahead, behind), [])
                if not found or found[-1][-1][0] != row.block - 1:
                    found.append([])
                found[-1].append((row.block, value))
        ordered = sorted(
            ((run, *finding) for finding, found in runs.items() for run in found),
            key=lambda entry: entry[0][0][0],
        )
        for run, ahead, behind in ordered:
            first, last = run[0][0], run[-1][0]
            where = f"block {first}" if first == last else f"blocks {first} to {last}"
            known = [value for _, value in run if value is not None]
            ends = dict.fromkeys(map(_text, (min(known), max(known)) if known else ()))
            prefix = f"step {step}: " if step > 0 else ""
            warnings.append(f"{prefix}{where}: {ahead}{' to '.join(ends)}{behind}")
    return warnings


def write_csv(path: str | os.PathLike[str], rows: Iterable[BlockRow]) -> None:
    """Writes rows to a CSV file, atomically."""
    write_atomically(path, csv_text(BlockRow._fields, rows))


def read_csv(path: str | os.PathLike[str]) -> list[BlockRow]:
    """Reads the rows of a file by `write_csv`.

    Raises:
        ValueError: the file has other columns, or a value is not a number.
    """
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != BlockRow._fields:
            got = ",".join(reader.fieldnames or ())
            raise ValueError(f"path: expected columns {','.join(BlockRow._fields)}, got {got!r}")
        return [BlockRow(**{k: _parsed(k, v) for k, v in line.items()}) for line in reader]


def _parsed(name: str, value: str) -> Any:
    if name == "name":
        return value
    if name in ("step", "block", "stage"):
        return int(value)
    return float(value) if value else None
