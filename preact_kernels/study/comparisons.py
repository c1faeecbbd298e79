"""The paper's comparisons: placements, shortcuts, depths, and signal flow without training."""

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from preact_kernels.study import cost, data, paper, plots
from preact_kernels.study.blocks import PLACEMENTS, SHORTCUTS
from preact_kernels.study.comparison import (
    SIGNAL_IMAGES,
    Comparison,
    Result,
    Size,
    by_label,
    order_in_words,
    spread,
)
from preact_kernels.study.config import build_network
from preact_kernels.study.diagnostics import BlockRow, identity_test
from preact_kernels.study.files import csv_text, write_atomically
from preact_kernels.study.processes import Processes
from preact_kernels.study.report import (
    markdown_table,
    stage_starts,
)

SMALL = {  # each takes less than ten minutes on two cores
    "placements": Size((110,), 10, 64, 2, 16, "warmup-cosine"),
    "shortcuts": Size((56,), 12, 64, 2, 16, "warmup-cosine"),
    "depth": Size((20, 56, 110), 10, 64, 2, 16, "warmup-cosine"),
    "signal": Size((20, 56, 110), 0, 32, 1, 32, "warmup-cosine"),
}
FUSED_AND_PLAIN_DEPTH = 164
COST_DEPTHS = (110, 164, 1001)
PAPER = {
    "placements": Size((110, 164), 200, 128, 5, 32, "paper"),
    "shortcuts": Size((110,), 200, 128, 5, 32, "paper"),
    "depth": Size((110, 164, 1001), 200, 128, 5, 32, "paper"),
    "signal": Size((110, 164, 1001), 0, 128, 1, 32, "paper"),
}


def _compared(
    comparison: Comparison,
    results: Sequence[Result],
    quoted: Mapping[int, Mapping[str, float | None]],
) -> None:
    """Writes a table, the order of labels, and plots of the results at each depth."""
    reference_depth = min(quoted)
    for depth in comparison.size.depths:
        some = [r for r in results if r.depth == depth]
        errors, losses = by_label(some, "test_error"), by_label(some, "train_loss")
        reference = quoted.get(depth, quoted[reference_depth])
        paper_depth = depth if depth in quoted else reference_depth
        rows = []
        for label in errors:
            value = reference.get(label)
            one = next(r for r in some if r.label == label)
            rows.append(
                (
                    label,
                    spread(errors[label]),
                    spread(losses[label], 4),
                    "failed" if value is None else f"{value:.2f}",
                    f"{one.parameters:,}",
                    f"{statistics.median(by_label(some, 'seconds')[label]):.0f}",
                    one.parts,
                )
            )
        comparison.write(
            f"## {depth} layers",
            "",
            "Median of the seeds (lowest to highest). The training loss is the mean of the last "
            f"epoch. The paper's errors are for CIFAR-10 at {paper_depth} layers, after 200 "
            "epochs. Where the shape changes, shortcuts are 1x1 projections here; the basic CIFAR "
            "networks of arXiv 1512.03385 pad with zeros.",
            "",
            markdown_table(
                (
                    "blocks",
                    "test error, %",
                    "training loss",
                    "paper's test error, %",
                    "parameters",
                    "s",
                    "fused",
                ),
                rows,
            ),
            "",
            "**Test error.** " + order_in_words(errors, reference),
            "",
            "**Training loss.** " + order_in_words(losses, reference),
            "",
        )
        curves = {
            label: [list(enumerate(run, 1)) for run in runs]
            for label, runs in by_label(some, "losses").items()
        }
        comparison.plot(
            f"Training loss, {depth} layers", plots.plot_losses, curves, smooth=20, log=True
        )
        known = {label: v for label, v in reference.items() if v is not None and label in errors}
        comparison.plot(
            f"Test error, {depth} layers",
            plots.plot_bars,
            errors,
            ylabel="test error, %",
            reference=known,
        )
        _initial_plots(comparison, some, depth)


