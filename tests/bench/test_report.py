"""The report: it writes pages from results; unchanged results do not change a page."""

import shutil

import pytest

from bench import measure, memory, plots, report
from bench.measure import Machine
from bench.records import MEMORY, MODELS, ModelRow, Row, put, read

RESULTS = measure.ROOT / "bench" / "results"


def row(contender, ms, kept, case="resnet-1001", device="a cpu (2 threads)", note=""):
    machine = Machine(device, "torch 2", "abc", "today", "python -m bench")
    found = Row("network", contender, case, "16x3x32x32", 16, "float32", "x", correct="yes")
    found.set_timing(measure.Timing(ms, ms, ms), 1.0)
    found.saved_bytes, found.note = kept * 2**20, note
    return machine.stamp(found)


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_headline_has_eager_and_the_best_rivals_with_times_in_the_same_rounds():
    """Captured steps take the same time in any rounds: their times are not scaled."""
    slow = "fused-store took 100.0 ms beside this"
    rows = [
        row("eager-channels-last", 400.0, 1000),
        row("fused-store", 200.0, 500),
        row("fused-graph", 30.0, 500),
        row("eager-graph", 90.0, 1000, note=slow),
        row("compile-graph", 70.0, 1000, note=slow),
        row("compile-blocks", 60.0, 1000, note=slow),
        row("checkpoint-block", 50.0, 300, note="fused-store took 20.0 ms beside this"),
    ]
    lines = [cells(line) for line in report.headline_table(rows).splitlines() if "|" in line][2:]
    assert lines == [
        ["eager-channels-last", "x", "1,000", "1.000", "400.0"],
        ["compile-graph", "x", "1,000", "1.000", "70.0"],
        ["**fused-store**", "x", "500", "0.500", "200.0"],
        ["**fused-graph**", "x", "500", "0.500", "30.0"],
        ["checkpoint-block", "x", "300", "0.300", "500.0"],
    ]


def test_wrong_results_are_in_no_comparison():
    wrong = row("fused-rebuild", 1.0, 1)
    wrong.correct = "no"
    right = [row("eager-channels-last", 40.0, 1000), row("fused-store", 20.0, 500)]
    assert report.headline_table([*right, wrong]) == report.headline_table(right)
    failed = row("fused-checkpoint", 1.0, 1, note="failed: no room")
    failed.median_ms = None
    assert "failed" in report.step_table([*right, failed])


def test_the_pages_are_those_of_the_committed_results(tmp_path, monkeypatch):
    # Drawing takes seconds.
    for name in ("_against_depth", "_memory_against_time", "write_memory_of_models"):
        monkeypatch.setattr(plots, name, lambda *arguments: arguments[-1])
    (tmp_path / "docs").mkdir()
    for page in report.PAGES:
        shutil.copy(measure.ROOT / page, tmp_path / page)
    shutil.copytree(RESULTS, tmp_path / "bench" / "results")
    report.main(["--results", str(tmp_path / "bench" / "results"), "--root", str(tmp_path)])
    for page in report.PAGES:
        assert (tmp_path / page).read_text() == (measure.ROOT / page).read_text(), page


def test_rows_are_read_as_they_were_written(tmp_path):
    for path in RESULTS.glob("*threads.csv"):
        rows = read(path, Row)
        put(tmp_path / path.name, *rows)
        put(tmp_path / path.name, rows[0])  # keeps its place
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected the columns level, contender"):
        read(tmp_path / "other.csv", Row)


@pytest.fixture
def pages(tmp_path):
    """A folder of pages with the text `old` in their blocks."""
    (tmp_path / "docs").mkdir()
    for page, names in report.PAGES.items():
        blocks = [f"<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->" for name in names]
        (tmp_path / page).write_text("\n".join(blocks))
    return tmp_path


