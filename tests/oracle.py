"""The truth, and how far from it a result may be.

The truth is plain PyTorch in float64 on the same inputs, as rounded to the dtype under test. A
result in dtype d may be off by

    norm(fused - truth) <= 2 * norm(eager - truth) + u * norm(truth),

where eager is plain PyTorch in dtype d, and u, the unit roundoff of d (half of `finfo.eps`, what
rounding to nearest costs at most), stands for the last rounding of a result that is right before.

Eager's own error is one draw of a random quantity, and can be zero by luck. So it is taken as the
largest over orders of evaluation that are equally right: the inputs as they are, stored NHWC, and
with the batch reversed. A gradient of one value a channel is judged over several incoming gradients
at once, which makes it a longer vector.

Of float64 results no better truth is at hand, and the first order is the truth. Eager's error there
is how far the other orders are off, and its error in float32 on the same problem scaled by the
ratio of the unit roundoffs; times the square root of the samples a channel, because eager adds up
float32 in float64, and has nothing wider for float64.

The gradient of a ReLU jumps at zero, and the sign of a pre-activation near zero is decided by
rounding. In half precision, tests take so many values that eager and fused have the same share of
such cases. In float32 they are kept out of small problems: see `off_kinks`.

A truth of norm zero allows nothing beyond twice eager's error: zeros must come out as zeros where
eager has zeros.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.ops import dispatch
from tests.cases import plain_bn_relu_conv2d

Results = dict[str, Tensor | None]

# Inputs with a batch axis, which a reversal of the batch turns round.
_BATCHED = ("x", "residual", "branch", "scale", "shift")
_ORDERS = ({}, {"channels_last": True}, {"reversed_batch": True})


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def gradient_like(y: Tensor, seed: int = 1) -> Tensor:
    """A random incoming gradient for `y`."""
    generator = torch.Generator(y.device).manual_seed(seed)
    return torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype)


def evaluate(
    function: Callable[..., Tensor] | nn.Module,
    inputs: Mapping[str, Tensor | None],
    dy: Tensor | None = None,
    *,
    seed: int = 1,
    frozen: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    reversed_batch: bool = False,
    lay_out: Callable[[Tensor], Tensor] = lambda dy: dy,
) -> Results:
    """The output, every gradient, and what became of the running statistics.

    Args:
        function: called with `inputs` by name. A module is copied, and its parameters and buffers
            count as inputs.
        inputs: tensors; `running_mean` and `running_var` are updated and get no gradient.
        dy: incoming gradient; None draws one with `seed`.
        seed: see `gradient_like`.
        frozen: inputs and parameters that want no gradient.
        dtype: inputs and module are first converted to it.
        channels_last: whether `[N, C, H, W]` inputs are first stored NHWC.
        reversed_batch: whether the batch runs the other way round.
        lay_out: applied to `dy`, to change its strides.
    """
    module = None
    if isinstance(function, nn.Module):
        function = module = copy.deepcopy(function)
        if dtype is not None:
            module.to(dtype)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
    leaves = {name: None if t is None else t.detach().clone() for name, t in inputs.items()}
    for name, leaf in leaves.items():
        if leaf is None:
            continue
        leaf = leaf if dtype is None else leaf.to(dtype)
        if reversed_batch and name in _BATCHED:
            leaf = leaf.flip(0)
        if channels_last and leaf.dim() == 4:
            leaf = leaf.contiguous(memory_format=torch.channels_last)
        leaves[name] = leaf.requires_grad_(not _is_buffer(name) and name not in frozen)

    y = function(**leaves)
    if y.requires_grad:
        dy = gradient_like(y, seed) if dy is None else dy.to(y.dtype)
        y.backward(lay_out(dy.flip(0) if reversed_batch else dy))

    results = {"y": y.detach()}
    for name, leaf in leaves.items():
        if leaf is not None:
            results |= {name: leaf} if _is_buffer(name) else {f"d{name}": leaf.grad}
    if module is not None:
        results |= {f"d{name}": p.grad for name, p in module.named_parameters()}
        results |= dict(module.named_buffers())
    if reversed_batch:
        for name in ("y", *(f"d{n}" for n in _BATCHED)):
            if results.get(name) is not None:
                results[name] = results[name].flip(0)
    return results


def _is_buffer(name: str) -> bool:
    return name.startswith("running_")


Problem = tuple[Mapping[str, Tensor | None], Tensor]  # inputs, incoming gradient


def evaluate_all(
    function: Callable[..., Tensor] | nn.Module, problems: Sequence[Problem], **options
) -> Results:
    """`evaluate` for several problems of the same shapes, the results of each name stacked."""
    return stacked([evaluate(function, inputs, dy, **options) for inputs, dy in problems])


def stacked(runs: Sequence[Results]) -> Results:
    """The results of several runs as one tensor by name."""
    return {
        name: None if value is None else torch.stack([run[name] for run in runs])
        for name, value in runs[0].items()
    }


def eager_errors(
    plain: Callable[..., Tensor] | nn.Module,
    problems: Sequence[Problem],
    truth: Results,
    **options,
) -> dict[str, float]:
    """How far plain PyTorch in the dtype of `x` is from the truth, for every result."""
    runs = [evaluate_all(plain, problems, **order, **options) for order in _ORDERS]
    errors = {
        name: max(distance(run[name], expected) for run in runs)
        for name, expected in truth.items()
        if expected is not None
    }
    if problems[0][0]["x"].dtype == torch.float64:
        narrow = [
            ({n: None if t is None else t.float() for n, t in inputs.items()}, dy.float())
            for inputs, dy in problems
        ]
        plain = copy.deepcopy(plain).float() if isinstance(plain, nn.Module) else plain
        truth = evaluate_all(plain, narrow, dtype=torch.float64, **options)
        x = narrow[0][0]["x"]
        ratio = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
        growth = max(1, x.numel() // x.shape[1]) ** 0.5
        for name, error in eager_errors(plain, narrow, truth, **options).items():
            errors[name] += growth * ratio * error
    return errors


def assert_within_budget(fused: Results, truth: Results, errors: Mapping[str, float]) -> None:
    """Every tensor of `fused` is as near to the truth as `errors`, eager's own, allow."""
    assert fused.keys() == truth.keys()
    wrong = []
    for name, value in fused.items():
        expected = truth[name]
        if expected is None or value is None:
            if expected is not value:
                wrong.append(f"{name}: expected {_kind(expected)}, got {_kind(value)}")
            continue
        if value.shape != expected.shape:
            wrong.append(f"{name}: expected {list(expected.shape)}, got {list(value.shape)}")
            continue
        error, norm = distance(value, expected), _norm(expected)
        rounding = unit_roundoff(value.dtype) if value.is_floating_point() else 0.0
        allowed = 2 * errors[name] + rounding * norm
        if not error <= allowed:  # also where NaN
            wrong.append(
                f"{name}: error {error:.3g}, allowed {allowed:.3g} "
                f"(eager's own {errors[name]:.3g}, norm {norm:.3g})"
            )
    assert not wrong, "\n".join(wrong)


