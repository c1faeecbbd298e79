"""Comparisons of networks: training runs, results in words, and the report."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm

from preact_kernels.study import data
from preact_kernels.study.config import Config, build_network
from preact_kernels.study.diagnostics import BlockRow, measure
from preact_kernels.study.files import csv_text, write_atomically
from preact_kernels.study.networks import fused_parts
from preact_kernels.study.report import command, machine, plotted, stage_histograms
from preact_kernels.study.training import train

SIGNAL_IMAGES = 32


@dataclasses.dataclass(frozen=True)
class Size:
    """Networks, training runs and images of a comparison."""

    depths: tuple[int, ...]
    epochs: int
    batch: int
    seeds: int
    image_size: int
    recipe: str


class Result(NamedTuple):
    """Results of one training run."""

    label: str
    depth: int
    seed: int
    test_error: float  # percent, after the last epoch
    train_loss: float  # mean of the last epoch
    seconds: float
    losses: list[float]
    initial: list[BlockRow]
    histograms: dict[str, tuple[list[float], list[float]]]
    parts: str  # which batch norms run fused
    parameters: int


class Comparison:
    """A comparison in a folder.

    Args:
        size: networks and training runs.
        base: options of all runs.
        out: the folder; finished runs there are not repeated.
    """

    def __init__(self, size: Size, base: dict[str, Any], out: Path) -> None:
        self.size, self.base, self.out = size, base, out
        self.images = data.load(base.get("data")).resized(size.image_size)
        self.lines: list[str] = []

    @property
    def device(self) -> torch.device:
        name = self.base.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(name)

    def config(self, **options: Any) -> Config:
        size = self.size
        shared = {
            "epochs": max(1, size.epochs),
            "batch": size.batch,
            "image_size": size.image_size,
            "recipe": size.recipe,
        }
        return Config(**{**shared, **self.base, **options})

    def train_all(
        self, cases: Mapping[str, dict[str, Any]], depths: Sequence[int] | None = None
    ) -> list[Result]:
        """Trains each case at each depth with the first seed, then with the next seeds."""
        depths = depths or self.size.depths
        todo = [(s, d, c) for s in range(self.size.seeds) for d in depths for c in cases]
        results = []
        for number, (seed, depth, label) in enumerate(todo, 1):
            config = self.config(seed=seed, depth=depth, **cases[label])
            tqdm.write(f"run {number} of {len(todo)}: {label}, {depth} layers, seed {seed}")
            results.append(self._train(label, config))
        return results

    def _train(self, label: str, config: Config) -> Result:
        slug = label.replace(",", "").replace(" ", "-")
        run = train(config, self.out / "runs" / f"{slug}-{config.depth}-seed{config.seed}")
        last = run.history.epochs[-1]
        return Result(
            label,
            config.depth,
            config.seed,
            100 * (1 - last.test_accuracy),
            last.train_loss,
            sum(row.seconds for row in run.history.epochs),
            run.history.losses,
            self.initial_signal(config),
            stage_histograms(run),
            fused_parts(run.network),
            run.parameter_count,
        )

    def initial_signal(self, config: Config) -> list[BlockRow]:
        """Measures the signal flow in the initial network of a run."""
        network = build_network(config, self.images.classes)
        images = data.Batches(self.images, SIGNAL_IMAGES, seed=config.seed)
        return measure(network, F.cross_entropy, *images[0])

    # The report

    def write(self, *lines: str) -> None:
        self.lines += lines

    def plot(self, text: str, draw: Callable[..., Path], *args: Any, **options: Any) -> None:
        name = f"{text.lower().replace(' ', '-')}.png"
        path = self.out / "".join(c for c in name if c.isalnum() or c in "-.")
        self.write(plotted(text, draw, *args, path, **options), "")

    def begin(self, title: str, *lines: str) -> None:
        size = self.size
        self.write(
            f"# {title}",
            "",
            *lines,
            "",
            f"- Images: {self.images.name}, {len(self.images.labels):,} of "
            f"{size.image_size}x{size.image_size} pixels to train on.",
        )
        if size.epochs:
            self.write(
                f"- Training: {size.epochs} epochs of batches of {size.batch}, recipe "
                f"{size.recipe}, {size.seeds} seeds.",
            )
        self.write(
            f"- Machine: {machine(self.device)}.",
            f"- Command: `{command()}`",
            "",
        )

    def end(self) -> Path:
        path = self.out / "report.md"
        write_atomically(path, ("\n".join(self.lines).rstrip() + "\n").encode())
        return path

    def write_results(self, results: Sequence[Result]) -> None:
        columns = ("label", "depth", "seed", "test_error", "train_loss", "seconds", "parameters")
        rows = [[getattr(r, c) for c in columns] for r in results]
        write_atomically(self.out / "results.csv", csv_text(columns, rows))
        blocks = [(r.label, r.depth, r.seed, *row) for r in results for row in r.initial]
        fields = ("label", "depth", "seed", *BlockRow._fields)
        write_atomically(self.out / "signal.csv", csv_text(fields, blocks))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Formats values as `"median (smallest to largest)"`."""
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def by_label(results: Iterable[Result], column: str) -> dict[str, list[Any]]:
    """Maps a label to a column's values, one per seed."""
    found: dict[str, list[Any]] = {}
    for result in results:
        found.setdefault(result.label, []).append(getattr(result, column))
    return found


def order_in_words(own: Mapping[str, Sequence[float]], quoted: Mapping[str, float | None]) -> str:
    """Describes how many pairs of labels have the same order of errors as in the paper.

    A pair has the paper's order if every seed of the better label is below every seed of the other.
    NaN (a diverged run) counts as infinite.
    """
    own = {k: [math.inf if math.isnan(v) else v for v in values] for k, values in own.items()}
    shown, reversed_, open_ = [], [], []
    labels = [label for label in quoted if label in own]
    for i, a in enumerate(labels):
        for b in labels[i + 1 :]:
            first, second = quoted[a], quoted[b]
            if first == second:
                continue
            better, worse = (a, b) if second is None or (first or 100) < second else (b, a)
            if max(own[better]) < min(own[worse]):
                shown.append((better, worse))
            elif max(own[worse]) < min(own[better]):
                reversed_.append((better, worse))
            else:
                open_.append((better, worse))
    text = (
        f"Of the {len(shown) + len(reversed_) + len(open_)} pairs that the paper ranks, "
        f"{len(shown)} have its order here with every seed, {len(reversed_)} the opposite order, "
        f"and {len(open_)} overlap."
    )
    if reversed_:
        text += " The opposite: " + "; ".join(f"{b} is below {a}" for a, b in reversed_) + "."
    if open_:
        text += " Overlapping: " + "; ".join(f"{a} and {b}" for a, b in open_) + "."
    return text