def test_a_report_has_tables_and_plots_of_every_device(pages):
    results = pages / "bench" / "results"
    both = (("eager-channels-last", 20.0, 400), ("fused-store", 10.0, 200))
    put(
        results / "a-cpu-2-threads.csv",
        *(row(*r, case) for case in ("resnet-1001", "resnet-164") for r in both),
    )
    gpu = "A GPU, backend triton"  # not the default, so not in the headline
    put(results / "a-gpu.csv", *(row(n, ms / 10, kept, device=gpu) for n, ms, kept in both))
    models = [
        ModelRow("net", "eager", "8x3x8x8", "fp32", saved_bytes=400, median_ms=12.0),
        ModelRow("net", "checkpoint", "8x3x8x8", "fp32", saved_bytes=100, median_ms=30.0),
        ModelRow("net", "pk.convert", "8x3x8x8", "fp32", 200, median_ms=10.0, fused="7 of 7"),
        ModelRow("net", "pk.convert, checkpoint", "8x3x8x8", "fp32", 100, 1, 15.0, fused="7 of 7"),
    ]
    put(results / f"a-cpu{MODELS}", *models)
    report.main(["--results", str(results), "--root", str(pages)])
    readme, text, convert, memory_page = ((pages / page).read_text() for page in report.PAGES)
    assert "\nold\n" not in readme + text + convert
    assert memory_page == "<!-- bench:memory -->\n<!-- /bench:memory -->"  # without rows
    assert readme.endswith("<!-- bench:memory-figure -->\n<!-- /bench:memory-figure -->")
    names = [
        "a-cpu-2-threads-batch-16-float32-memory-against-depth.png",
        "a-cpu-2-threads-batch-16-float32-resnet-1001-memory-against-time.png",
        "a-cpu-2-threads-batch-16-float32-time-against-depth.png",
        "a-gpu-backend-triton-batch-16-float32-resnet-1001-memory-against-time.png",
    ]
    assert sorted(path.name for path in results.glob("*.png")) == names
    assert all(f"](../bench/results/{name})" in text for name in names)
    assert text.index("**A GPU, backend triton**") < text.index("**a cpu (2 threads)**")
    assert "**a cpu (2 threads)**" in readme and f"](bench/results/{names[1]})" in readme
    line = next(line for line in convert.splitlines() if line.startswith("| net"))
    assert cells(line)[3:] == ["7 of 7", "0", "eager", "12", "1.20x, 0.50", "", "0.80x, 0.25"]


def memory_row(contender, ms, kept, peak, case="timm resnet50", **columns):
    machine = Machine("a cpu (2 threads)", "torch 2", "abc", "today", "python -m bench.memory")
    return machine.stamp(ModelRow(case, contender, "4x3x8x8", "fp32", kept, peak, ms, **columns))


def test_memory_of_models_is_relative_to_eager_in_a_table_and_a_figure(pages):
    results = pages / "bench" / "results"
    put(results / "a-cpu-2-threads.csv", row("eager-nchw", 20.0, 400), row("fused-store", 9.0, 200))
    rebuild = "pk.convert, rebuild, channels_last"
    put(
        results / f"a-cpu-2-threads{MEMORY}",
        memory_row("eager, channels_last", 10.0, 300, 500, case="timm vgg16_bn"),
        memory_row("compile, model, budget 0.2", 8.0, 60, 400, case="timm vgg16_bn"),
        memory_row("checkpoint", 12.0, 100, 400, case="timm densenet121"),  # without eager
        memory_row("eager, channels_last", 10.0, 2**20, 1000),
        memory_row("compile, model", None, None, None, note="RuntimeError: no room"),
        memory_row("checkpoint", None, 2**18, 900),  # not timed yet
        memory_row(rebuild, 12.5, 2**19, 250, fused="7 of 7"),
    )
    report.main(["--results", str(results), "--root", str(pages)])
    text = (pages / "docs" / "memory.md").read_text()
    lines = [cells(line) for line in text.splitlines() if line.startswith("| timm")]
    assert lines == [
        ["timm resnet50", "4x3x8x8", "fp32", "1", "", "failed", "", "0.80x, 0.50, 0.25"],
        ["timm vgg16_bn", "4x3x8x8", "fp32", "0", "", "", "1.25x, 0.20, 0.80", ""],
    ]
    assert "\nFailed: timm resnet50, compile, model: RuntimeError: no room\n" in text
    figure = "bench/results/a-cpu-2-threads-memory-of-models.png"
    assert (pages / figure).exists() and f"]({figure})" in (pages / "README.md").read_text()


def test_the_figure_shows_each_contender_of_each_model_once(monkeypatch, tmp_path):
    shown = {}

    def closed(figure):
        for axes in figure.axes:
            points = [
                line.get_xydata().tolist() for line in axes.lines if line.get_marker() != "None"
            ]
            if points:
                shown[axes.get_title()] = [point for (point,) in points]

    monkeypatch.setattr(plots.plt, "close", closed)
    rows = [
        memory_row(name, 10.0 + index, 100 - index, 1, case=case)
        for case in memory.FIGURE
        for index, name in enumerate((memory.PLAIN, *memory.TITLES))
    ]
    assert plots.write_memory_of_models(rows, tmp_path / "figure.png").stat().st_size > 10_000
    one = [[(100 - i) / 100, (10 + i) / 10] for i in range(1 + len(memory.TITLES))]
    assert shown == dict.fromkeys(memory.FIGURE, one)


def test_a_page_without_its_markers_is_left_alone(pages):
    results = pages / "bench" / "results"
    put(results / "a-cpu-2-threads.csv", row("eager-nchw", 20.0, 400), row("fused-store", 9.0, 200))
    before = (pages / "README.md").read_text()
    (pages / "docs" / "benchmarks.md").write_text("text")
    with pytest.raises(SystemExit, match=r"bench\.report: expected"):
        report.main(["--results", str(results), "--root", str(pages)])
    assert (pages / "README.md").read_text() == before
