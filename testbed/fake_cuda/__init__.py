"""A GPU for fake tensors: without a device, on a CPU build of PyTorch.

A process with `environment()` has a CUDA device to PyTorch (`device.cpp`). Inside `gpu`, tensors on
"cuda" are fake: they have no data, and PyTorch chooses operators, dtypes under autocast and memory
formats as on a GPU with cuDNN. The ops of the CUDA library run their host code, compiled for the
host (testbed/cuda_on_host), so that shapes, dtypes and launches are those of a GPU.

Not as on a GPU: attention runs in PyTorch's plain operators, and code that asks the driver fails.
"""

import contextlib
import functools
import shutil
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from preact_kernels import torch_compat
from preact_kernels.conversion import user_modules
from preact_kernels.kernels import cuda
from preact_kernels.ops import dispatch
from testbed import host_compiler
from testbed.cuda_on_host import serve_cpu
from testbed.fake_cuda.build import build

CAPABILITY = 9, 0
NAME = "NVIDIA H200"
MULTIPROCESSORS = 132


class _Mode(FakeTensorMode):
    def __deepcopy__(self, memo: dict) -> "_Mode":
        return self  # a tensor and its copy have the same mode


def missing() -> str:
    """Why a process of this Python cannot have the device, or an empty text."""
    if torch.version.cuda is not None:
        return "torch is built with CUDA, and has a CUDA device of its own"
    if shutil.which(host_compiler.CXX[0]) is None:
        return "there is no C++ compiler"
    return ""


def environment() -> dict[str, str]:
    """The environment of a process with the device.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    return host_compiler.preloaded([str(build())])


def is_loaded() -> bool:
    """Whether this process has the device."""
    found = torch.accelerator.current_accelerator()
    return torch.version.cuda is None and found is not None and found.type == "cuda"


class HostOps:
    """The ops of the CUDA library for fake tensors; their launches do not run.

    An op is called with tensors on the CPU of the same shapes, strides and shared storages. Its
    results become fake tensors on the GPU, or the arguments where it returns these.

    Args:
        allocated: called with the most bytes that an op has allocated at a time.
    """

    def __init__(self, allocated: Callable[[int], None]) -> None:
        self._allocated = allocated

    def __getattr__(self, name: str) -> Any:
        op = getattr(torch.ops.preact_kernels_cuda, name).default
        return types.SimpleNamespace(default=functools.partial(self._call, op))

    @torch.no_grad()
    def _call(self, op: Any, *args: Any) -> Any:
        storages: dict[int, Tensor] = {}  # on the CPU, by the id of the fake storage
        given: dict[int, Tensor] = {}  # fake tensors, by the address of their storage on the CPU

        def on_cpu(t: Tensor) -> Tensor:
            storage, key = t.untyped_storage(), torch_compat.storage_id(t)
            if key not in storages:
                storages[key] = torch.empty(storage.nbytes(), dtype=torch.uint8)
                given[storages[key].data_ptr()] = t
            own = storages[key].untyped_storage()
            return torch.empty(0, dtype=t.dtype).set_(own, t.storage_offset(), t.shape, t.stride())

        with torch_compat.without_dispatch_modes_above(0):
            on_host = tree_map_only(Tensor, on_cpu, args)
            serve_cpu.peak_bytes()
            found = op(*on_host)
            self._allocated(serve_cpu.peak_bytes())

        def on_gpu(t: Tensor) -> Tensor:
            begin = t.untyped_storage().data_ptr()
            if not t.numel() or begin not in given:
                new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                if t.numel():
                    given[begin] = new
                return new
            return given[begin].as_strided(t.shape, t.stride(), t.storage_offset())

        return tree_map_only(Tensor, on_gpu, found)


def _fits_shared_memory(
    ops: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, with_stream: bool
) -> bool:
    """`cuda._fits_shared_memory` with a weight on the CPU."""
    with torch_compat.without_dispatch_modes_above(0):
        weight = torch.empty(shape, dtype=dtype)
        return torch.ops.preact_kernels_cuda.norm_act_conv_is_served.default(weight, with_stream)


@contextlib.contextmanager
def gpu(allocated: Callable[[int], None] = lambda size: None) -> Iterator[None]:
    """Makes the GPU; `serve_cpu.without_running` must be on.

    Args:
        allocated: called with the most bytes that each op of the CUDA library has allocated at a
            time.
    """
    kernels = cuda.CUDAKernels(HostOps(allocated))
    properties = types.SimpleNamespace(name=NAME, multi_processor_count=MULTIPROCESSORS)
    functions = {
        "is_available": True,
        "is_bf16_supported": True,
        "get_device_capability": CAPABILITY,
        "get_device_properties": properties,
        "current_stream": None,
        "is_current_stream_capturing": False,
        "get_rng_state": None,
        "set_rng_state": None,
    }
    with contextlib.ExitStack() as stack:
        for name, result in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=result))
        for owner, name, function in (
            (cuda, "_fits_shared_memory", functools.cache(_fits_shared_memory)),
            (cuda, "library_error", lambda: ""),
            (dispatch, "kernels_for", lambda x: kernels),
            (dispatch, "select", lambda *_: kernels),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        # A thread of autograd would ask the driver.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Mode())
        yield


def to_gpu(model: nn.Module) -> nn.Module:
    """Moves a model to the GPU, in place; `Module.to` cannot. Call it inside `gpu`."""
    moved: dict[Tensor, Tensor] = {}  # a parameter may be in several modules
    for module in model.modules():
        owned: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for tensors in owned:
            for name, t in tensors.items():
                if t is not None:
                    if t not in moved:
                        moved[t] = _on_gpu(t)
                    tensors[name] = moved[t]
    return model


def _on_gpu(t: Tensor) -> Tensor:
    new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
    return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new


def accept_fake_tensors(model: nn.Module) -> None:
    """Lets a converted model defer operations of fake tensors, as of tensors with data."""
    for module in model.modules():
        if (conversion := user_modules.conversion_of(module)) is not None:
            conversion.extra_types = (FakeTensor,)
