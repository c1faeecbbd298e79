"""The probes of a GPU compile, order memory as they must, and fail one by one."""

import re
import shutil
import subprocess

import pytest
import torch

pytest.importorskip("tabulate")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from bench import measure, probes, report
from bench.records import CEILINGS, CeilingRow, read

try:
    NVCC = probes.nvcc()
except RuntimeError:
    NVCC = ""

needs_nvcc = pytest.mark.skipif(not NVCC, reason="no nvcc")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def instructions():
    """The PTX of each kernel."""
    command = [NVCC, "-std=c++17", "-arch=sm_90", "--ptx", "-o", "-", str(probes.SOURCE)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"\.entry \w+?(barrier|chain)_kernel", text)
    return dict(zip(names, text.split(".entry ")[1:], strict=True))


def in_order(text, *patterns):
    """Whether the patterns occur one after another."""
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
        "griddepcontrol.launch_dependents",
        "griddepcontrol.wait",
        "ld.global.u32",
        "st.global.u32",
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The probes, compiled for the GPU of this machine, or for one of compute capability 9.0."""
    if not NVCC:
        pytest.skip("no nvcc")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "FOLDER", tmp_path_factory.mktemp("probes"))
        return probes.build("sm_{}{}".format(*capability))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_probe_that_fails_says_why_in_its_row(library):
    rows = list(map(probes.row_of, probes.ceilings_of(probes.Probes(library))))
    assert len({row.name for row in rows}) == 7
    for row in rows:
        assert row.value is None
        assert re.search(r"cuda\w+: ", row.note), row


@needs_gpu
def test_the_probes_measure(library):
    rows = list(map(probes.row_of, probes.ceilings_of(probes.Probes(library))))
    assert [row.note for row in rows] == [""] * len(rows)
    assert all(row.value > 0 for row in rows)


@needs_nvcc
def test_a_source_that_does_not_compile_is_an_error_with_the_messages(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "SOURCE", tmp_path / "probes.cu")
    monkeypatch.setattr(probes, "FOLDER", tmp_path)
    probes.SOURCE.write_text("no_such_type x;")
    with pytest.raises(RuntimeError, match="no_such_type"):
        probes.build("sm_90")


def test_a_compiler_that_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="expected nvcc in PATH or in"):
        probes.nvcc()


class FailingProbes:
    def barrier_us(self, words):
        if words == 1:
            raise RuntimeError("lost\nmore")
        return 1.5

    def launch_us(self, *, fills, is_dependent):
        return 0.5


def test_the_other_ceilings_are_written_where_a_probe_fails(tmp_path, monkeypatch, capsys):
    ceilings = measure.Ceilings(4000.0, {"bfloat16": 8e5}, 3.0, 1.9)
    machine = measure.Machine("A GPU", "versions", "commit", "date", "command")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(measure, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(measure.Machine, "of", lambda device: machine)
    monkeypatch.setattr(probes, "build", lambda architecture: None)
    monkeypatch.setattr(probes, "Probes", lambda library: FailingProbes())
    assert probes.main(["--out", str(tmp_path)]) == 1
    rows = {row.name: row for row in read(tmp_path / f"a-gpu{CEILINGS}", CeilingRow)}
    assert rows["copy"].value == 4000
    assert rows["grid barrier"].value == 1.5
    failed = rows.pop("grid barrier, 1 word a value merged")
    assert (failed.value, failed.note) == (None, "lost")
    assert all(row.value is not None for row in rows.values())
    assert "lost" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):  # rows of networks alone
        report.load(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_probe():
    with pytest.raises(SystemExit, match="no GPU"):
        probes.main([])
