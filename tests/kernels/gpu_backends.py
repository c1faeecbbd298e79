"""What tests of both GPU backends share: `cuda` runs on the host or on a GPU, as does `triton`."""

import os

import pytest
import torch

from preact_kernels.ops import dispatch


def _backend(name: str):
    """A parameter, skipped where the backend is not available."""
    (row,) = (b for b in dispatch.BACKENDS if b.name == name)
    reason = f"backend {name}: {row.load_error()}"
    return pytest.param(name, marks=pytest.mark.skipif(not row.is_available(), reason=reason))


on_cuda = pytest.mark.parametrize("backend", [_backend("cuda")])
# compute-sanitizer is for the CUDA library.
_NAMES = ("cuda",) if os.environ.get("PK_SANITIZER") else ("cuda", "triton")
on_gpu_backends = pytest.mark.parametrize("backend", [_backend(name) for name in _NAMES])


class NoConvolution(torch.utils._python_dispatch.TorchDispatchMode):
    """Convolutions of PyTorch are errors."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "convolution" not in function._schema.name
        return function(*args, **kwargs or {})
