"""Plots of signal flow: measurements by block, and histograms of activations."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from preact_kernels.study.plots.parts import (
    COLORS,
    Look,
    add_legend,
    check_any,
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

Histogram = tuple[Sequence[float], Sequence[float]]  # n counts, n + 1 edges


def _draw_stages(axes: Axes, boundaries: Sequence[int], blocks: int) -> None:
    """Draws lines between stages, and the names of the stages above the axes."""
    edges = [0.5, *(b - 0.5 for b in boundaries), blocks + 0.5]
    for edge in edges[1:-1]:
        axes.axvline(edge, color="0.55", linewidth=0.8, zorder=0.5)
    for stage, (left, right) in enumerate(pairwise(edges), start=1):
        at = ((left + right) / 2, 1.015)
        look: Look = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "0.35"}
        if boundaries:
            axes.text(*at, f"stage {stage}", transform=axes.get_xaxis_transform(), **look)


def _block_axes(
    figure: Figure,
    series: Sequence[Sequence[float]],
    ylabel: str,
    healthy: tuple[float, float] | None,
    boundaries: Sequence[int],
) -> tuple[Axes, list[np.ndarray]]:
    """Returns axes for values by block, and the values, with NaN if they cannot be shown."""
    arrays = [plottable(values, log=True) for values in series]
    shown = [float(v) for array in arrays for v in array]
    check_any("values", shown, "a positive finite value")
    blocks = max(len(array) for array in arrays)
    if any(not 1 < b <= blocks for b in boundaries):
        raise ValueError(f"boundaries: expected 2 to {blocks}, got {list(boundaries)}")
    axes = figure.subplots()
    scale_y(axes, [*shown, *(healthy or ())], log=True)
    if healthy is not None:
        text = f"healthy: {healthy[0]:g} to {healthy[1]:g}"
        axes.axhspan(*healthy, color="#B5E0C8", alpha=0.55, linewidth=0, zorder=0, label=text)
    _draw_stages(axes, boundaries, blocks)
    margin = 0.02 * blocks
    axes.set_xlim(0.5 - margin, blocks + 0.5 + margin)
    ticks = MaxNLocator(9, integer=True).tick_values(1, max(blocks, 2))
    axes.set_xticks(sorted({1, *(int(t) for t in ticks if 1 <= t <= blocks)}))
    axes.set(xlabel="block", ylabel=ylabel)
    grid(axes)
    count = int(sum(np.isnan(array).sum() for array in arrays))
    note_left_out(figure, count, "zero, negative or not finite")
    return axes, arrays


def plot_by_block(
    series: Mapping[str, Sequence[float]],
    path: Path,
    *,
    ylabel: str,
    boundaries: Sequence[int] = (),
) -> Path:
    """Plots a measurement against the number of the block, on a log axis.

    Points that the axis cannot show are omitted and counted in a footnote.

    Args:
        series: label -> values of blocks 1, 2, ...
        path: the PNG file.
        ylabel: label of the values' axis.
        boundaries: number of the first block of each later stage.

    Raises:
        ValueError: no value can be shown, or a boundary is not a block after the first.
    """
    figure = new_figure((8.5, 4.5))
    axes, arrays = _block_axes(figure, list(series.values()), ylabel, None, boundaries)
    for i, (label, array) in enumerate(zip(series, arrays, strict=True)):
        name = label if np.isfinite(array).any() else f"{label} (nothing to show)"
        blocks = np.arange(1, len(array) + 1)
        look = {**style(i), "linewidth": 1.6 if len(array) <= 100 else 1.0}
        axes.plot(blocks, array, label=name, markevery=marked(array, 2 * i), **look)
    add_legend(axes)
    return save_png(figure, path)


def plot_by_block_over_time(
    rows: Mapping[int, Sequence[float]],
    path: Path,
    *,
    ylabel: str,
    healthy: tuple[float, float] | None = None,
    boundaries: Sequence[int] = (),
) -> Path:
    """Plots a measurement against the block, on a log axis; the colour of a line is its step.

    Args:
        rows: step -> values of blocks 1, 2, ...
        path: the PNG file.
        ylabel: label of the values' axis.
        healthy: lowest and highest value of the shaded band.
        boundaries: number of the first block of each later stage.

    Raises:
        ValueError: no value can be shown, or a boundary is not a block after the first.
    """
    figure = new_figure((8.5, 4.5))
    steps = sorted(rows)
    series = [rows[s] for s in steps]
    axes, arrays = _block_axes(figure, series, ylabel, healthy, boundaries)
    # Viridis without its yellow end, which is too pale on white.
    shades = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)))
    span = max(1, steps[-1] - steps[0])
    scale = ScalarMappable(Normalize(steps[0], steps[0] + span), shades)
    for step, array in zip(steps, arrays, strict=True):
        blocks = np.arange(1, len(array) + 1)
        look: Look = {
            "color": shades((step - steps[0]) / span),
            "linewidth": 1.4,
            "markersize": 3.5,
        }
        axes.plot(blocks, array, marker="o", markevery=marked(array, 0), **look)
    ticks = steps if len(steps) <= 6 else MaxNLocator(6, integer=True)
    figure.colorbar(scale, ax=axes, label="step", ticks=ticks, pad=0.02)
    if healthy is not None:
        figure.legend(loc="outside lower right", fontsize=9, frameon=False)
    return save_png(figure, path)


def _check_histogram(name: str, histogram: Histogram) -> tuple[np.ndarray, np.ndarray]:
    """Returns densities and edges; empty if all counts are zero."""
    counts, edges = (np.array(part, dtype=float) for part in histogram)
    if len(edges) != len(counts) + 1:
        raise ValueError(
            f"histograms: expected {len(counts) + 1} edges for {len(counts)} counts of {name}, "
            f"got {len(edges)}"
        )
    if not (np.isfinite(edges).all() and np.isfinite(counts).all() and counts.sum() > 0):
        return np.array([]), np.array([])
    return counts / (counts.sum() * np.diff(edges)), edges


def _central(density: np.ndarray, edges: np.ndarray) -> tuple[float, float]:
    """Returns the range of the bins without 0.05% of the counts at either end."""
    below = np.cumsum(density * np.diff(edges))
    first = int(np.searchsorted(below, 5e-4, side="right"))
    last = int(np.searchsorted(below, 1 - 5e-4))
    return float(edges[first]), float(edges[min(last, len(density) - 1) + 1])


def plot_histograms(histograms: Mapping[str, Mapping[str, Histogram]], path: Path) -> Path:
    """Plots densities: a row per label, a column per stage with shared axes.

    The x axes omit 0.05% of the values at both ends of each histogram. The log axes of densities
    begin at a thousandth of the lowest peak: after a ReLU, most values are zero.

    Args:
        histograms: label -> stage -> (n counts, n + 1 edges).
        path: the PNG file.

    Raises:
        ValueError: no histogram has a count, or the numbers of edges and counts do not match.
    """
    stages = list(dict.fromkeys(stage for row in histograms.values() for stage in row))
    panels = {
        (label, stage): _check_histogram(f"{label!r}, {stage!r}", histogram)
        for label, row in histograms.items()
        for stage, histogram in row.items()
    }
    check_any("histograms", (v for d, _ in panels.values() for v in d), "at least one count")
    size = (1.5 + 2.4 * len(stages), 1.1 + 1.15 * len(histograms))
    figure = new_figure(size)
    grid_of_axes = figure.subplots(
        len(histograms), len(stages), sharex="col", sharey="col", squeeze=False
    )
    peaks: dict[int, list[float]] = {}  # column -> highest densities
    for column, stage in enumerate(stages):
        found = [panels[label, stage] for label in histograms if (label, stage) in panels]
        found = [panel for panel in found if len(panel[0])]
        ranges = [_central(*panel) for panel in found]
        for row, label in enumerate(histograms):
            axes: Axes = grid_of_axes[row, column]
            density, edges = panels.get((label, stage), (np.array([]), np.array([])))
            if len(density):
                axes.stairs(density, edges, fill=True, color=COLORS[row % len(COLORS)])
            else:
                say(axes, "no values")
            axes.tick_params(labelsize=8)
            grid(axes)
            if row == 0:
                axes.set_title(stage, fontsize=9)
            if column == len(stages) - 1:
                text = "\n".join(wrap(label, 16))
                axes.text(1.04, 0.5, text, transform=axes.transAxes, va="center", fontsize=9)
        if found:
            axes.set_xlim(min(low for low, _ in ranges), max(high for _, high in ranges))
            axes.xaxis.set_major_locator(MaxNLocator(5))
            peaks[column] = [float(d.max()) for d, _ in found]
        axes.set_xlabel("activation", fontsize=9)
    for column, heights in peaks.items():
        limits = (min(heights) * 1e-3, max(heights) * 1.5)
        grid_of_axes[0, column].set(yscale="log", ylim=limits)
    figure.supylabel("density", fontsize=9)
    return save_png(figure, path)
