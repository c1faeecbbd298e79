"""Lets Triton compile for a GPU that this machine does not have."""

import contextlib
from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget


class Driver:
    """The parts of a Triton driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch  # kernels cache the target of each device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def active_driver(capability: int) -> Iterator[None]:
    """Makes Triton compile for a GPU inside the context."""
    config = triton.runtime.driver
    before = config._active  # None: chosen at first use, which may fail without a GPU
    config.set_active(Driver(capability))
    try:
        yield
    finally:
        config.set_active(before)
