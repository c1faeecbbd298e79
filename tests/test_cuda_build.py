"""The CUDA library is built for every architecture, and no kernel of it spills registers.

Read is what ptxas said as the library was built (csrc/cuda/nvcc.sh keeps it beside each object);
`build/cuda/ptxas.csv` is the table.
"""

import csv
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "build" / "cuda" / "ptxas.csv"
COLUMNS = (
    "source", "kernel", "architecture", "registers", "spill stores", "spill loads",
    "stack bytes", "static shared bytes",
)  # fmt: skip

if shutil.which("nvcc") is None and shutil.which("/usr/local/cuda/bin/nvcc") is None:
    pytest.skip("nvcc is not installed", allow_module_level=True)
if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
    pytest.skip("without ninja torch calls nvcc past csrc/cuda/nvcc.sh", allow_module_level=True)
if os.environ.get("PREACT_KERNELS_CUDA") == "0":
    pytest.skip("PREACT_KERNELS_CUDA=0", allow_module_level=True)

SOURCES = sorted(path.name for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
WITHOUT_KERNELS = {"bn_relu_conv.cu", "library.cu"}
ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def parse(source, text):
    """Rows of the table out of what `nvcc -Xptxas=-v` said."""
    for found in ENTRY.finditer(text):
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        numbers = (found[n] for n in ("registers", "stores", "loads", "stack"))
        yield dict(
            zip(
                COLUMNS,
                (
                    source,
                    readable(found["kernel"]),
                    found["architecture"],
                    *map(int, numbers),
                    int(shared[1]) if shared else 0,
                ),
                strict=True,
            )
        )


def readable(mangled):
    """Name and template arguments of a kernel, out of its mangled name."""
    names = re.match(r"_ZN14preact_kernels4cuda\d+([a-z_0-9]+_kernel)I(.*)EEv", mangled)
    if not names:
        return mangled
    arguments = re.sub(r"13__nv_bfloat16", "bf16 ", names[2])
    arguments = re.sub(r"6__half", "fp16 ", arguments)
    arguments = re.sub(r"^f(?=L)", "fp32 ", arguments)
    arguments = re.sub(r"L[ib](\d+)E?", r"\1 ", arguments)
    return f"{names[1]}<{', '.join(arguments.split())}>"


@pytest.fixture(scope="module")
def rows():
    """The table, of the library as it is built now."""
    scripts = Path(sys.executable).parent  # where ninja is, in a virtual environment
    process = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=ROOT,
        env={
            **os.environ,
            "TORCH_CUDA_ARCH_LIST": "",
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    found = []
    for source in SOURCES:
        (log,) = ROOT.glob(f"build/temp.*/csrc/cuda/{Path(source).stem}.o.ptxas")
        found += parse(source, log.read_text())
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(found)
    return found


def test_every_kernel_is_compiled_for_every_architecture(rows):
    kernels = {}
    for row in rows:
        kernels.setdefault((row["source"], row["kernel"]), set()).add(row["architecture"])
    assert kernels
    assert {source for source, _ in kernels} == set(SOURCES) - WITHOUT_KERNELS
    assert all(found == {"sm_80", "sm_90", "sm_100"} for found in kernels.values())


def test_no_kernel_spills(rows):
    spilling = [
        f"{r['kernel']} for {r['architecture']}: {r['spill stores']} and {r['spill loads']} bytes"
        for r in rows
        if r["spill stores"] or r["spill loads"]
    ]
    assert not spilling, "\n".join(spilling)


def test_kernels_take_their_shared_memory_at_launch(rows):
    assert not [r["kernel"] for r in rows if r["static shared bytes"]]


@pytest.fixture
def setup_file(monkeypatch):
    """The functions of setup.py, which builds nothing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["setup.py", "egg_info"])
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME)
    for name in ("PREACT_KERNELS_NVCC", "PYTORCH_NVCC"):  # cuda_extension sets them
        monkeypatch.setenv(name, "nvcc")
    monkeypatch.setenv("PREACT_KERNELS_CUDA", "1")
    return runpy.run_path("setup.py")


ARCHITECTURES = {
    "": ["80,sm_80", "90,sm_90", "100,sm_100", "100,compute_100"],
    "9.0": ["90,sm_90"],
    "7.5 Hopper+PTX": ["90,sm_90", "90,compute_90"],
    "8.0;9.0+PTX": ["80,sm_80", "90,sm_90", "90,compute_90"],
    "8.0+PTX 8.6; 12.0a": ["80,sm_80", "86,sm_86", "120a,sm_120a", "80,compute_80"],
}


@pytest.mark.parametrize("names", ARCHITECTURES, ids=repr)
def test_torch_cuda_arch_list_chooses_the_architectures(names, setup_file, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
    flags = setup_file["cuda_extension"]().extra_compile_args["nvcc"]
    found = [f.removeprefix("-gencode=arch=compute_") for f in flags if "-gencode" in f]
    assert found == [a.replace(",", ",code=") for a in ARCHITECTURES[names]]


@pytest.mark.parametrize("names", ["Kepler", "90", "7.0;7.5+PTX", "9.0-PTX", ";"])
def test_an_architecture_that_cannot_be_built_is_named(names, setup_file, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST: expected .*, got ") as raised:
        setup_file["cuda_extension"]()
    assert str(raised.value).endswith(f'got "{names}"')
    monkeypatch.delenv("PREACT_KERNELS_CUDA")  # then only the CPU library is built
    assert setup_file["cuda_extension"]() is None
    assert f'got "{names}"' in capsys.readouterr().err


def test_an_architecture_that_nvcc_lacks_is_named(setup_file, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;99.0")
    with pytest.raises(SystemExit, match="does not know compute_990"):
        setup_file["cuda_extension"]()


SPILL = """
ptxas info    : Compiling entry function '_ZN14preact_kernels4cuda15bn_stats_kernelI13__nv_bfloat16\
Li8EEEvNS0_13BnStatsParamsIT_EE' for 'sm_80'
ptxas info    : Function properties for _ZN14preact_kernels4cuda15bn_stats_kernel
    216 bytes stack frame, 340 bytes spill stores, 276 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 1024 bytes smem, 408 bytes cmem[0]
"""


def test_a_spill_is_read():
    (row,) = parse("bn_stats.cu", SPILL)
    assert tuple(row.values()) == (
        "bn_stats.cu", "bn_stats_kernel<bf16, 8>", "sm_80", 128, 340, 276, 216, 1024,
    )  # fmt: skip


def test_the_library_names_neither_a_python_nor_a_version_of_torch(rows):
    (library,) = (ROOT / "preact_kernels").glob("_cuda*.so")
    assert library.name == "_cuda.so"
    needed = subprocess.check_output(["readelf", "-d", library], text=True)
    for name in re.findall(r"NEEDED.*\[(.*)\]", needed):
        assert not re.match(r"lib(torch_python|torch_cuda|cudart|c10_cuda)", name), name
