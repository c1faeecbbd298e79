"""Compiling, pickling and functional calls change nothing."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import preact_kernels as pk
from preact_kernels.activations import RELU, Activation
from preact_kernels.kernels.contract import Norm
from preact_kernels.ops import dispatch, schema
from tests.cases import (
    EVERY_MODULE,
    SERVED_DTYPES,
    ConvCase,
    conv_inputs,
    in_dtype,
    random_block,
    randomised,
    recorded_calls,
)
from tests.oracle import assert_same_bits, evaluate

pytestmark = pytest.mark.backends("cpu")  # graphs hold ops, and ops find a backend

CASE = ConvCase("typical", (2, 8, 5, 6), 16, padding=1, conv_bias=True, residual=True)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_functions_give_the_same_bits(backend):
    def function(x, conv_weight, residual, **inputs):
        norm = {name: t for name, t in inputs.items() if name != "conv_bias"}
        x = pk.bn_relu(pk.residual_add(x, x.sin()), **norm, training=True)
        options = {"residual": residual, "padding": "same", "training": True}
        return pk.bn_relu_conv2d(x, conv_weight, **inputs, **options)

    inputs = conv_inputs(CASE)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits(evaluate(compiled, inputs), evaluate(function, inputs))


def test_numbers_may_change_between_compiled_calls(backend):
    def function(x, conv_weight, number):
        options = {"activation": ("leaky_relu", number), "eps": number, "dropout": number}
        return pk.group_norm_act_conv(x, 2, conv_weight=conv_weight, **options)

    x, conv_weight = torch.randn(2, 4, 3), torch.randn(3, 4, 1)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for number in (0.1, 0.2, 0.3):
        found = []
        for call in (compiled, function):
            torch.manual_seed(4)
            found.append(call(x, conv_weight, number))
        assert found[0].equal(found[1])


def run(module, call, batch=3):
    """Output, gradients and buffers of one step of `call`, which runs `module`."""
    x = torch.linspace(-2, 2, batch * 10 * 7 * 6).sin().view(batch, 10, 7, 6).requires_grad_()
    module.zero_grad()
    y = call(x)
    y.backward(torch.linspace(-1, 1, y.numel()).cos().view(y.shape))
    gradients = {f"d{n}": p.grad for n, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **dict(module.named_buffers())}


def stage_of_two(memory, **options):
    return pk.PreActStage([random_block("basic", 10, 10) for _ in range(2)], memory, **options)


def network_of_one_block():
    stages = [pk.PreActStage([random_block("basic", 10, 10)])]
    return pk.PreActResNet(nn.Conv2d(10, 10, 3), nn.Identity(), stages, 10, 5)


# With `dynamic` there is one compilation for any batch size, else a second one for the next batch.
COMPILED = {
    "cumulative_average": (lambda: randomised(pk.BNReLU2d(10, momentum=None)), True, None, "aot"),
    "bn_relu_conv": (EVERY_MODULE["bn_relu_conv"], True, True, "eager"),
    "norm_act_conv": (EVERY_MODULE["norm_act_conv"], True, True, "eager"),
    "batch_norm_act_conv": (EVERY_MODULE["batch_norm_act_conv"], True, True, "eager"),
    "parameter_of_activation": (
        lambda: pk.NormActConv(nn.InstanceNorm2d(10), nn.LeakyReLU(0.25), nn.Conv2d(10, 4, 1)),
        True,
        True,
        "eager",
    ),
    "basic_block": (EVERY_MODULE["basic_block"], True, True, "eager"),
    "network_evaluation": (network_of_one_block, False, True, "eager"),
    "rebuilt_stage": (lambda: stage_of_two("rebuild"), True, None, "aot"),
    "checkpointed_stage": (lambda: stage_of_two("checkpoint", segments=2), True, True, "eager"),
}


@pytest.mark.parametrize(("make", "training", "dynamic", "graphs"), COMPILED.values(), ids=COMPILED)
def test_modules_compile_once_for_any_batch_size(make, training, dynamic, graphs, backend):
    module = make().train(training)
    other = copy.deepcopy(module)
    counter = CompileCounter() if graphs == "eager" else CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=dynamic)
    for batch in (3, 4, 5):
        assert_same_bits(run(module, compiled, batch), run(other, other, batch))
    assert counter.frame_count == (1 if dynamic else 2)


# On other backends dx has the g that compiled units round, unrounded, but for ReLU.
@pytest.mark.backends("reference", "cpu")
def test_a_compiled_unit_with_scale_shift_and_dropout_gives_the_same_bits(backend):
    conv = nn.Conv1d(8, 6, 3, padding=1)
    module = pk.NormActConv(nn.GroupNorm(4, 8), ("elu", 0.5), conv, dropout=0.25).bfloat16()
    inputs = {"x": torch.randn(3, 8, 5), "scale": torch.randn(3, 8), "shift": torch.randn(3, 8)}
    inputs = {n: t.bfloat16() for n, t in inputs.items()}
    inputs["residual"] = torch.randn(3, 6, 5)

    def seeded(call):
        def run(**inputs):
            torch.manual_seed(4)
            return call(**inputs)

        return evaluate(run, inputs)

    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_bits(seeded(compiled), seeded(module))


@pytest.mark.slow
def test_inductor_gives_close_results(backend):
    module = EVERY_MODULE["bn_relu_conv"]()
    other = copy.deepcopy(module)
    found = run(module, torch.compile(module, fullgraph=True))
    torch.testing.assert_close(found, run(other, other))


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_a_compiled_stage_beside_a_float32_stream_gives_the_same_bits(backend):
    """An op rounds the gradient of PyTorch's convolution, which was rounded before."""
    block = random_block("basic", 10, 16, 2)
    stage = pk.PreActStage([block], residual_dtype=torch.float32)
    stage = in_dtype(stage, torch.bfloat16)
    other = copy.deepcopy(stage)
    compiled = torch.compile(stage, fullgraph=True, backend="aot_eager")
    assert_same_bits(run(stage, compiled), run(other, other))


