"""Backends are chosen by name, and a named one is never replaced in silence."""

import asyncio
import concurrent.futures
import copy
import functools
import re
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from preact_kernels import __main__ as command
from preact_kernels import torch_compat
from preact_kernels.kernels import cpu, cuda, reference
from preact_kernels.kernels.contract import Conv, Unit
from preact_kernels.kernels.pytorch_conv import UnitKernels
from preact_kernels.ops import dispatch as backends
from tests.cases import SERVED_DTYPES, batch_norm_inputs, device_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
every_backend = pytest.mark.parametrize("name", pk.available_backends())


@pytest.fixture(autouse=True)
def choice():
    before = backends.current()
    yield
    pk.set_backend(before)
    backends.select.cache_clear()


def record_calls(monkeypatch, function_name):
    """Notes which backend's function runs."""
    ran = []
    for name in pk.available_backends():
        module = backends.select(name, device_of(name), torch.float32)
        function = getattr(module, function_name)

        def noted(*args, name=name, function=function):
            ran.append(name)
            return function(*args)

        monkeypatch.setattr(module, function_name, noted)
    return ran


def call(dtype=torch.float32, device="cpu"):
    inputs = batch_norm_inputs((2, 4, 3, 3), dtype)
    return pk.bn_relu(**{n: t.to(device) for n, t in inputs.items()}, training=True)


def test_the_reference_comes_first_and_every_backend_is_known_to_these_tests():
    assert pk.available_backends()[0] == "reference"
    assert set(pk.available_backends()) <= SERVED_DTYPES.keys()


@every_backend
def test_calls_run_on_the_backend_that_was_chosen(name, monkeypatch):
    ran = record_calls(monkeypatch, "norm_act_forward")
    with pk.use_backend(name):
        assert backends.current() == name
        call(device=device_of(name))
    assert ran == [name]
    assert backends.current() == "auto"
    pk.set_backend(name)
    call(device=device_of(name)), call(device=device_of(name))
    assert ran == [name] * 3


def test_on_a_gpu_auto_prefers_the_backend_that_runs_blocks_in_one_call():
    names = [b.name for b in backends.BACKENDS]
    assert names.index("cuda") < names.index("triton") < names.index("reference")


def fails():
    raise AssertionError


# Rows of the table, in order, without the reference; and the row that "auto" takes for the CPU.
TABLES = {
    "first": ({"first": {}, "second": {}}, "first"),
    "available": ({"first": {"load_error": lambda: "no"}, "second": {}}, "second"),
    "serves_the_dtype": ({"first": {"dtypes": (torch.float64,)}, "second": {}}, "second"),
    "not_only_by_name": ({"first": {"only_by_name": True}}, "reference"),
    "yields": ({"first": {"yields": lambda: True}, "second": {}}, "second"),
    "yields_to_the_reference_alone": ({"first": {"yields": lambda: True}}, "first"),
    "of_another_device_is_not_asked": (
        {"first": {"device_types": ("cuda",), "load_error": fails, "yields": fails}},
        "reference",
    ),
}


@pytest.mark.parametrize(("rows", "expected"), TABLES.values(), ids=TABLES)
def test_auto_takes_the_first_of_the_table_that_serves_the_call(rows, expected, monkeypatch):
    row = backends.Backend("", fails, (), (torch.float32,), lambda: "")
    table = [row._replace(name=name, **options) for name, options in rows.items()]
    monkeypatch.setattr(backends, "BACKENDS", (*table, row._replace(name="reference")))
    backends.select.cache_clear()
    assert backends._serving("auto", "cpu", torch.float32).name == expected


def test_a_gpu_without_a_c_compiler_for_triton_is_told_so(monkeypatch):
    monkeypatch.setattr(cuda, "gpu_refusal", lambda: "")
    monkeypatch.setattr(backends, "_triton_load_error", lambda: "triton finds no C compiler")
    row = backends._by_name["triton"]
    backends._warn_of_missing_library.cache_clear()
    expected = r"'triton' is not available \(triton finds no C compiler\), .* runs instead\.$"
    with pytest.warns(UserWarning, match=expected):
        backends._warn_of_missing_library(row)
    monkeypatch.setattr(cuda, "gpu_refusal", lambda: "no NVIDIA GPU")
    assert row.library_error() == ""


