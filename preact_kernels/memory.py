"""Bytes that a forward saves for backward."""

import torch
from torch import Tensor, nn

from preact_kernels.torch_compat import storage_id


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Returns the bytes that one forward of `model` saves for backward.

    Counts the tensors that autograd saves: each storage once, and only the bytes that views use.
    Parameters and buffers of the model do not count. Runs one forward in the model's current mode,
    then restores buffers (running statistics) and random state.

    Args:
        model: any module.
        x: input of the model.

    Returns:
        Bytes.

    Raises:
        TypeError: `model` is not an `nn.Module`, or `x` is not a tensor.
    """
    check_model_and_input(model, x)
    kept, _ = saved_storages(model, x)
    return sum(size for size, _ in kept.values())


def check_model_and_input(model: object, x: object) -> None:
    """Checks for a module and a tensor."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")


def saved_storages(
    model: nn.Module, x: Tensor
) -> tuple[dict[int, tuple[int, torch.UntypedStorage]], Tensor]:
    """Returns (bytes, storage) by storage id, as `saved_bytes` counts, and the model's output.

    Keeping the storages alive keeps their ids unique.
    """
    state = {storage_id(t) for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, tuple[torch.UntypedStorage, dict[tuple, int]]] = {}  # storage, bytes by view

    def pack(t: Tensor) -> Tensor:
        key = storage_id(t)
        if key not in state:
            _, parts = saved.setdefault(key, (t.untyped_storage(), {}))
            parts[t.storage_offset(), t.shape, t.stride()] = t.numel() * t.element_size()
        return t.detach()  # a node that held its own result would never be freed

    buffers = [(b, b.clone()) for b in model.buffers()]
    devices = [x.device] if x.is_cuda else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            y = model(x)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    kept = {
        key: (min(storage.nbytes(), sum(parts.values())), storage)
        for key, (storage, parts) in saved.items()
    }
    return kept, y
