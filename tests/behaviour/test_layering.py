"""Calls go down, never up, and importing the package loads nothing that it need not."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "preact_kernels"
# Higher layers may import lower ones. Modules outside the layers may import all of them.
LAYERS = {"torch_compat": -1, "kernels": 0, "ops": 1, "modules": 2, "models": 3}
# By backends, and none themselves.
SHARED = ("contract", "flat_ops", "native", "pytorch_conv", "running_stats")
FILES = sorted(PACKAGE.rglob("*.py"))


def layer(parts):
    """The layer of a module of this package, given the names behind `preact_kernels`."""
    return LAYERS.get(parts[0], len(LAYERS)) if parts else len(LAYERS) + 1


def imports(path):
    """Modules of this package that a file imports anywhere in it, as names behind the package's."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package == "preact_kernels":
                yield parts


def test_there_are_files_of_every_layer():
    assert {p.relative_to(PACKAGE).with_suffix("").parts[0] for p in FILES} >= LAYERS.keys()


def test_no_file_imports_from_above():
    above = []
    for path in FILES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        own = layer([] if path == PACKAGE / "__init__.py" else parts)
        above += [(path.name, ".".join(p)) for p in imports(path) if layer(p) > own]
    assert not above


def test_no_backend_imports_another():
    others = []
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        own = path.relative_to(PACKAGE / "kernels").with_suffix("").parts[0]
        allowed = [[own], *([name] for name in SHARED)]
        found = [p for p in imports(path) if p[0] == "kernels" and p[1:2] not in allowed]
        others += [(path.name, ".".join(p)) for p in found]
    assert not others


def test_no_file_is_long_or_named_for_nothing():
    assert not [p for p in FILES if p.stem in ("utils", "helpers", "common", "misc")]
    assert not [p for p in FILES if len(p.read_text().splitlines()) > 500]


def run_python(code):
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},  # as a user runs it
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


LOADED = """
import sys
import torch
before = set(sys.modules)
import preact_kernels
for name in sorted(set(sys.modules) - before):
    print("study" if name.startswith("preact_kernels.study") else name.partition(".")[0])
for line in open("/proc/self/maps"):
    if "_cuda" in line and "preact_kernels" in line:
        print(line.split()[-1])
"""


def test_importing_loads_torch_and_the_package_alone():
    loaded = set(run_python(LOADED)) - sys.stdlib_module_names
    assert loaded <= {"preact_kernels", "torch"}


BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({names!r}))  # as if not installed
import torch
import preact_kernels as pk
x = torch.randn(2, 3, 8, 8)
pk.preact_resnet(29)(x).sum().backward()
print(*pk.available_backends())
"""


@pytest.mark.parametrize("names", [["triton"], ["triton", "numpy", "matplotlib", "sklearn"]])
def test_training_needs_neither_triton_nor_any_other_package(names):
    assert "reference" in run_python(BLOCKED.format(names=names))


KERNELS_ALONE = """
import sys, types
package = types.ModuleType("preact_kernels")
package.__path__ = [{path!r}]
sys.modules["preact_kernels"] = package
import preact_kernels.kernels.reference
import preact_kernels.kernels.cpu
allowed = ("preact_kernels.kernels", "preact_kernels.torch_compat")
print(*(n for n in sys.modules if n.startswith("preact_kernels.") and not n.startswith(allowed)))
"""


def test_kernels_can_be_imported_without_what_is_above():
    assert run_python(KERNELS_ALONE.format(path=str(PACKAGE))) == []
