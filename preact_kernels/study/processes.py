"""Processes of a training run, their devices, and signals that stop them."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist


class Processes(NamedTuple):
    """The rank of this process among the processes that `torchrun` started."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def of_environment(cls) -> "Processes":
        """Reads the variables that `torchrun` sets; without them there is one process."""
        names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
        return cls(*(int(os.environ.get(name, value)) for name, value in names.items()))

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    @contextlib.contextmanager
    def group(self, device: torch.device) -> Iterator[None]:
        """Opens a process group if there are several processes."""
        if self.world_size == 1 or dist.is_initialized():
            yield
            return
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()


class Interrupted(Exception):
    """A signal stopped the run; the checkpoint is written."""


def device_of(name: str | None, processes: Processes) -> torch.device:
    """Returns the named or the default device; each of several processes gets its own GPU.

    Raises:
        ValueError: the device does not exist.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected one such as 'cpu' or 'cuda:0', got {name!r}") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: expected 'cpu', as PyTorch sees no GPU, got {name!r}")
        if device.index is not None and processes.world_size > 1:
            raise ValueError(f"device: expected 'cuda' with several processes, got {name!r}")
        if device.index is None:
            device = torch.device("cuda", processes.local_rank)
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def stop_signals(received: list[int], processes: Processes) -> Iterator[None]:
    """Appends SIGINT and SIGTERM to `received` instead of ending the process.

    With several processes, which would receive a signal at different steps, signals end them.
    """
    if processes.world_size > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def receive(number: int, _: object) -> None:
        received.append(number)
        restore()  # a second signal has its usual effect

    for number in previous:
        signal.signal(number, receive)
    try:
        yield
    finally:
        restore()
