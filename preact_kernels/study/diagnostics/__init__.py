"""Measurements of signal flow by block."""

from preact_kernels.study.diagnostics.block_hooks import blocks_of
from preact_kernels.study.diagnostics.measurements import (
    Monitor,
    histograms,
    identity_test,
    measure,
)
from preact_kernels.study.diagnostics.rows import (
    BlockRow,
    Thresholds,
    read_csv,
    warnings_of,
    write_csv,
)

__all__ = [
    "BlockRow",
    "Monitor",
    "Thresholds",
    "blocks_of",
    "histograms",
    "identity_test",
    "measure",
    "read_csv",
    "warnings_of",
    "write_csv",
]
