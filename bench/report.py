"""Write the tables and plots of README.md and docs/: `python -m bench.report`.

Everything comes from the CSV files in `bench/results`. Each generated block lies between
`<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; `PAGES` lists the blocks of each page.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from bench import converted, launches, plots
from bench.contenders import ANCHOR, BY_NAME, FAMILIES, Network, is_rival
from bench.measure import MIB, ROOT
from bench.network import DRIFTED, UNFINISHED, relative_times
from bench.records import (
    CEILINGS,
    CONVERTED,
    INFERENCE,
    LAUNCHES,
    SCALING,
    CeilingRow,
    ConvertedRow,
    CurvePoint,
    LaunchRow,
    Row,
    read,
)

PAGES = {
    "README.md": ("headline",),
    "docs/benchmarks.md": ("gpu", "network", "memory", "training", "ops"),
    "docs/convert.md": ("converted",),
}
HEADLINE_NETWORK = "resnet-1001"
_TRAINING = "-training.csv"
_NETWORK_COMMAND = "python -m bench --out bench/results"
_OPS_COMMAND = "pytest bench/ops.py --bench-out bench/results"
_ORDER = {name: index for index, name in enumerate(BY_NAME)}


def load(folder: Path) -> dict[str, tuple[list[Row], list[CurvePoint]]]:
    """The rows and training curves in the CSV files of a folder, by device.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file has other columns.
    """
    found: dict[str, tuple[list[Row], list[CurvePoint]]] = {}
    for path in sorted(Path(folder).glob("*.csv")):
        if path.name.endswith((SCALING, CONVERTED, INFERENCE, LAUNCHES, CEILINGS)):
            continue
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


def _table(lines: Sequence[dict[str, object]], form: str) -> str:
    """A table with one column per key; empty without lines."""
    return tabulate(lines, "keys", form, disable_numparse=True) if lines else ""


def network_table(rows: Sequence[Row], form: str = "github") -> str:
    """Step times: median and percentiles, images per second, multiple of the floor."""
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
                {
                    "network": r.case,
                    "batch": r.batch,
                    "dtype": r.dtype,
                    "instruction set": r.instruction_set,
                    "contender": r.contender,
                    "step, ms: median (p20-p80)": times,
                    f"x of {ANCHOR}": _number(ratio, ".2f"),
                    "images/s": _number(r.images_per_s),
                    "x of floor": _number(r.x_of_floor, ".2f"),
                }
            )
    return _table(lines, form)


def memory_table(rows: Sequence[Row], form: str = "github") -> str:
    """Bytes kept for the backward, also as a share of eager's, and peak memory."""
    lines = []
    for group in _groups([r for r in rows if r.level == "network"]):
        eager = _eager_bytes(group)
        lines += [
            {
                "network": r.case,
                "batch": r.batch,
                "dtype": r.dtype,
                "contender": r.contender,
                "keeps": r.memory_mode,
                "kept for the backward, MiB": _mib(r.saved_bytes),
                "of eager": _number(r.saved_bytes / eager if eager else None, ".3f"),
                "peak of a step, MiB": _mib(r.peak_bytes),
                "peak of the process, MiB": _mib(r.peak_raw_bytes),
                "step, ms": _number(r.median_ms),
            }
            for r in group
            if r.saved_bytes is not None
        ]
    return _table(lines, form)


def _eager_bytes(group: Sequence[Row]) -> int | None:
    return next((r.saved_bytes for r in group if r.contender == "eager-channels-last"), None)


def _headline_group(rows: Sequence[Row]) -> list[Row]:
    """Rows of `HEADLINE_NETWORK` in the batch and dtype with the most contenders."""
    groups = _groups([r for r in rows if r.case == HEADLINE_NETWORK and r.saved_bytes])
    return max(groups, key=len, default=[])


def headline_table(rows: Sequence[Row], form: str = "github") -> str:
    """Time and kept bytes of `HEADLINE_NETWORK`: every fused contender and the best rivals.

    A rival is left out if another rival is as fast and keeps as little.
    """
    group = [r for r in _headline_group(rows) if r.correct == "yes"]
    times, eager = relative_times(group), _eager_bytes(group)
    group = [r for r in group if r.contender in times]
    rivals = {(times[r.contender], r.saved_bytes) for r in group if is_rival(r.contender)}
    lines = []
    for r in sorted(group, key=lambda r: -r.saved_bytes):
        time, kept = times[r.contender], r.saved_bytes
        name = r.contender
        if not is_rival(name):
            name = f"**{name}**"
        elif any(t <= time and k <= kept for t, k in rivals - {(time, kept)}):
            continue
        if r.contender == ANCHOR:
            anchor_ms = f"{r.median_ms:,.0f} ms"
        lines.append(
            {
                f"{r.case}, batch {r.batch}, {r.dtype}": name,
                "keeps": r.memory_mode,
                "kept for the backward, MiB": _mib(kept),
                "of eager": _number(kept / eager if eager else None, ".3f"),
                "step time": _number(time, ".2f"),
            }
        )
    if not lines:
        return ""
    return f"{_table(lines, form)}\n\nStep times are multiples of {ANCHOR}'s, {anchor_ms}."


