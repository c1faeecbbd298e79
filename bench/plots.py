"""Plots of results, as PNG files."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from bench.contenders import ANCHOR, BY_NAME, Network, relative_times
from bench.measure import MIB
from bench.records import CurvePoint, Row, slug

_COLORS = (*plt.get_cmap("tab20").colors[::2], *plt.get_cmap("tab20").colors[1::2])
_MARKERS = "osv^D<>pP*XhH8d1"
_ORDER = {name: index for index, name in enumerate(BY_NAME)}
_LOSS_WIDTHS = {"float64": 5.0, "eager-channels-last": 2.5, "fused-store": 1.2}
_LOSS_COLORS = {"float64": "0.75", "eager-channels-last": "tab:orange", "fused-store": "tab:blue"}


def _style(contender: str) -> dict:
    """Returns the colour and marker of a contender, as in all plots; ours have bold lines."""
    index = _ORDER.get(contender, len(_ORDER))
    is_ours = contender in BY_NAME and BY_NAME[contender].fused is not None
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
    if len(figure.axes) == 1:
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
    return sorted({r.contender for r in rows}, key=lambda name: _ORDER.get(name, len(_ORDER)))


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


def _losses(points: Sequence[CurvePoint], title: str, path: Path) -> Path:
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5.5), sharex=True, height_ratios=(2, 1))
    names = {p.contender for p in points}
    for name in sorted(names, key=lambda n: (-_LOSS_WIDTHS.get(n, 1.0), n)):
        curve = sorted((p for p in points if p.contender == name), key=lambda p: p.step)
        steps, width = [p.step + 1 for p in curve], _LOSS_WIDTHS.get(name, 1.0)
        look = {"color": _LOSS_COLORS.get(name), "label": name}
        above.plot(steps, [p.loss for p in curve], linewidth=width, **look)
        if name != curve[0].truth:
            below.semilogy(steps, [max(p.deviation, 1e-9) for p in curve], ".-", **look)
    above.set_ylim(0, 1.15 * max(p.loss for p in points))
    above.set_ylabel("loss")
    above.set_title(title, fontsize=10)
    above.legend(fontsize=8)
    above.grid(True, alpha=0.3)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xlabel("step")
    below.set_ylabel(f"relative deviation\nfrom {points[0].truth}", fontsize=8)
    return _saved(figure, below, path, "")


def _network_plots(rows: Sequence[Row], stem: str, title: str) -> dict[str, list[Path]]:
    """Writes the plots of one batch, dtype and family; returns them by block of the report."""
    written: dict[str, list[Path]] = {"network": [], "memory": []}
    timed = [r for r in rows if r.median_ms is not None]
    counted = [r for r in rows if r.saved_bytes is not None]
    by_depth = _family(rows[0]) == "resnet"
    if timed and by_depth:
        path, label = Path(f"{stem}-time-against-depth.png"), "training step, ms"
        plot = _against_depth(timed, lambda r: r.median_ms, label, title, path)
        written["network"].append(plot)
    if counted and by_depth:
        path, label = Path(f"{stem}-memory-against-depth.png"), "kept for the backward, MiB"
        plot = _against_depth(counted, lambda r: r.saved_bytes / MIB, label, title, path)
        written["memory"].append(plot)
    both = [r for r in counted if r.median_ms is not None]
    deepest_first = sorted({(-_depth(r), r.case) for r in both if r.contender == ANCHOR})
    cases = [case for _, case in deepest_first]
    if by_depth:
        cases = [case for depth, case in deepest_first if -depth >= 164] or cases[:1]
    for case in cases:
        path, some = (
            Path(f"{stem}-{case}-memory-against-time.png"),
            [r for r in both if r.case == case],
        )
        written["memory"].append(_memory_against_time(some, f"{case}, {title}", path))
    return written


def write_plots(
    rows: Sequence[Row], points: Sequence[CurvePoint], folder: Path
) -> dict[str, list[Path]]:
    """Writes all plots of a device's results.

    Returns:
        The files by block of the report: "network", "memory" and "training".
    """
    written: dict[str, list[Path]] = {"network": [], "memory": [], "training": []}

    def group(r: Row) -> tuple:
        return r.device, r.batch, r.dtype, _family(r)

    measured = [r for r in rows if r.level == "network" and (r.median_ms or r.saved_bytes)]
    for (device, batch, dtype, _), members in itertools.groupby(sorted(measured, key=group), group):
        stem = f"{folder / slug(device)}-batch-{batch}-{dtype}"
        plots = _network_plots(list(members), stem, f"{device}, batch {batch}, {dtype}")
        for name, paths in plots.items():
            written[name] += paths
    for case, device in sorted({(p.case, p.device) for p in points}):
        curve = [p for p in points if (p.case, p.device) == (case, device)]
        path = folder / f"{slug(device)}-{case}-losses.png"
        written["training"].append(_losses(curve, f"{case}, {device}", path))
    return written
