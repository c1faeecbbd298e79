"""Plots and diagrams of the study, as PNG files."""

from preact_kernels.study.plots.curves import (
    plot_bars,
    plot_cost_against_depth,
    plot_error_against_depth,
    plot_losses,
    plot_training,
)
from preact_kernels.study.plots.diagrams import draw_placements, draw_shortcuts
from preact_kernels.study.plots.parts import NothingToPlotError
from preact_kernels.study.plots.signal import (
    plot_by_block,
    plot_by_block_over_time,
    plot_histograms,
)

__all__ = [
    "NothingToPlotError",
    "draw_placements",
    "draw_shortcuts",
    "plot_bars",
    "plot_by_block",
    "plot_by_block_over_time",
    "plot_cost_against_depth",
    "plot_error_against_depth",
    "plot_histograms",
    "plot_losses",
    "plot_training",
]
