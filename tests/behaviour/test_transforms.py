"""Under functional transforms, everything runs and differentiates as the plain model does."""

import copy
import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import preact_kernels as pk
from preact_kernels.ops.plain_operators import runs_plain
from tests.cases import (
    EVERY_MODULE,
    in_dtype,
    plain_bn_relu,
    plain_bn_relu_conv2d,
    plain_norm_act,
    plain_norm_act_conv,
    random_block,
)
from tests.oracle import assert_same_bits, assert_within_budget, distance, plain_copy

pytestmark = pytest.mark.backends("cpu")  # transforms are found above the backends


def images():
    return torch.randn(3, 10, 5, 4, dtype=torch.float64)


def leaves(module):
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def loss(module, parameters, x):
    return functional_call(module, parameters, (x,)).sin().sum()


def grad(module, x):
    return torch.func.grad(partial(loss, module), (0, 1))(leaves(module), x)


def jvp(module, x):
    parameters = leaves(module)
    tangents = {n: p.sin() for n, p in parameters.items()}
    call = lambda p, x: functional_call(module, p, (x,))  # noqa: E731
    return torch.func.jvp(call, (parameters, x), (tangents, x.cos()))


def dual_numbers(module, x):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(module(forward_ad.make_dual(x, x.cos()))))


def hessian_of_a_vector(module, x):
    name, parameter = next((n, p) for n, p in leaves(module).items() if p.dim() == 1)
    return torch.func.hessian(lambda p: loss(module, {name: p}, x))(parameter)


def vmap(module, x):
    call = lambda x: module(x)  # noqa: E731  (Dynamo cannot trace the name of a module)
    return torch.func.vmap(call)(torch.stack([x, x.sin()]))


def per_sample_gradients(module, x):
    one = lambda p, x: loss(module, p, x[None])  # noqa: E731
    return torch.func.vmap(torch.func.grad(one), (None, 0))(leaves(module), x)


TRANSFORMS = {
    f.__name__: f
    for f in (grad, jvp, dual_numbers, hessian_of_a_vector, vmap, per_sample_gradients)
}


