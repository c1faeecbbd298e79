"""What nvcc and ptxas report of the CUDA library as it was built, and what setup.py builds it for.

csrc/cuda/nvcc.sh keeps a report beside each object; `build/cuda/ptxas.csv` is the table.
"""

import csv
import itertools
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from preact_kernels.kernels import cuda
from testbed import cuda_programs

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "build" / "cuda" / "ptxas.csv"
COLUMNS = (
    "source", "kernel", "architecture", "registers", "spill stores", "spill loads",
    "stack bytes", "static shared bytes",
)  # fmt: skip

needs_nvcc = pytest.mark.skipif(cuda_programs.nvcc() is None, reason="nvcc is not installed")
SOURCES = sorted(path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
WITHOUT_KERNELS = {"norm_act_conv"}
ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def parse(source, text):
    """Rows of the table out of what `nvcc -Xptxas=-v` said of the file `source`."""
    for found in ENTRY.finditer(text):
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        numbers = (int(found[n]) for n in ("registers", "stores", "loads", "stack"))
        name, static = readable(found["kernel"]), int(shared[1]) if shared else 0
        values = (source, name, found["architecture"], *numbers, static)
        yield dict(zip(COLUMNS, values, strict=True))


def readable(mangled):
    """Name and template arguments of a kernel, out of its mangled name."""
    names = re.match(r"_ZN14preact_kernels4cuda\d+([a-z_0-9]+_kernel)(?:I(.*)EEv|E)", mangled)
    if not names:
        return mangled
    if names[2] is None:
        return names[1]
    arguments = re.sub(r"13__nv_bfloat16", "bf16 ", names[2])
    arguments = re.sub(r"6__half", "fp16 ", arguments)
    arguments = re.sub(r"^f(?=L)", "fp32 ", arguments)
    arguments = re.sub(r"L[ib](\d+)E?", r"\1 ", arguments)
    return f"{names[1]}<{', '.join(arguments.split())}>"


LIBRARY = ROOT / "preact_kernels" / cuda.LIBRARY


@pytest.fixture(scope="module")
def targets():
    """What the library was compiled for; without a GPU it cannot be loaded, and asked."""
    if not LIBRARY.exists():
        pytest.skip(f"the package was installed without {cuda.LIBRARY}")
    (text,) = re.findall(rb"\0((?:_?(?:sm|compute)_\d+[af]?)+)\0", LIBRARY.read_bytes())
    symbols = subprocess.check_output(["readelf", "--dyn-syms", "--wide", LIBRARY], text=True)
    assert re.search(r"FUNC +GLOBAL +DEFAULT +\d+ preact_kernels_cuda_targets", symbols)
    return cuda.parse_targets(text.decode())


@pytest.fixture(scope="module")
def rows(targets):
    """The table."""
    logs = {source: [*ROOT.glob(f"build/temp.*/csrc/cuda/{source}.o.ptxas")] for source in SOURCES}
    if not all(logs.values()):
        pytest.skip("the CUDA library was not built here, or without ninja")
    found = []
    for source, (log,) in logs.items():
        found += parse(source, log.read_text())
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(found)
    return found


def test_every_kernel_is_compiled_for_every_target(rows, targets):
    kernels = {}
    for row in rows:
        kernels.setdefault((row["source"], row["kernel"]), set()).add(row["architecture"])
    assert {source for source, _ in kernels} == set(SOURCES) - WITHOUT_KERNELS
    compiled = {target for target in targets if target.startswith("sm_")}
    assert compiled
    assert all(found == compiled for found in kernels.values())


# Bytes of local memory that a kernel may use. A block with an image of 32x32 pixels has 512
# threads, which have at most 128 registers each; the residual stream takes 64 of them.
ALLOWED_BYTES = {
    f"resident_{direction}_kernel<{dtype}, 16>": count
    for direction, count in (("forward", 96), ("backward", 192))
    for dtype in ("bf16", "fp16")
}


def test_no_kernel_uses_local_memory(rows):
    """Neither spilled registers nor an array that is indexed by a variable."""
    columns = ("spill stores", "spill loads", "stack bytes")
    wrong = [
        row for row in rows if max(row[n] for n in columns) > ALLOWED_BYTES.get(row["kernel"], 0)
    ]
    assert not wrong
    assert {row["kernel"] for row in rows} >= ALLOWED_BYTES.keys()


def sass_of(source, rows, targets):
    """The machine code of each kernel of a source, for sm_90."""
    if "sm_90" not in targets:
        pytest.skip("the library was not compiled for sm_90")
    tool = cuda_programs.cuobjdump()
    (compiled,) = ROOT.glob(f"build/temp.*/csrc/cuda/{source}.o")
    sass = subprocess.check_output([tool, "-sass", "-arch", "sm_90", compiled], text=True)
    functions = sass.split("Function : ")[1:]
    names = {readable(function.split("\n")[0]): function for function in functions}
    assert {row["kernel"] for row in rows if row["source"] == source} == names.keys()
    return names


# Elementwise kernels with vectors of more than a word, and bytes of their vectors.
STORES = {
    "any_norm_act_forward_kernel<bf16, 8>": 16,
    "any_norm_act_forward_kernel<fp32, 4>": 16,
    "any_norm_act_residual_forward_kernel<bf16, 8>": 16,
    "any_norm_input_gradient_kernel<bf16, 4>": 8,
    "any_norm_input_gradient_kernel<fp32, 4>": 16,
}


def test_a_vector_is_stored_at_once(rows, targets):
    kernels = sass_of("any_norm_act", rows, targets)
    wrong = {}
    for name, vector_bytes in STORES.items():
        stores = re.findall(r"STG\.E(\.\d+)?", kernels[name])
        if not stores or set(stores) != {f".{8 * vector_bytes}"}:
            wrong[name] = stores
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("bn_stats"),
        pytest.param("residual_add"),
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("norm_act", "any_norm_act")),
        pytest.param("group_stats", marks=pytest.mark.slow),
    ],
)
def test_on_hopper_a_memory_bound_kernel_reads_nothing_before_it_waits(rows, targets, source):
    for name, function in sass_of(source, rows, targets).items():
        wait, start = (function.find(i) for i in ("ACQBULK", "PREEXIT"))
        assert 0 < wait < start, name
        assert not re.search(r"LDG|STG|RED|ATOM", function[:wait]), name


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, marks=[pytest.mark.slow] * (not source.endswith("_bfloat16")))
        for source in SOURCES
        if source.startswith("norm_act_conv_")
    ],
)
def test_on_hopper_a_kernel_waits_for_those_before_it_and_copies_tiles_after_that(
    rows, targets, source
):
    """What kernels launched as dependent must do; see `wait_for_predecessors`."""
    for name, function in sass_of(source, rows, targets).items():
        wait, start, copy = (function.find(i) for i in ("ACQBULK", "PREEXIT", "LDGSTS"))
        assert 0 < wait < start, name
        before = function[:wait]
        assert "RED.E" not in before and "STG" not in before, name
        assert "LDGSTS" in function[wait:], name
        if "weight_gradients" in name or source.endswith("_float"):  # others copy weights first
            assert wait < copy, name


