"""Compiling, copying and pickling change nothing."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import preact_kernels as pk
from preact_kernels.ops import schema
from tests.cases import ConvCase, conv_inputs, in_dtype, random_block, random_stage, randomised
from tests.oracle import assert_same_bits, evaluate

pytestmark = pytest.mark.backends("cpu")  # graphs hold ops, and ops find a backend

CASE = ConvCase("typical", (2, 8, 5, 6), 16, padding=1, conv_bias=True, residual=True)
WITHOUT_BIAS = ConvCase("plain", (2, 8, 5, 6), 16, 1)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def bn_relu(x, bn_weight, bn_bias, running_mean, running_var):
    return pk.bn_relu(x, bn_weight, bn_bias, running_mean, running_var, training=True)


def bn_relu_evaluation(x, bn_weight, bn_bias, running_mean, running_var):
    return pk.bn_relu(x, bn_weight, bn_bias, running_mean, running_var, training=False)


def bn_relu_conv2d(x, conv_weight, **inputs):
    return pk.bn_relu_conv2d(x, conv_weight, **inputs, training=True, **CASE.conv)


def bn_relu_conv2d_same(x, conv_weight, **inputs):
    return pk.bn_relu_conv2d(x, conv_weight, **inputs, training=True, padding="same")


def norm_inputs():
    names = ("x", "bn_weight", "bn_bias", "running_mean", "running_var")
    return {n: t for n, t in conv_inputs(CASE).items() if n in names}


FUNCTIONS = {
    "bn_relu": (bn_relu, norm_inputs),
    "bn_relu_evaluation": (bn_relu_evaluation, norm_inputs),
    "bn_relu_conv2d": (bn_relu_conv2d, lambda: conv_inputs(CASE)),
    "bn_relu_conv2d_same": (bn_relu_conv2d_same, lambda: conv_inputs(CASE)),
    "residual_add": (
        lambda x, branch: pk.residual_add(x, branch),
        lambda: {"x": torch.randn(2, 8, 5, 6), "branch": torch.randn(2, 8, 5, 6)},
    ),
}


@pytest.mark.parametrize(("function", "inputs"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_compiled_functions_give_the_same_bits(function, inputs, backend):
    inputs = inputs()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits(evaluate(compiled, inputs), evaluate(function, inputs))


MODULES = {
    "bn_relu": lambda: pk.BNReLU2d(10),
    "cumulative_average": lambda: pk.BNReLU2d(10, momentum=None),
    "bn_relu_conv": lambda: pk.BNReLUConv2d(10, 16, 3, padding=1, bias=True),
    "bottleneck": lambda: random_block("bottleneck", 10, 8, 2),
    "stage": random_stage,
    "rebuilt_stage": lambda: random_stage(memory="rebuild"),
    "checkpointed_stage": lambda: random_stage(memory="checkpoint"),
}
every_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)


def run(module, call, batch=3):
    """Output, gradients and buffers of one step of `call`, which runs `module`."""
    x = torch.linspace(-2, 2, batch * 10 * 7 * 6).sin().view(batch, 10, 7, 6).requires_grad_()
    module.zero_grad()
    y = call(x)
    if y.requires_grad:
        y.backward(torch.linspace(-1, 1, y.numel()).cos().view(y.shape))
    gradients = {f"d{n}": p.grad for n, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **dict(module.named_buffers())}


@every_module
@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
def test_compiled_modules_give_the_same_bits(module, training, backend):
    module = randomised(module()).train(training)
    other = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_bits(run(module, compiled), run(other, other))


@pytest.mark.backends("cpu", "triton", "cuda", slow=("reference",))
@pytest.mark.covering(1, cpu=2)
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.parametrize("sizes", [(10, 10), (10, 16, 2)], ids=["plain", "projection"])
def test_a_compiled_stage_beside_a_float32_stream_gives_the_same_bits(memory, sizes, backend):
    """An op rounds the gradient of PyTorch's convolution, which was rounded before."""
    width = sizes[1]
    blocks = [random_block("basic", *sizes), random_block("basic", width, width)]
    stage = pk.PreActStage(blocks, memory, residual_dtype=torch.float32)
    stage = in_dtype(stage, torch.bfloat16)
    other = copy.deepcopy(stage)
    compiled = torch.compile(stage, fullgraph=True, backend="aot_eager")
    assert_same_bits(run(stage, compiled), run(other, other))


