"""The probes of a GPU compile, order memory correctly, and fail one by one."""

import re
import shutil
import subprocess
import types

import pytest
import torch

pytest.importorskip("tabulate")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from bench import measure, probes
from bench.records import CEILINGS, CeilingRow, read

try:
    NVCC = probes.nvcc()
except RuntimeError:
    NVCC = ""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
needs_nvcc = pytest.mark.skipif(not NVCC, reason="no nvcc")


@pytest.fixture(scope="module")
def instructions():
    """Compiles the probes; returns the PTX of each kernel."""
    command = [NVCC, "-std=c++17", "-arch=sm_90", "--ptx", "-o", "-", str(probes.SOURCE)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"\.entry \w+?(barrier|chain)_kernel", text)
    return dict(zip(names, text.split(".entry ")[1:], strict=True))


def in_order(text, *patterns):
    """Whether the patterns occur in this order."""
    return re.search(".*?".join(map(re.escape, patterns)), text, re.DOTALL) is not None


@needs_nvcc
def test_a_barrier_releases_what_its_block_wrote_and_acquires_what_others_did(instructions):
    assert in_order(
        instructions["barrier"],
        "red.relaxed.gpu.global.add.u64",
        "bar.sync",
        "red.release.gpu.global.add.u32",
        "ld.acquire.gpu.global.u32",
        "bar.sync",
        "ld.global.cg.u64",
    )


@needs_nvcc
def test_a_dependent_kernel_waits_before_it_reads(instructions):
    assert in_order(
        instructions["chain"],
        "griddepcontrol.wait",
        "griddepcontrol.launch_dependents",
        "ld.global.u32",
        "st.global.u32",
    )


@needs_nvcc
def test_a_dependent_kernel_takes_the_registers_and_shared_memory_of_a_convolution(tmp_path):
    command = [NVCC, "-std=c++17", "-arch=sm_90", "-cubin", "-Xptxas=-v", str(probes.SOURCE)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "probes.cubin")], capture_output=True, text=True, check=True
    )
    report = done.stderr.split("chain_kernel", 1)[1]
    assert "0 bytes spill stores" in report
    assert 110 <= int(re.search(r"Used (\d+) registers", report)[1]) <= 128
    held = int(re.search(r"kHeld = (\d+);", probes.SOURCE.read_text())[1])
    assert 96 * 1024 <= held * 256 * 4 <= 113 * 1024  # two blocks on a multiprocessor


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Compiles the probes for the GPU of this machine, else for compute capability 9.0."""
    if not NVCC:
        pytest.skip("no nvcc")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "FOLDER", tmp_path_factory.mktemp("probes"))
        return probes.build("sm_{}{}".format(*capability))


@needs_gpu
def test_the_probes_measure(library):
    rows = [probes.row_of(*probe) for probe in probes.Probes(library).by_name().items()]
    assert len({row.name for row in rows}) == 7
    for row in rows:
        assert row.value > 0 and not row.note, row


@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_launch_that_fails_says_why(library, monkeypatch):
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    found, zero = probes.Probes(library), torch.zeros(1)
    for name, arguments in (
        ("launch_barrier", (1, 1, 0, zero, zero, zero)),
        ("launch_chain", (1, True, zero)),
    ):
        row = probes.row_of(name, lambda n=name, a=arguments: found._launch(n, *a))
        assert row.value is None
        assert "CUDA" in row.note, row
    assert len(found.by_name()) == 7


def test_a_compiler_that_is_missing_or_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "SOURCE", tmp_path / "probes.cu")
    monkeypatch.setattr(probes, "FOLDER", tmp_path)
    probes.SOURCE.write_text("no_such_type x;")
    if NVCC:
        with pytest.raises(RuntimeError, match="no_such_type"):
            probes.build("sm_90")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="expected nvcc in PATH or in"):
        probes.build("sm_90")


def test_the_other_ceilings_are_written_where_a_probe_fails(tmp_path, monkeypatch):
    def lost():
        raise RuntimeError("lost\nmore")

    ceilings = measure.Ceilings(4000.0, {"bfloat16": 8e5})
    machine = measure.Machine("A GPU", "versions", "commit", "date", "command")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no GPU"):
            probes.main([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(measure, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(measure.Machine, "of", lambda device: machine)
    monkeypatch.setattr(probes, "build", lambda architecture: None)
    monkeypatch.setattr(
        probes, "launch_us", lambda device, in_graph=False: 2.0 if in_graph else 3.0
    )
    found = types.SimpleNamespace(by_name=lambda: {"a": lost, "b": lambda: 1.5})
    monkeypatch.setattr(probes, "Probes", lambda library: found)
    assert probes.main(["--out", str(tmp_path)]) == 1
    rows = read(tmp_path / f"a-gpu{CEILINGS}", CeilingRow)
    found = {row.name: (row.value, row.note) for row in rows}
    assert found == {
        "copy": (4000, ""),
        "matrix product, bfloat16": (8e5, ""),
        "launch by PyTorch": (3, ""),
        "launch by PyTorch in a graph": (2, ""),
        "a": (None, "lost"),
        "b": (1.5, ""),
    }
