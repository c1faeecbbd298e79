"""Writes the tables and plots of README.md and docs/: `python -m bench.report`.

All results come from the CSV files in `bench/results`. A generated block is between
`<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; `PAGES` has the blocks of each page.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import gpu_networks, measure, memory, plots
from bench.contenders import ANCHOR, BY_NAME, FAMILIES, Network, is_rival, relative_times
from bench.measure import ROOT
from bench.records import (
    CEILINGS,
    KERNELS,
    LAUNCHES,
    MEMORY,
    MODELS,
    PREDICTED,
    REMOVED,
    Measured,
    ModelRow,
    Row,
    mib,
    number,
    read,
    slug,
    table,
)

PAGES = {
    "README.md": ("headline", "memory-figure"),
    "docs/benchmarks.md": ("steps",),
    "docs/convert.md": ("models",),
    "docs/memory.md": ("memory",),
}
HEADLINE_NETWORK = "resnet-1001"
NOTE = f"Times are scaled by {ANCHOR}'s in the same rounds, except those of CUDA graphs."


def load(folder: Path) -> dict[str, list[Row]]:
    """Reads the rows in the CSV files of a folder, by device: GPUs first.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file has other columns.
    """
    found: dict[str, list[Row]] = {}
    for path in sorted(Path(folder).glob("*.csv")):
        if not path.name.endswith(
            (MODELS, MEMORY, LAUNCHES, CEILINGS, KERNELS, PREDICTED, *REMOVED)
        ):
            for row in read(path, Row):
                found.setdefault(row.device, []).append(row)
    if not found:
        raise FileNotFoundError(
            f"{folder}: expected CSV files of `python -m bench --out {folder}`, found none"
        )
    # The name of a processor ends with its threads.
    return dict(sorted(found.items(), key=lambda item: (item[0].endswith(")"), item[0])))


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups the rows of networks by network, batch and dtype; contenders are in order."""

    def group(r: Row) -> tuple:
        network = Network.named(r.case)
        place = list(FAMILIES).index(network.family), -network.depth  # the deepest first
        return *place, r.batch, r.dtype

    def order(r: Row) -> tuple:
        return *group(r), list(BY_NAME).index(r.contender)

    found = sorted((r for r in rows if r.level == "network"), key=order)
    return [list(members) for _, members in itertools.groupby(found, group)]


def _share_of_eager(row: Row, group: Sequence[Row]) -> str:
    """Formats kept bytes as a share of eager's."""
    eager = next((r.saved_bytes for r in group if r.contender == "eager-channels-last"), None)
    return number(row.saved_bytes / eager if eager and row.saved_bytes else None, ".3f")


def step_table(rows: Sequence[Row]) -> str:
    """Formats all rows of networks: times, bytes, or the reason why there is no time."""
    lines = []
    for group in _groups(rows):
        ratios = relative_times(group)
        for r in group:
            times = r.note.split(":")[0]
            if r.median_ms is not None:
                times = f"{r.median_ms:,.1f} ({r.p20_ms:,.1f}-{r.p80_ms:,.1f})"
            lines.append(
                {
                    "network": r.case,
                    "batch": r.batch,
                    "dtype": r.dtype,
                    "contender": r.contender,
                    "step, ms: median (p20-p80)": times,
                    f"x of {ANCHOR}": number(ratios.get(r.contender), ".2f"),
                    "x of floor": number(r.x_of_floor, ".2f"),
                    "kept, MiB": mib(r.saved_bytes),
                    "of eager": _share_of_eager(r, group),
                    "peak, MiB": mib(r.peak_bytes),
                }
            )
    return table(lines)


