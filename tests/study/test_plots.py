"""Plots and diagrams of the study: files, and what their figures show."""

import math
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs preact_kernels[study]")
from matplotlib import image

from preact_kernels.study import plots
from preact_kernels.study.plots import diagrams, parts
from preact_kernels.study.units import PLACEMENTS, SHORTCUTS, Placement

NAN, INF = math.nan, math.inf
EIGHT = [f"network {i}" for i in range(8)]


class Canvas:
    """Draws into one file and keeps the figure for inspection."""

    def __init__(self, path):
        self.path = path
        self.figure = None

    def save(self, figure, path):
        self.figure = figure
        return parts.save_png(figure, path)

    def draw(self, function, *values, **options):
        """The figure of a plot, whose file was checked."""
        assert function(*values, self.path, **options) == self.path
        pixels = image.imread(self.path)[..., :3]
        assert min(pixels.shape[:2]) > 150
        assert pixels.std() > 0.03, "blank"
        assert list(self.path.parent.iterdir()) == [self.path], "left a temporary file"
        return self.figure


@pytest.fixture
def canvas(tmp_path, monkeypatch):
    canvas = Canvas(tmp_path / "plot.png")
    for module in (plots.curves, plots.signal, diagrams):
        monkeypatch.setattr(module, "save_png", canvas.save)
    return canvas


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def lines(axes):
    """The labelled lines of axes: label -> (x, y)."""
    named = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    return {n.get_label(): (list(n.get_xdata()), list(n.get_ydata())) for n in named}


def footnote(figure):
    return figure.get_supxlabel()


