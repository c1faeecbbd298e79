"""Fixtures: backends, poisoned memory, seeds and threads."""

import contextlib
import os
import re

import pytest
import torch

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the package is imported
os.environ.setdefault("PREACT_KERNELS_POISON", "1")  # see poisoned_memory

import preact_kernels as pk
from preact_kernels import torch_compat
from preact_kernels.kernels import cpu, cuda
from preact_kernels.kernels.pytorch_conv import UnitKernels
from preact_kernels.ops import dispatch as backends
from testbed.cuda_on_host import serve_cpu
from tests.cases import SERVED_DTYPES, CalledOps, covering, device_of
from tests.lost_gpu import pytest_runtest_makereport as pytest_runtest_makereport

IS_CUDA_ON_HOST = serve_cpu.install()  # before the backends are counted
IS_INTERPRETED = backends._IS_TRITON_INTERPRETED

pytest.register_assert_rewrite(
    "tests.oracle", "tests.kernels.cuda_conv_cases", "tests.kernels.op_cases"
)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The problems are small; `test_determinism.py` takes more."""
    torch.set_num_threads(1)


# Fixtures that send every call to a backend, and the dtypes of their cases, where it serves them.
DTYPES_OF = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "training_dtype": (torch.float32, torch.bfloat16),  # that networks are trained in
    "wide_dtype": (torch.float32, torch.float64),  # in which many layers can be compared
}


def pytest_generate_tests(metafunc):
    """Runs a test on the backends that its marker `backends` names; on every one without it."""
    markers = metafunc.definition.iter_markers("parametrize")
    parametrised = {name for marker in markers for name in argument_names(marker)}
    marker = metafunc.definition.get_closest_marker("backends")
    for fixture in ("backend", *DTYPES_OF):
        if fixture in metafunc.fixturenames and fixture not in parametrised:
            chosen = chosen_backends(marker)
            cases = [c for n, marks in chosen.items() for c in cases_of(fixture, n, marks)]
            metafunc.parametrize(fixture, [*cases, *_missing()], indirect=True)


def argument_names(marker):
    """The arguments that a marker `parametrize` gives values to."""
    names = marker.args[0] if marker.args else marker.kwargs["argnames"]
    return re.split(r"\s*,\s*", names) if isinstance(names, str) else names


def chosen_backends(marker):
    """The marks of a test's cases by backend: see the marker `backends` in pyproject.toml.

    On a GPU machine each test also runs on the backend that "auto" takes for tensors on the GPU.
    """
    available = pk.available_backends()
    if os.environ.get("PK_SANITIZER"):  # compute-sanitizer is for the CUDA library
        available = [name for name in available if name == "cuda"]
    named = marker.args if marker is not None and marker.args else available
    slow = marker.kwargs.get("slow", ()) if marker is not None else ()
    quick = [name for name in named if name in available and name not in slow]
    is_of_gpus = bool(marker and marker.args) and {*marker.args, *slow} <= {"cuda", "triton"}
    if torch.cuda.is_available() and not is_of_gpus:
        on_gpu = [row.name for row in backends.BACKENDS if "cuda" in row.device_types]
        quick += [name for name in on_gpu if name in available][:1]
    marks = dict.fromkeys(quick or ["reference"], ())
    if is_of_gpus and not quick:
        marks = {named[0]: pytest.mark.skip(reason=f"no backend {' or '.join(named)}")}
    for name in slow:
        if name in available and name not in marks:
            runs_on_gpu = device_of(name) == "cuda"
            marks[name] = () if runs_on_gpu else (pytest.mark.slow,)
    return marks


def cases_of(fixture, name, marks):
    """The cases of one backend: its name, or its name with each dtype."""
    if fixture == "backend":
        return [pytest.param(name, id=name, marks=marks)]
    return [
        pytest.param((name, dtype), id=f"{name}-{str(dtype).removeprefix('torch.')}", marks=marks)
        for dtype in DTYPES_OF[fixture]
        if dtype in SERVED_DTYPES[name]
    ]


def pytest_collection_modifyitems(items):
    """Marks as slow the cases of a test marked `covering` that the quick suite does without."""
    groups = {}
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker is not None and item.get_closest_marker("slow") is None:
            key = item.parent.nodeid, item.originalname, backend_of(item)
            groups.setdefault(key, []).append(item)
    for (*_, backend), group in groups.items():
        marker = group[0].get_closest_marker("covering")
        strength = marker.kwargs.get(backend, marker.args[0])
        cases = [{n: id(v) for n, v in item.callspec.params.items()} for item in group]
        chosen = set(covering(cases, strength))
        assert chosen, f"{group[0].originalname}: covering({strength}) of fewer arguments"
        for index, item in enumerate(group):
            if index not in chosen:
                item.add_marker(pytest.mark.slow)


def backend_of(item):
    """The backend that a case names in the arguments of its fixtures, or None."""
    for fixture in ("backend", *DTYPES_OF):
        value = item.callspec.params.get(fixture)
        if isinstance(value, str | tuple):
            return value if isinstance(value, str) else value[0]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """On a GPU machine, skips a test in float64, which kernels for GPUs refuse."""
    try:
        return (yield)
    except backends.BackendError as error:
        name = backend_of(item) if hasattr(item, "callspec") else None
        if (
            name is None
            or not torch.cuda.is_available()
            or torch.float64 in SERVED_DTYPES[name]
            or "float64" not in str(error)
        ):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    """Patches Triton's interpreter where tests run in it."""
    if IS_INTERPRETED and "triton" in pk.available_backends():
        from tests.kernels import triton_interpreter

        triton_interpreter.patch()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def ieee_products(monkeypatch):
    """Products of float32 in float32, where there are such; the interpreter has no others."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", IS_INTERPRETED)
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: False)


@pytest.fixture(autouse=True)
def route_of_any_processor(monkeypatch):
    """Fails a test of a convolution that only some processors leave to PyTorch.

    Such a test takes the fixture `processor`, or says what `has_amx` answers.
    """
    has_amx, is_faster = torch_compat.has_amx, cpu.CPUKernels._is_faster

    def checked(*arguments):
        if torch_compat.has_amx is has_amx:
            answers = set()
            for answer in (False, True):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(torch_compat, "has_amx", lambda answer=answer: answer)
                    answers.add(is_faster(*arguments))
            assert len(answers) == 1, "the convolution depends on AMX: take the fixture `processor`"
        return is_faster(*arguments)

    monkeypatch.setattr(cpu.CPUKernels, "_is_faster", checked)


# Whether the processor has AMX, and threads: what decides which convolution runs on an instruction
# set.
PROCESSORS = {"no_amx": (False, 1), "two_threads": (False, 2), "amx": (True, 1)}


@pytest.fixture(params=PROCESSORS.values(), ids=PROCESSORS)
def processor(request, monkeypatch):
    """Each processor in turn."""
    has_amx, threads = request.param
    monkeypatch.setattr(torch_compat, "has_amx", lambda: has_amx)
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def every_weight_is_fused(monkeypatch):
    """On every processor: a convolution of PyTorch fails."""
    for name in ("_pytorch_forward", "_pytorch_backward"):
        monkeypatch.delattr(UnitKernels, name)
    monkeypatch.setattr(cpu.CPUKernels, "_is_faster", lambda *_: True)


@pytest.fixture
def poisoned_memory():
    """Fills memory that PyTorch hands out uninitialised with NaN: an unwritten output shows.

    The CPU library, which allocates for itself, does so in every test.

    Under `compute-sanitizer --tool initcheck` memory stays as it is: the tool finds the reads.
    """
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    is_watched = os.environ.get("PK_SANITIZER") == "initcheck"  # set by `make check-gpu`
    torch.utils.deterministic.fill_uninitialized_memory = not is_watched
    # `torch.use_deterministic_algorithms` imports TorchInductor, which takes seconds. On a GPU some
    # operators of plain PyTorch have no deterministic algorithm.
    torch._C._set_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    yield
    torch._C._set_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = was_filling


@pytest.fixture
def fused_convolutions(first_schedule):
    """Skips a test of the CUDA library where that is missing."""
    if serve_cpu.missing():
        pytest.skip(f"backend cuda: {serve_cpu.missing()}")


@pytest.fixture
def first_schedule(poisoned_memory, monkeypatch):
    """The CUDA library may round to TF32, and on the host a test begins with the first schedule."""
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: True)
    if IS_CUDA_ON_HOST:
        serve_cpu.set_schedule()
    yield
    if IS_CUDA_ON_HOST:
        serve_cpu.set_schedule()


@pytest.fixture(autouse=True)
def library_calls(request):
    """Asserts that a test calls the ops that its marker `calls` names."""
    marker = request.node.get_closest_marker("calls")
    if marker is None:
        yield
        return
    libraries = {name.partition("::")[0].removeprefix("preact_kernels_") for name in marker.args}
    for row in backends.BACKENDS:
        if row.name in libraries and not row.is_available():
            pytest.skip(f"backend {row.name} is not available: {row.load_error()}")
    with CalledOps() as called:
        yield
    not_called = set(marker.args) - called.names
    assert not not_called, f"not called: {', '.join(sorted(not_called))}"


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


@pytest.fixture
def backend(request, poisoned_memory):
    """Each backend in turn, with every call sent to it."""
    with on_backend(request.param):
        yield request.param


def dtype_fixture(name):
    @pytest.fixture(name=name)
    def fixture(request, poisoned_memory):
        backend, dtype = request.param
        with on_backend(backend):
            yield dtype

    return fixture


dtype, training_dtype, wide_dtype = map(dtype_fixture, DTYPES_OF)
