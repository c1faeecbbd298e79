"""What importing the package refuses, says and loads, in fresh processes."""

import os
import subprocess
import sys
from pathlib import Path

from preact_kernels.kernels import cpu
from preact_kernels.torch_compat import OLDEST_TORCH

ROOT = Path(__file__).parents[2]


def lines_of(code, **environment):
    """What `code` prints, in a process as a user starts it."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


REFUSALS = """
import os, warnings
from pathlib import Path
import torch

def attempt():
    if os.fork():  # a copy of the process tries: an op can be registered once
        return os.wait()
    try:
        import preact_kernels
    except (ImportError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)

version = torch.__version__
for torch.__version__ in ("2.10.1+cpu", "1.13.0", "2.9.0a0+git1234567", "3.0.0"):
    attempt()
torch.__version__ = version
os.environ["PREACT_KERNELS_BACKEND"] = "fast"
attempt()
del os.environ["PREACT_KERNELS_BACKEND"]

import preact_kernels as pk
from preact_kernels.kernels import native
native.PACKAGE = Path("/nowhere")
print(pk.available_backends())
try:
    pk.set_backend("cpu")
except pk.BackendError as error:
    print(error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for dtype in (torch.float32, torch.float16, torch.float64, torch.float32):
        pk.bn_relu(torch.randn(2, 4, 3, 3, dtype=dtype), None, None, training=True)
for warning in caught:
    print(warning.message)
"""


def test_an_older_torch_an_unknown_backend_and_a_missing_library_are_named():
    """In one line each; "auto" does without the library and says so once."""
    *older, unknown, available, refusal, warning = lines_of(REFUSALS, CUDA_VISIBLE_DEVICES="")
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert older == [
        f"ImportError: preact_kernels needs torch {oldest} or later, got torch {version}"
        for version in ("2.10.1+cpu", "1.13.0", "2.9.0a0+git1234567")
    ]
    expected = "ValueError: PREACT_KERNELS_BACKEND: backend: expected one of"
    assert unknown.startswith(expected) and unknown.endswith("got 'fast'")
    assert available == "('reference',)"
    package = "/nowhere"
    assert refusal == (
        f"backend 'cpu' is not available here ({package} has no _cpu.so; if this is a source tree "
        "that hides an installed package, run from another folder); available: 'reference'"
    )
    assert "'cpu' is not available" in warning and "pip install" in warning


ALONE = """
import sys, warnings
sys.modules.update(dict.fromkeys(("numpy", "matplotlib", "sklearn")))  # as if not installed
import torch
before = set(sys.modules)
import preact_kernels as pk
for name in sorted(set(sys.modules) - before):
    print("study" if name.startswith("preact_kernels.study") else name.partition(".")[0])
for line in open("/proc/self/maps"):
    if "_cuda" in line and "preact_kernels" in line:
        print(line.split()[-1])
sys.modules["triton"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for dtype in (torch.float32, torch.float16):
        model = pk.preact_resnet(29).to(dtype)
        model(torch.randn(2, 3, 8, 8, dtype=dtype)).sum().backward()
for warning in caught:
    print(warning.message)
print(*pk.available_backends())
"""


def test_importing_and_training_need_torch_and_the_package_alone_and_say_nothing():
    *loaded, available = lines_of(ALONE)
    allowed = {"preact_kernels", "torch", *sys.stdlib_module_names}
    # Without the library, "auto" says so.
    said = {line for line in loaded if cpu.load_error() and "'cpu' is not available" in line}
    assert set(loaded) - said <= allowed
    assert available.split()[0] == "reference"
    assert ("cpu" in available.split()) == (not cpu.load_error())
