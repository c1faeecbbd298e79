"""The report: it writes pages from results; unchanged results do not change a page."""

import shutil

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

from bench import measure, plots, records, report
from bench.measure import Machine
from bench.records import CEILINGS, LAUNCHES, TRAINING, CeilingRow, LaunchRow, Row, put, read

RESULTS = measure.ROOT / "bench" / "results"


def row(contender, case, ms, kept):
    machine = Machine("a cpu", "torch 2", "abc", "today", "python -m bench")
    found = Row("network", contender, case, "16x3x32x32", 16, "float32", "x", correct="yes")
    found.set_timing(measure.Timing(ms, ms, ms), 1.0)
    found.saved_bytes = kept
    return machine.stamp(found)


def test_a_captured_rival_is_compared_although_the_anchor_took_longer_elsewhere():
    rows = [row(*r) for r in (("fused-store", "resnet-1001", 200.0, 500), ("fused-graph",
            "resnet-1001", 30.0, 500), ("eager-graph", "resnet-1001", 90.0, 1000),
            ("compile-graph", "resnet-1001", 70.0, 1000), ("compile-blocks", "resnet-1001",
            60.0, 1000))]  # fmt: skip
    for rival in rows[3:]:
        rival.note = "fused-store took 100.0 ms beside this"
    (line,) = report.best_rivals(rows)
    assert "the best rival, compile-graph (70.0 ms), takes 2.33 times as long" in line
    headline = [line.split("|")[1:-1] for line in report.headline_table(rows).splitlines()]
    times = {cells[0].strip(" *"): cells[-1].strip() for cells in headline if cells}
    # compile-blocks, which is not captured, is scaled: 60 ms beside an anchor that took 100.
    assert times["compile-graph"] == "70.0" and "eager-graph" not in times
    assert times["fused-graph"] == "30.0" and "compile-blocks" not in times


def test_no_headline_names_what_the_library_does_not_run_by_default():
    rows = [row("fused-store", "resnet-1001", 200.0, 500), row("fused-resident-graph",
            "resnet-1001", 10.0, 500), row("fused-graph", "resnet-1001", 30.0, 500),
            row("eager-graph", "resnet-1001", 90.0, 1000)]  # fmt: skip
    (line,) = report.best_rivals(rows)
    assert "takes 3.00 times as long as fused-graph (30.0 ms)" in line
    headline = report.headline_table(rows)
    assert "fused-graph" in headline and "resident" not in headline
    assert "fused-resident-graph" in report.network_table(rows)


def test_files_with_other_columns_are_not_read_as_rows(tmp_path):
    put(tmp_path / "a-cpu.csv", row("fused-store", "resnet-1001", 200.0, 500))
    values = [value for value in vars(records).values() if isinstance(value, str)]
    suffixes = {value for value in values if value.endswith(".csv")} - {TRAINING}
    assert len(suffixes) >= 7
    for suffix in suffixes:
        (tmp_path / f"a-cpu{suffix}").write_text("x\n1\n")
    assert list(report.load(tmp_path)) == ["a cpu"]


@pytest.fixture
def pages(tmp_path):
    """A folder of pages with the text `old` in their blocks."""
    (tmp_path / "docs").mkdir()
    for page, names in report.PAGES.items():
        blocks = [f"<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->" for name in names]
        (tmp_path / page).write_text("\n".join(blocks))
    return tmp_path


def test_the_pages_are_those_of_the_committed_results(tmp_path, monkeypatch):
    for name in ("_against_depth", "_memory_against_time", "_losses"):  # drawing takes seconds
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


def test_a_report_has_the_plots_of_every_family(pages):
    results = pages / "bench" / "results"
    put(
        results / "a-cpu.csv",
        *(
            row(name, case, ms, kept)
            for case in ("resnet-164", "resnet-20", "imagenet-resnet-50")
            for name, ms, kept in (("eager-channels-last", 20.0, 400), ("fused-store", 10.0, 200))
        ),
        row("fused-store", "resnet-1001", 10.0, 200),
    )
    report.main(["--results", str(results), "--root", str(pages)])
    readme = (pages / "README.md").read_text()
    text = (pages / "docs" / "benchmarks.md").read_text()
    assert "\nold\n" not in readme + text
    names = [
        "time-against-depth",
        "memory-against-depth",
        "resnet-1001-memory-against-time",
        "resnet-164-memory-against-time",
        "imagenet-resnet-50-memory-against-time",
    ]
    names = [f"a-cpu-batch-16-float32-{name}.png" for name in names]
    assert sorted(path.name for path in results.glob("*.png")) == sorted(names)
    assert all(f"](../bench/results/{name})" in text for name in names)
    assert f"](bench/results/{names[2]})" in readme


def test_a_report_has_the_ceilings_and_the_losses_of_a_gpu(pages):
    results = pages / "bench" / "results"
    machine = Machine("A GPU", "versions", "commit", "date", "command")
    ceilings = CeilingRow("copy", "GB/s", 4000.0), CeilingRow("barrier", "us", note="no nvcc")
    put(results / f"a-gpu{CEILINGS}", *map(machine.stamp, ceilings))
    assert "| copy      | 4,000.00   | GB/s   |" in report.gpu_block(results)
    assert "| barrier   | no nvcc    | us     |" in report.gpu_block(results)
    kernels = [
        LaunchRow(
            "1", "forward", kernel, 100, 1.0, "", "", "", 4e6, 0.0, 0.0, 1.9,
            measured_us_per_block=us, copy_gb_s=4000.0, network="resnet-1001", backend=backend,
        )
        for kernel, us, backend in (
            ("F1", 4.0, "cuda"), ("F2", 2.0, "cuda"), ("F3", None, "cuda"), ("F1", None, "triton"),
        )
    ]  # fmt: skip
    put(results / f"a-gpu{LAUNCHES}", *map(machine.stamp, kernels))
    text = report.gpu_block(results)
    assert "take 0.60 ms, by bytes and launches at least 0.38 ms" in text
    assert text.index("| F1 ") < text.index("| F2 ")
    assert "F3" not in text and "triton" not in text  # not measured
    with pytest.raises(FileNotFoundError):  # these files have no rows of networks
        report.load(results)


def test_a_page_without_its_markers_is_left_alone(pages):
    with pytest.raises(ValueError, match="expected the marker <!-- bench:ops --> once, found 0"):
        report.rewrite_block("text", "ops", "table")
    (pages / "docs" / "benchmarks.md").write_text("text")
    before = (pages / "README.md").read_text()
    with pytest.raises(SystemExit, match=r"bench\.report: expected the marker"):
        report.main(["--root", str(pages)])
    assert (pages / "README.md").read_text() == before