def test_a_stage_whose_input_needs_no_gradient_compiles_into_one_graph(backend):
    stage = pk.PreActStage([random_block("basic", 10, 10) for _ in range(2)])
    stage[0].requires_grad_(False)
    x = torch.randn(2, 10, 5, 5)
    compiled = torch.compile(stage, fullgraph=True, backend="aot_eager")
    gradients = []
    for call in (compiled, stage):
        stage.zero_grad()
        call(x).sum().backward()
        gradients.append({n: p.grad for n, p in stage.named_parameters()})
    assert_same_bits(*gradients)


def test_other_buffers_do_not_compile_again():
    counter = CompileCounter()
    stage = pk.PreActStage([random_block("basic", 10, 10)])
    compiled = torch.compile(stage, backend=counter)
    for _ in range(4):
        for bn in (m for m in stage.modules() if isinstance(m, nn.BatchNorm2d)):
            bn.running_mean = bn.running_mean.clone()
        compiled(torch.randn(2, 10, 5, 5))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["bn_relu_conv", "norm_act_conv", "network"])
def test_functional_call_reads_the_parameters_given(name, backend):
    module, other = EVERY_MODULE[name]().eval(), EVERY_MODULE[name]().eval()
    x = torch.randn(3, 10, 7, 6)
    module(x)
    found = torch.func.functional_call(module, other.state_dict(), (x,))
    assert torch.equal(found, other(x))


