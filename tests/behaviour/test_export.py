"""Tracers and exporters see PyTorch's own operators, and what they make computes the same."""

import copy
import io
import pickle

import pytest
import torch
from torch import fx, nn

import preact_kernels as pk
from tests.cases import EVERY_MODULE
from tests.oracle import assert_same_bits, plain_copy, same_bits

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated

# One for each forward: the network calls `BNReLU2d`, stages and blocks.
modules = pytest.mark.parametrize(
    "name", ["bn_relu_conv", "batch_norm_act_conv", "norm_act_conv", "float32_stream", "network"]
)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def images(batch=3):
    return torch.randn(batch, 10, 7, 6)


def buffers(module):
    return {n: t.clone() for n, t in module.named_buffers()}


def reloaded(program, package=torch.jit):
    """What `package` loads after it saved `program`."""
    file = io.BytesIO()
    package.save(program, file)
    file.seek(0)
    return package.load(file)


def check_step(traced, module, x):
    """`traced` computes, differentiates and counts as the plain `module`."""
    results = []
    for m in (traced, plain_copy(module)):
        m.zero_grad()
        leaf = x.clone().requires_grad_()
        y = m(leaf)
        y.sin().sum().backward()
        gradients = {f"d{n}": p.grad for n, p in m.named_parameters()}
        results.append({"y": y.detach(), "dx": leaf.grad, **gradients, **buffers(m)})
    assert_same_bits(*results)


@modules
@pytest.mark.covering(1)
@pytest.mark.parametrize("strict", [False, True], ids=["not_strict", "strict"])
def test_exported_modules_run_plain_operators_for_any_batch_size(strict, name):
    module = EVERY_MODULE[name]().eval()
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    exported = torch.export.export(module, (images(),), dynamic_shapes=shapes, strict=strict)
    assert not any("preact_kernels" in str(node.target) for node in exported.graph.nodes)
    for program in (exported, reloaded(exported, torch.export)):
        for batch in (2, 5):
            x = images(batch)
            assert same_bits(program.module()(x), plain_copy(module)(x))


def test_modules_exported_in_training_mode_update_running_statistics():
    module = EVERY_MODULE["network"]()
    before = buffers(module)
    exported = torch.export.export(module, (images(),))
    assert_same_bits(buffers(module), before)
    check_step(exported.module(), module, images())


class Functions(nn.Module):
    """The functions, as a module, for exporters."""

    def forward(self, x, branch, weight, bias, conv_weight):
        scale = branch.mean((2, 3))
        x = pk.bn_relu(pk.residual_add(x, branch), weight, bias, training=True)
        x = pk.bn_relu_conv2d(x, conv_weight, weight, bias, residual=branch, training=True)
        x = pk.group_norm_act(x, 3, weight, bias, activation="silu", scale=scale)
        norm = {"training": True, "activation": "gelu", "shift": scale}
        x = pk.batch_norm_act_conv(x, weight, bias, conv_weight=conv_weight, **norm)
        return pk.group_norm_act_conv(x, 1, conv_weight=conv_weight, residual=branch)


@pytest.mark.parametrize("tracer", ["export", "jit", "fx"])
def test_traced_functions_run_plain_operators(tracer):
    x, branch = torch.randn(2, 6, 5, 4), torch.randn(2, 6, 5, 4)
    tensors = (x, branch, torch.randn(6), torch.randn(6), torch.randn(6, 6, 1, 1))
    if tracer == "export":
        exported = torch.export.export(Functions(), tensors)
        traced, graph = exported.module(), exported.graph
    elif tracer == "jit":
        traced = torch.jit.trace(Functions(), tensors)
        graph = traced.graph
    else:
        traced = fx.symbolic_trace(Functions())
        graph = traced.graph
    nodes = graph.nodes() if tracer == "jit" else graph.nodes
    operators = [n.kind() if tracer == "jit" else str(n.target) for n in nodes]
    assert not any("preact_kernels" in name for name in operators)
    torch.testing.assert_close(traced(*tensors), Functions()(*tensors))


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_onnx_models_give_the_same_results(dynamo):
    pytest.importorskip("onnxscript", reason="the ONNX exporters need onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the models")
    module = EVERY_MODULE["network"]().eval()
    x, file = images(), io.BytesIO()
    options = {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False}
    program = torch.onnx.export(module, (x,), None if dynamo else file, **options)
    if dynamo:
        program.save(file)
    assert b"preact_kernels::" not in file.getvalue()
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(file.getvalue(), providers=providers)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = plain_copy(module)(x).detach()
    torch.testing.assert_close(torch.from_numpy(y), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.covering(1)
@both_modes
@modules
def test_jit_traced_modules_compute_the_same(training, name):
    module = EVERY_MODULE[name]().train(training)
    plain, x = plain_copy(module), images()
    traced = torch.jit.trace(module, x, check_trace=False)
    torch.jit.trace(plain, x, check_trace=False)
    assert_same_bits(buffers(module), buffers(plain))
    for program in (traced, reloaded(traced)):
        module.load_state_dict(program.state_dict())
        check_step(program, copy.deepcopy(module), images())


@pytest.mark.covering(1)
@both_modes
@modules
def test_symbolic_traces_call_the_plain_modules_and_compute_the_same(training, name):
    module = EVERY_MODULE[name]().train(training)
    traced = fx.symbolic_trace(copy.deepcopy(module))
    called = {str(n.target) for n in traced.graph.nodes if n.op == "call_module"}
    plain = (nn.BatchNorm2d, nn.Conv2d)
    assert called >= {n for n, child in module.named_modules() if isinstance(child, plain)}
    assert not any(type(traced.get_submodule(n)).__module__.startswith("preact") for n in called)
    check_step(traced, module, images())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_symbolic_traces_of_a_float32_stream_follow_the_mode_of_a_run(copied):
    module = EVERY_MODULE["float32_stream"]().bfloat16().eval()
    traced = copied(fx.symbolic_trace(copy.deepcopy(module)))
    for mode in (True, False):
        check_step(traced.train(mode), module.train(mode), images().bfloat16())
        module.load_state_dict(traced.state_dict())


def test_optional_arguments_are_traced():
    module, unit = EVERY_MODULE["norm_act_conv"](), pk.BNReLUConv2d(10, 16, 3, padding=1)
    x, residual, scale = images(), torch.randn(3, 16, 7, 6), torch.randn(3, 10)
    traced = fx.symbolic_trace(copy.deepcopy(module))
    for arguments in ((), (residual,), (None, scale, scale), (residual, None, scale)):
        assert same_bits(traced(x, *arguments), plain_copy(module)(x, *arguments))
    traced = fx.symbolic_trace(copy.deepcopy(unit))
    assert same_bits(traced(x, residual), plain_copy(unit)(x) + residual)
