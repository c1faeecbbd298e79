"""Writes the tables and plots of README.md and docs/: `python -m bench.report`.

All results come from the CSV files in `bench/results`. A generated block is between
`<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; `PAGES` lists the blocks of each page.
"""

import itertools
import os
import types
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import converted, launches, measure, plots, probes, rivals
from bench.contenders import (
    ANCHOR,
    BY_NAME,
    FAMILIES,
    Network,
    has_drifted,
    is_headline,
    is_rival,
    relative_times,
)
from bench.measure import MIB, ROOT
from bench.records import (
    BLOCK_SHAPES,
    CEILINGS,
    CONVERTED,
    INFERENCE,
    LAUNCHES,
    RIVALS,
    SCALING,
    TRAINING,
    CeilingRow,
    ConvertedRow,
    CurvePoint,
    LaunchRow,
    RivalRow,
    Row,
    number,
    read,
    table,
)

PAGES = {
    "README.md": ("headline",),
    "docs/benchmarks.md": ("gpu", "network", "memory", "rivals", "training", "ops"),
    "docs/convert.md": ("converted",),
}
HEADLINE_NETWORK = "resnet-1001"
_NETWORK_COMMAND = "python -m bench --out bench/results"
_OPS_COMMAND = "pytest bench/ops.py --bench-out bench/results"
_ORDER = list(BY_NAME)

Device = tuple[list[Row], list[CurvePoint]]


def load(folder: Path) -> dict[str, Device]:
    """Reads rows and training curves from the CSV files of a folder, by device.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file has other columns.
    """
    found: dict[str, Device] = {}
    for path in sorted(Path(folder).glob("*.csv")):
        if path.name.endswith(
            (SCALING, CONVERTED, INFERENCE, LAUNCHES, CEILINGS, RIVALS, BLOCK_SHAPES)
        ):
            continue
        is_curve = path.name.endswith(TRAINING)
        for record in read(path, CurvePoint if is_curve else Row):
            found.setdefault(record.device, ([], []))[int(is_curve)].append(record)
    if not found:
        raise FileNotFoundError(
            f"{folder}: expected CSV files of `python -m bench --out {folder}`, found none"
        )
    return found


def _mib(value: int | None) -> str:
    return number(None if value is None else value / MIB, ",.0f")


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups the rows of networks by network, batch and dtype; contenders are in order."""

    def group(r: Row) -> tuple:
        network = Network.named(r.case)
        place = list(FAMILIES).index(network.family), -network.depth  # the deepest first
        return *place, r.batch, r.dtype

    def order(r: Row) -> int:
        return _ORDER.index(r.contender) if r.contender in _ORDER else len(_ORDER)

    found = sorted((r for r in rows if r.level == "network"), key=lambda r: (*group(r), order(r)))
    return [list(members) for _, members in itertools.groupby(found, group)]


def network_table(rows: Sequence[Row], form: str = "github") -> str:
    """Formats step times: median and percentiles, images per second, multiple of the floor."""
    lines = []
    for group in _groups(r for r in rows if r.correct or r.median_ms is not None):
        ratios = relative_times(group)
        for r in group:
            times, ratio = r.note.split(":")[0], ratios.get(r.contender)
            if r.median_ms is not None:
                times = f"{r.median_ms:,.1f} ({r.p20_ms:,.1f}-{r.p80_ms:,.1f})"
            if r.correct == "another function":
                times += ", another function"
            if has_drifted(r, group):
                times, ratio = f"{times}, the machine drifted", None
            lines.append(
                {
                    "network": r.case,
                    "batch": r.batch,
                    "dtype": r.dtype,
                    "instruction set": r.instruction_set,
                    "contender": r.contender,
                    "step, ms: median (p20-p80)": times,
                    f"x of {ANCHOR}": number(ratio, ".2f"),
                    "images/s": number(r.images_per_s),
                    "x of floor": number(r.x_of_floor, ".2f"),
                }
            )
    return table(lines, form)


def _share_of_eager(row: Row, group: Sequence[Row]) -> str:
    """Formats kept bytes as a share of eager's."""
    eager = next((r.saved_bytes for r in group if r.contender == "eager-channels-last"), None)
    return number(row.saved_bytes / eager if eager else None, ".3f")