def _plot_by_block(
    comparison: Comparison,
    found: Mapping[str, Sequence[BlockRow]],
    labels: Mapping[str, str],
    where: str,
) -> None:
    """Plots each column in `labels`; titles end with `where`."""
    for column, label in labels.items():
        comparison.plot(
            label + where,
            plots.plot_by_block,
            {name: [getattr(row, column) for row in rows] for name, rows in found.items()},
            ylabel=label.lower(),
            boundaries=stage_starts(next(iter(found.values()))),
        )


def _initial_plots(comparison: Comparison, results: Sequence[Result], depth: int) -> None:
    first = {r.label: r for r in results if r.seed == 0}
    labels = {
        "gradient_norm": "Gradient norm of a block's parameters",
        "activation_std": "Standard deviation of a block's output",
    }
    initial = {name: r.initial for name, r in first.items()}
    _plot_by_block(comparison, initial, labels, f" before training, {depth} layers")
    stages = {name: r.histograms for name, r in first.items()}
    for begin in range(0, len(stages), 5):
        part = dict(list(stages.items())[begin : begin + 5])
        comparison.plot(
            f"Activations after training, {depth} layers"
            + (f", {begin // 5 + 1}" if begin else ""),
            plots.plot_histograms,
            part,
        )


def _placements(comparison: Comparison) -> Path:
    results = comparison.train_all({name: {"placement": name} for name in PLACEMENTS})
    comparison.begin(
        "Placement of normalisation and activation",
        "The five placements of figure 4 of arXiv 1603.05027, with identity shortcuts.",
    )
    comparison.plot("Placements", plots.draw_placements)
    depths = (110, 164)
    quoted = {d: {name: errors[d] for name, errors in paper.PLACEMENTS.items()} for d in depths}
    _compared(comparison, results, quoted)
    comparison.write_results(results)
    return comparison.end()


_SHORTCUT_CASES: dict[str, dict[str, Any]] = {
    "identity": {},
    "constant-scaling, branch 1": {"shortcut": "constant-scaling"},
    "constant-scaling, branch 0.5": {"shortcut": "constant-scaling", "branch_scale": 0.5},
    "exclusive-gating, bias 0": {"shortcut": "exclusive-gating", "gate_bias": 0.0},
    "exclusive-gating, bias -6": {"shortcut": "exclusive-gating", "gate_bias": -6.0},
    "shortcut-only-gating, bias 0": {"shortcut": "shortcut-only-gating", "gate_bias": 0.0},
    "shortcut-only-gating, bias -6": {"shortcut": "shortcut-only-gating", "gate_bias": -6.0},
    "conv1x1": {"shortcut": "conv1x1"},
    "dropout": {"shortcut": "dropout"},
}


def _shortcuts(comparison: Comparison) -> Path:
    cases = {name: {"placement": "original", **case} for name, case in _SHORTCUT_CASES.items()}
    results = comparison.train_all(cases)
    comparison.begin(
        "Shortcuts",
        "The shortcuts of table 1 of arXiv 1603.05027, in blocks of original placement, as there. "
        "The paper calls a training failed if its error stays above 20%.",
    )
    comparison.plot("Shortcuts", plots.draw_shortcuts)
    _compared(comparison, results, {110: paper.SHORTCUTS})
    comparison.write_results(results)
    return comparison.end()


