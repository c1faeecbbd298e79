"""Fixtures: backends, poisoned memory, seeds and threads."""

import pytest
import torch

import preact_kernels as pk
from tests.cases import SERVED_DTYPES

pytest.register_assert_rewrite("tests.oracle")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The problems are small; `test_determinism.py` takes more."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """Fills memory that PyTorch hands out uninitialised with NaN: an unwritten output shows."""
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = was_filling


@pytest.fixture(params=pk.available_backends())
def backend(request, poisoned_memory):
    """Each backend in turn, with every call sent to it."""
    with pk.use_backend(request.param):
        yield request.param


def _served(*among):
    return [
        pytest.param((name, dtype), id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in pk.available_backends()
        for dtype in SERVED_DTYPES[name]
        if not among or dtype in among
    ]


@pytest.fixture(params=_served())
def dtype(request, poisoned_memory):
    """Each dtype that each backend serves, with every call sent to that backend."""
    name, dtype = request.param
    with pk.use_backend(name):
        yield dtype


@pytest.fixture(params=_served(torch.float32, torch.bfloat16))
def training_dtype(request, poisoned_memory):
    """The two dtypes that networks are trained in, on each backend."""
    name, dtype = request.param
    with pk.use_backend(name):
        yield dtype


@pytest.fixture(params=_served(torch.float32, torch.float64))
def wide_dtype(request, poisoned_memory):
    """The dtypes in which many layers in a row can be compared, on each backend."""
    name, dtype = request.param
    with pk.use_backend(name):
        yield dtype
