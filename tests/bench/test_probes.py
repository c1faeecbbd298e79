"""The probe of a GPU compiles, and waits for the launch ahead."""

import re
import subprocess

import pytest
import torch

from bench import probes


@pytest.mark.skipif(not probes.nvcc(), reason="no nvcc")
def test_the_probe_waits_before_it_reads_and_has_the_registers_of_a_convolution(tmp_path):
    command = [probes.nvcc(), "-std=c++17", "-arch=sm_90", "-Xptxas=-v", "-cubin", "--keep"]
    command += [f"--keep-dir={tmp_path}", "-o", str(tmp_path / "probes.cubin")]
    done = subprocess.run(
        [*command, str(probes.SOURCE)], capture_output=True, text=True, check=True
    )
    (ptx,) = tmp_path.glob("*.ptx")
    in_order = "griddepcontrol.wait", "griddepcontrol.launch_dependents", "ld.global", "st.global"
    assert re.search(".*?".join(map(re.escape, in_order)), ptx.read_text(), re.DOTALL)
    assert "0 bytes spill stores" in done.stderr
    assert 110 <= int(re.search(r"Used (\d+) registers", done.stderr)[1]) <= 128


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_probes_measure():
    rows = probes.chain_rows(torch.device("cuda"))
    assert len({row.name for row in rows}) == 4
    assert all(row.value > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so():
    with pytest.raises(SystemExit, match="no GPU"):
        probes.main([])