def _depth(comparison: Comparison) -> Path:
    names = ("original", "full-preactivation")
    results = comparison.train_all({name: {"placement": name} for name in names})
    comparison.begin(
        "Depth",
        "Blocks of original placement and of full pre-activation at growing depth.",
    )
    series: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    losses: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    for r in results:
        series[r.label].setdefault(r.depth, []).append(r.test_error)
        losses[r.label].setdefault(r.depth, []).append(r.train_loss)
    quoted = paper.DEPTH.get(comparison.images.name, paper.DEPTH["cifar-10"])
    rows = [
        (
            depth,
            *(spread(series[name][depth]) for name in names),
            *(spread(losses[name][depth], 4) for name in names),
            *(quoted[name].get(depth, "") for name in names),
        )
        for depth in comparison.size.depths
    ]
    comparison.write(
        markdown_table(
            (
                "layers",
                *(f"{name}: test error, %" for name in names),
                *(f"{name}: training loss" for name in names),
                *(f"{name}: paper's error, %" for name in names),
            ),
            rows,
        ),
        "",
        "The paper's errors are for "
        f"{comparison.images.name if comparison.images.name in paper.DEPTH else 'CIFAR-10'}.",
        "",
    )
    comparison.plot("Error against depth", plots.plot_error_against_depth, series, reference=quoted)
    _fused_and_plain(comparison)
    comparison.write("## Time and memory", "")
    device = comparison.device
    batch = comparison.size.batch if device.type == "cuda" else 16
    costs = cost.measure_costs(COST_DEPTHS, batch, device)
    comparison.write(*cost.table(costs, batch), "")
    times: dict[str, dict[int, float]] = {}
    memory: dict[str, dict[int, float]] = {}
    for c in costs:
        times.setdefault(c.label, {})[c.depth] = c.step_ms
        memory.setdefault(c.label, {})[c.depth] = c.kept_bytes / 2**20
    comparison.plot("Cost against depth", plots.plot_cost_against_depth, times, memory)
    comparison.write_results(results)
    return comparison.end()


def _fused_and_plain(comparison: Comparison) -> None:
    """Trains one network fused and in plain PyTorch, with the same weights and images."""
    cases = {"fused": {"fused": True}, "plain PyTorch": {"fused": False}}
    results = comparison.train_all(cases, depths=(FUSED_AND_PLAIN_DEPTH,))
    errors, losses = by_label(results, "test_error"), by_label(results, "train_loss")
    seconds = by_label(results, "seconds")
    comparison.write(
        f"## Fused and plain, {FUSED_AND_PLAIN_DEPTH} layers",
        "",
        "Full pre-activation, the same weights, images and order. Roundings differ, and training "
        "magnifies them.",
        "",
        markdown_table(
            ("runs", "test error, %", "training loss", "s"),
            [
                (name, spread(errors[name]), spread(losses[name], 4), spread(seconds[name], 0))
                for name in cases
            ],
        ),
        "",
    )
    curves = {r.label: [list(enumerate(r.losses, 1))] for r in results if r.seed == 0}
    comparison.plot("Fused and plain", plots.plot_losses, curves, smooth=10, log=True)


def _signal(comparison: Comparison) -> Path:
    comparison.begin(
        "Signal flow before training",
        f"One forward and backward of {SIGNAL_IMAGES} images through networks with fresh weights.",
    )
    rows: list[tuple[object, ...]] = []
    comparison.write(
        "## The identity test",
        "",
        "With the last convolution of every branch set to zero, a block of full pre-activation "
        "returns its input bit for bit. Norms have random biases here, as after training. Blocks "
        "that change the shape are not counted.",
        "",
        _identity_table(comparison),
        "",
    )
    for depth in comparison.size.depths:
        comparison.write(f"## Placements, {depth} layers", "")
        cases = {name: {"placement": name} for name in PLACEMENTS}
        rows += _signal_plots(comparison, cases, depth)
    depth = comparison.size.depths[-1]
    comparison.write(f"## Shortcuts, {depth} layers, blocks of original placement", "")
    cases = {name: {"placement": "original", "shortcut": name} for name in SHORTCUTS}
    rows += _signal_plots(comparison, cases, depth)
    columns = ("label", "depth", *BlockRow._fields)
    write_atomically(comparison.out / "signal.csv", csv_text(columns, rows))
    return comparison.end()


def _identity_table(comparison: Comparison) -> str:
    depth = comparison.size.depths[0]
    images = comparison.images.images[:SIGNAL_IMAGES]
    rows = []
    for name in PLACEMENTS:
        for fused in (True, False):
            config = comparison.config(depth=depth, placement=name, fused=fused)
            found = identity_test(build_network(config, comparison.images.classes), images)
            kind = "fused where exact" if fused else "plain"
            rows.append((name, kind, f"{sum(found.values())} of {len(found)}"))
    return markdown_table(("placement", "runs", "blocks that are the identity"), rows)


