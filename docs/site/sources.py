"""Writes build/docs, from which the site is built: docs/, and the files that its pages link to.

Links in Markdown are relative paths in the repository, as code hosts read them. In the site,
`CONTRIBUTING.md` is the page `repository/CONTRIBUTING.md`. A linked source file becomes a page with
its text, and a linked folder its README.md or a list of its files. The exit status is 1 if a link
or the navigation leads to no file, or a page is not in the navigation. The build of the site checks
anchors.
"""

import base64
import json
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import latex2mathml.converter
import tomllib
from pygments.lexers import find_lexer_class_for_filename

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "docs"
# Parts of docs/ that are no pages: this script, and what the study leaves beside its reports.
LEFT_OUT = ("*.py", "__pycache__", "runs", "tensorboard", "checkpoint.pt", ".lock")

# A fenced block of code, or the path of a link.
FENCE_OR_PATH = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)\s*$|(?<=\]\()(?P<path>[^()\s#]+)(?=[)#])", re.M | re.S
)
# A formula of a notebook.
FORMULA = re.compile(r"(?P<dollars>\${1,2})(?P<latex>[^$]+)(?P=dollars)")


def main() -> int:
    """Writes all files anew; returns the exit status."""
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(ROOT / "docs", OUT, ignore=shutil.ignore_patterns(*LEFT_OUT))
    pages = {f"docs/{p.relative_to(OUT).as_posix()}" for p in OUT.glob("**/*.md")}
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    named = {source_of(uri) for uri in uris(config["project"]["nav"])}
    broken = [f"{path} is not in the navigation" for path in sorted(pages - named)]
    broken += [f"the navigation names {p}" for p in sorted(named) if not (ROOT / p).exists()]
    waiting = sorted(path for path in pages | named if (ROOT / path).exists())
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        place(path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".png"):
            shutil.copyfile(ROOT / path, place(path))
            continue
        text, linked = page(path)
        if path not in named:
            text = f"---\nsearch:\n  exclude: true\n---\n\n{text}"
        place(path).write_text(text)
        for target in linked:
            if not (ROOT / target).exists():
                broken.append(f"{path} links to {target}, which does not exist")
            elif target not in seen and not target.startswith("docs/"):
                waiting.append(target)
            seen.add(target)
    print("\n".join(broken), file=sys.stderr)
    return 1 if broken else 0


def uris(navigation: list | dict | str) -> Iterator[str]:
    """Yields the pages that the navigation names."""
    if isinstance(navigation, str):
        yield navigation
        return
    for entry in navigation.values() if isinstance(navigation, dict) else navigation:
        yield from uris(entry)


def source_of(uri: str) -> str:
    """Returns the file of the repository that a page of the navigation shows."""
    is_outside = uri.startswith("repository/")
    return uri.removeprefix("repository/") if is_outside else f"docs/{uri}"


def place(path: str) -> Path:
    """Returns where a file or folder of the repository is in build/docs."""
    if path.startswith("docs/"):
        return OUT / path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return OUT / "repository" / path / "README.md"
    suffix = "" if path.endswith((".md", ".png")) else ".md"
    return OUT / "repository" / (path + suffix)


def page(path: str) -> tuple[str, list[str]]:
    """Returns the page of a file or folder, and the paths that it links to."""
    source = ROOT / path
    folder = path if source.is_dir() else posixpath.dirname(path)
    targets = []

    def in_site(match: re.Match[str]) -> str:
        link = match["path"]
        if link is None or "://" in link:
            return match[0]
        targets.append(posixpath.normpath(posixpath.join(folder, link)))
        return posixpath.relpath(place(targets[-1]), place(path).parent)

    if source.is_dir() and (source / "README.md").exists():
        source /= "README.md"
    if source.is_dir():
        names = sorted(p.name for p in source.iterdir() if p.is_file())
        text = f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    elif source.suffix == ".md":
        text = source.read_text()
    elif source.suffix == ".ipynb":
        text = notebook(source, place(path).parent)
    else:
        lexer = find_lexer_class_for_filename(path)
        language = lexer.aliases[0] if lexer else "text"
        text = f"# {path}\n\n````{language}\n{source.read_text()}````\n"
    return FENCE_OR_PATH.sub(in_site, text), targets


def mathml(formula: re.Match[str]) -> str:
    """Returns a formula as browsers read it."""
    latex = formula["latex"].strip()
    if formula["dollars"] == "$$":
        return latex2mathml.converter.convert(latex, display="block")
    # Without the span, a formula that begins a line is a paragraph.
    return f"<span>{latex2mathml.converter.convert(latex)}</span>"


def notebook(source: Path, folder: Path) -> str:
    """Returns a notebook as Markdown; its plots become files in a folder."""
    parts = []
    for cell in json.loads(source.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(FORMULA.sub(mathml, text))
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{source.stem}-{len(parts)}.png"
                (folder / name).write_bytes(base64.b64decode("".join(data["image/png"])))
                parts.append(f'<img alt="output" src="{name}">')
            elif "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
