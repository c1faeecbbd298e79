"""Plots and diagrams of the study: files, the data that is drawn, and what is left out."""

import math
from functools import partial

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from preact_kernels.study import plots
from preact_kernels.study.blocks import PLACEMENTS, SHORTCUTS
from preact_kernels.study.plots import diagrams

NAN, INF = math.nan, math.inf


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Calls a plot, checks its file, and returns its figure."""
    path, figures, savefig = tmp_path / "plot.png", [], Figure.savefig

    def keep(figure, *args, **options):
        figures.append(figure)
        savefig(figure, *args, **options)

    def drawn(function, *values, **options):
        assert function(*values, path, **options) == path
        assert image.imread(path)[..., :3].std() > 0.03, "blank"
        assert list(tmp_path.iterdir()) == [path], "left a temporary file"
        return figures[-1]

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def texts(shown):
    return [text.get_text() for text in shown]


def lines(axes):
    """Returns the labelled lines of axes: label -> (x, y)."""
    named = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    return {n.get_label(): (list(n.get_xdata()), list(n.get_ydata())) for n in named}


def test_losses_are_the_median_over_seeds_with_a_band(draw):
    seeds = [[(0, 4.0), (10, 2.0)], [(0, 5.0), (10, 3.0)], [(0, 9.0), (10, 0.06)]]
    curves = {"seeds": seeds, "kept": [[(0, 1.0), (1, NAN), (2, INF)]], "diverged": [[(0, NAN)]]}
    figure = draw(plots.plot_losses, curves, smooth=1)
    (axes,) = figure.axes
    assert lines(axes)["seeds"] == ([0, 10], [5.0, 2.0])
    assert lines(axes)["kept"] == ([0], [1.0])
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.06, 9.0)
    assert "diverged (no finite value)" in lines(axes)
    assert figure.get_supxlabel() == "3 points are left out: not finite"


def test_smoothed_losses_show_their_raw_points(draw):
    run = [(step, 1 + float(step % 2)) for step in range(101)]
    axes = draw(plots.plot_losses, {"a": [run], "b": [[(0, 0.0), (1, 4.0)]]}, smooth=21).axes[0]
    assert axes.get_yscale() == "linear", "a log axis shows no zero"
    raw, line, *_ = axes.get_lines()
    assert list(raw.get_ydata()) == [v for _, v in run]
    assert np.abs(line.get_ydata()[10:-10] - 1.5).max() < 0.03
    assert lines(axes)["b"][1] == [2.0, 2.0], "the mean of fewer points than the window"


def test_values_by_block_are_drawn_with_gaps_and_stages(draw):
    series = {"a": [1e-3, 0.0, 1e-2, NAN, 1e-1, -1.0, INF] + [0.1] * 9}
    figure = draw(plots.plot_by_block, series, ylabel="norm", boundaries=(4, 8, 14))
    (axes,) = figure.axes
    blocks, values = lines(axes)["a"]
    assert blocks == list(range(1, 17))
    assert [v for v in values if not math.isnan(v)] == [1e-3, 1e-2, *[1e-1] * 10]
    assert figure.get_supxlabel() == "4 points are left out: zero, negative or not finite"
    assert texts(axes.texts) == ["stage 1", "stage 2", "stage 3", "stage 4"]
    at = [line.get_xdata()[0] for line in axes.get_lines() if line.get_label().startswith("_")]
    assert at == [3.5, 7.5, 13.5]


def test_lines_over_time_are_in_the_order_of_steps(draw):
    rows = {200: [3.0, 4.0], 0: [1.0, 2.0], 100: [2.0, 0.0]}
    figure = draw(plots.plot_by_block_over_time, rows, ylabel="norm", healthy=(1e-3, 2.0))
    assert [line.get_ydata()[0] for line in figure.axes[0].get_lines()] == [1.0, 2.0, 3.0]
    assert texts(figure.legends[0].get_texts()) == ["healthy: 0.001 to 2"]


def test_histograms_are_densities_by_network_and_stage(draw):
    narrow, wide = ([1, 3], [0.0, 1.0, 2.0]), ([2, 2], [0.0, 2.0, 4.0])
    outlier = ([5000, 5000, *[0] * 97, 1], range(101))
    histograms = {"a": {"stage 1": narrow, "stage 2": outlier}, "b": {"stage 1": wide}}
    panels = draw(plots.plot_histograms, histograms).axes
    drawn = panels[0].patches[0].get_data()
    assert (drawn.values.tolist(), drawn.edges.tolist()) == ([0.25, 0.75], [0, 1, 2])
    assert panels[0].get_xlim() == (0.0, 4.0), "of both networks"
    assert panels[1].get_xlim() == (0.0, 2.0), "a rare outlier widens the axis"


def test_errors_stand_at_their_depths_beside_the_papers(draw):
    series = {"original": {110: [7.4, 6.0, 6.5], 1001: [NAN, 8.0]}, "broken": {110: [NAN]}}
    reference = {"original": {1001: 7.61, 110: 6.61}}
    (axes,) = draw(plots.plot_error_against_depth, series, reference=reference).axes
    found = lines(axes)
    assert found["original"][1] == [6.5, 8.0]
    assert found["original, paper"][1] == [6.61, 7.61]
    bar = axes.collections[0].get_segments()[0]
    assert [end[1] for end in bar] == pytest.approx([6.0, 7.4])


def test_costs_have_a_panel_of_times_and_one_of_memory(draw):
    times = {"PyTorch": {29: 10.0, 110: 40.0}, "fused": {29: 5.0, 110: 20.0}}
    memory = {"PyTorch": {29: 100.0, 110: 9000.0}, "fused": {29: 40.0, 110: NAN}}
    time, space = draw(plots.plot_cost_against_depth, times, memory).axes
    assert lines(time)["fused"] == ([29, 110], [5.0, 20.0])
    assert lines(space)["PyTorch"] == ([29, 110], [100.0, 9000.0])


def test_bars_show_median_seeds_and_paper(draw):
    values = {"first": [6.0, 7.4, 6.5], "second": [8.0, NAN], "broken": [NAN]}
    (axes,) = draw(plots.plot_bars, values, ylabel="%", reference={"first": 6.61}).axes
    assert [bar.get_width() for bar in axes.patches] == [6.5, 8.0, 0.0]
    assert texts(axes.get_yticklabels()) == list(values)
    assert texts(axes.texts) == ["6.50", "8.00", "no finite value"]
    assert list(axes.get_lines()[0].get_xdata()) == [6.0, 7.4, 6.5]
    assert [list(line.get_xdata()) for line in axes.get_lines()].count([6.61]) == 1


def test_training_is_drawn_over_epochs(draw):
    epochs = [{"epoch": e, "test_accuracy": 0.5 + e / 100} for e in (1, 2, 3, 4)]
    losses = [(step, 2.0 - step / 500) for step in range(0, 451, 10)] + [(500, NAN)]
    options = {"learning_rates": [(0, 0.1), (450, 0.001)], "steps_per_epoch": 100}
    rate, loss, accuracy = draw(plots.plot_training, epochs, losses, **options).axes
    (line,) = rate.get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 4.5], [0.1, 0.001])
    assert loss.get_lines()[1].get_xdata()[-1] == pytest.approx(4.5)
    assert lines(accuracy)["test"] == ([1, 2, 3, 4], pytest.approx([51, 52, 53, 54]))
    rate, loss, accuracy = draw(plots.plot_training, [], [(0, 2.0), (60, 1.0)]).axes
    assert texts([*rate.texts, *accuracy.texts]) == ["not recorded"] * 2


@pytest.mark.parametrize(
    ("plot", "nothing"),
    [
        (plots.plot_losses, [{"a": [[(0, NAN)]]}]),
        (plots.plot_error_against_depth, [{"a": {20: [NAN]}}]),
        (plots.plot_cost_against_depth, [{"a": {9: 1.0}}, {"a": {9: 0.0}}]),
        (partial(plots.plot_bars, ylabel="y"), [{"a": [INF]}]),
        (plots.plot_training, [[{"epoch": 1}], [(0, NAN)]]),
        (partial(plots.plot_by_block, ylabel="y"), [{"a": [0.0, -1.0, NAN, INF]}]),
        (partial(plots.plot_by_block_over_time, ylabel="y"), [{1: [0.0, -1.0, NAN]}]),
        (plots.plot_histograms, [{"a": {"s": ([0, 0], [0, 1, 2])}}]),
    ],
)
def test_nothing_to_draw_is_refused(plot, nothing, tmp_path):
    with pytest.raises(plots.NothingToPlotError, match=r"^\w+: expected .*, got none$"):
        plot(*nothing, tmp_path / "plot.png")


def test_wrong_boundaries_and_edges_are_named(tmp_path):
    path = tmp_path / "plot.png"
    for function, wrong in ((plots.plot_by_block, 1), (plots.plot_by_block_over_time, 4)):
        with pytest.raises(ValueError, match=rf"boundaries: expected 2 to 3, got \[{wrong}\]"):
            function({1: [1.0] * 3}, path, ylabel="y", boundaries=[wrong])
    with pytest.raises(ValueError, match="expected 3 edges for 2 counts of 'a', 's', got 2"):
        plots.plot_histograms({"a": {"s": ([1, 2], [0, 1])}}, path)


def test_diagrams_have_every_placement_and_shortcut(draw):
    (axes,) = draw(plots.draw_placements).axes
    assert set(texts(axes.texts)) >= set(PLACEMENTS)
    (axes,) = draw(plots.draw_shortcuts).axes
    formulas = {drawing.formula for drawing in diagrams.SHORTCUT_DRAWINGS.values()}
    assert set(texts(axes.texts)) >= {*SHORTCUTS, *formulas}
