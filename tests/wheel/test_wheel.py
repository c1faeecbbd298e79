"""What a wheel contains, and what its library needs: `make wheel` runs this on the wheel."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

import preact_kernels as pk

ROOT = Path(__file__).parents[2]
WHEEL = os.environ.get("PK_WHEEL")  # set by `make wheel`
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
# Libraries of torch, and of every Linux (the policies of manylinux).
LIBRARIES = r"lib(c10|torch|torch_cpu)\.so|lib(stdc\+\+|gcc_s|m|c|pthread|dl)\.so\.\d|ld-linux-.*"
TORCH_SYMBOLS = r"(aoti_)?torch_\w+"  # the LibTorch stable ABI

needs_wheel = pytest.mark.skipif(not WHEEL, reason="`make wheel` runs it")


@needs_wheel
def test_a_wheel_has_the_package_its_cpu_library_and_its_metadata():
    stem = f"preact_kernels-{pk.__version__}"
    tag = r"py3-none-manylinux_2_\d+_(x86_64|aarch64)(\.manylinux\w+)*"
    assert re.fullmatch(rf"{re.escape(stem)}-{tag}\.whl", Path(WHEEL).name)
    package = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("preact_kernels/**/*.py")}
    package |= {"preact_kernels/py.typed", "preact_kernels/_cpu.so"}
    with zipfile.ZipFile(WHEEL) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/")}
    assert found == package | {f"{stem}.dist-info/{name}" for name in METADATA}


@pytest.fixture(params=["in place", pytest.param("wheel", marks=needs_wheel)])
def library(request, tmp_path):
    if request.param == "wheel":
        with zipfile.ZipFile(WHEEL) as archive:
            return archive.extract("preact_kernels/_cpu.so", tmp_path)
    path = ROOT / "preact_kernels" / "_cpu.so"
    if not path.exists():
        pytest.skip("_cpu.so was not built")
    return path


def readelf(option, library):
    return subprocess.check_output(["readelf", "-W", option, library], text=True)


def test_a_library_needs_torch_and_no_python(library):
    dynamic = readelf("--dynamic", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed and not [name for name in needed if not re.fullmatch(LIBRARIES, name)]
    assert not re.search("RPATH|RUNPATH|TEXTREL", dynamic)
    # Undefined symbols without a version, except weak ones.
    symbols = re.findall(r" GLOBAL +DEFAULT +UND (\S+)$", readelf("--dyn-syms", library), re.M)
    assert symbols and not [name for name in symbols if not re.fullmatch(TORCH_SYMBOLS, name)]


def test_a_library_has_no_executable_stack(library):
    assert re.search(r"GNU_STACK .* RW +0x", readelf("--program-headers", library))


def test_a_library_does_not_contain_the_paths_that_it_was_built_from(library):
    content = Path(library).read_bytes()
    assert b"csrc/cpu/library.cpp" in content  # error messages have it
    for folder in (ROOT, Path(torch.__file__).parents[1]):
        assert str(folder).encode() not in content