def _best_lines(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns a line for each fused contender of a network, for eager and for the best rivals.

    Another rival is left out if a rival is as fast and keeps as little.
    """
    group = [r for r in rows if r.correct == "yes"]
    times = relative_times(group)
    timed = [r for r in group if r.contender in times and r.saved_bytes is not None]
    anchor_ms = next((r.median_ms for r in group if r.contender == ANCHOR), 0)
    rivals = {(times[r.contender], r.saved_bytes) for r in timed if is_rival(r.contender)}
    eager = [r.contender for r in timed if r.contender in ("eager-nchw", "eager-channels-last")]
    best_eager = min(eager, key=lambda name: times[name], default=None)
    lines = []
    for r in sorted(timed, key=lambda r: -r.saved_bytes):
        name, own = r.contender, (times[r.contender], r.saved_bytes)
        if not is_rival(name):
            name = f"**{name}**"
        elif name != best_eager and any(t <= own[0] and k <= own[1] for t, k in rivals - {own}):
            continue
        lines.append(
            {
                "contender": name,
                "keeps": r.memory_mode,
                "kept for the backward, MiB": mib(r.saved_bytes),
                "of eager": _share_of_eager(r, group),
                "peak of a step, MiB": mib(r.peak_bytes),
                "step, ms": number(own[0] * anchor_ms),
            }
        )
    return lines


def best_table(rows: Sequence[Row]) -> str:
    """Formats the lines of every network of a device."""
    lines = []
    for group in _groups(rows):
        first = group[0]
        network = {"network": first.case, "batch": first.batch, "dtype": first.dtype}
        for line in _best_lines(group):
            lines.append({**network, **line})
            network = dict.fromkeys(network, "")  # in the first line alone
    return table(lines, "github")


def _headline_group(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of `HEADLINE_NETWORK` with the batch and dtype of the most contenders."""
    wanted = [r for r in rows if r.case == HEADLINE_NETWORK and r.median_ms and r.saved_bytes]
    return max(_groups(wanted), key=len, default=[])


def headline_table(rows: Sequence[Row]) -> str:
    """Formats the lines of `HEADLINE_NETWORK`, without peaks."""
    group = _headline_group(rows)
    lines = []
    for line in _best_lines(group):
        title = f"{group[0].case}, batch {group[0].batch}, {group[0].dtype}"
        del line["peak of a step, MiB"]
        lines.append({title: line.pop("contender"), **line})
    return f"{table(lines, 'github')}\n\n{NOTE}"


def section(device: str, contents: str, records: Sequence[Measured]) -> str:
    """Formats a device, a table and the origin of its records."""

    def distinct(name: str) -> str:
        return "; ".join(dict.fromkeys(getattr(r, name) for r in records))

    commit, versions, date, command = map(distinct, ("commit", "versions", "date", "command"))
    origin = f"<sub>Measured at commit {commit}; {versions}; {date}; by `{command}`</sub>"
    return "\n\n".join([f"**{device}**", contents, origin])


def _plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the plots of the batch and dtype of the headline."""
    group = _headline_group(rows)
    if not group:
        return []
    batch, dtype = group[0].batch, group[0].dtype
    networks = [r for r in rows if r.level == "network" and (r.batch, r.dtype) == (batch, dtype)]
    shown = [r for r in networks if Network.named(r.case).family == "resnet"]
    return plots.write_plots(shown, folder)


def _image(path: Path, page: Path) -> str:
    return f"![{path.stem}]({os.path.relpath(path, page.parent)})"


def headline_block(folder: Path, page: Path) -> str:
    """Returns the Markdown of the headline: the fastest device, with memory against time."""
    # "NVIDIA H200, backend triton" is not what the package runs by default.
    devices = {name: rows for name, rows in load(folder).items() if ", " not in name}

    def speed(device: str) -> float:
        return max((r.images_per_s or 0.0 for r in _headline_group(devices[device])), default=0)

    device = max(devices, key=speed)
    contents = headline_table(devices[device])
    wanted = f"{HEADLINE_NETWORK}-memory-against-time"
    paths = [p for p in _plots(devices[device], folder) if p.stem.endswith(wanted)]
    return "\n\n".join([f"**{device}**", contents, *(_image(p, page) for p in paths)])


def steps_block(folder: Path, page: Path) -> str:
    """Returns the Markdown of training steps: a table and plots for each device."""
    sections = []
    for device, rows in load(folder).items():
        file = folder / f"{slug(device)}.csv"
        link = f"All rows: [{file.name}]({os.path.relpath(file, page.parent)})"
        images = [_image(path, page) for path in _plots(rows, folder)]
        timed = [r for r in rows if r.level == "network" and r.median_ms is not None]
        contents = "\n\n".join([best_table(rows), *images, link])
        sections.append(section(device, contents, timed))
    return "\n\n".join([NOTE, *sections])


def models_table(rows: Sequence[ModelRow]) -> str:
    """Formats a line per model: its fastest rival, and the modes of the converted model."""
    lines = []
    cases = dict.fromkeys((r.case, r.shape, r.dtype) for r in rows)
    for case in cases:
        own = [r for r in rows if (r.case, r.shape, r.dtype) == case and r.median_ms]
        fused = [r for r in own if r.fused]
        rivals = [r for r in own if not r.fused]
        kept = next((r.saved_bytes for r in rivals if r.contender == "eager"), None)
        if not fused or not kept:
            continue
        best = min(rivals, key=lambda r: r.median_ms)
        line = {
            "model": case[0],
            "input": case[1],
            "dtype": case[2],
            "fused": min(fused, key=lambda r: r.median_ms).fused,
            "eager keeps, MiB": mib(kept),
            "best rival": best.contender,
            "step, ms": number(best.median_ms, ",.0f"),
        }
        for mode in ("store", "rebuild", "checkpoint"):
            in_mode = [r for r in fused if _mode(r.contender) == mode]
            fastest = min(in_mode, key=lambda r: r.median_ms, default=None)
            cell = ""
            if fastest:
                share = number(fastest.saved_bytes and fastest.saved_bytes / kept, ".2f")
                cell = f"{best.median_ms / fastest.median_ms:.2f}x, {share}"
            line[f"{mode}: speed, keeps"] = cell
        lines.append(line)
    return table(lines, "github")


def _mode(contender: str) -> str:
    """Returns the memory mode of a converted model."""
    return next((mode for mode in ("rebuild", "checkpoint") if mode in contender), "store")


def models_block(folder: Path, page: Path) -> str:
    """Returns the Markdown of published models, a section per device."""
    files = [read(path, ModelRow) for path in sorted(folder.glob(f"*{MODELS}"))]
    sections = []
    for rows in files:
        rivals = dict.fromkeys(r.contender for r in rows if r.median_ms and not r.fused)
        measured = f"Rivals that were measured: {', '.join(rivals)}."
        sections.append(section(rows[0].device, f"{models_table(rows)}\n\n{measured}", rows))
    return "\n\n".join(sections)


def _memory_rows(folder: Path) -> dict[str, list[list[ModelRow]]]:
    """Reads the rows of `python -m bench.memory` by device and model, if eager is measured."""
    order = [*memory.CASES, *gpu_networks.CASES]
    found: dict[str, list[list[ModelRow]]] = {}
    for path in sorted(folder.glob(f"*{MEMORY}")):
        by_model: dict[tuple, list[ModelRow]] = {}
        for r in read(path, ModelRow):
            by_model.setdefault((order.index(r.case), r.dtype, r.shape, r.device), []).append(r)
        for key in sorted(by_model):
            group = by_model[key]
            if any(r.contender == memory.PLAIN and _is_measured(r) for r in group):
                found.setdefault(group[0].device, []).append(group)
    return found


def _is_measured(row: ModelRow) -> bool:
    return bool(row.median_ms and row.saved_bytes and row.peak_bytes)


def memory_table(groups: Iterable[Sequence[ModelRow]]) -> str:
    """Formats a line per model: speed, kept bytes and peak of each contender, relative to eager."""
    lines, groups = [], list(groups)
    measured = {r.contender for group in groups for r in group}
    titles = memory.TITLES | memory.ON_GPU
    for group in groups:
        own = {r.contender: r for r in group}
        plain = own[memory.PLAIN]
        line = {
            "model": plain.case,
            "input": plain.shape,
            "dtype": plain.dtype,
            "eager keeps, MiB": mib(plain.saved_bytes),
        }
        for name, title in titles.items():
            if name not in measured:
                continue
            row, cell = own.get(name), ""
            if row is not None and _is_measured(row):
                speed, kept = plain.median_ms / row.median_ms, row.saved_bytes / plain.saved_bytes
                cell = f"{speed:.2f}x, {kept:.2f}, {row.peak_bytes / plain.peak_bytes:.2f}"
            elif row is not None and row.note:
                cell = "failed"
            line[title] = cell
        lines.append(line)
    return table(lines, "github")


def memory_block(folder: Path, page: Path) -> str:
    """Returns the Markdown of the memory of published models, a section per device."""
    sections = []
    for device, groups in _memory_rows(folder).items():
        rows = [r for group in groups for r in group]
        failed = [f"{r.case}, {r.contender}: {r.note}" for r in rows if r.note]
        contents = "\n\n".join([memory_table(groups), *(f"Failed: {line}" for line in failed)])
        sections.append(section(device, contents, rows))
    return "\n\n".join(sections)


def memory_figure_block(folder: Path, page: Path) -> str:
    """Returns the Markdown of the figure of the device with the most models of the figure."""
    shown = {}
    for device, groups in _memory_rows(folder).items():
        own = [g for g in groups if g[0].case in memory.FIGURE and g[0].dtype == "fp32"]
        by_case = {group[0].case: group for group in own}
        shown[device] = [r for group in by_case.values() for r in group if _is_measured(r)]
    device = max(shown, key=lambda name: len({r.case for r in shown[name]}), default=None)
    if device is None or not shown[device]:
        return ""
    path = folder / f"{slug(device)}-memory-of-models.png"
    plots.write_memory_of_models(shown[device], path)
    words = f"Published models on {device}, relative to eager PyTorch in channels_last"
    table_link = "[docs/memory.md](docs/memory.md#published-models) has the table."
    return f"{words}. {table_link}\n\n{_image(path, page)}"


BLOCKS = {
    "headline": headline_block,
    "memory-figure": memory_figure_block,
    "steps": steps_block,
    "models": models_block,
    "memory": memory_block,
}


def rewrite_block(text: str, name: str, contents: str) -> str:
    """Replaces the contents of a block in `text`; without contents, the markers stay.

    Raises:
        ValueError: a marker is missing or occurs twice.
    """
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    for marker in (start, end):
        if text.count(marker) != 1:
            raise ValueError(f"expected the marker {marker} once, found {text.count(marker)}")
    lines = "\n".join(filter(None, [start, contents, end]))
    return text.split(start)[0] + lines + text.split(end)[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the plots to the folder of the CSV files, and the block of every page."""
    parser = measure.parser("bench.report", __doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    a = parser.parse_args(arguments)
    try:
        pages = {a.root / page: names for page, names in PAGES.items()}
        texts = {page: page.read_text() for page in pages}
        for page, names in pages.items():
            for name in names:
                texts[page] = rewrite_block(texts[page], name, BLOCKS[name](a.results, page))
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench.report: {error}") from error
    for page, text in texts.items():
        page.write_text(text)
    print(f"wrote {', '.join(PAGES)}")


if __name__ == "__main__":
    main()
