"""Atomic writes of files, and locked folders."""

import contextlib
import csv
import fcntl
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file atomically: at any moment it has the old or the new content.

    Raises:
        OSError: the content cannot be written, such as to a full disk; the old file is kept.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(".partial", f".{path.name}.", path.parent)
        try:
            os.fchmod(descriptor, 0o644)
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as error:
        kept = "; the file from before is still there" if path.exists() else ""
        raise OSError(error.errno, f"{path}: not written ({error.strerror}){kept}") from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """Formats a table as CSV; floats have nine digits, None is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(f"{v:.9g}" if isinstance(v, float) else v for v in row)
    return text.getvalue().encode()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder for this process.

    Raises:
        ValueError: another process has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"out: expected a folder that no other process trains in, got {folder}"
            ) from error
        yield
