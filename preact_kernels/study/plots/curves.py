"""Plots of training runs and of their cost, as PNG files.

Each function writes the file `path` and returns `path`. Values that cannot be drawn are omitted and
counted in a footnote; the legend marks labels without values. If no value can be drawn, raises
`NothingToPlotError` (a `ValueError`).
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
_MEAN_POINTS = 20  # in the moving mean of losses


def plot_losses(
    curves: Mapping[str, Sequence[Points]],
    path: Path,
    *,
    smooth: int = 0,
    log: bool | None = None,
) -> Path:
    """Plots training losses: the median over seeds as a line, the range as a band.

    Args:
        curves: label -> runs (one per seed), each a sequence of (step, loss).
        path: the PNG file.
        smooth: points in the moving mean of each run; above 1, raw points are drawn faintly.
        log: use a log axis for losses; None: depends on their range.

    Raises:
        ValueError: no point is finite.
    """
    losses = [float(v) for runs in curves.values() for run in runs for _, v in run]
    check_any("curves", losses, "at least one finite loss")
    figure = new_figure((8.5, 4.5))
    axes = figure.subplots()
    scale_y(axes, losses, log)
    drawn = [draw_runs(axes, *item, smooth, i) for i, item in enumerate(curves.items())]
    grid(axes)
    axes.set(xlabel="step", ylabel="training loss")
    add_legend(axes)
    note_left_out(figure, sum(drawn), "not finite")
    return save_png(figure, path)


def plot_error_against_depth(
    series: Mapping[str, Mapping[int, Sequence[float]]],
    path: Path,
    *,
    reference: Mapping[str, Mapping[int, float]] | None = None,
) -> Path:
    """Plots errors against depth: the median over seeds, and bars from lowest to highest.

    Args:
        series: label -> depth -> errors, one per seed.
        path: the PNG file.
        reference: label -> depth -> the paper's error, drawn as hollow markers on dashed lines in
            the label's colour.

    Raises:
        ValueError: no error is finite.
    """
    reference = reference or {}
    errors = [float(e) for row in series.values() for seeds in row.values() for e in seeds]
    check_any("series", errors)
    figure = new_figure((8.5, 4.5))
    axes = figure.subplots()
    scale_y(axes, [*errors, *(e for row in reference.values() for e in row.values())])
    labels = list(dict.fromkeys([*series, *reference]))
    for i, label in enumerate(labels):
        look = {**style(i), "linestyle": "-"}
        shift = 1.012 ** (i - (len(labels) - 1) / 2)  # keeps the bars of a depth apart
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
    axes.set_ylabel("test error, %")
    grid(axes)
    add_legend(axes)
    note_left_out(figure, sum(not math.isfinite(e) for e in errors), "not finite")
    return save_png(figure, path)


def plot_cost_against_depth(
    times_ms: Mapping[str, Mapping[int, float]],
    memory_mib: Mapping[str, Mapping[int, float]],
    path: Path,
) -> Path:
    """Plots the time of a training step and the memory saved for backward against depth.

    Args:
        times_ms: label -> depth -> milliseconds per step.
        memory_mib: label -> depth -> MiB saved for backward.
        path: the PNG file.

    Raises:
        ValueError: one of the two has no positive finite value.
    """
    figure = new_figure((11.5, 4.3))
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
    *,
    ylabel: str,
    reference: Mapping[str, float] | None = None,
) -> Path:
    """Plots horizontal bars of the median over seeds, with the seeds as dots.

    Args:
        values: label -> values, one per seed; the first label is at the top.
        path: the PNG file.
        ylabel: label of the horizontal axis, the axis of values.
        reference: label -> the paper's value, drawn as a diamond.

    Raises:
        ValueError: no value is finite.
    """
    reference = reference or {}
    check_any("values", (v for seeds in values.values() for v in seeds))
    figure = new_figure((8.5, 1.4 + 0.45 * len(values)))
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
    *,
    learning_rates: Points = (),
    steps_per_epoch: float | None = None,
) -> Path:
    """Plots one run: learning rate, loss and accuracies over epochs.

    Args:
        epochs: a dict per finished epoch: `epoch` (from 1), `train_accuracy` and `test_accuracy`
            (from 0 to 1). Accuracies may be absent; other keys are ignored.
        losses: (step, loss) pairs.
        path: the PNG file.
        learning_rates: (step, learning rate) pairs.
        steps_per_epoch: steps per epoch; None: the last epoch ends at the last step of `losses`.

    Raises:
        ValueError: no loss is finite.
    """
    check_any("losses", (v for _, v in losses), "at least one finite loss")
    if steps_per_epoch is None:
        steps_per_epoch = max(s for s, _ in losses) / epochs[-1]["epoch"] if epochs else 1.0
    scale = 1 / (steps_per_epoch or 1.0)  # the shared axis counts epochs
    figure = new_figure((8.5, 6.8))
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
    name = f"loss, mean of {_MEAN_POINTS} points"
    left_out = draw_runs(loss, name, [[(step * scale, v) for step, v in losses]], _MEAN_POINTS, 0)
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