def assert_legend_beside_data(figure):
    """The legends lie right of their axes and inside the figure."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        if axes.get_legend() is not None:
            box = axes.get_legend().get_window_extent()
            assert box.x0 >= axes.get_window_extent().x1
            assert box.x1 <= figure.bbox.x1


def assert_no_overlap(texts):
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert boxes
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :]), texts[i].get_text()


# Losses


def test_losses_are_the_median_over_seeds_with_a_band(canvas):
    runs = [[(0, 4.0), (10, 2.0)], [(0, 5.0), (10, 3.0)], [(0, 9.0), (10, 1.0)]]
    axes = canvas.draw(plots.plot_losses, {"fused": runs}, title="A title").axes[0]
    assert lines(axes) == {"fused": ([0, 10], [5.0, 2.0])}
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (1.0, 9.0)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "training loss")
    assert canvas.figure.get_suptitle() == "A title"


def test_eight_losses_differ_in_more_than_colour(canvas):
    curves = {label: [[(s, i + s) for s in range(3)]] for i, label in enumerate(EIGHT)}
    axes = canvas.draw(plots.plot_losses, curves).axes[0]
    assert legend(axes) == EIGHT
    assert len({line.get_color() for line in axes.get_lines()}) == 8
    assert len({str(line._unscaled_dash_pattern) for line in axes.get_lines()}) >= 4
    assert_legend_beside_data(canvas.figure)


def test_smoothed_losses_show_their_raw_points(canvas):
    run = [(step, float(step % 2)) for step in range(101)]
    axes = canvas.draw(plots.plot_losses, {"a": [run]}, smooth=21).axes[0]
    raw, line = axes.get_lines()
    assert list(raw.get_ydata()) == [v for _, v in run]
    assert raw.get_alpha() < 0.5
    assert np.abs(line.get_ydata()[10:-10] - 0.5).max() < 0.03


def test_smoothing_over_more_points_than_there_are_takes_their_mean(canvas):
    axes = canvas.draw(plots.plot_losses, {"a": [[(0, 1.0), (1, 3.0)]]}, smooth=50).axes[0]
    assert lines(axes)["a"][1] == [2.0, 2.0]


def test_losses_that_are_not_finite_are_counted_and_named(canvas):
    curves = {"kept": [[(0, 1.0), (1, NAN), (2, INF)]], "diverged": [[(0, NAN)]]}
    axes = canvas.draw(plots.plot_losses, curves).axes[0]
    assert lines(axes)["kept"] == ([0], [1.0])
    assert legend(axes) == ["kept", "diverged (no finite value)"]
    assert footnote(canvas.figure) == "3 points are left out: not finite"


def test_one_loss_is_visible_as_a_marker(canvas):
    axes = canvas.draw(plots.plot_losses, {"a": [[(1, 2.3)]]}).axes[0]
    assert axes.get_lines()[0].get_marker() not in ("none", "None", "")


@pytest.mark.parametrize(("lowest", "scale"), [(0.9, "linear"), (0.01, "log"), (0.0, "linear")])
def test_the_scale_of_losses_follows_their_range(canvas, lowest, scale):
    axes = canvas.draw(plots.plot_losses, {"a": [[(0, 2.0), (1, lowest)]]}).axes[0]
    assert axes.get_yscale() == scale


def test_ticks_between_powers_of_ten_are_plain_numbers(canvas):
    axes = canvas.draw(plots.plot_losses, {"a": [[(0, 2.4), (1, 0.06)]]}, log=True).axes[0]
    shown = [t.get_text() for t in axes.get_yticklabels()]
    assert {"0.1", "0.2", "0.5", "1", "2"} <= set(shown)


# By block


def test_values_that_a_log_axis_cannot_show_are_counted(canvas):
    series = {"a": [1e-3, 0.0, 1e-2, NAN, 1e-1, -1.0, INF], "b": [0.0] * 7}
    axes = canvas.draw(plots.plot_by_block, series, ylabel="gradient norm").axes[0]
    blocks, values = lines(axes)["a"]
    assert blocks == [1, 2, 3, 4, 5, 6, 7]
    assert [v for v in values if not math.isnan(v)] == [1e-3, 1e-2, 1e-1]
    assert footnote(canvas.figure) == "11 points are left out: zero, negative or not finite"
    assert legend(axes) == ["a", "b (nothing to show)"]
    # A point between two gaps would not be seen without a marker.
    assert set(axes.get_lines()[0].get_markevery()) == {0, 2, 4}


def test_points_alone_are_marked_among_many_blocks(canvas):
    values = [1.0] * 200
    values[100] = values[102] = NAN
    axes = canvas.draw(plots.plot_by_block, {"a": values}, ylabel="x").axes[0]
    marked = axes.get_lines()[0].get_markevery()
    assert 101 in marked
    assert len(marked) < 20


def test_a_linear_axis_shows_zero_and_negative_values(canvas):
    axes = canvas.draw(plots.plot_by_block, {"a": [0.0, -1.0]}, ylabel="mean", log=False).axes[0]
    assert lines(axes)["a"][1] == [0.0, -1.0]
    assert footnote(canvas.figure) == ""


def test_stages_and_the_healthy_band_are_labelled(canvas):
    options = {"ylabel": "ratio", "healthy": (1e-3, 1e-2), "boundaries": (4, 8, 14)}
    axes = canvas.draw(plots.plot_by_block, {"a": [0.1] * 16}, **options).axes[0]
    assert legend(axes) == ["healthy: 0.001 to 0.01", "a"]
    assert [t.get_text() for t in axes.texts] == ["stage 1", "stage 2", "stage 3", "stage 4"]
    at = [line.get_xdata()[0] for line in axes.get_lines() if line.get_label().startswith("_")]
    assert at == [3.5, 7.5, 13.5]
    low, high = axes.get_ylim()
    assert low <= 1e-3
    assert high >= 0.1
    assert_legend_beside_data(canvas.figure)
    assert_no_overlap([*axes.texts, *canvas.figure.texts])


@pytest.mark.parametrize("boundary", [0, 1, 4])
def test_a_boundary_outside_the_blocks_is_refused(canvas, boundary):
    with pytest.raises(ValueError, match=r"boundaries: expected 2 to 3, got"):
        plots.plot_by_block({"a": [1.0] * 3}, canvas.path, ylabel="x", boundaries=[boundary])


def test_lines_over_time_are_coloured_by_step(canvas):
    rows = {200: [3.0, 4.0], 0: [1.0, 2.0], 100: [2.0, 0.0]}
    figure = canvas.draw(plots.plot_by_block_over_time, rows, ylabel="norm", healthy=(1.0, 2.0))
    axes, bar = figure.axes
    drawn = axes.get_lines()
    assert [line.get_ydata()[0] for line in drawn] == [1.0, 2.0, 3.0]
    lightness = [sum(line.get_color()[:3]) for line in drawn]
    assert lightness == sorted(lightness)
    assert len(set(lightness)) == 3
    assert bar.get_ylabel() == "step"
    assert list(bar.get_yticks()) == [0, 100, 200]
    assert footnote(figure) == "1 point is left out: zero, negative or not finite"
    assert figure.legends[0].get_texts()[0].get_text() == "healthy: 1 to 2"


def test_one_step_of_one_block_is_drawn(canvas):
    axes = canvas.draw(plots.plot_by_block_over_time, {7: [1.0]}, ylabel="norm").axes[0]
    assert list(axes.get_xticks()) == [1]
    assert axes.get_lines()[0].get_markevery() == [0]


# Histograms


def test_histograms_are_densities_by_network_and_stage(canvas):
    narrow, wide = ([1, 3], [0.0, 1.0, 2.0]), ([2, 2], [0.0, 2.0, 4.0])
    histograms = {"a": {"stage 1": narrow, "stage 2": wide}, "b": {"stage 1": wide}}
    figure = canvas.draw(plots.plot_histograms, histograms, xlabel="output")
    panels = np.array(figure.axes).reshape(2, 2)
    drawn = panels[0, 0].patches[0].get_data()
    assert (drawn.values.tolist(), drawn.edges.tolist()) == ([0.25, 0.75], [0, 1, 2])
    assert [axes.get_title() for axes in panels[0]] == ["stage 1", "stage 2"]
    assert [t.get_text() for t in panels[0, 1].texts] == ["a"]
    assert {t.get_text() for t in panels[1, 1].texts} == {"no values", "b"}
    assert panels[0, 0].get_xlim() == panels[1, 0].get_xlim() == (0.0, 4.0)
    assert panels[0, 0].get_ylim() == panels[1, 0].get_ylim()
    assert panels[1, 0].get_xlabel() == "output"


def test_a_rare_outlier_does_not_widen_a_histogram(canvas):
    counts = [5000, 5000, *[0] * 97, 1]
    figure = canvas.draw(plots.plot_histograms, {"a": {"s": (counts, range(101))}})
    assert figure.axes[0].get_xlim() == (0.0, 2.0)


def test_densities_have_log_axes_that_show_the_lowest_peak(canvas):
    histograms = {"flat": {"s": ([1] * 100, range(101))}, "spike": {"s": ([1], [0.0, 0.1])}}
    figure = canvas.draw(plots.plot_histograms, histograms)
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    low, high = figure.axes[0].get_ylim()
    assert low < 0.01 and high > 10


@pytest.mark.parametrize("histograms", [{}, {"a": {}}, {"a": {"s": ([0, 0], [0, 1, 2])}}])
def test_histograms_without_a_count_are_refused(canvas, histograms):
    with pytest.raises(ValueError, match="histograms: expected at least one count"):
        plots.plot_histograms(histograms, canvas.path)


def test_edges_that_do_not_fit_counts_are_refused(canvas):
    with pytest.raises(ValueError, match="expected 3 edges for 2 counts of 'a', 's', got 2"):
        plots.plot_histograms({"a": {"s": ([1, 2], [0, 1])}}, canvas.path)


# Depth, bars and reports


def test_errors_stand_at_their_depths_beside_the_papers(canvas):
    series = {"original": {110: [7.0, 6.0, 6.5], 1001: [NAN, 8.0]}, "broken": {110: [NAN]}}
    reference = {"original": {1001: 7.61, 110: 6.61}}
    axes = canvas.draw(plots.plot_error_against_depth, series, reference=reference).axes[0]
    drawn = lines(axes)
    assert list(drawn) == ["original", "original, paper", "broken (no finite value)"]
    assert drawn["original"][1] == [6.5, 8.0]
    assert drawn["original, paper"][1] == [6.61, 7.61]
    assert drawn["original"][0] == pytest.approx([110, 1001], rel=0.01)
    bar = axes.collections[0].get_segments()[0]
    assert [end[1] for end in bar] == pytest.approx([6.0, 7.0])
    assert axes.get_xscale() == "log"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["110", "1001"]
    assert footnote(canvas.figure) == "2 points are left out: not finite"
    paper = next(line for line in axes.get_lines() if line.get_label() == "original, paper")
    assert (paper.get_linestyle(), paper.get_markerfacecolor()) == ("--", "none")


def test_ticks_of_many_depths_do_not_overlap(canvas):
    depths = (18, 20, 29, 32, 34, 44, 47, 50, 56, 101, 110, 152, 164, 200, 1001)
    series = {label: {d: [5.0 + i] for d in depths} for i, label in enumerate(EIGHT)}
    axes = canvas.draw(plots.plot_error_against_depth, series).axes[0]
    assert list(axes.get_xticks()) == list(depths)
    canvas.figure.draw_without_rendering()
    assert_no_overlap(axes.get_xticklabels())
    assert_legend_beside_data(canvas.figure)


def test_costs_have_a_panel_of_times_and_one_of_memory(canvas):
    times = {"PyTorch": {29: 10.0, 110: 40.0}, "fused": {29: 5.0, 110: 20.0}}
    memory = {"PyTorch": {29: 100.0, 110: 9000.0}, "fused": {29: 40.0, 110: NAN}}
    figure = canvas.draw(plots.plot_cost_against_depth, times, memory)
    time, space = figure.axes
    assert (time.get_ylabel(), space.get_ylabel()) == (
        "training step, ms",
        "kept for backward, MiB",
    )
    assert lines(time)["fused"] == ([29, 110], [5.0, 20.0])
    assert lines(space)["PyTorch"] == ([29, 110], [100.0, 9000.0])
    assert {axes.get_xscale() + axes.get_yscale() for axes in figure.axes} == {"loglog"}
    assert legend(space) == ["PyTorch", "fused"]
    assert footnote(figure) == "1 point is left out: zero, negative or not finite"
    assert_legend_beside_data(figure)


@pytest.mark.parametrize(("missing", "name"), [(0, "times_ms"), (1, "memory_mib")])
def test_costs_without_values_name_the_argument(canvas, missing, name):
    values = [{"a": {29: 1.0}}, {"a": {29: 1.0}}]
    values[missing] = {"a": {29: 0.0}}
    with pytest.raises(ValueError, match=f"{name}: expected a positive finite value, got none"):
        plots.plot_cost_against_depth(*values, canvas.path)


def test_bars_show_median_seeds_and_paper_from_the_top(canvas):
    values = {"first": [6.0, 7.0, 6.5], "second": [8.0, NAN], "broken": [NAN]}
    options = {"ylabel": "test error, %", "reference": {"first": 6.61}}
    axes = canvas.draw(plots.plot_bars, values, **options).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [6.5, 8.0, 0.0]
    assert [t.get_text() for t in axes.get_yticklabels()] == list(values)
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first label is at the top"
    assert [t.get_text() for t in axes.texts] == ["6.50", "8.00", "no finite value"]
    assert list(axes.get_lines()[0].get_xdata()) == [6.0, 7.0, 6.5]
    assert [list(line.get_xdata()) for line in axes.get_lines()].count([6.61]) == 1
    assert legend(axes) == ["median", "one seed", "paper"]
    assert axes.get_xlabel() == "test error, %"
    assert footnote(canvas.figure) == "2 points are left out: not finite"
    assert_legend_beside_data(canvas.figure)


def test_training_is_drawn_over_epochs(canvas):
    epochs = [{"epoch": e, "test_accuracy": 0.5 + e / 100, "seconds": 9.0} for e in (1, 2, 3, 4)]
    losses = [(step, 2.0 - step / 500) for step in range(0, 451, 10)]
    rates = [(0, 0.1), (100, 0.1), (200, 0.01), (450, 0.001)]
    options = {"learning_rates": rates, "steps_per_epoch": 100, "smooth": 5}
    figure = canvas.draw(plots.plot_training, epochs, losses, **options)
    rate, loss, accuracy = figure.axes
    assert rate.get_yscale() == "log"
    line = rate.get_lines()[0]
    assert list(line.get_ydata()) == [0.1, 0.1, 0.01, 0.001]
    assert list(line.get_xdata()) == pytest.approx([0, 1, 2, 4.5])
    smooth = loss.get_lines()[1]
    assert (smooth.get_xdata()[0], smooth.get_xdata()[-1]) == pytest.approx((0.0, 4.5))
    assert list(lines(accuracy)) == ["test"]
    assert lines(accuracy)["test"][0] == [1, 2, 3, 4]
    assert lines(accuracy)["test"][1] == pytest.approx([51, 52, 53, 54])
    assert accuracy.get_xlabel() == "epoch"
    assert_legend_beside_data(figure)


def test_the_last_step_ends_the_last_epoch_where_nothing_is_said(canvas):
    epochs = [{"epoch": e, "train_accuracy": 0.5, "test_accuracy": 0.4} for e in (1, 2)]
    loss, accuracy = canvas.draw(plots.plot_training, epochs, [(1, 2.0), (60, 1.0)]).axes[1:]
    assert loss.get_lines()[1].get_xdata()[-1] == pytest.approx(2)
    assert legend(accuracy) == ["training", "test"]


def test_training_that_finished_no_epoch_is_drawn_over_steps(canvas):
    figure = canvas.draw(plots.plot_training, [], [(0, 2.0), (1, NAN), (30, 1.0)], smooth=0)
    rate, loss, accuracy = figure.axes
    assert lines(loss)["loss"] == ([0, 30], [2.0, 1.0])
    assert accuracy.get_xlabel() == "step"
    assert [a.texts[0].get_text() for a in (rate, accuracy)] == ["not recorded"] * 2
    assert footnote(figure) == "1 point is left out: not finite"


@pytest.mark.parametrize(
    ("function", "values", "options"),
    [
        (plots.plot_losses, [{"a": [[(0, NAN)]]}], {}),
        (plots.plot_losses, [{}], {}),
        (plots.plot_by_block, [{"a": [0.0, -1.0, NAN]}], {"ylabel": "x"}),
        (plots.plot_by_block, [{"a": []}], {"ylabel": "x", "log": False}),
        (plots.plot_by_block_over_time, [{}], {"ylabel": "x"}),
        (plots.plot_by_block_over_time, [{1: [NAN]}], {"ylabel": "x"}),
        (plots.plot_error_against_depth, [{"a": {20: [NAN]}}], {}),
        (plots.plot_bars, [{"a": [INF]}], {"ylabel": "x"}),
        (plots.plot_training, [[], [(0, NAN)]], {}),
    ],
)
def test_nothing_to_draw_is_refused_and_writes_no_file(canvas, function, values, options):
    with pytest.raises(ValueError, match=r"^\w+: expected .*, got none$"):
        function(*values, canvas.path, **options)
    assert not canvas.path.exists()


def test_a_plot_that_fails_leaves_the_old_file(canvas, monkeypatch):
    canvas.path.write_bytes(b"old")

    def fail(self, unfinished, **options):
        unfinished.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plots.plot_losses({"a": [[(0, 1.0)]]}, canvas.path)
    assert canvas.path.read_bytes() == b"old"
    assert list(canvas.path.parent.iterdir()) == [canvas.path]


def test_importing_sets_no_backend():
    code = """
