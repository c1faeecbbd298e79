"""The true results, and the error that a kernel may have.

The truth is plain PyTorch in float64 on the same inputs, rounded to the dtype under test. A result
in dtype d must satisfy

    norm(fused - truth) <= 2 * norm(eager - truth) + u * norm(truth),

where eager is plain PyTorch in dtype d, and the unit roundoff u of d (half of `finfo.eps`) allows
for the rounding of the result.

Eager's error is a random quantity, and can be zero by luck. So the largest error over several
orders of evaluation counts: inputs as given, stored in NHWC, and with the batch reversed. Gradients
with one value per channel are compared for several incoming gradients at once, as a longer vector.

For float64 there is no wider reference: the first order is the truth. Eager's error is the largest
error of the other orders, plus its error in float32 on the same problem, scaled by the ratio of the
unit roundoffs and by the square root of the samples per channel: eager accumulates float32 in
float64, but float64 in float64.

The gradient of a ReLU jumps at zero, and rounding decides the sign of a pre-activation near zero.
In half precision, problems must be large enough for eager and fused to have the same share of such
values. In float32, small problems avoid them: see `off_kinks`.

If the truth is zero and eager gives zero, the result must be zero.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from preact_kernels.activations import JUMPS
from preact_kernels.torch_compat import TorchDispatchMode

Inputs = Mapping[str, Any]  # tensors or None, by the name of an argument
Results = dict[str, Any]  # tensors or None

# Inputs with a batch axis.
_BATCHED = ("x", "residual", "branch", "scale", "shift")
_ORDERS: tuple[dict[str, Any], ...] = ({}, {"channels_last": True}, {"reversed_batch": True})
_TF32_ROUNDOFF = 2.0**-11


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def gradient_like(y: Tensor, seed: int = 1) -> Tensor:
    """A random gradient for `y`."""
    generator = torch.Generator(y.device).manual_seed(seed)
    return torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype)


def evaluate(
    function: Callable[..., Tensor] | nn.Module,
    inputs: Inputs,
    dy: Tensor | None = None,
    *,
    seed: int = 1,
    frozen: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    reversed_batch: bool = False,
    lay_out: Callable[[Tensor], Tensor] = lambda dy: dy,
) -> Results:
    """The output, all gradients, and the running statistics after the call.

    Args:
        function: called with `inputs` by name. A module is copied, and its parameters and buffers
            count as inputs.
        inputs: tensors; `running_mean` and `running_var` are updated and get no gradient.
        dy: incoming gradient; None: `gradient_like` with `seed`.
        seed: see `gradient_like`.
        frozen: names of inputs and parameters without a gradient.
        dtype: convert inputs and module to this dtype.
        channels_last: store `[N, C, H, W]` inputs in NHWC.
        reversed_batch: reverse the batch.
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


Problem = tuple[Inputs, Tensor]  # inputs, incoming gradient


def evaluate_all(
    function: Callable[..., Tensor] | nn.Module, problems: Sequence[Problem], **options
) -> Results:
    """`evaluate` for several problems of equal shapes; stacks the results."""
    return stacked([evaluate(function, inputs, dy, **options) for inputs, dy in problems])


def stacked(runs: Sequence[Results]) -> Results:
    """Stacks the results of several runs, by name."""
    return {
        name: None if value is None else torch.stack([run[name] for run in runs])
        for name, value in runs[0].items()
    }


def eager_runs(
    plain: Callable[..., Tensor] | nn.Module,
    problems: Sequence[Problem],
    tf32: bool = False,
    **options,
) -> list[Results]:
    """Results of plain PyTorch in the dtype of `x`, in several orders of evaluation.

    With `tf32`, PyTorch may round operands of products to 11 bits, but does not always: adds a run
    in float16, which has 11 bits.
    """
    orders = (*_ORDERS, {"dtype": torch.float16}) if tf32 else _ORDERS
    return [evaluate_all(plain, problems, **order, **options) for order in orders]


def largest_distances(
    runs: Sequence[Results], truth: Results, metric: Callable[[Tensor, Tensor], float]
) -> dict[str, float]:
    """The largest distance of any run from the truth, for each result."""
    return {
        name: max(metric(run[name], expected) for run in runs)
        for name, expected in truth.items()
        if expected is not None
    }


