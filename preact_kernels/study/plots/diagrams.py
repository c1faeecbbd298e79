"""Diagrams of residual blocks, after figures 1, 2 and 4 of arXiv 1603.05027."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Patch

from preact_kernels.study.blocks import PLACEMENTS, SHORTCUTS, Placement
from preact_kernels.study.plots.parts import Look, save_png

# Positions are in inches; the vertical axis points down.
_SHORTCUT_X, _BRANCH_X = 0.55, 1.5
_COLUMN_WIDTH = 2.45
_BOX_WIDTH, _BOX_HEIGHT, _RADIUS = 1.0, 0.30, 0.14
_ROW_HEIGHT = 0.56
_TOP = 0.95  # position of the input, below the names

_GREY = "#B8BCC2"
_FUSED = "#CFE8D5"
_TEXT = {"norm": "BN", "act": "ReLU", "conv": "3x3 conv"}
_FILLS = {"BN": "#F8D9B0", "ReLU": "#BFDDF2", "3x3 conv": "white"}


class Shortcut(NamedTuple):
    """Layers of a shortcut, and the formula of the block.

    boxes: layers on the shortcut, from bottom to top.
    gates: the shortcut is multiplied by 1 - g(x).
    gates_branch: the branch is multiplied by g(x).
    formula: formula of the block's output y.
    """

    boxes: tuple[str, ...]
    gates: bool
    gates_branch: bool
    formula: str


SHORTCUT_DRAWINGS = {
    "identity": Shortcut((), False, False, "y = x + F(x)"),
    "constant-scaling": Shortcut(("$\\times$ 0.5",), False, False, "y = 0.5 x + F(x)"),
    "exclusive-gating": Shortcut((), True, True, "y = (1 - g(x)) x + g(x) F(x)"),
    "shortcut-only-gating": Shortcut((), True, False, "y = (1 - g(x)) x + F(x)"),
    "conv1x1": Shortcut(("1x1 conv",), False, False, "y = W x + F(x)"),
    "dropout": Shortcut(("dropout",), False, False, "y = dropout(x) + F(x)"),
}


def branch_layers(placement: Placement) -> tuple[str, ...]:
    """Returns the layers of a basic block's branch, from top to bottom: "norm", "act", "conv"."""
    return (*placement.before, "conv", "norm", "act", "conv", *placement.behind)


def fused_chains(placement: Placement) -> list[range]:
    """Returns ranges of `branch_layers` that run fused: norm, activation [, convolution]."""
    layers = branch_layers(placement)
    chains = []
    for i in range(len(layers) - 1):
        if layers[i : i + 2] == ("norm", "act"):
            chains.append(range(i, i + 3 if layers[i + 2 : i + 3] == ("conv",) else i + 2))
    return chains


def fuses_addition(placement: Placement) -> bool:
    """Whether the last chain also adds the shortcut, as the branch ends with a convolution."""
    return not placement.behind


def _new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns axes over a whole figure, in inches."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def _box(axes: Axes, x: float, y: float, text: str, width: float = _BOX_WIDTH) -> None:
    look: Look = {"edgecolor": "0.25", "linewidth": 1.0, "zorder": 3}
    corner = (x - width / 2, y - _BOX_HEIGHT / 2)
    shape = "round,pad=0,rounding_size=0.05"
    fill = _FILLS.get(text, "#EADCF0")
    axes.add_patch(
        FancyBboxPatch(corner, width, _BOX_HEIGHT, boxstyle=shape, facecolor=fill, **look)
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=9, zorder=4)


def _circle(axes: Axes, x: float, y: float, text: str) -> None:
    look: Look = {"facecolor": "white", "edgecolor": "0.25", "linewidth": 1.0, "zorder": 3}
    axes.add_patch(Circle((x, y), _RADIUS, **look))
    axes.text(x, y, text, ha="center", va="center_baseline", fontsize=11, zorder=4)


