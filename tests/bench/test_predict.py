"""Training steps on a GPU, predicted without one."""

import subprocess
import sys

import pytest

from bench.gpu_networks import PLAIN, REBUILD, STORE
from bench.predict import PredictedRow
from bench.records import read
from testbed import fake_cuda


@pytest.mark.skipif(bool(fake_cuda.missing()), reason=fake_cuda.missing())
def test_a_step_is_predicted_for_each_contender(tmp_path):
    path, names = tmp_path / "predicted.csv", [PLAIN, STORE, REBUILD]
    command = ["-m", "bench.predict", "--models", "WRN-28-10", "--csv", str(path), "--top", "20"]
    command += ["--contenders", *names]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "norm_input_gradient" in done.stdout and "aten::convolution_backward" in done.stdout
    rows = {row.contender: row for row in read(path, PredictedRow)}
    plain, store, rebuild = (rows[name] for name in names)
    # Three products of 5.25 G multiply-adds an image (Zagoruyko and Komodakis, 1605.07146); the
    # first convolution has no gradient of its input.
    assert plain.flops == pytest.approx(128 * 3 * 2 * 5.25e9, rel=0.01)
    assert store.flops == pytest.approx(plain.flops) and rebuild.flops > store.flops
    # Outputs of convolutions and activations in bfloat16; converted, the first alone.
    assert plain.saved_bytes > 1.8 * store.saved_bytes > 1.8 * rebuild.saved_bytes
    for row in rows.values():
        assert row.saved_bytes < row.peak_bytes < 1.8 * row.saved_bytes
    assert (plain.kernels, plain.fused, store.fused) == (0, "", "25 of 25")
    assert store.kernels > 25 and store.bytes_moved < plain.bytes_moved < rebuild.bytes_moved
    assert store.least_ms < plain.least_ms < rebuild.least_ms
