"""Compiles libraries for tests with the C++ compiler, where something changed.

With ccache installed, an edit of a header compiles only the sources that include it.
"""

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from preact_kernels.torch_compat import OLDEST_TORCH

ROOT = Path(__file__).parents[1]
CXX = shlex.split(os.environ.get("CXX") or "c++")
# The stable ABI of the oldest torch, as in setup.py.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*OLDEST_TORCH)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def torch_flags() -> tuple[list[str], list[str]]:
    """Returns the flags to compile, and to link, against torch's stable ABI."""
    from torch.utils import cpp_extension

    include = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    (folder,) = cpp_extension.library_paths()
    libraries = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [*include, TORCH_TARGET], libraries


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates a folder, and locks it against other processes, such as tests in parallel."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_objects(
    folder: Path, flags_of: Mapping[Path, Sequence[str]], headers: Iterable[Path]
) -> list[Path]:
    """Compiles sources, each with its flags, into a folder. Returns the object files.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    around = digest(*CXX, *(header.read_text() for header in sorted(headers)))
    objects = {}
    for source, flags in flags_of.items():
        own = digest(around, str(source), *flags, source.read_text())
        objects[source] = folder / f"{source.stem}-{own}.o"
    ccache = ["ccache"] if shutil.which("ccache") else []
    jobs = [
        [*ccache, *CXX, *flags, "-x", "c++", "-c", str(source), "-o", str(objects[source])]
        for source, flags in flags_of.items()
        if not objects[source].exists()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, jobs))
    return [*objects.values()]


def link_library(folder: Path, name: str, objects: Sequence[Path], flags: Sequence[str]) -> Path:
    """Links a shared library, and deletes other objects and libraries in the folder.

    Raises:
        RuntimeError: with the linker's messages.
    """
    library = folder / f"{name}-{digest(*CXX, *map(str, objects), *flags)}.so"
    if not library.exists():
        run([*CXX, *map(str, objects), "-shared", *flags, "-o", str(library)])
        for path in folder.iterdir():
            if path not in (library, *objects) and path.suffix in (".o", ".so"):
                path.unlink()
    return library


def find_file(name: str) -> str:
    """Returns the path of a file of the compiler, such as a library."""
    return subprocess.check_output([*CXX, f"-print-file-name={name}"], text=True).strip()


def preloaded(runtimes: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a process that loads a library with sanitizer runtimes."""
    # With the C++ runtime, in which a sanitizer looks for the function that throws exceptions.
    return {"LD_PRELOAD": " ".join([*runtimes, find_file("libstdc++.so")])} if runtimes else {}


def run(command: list[str]) -> None:
    """Runs a compiler command that ends with the output path.

    Raises:
        RuntimeError: with its messages.
    """
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        Path(command[-1]).unlink(missing_ok=True)
        raise RuntimeError(f"{shlex.join(command)}\n{process.stderr}")
