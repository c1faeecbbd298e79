"""Compares a converted model with the plain model on an example, for `pk.convert`."""

import contextlib
import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from preact_kernels import torch_compat
from preact_kernels.conversion.containers import CONTAINERS, items

# Relative tolerance in float64: far above rounding errors, below the effect of a wrong operation.
_TOLERANCE = 1e-7
_SMALLEST = 1e4  # error allowed for each result, in roundings of the norm of its group
_CHANCE_FACTOR = 8  # some groups have few numbers
_NOISY_RUNS = 3  # show how plain PyTorch amplifies rounding errors

Results = dict[str, Tensor | None]
_ERROR = "error: "  # prefix of names for exceptions


class Example(NamedTuple):
    """Arguments of a call of a model."""

    args: tuple
    kwargs: dict[str, Any]

    @staticmethod
    def of(example_inputs: Any) -> "Example":
        if isinstance(example_inputs, Tensor):
            return Example((example_inputs,), {})
        if isinstance(example_inputs, tuple | list):
            return Example(tuple(example_inputs), {})
        if isinstance(example_inputs, dict):
            return Example((), dict(example_inputs))
        raise TypeError(
            "example_inputs: expected a tensor, a tuple or a dictionary of arguments, "
            f"got {type(example_inputs).__name__}"
        )

    def converted(self, change: Callable[[Tensor], Tensor]) -> "Example":
        """Returns a copy; `change` is applied to floating point tensors."""

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            t = value.detach().clone()
            t = change(t) if t.is_floating_point() else t
            return t.requires_grad_(value.requires_grad)

        return Example(*torch_compat.tree_map(leaf, tuple(self)))


class Verifier:
    """Compares converted copies of a model with the plain model.

    Compares the results of a forward and a backward, in training and evaluation: outputs, gradients
    of parameters and inputs, and buffers after the forward. Skips a mode in which plain PyTorch
    raises. In float64, each tensor must be equal up to rounding. In the model's dtype, the groups
    of all outputs, gradients and buffers must be as close to float64 as in plain PyTorch, with a
    factor for chance:

        |converted - truth| <= 8 |plain - truth| + 8 roundings.

    Args:
        plain: the model before conversion.
        example: arguments of a call.

    Attributes:
        refusal: why copies cannot be compared, or an empty string.

    Raises:
        ValueError: the model raises on the example, or does not return a tensor.
    """

    def __init__(self, plain: nn.Module, example: Example) -> None:
        self._example = example
        self._own = _results(plain, example)
        if not any(name.startswith("output") for name in self._own):
            error = _errors(self._own) or "no tensor"
            raise ValueError(f"example_inputs: expected a model that returns tensors, got {error}")
        self._noisy = [_noisy_results(plain, example, seed) for seed in range(_NOISY_RUNS)]
        self._wide: Results | None = None
        self._wide_noisy: list[Results] = []
        wide, wide_example = _in_float64(plain), example.converted(Tensor.double)
        truth = _results(wide, wide_example)
        names = [n for n in self._own if not n.startswith(_ERROR)]
        if truth.keys() >= set(names):  # the model runs in float64
            self._wide = {n: truth[n] for n in names}
            self._wide_noisy = [_noisy_results(wide, wide_example, 0)]
        again, self.refusal = _results(plain, example), ""
        if _other_kind(again, self._own) or _first_difference(
            again, self._own, [self._own], _coarse(self._own)
        ):
            self.refusal = "plain PyTorch does not repeat its results on the example"

    def difference(self, converted: nn.Module) -> str:
        """Describes how a converted copy differs from the plain model; empty if it does not."""
        found = _results(converted, self._example)
        if different := _other_kind(found, self._own):
            return different
        if self._wide is None:
            return _first_difference(found, self._own, self._noisy, _coarse(self._own))
        wide = _results(_in_float64(converted), self._example.converted(Tensor.double))
        tolerances = dict.fromkeys(self._wide, _TOLERANCE)
        return (
            _other_kind(wide, self._wide)
            or _first_difference(wide, self._wide, self._wide_noisy, tolerances)
            or self._beyond_budget(found, self._wide)
        )

    def _beyond_budget(self, found: Results, truth: Results) -> str:
        """Describes the first group of results that is too far from float64."""
        for group, names in _groups(truth).items():
            error, own, *noisy = (
                _norm(_minus(results.get(name), truth[name]) for name in names)
                for results in (found, self._own, *self._noisy)
            )
            size = _norm(truth[name] for name in names)
            rounding = max(_roundoff(self._own[name]) for name in names)
            allowed = _CHANCE_FACTOR * (max(own, *noisy) + rounding * size)
            if rounding == _roundoff(truth[names[0]]):  # already compared in float64
                continue
            if not error <= allowed and _is_finite(self._own, names):
                return f"{group}s: off by {error:.1e}, expected at most {allowed:.1e}"
        return ""


