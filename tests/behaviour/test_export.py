"""Tracers and exporters see PyTorch's own operators, and what they make computes the same."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, fx, nn

import preact_kernels as pk
from tests.cases import EVERY_MODULE, EVERY_PLAIN_FORWARD, small_network
from tests.oracle import assert_same_bits, evaluate, plain_copy, same_bits

every_module = pytest.mark.parametrize(
    "make", EVERY_PLAIN_FORWARD.values(), ids=EVERY_PLAIN_FORWARD
)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


@pytest.fixture(autouse=True)
def no_warnings_of_old_tracers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        yield


def images(batch=3):
    return torch.randn(batch, 10, 7, 6)


def buffers(module):
    return {n: t.clone() for n, t in module.named_buffers()}


def check_step(traced, module, x):
    """`traced` computes, differentiates and counts as the plain `module`."""
    plain = plain_copy(module)
    found, expected = ({}, {})
    for call, owner, results in ((traced, traced, found), (plain, plain, expected)):
        owner.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.sin().sum().backward()
        results |= {"y": y.detach(), "dx": leaf.grad, **dict(owner.named_buffers())}
        results |= {f"d{n}": p.grad for n, p in owner.named_parameters()}
    assert_same_bits(found, expected)


@every_module
@pytest.mark.covering(1)
@pytest.mark.parametrize("strict", [False, True], ids=["not_strict", "strict"])
def test_exported_modules_run_plain_operators(strict, make):
    module = make().eval()
    x = images()
    exported = torch.export.export(module, (x,), strict=strict)
    assert not any("preact_kernels" in str(node.target) for node in exported.graph.nodes)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    expected = plain_copy(module)(x)
    for program in (exported, torch.export.load(file)):
        assert same_bits(program.module()(x), expected)


@every_module
def test_modules_exported_in_training_mode_update_running_statistics(make):
    module = make()
    before = buffers(module)
    exported = torch.export.export(module, (images(),))
    assert_same_bits(buffers(module), before)
    check_step(exported.module(), module, images())


@pytest.mark.parametrize("make", [EVERY_MODULE["checkpointed_stage"], small_network])
def test_modules_exported_for_any_batch_size_serve_them(make):
    module = make().eval()
    shapes = {0: torch.export.Dim("batch", min=2)}
    exported = torch.export.export(module, (images(),), dynamic_shapes=(shapes,)).module()
    for batch in (2, 5, 8):
        x = images(batch)
        assert same_bits(exported(x), plain_copy(module)(x))


FUNCTIONS = {
    "bn_relu": lambda x, w, b, k, r: pk.bn_relu(x, w, b, training=True),
    "bn_relu_conv2d": lambda x, w, b, k, r: pk.bn_relu_conv2d(
        x, k, w, b, residual=r, training=True
    ),
    "residual_add": lambda x, w, b, k, r: pk.residual_add(x, r),
}


class Called(nn.Module):
    """A function as a module, for exporters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("tracer", ["export", "jit", "fx"])
def test_traced_functions_run_plain_operators(tracer, function):
    x, residual = torch.randn(2, 6, 5, 4), torch.randn(2, 6, 5, 4)
    tensors = (x, torch.randn(6), torch.randn(6), torch.randn(6, 6, 1, 1), residual)
    if tracer == "export":
        exported = torch.export.export(Called(function), tensors)
        traced, graph = exported.module(), exported.graph
    elif tracer == "jit":
        traced = torch.jit.trace(function, tensors)
        graph = traced.graph
    else:
        traced = fx.symbolic_trace(function)
        graph = traced.graph
    nodes = graph.nodes() if tracer == "jit" else graph.nodes
    operators = [n.kind() if tracer == "jit" else str(n.target) for n in nodes]
    assert not any("preact_kernels" in name for name in operators)
    torch.testing.assert_close(traced(*tensors), function(*tensors))


def onnx_file(module, x, dynamo):
    pytest.importorskip("onnxscript", reason="the ONNX exporters need onnxscript")
    file = io.BytesIO()
    options = {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False}
    program = torch.onnx.export(module, (x,), None if dynamo else file, **options)
    if dynamo:
        program.save(file)
    return file.getvalue()


@every_module
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_onnx_models_give_the_same_results(dynamo, make):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the models")
    module = make().eval()
    x = images()
    model = onnx_file(module, x, dynamo)
    assert b"preact_kernels::" not in model
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = plain_copy(module)(x).detach()
    torch.testing.assert_close(torch.from_numpy(y), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.covering(1)
@both_modes
@every_module
def test_jit_traced_modules_compute_the_same(training, make):
    module = make().train(training)
    traced = torch.jit.trace(copy.deepcopy(module), images(), check_trace=False)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    for program in (traced, torch.jit.load(file)):
        module.load_state_dict(program.state_dict())
        check_step(program, module, images())


def test_tracing_with_torch_jit_leaves_running_statistics_as_the_plain_model_does():
    module = small_network()
    plain, x = plain_copy(module), images()
    for m in (module, plain):
        torch.jit.trace(m, x, check_trace=False)
    assert_same_bits(buffers(module), buffers(plain))


@pytest.mark.covering(1)
@both_modes
@every_module
def test_symbolic_traces_compute_the_same(training, make):
    module = make().train(training)
    traced = fx.symbolic_trace(copy.deepcopy(module))
    check_step(traced, module, images())


@every_module
def test_symbolic_traces_call_the_plain_modules(make):
    module = make()
    traced = fx.symbolic_trace(module)
    called = {str(n.target) for n in traced.graph.nodes if n.op == "call_module"}
    plain = (nn.BatchNorm2d, nn.Conv2d)
    assert called >= {n for n, child in module.named_modules() if isinstance(child, plain)}
    assert not any(type(traced.get_submodule(n)).__module__.startswith("preact") for n in called)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_symbolic_traces_of_a_float32_stream_beside_half_precision(dtype):
    module = EVERY_MODULE["float32_stream"]().to(dtype)
    check_step(fx.symbolic_trace(copy.deepcopy(module)), module, images().to(dtype))


@pytest.mark.parametrize("copied", ["traced", "deepcopy", "pickle"])
@both_modes
def test_symbolic_traces_of_a_float32_stream_follow_the_mode_of_a_run(training, copied):
    module = EVERY_MODULE["float32_stream"]().bfloat16().train(training)
    traced = fx.symbolic_trace(copy.deepcopy(module))
    if copied == "deepcopy":
        traced = copy.deepcopy(traced)
    elif copied == "pickle":
        traced = pickle.loads(pickle.dumps(traced))
    for mode in (not training, training):
        check_step(traced.train(mode), module.train(mode), images().bfloat16())
        module.load_state_dict(traced.state_dict())


def test_a_residual_is_traced():
    module = pk.BNReLUConv2d(10, 10, 1)
    x, residual = images(), images()
    traced = fx.symbolic_trace(copy.deepcopy(module))
    assert same_bits(traced(x, residual), plain_copy(module)(x, residual))


def test_a_trace_of_several_inputs_reads_no_shapes():
    def function(x: Tensor, branch: Tensor, bn_weight: Tensor) -> Tensor:
        y = pk.residual_add(x, branch)
        return pk.bn_relu(y, bn_weight, None, training=True)

    graph = fx.symbolic_trace(function).graph
    assert [n.op for n in graph.nodes].count("call_function") == 3
    x, branch, weight = images(), images(), torch.randn(10)
    traced = fx.GraphModule(nn.Module(), graph)
    expected = evaluate(function, {"x": x, "branch": branch, "bn_weight": weight})["y"]
    torch.testing.assert_close(traced(x, branch, weight), expected)