def _headline_speed(rows: Sequence[Row]) -> float:
    return max((r.images_per_s or 0.0 for r in _headline_group(rows)), default=0.0)


def training_table(points: Sequence[CurvePoint], form: str = "github") -> str:
    """First and last loss of every curve, and its largest relative deviation from the truth."""
    lines = []
    for case, contender in dict.fromkeys((p.case, p.contender) for p in points):
        curve = sorted(
            (p for p in points if (p.case, p.contender) == (case, contender)), key=lambda p: p.step
        )
        first, last = curve[0], curve[-1]
        is_truth = contender == first.truth
        lines.append(
            {
                "network": case,
                "contender": contender,
                "dtype": first.dtype,
                "steps": len(curve),
                "first loss": f"{first.loss:.4f}",
                "last loss": f"{last.loss:.4f}",
                "against": first.truth,
                "largest relative deviation": (
                    "" if is_truth else f"{max(p.deviation for p in curve):.1e}"
                ),
            }
        )
    return _table(lines, form)


def ops_table(rows: Sequence[Row], form: str = "github") -> str:
    """Ops: times, the ratio of eager to fused, and the rates of the fused op."""
    ops: dict[tuple, dict[str, Row]] = {}
    for r in rows:
        if r.level == "op":
            ops.setdefault((r.case, r.shape, r.dtype), {})[r.contender] = r
    others = dict.fromkeys(name for by_name in ops.values() for name in by_name)
    others = [name for name in others if name not in ("fused", "eager-channels-last")]
    lines = []
    for (case, shape, dtype), by_name in ops.items():
        ours, eager = by_name.get("fused"), by_name.get("eager-channels-last")
        if ours is None or eager is None:
            continue
        lines.append(
            {
                "op": case,
                "input": shape,
                "dtype": dtype,
                "eager channels_last, ms": f"{eager.median_ms:.3f}",
                "fused, ms": f"{ours.median_ms:.3f}",
                **{
                    f"{name}, ms": _number(
                        by_name[name].median_ms if name in by_name else None, ".3f"
                    )
                    for name in others
                },
                "eager / fused": f"{eager.median_ms / ours.median_ms:.2f}",
                "fused, GB/s": _number(ours.gb_per_s),
                "fused, GFLOP/s": _number(ours.gflop_per_s, ",.0f"),
                "x of floor": _number(ours.x_of_floor, ".2f"),
            }
        )
    return _table(lines, form)


def comparable(row: Row) -> bool:
    """Whether a time can be compared: right results, all rounds measured, no drift."""
    return row.correct == "yes" and DRIFTED not in row.note and UNFINISHED not in row.note


def best_rivals(rows: Sequence[Row]) -> list[str]:
    """One line per network: the fastest rival over the fastest fused contender."""
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


def _origin(
    records: Sequence[Row | CurvePoint | ConvertedRow | CeilingRow | LaunchRow],
) -> str:
    def distinct(name: str) -> str:
        return "; ".join(dict.fromkeys(getattr(r, name) for r in records))

    return (
        f"Commit {distinct('commit')}; {distinct('versions')}; {distinct('date')}; "
        f"`{distinct('command')}`"
    )


def _sub(records: Sequence) -> str:
    return f"<sub>{_origin(records)}</sub>"


def _plots(name: str, by_block: dict[str, list[Path]]) -> list[Path]:
    """The plots of a block; the headline shows memory against time of its network."""
    if name != "headline":
        return by_block.get(name, [])
    wanted = f"{HEADLINE_NETWORK}-memory-against-time"
    return [path for path in by_block.get("memory", []) if path.stem.endswith(wanted)][:1]


def block(
    name: str,
    devices: dict[str, tuple[list[Row], list[CurvePoint]]],
    figures: dict[str, dict[str, list[Path]]],
    page: Path,
) -> str:
    """The Markdown of one block, a section per device.

    Args:
        name: one of those in `PAGES`.
        devices: what `load` returns.
        figures: what `plots.write_plots` returns, by device.
        page: the file that gets the block; links to figures start from its folder.
    """
    make_table = {
        "headline": headline_table,
        "network": network_table,
        "memory": memory_table,
        "training": training_table,
        "ops": ops_table,
    }[name]
    if name == "headline":  # one device: the fastest
        fastest = max(devices, key=lambda device: _headline_speed(devices[device][0]))
        devices = {fastest: devices[fastest]}
    sections = []
    for device, (rows, points) in devices.items():
        level = "op" if name == "ops" else "network"
        records = points if name == "training" else [r for r in rows if r.level == level]
        table = make_table(records)
        if not table:
            command = _OPS_COMMAND if name == "ops" else _NETWORK_COMMAND
            sections.append(f"**{device}**: not measured yet; run `{command}`.")
            continue
        parts = [f"**{device}**", table]
        if name == "network":
            parts.append("\n".join(f"- {line}" for line in best_rivals(records)))
        parts += [
            f"![{path.stem}]({os.path.relpath(path, page.parent)})"
            for path in _plots(name, figures[device])
        ]
        if name != "headline":
            parts.append(_sub(records))
        sections.append("\n\n".join(filter(None, parts)))
    return "\n\n".join(sections)