def _signal_plots(
    comparison: Comparison, cases: Mapping[str, dict[str, Any]], depth: int
) -> list[tuple[object, ...]]:
    found = {
        label: comparison.initial_signal(comparison.config(depth=depth, **case))
        for label, case in tqdm(cases.items(), desc=f"{depth} layers", disable=None)
    }
    rows = []
    for label, blocks in found.items():
        first, last = blocks[0], blocks[-1]
        gradient = (first.activation_gradient_norm or 0) / (last.activation_gradient_norm or 1)
        rows.append(
            (
                label,
                f"{first.activation_std:.3g}",
                f"{last.activation_std:.3g}",
                f"{gradient:.3g}",
                f"{first.gradient_norm / last.gradient_norm:.3g}",
            )
        )
    comparison.write(
        markdown_table(
            (
                "blocks",
                "std of the first block's output",
                "std of the last block's output",
                "gradient of the output, first / last",
                "gradient of the parameters, first / last",
            ),
            rows,
        ),
        "",
    )
    kind = "shortcuts" if set(cases) == set(SHORTCUTS) else "placements"
    labels = {
        "activation_std": "Standard deviation of the output",
        "activation_gradient_norm": "Gradient norm of the output",
        "gradient_norm": "Gradient norm of the parameters",
    }
    _plot_by_block(comparison, found, labels, f", {kind}, {depth} layers")
    return [(label, depth, *row) for label, r in found.items() for row in r]


_COMPARISONS: dict[str, tuple[str, Callable[[Comparison], Path]]] = {
    "placements": ("train the five placements of normalisation and activation", _placements),
    "shortcuts": ("train the six kinds of shortcut", _shortcuts),
    "depth": ("train growing depths; step time and memory", _depth),
    "signal": ("measure signals and gradients before training", _signal),
}


def add_commands(commands: Any) -> None:
    """Adds the commands of the comparisons to a parser."""
    for name, (text, _) in _COMPARISONS.items():
        parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        parser.add_argument(
            "--out", default=f"study-runs/{name}", help="folder (default %(default)s)"
        )
        parser.add_argument("--paper", action="store_true", help="at the paper's size")
        parser.add_argument("--data", help="directory of CIFAR files; default: the digits")
        parser.add_argument("--device", help="default: cuda if there is one")
        parser.add_argument("--depths", type=int, nargs="+", help="layers")
        parser.add_argument("--epochs", type=int, help="epochs of each training run")
        parser.add_argument("--seeds", type=int, help="training runs of each kind")


def run(name: str, arguments: dict[str, Any]) -> int:
    """Runs a comparison; returns the exit status."""
    size = (PAPER if arguments["paper"] else SMALL)[name]
    for option in ("epochs", "seeds"):
        if (value := arguments[option]) is not None:
            if value < 1:
                raise ValueError(f"{option}: expected at least 1, got {value}")
            size = dataclasses.replace(size, **{option: value})
    if (count := Processes.of_environment().world_size) > 1:
        raise ValueError(
            f"torchrun: expected one process for {name}, got {count}; train takes more"
        )
    if arguments["paper"] and not (arguments["data"] or os.environ.get(data.ENVIRONMENT_VARIABLE)):
        raise ValueError(
            "data: expected a directory of CIFAR files with --paper, got none "
            f"(--data, or the variable {data.ENVIRONMENT_VARIABLE})"
        )
    if arguments["depths"]:
        size = dataclasses.replace(size, depths=tuple(arguments["depths"]))
    base = {k: arguments[k] for k in ("data", "device") if arguments[k] is not None}
    comparison = Comparison(size, base, Path(arguments["out"]))
    print(f"report: {_COMPARISONS[name][1](comparison)}")
    return 0