_aten = torch.ops.aten

# Where the gradients of activations jump.
_KINKS = {
    _aten.relu.default: (0,),
    _aten.relu_.default: (0,),
    _aten.leaky_relu.default: (0,),
    _aten.elu.default: (0,),
    _aten.hardtanh.default: (0, 6),
    _aten.hardswish.default: (-3, 3),
}


class ReLUInputs(TorchDispatchMode):
    """How many inputs of ReLUs and the like there are, and how near to a kink one of them comes."""

    def __init__(self):
        super().__init__()
        self.count, self.nearest = 0, math.inf

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for kink in _KINKS.get(function, ()):
            self.count += args[0].numel()
            if args[0].numel():
                self.nearest = min(self.nearest, float((args[0] - kink).abs().min()))
        return function(*args, **kwargs or {})


def off_kinks(
    plain: Callable[..., Tensor] | nn.Module, inputs: Mapping[str, Tensor | None], **options
) -> Mapping[str, Tensor | None]:
    """`inputs`, with noise on `x` where a kink of a small float32 problem would be a toss-up."""
    margin = 100 * unit_roundoff(torch.float32)
    for _ in range(20):
        with ReLUInputs() as seen:
            evaluate(plain, inputs, dtype=torch.float64, **options)
        if inputs["x"].dtype != torch.float32 or seen.count > 20_000 or seen.nearest > margin:
            break
        inputs = {**inputs, "x": inputs["x"] + torch.randn_like(inputs["x"]) / 1000}
    return inputs


