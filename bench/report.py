"""Tables and plots from the CSV files, and the README's generated blocks: `python -m bench.report`.

A block lies between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; NAME is network, memory,
training or ops.
"""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from bench import plots
from bench.contenders import ANCHOR, BY_NAME, FAMILIES, Network, is_rival
from bench.measure import MIB, ROOT
from bench.network import DRIFTED, UNFINISHED
from bench.records import CurvePoint, Row, read

BLOCKS = ("network", "memory", "training", "ops")
_TRAINING = "-training.csv"
_COMMANDS = {
    "network": "python -m bench --out bench/results",
    "memory": "python -m bench --out bench/results",
    "training": "python -m bench --out bench/results",
    "ops": "pytest bench/ops.py --bench-out bench/results",
}
_ORDER = {name: index for index, name in enumerate(BY_NAME)}


def load(folder: Path) -> dict[str, tuple[list[Row], list[CurvePoint]]]:
    """The rows and training curves in the CSV files of a folder, by device.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file has other columns.
    """
    found: dict[str, tuple[list[Row], list[CurvePoint]]] = {}
    for path in sorted(Path(folder).glob("*.csv")):
        is_curve = path.name.endswith(_TRAINING)
        for record in read(path, CurvePoint if is_curve else Row):
            found.setdefault(record.device, ([], []))[int(is_curve)].append(record)
    if not found:
        raise FileNotFoundError(
            f"{folder}: expected CSV files of `python -m bench --out {folder}`, found none"
        )
    return found


def _number(value: float | None, form: str = ",.1f") -> str:
    return "" if value is None else format(value, form)


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / MIB:,.0f}"


def _place(case: str) -> tuple[int, int]:
    """Orders networks by family, the deepest first."""
    network = Network.named(case)
    return list(FAMILIES).index(network.family), -network.depth


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one network, batch and dtype together, contenders in order."""
    keys = {(r.case, r.batch, r.dtype) for r in rows}
    return [
        sorted(
            (r for r in rows if (r.case, r.batch, r.dtype) == key),
            key=lambda r: _ORDER.get(r.contender, len(_ORDER)),
        )
        for key in sorted(keys, key=lambda k: (*_place(k[0]), k[1], k[2]))
    ]


def network_table(rows: Sequence[Row], form: str = "github") -> str:
    """Step times: median and percentiles, images a second, distance from the floor."""
    lines = []
    wanted = [r for r in rows if r.level == "network" and (r.correct or r.median_ms is not None)]
    for group in _groups(wanted):
        anchor = next((r.median_ms for r in group if r.contender == ANCHOR), None)
        for r in group:
            timed = r.median_ms is not None
            times = r.note.split(":")[0]
            if timed:
                times = f"{r.median_ms:,.1f} ({r.p20_ms:,.1f}-{r.p80_ms:,.1f})"
            doubts = [d for d in (DRIFTED, UNFINISHED) if d in r.note]
            ratio = r.median_ms / anchor if timed and anchor and not doubts else None
            if r.correct == "another function":
                times += ", another function"
            times += "".join(f", {doubt}" for doubt in doubts)
            lines.append(
                [r.case, r.batch, r.dtype, r.contender, times, _number(ratio, ".2f"),
                 _number(r.images_per_s), _number(r.x_of_floor, ".2f")]
            )  # fmt: skip
    headers = [
        "network", "batch", "dtype", "contender", "step, ms: median (p20-p80)",
        f"x of {ANCHOR}", "images/s", "x of floor",
    ]  # fmt: skip
    return tabulate(lines, headers, form, disable_numparse=True) if lines else ""


def memory_table(rows: Sequence[Row], form: str = "github") -> str:
    """Bytes kept for the backward and peak memory, with the share of eager's."""
    lines = []
    for group in _groups([r for r in rows if r.level == "network"]):
        eager = next((r.saved_bytes for r in group if r.contender == "eager-channels-last"), None)
        for r in group:
            if r.saved_bytes is None:
                continue
            share = r.saved_bytes / eager if eager else None
            lines.append(
                [r.case, r.batch, r.dtype, r.contender, r.memory_mode, _mib(r.saved_bytes),
                 _number(share, ".3f"), _mib(r.peak_bytes), _mib(r.peak_raw_bytes),
                 _number(r.median_ms)]
            )  # fmt: skip
    headers = [
        "network", "batch", "dtype", "contender", "keeps", "kept for the backward, MiB",
        "of eager", "peak of a step, MiB", "peak of the process, MiB", "step, ms",
    ]  # fmt: skip
    return tabulate(lines, headers, form, disable_numparse=True) if lines else ""


def training_table(points: Sequence[CurvePoint], form: str = "github") -> str:
    """First and last loss of every curve, and its largest relative deviation from the truth."""
    lines = []
    for case, contender in dict.fromkeys((p.case, p.contender) for p in points):
        curve = sorted(
            (p for p in points if (p.case, p.contender) == (case, contender)), key=lambda p: p.step
        )
        is_truth = contender == curve[0].truth
        lines.append(
            [case, contender, curve[0].dtype, len(curve), f"{curve[0].loss:.4f}",
             f"{curve[-1].loss:.4f}", curve[0].truth,
             "" if is_truth else f"{max(p.deviation for p in curve):.1e}"]
        )  # fmt: skip
    headers = [
        "network", "contender", "dtype", "steps", "first loss", "last loss", "against",
        "largest relative deviation",
    ]  # fmt: skip
    return tabulate(lines, headers, form, disable_numparse=True) if lines else ""


