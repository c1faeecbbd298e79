"""Paths of programs of the CUDA toolkit; None where they are not installed."""

import os
import shutil
from pathlib import Path


def nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def cuobjdump(of_triton: bool = False) -> str | None:
    """The path of cuobjdump, of the CUDA toolkit or of Triton.

    Args:
        of_triton: prefer Triton's, which reads what Triton compiles; an older toolkit may not.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = [
        shutil.which("cuobjdump") or shutil.which(f"{home}/bin/cuobjdump"),
        _cuobjdump_of_triton(),
    ]
    return next(filter(None, reversed(found) if of_triton else found), None)


def _cuobjdump_of_triton() -> str | None:
    try:
        from triton.backends import nvidia
    except ImportError:
        return None
    return shutil.which("cuobjdump", path=Path(nvidia.__path__[0]) / "bin")
