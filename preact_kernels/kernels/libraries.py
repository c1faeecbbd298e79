"""Loads the compiled libraries, each at its first use."""

import functools
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent.parent
CPU_LIBRARY = "_cpu.so"


@functools.cache
def load_library(name: str) -> str:
    """Loads a compiled library of the package. Returns the error, or an empty string."""
    if not (PACKAGE / name).exists():
        return (
            f"{PACKAGE} has no {name}; if this is a source tree that hides an installed package, "
            "run from another folder"
        )
    try:
        torch.ops.load_library(str(PACKAGE / name))
    except OSError as error:
        return f"{name} does not load: {error}"
    return ""