def converted_block(folder: Path) -> str:
    """The Markdown of converted models, a section per device."""
    sections = []
    for path in sorted(folder.glob(f"*{CONVERTED}")):
        rows = read(path, ConvertedRow)
        table = converted.table(rows, "github")
        sections.append(f"**{rows[0].device}**\n\n{table}\n\n{_sub(rows)}")
    command = "python -m bench.converted --out bench/results"
    return "\n\n".join(sections) or f"Not measured yet; run `{command}`."


def gpu_block(folder: Path) -> str:
    """The Markdown of GPUs: their ceilings, and the kernels of steps that lose most."""
    sections = []
    for path in sorted(folder.glob(f"*{CEILINGS}")):
        ceilings = read(path, CeilingRow)
        lines = [
            {"ceiling": r.name, "measured": _number(r.value, ",.2f") or r.note, "unit": r.unit}
            for r in ceilings
        ]
        title = f"**{ceilings[0].device}**"
        sections.append("\n\n".join([title, _table(lines, "github"), _sub(ceilings)]))
    for path in sorted(folder.glob(f"*{LAUNCHES}")):
        steps: dict[tuple, list[LaunchRow]] = {}
        for row in read(path, LaunchRow):
            if row.measured_us_per_block is not None:
                steps.setdefault(row.step, []).append(row)
        sections += [_losses(rows) for rows in steps.values()]
    return "\n\n".join(sections) or "Not measured yet; run `make gpu-report OUT=folder` on a GPU."


def _losses(rows: Sequence[LaunchRow]) -> str:
    """The kernels of a measured step that lose most, under a line of sums."""
    first = rows[0]
    measured_ms, estimated_ms = (
        sum(getattr(r, f"{kind}_us_per_block") * r.blocks for r in rows) / 1e3
        for kind in ("measured", "estimated")
    )
    stream = "" if first.residual_dtype == first.dtype else f", {first.residual_dtype} stream"
    title = (
        f"**{first.device}**, backend {first.backend}: {first.network}, batch {first.batch}, "
        f"{first.dtype}{stream}, {first.memory}. The kernels of the stages take "
        f"{measured_ms:.2f} ms, by the estimate {estimated_ms:.2f} ms. The largest losses:"
    )
    return "\n\n".join([title, launches.losses(rows, form="github"), _sub(rows)])


def rewrite_blocks(text: str, contents: dict[str, str]) -> str:
    """`text` with the content of each block replaced.

    Raises:
        ValueError: a marker is missing, occurs twice, or comes in the wrong order.
    """
    for name, content in contents.items():
        start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        for marker in (start, end):
            if text.count(marker) != 1:
                raise ValueError(f"expected the marker {marker} once, found {text.count(marker)}")
        if text.index(start) > text.index(end):
            raise ValueError(f"expected {start} before {end}")
        before, rest = text.split(start)
        after = rest.split(end)[1]
        text = f"{before}{start}\n{content}\n{end}{after}"
    return text


_OF_FOLDER = {"converted": converted_block, "gpu": gpu_block}
"""Blocks whose records are not in the files that `load` reads."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the plots beside the CSV files, and the blocks of every page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    a = parser.parse_args(arguments)
    try:
        texts = {a.root / name: (a.root / name).read_text() for name in PAGES}
        blocks = {a.root / name: names for name, names in PAGES.items()}
        for page, names in blocks.items():  # check the markers before plotting
            rewrite_blocks(texts[page], dict.fromkeys(names, ""))
        devices = load(a.results)
        figures = {d: plots.write_plots(*records, a.results) for d, records in devices.items()}
        for page, names in blocks.items():
            contents = {
                name: _OF_FOLDER[name](a.results)
                if name in _OF_FOLDER
                else block(name, devices, figures, page)
                for name in names
            }
            page.write_text(rewrite_blocks(texts[page], contents))
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench.report: {error}") from error
    count = sum(len(paths) for by_block in figures.values() for paths in by_block.values())
    print(f"{', '.join(PAGES)}: results of {len(devices)} device(s), {count} plots")


if __name__ == "__main__":
    main()
