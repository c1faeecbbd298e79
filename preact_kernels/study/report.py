"""Reports of training runs, in Markdown, with plots."""

import datetime
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from preact_kernels.ops.dispatch import available_backends
from preact_kernels.study import plots
from preact_kernels.study.diagnostics import BlockRow, histograms
from preact_kernels.study.files import write_atomically
from preact_kernels.study.training import TrainingRun

_HISTOGRAM_IMAGES = 64
_HISTOGRAM_BINS = 201  # plots cut off the ends, which have few values
_MOST_WARNINGS = 20
SIGNALS = {  # columns of `BlockRow` to plot: label, healthy range
    "gradient_norm": ("L2 norm of the gradient", None),
    "gradient_to_weight": ("gradient-to-weight ratio", (1e-3, 1e-2)),
    "update_to_weight": ("update-to-weight ratio", None),
    "activation_std": ("standard deviation of the output", None),
}


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine(device: torch.device) -> str:
    """Describes the device, the versions and the date in one line."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{platform.machine()} CPU, {capability}, {torch.get_num_threads()} threads"
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return (
        f"{name}; torch {torch.__version__}, python {platform.python_version()}, backends "
        f"{', '.join(available_backends())}; {date}"
    )


def command() -> str:
    """Returns the command line of this process."""
    return shlex.join(["python", "-m", "preact_kernels.study", *sys.argv[1:]])


def values_by_step(rows: Sequence[BlockRow], column: str) -> dict[int, list[float]]:
    """Maps a measured step to the values of a column, one per block; NaN: not measured."""
    found: dict[int, list[float]] = {}
    for row in rows:
        value = getattr(row, column)
        found.setdefault(row.step, []).append(float("nan") if value is None else value)
    return found


def stage_starts(rows: Sequence[BlockRow]) -> list[int]:
    """Returns the number of each later stage's first block."""
    stages = {row.block: row.stage for row in rows}
    return [b for b in sorted(stages) if b > 1 and stages[b] != stages.get(b - 1)]


def chosen_steps(steps: Sequence[int], count: int = 8) -> list[int]:
    """Returns about `count` of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def stage_histograms(run: TrainingRun) -> dict[str, tuple[list[float], list[float]]]:
    """Returns histograms (counts, edges) of each stage's output in evaluation mode."""
    images = run.test_images.images[:_HISTOGRAM_IMAGES].to(run.device)
    run.network.eval()
    with run.autocast():
        found = histograms(run.network, images, bins=_HISTOGRAM_BINS)
    run.network.train()
    return {
        f"stage {i}": (counts.tolist(), edges.tolist())
        for i, (counts, edges) in enumerate(found.values(), 1)
    }


def plotted(text: str, draw: Callable[..., Path], *args: Any, **options: Any) -> str:
    """Draws a plot, and returns the line of the report that shows it."""
    try:
        path = draw(*args, **options)
    except plots.NothingToPlotError as error:
        return f"{text}: nothing to plot ({error})."
    return f"![{text}]({path.name})"


def _signal_plots(run: TrainingRun) -> Iterator[str]:
    rows = run.history.signal
    for column, (label, healthy) in SIGNALS.items():
        by_step = values_by_step(rows, column)
        shown = {step: by_step[step] for step in chosen_steps(sorted(by_step))}
        yield plotted(
            f"{label} by block",
            plots.plot_by_block_over_time,
            shown,
            run.out / f"{column.replace('_', '-')}.png",
            ylabel=label,
            healthy=healthy,
            boundaries=stage_starts(rows),
        )
    found = {"trained": stage_histograms(run)}
    path = run.out / "activations.png"
    yield plotted("activations by stage", plots.plot_histograms, found, path)


def write_report(run: TrainingRun) -> Path:
    """Writes `report.md` and its plots to the folder of a run, after its first epoch or later.

    Returns:
        The path of the report.
    """
    history, config, described = run.history, run.config, run.description()
    last = history.epochs[-1]
    best = max(history.epochs, key=lambda row: row.test_accuracy)
    per_epoch = run.batches.steps_per_epoch
    step_ms = 1000 * statistics.median(row.seconds for row in history.epochs) / per_epoch
    trained_s = sum(row.seconds for row in history.epochs) + history.seconds
    training = plotted(
        "loss and accuracy",
        plots.plot_training,
        [row._asdict() for row in history.epochs],
        list(enumerate(history.losses, 1)),
        run.out / "training.png",
        learning_rates=list(enumerate(run.learning_rates(), 1)),
        steps_per_epoch=per_epoch,
    )
    options = ", ".join(f"{k}={v}" for k, v in config.changed().items())
    lines = [
        f"# ResNet-{config.depth}, {config.placement}, {config.shortcut} shortcuts",
        "",
        f"**Test accuracy {last.test_accuracy:.4f}** after {last.epoch} epochs "
        f"(highest {best.test_accuracy:.4f}, after {best.epoch}).",
        "",
        f"- Network: {described['network']}.",
        f"- Images: {described['images']}.",
        f"- Options: {options}.",
        f"- Steps: {len(history.losses):,} of {config.batch} images, {step_ms:.0f} ms each "
        f"(median of epochs, evaluation included); {trained_s:.0f} s in all.",
        f"- Input pipeline: {history.input_seconds / max(trained_s, 1e-9):.1%} of the time.",
        f"- Machine: {machine(run.device)}.",
        f"- Command: `{command()}`",
        "",
        training,
        "",
        "## Epochs",
        "",
        markdown_table(
            ("epoch", "training loss", "training accuracy", "test accuracy", "s"),
            (
                (r.epoch, f"{r.train_loss:.4f}", f"{r.train_accuracy:.4f}",
                 f"{r.test_accuracy:.4f}", f"{r.seconds:.1f}")
                for r in (history.epochs[i - 1] for i in chosen_steps(range(1, last.epoch + 1), 12))
            ),
        ),
    ]  # fmt: skip
    if history.signal:
        lines += ["", "## Signal flow", ""]
        lines += [*_signal_plots(run), "", *_warning_lines(history.warnings)]
    path = run.out / "report.md"
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path


def _warning_lines(warnings: Sequence[str]) -> list[str]:
    if not warnings:
        return ["No threshold was crossed."]
    lines = [f"- {warning}" for warning in warnings[:_MOST_WARNINGS]]
    if len(warnings) > _MOST_WARNINGS:
        lines.append(f"- and {len(warnings) - _MOST_WARNINGS} more")
    return [f"Thresholds were crossed {len(warnings)} times:", "", *lines]