def _groups(results: Results) -> dict[str, list[str]]:
    """Groups the names of floating point results: outputs, gradients, buffers."""
    groups: dict[str, list[str]] = {}
    for name, t in results.items():
        if t is not None and t.is_floating_point():
            groups.setdefault(name.split(" of ")[0], []).append(name)
    return groups


def _first_difference(
    found: Results, expected: Results, noisy: Sequence[Results], tolerances: dict[str, float]
) -> str:
    """Describes the first result with an error beyond plain PyTorch's amplified rounding errors."""
    for name, t in expected.items():
        if name.startswith(_ERROR) or (t is not None and t.is_floating_point()):
            continue
        if not _is_equal(found[name], t) and all(_is_equal(n.get(name), t) for n in noisy):
            return f"{name} differs"
    for names in _groups(expected).values():
        smallest = _norm(expected[name] for name in names) * _SMALLEST
        for name in names:
            t = expected[name]
            error, size = _norm([_minus(found[name], t)]), _norm([t])
            amplified = max(_norm([_minus(other.get(name), t)]) for other in noisy)
            allowed = tolerances[name] * size + 1000 * amplified + smallest * _roundoff(t)
            if not error <= allowed and _is_finite(expected, [name]):
                return f"{name}: relative error {error / size if size else float('inf'):.1e}"
    return ""


def _other_kind(found: Results, expected: Results) -> str:
    """Describes the first result that is missing or has another shape, dtype or layout."""
    for name, t in expected.items():
        if name.startswith(_ERROR):  # plain PyTorch raised
            continue
        if name not in found:
            return _errors(found) or f"{name} is missing"
        kinds = [_kind(v, not name.startswith("gradient")) for v in (t, found[name])]
        if kinds[0] != kinds[1]:
            return f"{name}: expected {kinds[0]}, got {kinds[1]}"
    return ""


def _kind(t: Tensor | None, has_strides: bool) -> str:
    if t is None:
        return "None"
    strides = f" with strides {t.stride()}" if has_strides else ""
    return f"{t.dtype} {list(t.shape)}{strides}"