def _arrow(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draws a thin line through the points, with a head at the last one."""
    look: Look = {"color": "0.25", "linewidth": 1.0, "zorder": 2}
    if len(points) > 2:
        look |= {"solid_joinstyle": "miter", "solid_capstyle": "projecting"}
        axes.plot(*zip(*points[:-1], strict=True), **look)
    style: Look = {"arrowstyle": "-|>,head_width=0.18,head_length=0.35", "color": "0.25"}
    ends = {"shrinkA": 0, "shrinkB": 0, "linewidth": 1.0}
    axes.annotate("", points[-1], points[-2], arrowprops={**style, **ends}, zorder=2)


def _grey_arrow(axes: Axes, x: float, top: float, bottom: float) -> None:
    """Draws the path of the signal from input to output."""
    axes.plot([x, x], [top, bottom - 0.18], color=_GREY, linewidth=5, zorder=1)
    head = [(x - 0.13, bottom - 0.2), (x + 0.13, bottom - 0.2), (x, bottom)]
    axes.fill(*zip(*head, strict=True), color=_GREY, linewidth=0, zorder=1)


def _shade(axes: Axes, left: float, right: float, top: float, bottom: float) -> None:
    """Shades the background of layers that run fused."""
    shape = "round,pad=0,rounding_size=0.1"
    look: Look = {"facecolor": _FUSED, "linewidth": 0, "zorder": 0}
    axes.add_patch(FancyBboxPatch((left, top), right - left, bottom - top, boxstyle=shape, **look))


def _draw_placement(axes: Axes, left: float, name: str, placement: Placement, end: float) -> None:
    """Draws a block in the column at `left`, with its output at height `end`."""
    shortcut, branch = left + _SHORTCUT_X, left + _BRANCH_X
    layers = branch_layers(placement)
    heights = [_TOP + (i + 1.1) * _ROW_HEIGHT for i in range(len(layers))]
    addition = heights[-1] + 0.85 * _ROW_HEIGHT
    reach = _BOX_WIDTH / 2 + 0.1
    for chain in fused_chains(placement):
        adds = fuses_addition(placement) and chain[-1] == len(layers) - 1
        bottom = addition + 0.26 if adds else heights[chain[-1]] + 0.2
        _shade(axes, branch - reach, branch + reach, heights[chain[0]] - 0.2, bottom)
        if adds:
            _shade(axes, shortcut - 0.3, branch + reach, addition - 0.22, bottom)
    axes.text(
        left + _COLUMN_WIDTH / 2 - 0.1, _TOP - 0.32, name, ha="center", fontsize=10, weight="bold"
    )
    axes.text(shortcut - 0.14, _TOP + 0.04, "$x_l$", ha="right", va="center", fontsize=11)
    axes.text(shortcut - 0.14, end - 0.05, "$x_{l+1}$", ha="right", va="center", fontsize=11)
    _grey_arrow(axes, shortcut, _TOP, end)
    _arrow(axes, [(shortcut, _TOP + 0.2), (branch, _TOP + 0.2), (branch, heights[0] - 0.15)])
    for i, (layer, y) in enumerate(zip(layers, heights, strict=True)):
        _box(axes, branch, y, _TEXT[layer])
        if i:
            _arrow(axes, [(branch, heights[i - 1] + 0.15), (branch, y - 0.15)])
    into = (shortcut + _RADIUS, addition)
    _arrow(axes, [(branch, heights[-1] + 0.15), (branch, addition), into])
    _circle(axes, shortcut, addition, "+")
    if placement.after == ("norm", "act"):
        top = addition + 0.95 * _ROW_HEIGHT - 0.2
        _shade(axes, shortcut - 0.45, shortcut + 0.45, top, top + _ROW_HEIGHT + 0.4)
    for i, layer in enumerate(placement.after):
        _box(axes, shortcut, addition + (i + 0.95) * _ROW_HEIGHT, _TEXT[layer], 0.75)


def draw_placements(path: Path) -> Path:
    """Draws the blocks of `PLACEMENTS` side by side; layers that run fused are shaded.

    Args:
        path: the PNG file.

    Returns:
        `path`.
    """
    rows = max(len(branch_layers(p)) + len(p.after) for p in PLACEMENTS.values())
    end = _TOP + (rows + 2.3) * _ROW_HEIGHT
    figure, axes = _new_axes(_COLUMN_WIDTH * len(PLACEMENTS) + 0.2, end + 0.65)
    for i, (name, placement) in enumerate(PLACEMENTS.items()):
        _draw_placement(axes, 0.1 + i * _COLUMN_WIDTH, name, placement, end)
    axes.legend(
        handles=[Patch(color=_FUSED, label="runs fused")],
        loc="lower left",
        bbox_to_anchor=(0.01, 0.01),
        fontsize=10,
        frameon=False,
    )
    return save_png(figure, path)


def _draw_shortcut(axes: Axes, left: float, name: str) -> None:
    """Draws a block of figure 2: original placement, without batch norms."""
    drawing = SHORTCUT_DRAWINGS[name]
    shortcut, branch = left + 0.5, left + (2.55 if drawing.gates else 1.55)
    split, product, addition, end = _TOP + 0.2, _TOP + 2.4, _TOP + 3.1, _TOP + 4.25
    _grey_arrow(axes, shortcut, _TOP, end)
    axes.text(shortcut - 0.14, _TOP + 0.04, "$x_l$", ha="right", va="center", fontsize=11)
    axes.text(shortcut - 0.14, end - 0.05, "$x_{l+1}$", ha="right", va="center", fontsize=11)
    for i, text in enumerate(drawing.boxes):
        _box(axes, shortcut, product - i * _ROW_HEIGHT, text, 0.82)
    heights = [_TOP + (i + 1.1) * _ROW_HEIGHT for i in range(3)]
    _arrow(axes, [(shortcut, split), (branch, split), (branch, heights[0] - 0.15)])
    for i, (text, y) in enumerate(zip(("3x3 conv", "ReLU", "3x3 conv"), heights, strict=True)):
        _box(axes, branch, y, text, 0.9)
        if i:
            _arrow(axes, [(branch, heights[i - 1] + 0.15), (branch, y - 0.15)])
    into = (shortcut + _RADIUS, addition)
    _arrow(axes, [(branch, heights[-1] + 0.15), (branch, addition), into])
    if drawing.gates:
        gate = left + 1.5
        _arrow(axes, [(shortcut, split), (gate, split), (gate, heights[0] - 0.15)])
        _box(axes, gate, heights[0], "1x1 conv", 0.82)
        _arrow(axes, [(gate, heights[0] + 0.15), (gate, heights[1] - 0.15)])
        _box(axes, gate, heights[1], "sigmoid", 0.82)
        _arrow(axes, [(gate, heights[1] + 0.15), (gate, product), (shortcut + _RADIUS, product)])
        _circle(axes, shortcut, product, "$\\times$")
        axes.text((shortcut + gate) / 2, product - 0.09, "1 - g", ha="center", fontsize=9)
        if drawing.gates_branch:
            _arrow(axes, [(gate, product), (branch - _RADIUS, product)])
            axes.text((gate + branch) / 2, product - 0.09, "g", ha="center", fontsize=9)
            _circle(axes, branch, product, "$\\times$")
    _circle(axes, shortcut, addition, "+")
    _box(axes, shortcut, addition + 0.95 * _ROW_HEIGHT, "ReLU", 0.75)
    middle = (left + branch + 0.5) / 2
    axes.text(middle, _TOP - 0.32, name, ha="center", fontsize=10, weight="bold")
    axes.text(middle, end + 0.35, drawing.formula, ha="center", fontsize=9.5)


def draw_shortcuts(path: Path) -> Path:
    """Draws the blocks of `SHORTCUTS` side by side, with their formulas.

    Args:
        path: the PNG file.

    Returns:
        `path`.
    """
    widths = [3.3 if SHORTCUT_DRAWINGS[name].gates else 2.3 for name in SHORTCUTS]
    figure, axes = _new_axes(sum(widths) + 0.2, _TOP + 5.4)
    for i, name in enumerate(SHORTCUTS):
        _draw_shortcut(axes, 0.15 + sum(widths[:i]), name)
    note = "g(x) = sigmoid($W_g$ x + $b_g$). The last ReLU acts on y. Batch norms are not drawn."
    axes.text(0.2, _TOP + 5.1, note, fontsize=9, color="0.35")
    return save_png(figure, path)
