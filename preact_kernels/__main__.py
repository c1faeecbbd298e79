"""Reports the available backends, and checks their kernels: `python -m preact_kernels [check]`."""

import argparse
import faulthandler
import importlib.metadata
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from preact_kernels import __version__
from preact_kernels.accuracy.check import check_backend, columns_of
from preact_kernels.kernels import cpu
from preact_kernels.kernels.contract import HALVES
from preact_kernels.ops import dispatch
from preact_kernels.ops.checks import dtype_name

UNITS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "1x1, 64 to 16 channels": ((16, 64, 1, 1), {}),
    "1x1, 64 to 256 channels": ((256, 64, 1, 1), {}),
    "3x3, 16 channels": ((16, 16, 3, 3), {"padding": 1}),
    "3x3, 64 channels": ((64, 64, 3, 3), {"padding": 1}),
    "3x3, 64 to 128 channels, stride 2": ((128, 64, 3, 3), {"padding": 1, "stride": 2}),
    "3x3, 512 channels": ((512, 512, 3, 3), {"padding": 1}),
    "3x3, 64 channels, 4 groups": ((64, 16, 3, 3), {"padding": 1, "groups": 4}),
}
"""Common BN-ReLU-Conv units: shape of the weight, and other arguments of `backend_for`."""


def heading() -> list[str]:
    """Versions, the folder of the package, and devices."""
    package = Path(__file__).resolve().parent
    lines = [versions(), f"package: {package}", *devices()]
    elsewhere = [path for path in sys.path if Path(path).resolve() != package.parent]
    hidden = PathFinder.find_spec(package.name, elsewhere)
    if hidden is not None and hidden.origin:
        lines.append(f"this folder hides {Path(hidden.origin).parent}: run from another folder")
    return lines


def versions() -> str:
    """Versions of the package, Python, torch, Triton and CUDA."""
    try:
        triton = f"Triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        triton = "no Triton"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    python = platform.python_version()
    package = f"preact_kernels {__version__}"
    return f"{package}: Python {python}, torch {torch.__version__}, {triton}, {cuda}"


def devices() -> list[str]:
    """A line for the CPU and for each GPU."""
    info = Path("/proc/cpuinfo")
    model = info.exists() and re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE)
    name = model[1].strip() if model else platform.machine()
    kernels = "" if cpu.load_error() else f", kernels for {cpu.kernels().instruction_set}"
    lines = [f"CPU: {name}, {torch.get_num_threads()} threads{kernels}"]
    for index in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        name = torch.cuda.get_device_name(index)
        lines.append(f"GPU {index}: {name}, compute capability {capability}")
    return lines


def served_units(device: torch.device) -> list[str]:
    """A table of the backends that run `UNITS` on a device, by dtype, and why PyTorch runs some."""
    dtypes = (torch.float32, *HALVES)
    names = list(map(dtype_name, dtypes))
    rows: dict[str, Sequence[str]] = {f"BN-ReLU-Conv on {device.type}": names}
    reasons: dict[tuple[str, str], list[str]] = {}  # dtypes by unit and reason
    for unit, (shape, arguments) in UNITS.items():
        weight = torch.empty(shape, device="meta")
        found = [_served(weight, dtype=d, device=device, **arguments) for d in dtypes]
        rows[unit] = found
        for name, choice in zip(names, found, strict=True):
            if choice.reason:
                reasons.setdefault((unit, choice.reason), []).append(name)
    width = max(map(len, rows))
    table = [" ".join([f"{n:{width}}", *(f"{t:30}" for t in row)]) for n, row in rows.items()]
    why = [f"{unit} ({', '.join(of)}): {reason}" for (unit, reason), of in reasons.items()]
    return [line.rstrip() for line in (*table, *why)]


def _served(weight: torch.Tensor, **arguments: Any) -> dispatch.Choice:
    try:
        return dispatch.backend_for(weight, **arguments)
    except dispatch.BackendError as error:  # PREACT_KERNELS_BACKEND names a backend
        return dispatch.Choice(f"{dispatch.current()}: not served", str(error))


def report() -> None:
    """Prints versions, devices, backends, and which backend runs common units."""
    print(*heading(), "", sep="\n")
    for backend in dispatch.BACKENDS:
        error = backend.load_error()
        state = f"not available: {error}" if error else "available"
        if backend.is_experimental and not error:
            state += ", experimental"
        print(f"{backend.name:9} {state}")
    for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing libraries are listed above
            print("", *served_units(torch.device(kind)), sep="\n")
    print(f"\n`{dispatch.CHECK}` compares the kernels with float64 on this machine.")


def check(backends: Sequence[dispatch.Backend], dtypes: Sequence[str]) -> int:
    """Checks backends in the given dtypes, or in all. Returns 1 if a result is wrong, else 0."""
    begin_s = time.monotonic()
    print(*heading(), "", sep="\n")
    print(
        "The largest error of outputs, gradients and running statistics, as a share of what is\n"
        "allowed: twice the error of plain PyTorch in the same dtype, and one rounding; for a\n"
        "single element, four times and two roundings. Above 1 is a MISS.\n"
    )
    is_right = True
    for backend in backends:
        columns = [c for c in columns_of(backend) if not dtypes or str(c) in dtypes]
        is_right &= check_backend(backend, columns)
    for backend in dispatch.BACKENDS:
        if reason := refusal(backend):
            print(f"not checked: {backend.name} ({reason})")
    names = ", ".join(b.name for b in backends)
    verdict = "all results are right" if is_right else "some results are wrong"
    print(f"checked: {names}; {verdict}; {time.monotonic() - begin_s:.0f} s")
    return int(not is_right)


def refusal(backend: dispatch.Backend) -> str:
    """Why a backend cannot be checked, or an empty string."""
    return backend.load_error() or ("it is interpreted" if backend.only_by_name else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m preact_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="check")
    checking = commands.add_parser("check", help="compare kernels with float64 on this machine")
    known = {b.name: b for b in dispatch.BACKENDS}
    dtypes = list(dict.fromkeys(str(c) for b in known.values() for c in columns_of(b)))
    add = checking.add_argument
    add("--backends", nargs="+", choices=known, metavar="NAME",
        help=f"one or more of {', '.join(known)}; default: all that are available")  # fmt: skip
    add("--dtypes", nargs="+", choices=dtypes, default=[], metavar="DTYPE",
        help=f"one or more of {', '.join(dtypes)}; default: all")  # fmt: skip
    given = parser.parse_args(arguments)
    if given.command is None:
        report()
        return 0
    named = [known[name] for name in dict.fromkeys(given.backends or ())]
    for backend in named:
        if reason := refusal(backend):
            checking.error(f"backend {backend.name} cannot be checked: {reason}")
        if not _serves_one(backend, given.dtypes):
            checking.error(f"backend {backend.name} serves none of {', '.join(given.dtypes)}")
    backends = named or [b for b in dispatch.BACKENDS if not refusal(b)]
    status = check([b for b in backends if _serves_one(b, given.dtypes)], given.dtypes)
    if not named and all(refusal(b) for b in dispatch.BACKENDS if b.name != "reference"):
        print("no kernel of this package was checked: `reference` is plain PyTorch")
        status = 1
    return status


def _serves_one(backend: dispatch.Backend, dtypes: Sequence[str]) -> bool:
    return not dtypes or not {*map(str, columns_of(backend))}.isdisjoint(dtypes)


if __name__ == "__main__":
    faulthandler.enable()
    os.environ.setdefault("PREACT_KERNELS_POISON", "1")  # new outputs are NaN until written
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
