"""What importing the package refuses, says and loads, in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preact_kernels.kernels import cpu
from preact_kernels.torch_compat import OLDEST_TORCH

ROOT = Path(__file__).parents[2]

# Each attempt imports the package in a copy of the process: ops can be registered once.
PROGRAM = """
import os, sys, warnings
from pathlib import Path
import torch

def attempt(title, run, *arguments):
    if os.fork():
        return os.wait()
    print(f"# {title}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(*arguments)
        except (ImportError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
        for warning in caught:
            print(warning.message)
    sys.stdout.flush()
    os._exit(0)

def with_torch(version):
    torch.__version__ = version
    import preact_kernels

def with_unknown_backend():
    os.environ["PREACT_KERNELS_BACKEND"] = "fast"
    import preact_kernels

def without_library():
    import preact_kernels as pk
    from preact_kernels.kernels import libraries
    libraries.PACKAGE = Path("/nowhere")
    print(pk.available_backends())
    try:
        pk.set_backend("cpu")
    except pk.BackendError as error:
        print(error)
    for dtype in (torch.float32, torch.float16, torch.float64, torch.float32):
        pk.bn_relu(torch.randn(2, 4, 3, 3, dtype=dtype), None, None, training=True)

def alone():
    sys.modules.update(dict.fromkeys(("numpy", "matplotlib", "sklearn")))  # as if not installed
    before = set(sys.modules)
    import preact_kernels as pk
    for name in sorted(set(sys.modules) - before):
        is_study = name.startswith("preact_kernels.study")
        print("study" if is_study else name.partition(".")[0])
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "_cuda" in line and "preact_kernels" in line:
            print(line.split()[-1])
    sys.modules["triton"] = None
    for dtype in (torch.float32, torch.float16):
        model = pk.preact_resnet(29).to(dtype)
        model(torch.randn(2, 3, 8, 8, dtype=dtype)).sum().backward()
    print("backends", *pk.available_backends())

for version in ("2.10.1+cpu", "1.13.0", "2.9.0a0+git1234567", "3.0.0"):
    attempt(version, with_torch, version)
attempt("unknown backend", with_unknown_backend)
attempt("no library", without_library)
attempt("alone", alone)
"""


@pytest.fixture(scope="module")
def printed():
    """The lines that each attempt prints, by its title."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not process.returncode and not process.stderr
    attempts = (attempt.splitlines() for attempt in process.stdout.split("# ")[1:])
    return {title: lines for title, *lines in attempts}


def test_an_older_torch_an_unknown_backend_and_a_missing_library_are_named(printed):
    """In one line each; "auto" does without the library and says so once."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    for version in ("2.10.1+cpu", "1.13.0", "2.9.0a0+git1234567"):
        expected = f"preact_kernels needs torch {oldest} or later, got torch {version}"
        assert printed[version] == [f"ImportError: {expected}"]
    assert not printed["3.0.0"]
    (unknown,) = printed["unknown backend"]
    assert unknown.startswith("ValueError: PREACT_KERNELS_BACKEND: backend: expected one of")
    assert unknown.endswith("got 'fast'")
    available, refusal, warning = printed["no library"]
    assert available == "('reference',)"
    assert refusal == (
        "backend 'cpu' is not available here (/nowhere has no _cpu.so; if this is a source tree "
        "that hides an installed package, run from another folder); available: 'reference'"
    )
    assert "'cpu' is not available" in warning and "pip install" in warning


def test_importing_and_training_need_torch_and_the_package_alone_and_say_nothing(printed):
    # Without the library, "auto" says so.
    lines = [line for line in printed["alone"] if "'cpu' is not available" not in line]
    assert len(lines) == len(printed["alone"]) - bool(cpu.load_error())
    available = next(line.split()[1:] for line in lines if line.startswith("backends "))
    loaded = {line for line in lines if not line.startswith("backends ")}
    assert loaded <= {"preact_kernels", "torch", *sys.stdlib_module_names}
    assert available[0] == "reference"
    assert ("cpu" in available) == (not cpu.load_error())
