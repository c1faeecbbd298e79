"""Fixtures: backends, poisoned memory, seeds and threads."""

import contextlib
import dataclasses
import os

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the package is imported

import preact_kernels as pk
from preact_kernels.kernels import cuda
from preact_kernels.ops import dispatch as backends
from tests.cases import SERVED_DTYPES, device_of
from tests.cuda_on_host import serve_cpu
from tests.lost_gpu import pytest_runtest_makereport as pytest_runtest_makereport

IS_CUDA_ON_HOST = serve_cpu.install()  # before the backends are counted
IS_INTERPRETED = backends._IS_TRITON_INTERPRETED

pytest.register_assert_rewrite("tests.oracle")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The problems are small; `test_determinism.py` takes more."""
    torch.set_num_threads(1)


# What single kernels compute, as against what is common to all backends (checks, layouts, ...).
OF_KERNELS = (
    "test_backend",
    "test_bn_relu",
    "test_bn_relu_conv",
    "test_bn_stats",
    "test_cuda",
    "test_residual_add",
    "test_running_statistics",
    "test_triton",
)


# Minutes of training and of processes, which one backend is enough for.
OF_NETWORKS = ("test_sync_batch_norm", "test_training")


def pytest_collection_modifyitems(items):
    """Marks as slow what GPU kernels on a CPU take long for and other backends show too.

    Left of Triton are tests of kernels that train in float32 on small problems, and
    `test_triton.py`; of CUDA the tests of its own. With a GPU nothing of theirs is marked.
    """
    names = (("triton", IS_INTERPRETED), ("cuda", IS_CUDA_ON_HOST))
    on_cpu = {name for name, is_on_cpu in names if is_on_cpu}
    rare = ("many_pixels", "nan", "finite", "evaluation", "module")
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        served = [params[n] for n in ("dtype", "training_dtype", "wide_dtype") if n in params]
        served = [pair for pair in served if isinstance(pair, tuple)]
        name, dtype = served[0] if served else (params.get("backend"), None)
        module = item.module.__name__.rpartition(".")[2]
        is_rare = dtype in (torch.bfloat16, torch.float16) or any(r in item.name for r in rare)
        quick = OF_KERNELS if name == "triton" else ("test_backend", "test_cuda", "test_cuda_conv")
        if name in on_cpu and (module not in quick or is_rare):
            item.add_marker(pytest.mark.slow)
        if name == "reference" and "cpu" in pk.available_backends() and module in OF_NETWORKS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    """Triton's interpreter, mended, and at three times its speed.

    It rounds float32 to bfloat16 to nearest, as hardware does, and not towards zero. Its scalars
    serve as bounds of loops with NumPy 2.5 too, as in Triton 3.9. It does without a check of every
    integer operation for overflow, and without preparing the language for a device function when
    the kernel that calls it has done so.
    """
    if not IS_INTERPRETED or "triton" not in pk.available_backends():
        return
    from triton import language
    from triton.runtime import interpreter

    def convert(value, source, target, rounding_mode, other=interpreter._convert_float):
        if (source, target) == (language.float32, language.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(value)).bfloat16()
            return rounded.view(torch.uint16).numpy()
        if (source, target) == (language.bfloat16, language.float32):
            return value.astype(np.uint32) << 16
        return other(value, source, target, rounding_mode)

    interpreter._convert_float = convert

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_tensor_and_index

    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    prepare = interpreter._patch_lang
    plain_range = language.static_range

    def prepare_once(function):
        uses = [m for m in function.__globals__.values() if m is language or m is language.core]
        if any(m.static_range is plain_range for m in uses):
            return prepare(function)
        return None

    interpreter._patch_lang = prepare_once


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def ieee_products(monkeypatch):
    """Products of float32 in float32, where there are such; the interpreter has no others."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", IS_INTERPRETED)
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: False)


@pytest.fixture
def poisoned_memory():
    """Fills memory that PyTorch hands out uninitialised with NaN: an unwritten output shows."""
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    # On a GPU some operators of plain PyTorch have no deterministic algorithm.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = was_filling


@contextlib.contextmanager
def on_backend(name):
    """Every call is sent to that backend, and new tensors are on its device."""
    device = device_of(name)
    new_tensors = contextlib.nullcontext() if device == "cpu" else torch.device(device)
    with pk.use_backend(name), new_tensors:
        yield


def _missing():
    """Unavailable backends on a GPU machine, as skipped parameters that give the reason."""
    for row in backends.BACKENDS if torch.cuda.is_available() else ():
        if not row.is_available():
            reason = f"backend {row.name} is not available: {row.load_error()}"
            yield pytest.param(row.name, id=row.name, marks=pytest.mark.skip(reason))


@pytest.fixture(params=[*pk.available_backends(), *_missing()])
def backend(request, poisoned_memory):
    """Each backend in turn, with every call sent to it."""
    with on_backend(request.param):
        yield request.param


def _served(*among):
    served = [
        pytest.param((name, dtype), id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in pk.available_backends()
        for dtype in SERVED_DTYPES[name]
        if not among or dtype in among
    ]
    return [*served, *_missing()]


@pytest.fixture(params=_served())
def dtype(request, poisoned_memory):
    """Each dtype that each backend serves, with every call sent to that backend."""
    name, dtype = request.param
    with on_backend(name):
        yield dtype


@pytest.fixture(params=_served(torch.float32, torch.bfloat16))
def training_dtype(request, poisoned_memory):
    """The two dtypes that networks are trained in, on each backend."""
    name, dtype = request.param
    with on_backend(name):
        yield dtype


@pytest.fixture(params=_served(torch.float32, torch.float64))
def wide_dtype(request, poisoned_memory):
    """The dtypes in which many layers in a row can be compared, on each backend."""
    name, dtype = request.param
    with on_backend(name):
        yield dtype