import sys
import preact_kernels.study.plots
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Diagrams


def texts_at(axes):
    """(x, y, text) of every text, in inches from the top left."""
    return [(*text.get_position(), text.get_text()) for text in axes.texts]


def column(axes, left, right):
    """Texts of the boxes between two positions, top to bottom; the addition is "+"."""
    known = {"BN", "ReLU", "3x3 conv", "+"}
    found = [(y, t) for x, y, t in texts_at(axes) if left <= x < right and t in known]
    return [text for _, text in sorted(found)]


def expected_column(placement):
    names = {"norm": "BN", "act": "ReLU"}
    before, behind, after = ([names[layer] for layer in part] for part in placement)
    return [*before, "3x3 conv", "BN", "ReLU", "3x3 conv", *behind, "+", *after]


def assert_columns(axes, placements):
    centres = {t: x for x, _, t in texts_at(axes) if t in placements}
    assert sorted(centres, key=centres.get) == list(placements)
    width = axes.get_xlim()[1] / len(placements)
    for i, placement in enumerate(placements.values()):
        assert column(axes, i * width, (i + 1) * width) == expected_column(placement)


def test_placements_are_drawn_in_the_order_of_their_layers(canvas):
    axes = canvas.draw(
        diagrams.draw_placements, title="The units of figure 4 of arXiv 1603.05027"
    ).axes[0]
    assert_columns(axes, PLACEMENTS)
    assert legend(axes) == ["runs fused"]
    canvas.figure.draw_without_rendering()
    assert_no_overlap([*axes.texts, *axes.get_legend().get_texts()])