class Headed(nn.Module):
    """Two stages, the second of which has an input of computed shape, between plain layers."""

    def __init__(self, memory):
        super().__init__()
        self.stem = nn.Conv2d(10, 10, 3, padding=1)
        self.stages = nn.Sequential(
            random_stage("basic", memory=memory),
            pk.PreActStage([random_block("basic", 6, 6, 2), random_block("basic", 6, 6)], memory),
        )
        self.norm = pk.BNReLU2d(6)

    def forward(self, x):
        return self.norm(self.stages(self.stem(x))).mean((2, 3))


OF_ANY_BATCH_SIZE = {
    **MODULES,
    "network": lambda: Headed("store"),
    "rebuilt_network": lambda: Headed("rebuild"),
    "checkpointed_network": lambda: Headed("checkpoint"),
}
# The networks have stages of every memory mode too.
any_batch_size = pytest.mark.parametrize(
    "module",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] * name.endswith("stage"))
        for name, make in OF_ANY_BATCH_SIZE.items()
    ],
)


@pytest.mark.covering(1)
@any_batch_size
@pytest.mark.parametrize(
    ("dynamic", "frames"), [(None, 2), (True, 1)], ids=["automatic", "dynamic"]
)
def test_training_compiles_once_for_any_batch_size(module, dynamic, frames, backend):
    module = randomised(module())
    other, counter = copy.deepcopy(module), CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=dynamic)
    for batch in (3, 4, 5, 7):
        assert_same_bits(run(module, compiled, batch), run(other, other, batch))
    assert counter.frame_count == frames


@any_batch_size
def test_evaluation_compiles_once_for_any_batch_size(module, backend):
    module, counter = randomised(module()).eval(), CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    for batch in (3, 4, 7):
        assert_same_bits(run(module, compiled, batch), run(module, module, batch))
    assert counter.frame_count == 1


@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_graphs_behind_autograd_serve_any_batch_size(memory, backend):
    counter = CompileCounterWithBackend("aot_eager")
    module = random_stage(memory=memory)
    other = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for batch in (3, 4, 5, 7):
        assert_same_bits(run(module, compiled, batch), run(other, other, batch))
    assert counter.frame_count == 2


@every_module
def test_functional_call_reads_the_parameters_given(module, backend):
    module, other = randomised(module()).eval(), randomised(module()).eval()
    state = {n: t.detach() for n, t in (*other.named_parameters(), *other.named_buffers())}
    x = torch.randn(3, 10, 7, 6)
    assert torch.equal(torch.func.functional_call(module, state, (x,)), other(x))


@pytest.mark.covering(1)
@every_module
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_equal_and_independent(module, copied, backend):
    module = randomised(module())
    module(torch.randn(3, 10, 7, 6))
    other = copied(module)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    assert_same_bits(run(other, other), run(module, module))
    with torch.no_grad():
        for t in other.state_dict().values():
            t.zero_()
    after = module.state_dict()
    parameters = [n for n, _ in module.named_parameters()]
    assert_same_bits({n: after[n] for n in parameters}, {n: before[n] for n in parameters})


