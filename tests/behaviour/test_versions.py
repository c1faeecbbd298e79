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
OLDEST = ".".join(map(str, OLDEST_TORCH))


def versions_of(name):
    """The versions in pyproject.toml, the oldest first."""
    return re.findall(r'"([\d.]+)"', re.search(rf"^tested-{name} = \[(.*)\]", PYPROJECT, re.M)[1])


def numbers(version):
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("name", ["python", "torch", "triton"])
def test_the_readme_quotes_the_range_that_is_tested(name):
    versions = versions_of(name)
    assert versions == sorted(versions, key=numbers)
    title = name if name == "torch" else name.title()
    assert f"{title} {versions[0]} to {versions[-1]}" in (ROOT / "README.md").read_text()


def test_the_oldest_torch_is_tested_and_required():
    assert numbers(versions_of("torch")[0])[:2] == OLDEST_TORCH
    assert f'"torch>={OLDEST}"' in PYPROJECT
    assert f'pip install "torch>={OLDEST}"' in (ROOT / "README.md").read_text()


def test_the_oldest_python_is_tested_and_required():
    assert f'requires-python = ">={versions_of("python")[0]}"' in PYPROJECT


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_development_uses_a_version_that_is_tested(name):
    requirements = (ROOT / "requirements-dev.txt").read_text()
    assert re.search(rf"^{name}==(.*)$", requirements, re.M)[1] in versions_of(name)


def run(arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PREACT_KERNELS_NATIVE": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("version", ["2.10.1+cpu", "1.13.0", "2.9.0a0+git1234567"])
def test_importing_beside_an_older_torch_is_an_error_in_one_line(version):
    process = run(["-c", f"import torch; torch.__version__ = {version!r}; import preact_kernels"])
    last = process.stderr.splitlines()[-1]
    assert last == f"ImportError: preact_kernels needs torch {OLDEST} or later, got torch {version}"


def test_a_later_torch_is_imported():
    process = run(["-c", "import torch; torch.__version__ = '3.0.0'; import preact_kernels"])
    assert process.returncode == 0, process.stderr


def test_building_beside_an_older_torch_is_an_error_in_one_line(tmp_path):
    metadata = tmp_path / "torch-2.10.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.1\n")
    process = run(["setup.py", "-q", "build", "--build-base", tmp_path], PYTHONPATH=str(tmp_path))
    assert process.stderr == (
        f"preact_kernels needs torch {OLDEST} or later, found torch 2.10.1: "
        f"pip install 'torch>={OLDEST}'\n"
    )
    assert process.returncode == 1


def test_building_with_an_older_setuptools_is_an_error_in_one_line(tmp_path):
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'\nExtension = setup = None\n")
    process = run(["setup.py", "-q", "build"], PYTHONPATH=str(tmp_path))
    assert process.stderr == (
        "preact_kernels needs setuptools 77 or later, found setuptools 65.5.0: "
        "pip install 'setuptools>=77'\n"
    )
    assert process.returncode == 1


BUILD_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it is an error
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Folder with an sdist and a wheel, built from a copy of the tree without importing torch."""
    tree = tmp_path_factory.mktemp("sdist") / "tree"
    built = shutil.ignore_patterns(".git", ".venv*", "build", "out", "*.so", "*.egg-info", "__pyc*")
    shutil.copytree(ROOT, tree, ignore=built)
    (tree / "preact_kernels" / "_cpu.so").touch()  # built in place; not for an uncompiled wheel
    environment = {**os.environ, "PREACT_KERNELS_NATIVE": "0"}
    command = [sys.executable, "-c", BUILD_WITHOUT_TORCH]
    process = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return tree / "dist"


def test_the_sdist_has_the_version_and_what_building_and_testing_need(distributions):
    stem = f"preact_kernels-{pk.__version__}"
    with tarfile.open(distributions / f"{stem}.tar.gz") as archive:
        names = {name.removeprefix(f"{stem}/") for name in archive.getnames()}
    assert {
        "csrc/cuda/nvcc.sh",
        "preact_kernels/py.typed",
        "tests/conftest.py",
        "tests/kernels/cuda_on_host/device.h",
        "bench/report.py",
        "docs/benchmarks.md",
        "examples/memory_budget.py",
        "requirements-test.txt",
        "Makefile",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_wheel_has_the_version_and_is_typed(distributions):
    (wheel,) = distributions.glob(f"preact_kernels-{pk.__version__}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "preact_kernels/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "preact_kernels",
        f"preact_kernels-{pk.__version__}.dist-info",
    }
    assert not [name for name in names if name.endswith(".so")]
