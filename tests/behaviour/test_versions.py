"""The versions that are served and tested are the same wherever they are named."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import preact_kernels as pk
from preact_kernels.torch_compat import OLDEST_TORCH

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
README = (ROOT / "README.md").read_text()
OLDEST = ".".join(map(str, OLDEST_TORCH))


@pytest.mark.parametrize("name", ["python", "torch", "triton"])
def test_the_readme_quotes_the_range_that_is_tested_and_developed_with(name):
    tested = re.search(rf"^tested-{name} = \[(.*)\]", PYPROJECT, re.M)[1]
    versions = re.findall(r'"([\d.]+)"', tested)
    assert versions == sorted(versions, key=lambda v: tuple(map(int, v.split("."))))
    title = name if name == "torch" else name.title()
    assert f"{title} {versions[0]} to {versions[-1]}" in README
    if name == "python":
        assert f'requires-python = ">={versions[0]}"' in PYPROJECT
        return
    requirements = (ROOT / "requirements-dev.txt").read_text()
    assert re.search(rf"^{name}==(.*)$", requirements, re.M)[1] in versions
    if name == "torch":
        assert versions[0].startswith(f"{OLDEST}.")
        assert f'"torch>={OLDEST}"' in PYPROJECT
        (developed,) = re.findall(r"^torch==(.*)$", requirements, re.M)
        workflow = (ROOT / ".github/workflows/release.yml").read_text()
        for text in (PYPROJECT, workflow):  # what builds and checks the wheels of a release
            assert f"pip install torch=={developed} " in text
        assert f'pip install "torch>={OLDEST}"' in README


def failure_of_build(folder):
    """What building prints if a folder comes first in the path of modules."""
    process = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", folder],
        cwd=ROOT,
        env={**os.environ, "PREACT_KERNELS_NATIVE": "0", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    return process.stderr


def test_building_with_an_older_torch_or_setuptools_is_an_error_in_one_line(tmp_path):
    metadata = tmp_path / "torch-2.10.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.1\n")
    assert failure_of_build(tmp_path) == (
        f"preact_kernels needs torch {OLDEST} or later, found torch 2.10.1: "
        f"pip install 'torch>={OLDEST}'\n"
    )
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'\nExtension = setup = None\n")
    assert failure_of_build(tmp_path) == (
        "preact_kernels needs setuptools 77 or later, found setuptools 65.5.0: "
        "pip install 'setuptools>=77'\n"
    )


def test_a_release_needs_the_tag_of_its_version_and_a_date_in_the_changelog(tmp_path):
    for name in ("Makefile", "pyproject.toml", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "preact_kernels").mkdir()
    (tmp_path / "preact_kernels/__init__.py").write_text('__version__ = "0.1.0"\n')

    def check_release(tag, section):
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{section}\n")
        command = ["make", "-s", "check-release", f"TAG={tag}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr

    assert check_release("v0.1.0", "## [0.1.0] - 2026-11-27") == ""
    assert "TAG: expected v0.1.0" in check_release("v0.1.1", "## [0.1.0] - 2026-11-27")
    for section in ("[0.1.0] - unreleased", "[0x1.0] - 2026-11-27", "[0.2.0] - 2026-11-27"):
        assert "CHANGELOG.md: expected" in check_release("v0.1.0", f"## {section}")


BUILD_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it is an error
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""


def test_the_distributions_have_the_version_and_what_building_and_testing_need(tmp_path):
    """An sdist and a wheel, built from a copy of the tree without importing torch."""
    tree = tmp_path / "tree"
    built = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "out", "*.so", "*.egg-info", "__pyc*"
    )
    shutil.copytree(ROOT, tree, ignore=built)
    (tree / "preact_kernels" / "_cpu.so").touch()  # built in place; not for an uncompiled wheel
    environment = {**os.environ, "PREACT_KERNELS_NATIVE": "0"}
    command = [sys.executable, "-c", BUILD_WITHOUT_TORCH]
    process = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    stem = f"preact_kernels-{pk.__version__}"
    with tarfile.open(tree / "dist" / f"{stem}.tar.gz") as archive:
        in_sdist = {name.removeprefix(f"{stem}/") for name in archive.getnames()}
    assert {
        "csrc/cuda/nvcc.sh",
        "preact_kernels/py.typed",
        "tests/conftest.py",
        "testbed/cuda_on_host/device.h",
        "bench/report.py",
        "docs/benchmarks.md",
        "examples/memory_budget.py",
        "requirements-test.txt",
        "Makefile",
    } <= in_sdist
    sources = (path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    assert {str(path.relative_to(ROOT)) for path in sources} <= in_sdist
    (wheel,) = (tree / "dist").glob(f"{stem}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    assert "preact_kernels/py.typed" in in_wheel
    tops = {name.split("/")[0] for name in in_wheel}
    assert tops == {"preact_kernels", f"{stem}.dist-info"}
    assert not [name for name in in_sdist | in_wheel if name.endswith((".so", ".pyc"))]