def kernel_arguments(dtype):
    """Arguments of every registered op."""

    def images(*shape):
        return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)

    wide = torch.promote_types(dtype, torch.float32)
    x, y = images(2, 8, 5, 6), images(2, 16, 5, 6)
    vectors = [torch.rand(8, dtype=wide) + 0.5 for _ in range(4)]
    behind = [torch.rand(16, dtype=wide) + 0.5 for _ in range(3)]
    norm = (*vectors, 1e-5)
    sums, sums_behind = torch.randn(2, 8, dtype=wide), torch.randn(2, 16, dtype=wide)
    weight, bias = torch.randn(16, 8, 3, 3).to(dtype), torch.randn(16).to(dtype)
    conv = ([1, 1], [1, 1], [1, 1], 1)
    strided = ([2, 1], [1, 0], [1, 2], 1)
    whole = (None, None, None, None, None, 0.0, None, 0.0)
    folded = (y, *behind, 1e-5, sums_behind, 1 / 60)
    backward = (x, *norm, weight, *conv)
    return {
        "bn_stats": [(x,)],
        "running_stats_update": [([vectors[0], vectors[1]], [vectors[2], vectors[3]], 0.1)],
        "bn_relu_forward": [(x, *norm)],
        "bn_relu_backward_sums": [(x, x, *norm)],
        "bn_relu_backward_mask": [(x, x, *norm)],
        "bn_relu_backward_input": [(x, x, *norm, sums, 1 / 60)],
        "bn_input_gradient": [
            (x, None, x.clone(), *vectors[:3], 1e-5, sums, 1 / 60),
            (x, x.clone(), x.clone(), *vectors[:3], 1e-5, sums, 0.0),
        ],
        "bn_relu_conv_forward": [
            (x, *norm, weight, *conv, None, None, False, None),
            (x, *norm, weight, *conv, bias, y, True, None),
            (x, *norm, weight, *strided, bias, None, True, None),
            # Beside a float32 stream: on the side of the input, and on that of the output.
            (x.to(wide), *norm, weight, *conv, None, None, True, dtype),
            (x, *norm, weight, *conv, None, y.to(wide), True, dtype),
        ],
        "bn_relu_conv_backward": [
            (y, *whole, *backward, True, True, False),
            (y, None, *folded, *backward, True, False, False),
            (y, y.clone(), *folded, *backward, False, True, True),
            (y, *whole, x.to(wide), *backward[1:], True, True, False),
            (y, *whole, x.to(wide), *backward[1:], False, True, False),
            (y, y.to(wide), y.to(wide), *folded[1:], *backward, True, True, True),
        ],
        "residual_add_forward": [(x, x.clone(), False), (x, x.clone(), True)],
    }


@pytest.mark.backends("cpu", "triton", "cuda", slow=("reference",))
@pytest.mark.covering(1, cpu=2)
@pytest.mark.parametrize("name", schema.SCHEMAS)
def test_registered_ops_keep_their_schemas_and_fakes(name, dtype):
    op = getattr(torch.ops.preact_kernels, name).default
    for arguments in kernel_arguments(dtype)[name]:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_every_registered_op_is_checked():
    assert kernel_arguments(torch.float32).keys() == schema.SCHEMAS.keys()


def test_a_network_compiles_into_one_graph(backend):
    network = pk.preact_resnet(20)
    x = torch.randn(2, 3, 8, 8)
    plain = nn.Sequential(copy.deepcopy(network))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    loss = compiled(x).square().sum()
    loss.backward()
    expected = plain(x).square().sum()
    expected.backward()
    assert torch.equal(loss, expected)
    for p, q in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_other_buffers_do_not_compile_again():
    counter = CompileCounter()
    stage = pk.PreActStage([random_block("basic", 10, 10) for _ in range(2)])
    compiled = torch.compile(stage, backend=counter)
    for _ in range(4):
        for bn in (m for m in stage.modules() if isinstance(m, nn.BatchNorm2d)):
            bn.running_mean = bn.running_mean.clone()
        compiled(torch.randn(2, 10, 5, 5))
    assert counter.frame_count == 1


def test_a_stage_whose_input_needs_no_gradient_compiles_into_one_graph():
    stage = pk.PreActStage([random_block("basic", 10, 10) for _ in range(3)])
    stage[0].requires_grad_(False)
    x = torch.randn(2, 10, 5, 5)
    compiled = torch.compile(stage, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    found = [p.grad for p in stage.parameters()]
    stage.zero_grad()
    stage(x).sum().backward()
    for gradient, p in zip(found, stage.parameters(), strict=True):
        assert (gradient is None) == (p.grad is None)
        assert gradient is None or torch.equal(gradient, p.grad)
