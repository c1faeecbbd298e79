"""Checkpoints, written atomically and checked when read."""

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from preact_kernels.study.files import write_atomically

FORMAT = "preact_kernels.study checkpoint"
VERSION = 1


class CheckpointError(ValueError):
    """The run cannot continue from this file."""


def save(path: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint atomically.

    Args:
        path: the file.
        content: tensors, numbers, strings, and dicts, lists and tuples of these.

    Raises:
        OSError: the file cannot be written; an earlier checkpoint is kept.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **content}, buffer)
    write_atomically(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint, onto the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is truncated, damaged, or not a checkpoint of this package.
    """
    expected = f"{path}: expected a checkpoint of python -m preact_kernels.study train"
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not check the checksums
        if damaged is not None:
            raise CheckpointError(f"{expected}, got one in which {damaged} is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, CheckpointError):
        raise
    except Exception as error:  # the unpickler raises errors of any class
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{expected}, got a file that cannot be read: {reason}") from error
    found = content.get("format") if isinstance(content, dict) else type(content).__name__
    if found != FORMAT:
        raise CheckpointError(f"{expected} with format {FORMAT!r}, got {found!r}")
    if content["version"] != VERSION:
        raise CheckpointError(f"{expected} of version {VERSION}, got {content['version']}")
    return content
