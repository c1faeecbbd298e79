"""The report of a training run, in Markdown, with plots."""

import datetime
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from preact_kernels.ops.dispatch import available_backends
from preact_kernels.study import plots
from preact_kernels.study.checkpoints import write_atomically
from preact_kernels.study.diagnostics import BlockRow, histograms
from preact_kernels.study.training import TrainingRun

_HISTOGRAM_IMAGES = 64
_WARNINGS = 20  # in a report
SIGNALS = {  # columns of BlockRow that are plotted: label, healthy range
    "gradient_norm": ("L2 norm of the gradient", None),
    "gradient_to_weight": ("gradient-to-weight ratio", (1e-3, 1e-2)),
    "update_to_weight": ("update-to-weight ratio", None),
    "activation_std": ("standard deviation of the output", None),
}


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine(device: torch.device) -> str:
    """The device, versions and the date, in one line."""
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
    """The command that runs now."""
    return shlex.join(["python", "-m", "preact_kernels.study", *sys.argv[1:]])


def parameter_count(network: nn.Module) -> int:
    """Number of trained values."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def values_by_step(rows: Sequence[BlockRow], column: str) -> dict[int, list[float]]:
    """Of each measured step, a column of all blocks; NaN where it is not measured."""
    found: dict[int, list[float]] = {}
    for row in rows:
        value = getattr(row, column)
        found.setdefault(row.step, []).append(float("nan") if value is None else value)
    return found


def stage_starts(rows: Sequence[BlockRow]) -> list[int]:
    """Numbers of the blocks that begin the second and later stages."""
    stages = {row.block: row.stage for row in rows}
    return [b for b in sorted(stages) if b > 1 and stages[b] != stages.get(b - 1)]


def chosen_steps(steps: Sequence[int], count: int = 8) -> list[int]:
    """About `count` of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _signal_plots(run: TrainingRun) -> list[tuple[str, Path]]:
    rows = run.history.signal
    written = []
    for column, (label, healthy) in SIGNALS.items():
        by_step = values_by_step(rows, column)
        if any(v == v and v > 0 for values in by_step.values() for v in values):
            path = run.out / f"{column.replace('_', '-')}.png"
            shown = {step: by_step[step] for step in chosen_steps(sorted(by_step))}
            plots.plot_by_block_over_time(
                shown, path, ylabel=label, healthy=healthy, boundaries=stage_starts(rows)
            )
            written.append((label, path))
    return written


def _histogram_plot(run: TrainingRun) -> Path:
    images = run.test_images.images[:_HISTOGRAM_IMAGES].to(run.device)
    found = histograms(run.network, images)
    stages = {
        f"stage {i}": (counts.tolist(), edges.tolist())
        for i, (counts, edges) in enumerate(found.values(), 1)
    }
    return plots.plot_histograms({"trained": stages}, run.out / "activations.png")


def write_report(run: TrainingRun) -> Path:
    """Writes `report.md` and its plots into the folder of a run that has trained an epoch.

    Returns:
        The path of the report.
    """
    history, config, described = run.history, run.config, run.description()
    last = history.epochs[-1]
    best = max(history.epochs, key=lambda row: row.test_accuracy)
    per_epoch = run.batches.steps_per_epoch
    step_ms = 1000 * statistics.median(row.seconds for row in history.epochs) / per_epoch
    trained_s = sum(row.seconds for row in history.epochs) + history.seconds
    training = plots.plot_training(
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
        f"![loss and accuracy]({training.name})",
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
        lines += [f"![{label} by block]({path.name})" for label, path in _signal_plots(run)]
        lines += [f"![activations by stage]({_histogram_plot(run).name})", ""]
        lines += _warning_lines(history.warnings)
    path = run.out / "report.md"
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path


def _warning_lines(warnings: Sequence[str]) -> list[str]:
    if not warnings:
        return ["No threshold was crossed."]
    lines = [f"- {warning}" for warning in warnings[:_WARNINGS]]
    if len(warnings) > _WARNINGS:
        lines.append(f"- and {len(warnings) - _WARNINGS} more")
    return [f"Thresholds were crossed {len(warnings)} times:", "", *lines]