def test_kernels_take_their_shared_memory_at_launch(rows):
    assert not [r["kernel"] for r in rows if r["static shared bytes"]]


def test_the_library_names_neither_a_python_nor_a_version_of_torch(targets):
    (library,) = (ROOT / "preact_kernels").glob("_cuda*.so")
    assert library == LIBRARY
    needed = subprocess.check_output(["readelf", "-d", library], text=True)
    for name in re.findall(r"NEEDED.*\[(.*)\]", needed):
        assert not re.match(r"lib(torch_python|torch_cuda|cudart|c10_cuda)", name), name


@pytest.fixture
def setup_file(monkeypatch):
    """The functions of setup.py, which builds nothing."""
    monkeypatch.chdir(ROOT)
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


@needs_nvcc
def test_torch_cuda_arch_list_chooses_the_architectures(setup_file, monkeypatch):
    for names, expected in ARCHITECTURES.items():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
        flags = setup_file["cuda_extension"]().extra_compile_args["nvcc"]
        found = [f.removeprefix("-gencode=arch=compute_") for f in flags if "-gencode" in f]
        assert found == [a.replace(",", ",code=") for a in expected], names
        codes = "_".join(a.partition(",")[2] for a in expected)
        assert f"-DPREACT_KERNELS_TARGETS={codes}" in flags


@needs_nvcc
def test_only_the_file_that_holds_the_digest_of_all_sources_is_compiled_with_it(setup_file):
    flags = setup_file["cuda_extension"]().extra_compile_args
    sources, headers = setup_file["find_cuda_files"]()
    assert {Path(source).stem for source in sources} == {*SOURCES, "library"}
    assert f"-DPREACT_KERNELS_SOURCES={setup_file['digest'](sources + headers)}" in flags["cxx"]
    assert f"-DPREACT_KERNELS_HEADERS={setup_file['digest'](headers)}" in flags["nvcc"]
    assert not [flag for flag in flags["nvcc"] if "SOURCES" in flag]


RUNS_ON = {
    "sm_80": ["8.0", "8.6"],
    "sm_86": ["8.6"],
    "sm_90": ["9.0"],
    "sm_90a": ["9.0"],
    "sm_100": ["10.0", "10.3"],
    "sm_100a": ["10.0"],
    "sm_100f": ["10.0", "10.3"],
    "compute_80": ["8.0", "8.6", "9.0", "10.0", "10.3", "12.0"],
    "compute_90": ["9.0", "10.0", "10.3", "12.0"],
    "compute_90a": ["9.0"],
}


def test_a_gpu_for_which_nothing_was_compiled_is_refused():
    capabilities = ("8.0", "8.6", "9.0", "10.0", "10.3", "12.0")
    for target, capability in itertools.product(RUNS_ON, capabilities):
        major, minor = map(int, capability.split("."))
        refusal = cuda.target_refusal((major, minor), ["sm_75", target])
        message = (
            f"_cuda.so was compiled for sm_75, {target}, and the GPU has compute capability "
            f'{capability}; build it again with TORCH_CUDA_ARCH_LIST="{capability}"'
        )
        assert refusal == ("" if capability in RUNS_ON[target] else message), (target, capability)


def test_an_architecture_that_cannot_be_built_is_named(setup_file, monkeypatch, capsys):
    for names in ("Kepler", "90", "7.0;7.5+PTX", "9.0-PTX", ";"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
        monkeypatch.setenv("PREACT_KERNELS_CUDA", "1")
        with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST: expected .*, got ") as raised:
            setup_file["cuda_extension"]()
        assert str(raised.value).endswith(f'got "{names}"')
        monkeypatch.delenv("PREACT_KERNELS_CUDA")  # then only the CPU library is built
        assert setup_file["cuda_extension"]() is None
        assert f'got "{names}"' in capsys.readouterr().err


@needs_nvcc
def test_an_architecture_that_nvcc_lacks_is_named(setup_file, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;99.0")
    with pytest.raises(SystemExit, match="does not know compute_990"):
        setup_file["cuda_extension"]()