@pytest.mark.parametrize("name", ["bn_relu_conv", "batch_norm_act_conv", "checkpointed_network"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal_and_independent(copied, name, backend):
    module = EVERY_MODULE[name]()
    module(torch.randn(3, 10, 7, 6))
    other = copied(module)
    assert_same_bits(run(other, other), run(module, module))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    with torch.no_grad():
        for t in other.state_dict().values():
            t.zero_()
    assert_same_bits(module.state_dict(), before)


def test_a_residual_and_the_backward_from_y_compile_into_one_graph(backend):
    def function(dy, x, residual, *tables):
        kernels, norm = dispatch.kernels_for(x), Norm(*tables, 1e-5)
        y = kernels.norm_act_forward(x, norm, residual)
        identity = kernels.norm_act_forward(x, norm._replace(activation="identity"), residual)
        g, sums = kernels.norm_act_backward(dy, x, norm, True, y)
        _, alone = kernels.norm_act_backward(dy, x, norm, False, y)
        return {"y": y, "identity": identity, "g": g, "sums": sums, "alone": alone}

    images = torch.randn(3, 2, 10, 5, 4)
    dy, x, residual = (t.contiguous(memory_format=torch.channels_last) for t in images)
    tables = torch.rand(4, 10) + 0.5
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = compiled(dy, x, residual, *tables)
    assert_same_bits(found, function(dy, x, residual, *tables))
    assert all(found[name].stride() == x.stride() for name in ("y", "identity", "g"))


def kernel_arguments(dtype):
    """Arguments of every registered op."""

    def images(*shape):
        return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)

    wide = torch.promote_types(dtype, torch.float32)
    x, y = images(2, 8, 5, 6), images(2, 16, 5, 6)
    vectors = [torch.rand(8, dtype=wide) + 0.5 for _ in range(4)]
    behind = [torch.rand(16, dtype=wide) + 0.5 for _ in range(3)]
    norm = (*vectors, 1e-5, "relu", 0.0)
    rows = torch.rand(2, 8, dtype=wide) + 0.5
    in_rows = (rows, vectors[1], vectors[2], rows.clone(), 1e-5, "elu", 0.5)
    row_sums = torch.randn(2, 2, 8, dtype=wide)
    sums, sums_behind = torch.randn(2, 8, dtype=wide), torch.randn(2, 16, dtype=wide)
    weight, bias = torch.randn(16, 8, 3, 3).to(dtype), torch.randn(16).to(dtype)
    conv = ([1, 1], [1, 1], [1, 1], 1)
    strided = ([2, 1], [1, 0], [1, 2], 1)
    whole = (None, None, None, None, None, 0.0, None, 0.0)
    step = (y, *behind, 1e-5, sums_behind, 1 / 60)
    backward = (x, *norm, weight, *conv)
    backward_of_norms = [
        (x, x, *norm, None),
        (x, x, *in_rows, None),
        (x, x.clone(), *norm, x.relu()),
        (x, x.clone(), *in_rows[:5], "relu", 0.0, x.relu()),
    ]
    return {
        "bn_stats": [(x,)],
        "group_stats": [(x, 2), (x, 8)],
        "running_stats_update": [([vectors[0], vectors[1]], [vectors[2], vectors[3]], 0.1)],
        "norm_act_forward": [
            (x, *norm, None),
            (x, *in_rows, None),
            (x, *norm, x.clone()),
            (x, *in_rows[:5], "identity", 0.0, x.clone()),
        ],
        "norm_act_backward_sums": backward_of_norms,
        "norm_act_backward_mask": backward_of_norms,
        "norm_act_recompute": [(x, x.clone(), *norm), (x, x.clone(), *in_rows)],
        "norm_act_backward_input": [
            (x, x, *norm, sums, 1 / 60, None),
            (x, x, *in_rows, row_sums, 1 / 30, None),
            (x, x, *norm, sums, 1 / 60, x.clone()),
        ],
        "norm_input_gradient": [
            (x, None, x.clone(), *vectors[:3], 1e-5, sums, 1 / 60),
            (x, x.clone(), x.clone(), *vectors[:3], 1e-5, sums, 0.0),
            (x, None, x.clone(), *in_rows[:3], 1e-5, row_sums, 1 / 30),
        ],
        "norm_act_conv_forward": [
            (x, *norm, weight, *conv, None, None, False, dtype),
            (x, *norm, weight, *strided, bias, None, True, dtype),
            (x, *in_rows, weight, *conv, bias, None, False, dtype),
            # Beside a float32 stream: on the side of the input, and on that of the output.
            (x.to(wide), *norm, weight, *conv, None, None, True, dtype),
            (x, *norm, weight, *conv, None, y.to(wide), True, dtype),
        ],
        "norm_act_conv_backward": [
            (y, *whole, *backward, True, True, False, dtype),
            (y, *whole, x, *in_rows, weight, *conv, True, True, False, dtype),
            (y, None, *step, *backward, True, False, False, dtype),
            (y, y.clone(), *step, *backward, False, True, True, dtype),
            (y, *whole, x.to(wide), *backward[1:], True, True, False, dtype),
            (y, y.to(wide), y.to(wide), *step[1:], *backward, True, True, True, dtype),
        ],
        "residual_add_forward": [
            (x, x.clone(), False, None),
            (x, x.clone(), True, None),
            (x, x.clone(), False, x[0, :, 0, 0].clone()),
        ],
    }


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.parametrize("name", schema.SCHEMAS)
def test_registered_ops_keep_their_schemas_and_fakes(name, backend):
    op = getattr(torch.ops.preact_kernels, name).default
    for dtype in {torch.bfloat16, torch.float64} & {*SERVED_DTYPES[backend]}:
        for arguments in kernel_arguments(dtype)[name]:
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["norm_act_conv_forward", "norm_act_conv_backward"])
def test_registered_ops_pass_units_with_the_activation_and_rows_of_the_norm(name, monkeypatch):
    kernels = schema.FakeKernels()
    calls = recorded_calls(kernels, name, monkeypatch)
    for arguments in kernel_arguments(torch.bfloat16)[name]:
        schema.call_with_flat_arguments(kernels, name, arguments)
        (function,) = (a for a in arguments if isinstance(a, str))
        activation = {"relu": RELU, "elu": Activation("elu", 0.5)}[function]
        unit = calls[-1][0]
        assert (unit.activation, unit.has_rows) == (activation, activation != RELU)
    assert len({call[0].activation for call in calls}) == 2
