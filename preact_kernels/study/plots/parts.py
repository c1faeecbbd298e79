"""Parts of plots: colours, scales, legends, footnotes, files."""

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from preact_kernels.study.files import write_atomically

Points = Sequence[tuple[float, float]]
Look = dict[str, Any]  # matplotlib's options of a line or text

# Okabe and Ito's colours for the colour-blind, with brown instead of yellow, and more.
COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#000000", "#8C6D31", "#999999", "#5E3C99"),
)
_MARKERS = "osD^vPX*<h"
_LINES: tuple[Any, ...] = ("-", "--", "-.", (0, (2, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
_LOG_RATIO = 20.0  # largest / smallest value above which an axis is logarithmic by default


def save_png(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, atomically."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    write_atomically(path, content.getvalue())
    return path


def style(index: int) -> Look:
    """Returns colour, marker and line style of the label with this index."""
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index % len(_LINES)],
        "linewidth": 1.6,
        "markersize": 5,
    }


def new_figure(size: tuple[float, float]) -> Figure:
    """Returns a figure of `size` inches with a layout without overlaps."""
    figure = Figure(figsize=size, layout="constrained")
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    return figure


def add_legend(axes: Axes, handles: Sequence[Any] | None = None) -> None:
    """Adds a legend to the right of the axes, outside of the data."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    corner: Look = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
    axes.legend(handles=handles, fontsize=9, frameon=False, handlelength=3.5, **corner)


def note_left_out(figure: Figure, count: int, what: str) -> None:
    """Adds a footnote with the number of points that are not drawn, if any."""
    if count:
        noun = "1 point is" if count == 1 else f"{count:,} points are"
        text = f"{noun} left out: {what}"
        figure.supxlabel(text, fontsize=8, color="0.35", x=0.015, ha="left")


def say(axes: Axes, text: str) -> None:
    """Writes text in the middle of axes without data."""
    middle: Look = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(
        0.5, 0.5, text, fontsize=9, color="0.35", bbox={"fc": "white", "ec": "none"}, **middle
    )


class NothingToPlotError(ValueError):
    """No value can be drawn."""


def check_any(argument: str, values: Iterable[float], expected: str = "a finite value") -> None:
    """Raises unless a value is finite."""
    if not any(math.isfinite(v) for v in values):
        raise NothingToPlotError(f"{argument}: expected {expected}, got none")


def grid(axes: Axes) -> None:
    """Draws grey lines behind the data, and removes the frame at the top and the right."""
    axes.grid(True, which="major", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def label_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Labels powers of ten, and numbers between them if the values span few decades."""
    decades = math.log10(high / low)
    subs: tuple[float, ...] = (1, 2, 5) if decades < 2.2 else (1,)
    if decades < 0.8:
        subs = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    is_plain = low >= 1e-3 and high < 1e6

    def text(value: float, _: int) -> str:
        if is_plain:
            return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
        exponent = math.floor(math.log10(value) + 1e-9)
        factor = f"{value / 10**exponent:.3g}"
        return ("$" if factor == "1" else f"${factor}\\times") + f"10^{{{exponent}}}$"

    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_major_formatter(FuncFormatter(text))
    axis.set_minor_formatter(NullFormatter())


def scale_y(axes: Axes, values: Iterable[float], log: bool | None = None) -> None:
    """Sets a log or linear y axis; `log=None`: log if values are positive with a wide range."""
    finite = [v for v in values if math.isfinite(v)]
    if log is None:
        log = min(finite) > 0 and max(finite) / min(finite) > _LOG_RATIO
    if log:
        axes.set_yscale("log")
        positive = [v for v in finite if v > 0]
        label_log_ticks(axes.yaxis, min(positive), max(positive))


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean over `window` points around each point; fewer at both ends."""
    half = min(window // 2, len(values))

    def sums(terms: np.ndarray) -> np.ndarray:
        return np.convolve(terms, np.ones(2 * half + 1))[half : half + len(terms)]

    return sums(values) / sums(np.ones(len(values))) if len(values) else values


def finite_points(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps in ascending order, and values, of the finite points."""
    table = np.array(points, dtype=float).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    table = table[np.argsort(table[:, 0], kind="stable")]
    return table[:, 0], table[:, 1]


def plottable(values: Sequence[float], log: bool) -> np.ndarray:
    """Returns the values as an array, with NaN for values that the axis cannot show."""
    array = np.array(values, dtype=float)
    array[~np.isfinite(array) | ((array <= 0) if log else False)] = math.nan
    return array


def marked(values: np.ndarray, offset: int) -> list[int]:
    """Returns the indices with a marker: all of up to 30 points, else about 12.

    Points without neighbours always have a marker.
    """
    shown = np.isfinite(values)
    around = np.concatenate([[False], shown, [False]])
    is_alone = ~around[:-2] & ~around[2:]
    every = 1 if len(values) <= 30 else len(values) // 12
    is_marked = np.arange(len(values)) % every == offset % every
    return [int(i) for i in np.flatnonzero(shown & (is_alone | is_marked))]


def draw_runs(axes: Axes, label: str, runs: Sequence[Points], smooth: int, index: int) -> int:
    """Draws the median over runs, the range, and faint raw points; returns the omitted points."""
    look = style(index)
    at_step: dict[float, list[float]] = {}
    left_out = 0
    for run in runs:
        steps, values = finite_points(run)
        left_out += len(run) - len(steps)
        if smooth > 1:
            raw: Look = {"markersize": 5 if len(steps) < 300 else 3, "zorder": 1}
            axes.plot(steps, values, ".", color=look["color"], alpha=0.3, mew=0, **raw)
            values = smoothed(values, smooth)
        for step, value in zip(steps, values, strict=True):
            at_step.setdefault(float(step), []).append(float(value))
    steps = np.array(sorted(at_step))
    found = [at_step[s] for s in steps]
    if len(steps) > 1:
        look["marker"] = "none"
    name = label if found else f"{label} (no finite value)"
    axes.plot(steps, [float(np.median(v)) for v in found], label=name, **look)
    if any(len(v) > 1 for v in found):
        low, high = [min(v) for v in found], [max(v) for v in found]
        axes.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
    return left_out


def _apart(depths: Sequence[int], spacing: float) -> list[int]:
    """Returns depths with more than `spacing` between their logarithms."""
    taken = [depths[0]]
    for depth in depths[1:]:
        if math.log(depth / taken[-1]) > spacing:
            taken.append(depth)
    return taken


def depth_axis(axes: Axes, depths: Iterable[int]) -> None:
    """Makes a log axis with a tick at each depth; labels that would overlap are omitted."""
    ticks = sorted(set(depths))
    axes.set_xscale("log")
    low, high = ticks[0] / 1.12, ticks[-1] * 1.12
    axes.set_xlim(low, high)
    figure = axes.get_figure(root=True)
    assert figure is not None
    inches = 0.7 * figure.get_figwidth() / len(figure.axes)
    named, rotation = _apart(ticks, 0.35 / inches * math.log(high / low)), 0
    if len(named) < len(ticks):
        named, rotation = _apart(ticks, 0.15 / inches * math.log(high / low)), 90
    axes.set_xticks(ticks, [str(d) if d in named else "" for d in ticks], rotation=rotation)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("depth, layers")
