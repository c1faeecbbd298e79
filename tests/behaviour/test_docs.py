"""Documentation and workflows: links, commands and environment variables exist."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "bench/results/*.md", "examples/*.md")
    for page in ROOT.glob(pattern)
]


def test_relative_links_lead_to_files():
    broken = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
        paths = [link for link in links if not link.startswith("http")]
        broken += [f"{page}: {path}" for path in paths if not (page.parent / path).exists()]
    assert PAGES and not broken


def test_the_reference_has_every_public_name_once():
    pages = ROOT.glob("docs/reference/*.md")
    entries = [n for page in pages for n in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)]
    public = [f"preact_kernels.{name}" for name in pk.__all__]
    assert sorted(e for e in entries if e.count(".") == 1) == sorted(public)


def test_the_first_call_of_the_short_readme_equals_its_expression():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    call, expression = re.findall(r"```python\n(.*?)```", text, re.S)[:2]
    found = {
        "F": F,
        "x": torch.randn(2, 8, 6, 5).double(),
        "conv_weight": torch.randn(16, 8, 3, 3).double(),
        "shortcut": torch.randn(2, 16, 6, 5).double(),
        "bn_weight": torch.rand(8).double(),
        "bn_bias": torch.randn(8).double(),
        "running_mean": torch.randn(8).double(),
        "running_var": torch.rand(8).double(),
    }
    expected = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in found.items()}
    exec(call, found)
    exec(expression, expected)
    for name in ("y", "running_mean", "running_var"):
        torch.testing.assert_close(found[name], expected[name])


def test_every_environment_variable_is_described():
    sources = [ROOT / "setup.py"]
    for folder, pattern in (("preact_kernels", "*.py"), ("bench", "*.py"), ("csrc", "*.cpp")):
        sources += (ROOT / folder).rglob(pattern)
    text = "".join(path.read_text() for path in sources)
    read = set(re.findall(r"""(?:environ.*|getenv\(|= )"(PREACT_KERNELS_[A-Z_]+)\"""", text))
    read -= {"PREACT_KERNELS_NVCC"}  # set by setup.py for its own compiler script
    described = set(
        re.findall(r"`(PREACT_KERNELS_[A-Z_]+)=", (ROOT / "docs/backends.md").read_text())
    )
    assert read == described


def test_every_make_target_that_is_named_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"\.PHONY:((?:.*\\\n)*.*)", makefile)[1].replace("\\", "").split())
    for page in (*PAGES, *WORKFLOWS):
        named = set(re.findall(r"(?:^|run: |`)make ([a-z-]+)", page.read_text(), re.M))
        assert named <= targets, page


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_valid_yaml(path):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    assert {"name", True, "permissions", "jobs"} <= workflow.keys()  # YAML 1.1 reads `on` as True
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and job["runs-on"] and job["steps"]