def ops_table(rows: Sequence[Row], form: str = "github") -> str:
    """Ops: both times, their ratio, and the rates of the fused op."""
    ops: dict[tuple, dict[str, Row]] = {}
    for r in rows:
        if r.level == "op":
            ops.setdefault((r.case, r.shape, r.dtype), {})[r.contender] = r
    lines = []
    for (case, shape, dtype), by_name in ops.items():
        ours, eager = by_name.get("fused"), by_name.get("eager-channels-last")
        if ours is None or eager is None:
            continue
        lines.append(
            [case, shape, dtype, f"{eager.median_ms:.3f}", f"{ours.median_ms:.3f}",
             f"{eager.median_ms / ours.median_ms:.2f}", _number(ours.gb_per_s),
             _number(ours.gflop_per_s, ",.0f"), _number(ours.x_of_floor, ".2f")]
        )  # fmt: skip
    headers = [
        "op", "input", "dtype", "eager channels_last, ms", "fused, ms", "eager / fused",
        "fused, GB/s", "fused, GFLOP/s", "x of floor",
    ]  # fmt: skip
    return tabulate(lines, headers, form, disable_numparse=True) if lines else ""


def comparable(row: Row) -> bool:
    """Whether a time can be compared: right results, all rounds measured, no drift."""
    return row.correct == "yes" and DRIFTED not in row.note and UNFINISHED not in row.note


def best_rivals(rows: Sequence[Row]) -> list[str]:
    """A line a network: the fastest rival over the fastest fused contender."""
    lines = []
    for group in _groups([r for r in rows if r.level == "network" and r.median_ms is not None]):
        ours = [r for r in group if not is_rival(r.contender) and comparable(r)]
        rivals = [r for r in group if is_rival(r.contender) and comparable(r)]
        if not ours or not rivals:
            continue
        ours, rival = (min(some, key=lambda r: r.median_ms) for some in (ours, rivals))
        lines.append(
            f"{ours.case}, batch {ours.batch}, {ours.dtype}: the best rival, {rival.contender} "
            f"({rival.median_ms:,.1f} ms), takes {rival.median_ms / ours.median_ms:.2f} times as "
            f"long as {ours.contender} ({ours.median_ms:,.1f} ms)"
        )
    return lines


def _origin(records: Sequence[Row | CurvePoint]) -> str:
    def distinct(name: str) -> str:
        return "; ".join(dict.fromkeys(getattr(r, name) for r in records))

    return (
        f"Commit {distinct('commit')}; {distinct('versions')}; {distinct('date')}; "
        f"`{distinct('command')}`"
    )


def block(
    name: str,
    devices: dict[str, tuple[list[Row], list[CurvePoint]]],
    figures: dict[str, dict],
    relative_to: Path,
) -> str:
    """The Markdown of one README block, a section a device.

    Args:
        name: one of `BLOCKS`.
        devices: what `load` gives.
        figures: what `plots.write_plots` gives, by device.
        relative_to: the directory that links to figures start from.
    """
    sections = []
    for device, (rows, points) in devices.items():
        level = "op" if name == "ops" else "network"
        records = points if name == "training" else [r for r in rows if r.level == level]
        table = {
            "network": network_table,
            "memory": memory_table,
            "training": training_table,
            "ops": ops_table,
        }[name](records)
        if not table:
            sections.append(f"**{device}**: not measured yet; `{_COMMANDS[name]}` does.")
            continue
        parts = [f"**{device}**", table]
        if name == "network":
            parts.append("\n".join(f"- {line}" for line in best_rivals(records)))
        parts += [
            f"![{path.stem}]({os.path.relpath(path, relative_to)})"
            for path in figures[device].get(name, [])
        ]
        sections.append("\n\n".join([*filter(None, parts), f"<sub>{_origin(records)}</sub>"]))
    return "\n\n".join(sections)


def rewrite_blocks(text: str, contents: dict[str, str]) -> str:
    """`text` with the content of each block replaced.

    Raises:
        ValueError: a marker is missing, there twice, or in the wrong order.
    """
    for name, content in contents.items():
        start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        for marker in (start, end):
            if text.count(marker) != 1:
                raise ValueError(
                    f"README: expected the marker {marker} once, found {text.count(marker)}"
                )
        if text.index(start) > text.index(end):
            raise ValueError(f"README: expected {start} before {end}")
        pattern = re.escape(start) + ".*?" + re.escape(end)
        text = re.sub(pattern, lambda _: f"{start}\n{content}\n{end}", text, flags=re.DOTALL)  # noqa: B023
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes plots beside the CSV files, and the README's blocks."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    a = parser.parse_args(arguments)
    try:
        text = a.readme.read_text()
        rewrite_blocks(text, dict.fromkeys(BLOCKS, ""))  # markers first: no plots for nothing
        devices = load(a.results)
        figures = {d: plots.write_plots(*records, a.results) for d, records in devices.items()}
        blocks = {name: block(name, devices, figures, a.readme.parent) for name in BLOCKS}
        a.readme.write_text(rewrite_blocks(text, blocks))
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench.report: {error}") from error
    count = sum(len(paths) for by_block in figures.values() for paths in by_block.values())
    print(f"{a.readme}: {len(BLOCKS)} blocks of {len(devices)} device(s); {count} plots")


if __name__ == "__main__":
    main()