def assert_close(found, expected):
    """Equal to the rounding of float64, in every tensor of a tree."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def check_transform(transform, module, x):
    plain = plain_copy(module)
    assert_close(transform(module, x), transform(plain, x))
    assert_same_bits(dict(module.named_buffers()), dict(plain.named_buffers()))


def untracked(module):
    """A copy without running statistics: transforms allow no change of captured tensors."""
    module = copy.deepcopy(module)
    for bn in module.modules():
        if isinstance(bn, nn.BatchNorm2d):
            bn.running_mean = bn.running_var = bn.num_batches_tracked = None
            bn.track_running_stats = False
    return module


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "name",
    [
        *("bn_relu", "bn_relu_conv", "norm_act_conv", "batch_norm_act_conv"),
        *("basic_block", "stage", "network"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_equal_the_plain_ones(transform, training, name):
    module = EVERY_MODULE[name]().double()
    check_transform(transform, untracked(module) if training else module.eval(), images())


def test_forward_mode_updates_running_statistics_once():
    module = EVERY_MODULE["network"]().double()
    check_transform(dual_numbers, module, images())
    assert all(n == 1 for name, n in module.named_buffers() if "num_batches" in name)


def output_and_gradients(module, x):
    def scaled_sum(parameters, x):
        y = functional_call(module, parameters, (x,))
        return (y.double().sin() / 8).sum(), y

    gradients, y = torch.func.grad(scaled_sum, (0, 1), has_aux=True)(leaves(module), x)
    return {"y": y, "dx": gradients[1], **{f"d{n}": g for n, g in gradients[0].items()}}


def output_and_tangent(module, x):
    call = lambda x: module(x)  # noqa: E731
    y, tangent = torch.func.jvp(call, (x,), (x.flip(0),))
    return {"y": y.detach(), "tangent": tangent.detach()}


def output_and_gradients_for_each(module, x):
    inputs = x.detach().requires_grad_(), *module.parameters()
    y = module(inputs[0])
    dy = (y.detach().double().cos() / 8).to(y.dtype)
    backward = torch.func.vmap(lambda dy: torch.autograd.grad(y, inputs, dy))
    gradients = backward(torch.stack([dy, dy.flip(0)]))
    names = "dx", *(f"d{n}" for n, _ in module.named_parameters())
    return {"y": y.detach(), **dict(zip(names, gradients, strict=True))}


# One block at most: after several, rounding to bfloat16 decides many signs.
MIXED = {
    **{n: EVERY_MODULE[n] for n in ("bn_relu", "bn_relu_conv", "norm_act_conv", "basic_block")},
    "float32_stream": lambda: pk.PreActStage(
        [random_block("basic", 10, 8, 2)], residual_dtype=torch.float32
    ),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("conv_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "transform", [output_and_gradients, output_and_gradients_for_each, output_and_tangent]
)
def test_transforms_in_bfloat16_beside_float32_parameters(transform, conv_dtype, training, make):
    half = (untracked(make()) if training else make().eval()).bfloat16()
    x = torch.randn(16, 10, 12, 9).bfloat16()
    mixed = in_dtype(copy.deepcopy(half), conv_dtype)
    found = transform(mixed, x)
    y_dtype = mixed(x).dtype
    expected = {"y": y_dtype, "tangent": y_dtype, "dx": x.dtype}
    assert all(found[n].dtype == dtype for n, dtype in expected.items() if n in found)
    truth = transform(plain_copy(half).double(), x.double())
    errors = {n: distance(t, truth[n]) for n, t in transform(plain_copy(half), x).items()}
    assert_within_budget(found, truth, errors)


SHAPES = {
    **dict.fromkeys(("bn_weight", "bn_bias", "weight", "bias"), (10,)),
    "conv_weight": (6, 10, 3, 3),
    "scale": (3, 10),
    "branch": (3, 10, 5, 4),
}
GROUPS = {"num_groups": 5, "activation": "silu"}
BATCH = {"training": True}
MISH = {"training": True, "activation": "mish"}
# A function, the plain one, the arguments behind x that are differentiated, and options.
FUNCTIONS = {
    "bn_relu": (pk.bn_relu, plain_bn_relu, ("bn_weight", "bn_bias"), BATCH),
    "bn_relu_conv2d": (
        pk.bn_relu_conv2d,
        plain_bn_relu_conv2d,
        ("conv_weight", "bn_weight", "bn_bias"),
        BATCH,
    ),
    "group_norm_act": (pk.group_norm_act, plain_norm_act, ("weight", "bias", "scale"), GROUPS),
    "batch_norm_act_conv": (
        pk.batch_norm_act_conv,
        plain_norm_act_conv,
        ("weight", "bias", "conv_weight"),
        MISH,
    ),
    "residual_add": (pk.residual_add, lambda x, branch: x + branch, ("branch",), {}),
}


@pytest.mark.parametrize("running_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_functions_under_transforms_take_float32_parameters_beside_bfloat16(running_dtype):
    """Without running statistics in training mode, else in evaluation mode."""
    x, weight, bias = images().bfloat16(), torch.randn(10), torch.randn(10)
    conv_weight, options = torch.randn(6, 10, 3, 3), {"training": True}
    if running_dtype:
        zeros = torch.zeros(10, dtype=running_dtype)
        options = {"running_mean": zeros, "running_var": zeros + 1, "training": False}
    call = lambda x: pk.bn_relu_conv2d(x, conv_weight, weight, bias, **options)  # noqa: E731
    expected = call(x)
    y, tangent = torch.func.jvp(call, (x,), (x,))
    _, (_, of_grad) = torch.func.grad_and_value(lambda x: (call(x).sum(), call(x)), has_aux=True)(x)
    for found in (y, of_grad, torch.func.vmap(call)(x[None])[0]):
        torch.testing.assert_close(found, expected)
    assert tangent.dtype == expected.dtype


@pytest.mark.parametrize(("fused", "plain", "names", "options"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_under_transforms_equal_the_plain_ones(fused, plain, names, options):
    tensors = [images(), *(torch.randn(SHAPES[n], dtype=torch.float64) for n in names)]
    pairs = [torch.stack([t, t.cos()]) for t in tensors]
    results = []
    for function in (fused, plain):

        def call(x, *others, function=function):
            return function(x, **dict(zip(names, others, strict=True)), **options)

        gradient = torch.func.grad(
            lambda *t, call=call: call(*t).sin().sum(), (*range(len(pairs)),)
        )
        jvp = torch.func.jvp(call, tuple(tensors), tuple(t.cos() for t in tensors))
        results.append((jvp, torch.func.vmap(gradient)(*pairs)))
    assert_close(*results)


def batch_of_gradients(y, inputs):
    several = torch.stack([y.detach().cos(), y.detach().sin(), torch.ones_like(y)])
    with warnings.catch_warnings():  # PyTorch loops over some of its operators
        warnings.simplefilter("ignore")
        return torch.autograd.grad(y, inputs, several, is_grads_batched=True)


def dual_numbers_of_gradients(y, inputs):
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(y.detach().cos(), y.detach().sin())
        return [tuple(forward_ad.unpack_dual(g)) for g in torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        *((n, batch_of_gradients) for n in ("norm_act", "norm_act_conv", "batch_norm_act_conv")),
        *itertools.product(
            ("bn_relu", "bn_relu_conv", "checkpointed_stage"),
            (batch_of_gradients, dual_numbers_of_gradients),
        ),
    ],
)
def test_transformed_gradients_equal_the_plain_ones(gradients, name, backend):
    module, x = EVERY_MODULE[name]().double(), images()
    results = []
    for m in (module, plain_copy(module)):
        leaf = x.clone().requires_grad_()
        results.append(gradients(m(leaf), (leaf, *m.parameters())))
    assert_close(*results)


def test_transforms_within_compiled_functions_equal_the_plain_ones():
    module, x = EVERY_MODULE["bn_relu_conv"]().double().eval(), images()
    torch._dynamo.reset()
    compiled = torch.compile(partial(vmap, module), fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), vmap(plain_copy(module), x))


class Logged(Tensor):
    """A subclass of Tensor that notes which functions it is given to."""

    calls: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        cls.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, arguments, options or {})


@pytest.mark.parametrize(("name", "of"), [("bn_relu", "input"), ("stage", "parameters")])
def test_subclasses_of_tensor_see_the_plain_operators(name, of):
    module = EVERY_MODULE[name]()
    x = torch.randn(3, 10, 5, 4)
    if of == "input":
        x = x.as_subclass(Logged)
    for child in module.modules() if of == "parameters" else ():
        for parameter, p in list(child.named_parameters(recurse=False)):
            child._parameters[parameter] = p.detach().as_subclass(Logged)
    Logged.calls.clear()
    assert type(module(x)) is Logged
    assert "batch_norm" in Logged.calls


def test_eager_calls_run_kernels(backend):
    x = torch.randn(2, 10, 3, 3)
    assert not runs_plain(x, nn.Parameter(x), nn.Buffer(x), None)
    assert torch.compile(lambda x: x + runs_plain(x), backend="eager", fullgraph=True)(x).equal(x)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        assert not runs_plain(mode.from_tensor(x))
    with torch.inference_mode(), torch.device("cpu"):
        assert not runs_plain(torch.ones(2))