def eager_errors(
    plain: Callable[..., Tensor] | nn.Module,
    problems: Sequence[Problem],
    truth: Results,
    runs: Sequence[Results] | None = None,
    **options,
) -> dict[str, float]:
    """The error of plain PyTorch in the dtype of `x`, for each result.

    `runs` is the result of `eager_runs`, if known.
    """
    errors = largest_distances(runs or eager_runs(plain, problems, **options), truth, distance)
    x = problems[0][0]["x"]
    if x.dtype == torch.float64:
        narrow = [
            ({n: None if t is None else t.float() for n, t in inputs.items()}, dy.float())
            for inputs, dy in problems
        ]
        plain = copy.deepcopy(plain).float() if isinstance(plain, nn.Module) else plain
        truth = evaluate_all(plain, narrow, dtype=torch.float64, **options)
        ratio = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
        growth = max(1, x.numel() // x.shape[1]) ** 0.5
        for name, error in eager_errors(plain, narrow, truth, **options).items():
            errors[name] += growth * ratio * error
    return errors


class Judgement(NamedTuple):
    """The verdict on one result."""

    share: float  # error / allowed error; wrong if NaN or more than 1
    fault: str = ""  # message, or an empty string


def judge(
    fused: Results, truth: Results, errors: Mapping[str, float], rounding: float | None = None
) -> dict[str, Judgement]:
    """Compares all results with the truth, by norm.

    Args:
        fused: results under test.
        truth: results in float64.
        errors: see `eager_errors`.
        rounding: relative error of one rounding; None: the unit roundoff of each result's dtype.
    """
    return {
        name: _judge(name, fused.get(name), truth.get(name), errors, rounding)
        for name in {**truth, **fused}
    }


def _judge(
    name: str,
    found: Tensor | None,
    expected: Tensor | None,
    errors: Mapping[str, float],
    rounding: float | None,
) -> Judgement:
    if found is None or expected is None:
        if found is expected:
            return Judgement(0.0)
        return Judgement(math.inf, f"{name}: expected {_kind(expected)}, got {_kind(found)}")
    if found.shape != expected.shape:
        shapes = f"expected {list(expected.shape)}, got {list(found.shape)}"
        return Judgement(math.inf, f"{name}: {shapes}")
    error, norm = distance(found, expected), _norm(expected)
    if not found.is_floating_point():
        rounding = 0.0
    elif rounding is None:
        rounding = unit_roundoff(found.dtype)
    allowed = 2 * errors[name] + rounding * norm
    if error <= allowed:
        return Judgement(error / allowed if allowed else 0.0)
    return Judgement(
        error / allowed if allowed else math.inf,
        f"{name}: error {error:.3g}, allowed {allowed:.3g} "
        f"(eager's own {errors[name]:.3g}, norm {norm:.3g})",
    )


def judge_elements(
    fused: Results, truth: Results, eager: Sequence[Results], rounding: float | None = None
) -> dict[str, Judgement]:
    """Compares the largest error of an element with eager's.

    A norm hides one wrong element among many. The largest error of an element varies more than a
    norm, so the limit is four times eager's, plus two roundings of the largest element.
    """
    errors = largest_distances(eager, truth, _largest_distance)
    judgements = {}
    for name, error in errors.items():
        found = fused.get(name)
        if found is None or found.shape != truth[name].shape or not found.is_floating_point():
            continue
        unit = unit_roundoff(found.dtype) if rounding is None else rounding
        allowed = 4 * error + 2 * unit * float(truth[name].abs().amax() if found.numel() else 0)
        largest = _largest_distance(found, truth[name])
        share = largest / allowed if allowed else (math.inf if largest else 0.0)
        fault = f"{name}: an element is off by {largest:.3g}, allowed {allowed:.3g}"
        judgements[name] = Judgement(share, "" if share <= 1 else fault)
    return judgements


class ReLUInputs(TorchDispatchMode):
    """Counts inputs of ReLU-like operators, and finds the smallest distance from a kink."""

    def __init__(self):
        super().__init__()
        self.count, self.nearest = 0, math.inf

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for kink in JUMPS.get(function, ()):
            self.count += args[0].numel()
            if args[0].numel():
                self.nearest = min(self.nearest, float((args[0] - kink).abs().min()))
        return function(*args, **kwargs or {})


def off_kinks(
    plain: Callable[..., Tensor] | nn.Module,
    inputs: Inputs,
    most: int = 20_000,
    **options,
) -> Inputs:
    """Adds noise to `x` of a float32 problem until no ReLU input is too near to a kink.

    Does not change problems with more than `most` inputs of ReLU-like operators.
    """
    margin = 100 * unit_roundoff(torch.float32)
    for _ in range(20):
        if inputs["x"].dtype != torch.float32:
            break
        with ReLUInputs() as seen:
            evaluate(plain, inputs, dtype=torch.float64, **options)
        if seen.count > most or seen.nearest > margin:
            break
        noise = torch.randn(inputs["x"].shape).to(inputs["x"].device)
        inputs = {**inputs, "x": inputs["x"] + noise / 1000}
    return inputs


class Comparison(NamedTuple):
    """Results of `compare`."""

    runs: list[Results]  # one per problem
    judgements: dict[str, Judgement]
    elements: dict[str, Judgement]  # see `judge_elements`; empty in float64
    eager_error: float  # relative error of all results of plain PyTorch


def compare(
    fused: Callable[..., Tensor] | nn.Module,
    plain: Callable[..., Tensor] | nn.Module,
    problems: Sequence[Inputs],
    tf32: bool = False,
    truth_on_cpu: bool = False,
    **options,
) -> Comparison:
    """Compares `fused` with the truth on several problems of equal shapes, taken together.

    Args:
        fused: function or module under test.
        plain: its equivalent in plain PyTorch.
        problems: inputs as in `evaluate`, including `x`.
        tf32: whether products may round their operands to TF32.
        truth_on_cpu: compute the truth on a CPU.
        **options: as in `evaluate`.
    """
    runs = [evaluate(fused, inputs, seed=seed, **options) for seed, inputs in enumerate(problems)]
    with_gradients = [
        (inputs, gradient_like(run["y"], seed))
        for seed, (inputs, run) in enumerate(zip(problems, runs, strict=True))
    ]
    with _one_thread():
        compute_truth = _truth_on_cpu if truth_on_cpu else evaluate_all
        truth = compute_truth(plain, with_gradients, dtype=torch.float64, **options)
        others = eager_runs(plain, with_gradients, tf32, **options)
        errors = eager_errors(plain, with_gradients, truth, others, **options)
    found = stacked(runs)
    rounding = _TF32_ROUNDOFF if tf32 else None
    judgements = judge(found, truth, errors, rounding)
    elements = {}
    if problems[0]["x"].dtype != torch.float64:
        elements = judge_elements(found, truth, others, rounding)
    for name, value in others[0].items():
        dtypes = [None if t is None else t.dtype for t in (value, found.get(name))]
        if dtypes[0] != dtypes[1] and not judgements[name].fault:
            fault = f"{name}: expected {dtypes[0]}, got {dtypes[1]}"
            judgements[name] = Judgement(math.inf, fault)
    error, norm = math.hypot(*errors.values()), math.hypot(*(_norm(truth[n]) for n in errors))
    return Comparison(runs, judgements, elements, error / norm if norm else error)


def _truth_on_cpu(
    plain: Callable[..., Tensor] | nn.Module, problems: Sequence[Problem], **options
) -> Results:
    """`evaluate_all` on a CPU; the results are on the device of the problems."""
    device = problems[0][1].device
    on_cpu = [
        ({n: None if t is None else t.cpu() for n, t in inputs.items()}, dy.cpu())
        for inputs, dy in problems
    ]
    plain = copy.deepcopy(plain).cpu() if isinstance(plain, nn.Module) else plain
    results = evaluate_all(plain, on_cpu, **options)
    return {name: None if t is None else t.to(device) for name, t in results.items()}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Makes errors of plain PyTorch depend less on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and all bits are equal, including signs of zeros and payloads of NaN."""
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(integers[t.itemsize])


def _norm(t: Tensor) -> float:
    return float(t.double().norm())


def distance(a: Tensor, b: Tensor) -> float:
    """Euclidean distance, in float64."""
    return _norm(a.double() - b.double())


def _largest_distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().amax()) if a.numel() else 0.0


def _kind(value: Tensor | None) -> str:
    return "no gradient" if value is None else "a gradient"
