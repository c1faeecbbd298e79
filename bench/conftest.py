"""Options and results of `pytest bench/ops.py`."""

import dataclasses
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import measure
from bench.records import Row, put, slug


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("preact_kernels ops")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    group.addoption("--bench-device", default=default, help="cpu or cuda")
    group.addoption("--bench-dtype", default=None, help="fp32, bf16 or fp16")
    group.addoption("--bench-batch", type=int, default=None, help="images (16, or 128 on a GPU)")
    group.addoption("--bench-out", default="bench/out", help="directory of the CSV file")


@dataclasses.dataclass(frozen=True)
class OpSettings:
    """Device, dtype and batch of the ops, and the machine."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    machine: measure.Machine
    ceilings: measure.Ceilings


@pytest.fixture(scope="session")
def settings(request: pytest.FixtureRequest) -> OpSettings:
    """Settings of the run; measures the ceilings once."""
    option = request.config.getoption
    device = torch.device(option("--bench-device"))
    on_gpu = device.type == "cuda"
    return OpSettings(
        device,
        measure.DTYPES[option("--bench-dtype") or ("bf16" if on_gpu else "fp32")],
        option("--bench-batch") or (128 if on_gpu else 16),
        measure.Machine.of(device, shlex.join(["pytest", *sys.argv[1:]])),
        measure.measure_ceilings(device),
    )


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest, settings: OpSettings) -> Callable[[Row], None]:
    """Writes a row to the CSV file of the device."""
    folder = Path(request.config.getoption("--bench-out"))
    path = folder / f"{slug(settings.machine.device)}.csv"
    return lambda row: put(path, settings.machine.stamp(row))
