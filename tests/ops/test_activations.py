"""The rows of `ACTIVATIONS` agree with PyTorch, and no place that knows activations lacks one."""

import contextlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.activations import (
    ACTIVATIONS,
    CALLS,
    DEFAULTS,
    activate,
    activation_gradient,
    activation_of_module,
    read_call,
)
from tests import cases

ROOT = Path(__file__).parents[2]
PARAMETER = 1.75  # of all activations that have one
every_row = pytest.mark.parametrize("name", ACTIVATIONS)


def with_parameter(name):
    default = DEFAULTS[name]
    return default._replace(parameter=PARAMETER) if ACTIVATIONS[name].parameter else default


def values():
    return torch.arange(-7000, 7001, dtype=torch.float64) / 1000


@every_row
def test_the_gradient_is_the_derivative(name):
    p, activation = values().requires_grad_(), with_parameter(name)
    dy = torch.linspace(-1, 2, len(p), dtype=p.dtype)
    (expected,) = torch.autograd.grad(activate(p, activation), p, dy)
    torch.testing.assert_close(activation_gradient(dy, p.detach(), activation), expected)


@every_row
def test_gradients_jump_where_the_row_says(name):
    p, activation = values(), with_parameter(name)
    steps = activation_gradient(torch.ones_like(p), p, activation).diff().abs()
    found = {round(float(p[i]), 2) for i in steps.gt(0.05).nonzero().flatten()}
    assert found == {v for jumps in ACTIVATIONS[name].jumps.values() for v in jumps}


@every_row
def test_modules_are_read(name):
    row = ACTIVATIONS[name]
    options = [()]
    if row.parameter:
        options.append((PARAMETER,))
    elif sum(other.module is row.module for other in ACTIVATIONS.values()) > 1:
        options = [(name.partition("_")[2] or "none",)]
    for arguments in options:
        module = row.module(*arguments)
        expected = with_parameter(name) if arguments and row.parameter else DEFAULTS[name]
        assert activation_of_module(module) == expected
        torch.testing.assert_close(module(values()), activate(values(), expected))


def test_other_modules_are_not_read():
    relu6, gelu = nn.ReLU6(), nn.GELU()
    relu6.max_val, gelu.approximate = 1.0, "other"
    subclass = type("Subclass", (nn.ReLU,), {})()
    for module in (relu6, gelu, nn.Softplus(1, 10), subclass):
        assert activation_of_module(module) is None, module


@every_row
def test_calls_are_read(name):
    for function in ACTIVATIONS[name].calls:
        label = function.__name__
        x = values()
        given = (x, PARAMETER) if ACTIVATIONS[name].parameter else (x,)
        options = {}
        if label in ("gelu", "hardtanh", "hardtanh_"):
            options = {"approximate": name.partition("_")[2] or "none"}
            if label != "gelu":
                options = {"min_val": 0, "max_val": 6.0}
        read, activation, in_place = read_call(function, *given, **options)
        assert read is x and activation == with_parameter(name), label
        assert in_place is label.endswith("_"), label
        expected = activate(values(), activation)
        torch.testing.assert_close(function(*given, **options), expected, msg=label)
        assert torch.equal(x, expected if in_place else values()), label
        if name != "gelu_tanh" and "hardtanh" not in label:  # others without arguments
            assert read_call(function, x)[1] == DEFAULTS[name], label


def test_the_argument_inplace_is_read():
    for function in (F.relu, F.relu6, F.silu, F.hardswish, F.mish, F.leaky_relu, F.elu):
        assert read_call(function, values(), inplace=True)[2] is True, function


def test_every_function_with_the_name_of_an_activation_is_read():
    for place in (F, torch, torch.Tensor, torch.special):
        for name in (*ACTIVATIONS, "hardtanh", "expit"):
            for function in (getattr(place, name, None), getattr(place, f"{name}_", None)):
                calls_a_method = function in (F.sigmoid, F.tanh)
                assert function is None or calls_a_method or function in CALLS, (place, name)


@every_row
def test_the_operators_whose_gradient_jumps_are_those_that_run(name):
    row = ACTIVATIONS[name]
    with cases.CalledOps() as called:
        activate(values(), DEFAULTS[name])
        for function in row.calls:
            options = {"min_val": 0, "max_val": 6.0} if "hardtanh" in function.__name__ else {}
            function(values(), **options)
            if function is getattr(F, function.__name__, None) and function.__name__[-1] != "_":
                with contextlib.suppress(TypeError):  # it has no such argument
                    function(values(), **options, inplace=True)
    jumping = {operator.name() for operator in row.jumps}
    own = {name for name in called.names if name.rstrip("_") in jumping}  # others: `clone` ...
    assert own == jumping


def test_arguments_of_other_functions_are_not_read():
    x = values()
    for function, *arguments in (
        (F.hardtanh,),
        (F.hardtanh_,),
        (F.hardtanh, -1, 1),
        (F.hardtanh, 0, 1),
        (F.hardtanh, -1, 6),
        (F.hardtanh, torch.zeros(()), 6),
        (F.softplus, 1, 10),
        (F.softplus, 0),
        (F.leaky_relu, float("inf")),
        (F.leaky_relu, True),
        (F.leaky_relu_, -0.5),
        (F.elu_, -1),
        (F.elu, 10**400),
    ):
        assert read_call(function, x, *arguments)[1] is None, (function, arguments)
    assert read_call(F.gelu, x, approximate="other")[1] is None
    with pytest.raises(TypeError):
        read_call(torch.sigmoid, input=x)


def test_documentation_and_tests_name_every_activation():
    text = (ROOT / "docs/norms.md").read_text()
    table = re.findall(r"^\| `([a-z_0-9`, ]+)` \|", text, re.M)
    documented = {name for line in table for name in line.replace("`", "").split(", ")}
    assert documented >= ACTIVATIONS.keys()
    for name, row in ACTIVATIONS.items():
        if row.parameter:
            assert re.search(rf"^\| `{name}` .* {row.parameter.default:g}\W", text, re.M), name
    for name in ACTIVATIONS:
        assert f'`"{name}"`' in inspect.getdoc(pk.group_norm_act), name
    tested = {a if isinstance(a, str) else a[0] for a, _ in cases.ACTIVATIONS.values()}
    assert tested == ACTIVATIONS.keys()
    for name, row in ACTIVATIONS.items():
        if row.parameter:  # one more case with another parameter
            others = [a for a, _ in cases.ACTIVATIONS.values() if a[0] == name]
            assert any(parameter != row.parameter.default for _, parameter in others), name
