"""Compiles `device.cpp` into `build/fake_cuda/`, if something changed."""

from pathlib import Path

from testbed import host_compiler
from testbed.host_compiler import ROOT

SOURCE = Path(__file__).parent / "device.cpp"
FLAGS = ["-std=c++20", "-fPIC", "-O1", "-w"]


def build() -> Path:
    """Builds the library if something changed, and returns its path.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    folder = ROOT / "build" / "fake_cuda"
    compile_flags, link_flags = host_compiler.torch_flags()
    with host_compiler.locked(folder):
        objects = host_compiler.compile_objects(folder, {SOURCE: [*FLAGS, *compile_flags]}, [])
        return host_compiler.link_library(folder, "device", objects, link_flags)