def test_a_new_placement_draws_itself(canvas, monkeypatch):
    new = {**PLACEMENTS, "everything": Placement(("norm", "act"), ("norm", "act"), ("norm", "act"))}
    monkeypatch.setattr(diagrams, "PLACEMENTS", new)
    assert_columns(canvas.draw(diagrams.draw_placements).axes[0], new)


def test_fused_chains_are_what_the_converter_fuses():
    chains = {name: diagrams.fused_chains(p) for name, p in PLACEMENTS.items()}
    assert chains == {
        "original": [range(1, 4)],
        "bn-after-addition": [range(1, 4)],
        "relu-before-addition": [range(1, 4), range(4, 6)],
        "relu-only-preactivation": [range(2, 5)],
        "full-preactivation": [range(0, 3), range(3, 6)],
    }
    adding = [name for name, p in PLACEMENTS.items() if diagrams.fuses_addition(p)]
    assert adding == ["bn-after-addition", "full-preactivation"]


def test_shortcuts_are_drawn_with_their_formulas(canvas):
    axes = canvas.draw(diagrams.draw_shortcuts).axes[0]
    shown = texts_at(axes)
    titles = [t for t in axes.texts if t.get_fontweight() == "bold"]
    names = sorted((t.get_position()[0], t.get_text()) for t in titles)
    assert [name for _, name in names] == list(SHORTCUTS)
    formulas = sorted((x, t) for x, _, t in shown if t.startswith("y = "))
    assert [t for _, t in formulas] == [
        "y = x + F(x)",
        "y = 0.5 x + F(x)",
        "y = (1 - g(x)) x + g(x) F(x)",
        "y = (1 - g(x)) x + F(x)",
        "y = W x + F(x)",
        "y = dropout(x) + F(x)",
    ]
    assert [x for x, _ in formulas] == [x for x, _ in names]
    # Two products of the exclusive gate, one of the other gate.
    assert [t for *_, t in shown].count("$\\times$") == 3
    assert [t for *_, t in shown].count("sigmoid") == 2
    assert [t for *_, t in shown].count("+") == len(SHORTCUTS)
    canvas.figure.draw_without_rendering()
    assert_no_overlap(axes.texts)
