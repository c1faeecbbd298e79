"""The comparisons of the study, at sizes that take seconds."""

import csv
import re

import pytest

from preact_kernels.study import comparisons, cost, paper
from preact_kernels.study.blocks import PLACEMENTS, SHORTCUTS
from preact_kernels.study.commands import main
from preact_kernels.study.comparison import Size, order_in_words, spread

TINY = Size(depths=(8,), epochs=1, batch=100, seeds=1, image_size=8, recipe="warmup-cosine")


@pytest.fixture
def tiny(few_digits, undrawn, monkeypatch):
    monkeypatch.setattr(comparisons, "SMALL", dict.fromkeys(comparisons.SMALL, TINY))
    monkeypatch.setattr(comparisons, "FUSED_AND_PLAIN_DEPTH", 11)
    monkeypatch.setattr(comparisons, "COST_DEPTHS", (11, 20))
    monkeypatch.setattr(cost, "_STEPS", 1)


def check_report(out, pictures):
    report = (out / "report.md").read_text()
    found = re.findall(r"^!\[.*\]\((.*\.png)\)$", report, re.M)
    assert len(found) == len(set(found)) == pictures
    for name in found:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "Command: `python -m preact_kernels.study" in report
    return report


def labels_of(path):
    with path.open(newline="") as file:
        return [row["label"] for row in csv.DictReader(file)]


def test_placements(tiny, tmp_path, monkeypatch):
    names = ("original", "full-preactivation")
    monkeypatch.setattr(comparisons, "PLACEMENTS", names)
    arguments = ["placements", "--out", str(tmp_path), "--device", "cpu"]
    assert main(arguments) == 0
    report = check_report(tmp_path, 6)
    for name in names:
        line = next(line for line in report.splitlines() if line.startswith(f"| {name} |"))
        assert f" {paper.PLACEMENTS[name][110]:.2f} |" in line and "norms fused" in line
    assert labels_of(tmp_path / "results.csv") == list(names)
    # A second call repeats no finished run and writes the same report.
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/checkpoint.pt")}
    assert main(arguments) == 0
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/checkpoint.pt")} == before
    assert (tmp_path / "report.md").read_text() == report


@pytest.mark.slow
def test_shortcuts(tiny, tmp_path):
    assert main(["shortcuts", "--out", str(tmp_path), "--seeds", "2", "--device", "cpu"]) == 0
    report = check_report(tmp_path, 7)
    assert "| dropout |" in report and "| failed |" in report
    assert sorted(labels_of(tmp_path / "results.csv")) == sorted(2 * list(paper.SHORTCUTS))


@pytest.mark.slow
def test_depths(tiny, tmp_path):
    arguments = ["--depths", "8", "14", "--device", "cpu"]
    assert main(["depth", "--out", str(tmp_path), *arguments]) == 0
    report = check_report(tmp_path, 3)
    for heading in ("# Depth", "## Fused and plain, 11 layers", "## Time and memory"):
        assert f"{heading}\n" in report
    assert all(f"| 20 | {name} |" in report for name in ("plain PyTorch", "store", "checkpoint"))


def test_signal(tiny, tmp_path):
    assert main(["signal", "--out", str(tmp_path), "--device", "cpu"]) == 0
    report = check_report(tmp_path, 6)
    assert "| full-preactivation | fused where exact | 1 of 1 |" in report
    others = re.findall(r"^\| ([\w-]+) \| (?:fused|plain).* \| (\d) of 1 \|$", report, re.M)
    assert {n for name, n in others if name != "full-preactivation"} == {"0"}
    assert {*labels_of(tmp_path / "signal.csv")} == {*PLACEMENTS, *SHORTCUTS}


def test_the_order_of_errors_and_the_spread_of_seeds_in_words():
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    assert spread([1.2345], 3) == "1.234"
    own = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [0.0, 0.5], "d": [3.5, 9.0]}
    text = order_in_words(own, {"a": 5.0, "b": 6.0, "c": 7.0, "d": None})
    assert text == (
        "Of the 6 pairs that the paper ranks, 3 have its order here with every seed, 2 the "
        "opposite order, and 1 overlap. The opposite: c is below a; c is below b. "
        "Overlapping: b and d."
    )


def test_wrong_options_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PREACT_KERNELS_DATA", raising=False)
    for arguments, message in (
        ("--paper", "data: expected a directory of CIFAR files with --paper"),
        ("--seeds 0", "seeds: expected at least 1, got 0"),
        ("--depths 21", r"depth: expected 6n\+2"),
    ):
        with pytest.raises(SystemExit, match=f"study: {message}"):
            main(["placements", "--out", str(tmp_path / "out"), *arguments.split()])
    assert not (tmp_path / "out").exists()