@pytest.fixture
def experimental(monkeypatch):
    """The backend that "auto" takes on a CPU is an experimental one."""
    row = backends.Backend("new", reference.kernels, (), DTYPES, lambda: "", is_experimental=True)
    monkeypatch.setattr(backends, "BACKENDS", (row, *backends.BACKENDS))
    backends.select.cache_clear()
    backends.warn_of_experimental.cache_clear()


@pytest.mark.usefixtures("experimental")
def test_the_first_use_of_an_experimental_backend_warns_once():
    with pytest.warns(UserWarning, match="'new' is experimental.*`python -m preact_kernels check`"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(torch.bfloat16)


@pytest.mark.usefixtures("experimental")
def test_a_comparison_on_an_example_does_not_hide_that_a_backend_is_experimental():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    with pytest.warns(UserWarning, match="experimental"):
        pk.convert(model, example_inputs=torch.randn(2, 4, 3, 3))


@pytest.mark.usefixtures("experimental")
def test_a_report_of_what_ran_names_the_experimental_backend():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    assert "experimental" not in str(pk.conversion_report(model))  # nothing runs fused
    pk.convert(model)
    with pytest.warns(UserWarning, match="experimental"):
        model(torch.randn(2, 4, 3, 3))
    assert "backend 'new' is experimental" in str(pk.conversion_report(model))
    with pk.use_backend("reference"):
        assert "experimental" not in str(pk.conversion_report(model))


def test_the_gpu_backends_are_experimental_where_they_run_on_a_gpu():
    is_experimental = {b.name: b.is_experimental for b in backends.BACKENDS}
    on_gpu = "cuda" in backends._by_name["triton"].device_types
    expected = {"cpu": False, "cuda": True, "triton": on_gpu, "reference": False}
    assert is_experimental == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is interpreted without a GPU")
def test_auto_never_interprets_triton(monkeypatch):
    ran = record_calls(monkeypatch, "norm_act_forward")
    call()
    assert ran == ["reference" if cpu.load_error() else "cpu"]
    assert backends._by_name["triton"].only_by_name


def test_auto_prefers_triton_on_some_gpus(monkeypatch):
    cuda_row = next(b for b in backends.BACKENDS if b.name == "cuda")
    capability = (8, 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(cuda, "gpu_refusal", lambda: "")
    assert cuda_row.yields()
    capability = (9, 0)
    assert not cuda_row.yields()
    monkeypatch.setattr(cuda, "gpu_refusal", lambda: "no GPU")
    capability = (8, 6)
    assert not cuda_row.yields()


def test_contexts_nest_and_end_with_an_exception():
    with pytest.raises(KeyError), pk.use_backend("reference"):
        with pk.use_backend("auto"):
            assert backends.current() == "auto"
        assert backends.current() == "reference"
        raise KeyError
    assert backends.current() == "auto"


def current_in_a_thread():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(backends.current).result()


def test_a_context_does_not_change_the_backend_of_other_threads():
    with pk.use_backend("reference"):
        assert current_in_a_thread() == "auto"
    entered, left = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)

    def beside():
        with pk.use_backend("reference"):
            entered.wait()
            left.wait()

    thread = threading.Thread(target=beside)
    thread.start()
    entered.wait()
    assert backends.current() == "auto"
    left.wait()
    thread.join()


def test_what_is_set_holds_in_all_threads_or_to_the_end_of_a_context():
    with pk.use_backend("auto"):
        pk.set_backend("reference")
        assert (backends.current(), current_in_a_thread()) == ("reference", "auto")
    assert backends.current() == "auto"
    pk.set_backend("reference")
    assert (backends.current(), current_in_a_thread()) == ("reference", "reference")
    with pk.use_backend("auto"):
        assert (backends.current(), current_in_a_thread()) == ("auto", "reference")


def test_tasks_have_the_backend_of_their_own_contexts():
    async def task(name, entered, other_entered):
        before = backends.current()
        with pk.use_backend(name):
            entered.set()
            await other_entered.wait()
            return before, backends.current()

    async def run():
        events = asyncio.Event(), asyncio.Event()
        with pk.use_backend("reference"):
            first = asyncio.create_task(task("auto", *events))
        second = asyncio.create_task(task("reference", *events[::-1]))
        found = await asyncio.wait_for(asyncio.gather(first, second), 60)
        return *found, backends.current()

    assert asyncio.run(run()) == (("reference", "auto"), ("auto", "reference"), "auto")


@pytest.mark.parametrize("passes_contexts", {False, torch_compat.PASSES_CONTEXTS})
def test_threads_of_a_backward_have_the_backend_of_the_code_that_called_it(
    passes_contexts, monkeypatch
):
    """Autograd changes threads at every 60th nested backward, and for a GPU at once."""
    monkeypatch.setattr(backends, "PASSES_CONTEXTS", passes_contexts)
    ran = []

    def function(x, depth):
        ran.append((threading.get_ident(), backends.current()))
        if depth == 0:
            return x.sin()
        return checkpoint(function, x, depth - 1, use_reentrant=True)

    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    with pk.use_backend("reference"):
        y = checkpoint(function, x, 130, use_reentrant=True)
        ran.clear()
        y.sum().backward()
    threads, names = map(set, zip(*ran, strict=True))
    assert len(threads) == 3
    assert names == {"reference"}
    with pk.use_backend("reference"):
        y = checkpoint(function, x, 130, use_reentrant=True)
    ran.clear()
    y.sum().backward()
    assert {name for _, name in ran} == {"auto"}


def test_no_block_is_left_entered():
    """`set_backend` in a task that began inside of a block changes the task alone."""

    async def select(name):
        pk.set_backend(name)
        return backends.current()

    async def run():
        with pk.use_backend("reference"), pk.use_backend("auto"), pk.use_backend("reference"):
            return await asyncio.create_task(select("auto"))

    assert asyncio.run(run()) == "auto"
    assert not backends._entered


def test_a_generator_may_leave_a_context_in_another_thread():
    def generator():
        with pk.use_backend("reference"):
            yield backends.current()

    values = generator()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(next, values).result() == "reference"
    values.close()
    assert backends.current() == "auto"


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_compiled_call_runs_on_the_backend_of_its_context(is_inside, monkeypatch):
    def function(x):
        if not is_inside:
            return pk.bn_relu(x, None, None, training=True)
        with pk.use_backend("reference"):
            return pk.bn_relu(x, None, None, training=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ran = record_calls(monkeypatch, "norm_act_forward")
    x = torch.randn(2, 4, 3, 3)
    for name in pk.available_backends():
        if device_of(name) == "cpu":
            with pk.use_backend(name):
                compiled(x)
    # A context inside of a compiled function has ended when the graph runs.
    assert ran == [name for name in pk.available_backends() if device_of(name) == "cpu"]


def test_a_backward_runs_on_the_backend_of_its_forward(monkeypatch):
    ran = record_calls(monkeypatch, "norm_act_backward")
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    with pk.use_backend("reference"):
        y = pk.bn_relu(x, None, None, training=True)
    y.sum().backward()
    assert ran == ["reference"]


@pytest.mark.backends("cpu")
def test_a_named_backend_leaves_the_meta_device_to_the_registered_ops(backend):
    unit = pk.BNReLUConv2d(16, 16, 1).to("meta")  # a float32 weight, which the CPU's kernels refuse
    y = unit(torch.empty(2, 16, 5, 6, dtype=torch.bfloat16, device="meta"))
    assert y.is_meta and y.dtype == torch.bfloat16


@every_backend
def test_a_named_backend_serves_its_dtypes_and_refuses_the_others(name):
    assert [call(dtype).dtype for dtype in DTYPES] == list(DTYPES)  # "auto"
    for dtype in DTYPES:
        with pk.use_backend(name):
            if dtype in SERVED_DTYPES[name]:
                assert call(dtype, device_of(name)).dtype == dtype
                continue
            message = f"{name!r}.*x: expected dtype .*, got {str(dtype)[6:]}"
            with pytest.raises(pk.BackendError, match=message) as raised:
                call(dtype, device_of(name))
            assert isinstance(raised.value, RuntimeError)


@every_backend
def test_a_named_backend_refuses_empty_tensors_as_others(name):
    for dtype in DTYPES:
        x = torch.empty(0, 4, 3, 3, dtype=dtype, device=device_of(name))
        with pk.use_backend(name):
            if dtype in SERVED_DTYPES[name]:
                assert pk.bn_relu(x, None, None, training=True).dtype == dtype
            else:
                with pytest.raises(pk.BackendError, match=f"{name!r}.*x: expected dtype"):
                    pk.bn_relu(x, None, None, training=True)


@pytest.mark.parametrize("name", ["CPU", None])
def test_unknown_names_are_refused_and_change_nothing(name):
    with pytest.raises(ValueError, match=f"backend: expected one of 'auto', .*got {name!r}"):
        pk.set_backend(name)
    with pytest.raises(ValueError, match="backend: expected one of"), pk.use_backend(name):
        pass
    assert backends.current() == "auto"


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("PREACT_KERNELS_BACKEND", "reference")
    backends._from_environment()
    assert backends.current() == "reference"


UNITS = {
    "1x1": ((64, 16, 1, 1), {}),
    "3x3": ((16, 16, 3, 3), {"padding": 1}),
    "3x3_strided": ((16, 16, 3, 3), {"padding": 1, "stride": 2}),
    "1x1_strided": ((16, 16, 1, 1), {"stride": 2}),
    "3x3_of_two_groups": ((16, 8, 3, 3), {"padding": 1, "groups": 2}),
    "1x1_of_many_channels": ((1024, 512, 1, 1), {}),
}


@pytest.mark.parametrize("name", ["auto", *pk.available_backends()])
def test_backend_for_says_which_convolution_runs(name, monkeypatch):
    calls = []
    function = UnitKernels._pytorch_forward

    def counted(*arguments):
        calls.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(UnitKernels, "_pytorch_forward", counted)
    for unit, (shape, options) in UNITS.items():
        weight = torch.randn(shape, device=device_of(name) if name != "auto" else "cpu")
        channels = shape[1] * options.get("groups", 1)
        calls.clear()
        with pk.use_backend(name):
            said = pk.backend_for(weight, **options)
            x = torch.randn(2, channels, 12, 12, device=weight.device)  # enough for wide ones
            pk.bn_relu_conv2d(x, weight, None, None, training=True, **options)
        backend, _, convolution = said.partition(": ")
        assert backend in ({name} if name != "auto" else pk.available_backends()), unit
        assert convolution == ("PyTorch convolution" if calls else "fused convolution"), unit


def test_backend_for_takes_a_dtype_and_a_device():
    weight = torch.empty(16, 16, 1, 1)
    auto = "reference" if cpu.load_error() else "cpu"
    assert pk.backend_for(weight, dtype=torch.float64) == f"{auto}: PyTorch convolution"
    assert pk.backend_for(weight, device="meta") == "reference: PyTorch convolution"
    with pk.use_backend("reference"):
        assert pk.backend_for(weight) == "reference: PyTorch convolution"


def test_the_reference_serves_float64_on_a_gpu_unless_another_backend_is_named(monkeypatch):
    on_gpu = {"load_error": str, "device_types": ("cuda",), "only_by_name": False}
    rows = [
        row._replace(**on_gpu) if row.name in ("cuda", "triton") else row
        for row in backends.BACKENDS
    ]
    monkeypatch.setattr(backends, "BACKENDS", rows)
    monkeypatch.setattr(backends, "_by_name", {row.name: row for row in rows})
    backend_for = functools.partial(
        pk.backend_for, torch.empty(16, 16, 3, 3), padding=1, device="cuda", dtype=torch.float64
    )
    assert backend_for() == "reference: PyTorch convolution"
    assert backends.select("auto", "cuda", torch.float64) is reference.kernels()
    for name in ("cuda", "triton"):
        monkeypatch.setattr(backends, "current", lambda name=name: name)
        message = "expected dtype float32, bfloat16, float16, got float64"
        with pytest.raises(pk.BackendError, match=f"{name!r} cannot .* dtype: {message}"):
            backend_for()
        with pytest.raises(pk.BackendError, match=f"{name!r} cannot .* x: {message}"):
            backends.select(name, "cuda", torch.float64)


# Shape of the weight, other arguments of `backend_for`, beginning of the reason on a CPU.
REFUSED = {
    "groups": ((16, 8, 3, 3), {"padding": 1, "groups": 2}, "groups: .* serves 1, got 2"),
    "dtype": ((16, 16, 1, 1), {"dtype": torch.float64}, "dtype: .* float16, got float64"),
    "dilation": ((16, 16, 3, 3), {"padding": 2, "dilation": 2}, r"dilation: .* 1, got \(2, 2\)"),
    "even kernel": ((16, 16, 2, 2), {}, "conv_weight: .* odd kernels, got 2x2"),
    "padding": ((16, 16, 3, 3), {}, r"padding: .* serves \(1, 1\), got \(0, 0\)"),
    "uneven padding": ((16, 16, 2, 2), {"padding": "same"}, "padding: .* sides .*, got 'same'"),
    "taps": ((16, 16, 9, 9), {"padding": 4}, r"conv_weight: .* up to \d+ taps, got 81"),
    "channels": ((10, 16, 1, 1), {}, r"conv_weight: .* multiples of \d+, got 16 to 10"),
}


@pytest.mark.skipif(bool(cpu.load_error()), reason="needs the CPU library")
@pytest.mark.parametrize(("shape", "options", "reason"), REFUSED.values(), ids=REFUSED)
def test_backend_for_says_why_a_convolution_is_not_fused(shape, options, reason):
    with pk.use_backend("cpu"):
        said = pk.backend_for(torch.empty(shape), **options)
    assert said == "cpu: PyTorch convolution" and type(said.reason) is str
    assert re.fullmatch(reason, said.reason)
    assert copy.deepcopy(said).reason == said.reason


@every_backend
def test_a_fused_convolution_and_only_that_has_no_reason(name):
    with pk.use_backend(name):
        for shape, options in UNITS.values():
            said = pk.backend_for(torch.empty(shape, device=device_of(name)), **options)
            assert said.endswith("fused convolution") == (said.reason == "")


@pytest.mark.skipif(bool(cpu.load_error()), reason="needs the CPU library")
def test_why_a_unit_is_refused_is_remembered_without_its_process_group():
    class Group:
        pass

    kernels, group = cpu.kernels(), Group()
    float32 = [torch.float32] * 4
    unit = Unit((16, 10, 1, 1), Conv((1, 1), (0, 0), (1, 1), 1), torch.device("cpu"), *float32)
    kernels._refusals.clear()
    expected = kernels.refusal(unit)
    assert kernels.refusal(unit._replace(process_group=group)) == expected != ""
    assert [*kernels._refusals] == [unit]
    alive = weakref.ref(group)
    del group
    assert alive() is None
    # Symbolic sizes cannot be keys either.
    assert kernels.refusal(unit._replace(weight_shape=[16, 10, 1, 1])) == expected


def test_the_command_prints_why_convolutions_are_not_fused(monkeypatch):
    with pk.use_backend("reference"):
        *_, last = command.served_units(torch.device("cpu"))
    reason = "backend: the reference has no fused convolution"
    assert last == f"{[*command.UNITS][-1]} (float32, bfloat16, float16): {reason}"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"conv_weight": [1]}, TypeError, "conv_weight: expected a torch.Tensor, got list"),
        ({"groups": 3}, ValueError, "multiple of groups 3"),
        ({"padding": -1}, ValueError, "padding: expected at least 0"),
        ({"dtype": torch.uint8}, TypeError, "dtype: expected float32,"),
        ({"device": "gpu"}, ValueError, "device: expected a device, got"),
    ],
)
def test_backend_for_names_what_is_wrong(change, error, message):
    with pytest.raises(error, match=message):
        pk.backend_for(**{"conv_weight": torch.empty(16, 16, 1, 1)} | change)


def test_backend_for_names_the_device_that_the_selected_backend_does_not_serve():
    with pk.use_backend("triton" if "triton" in pk.available_backends() else "cpu"):
        message = "device: expected a tensor on .*, got meta"
        with pytest.raises(pk.BackendError, match=message):
            pk.backend_for(torch.empty(16, 16, 1, 1), device="meta")


@pytest.mark.parametrize("compiler", ["CC", "gcc", "clang", None])
def test_triton_without_a_c_compiler_is_not_available(compiler, monkeypatch):
    monkeypatch.setattr(backends, "_IS_TRITON_INTERPRETED", False)
    monkeypatch.setattr(backends.cuda, "gpu_refusal", lambda: "")
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(backends.shutil, "which", lambda name: name if name == compiler else None)
    monkeypatch.delenv("CC", raising=False)
    if compiler == "CC":
        monkeypatch.setenv("CC", "cc")
    (triton,) = (b for b in backends.BACKENDS if b.name == "triton")
    assert triton.is_available() == (compiler is not None)
    if compiler is None:
        assert triton.load_error() == "triton finds no C compiler; install gcc or set CC"