def _results(model: nn.Module, example: Example) -> Results:
    """Runs a forward and a backward of a copy, in training and in evaluation."""
    results: Results = {}
    tensors = (*model.parameters(), *model.buffers(), *_tensors(tuple(example)))
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    for mode in ("training", "evaluation"):
        with (
            _same_random_numbers(devices),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            own = copy.deepcopy(model)
            if mode == "evaluation" or not own.training:  # keeps parts that are in evaluation
                own.train(mode == "training")
            own.zero_grad()
            call = example.converted(lambda t: t)
            try:
                outputs = _tensors(own(*call.args, **call.kwargs))
                # Before the backward, in which checkpoints of plain PyTorch count the batch again.
                results |= {f"buffer of {mode}, {n}": b.clone() for n, b in own.named_buffers()}
                results |= {f"output of {mode}, {i}": t.clone() for i, t in enumerate(outputs)}
                losses = [_weighted_sum(t).double() for t in outputs if t.requires_grad]
                if losses:
                    sum(losses[1:], losses[0]).backward()
            except Exception as error:
                results = {n: t for n, t in results.items() if f" of {mode}" not in n}
                results[f"{_ERROR}{type(error).__name__} in {mode}: {error}"] = None
                continue
        leaves = {f"input {i}": t for i, t in enumerate(_tensors(tuple(call)))}
        for name, t in (leaves | dict(own.named_parameters())).items():
            results[f"gradient of {mode}, {name}"] = t.grad
    return {name: None if t is None else _real(t.detach()) for name, t in results.items()}


def _in_float64(model: nn.Module) -> nn.Module:
    """Returns a copy in float64, or in its own dtype if its class refuses float64."""
    model = copy.deepcopy(model)
    with contextlib.suppress(Exception):
        model.double()
    return model


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _errors(results: Results) -> str:
    return ", ".join(n.removeprefix(_ERROR) for n in results if n.startswith(_ERROR))


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a value, in containers and attributes of objects."""
    found, seen, waiting = [], set(), [value]
    while waiting:
        for leaf in torch_compat.tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                found.append(leaf)
                continue
            if id(leaf) in seen or callable(leaf):
                continue
            seen.add(id(leaf))
            if isinstance(leaf, CONTAINERS):
                waiting += items(leaf)
            if hasattr(leaf, "__dict__"):
                waiting.append(dict(vars(leaf)))
    return found


def _weighted_sum(t: Tensor) -> Tensor:
    """Returns a loss with a different gradient for each element of `t`."""
    weights = torch.cos(torch.arange(t.numel(), device=t.device, dtype=torch.float64))
    return (t * weights.to(t.real.dtype).reshape(t.shape)).sum().real


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[list[str]]:
    """Restores a model's buffers and gradients if its copies changed them, as closures can.

    In that case, appends a reason to the yielded list.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    tensors = [*model.buffers(), *(g for _, g in gradients if g is not None)]
    before = [t.clone() for t in tensors]
    found: list[str] = []
    try:
        yield found
    finally:
        has_same_gradients = all(p.grad is gradient for p, gradient in gradients)
        if not (has_same_gradients and all(map(torch.equal, tensors, before))):
            found.append("its copies refer to the model itself, and cannot be compared with it")
            for t, value in zip(tensors, before, strict=True):
                t.data.copy_(value)
            for p, gradient in gradients:
                p.grad = gradient


@contextlib.contextmanager
def _same_random_numbers(devices: Sequence[int]) -> Iterator[None]:
    """Seeds Python, NumPy and torch (CPU and CUDA `devices`), and restores their states."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed all devices
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(0)
            random.seed(0)
            if numpy is not None:
                numpy.random.seed(0)
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _noisy_results(model: nn.Module, example: Example, seed: int) -> Results:
    """`_results` with a rounding error added to parameters and inputs."""

    def noise(t: Tensor) -> Tensor:
        generator = torch.Generator(t.device).manual_seed(seed)
        signs = torch.randint(0, 2, t.shape, generator=generator, device=t.device) * 2 - 1
        return t * (1 + 2 * _roundoff(t) * signs.to(t.dtype))

    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.copy_(noise(p))
    return _results(model, example.converted(noise))


def _roundoff(t: Tensor | None) -> float:
    return torch.finfo(t.dtype).eps / 2 if t is not None and t.is_floating_point() else 0.0


def _norm(tensors: Iterable[Tensor | None]) -> float:
    norms = [t.double().norm() for t in tensors if t is not None]
    return float(torch.stack([n.cpu() for n in norms]).norm()) if norms else 0.0


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a.double() - b.double()


def _is_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _coarse(results: Results) -> dict[str, float]:
    """Returns tolerances for models that do not run in float64: half of the digits."""
    return {name: _roundoff(t) ** 0.5 for name, t in results.items()}


def _is_finite(results: Results, names: Iterable[str]) -> bool:
    found = (results[name] for name in names)
    return all(bool(torch.isfinite(t).all()) for t in found if t is not None)
