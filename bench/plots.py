"""Plots of results, as PNG files."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from bench import memory
from bench.contenders import ANCHOR, BY_NAME, Network, is_rival, relative_times
from bench.measure import MIB
from bench.records import ModelRow, Row, slug

_COLORS = (*plt.get_cmap("tab20").colors[::2], *plt.get_cmap("tab20").colors[1::2])
_MARKERS = "osv^D<>pP*XhH8d1"
_ORDER = {name: index for index, name in enumerate(BY_NAME)}


def _style(contender: str) -> dict:
    """Returns the colour and marker of a contender, as in all plots; ours have bold lines."""
    index, is_ours = _ORDER[contender], not is_rival(contender)
    return {
        "label": contender,
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linewidth": 2.5 if is_ours else 1.2,
        "markersize": 8 if is_ours else 6,
        "zorder": 3 if is_ours else 2,
    }


def _saved(figure, axes, path: Path, title: str) -> Path:
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _depth(row: Row) -> int:
    return Network.named(row.case).depth


def _family(row: Row) -> str:
    return Network.named(row.case).family


def _contenders(rows: Sequence[Row]) -> list[str]:
    return sorted({r.contender for r in rows}, key=_ORDER.__getitem__)


def _against_depth(
    rows: Sequence[Row], value: Callable[[Row], float], label: str, title: str, path: Path
) -> Path:
    """Plots a line per contender, and with times a line of the floor."""
    figure, axes = plt.subplots(figsize=(8.5, 4.5))
    depths = sorted({_depth(r) for r in rows})
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel=label)
    axes.set_xticks(depths, [str(d) for d in depths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.4g}"))
    for name in _contenders(rows):
        points = sorted((_depth(r), value(r)) for r in rows if r.contender == name)
        axes.plot(*zip(*points, strict=True), **_style(name))
    floors = sorted({(_depth(r), r.floor_ms) for r in rows if r.floor_ms is not None})
    if floors and label.endswith("ms"):
        axes.plot(*zip(*floors, strict=True), "--", color="0.4", label="floor")
    return _saved(figure, axes, path, title)


def _memory_against_time(rows: Sequence[Row], title: str, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(8.5, 4.5))
    times = relative_times(rows)
    for name in filter(times.get, _contenders(rows)):
        row = next(r for r in rows if r.contender == name)
        axes.plot(times[name], row.saved_bytes / MIB, **_style(name) | {"linestyle": "none"})
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"training step, multiple of {ANCHOR}'s time in the same group")
    axes.set_ylabel("kept for the backward, MiB")
    return _saved(figure, axes, path, title)


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes plots for each device, batch, dtype and family of networks; returns their paths.

    Time and memory against depth, if there are several depths; and memory against time of the
    deepest network.
    """
    written = []

    def group(r: Row) -> tuple:
        return r.device, r.batch, r.dtype, _family(r)

    measured = [r for r in rows if r.level == "network" and r.median_ms and r.saved_bytes]
    for key, members in itertools.groupby(sorted(measured, key=group), group):
        device, batch, dtype, family = key
        some = list(members)
        stem = f"{folder / slug(device)}-batch-{batch}-{dtype}"
        title = f"{device}, batch {batch}, {dtype}"
        if family == "resnet" and len({r.case for r in some}) > 1:
            for kind, label, value in (
                ("time", "training step, ms", lambda r: r.median_ms),
                ("memory", "kept for the backward, MiB", lambda r: r.saved_bytes / MIB),
            ):
                path = Path(f"{stem}-{kind}-against-depth.png")
                written.append(_against_depth(some, value, label, title, path))
        deepest = max((r for r in some if r.contender == ANCHOR), key=_depth, default=None)
        if deepest is not None:
            case = deepest.case
            path = Path(f"{stem}-{case}-memory-against-time.png")
            own = [r for r in some if r.case == case]
            written.append(_memory_against_time(own, f"{case}, {title}", path))
    return written


def write_memory_of_models(rows: Sequence[ModelRow], path: Path) -> Path:
    """Writes a plot of kept bytes against time for each model, as shares of plain PyTorch's.

    `rows` have times and bytes. A line connects the budgets of torch.compile, and another one the
    modes of `pk.convert`.
    """
    cases = list(dict.fromkeys(r.case for r in rows))
    figure, panels = plt.subplots(2, 3, figsize=(10, 6.5), sharex=True)
    compiled = [name for name in memory.RIVALS if name.startswith("compile")]
    groups = {"black": [memory.PLAIN], "C7": ["checkpoint"], "C0": compiled, "C1": memory.OWN}
    styles = {}
    for color, names in groups.items():
        for name in names:
            is_ours = name in memory.OWN
            title = memory.TITLES.get(name, "eager")
            styles[name] = {
                "label": f"pk.convert, {title}" if is_ours else title,
                "color": color,
                "marker": _MARKERS[len(styles)],
                "markersize": 9 if is_ours else 6,
                "linestyle": "none",
            }
    for case, axes in zip(cases, panels.flat, strict=False):
        own = {r.contender: r for r in rows if r.case == case}
        plain = own[memory.PLAIN]

        def share(row: ModelRow, plain: ModelRow = plain) -> tuple[float, float]:
            return row.saved_bytes / plain.saved_bytes, row.median_ms / plain.median_ms

        for color, names in groups.items():
            points = [share(own[name]) for name in names if name in own]
            axes.plot(*np.array(points).reshape(-1, 2).T, color=color, linewidth=1, alpha=0.5)
        for name in filter(own.get, styles):
            axes.plot(*share(own[name]), **styles[name])
        axes.set_title(case, fontsize=10)
        axes.margins(0.12)
        axes.tick_params(labelbottom=True)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
    for axes in panels.flat[len(cases) :]:
        axes.axis("off")
    lines = [plt.Line2D([], [], **style) for style in styles.values()]
    figure.legend(handles=lines, fontsize=9, loc="center", bbox_to_anchor=(0.84, 0.28))
    figure.supxlabel("kept for the backward, share of eager", fontsize=10)
    figure.supylabel("training step, multiple of eager's time", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