def check(
    fused: Callable[..., Tensor] | nn.Module,
    plain: Callable[..., Tensor] | nn.Module,
    inputs: Mapping[str, Tensor | None] | Sequence[Mapping[str, Tensor | None]],
    draws: int = 3,
    **options,
) -> Results:
    """Asserts that `fused` has the dtypes of `plain` and keeps the budget; returns its results.

    Args:
        fused: under test.
        plain: the same in plain PyTorch.
        inputs: as in `evaluate`, among them `x`; or several of the same shapes, judged together.
        draws: how many incoming gradients for one set of inputs.
        **options: as in `evaluate`.
    """
    if isinstance(inputs, Mapping):
        all_inputs = [off_kinks(plain, inputs, **options)] * draws
    else:
        all_inputs = [off_kinks(plain, i, **options) for i in inputs]
    runs = [evaluate(fused, i, seed=seed, **options) for seed, i in enumerate(all_inputs)]
    problems = [
        (inputs, gradient_like(run["y"], seed))
        for seed, (inputs, run) in enumerate(zip(all_inputs, runs, strict=True))
    ]
    assert _dtypes(runs[0]) == _dtypes(evaluate(plain, *problems[0], **options))
    truth = evaluate_all(plain, problems, dtype=torch.float64, **options)
    assert_within_budget(stacked(runs), truth, eager_errors(plain, problems, truth, **options))
    return runs[0]


def check_conv(
    inputs, frozen: Sequence[str] = (), conv2d: Callable = F.conv2d, **arguments
) -> Results:
    """`check` of `pk.bn_relu_conv2d`."""
    fused = functools.partial(pk.bn_relu_conv2d, **arguments)
    plain = functools.partial(plain_bn_relu_conv2d, conv2d=conv2d, **arguments)
    return check(fused, plain, inputs, frozen=frozen)


# Where a tap lies outside of the image these multiply by zero instead of leaving it out, as some
# algorithms of cuDNN do.
_MULTIPLIES_THE_PADDING = ("triton",)


def assert_finite_as_in_eager(
    inputs: Mapping[str, Tensor | None], dy: Tensor | None = None, **arguments
) -> None:
    """`pk.bn_relu_conv2d` has numbers that are not finite where plain PyTorch has them."""
    fused = evaluate(functools.partial(pk.bn_relu_conv2d, **arguments), inputs, dy)
    plain = evaluate(functools.partial(plain_bn_relu_conv2d, **arguments), inputs, dy)
    padding = arguments["padding"] if dispatch.current() in _MULTIPLIES_THE_PADDING else 0
    for name, expected in plain.items():
        off = fused[name].isfinite() != expected.isfinite()
        if padding:
            off &= ~_may_be_infected(name, expected, padding) | ~expected.isfinite()
        assert not off.any(), f"{name}: {int(off.sum())} of {off.numel()}"


def _may_be_infected(name: str, expected: Tensor, padding: int) -> Tensor:
    """Where zero times what is not finite may add to eager's NaN.

    At the border of images; and in all taps of a weight one of which eager has lost.
    """
    allowed = torch.zeros_like(expected, dtype=torch.bool)
    if name in ("y", "dx"):
        allowed[..., :padding] = allowed[..., -padding:] = True
        allowed[..., :padding, :] = allowed[..., -padding:, :] = True
    elif name == "dconv_weight":
        allowed |= ~expected.isfinite().flatten(2).all(2)[:, :, None, None]
    return allowed


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy of a fused or converted module that runs plain `torch.nn` calls."""
    module = pk.revert(copy.deepcopy(module))
    for child in module.modules():
        if hasattr(child, "fused"):
            child.fused = False
    return module


def assert_same_bits(results: Results, expected: Results) -> None:
    """Every tensor equals its counterpart in dtype, shape and every bit: see `same_bits`."""
    assert results.keys() == expected.keys()
    wrong = [
        name
        for name, value in results.items()
        if (value is None) != (expected[name] is None)
        or (value is not None and not same_bits(value, expected[name]))
    ]
    assert not wrong, f"other bits in {', '.join(wrong)}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal: -0.0 is not 0.0, and NaNs have payloads."""
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(integers[t.itemsize])


def _norm(t: Tensor) -> float:
    return float(t.double().norm())


def distance(a: Tensor, b: Tensor) -> float:
    """Euclidean, in float64."""
    return _norm(a.double() - b.double())


def _dtypes(results: Results) -> dict[str, torch.dtype | None]:
    return {name: None if t is None else t.dtype for name, t in results.items()}


def _kind(value: Tensor | None) -> str:
    return "no gradient" if value is None else "a gradient"


def weight_gradient_inside_the_image(activation: Tensor, dy: Tensor) -> Tensor:
    """Of a 3x3 convolution: no tap reads a pixel of the padding."""
    height, width = dy.shape[2:]
    gradient = dy.new_empty(dy.shape[1], activation.shape[1], 3, 3)
    for r, s in itertools.product(range(3), repeat=2):
        a = activation[:, :, max(r - 1, 0) : height + r - 1, max(s - 1, 0) : width + s - 1]
        d = dy[:, :, max(1 - r, 0) : height + 1 - r, max(1 - s, 0) : width + 1 - s]
        gradient[:, :, r, s] = torch.einsum("nkhw,nchw->kc", d, a)
    return gradient