def memory_table(rows: Sequence[Row], form: str = "github") -> str:
    """Formats bytes kept for the backward, also as a share of eager's, and peak memory."""
    lines = [
        {
            "network": r.case,
            "batch": r.batch,
            "dtype": r.dtype,
            "contender": r.contender,
            "keeps": r.memory_mode,
            "kept for the backward, MiB": _mib(r.saved_bytes),
            "of eager": _share_of_eager(r, group),
            "peak of a step, MiB": _mib(r.peak_bytes),
            "peak of the process, MiB": _mib(r.peak_raw_bytes),
            "step, ms": number(r.median_ms),
        }
        for group in _groups(rows)
        for r in group
        if r.saved_bytes is not None
    ]
    return table(lines, form)


def _headline_group(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of `HEADLINE_NETWORK` with the batch and dtype of the most contenders."""
    wanted = [r for r in rows if r.case == HEADLINE_NETWORK and r.saved_bytes]
    return max(_groups(wanted), key=len, default=[])


def headline_table(rows: Sequence[Row]) -> str:
    """Formats time and kept bytes of `HEADLINE_NETWORK`: fused contenders and the best rivals.

    Left out are experiments, which the library does not run by default. A rival is left out if
    another rival is as fast and keeps as little.
    """
    group = [r for r in _headline_group(rows) if r.correct == "yes"]
    times = relative_times(group)
    timed = [r for r in group if r.contender in times]
    anchor_ms = next((r.median_ms for r in group if r.contender == ANCHOR), 0)
    rivals = {(times[r.contender], r.saved_bytes) for r in timed if is_rival(r.contender)}
    lines = []
    for r in sorted(timed, key=lambda r: -r.saved_bytes):
        name, own = r.contender, (times[r.contender], r.saved_bytes)
        if not is_rival(name):
            if not is_headline(name):
                continue
            name = f"**{name}**"
        elif any(t <= own[0] and k <= own[1] for t, k in rivals - {own}):
            continue
        lines.append(
            {
                f"{r.case}, batch {r.batch}, {r.dtype}": name,
                "keeps": r.memory_mode,
                "kept for the backward, MiB": _mib(r.saved_bytes),
                "of eager": _share_of_eager(r, group),
                "step, ms": number(own[0] * anchor_ms),
            }
        )
    if not lines:
        return ""
    note = f"Times are scaled by {ANCHOR}'s in the same rounds, except those of CUDA graphs."
    return f"{table(lines, 'github')}\n\n{note}"


def training_table(points: Sequence[CurvePoint], form: str = "github") -> str:
    """Formats first and last loss of every curve, and its largest relative deviation."""
    lines = []
    for case, contender in dict.fromkeys((p.case, p.contender) for p in points):
        curve = [p for p in points if (p.case, p.contender) == (case, contender)]
        curve.sort(key=lambda p: p.step)
        first, deviation = curve[0], max(p.deviation for p in curve)
        lines.append(
            {
                "network": case,
                "contender": contender,
                "dtype": first.dtype,
                "steps": len(curve),
                "first loss": f"{first.loss:.4f}",
                "last loss": f"{curve[-1].loss:.4f}",
                "against": first.truth,
                "largest relative deviation": (
                    "" if contender == first.truth else f"{deviation:.1e}"
                ),
            }
        )
    return table(lines, form)


def ops_table(rows: Sequence[Row], form: str = "github") -> str:
    """Formats times of ops, the ratio of eager to fused, and the rates of the fused op."""
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
        more = {name: by_name[name].median_ms if name in by_name else None for name in others}
        lines.append(
            {
                "op": case,
                "input": shape,
                "dtype": dtype,
                "eager channels_last, ms": f"{eager.median_ms:.3f}",
                "fused, ms": f"{ours.median_ms:.3f}",
                **{f"{name}, ms": number(ms, ".3f") for name, ms in more.items()},
                "eager / fused": f"{eager.median_ms / ours.median_ms:.2f}",
                "fused, GB/s": number(ours.gb_per_s),
                "fused, GFLOP/s": number(ours.gflop_per_s, ",.0f"),
                "x of floor": number(ours.x_of_floor, ".2f"),
            }
        )
    return table(lines, form)


def best_rivals(rows: Sequence[Row]) -> list[str]:
    """Returns a line per network: the fastest rival compared with the fastest fused contender.

    Experiments are neither.
    """
    lines = []
    for group in _groups(r for r in rows if r.median_ms is not None):
        right = [r for r in group if r.correct == "yes" and not has_drifted(r, group)]
        ours = [r for r in right if is_headline(r.contender)]
        rivals = [r for r in right if is_rival(r.contender)]
        if not ours or not rivals:
            continue
        ours, rival = (min(some, key=lambda r: r.median_ms) for some in (ours, rivals))
        lines.append(
            f"{ours.case}, batch {ours.batch}, {ours.dtype}: the best rival, {rival.contender} "
            f"({rival.median_ms:,.1f} ms), takes {rival.median_ms / ours.median_ms:.2f} times as "
            f"long as {ours.contender} ({ours.median_ms:,.1f} ms)"
        )
    return lines


def section(title: str, contents: str, records: Sequence) -> str:
    """Formats a title, a table and the origin of its records."""

    def distinct(name: str) -> str:
        return "; ".join(dict.fromkeys(getattr(r, name) for r in records))

    commit, versions, date, command = map(distinct, ("commit", "versions", "date", "command"))
    origin = f"<sub>Commit {commit}; {versions}; {date}; `{command}`</sub>"
    return "\n\n".join([title, contents, origin])


def _image(path: Path, page: Path) -> str:
    return f"![{path.stem}]({os.path.relpath(path, page.parent)})"


def headline_block(devices: dict[str, Device], figures: dict, page: Path) -> str:
    """Returns the Markdown of the headline: the fastest device, with memory against time."""

    def speed(device: str) -> float:
        return max((r.images_per_s or 0.0 for r in _headline_group(devices[device][0])), default=0)

    device = max(devices, key=speed)
    contents = headline_table(devices[device][0])
    if not contents:
        return f"**{device}**: not measured yet; run `{_NETWORK_COMMAND}`."
    wanted = f"{HEADLINE_NETWORK}-memory-against-time"
    images = [_image(p, page) for p in figures[device]["memory"] if p.stem.endswith(wanted)]
    return "\n\n".join([f"**{device}**", contents, *images[:1]])


_TABLES = {
    "network": network_table,
    "memory": memory_table,
    "training": training_table,
    "ops": ops_table,
}


def device_block(name: str, devices: dict[str, Device], figures: dict, page: Path) -> str:
    """Returns the Markdown of the block "network", "memory", "training" or "ops", by device.

    Args:
        name: name of the block.
        devices: result of `load`.
        figures: results of `plots.write_plots`, by device.
        page: the file of the block; links to figures start from its folder.
    """
    sections = []
    for device, (rows, points) in devices.items():
        level = "op" if name == "ops" else "network"
        records = points if name == "training" else [r for r in rows if r.level == level]
        contents = _TABLES[name](records)
        if not contents:
            command = _OPS_COMMAND if name == "ops" else _NETWORK_COMMAND
            sections.append(f"**{device}**: not measured yet; run `{command}`.")
            continue
        parts = [contents]
        if name == "network":
            parts.append("\n".join(f"- {line}" for line in best_rivals(records)))
        parts += [_image(path, page) for path in figures[device].get(name, [])]
        sections.append(section(f"**{device}**", "\n\n".join(filter(None, parts)), records))
    return "\n\n".join(sections)


def _models_block(folder: Path, suffix: str, kind: type, source: types.ModuleType) -> str:
    """Returns the Markdown of models of other packages, a section per device."""
    files = [read(path, kind) for path in sorted(folder.glob(f"*{suffix}"))]
    sections = [
        section(f"**{rows[0].device}**", source.table(rows, "github"), rows) for rows in files
    ]
    command = f"python -m {source.__name__} --out bench/results"
    return "\n\n".join(sections) or f"Not measured yet; run `{command}`."


def converted_block(folder: Path) -> str:
    """Returns the Markdown of models before and after conversion."""
    return _models_block(folder, CONVERTED, ConvertedRow, converted)


def rivals_block(folder: Path) -> str:
    """Returns the Markdown of models against every rival."""
    return _models_block(folder, RIVALS, RivalRow, rivals)


def gpu_block(folder: Path) -> str:
    """Returns the Markdown of GPUs: ceilings, and the kernels with the largest losses."""
    sections = []
    for path in sorted(folder.glob(f"*{CEILINGS}")):
        ceilings = read(path, CeilingRow)
        contents = probes.table(ceilings, "github")
        sections.append(section(f"**{ceilings[0].device}**", contents, ceilings))
    for path in sorted(folder.glob(f"*{LAUNCHES}")):
        steps: dict[tuple, list[LaunchRow]] = {}
        for row in read(path, LaunchRow):
            if row.measured_us_per_block is not None and "projection" not in row.stage:
                steps.setdefault(row.step, []).append(row)
        sections += [_losses(rows) for rows in steps.values()]
    return "\n\n".join(sections) or "Not measured yet; run `make gpu-report OUT=folder` on a GPU."


def _losses(rows: Sequence[LaunchRow]) -> str:
    """Formats the kernels of a measured step with the largest losses, under a line of sums."""
    first = rows[0]
    measured_ms, least_ms = (
        sum(getattr(r, f"{kind}_us_per_block") * r.blocks for r in rows) / 1e3
        for kind in ("measured", "least")
    )
    stages = ", ".join(sorted({r.stage for r in rows}))
    stream = "" if first.residual_dtype == first.dtype else f", {first.residual_dtype} stream"
    title = (
        f"**{first.device}**, backend {first.backend}: {first.network}, batch {first.batch}, "
        f"{first.dtype}{stream}, {first.memory}. Blocks without a projection, of the stages "
        f"{stages}, take {measured_ms:.2f} ms, by bytes and launches at least {least_ms:.2f} ms. "
        "The largest losses:"
    )
    return section(title, launches.losses(rows, form="github"), rows)


_FOLDER_BLOCKS = {"converted": converted_block, "rivals": rivals_block, "gpu": gpu_block}
"""Blocks with records from files that `load` does not read."""


def rewrite_block(text: str, name: str, contents: str) -> str:
    """Replaces the contents of a block in `text`.

    Raises:
        ValueError: a marker is missing, occurs twice, or comes in the wrong order.
    """
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    for marker in (start, end):
        if text.count(marker) != 1:
            raise ValueError(f"expected the marker {marker} once, found {text.count(marker)}")
    if text.index(start) > text.index(end):
        raise ValueError(f"expected {start} before {end}")
    return text.split(start)[0] + f"{start}\n{contents}\n{end}" + text.split(end)[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the plots to the folder of the CSV files, and the blocks of every page."""
    parser = measure.parser("bench.report", __doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    a = parser.parse_args(arguments)
    try:
        texts = {a.root / name: (a.root / name).read_text() for name in PAGES}
        blocks = [
            (page, name)
            for page, names in zip(texts, PAGES.values(), strict=True)
            for name in names
        ]
        for page, name in blocks:
            rewrite_block(texts[page], name, "")  # checks the markers before plotting
        devices = load(a.results)
        figures = {d: plots.write_plots(*records, a.results) for d, records in devices.items()}
        for page, name in blocks:
            if name in _FOLDER_BLOCKS:
                contents = _FOLDER_BLOCKS[name](a.results)
            elif name == "headline":
                contents = headline_block(devices, figures, page)
            else:
                contents = device_block(name, devices, figures, page)
            texts[page] = rewrite_block(texts[page], name, contents)
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench.report: {error}") from error
    for page, text in texts.items():
        page.write_text(text)
    count = sum(len(paths) for by_block in figures.values() for paths in by_block.values())
    print(f"{', '.join(PAGES)}: results of {len(devices)} device(s), {count} plots")


if __name__ == "__main__":
    main()
