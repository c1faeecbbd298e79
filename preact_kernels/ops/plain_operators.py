"""When a call runs as PyTorch's own operators."""

from torch import fx


def runs_plain(*tensors: object) -> bool:
    """Whether this call must run as PyTorch's own operators."""
    return any(isinstance(t, fx.Proxy) for t in tensors)
