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
def settings() -> OpSettings:
    """Settings of the run; measures the ceilings once."""
    device = measure.default_device()
    on_gpu = device.type == "cuda"
    return OpSettings(
        device,
        torch.bfloat16 if on_gpu else torch.float32,
        128 if on_gpu else 16,
        measure.Machine.of(device, shlex.join(["pytest", *sys.argv[1:]])),
        measure.measure_ceilings(device),
    )


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest, settings: OpSettings) -> Callable[[Row], None]:
    """Writes a row to the CSV file of the device."""
    folder = Path(request.config.getoption("--bench-out"))
    path = folder / f"{slug(settings.machine.device)}.csv"
    return lambda row: put(path, settings.machine.stamp(row))
