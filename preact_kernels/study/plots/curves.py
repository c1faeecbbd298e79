"""Plots of the study's measurements, as PNG files.

Each function writes the file `path` with `title` above the plot, and returns `path`. Values that
cannot be drawn are left out, counted in a footnote, and a label without others says so in the
legend. Without any value to draw, `ValueError` is raised.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from preact_kernels.study.plots.parts import (
    COLORS,
    Look,
    Points,
    add_legend,
    check_any,
    depth_axis,
    draw_runs,
    finite_points,
    grid,
    marked,
    new_figure,
    note_left_out,
    plottable,
    save_png,
    say,
    scale_y,
    style,
)

_BAR = "#A9CCE3"


def plot_losses(
    curves: Mapping[str, Sequence[Points]],
    path: Path,
    title: str = "",
    *,
    xlabel: str = "step",
    ylabel: str = "training loss",
    smooth: int = 0,
    log: bool | None = None,
) -> Path:
    """Plots curves of training: the median over seeds as a line, their range as a band.

    Points that are not finite are left out and counted in a footnote.

    Args:
        curves: label -> runs (one per seed), each a sequence of (step, loss).
        path: of the PNG file.
        title: above the plot.
        xlabel: of the steps.
        ylabel: of the losses.
        smooth: points in the moving mean that is taken of each run; above 1, the raw points are
            drawn faintly.
        log: whether the losses have a log axis; None decides by their range.

    Raises:
        ValueError: no point is finite.
    """
    losses = [float(v) for runs in curves.values() for run in runs for _, v in run]
    check_any("curves", losses, "at least one finite loss")
    figure = new_figure((8.5, 4.5), title)
    axes = figure.subplots()
    scale_y(axes, losses, log)
    drawn = [draw_runs(axes, *item, smooth, i) for i, item in enumerate(curves.items())]
    grid(axes)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    add_legend(axes)
    note_left_out(figure, sum(drawn), "not finite")
    return save_png(figure, path)


def plot_error_against_depth(
    series: Mapping[str, Mapping[int, Sequence[float]]],
    path: Path,
    title: str = "",
    *,
    reference: Mapping[str, Mapping[int, float]] | None = None,
    ylabel: str = "test error, %",
) -> Path:
    """Plots errors against depth: the median over seeds, and bars from lowest to highest.

    Args:
        series: label -> depth -> errors of the seeds.
        path: of the PNG file.
        title: above the plot.
        reference: label -> depth -> the paper's error; hollow markers on dashed lines, in the
            colour of the series of that label.
        ylabel: of the errors.

    Raises:
        ValueError: no error is finite.
    """
    reference = reference or {}
    errors = [float(e) for row in series.values() for seeds in row.values() for e in seeds]
    check_any("series", errors)
    figure = new_figure((8.5, 4.5), title)
    axes = figure.subplots()
    scale_y(axes, [*errors, *(e for row in reference.values() for e in row.values())])
    labels = list(dict.fromkeys([*series, *reference]))
    for i, label in enumerate(labels):
        look = {**style(i), "linestyle": "-"}
        shift = 1.012 ** (i - (len(labels) - 1) / 2)  # bars of one depth stand side by side
        kept = {
            depth: [e for e in seeds if math.isfinite(e)]
            for depth, seeds in sorted(series.get(label, {}).items())
        }
        kept = {depth: seeds for depth, seeds in kept.items() if seeds}
        if label in series:
            medians = np.array([np.median(seeds) for seeds in kept.values()])
            below = medians - np.array([min(seeds) for seeds in kept.values()])
            above = np.array([max(seeds) for seeds in kept.values()]) - medians
            name = label if kept else f"{label} (no finite value)"
            at = [depth * shift for depth in kept]
            axes.plot(at, medians, label=name, **look)
            axes.errorbar(at, medians, (below, above), fmt="none", capsize=3, ecolor=look["color"])
        if label in reference:
            paper = dict(sorted(reference[label].items()))
            hollow = {"linestyle": "--", "mfc": "none", "markersize": 9, "linewidth": 1.0}
            name = f"{label}, paper"
            at = [depth * shift for depth in paper]
            axes.plot(at, list(paper.values()), label=name, **{**look, **hollow})
    depth_axis(axes, (d for row in (*series.values(), *reference.values()) for d in row))
    axes.set_ylabel(ylabel)
    grid(axes)
    add_legend(axes)
    note_left_out(figure, sum(not math.isfinite(e) for e in errors), "not finite")
    return save_png(figure, path)


def plot_cost_against_depth(
    times_ms: Mapping[str, Mapping[int, float]],
    memory_mib: Mapping[str, Mapping[int, float]],
    path: Path,
    title: str = "",
) -> Path:
    """Plots the time of a training step and the memory kept for backward against depth.

    Args:
        times_ms: label -> depth -> milliseconds a step.
        memory_mib: label -> depth -> MiB kept for backward.
        path: of the PNG file.
        title: above the plot.

    Raises:
        ValueError: one of the two has no positive finite value.
    """
    figure = new_figure((11.5, 4.3), title)
    labels = list(dict.fromkeys([*times_ms, *memory_mib]))
    panels = (
        ("times_ms", "training step, ms", times_ms),
        ("memory_mib", "kept for backward, MiB", memory_mib),
    )
    left_out = 0
    for axes, (argument, ylabel, series) in zip(figure.subplots(1, 2), panels, strict=True):
        shown: list[float] = []
        for i, label in enumerate(labels):
            row = dict(sorted(series.get(label, {}).items()))
            values = plottable(list(row.values()), log=True)
            left_out += int(np.isnan(values).sum())
            shown += values.tolist()
            axes.plot(list(row), values, label=label, **style(i))
        check_any(argument, shown, "a positive finite value")
        scale_y(axes, shown, log=True)
        depth_axis(axes, (depth for row in series.values() for depth in row))
        axes.set_ylabel(ylabel)
        grid(axes)
    add_legend(figure.axes[-1])
    note_left_out(figure, left_out, "zero, negative or not finite")
    return save_png(figure, path)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def plot_bars(
    values: Mapping[str, Sequence[float]],
    path: Path,
    title: str = "",
    *,
    ylabel: str,
    reference: Mapping[str, float] | None = None,
) -> Path:
    """Plots horizontal bars of the median over seeds, with the seeds as dots.

    Args:
        values: label -> values of the seeds; the first label is at the top.
        path: of the PNG file.
        title: above the plot.
        ylabel: of the values (they run along the horizontal axis).
        reference: label -> the paper's value, a diamond.

    Raises:
        ValueError: no value is finite.
    """
    reference = reference or {}
    check_any("values", (v for seeds in values.values() for v in seeds))
    figure = new_figure((8.5, 1.4 + 0.45 * len(values)), title)
    axes = figure.subplots()
    paper: Look = {
        "color": COLORS[1],
        "markersize": 7,
        "markerfacecolor": "white",
        "linestyle": "none",
    }
    seed: Look = {"color": COLORS[0], "markersize": 4.5, "linestyle": "none", "marker": "o"}
    furthest = 0.0
    for row, (label, seeds) in enumerate(values.items()):
        kept = [v for v in seeds if math.isfinite(v)]
        median = float(np.median(kept)) if kept else 0.0
        axes.barh(row, median, height=0.62, color=_BAR)
        axes.plot(kept, [row] * len(kept), zorder=3, **seed)
        end = max([median, *kept, reference.get(label, 0.0)])
        if label in reference:
            axes.plot(reference[label], row, marker="D", zorder=2.5, **paper)
        text = _three_digits(median) if kept else "no finite value"
        axes.annotate(text, (end, row), (9, 0), textcoords="offset points", va="center", fontsize=9)
        furthest = max(furthest, end)
    axes.set_yticks(range(len(values)), ["\n".join(wrap(label, 28)) for label in values])
    axes.set(ylim=(len(values) - 0.4, -0.6), xlim=(0, 1.14 * furthest), xlabel=ylabel)
    axes.tick_params(axis="y", length=0)
    grid(axes)
    axes.grid(visible=False, axis="y")
    handles: list[Artist] = [
        Patch(color=_BAR, label="median"),
        Line2D([], [], label="one seed", **seed),
    ]
    if reference:
        handles.append(Line2D([], [], marker="D", label="paper", **paper))
    add_legend(axes, handles)
    everything = [v for seeds in values.values() for v in seeds]
    note_left_out(figure, sum(not math.isfinite(v) for v in everything), "not finite")
    return save_png(figure, path)


def plot_training(
    epochs: Sequence[Mapping[str, float]],
    losses: Points,
    path: Path,
    title: str = "",
    *,
    learning_rates: Points = (),
    steps_per_epoch: float | None = None,
    smooth: int = 20,
) -> Path:
    """Plots one run: learning rate, loss and accuracies over epochs.

    Args:
        epochs: of each finished epoch `epoch` (from 1), `train_accuracy` and `test_accuracy` (from
            0 to 1); other keys are ignored, and those of accuracies may be absent.
        losses: (step, loss) of the run.
        path: of the PNG file.
        title: above the plot.
        learning_rates: (step, learning rate) of the run.
        steps_per_epoch: None takes the last step of `losses` for the end of the last epoch.
        smooth: points in the moving mean of the loss.

    Raises:
        ValueError: no loss is finite.
    """
    check_any("losses", (v for _, v in losses), "at least one finite loss")
    if steps_per_epoch is None:
        steps_per_epoch = max(s for s, _ in losses) / epochs[-1]["epoch"] if epochs else 1.0
    scale = 1 / (steps_per_epoch or 1.0)  # steps are drawn in epochs, under one horizontal axis
    figure = new_figure((8.5, 6.8), title)
    rate, loss, accuracy = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2.6, 2.2))

    steps, rates = finite_points(learning_rates)
    if len(rates):
        scale_y(rate, rates.tolist())
        if rate.get_yscale() == "log":
            rate.yaxis.set_major_locator(LogLocator(numticks=4))
        rate.plot(steps * scale, rates, color="0.3", drawstyle="steps-mid")
    else:
        rate.set_yticks([])
        say(rate, "not recorded")
    scale_y(loss, (v for _, v in losses))
    name = f"loss, mean of {smooth} points" if smooth > 1 else "loss"
    left_out = draw_runs(loss, name, [[(step * scale, v) for step, v in losses]], smooth, 0)
    numbers = [row["epoch"] for row in epochs]
    measured = False
    for i, (key, name) in enumerate((("train_accuracy", "training"), ("test_accuracy", "test"))):
        values = plottable([100 * row.get(key, math.nan) for row in epochs], log=False)
        if np.isfinite(values).any():
            measured = True
            look = {**style(i), "markevery": marked(values, i), "markersize": 4}
            accuracy.plot(numbers, values, label=name, **look)
    if measured:
        add_legend(accuracy)
    else:
        accuracy.set_yticks([])
        say(accuracy, "not recorded")
    rate.set_ylabel("learning\nrate")
    loss.set_ylabel("training loss")
    in_epochs = bool(epochs) or steps_per_epoch != 1.0
    accuracy.set(ylabel="accuracy, %", xlabel="epoch" if in_epochs else "step")
    for axes in figure.axes:
        grid(axes)
    figure.align_ylabels()
    add_legend(loss)
    note_left_out(figure, left_out, "not finite")
    return save_png(figure, path)
