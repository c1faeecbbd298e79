"""Runs a model plain and converted, and compares everything that a program can observe."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.conversion.report import ConversionReport

TOLERANCE = 1e-7  # relative, in float64
STEPS = 3  # two in training, one in evaluation; a change of the model adds one in between

# Set for each model: False if gradients of two memory formats are added (the first one's is kept).
compares_strides_of_gradients = True


def ignore(*args: object) -> None:
    """A hook, or a change of a model, that does nothing."""


@dataclasses.dataclass
class Subject:
    """A model and its calls; `random_models.py` describes the attributes.

    Net: builds the model.
    make_input: makes the input of a step; its argument draws tensors.
    """

    Net: Callable[[], nn.Module]
    before: Callable = ignore
    after: Callable = ignore
    prepare: Callable = lambda net: net
    make_input: Callable = lambda randn: randn(2, 4, 8, 8).requires_grad_()
    call: Callable = lambda net, x: net(x)
    MODE: str = "convert"
    MEMORY: str = "store"
    ACTIVATIONS: Mapping | None = None
    GRADIENTS: str = "both"
    log: list = dataclasses.field(default_factory=list)


class Trial(NamedTuple):
    """Observations of a model.

    observed: facts by name, in the order of observation.
    errors: types of raised exceptions, by step and place.
    messages: messages of these exceptions.
    reports: conversion reports, one per step.
    """

    observed: dict[str, object]
    errors: dict[str, str]
    messages: dict[str, str]
    reports: list[ConversionReport]

    @property
    def has_fused(self) -> bool:
        """Whether a batch norm ran fused."""
        return any(report.fused for report in self.reports)


def assert_alike(subject: Subject, name: object = "") -> Trial:
    """Asserts that a model behaves alike plain and converted; returns the converted trial."""
    plain, converted = run(subject, 0, False), run(subject, 0, True)
    found = differences(plain, converted)
    assert not found, "\n".join([str(name), *found])
    return converted


def run(
    own: Subject,
    seed: int,
    is_converted: bool,
    noise: float = 0.0,
    change: Callable | None = None,
) -> Trial:
    """Builds a model, converted or not, and calls it several times.

    `noise` is a relative change of the inputs and the weights, `change` one of `changes.CHANGES`
    for the third step.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    trial = Trial({}, {}, {}, [])
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        net = own.Net().double()
        for p in itertools.chain(net.parameters(), net.buffers()):
            if p.dim() == 1 and p.is_floating_point():
                p.data.add_(randn(*p.shape).abs() * 0.5)
        others = torch.Generator().manual_seed(seed + 1)
        for p in net.parameters() if noise else ():
            p.data.mul_(1 + noise * torch.randn(p.shape, generator=others, dtype=torch.float64))
        own.before(net)
        is_fused = is_converted and own.MODE == "fuse"
        if is_converted and not is_fused:
            pk.convert(net, memory=own.MEMORY, activations=getattr(own, "ACTIVATIONS", None))
        own.after(net)
        net = own.prepare(net)
    except Exception as error:
        _note_error(trial, "build", error)
        return trial
    steps = STEPS if change is None else STEPS + 1
    for step in range(steps):
        call = own.call
        if step == steps - 1:
            net.eval()
        elif step == 2:
            try:
                changed = change(net, random.Random(seed))
            except Exception as error:
                _note_error(trial, f"step {step}, change", error)
                break
            if isinstance(changed, nn.Module):
                net = changed
            elif changed is not None:
                call = functools.partial(changed, call)
        x = own.make_input(lambda *shape: randn(*shape) * (1 + noise * randn(*shape)))
        net.zero_grad()
        with pk.fuse(memory=own.MEMORY) if is_fused else contextlib.nullcontext():
            goes_on = _step(own, call, net, x, randn, trial, f"step {step}")
        if is_converted and not is_fused:
            trial.reports.append(pk.conversion_report(net))
        if not goes_on:
            break
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.sub_(p.grad * 0.01 / (1 + p.grad.norm()))
    return trial


def _step(own, call, net, x, randn, trial, step) -> bool:
    """Observes a call, its gradients and the state after it; False: the backward raised."""
    seen = trial.observed
    out = None
    try:
        out = call(net, x)
    except Exception as error:
        _note_error(trial, f"{step}, forward", error)
    seen[f"{step}: output"] = facts(out)
    tensors = _tensors(out)
    known = [x, *tensors]
    seen[f"{step}: identity"] = [next(i for i, k in enumerate(known) if k is t) for t in known]
    seen[f"{step}: storage"] = [
        next(i for i, k in enumerate(known) if k.data_ptr() == t.data_ptr()) for t in known
    ]
    ok = _gradients(own, net, x, tensors, randn, trial, step)
    seen[f"{step}: input"] = facts(x)
    for name, p in net.named_parameters():
        seen[f"{step}: gradient of {name}"] = None if p.grad is None else facts(p.grad)
        seen[f"{step}: parameter {name}"] = p.requires_grad
    for name, b in net.named_buffers():
        seen[f"{step}: buffer {name}"] = facts(b)
    for name, m in net.named_modules():
        if not isinstance(m, nn.parallel.DistributedDataParallel):  # it lists the same
            seen[f"{step}: attributes of {name}"] = facts(vars(m))
    seen[f"{step}: seen by hooks"] = list(own.log)
    own.log.clear()
    states = (random.getstate(), torch.get_rng_state().tolist())
    seen[f"{step}: random state"] = str(hash(str(states)))
    return ok


def _gradients(own, net, x, tensors, randn, trial, step) -> bool:
    wanted = [t for t in tensors if t.requires_grad]
    if not wanted:
        return True
    loss = sum((t * randn(*t.shape)).sum() for t in wanted)
    try:
        if own.GRADIENTS == "second":
            parameters = [p for p in net.parameters() if p.requires_grad]
            by = [x] if isinstance(x, Tensor) and x.requires_grad else parameters
            found = torch.autograd.grad(loss, by, create_graph=True, allow_unused=True)
            # Gradients of weights may be in channels_last: see docs/convert.md. That of a bias
            # that is added behind a convolution may have a graph, which leads to no parameter.
            contiguous = [None if g is None else g.detach().contiguous() for g in found]
            trial.observed[f"{step}: gradients by outputs"] = facts(contiguous)
            penalty = sum(g.square().sum() for g in found if g is not None)
            if isinstance(penalty, Tensor) and penalty.requires_grad:
                penalty.backward()
            return True
        if own.GRADIENTS != "backward":
            found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
            trial.observed[f"{step}: gradients by outputs"] = facts(found)
        if own.GRADIENTS != "returned":
            loss.backward()
    except Exception as error:
        _note_error(trial, f"{step}, backward", error)
        return False
    return True


def _note_error(trial: Trial, place: str, error: Exception) -> None:
    trial.errors[place] = type(error).__name__
    trial.messages[place] = str(error).splitlines()[0][:200] if str(error) else ""


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


# Facts: what a program can observe in values.


class TensorFacts(NamedTuple):
    """The compared properties of a tensor."""

    kind: str
    mark: int | None
    dtype: torch.dtype
    shape: tuple
    stride: tuple
    requires_grad: bool
    has_grad_fn: bool
    is_view: bool
    values: Tensor
    grad: Tensor | None


def facts(value, depth=0):
    """Copies a value to nested lists of numbers, texts and `TensorFacts`."""
    if isinstance(value, DTensor):  # from FSDP2
        value = value.full_tensor()
    if isinstance(value, Tensor):
        grad = value.grad if value.is_leaf or value.retains_grad else None
        return TensorFacts(
            "Tensor" if type(value) is nn.Parameter else type(value).__name__,
            getattr(value, "mark", None),
            value.dtype,
            tuple(value.shape),
            value.stride(),
            value.requires_grad,
            value.grad_fn is not None,
            value._is_view(),
            value.detach().clone(),
            None if grad is None else grad.detach().clone(),
        )
    kind = type(value).__name__
    if depth > 4:
        return kind
    if isinstance(value, dict):
        items = [[facts(k, depth + 1), facts(v, depth + 1)] for k, v in value.items()]
        return [kind, *(i for i in items if not _is_private(i[0]))]
    if isinstance(value, list | tuple | collections.deque):
        return [kind, *(facts(v, depth + 1) for v in value)]
    if isinstance(value, str | int | float | None):
        return value
    if kind == "SimpleNamespace":
        return [kind, facts(vars(value), depth + 1)]
    return kind


def _is_private(key):
    """Whether an attribute belongs to PyTorch or to the conversion."""
    return isinstance(key, str) and key.startswith(("_", "preact_"))


def gradient_facts(gradients):
    """Returns `facts` of the gradients that a hook gets: a tensor, or tuples."""

    def comparable(gradient):
        if gradient is None:
            return None
        if not compares_strides_of_gradients or 1 in gradient.shape:
            return gradient.clone(memory_format=torch.contiguous_format)
        return gradient.detach()  # no view: that depends on the operators of the backward

    return facts(torch.utils._pytree.tree_map(comparable, gradients))


def with_strides_of_gradients(gradient):
    """Returns a gradient that `forward` reads; in NCHW if strides are not compared."""
    return gradient if compares_strides_of_gradients else gradient.contiguous()


# Comparisons.


def differences(a: Trial, b: Trial, has_checkpoint: bool = False) -> list[str]:
    """Describes differences between trials of the plain and the converted model.

    With `torch.utils.checkpoint`, a plain model updates running statistics twice; those are not
    compared.
    """
    found = []
    for key in sorted({*a.errors, *b.errors}, key=lambda k: (k != "build", k[:6], "backward" in k)):
        if a.errors.get(key) != b.errors.get(key):
            if "backward" in key and key in a.errors:
                break  # plain PyTorch raised: the converted model may work or raise another error
            errors = [f"{t.errors.get(key)} {t.messages.get(key, '')}" for t in (a, b)]
            found.append(f"{key}: raised {errors[0]}, converted {errors[1]}")
            if "backward" in key:
                break  # the converted model was not called again
    steps = [f"step {i}" for i in range(1 if has_checkpoint else STEPS + 1)]
    ended = next((s for s in steps if f"{s}, backward" in a.errors), None)
    for step in steps:
        names = [k for k in a.observed if k.startswith(step)]
        missing = set(names) ^ {k for k in b.observed if k.startswith(step)}
        if step == ended:
            names = [k for k in names if k == f"{step}: output"]
        elif missing:
            found.append(f"seen by one: {sorted(missing)}")
        if has_checkpoint:  # recomputation stops early, so some hooks are not called
            left_out = ("running", "batches", "seen by hooks")
            names = [k for k in names if not any(word in k for word in left_out)]
        scale = max([0.0, *(_norm(a.observed[k]) for k in names if "gradient of" in k)])
        for k in names:
            if k in b.observed:
                found += _compare(k, a.observed[k], b.observed[k], scale if "gradient" in k else 0)
        if step == ended:
            break
    return found


def _norm(value: object) -> float:
    return float(value.values.norm()) if isinstance(value, TensorFacts) else 0.0


def _compare(path: str, a: object, b: object, scale: float) -> list[str]:
    if isinstance(a, TensorFacts) and isinstance(b, TensorFacts):
        names = [n for n in TensorFacts._fields[:-2] if getattr(a, n) != getattr(b, n)]
        if "gradient" in path and "is_view" in names:
            names.remove("is_view")
        if "gradient of" in path and "stride" in names and _same_order(a, b):
            names.remove("stride")
        found = [f"{path}: {n} {getattr(a, n)}, converted {getattr(b, n)}" for n in names]
        if a.shape == b.shape and a.dtype == b.dtype:
            found += _compare_values(path, a.values, b.values, scale)
            if (a.grad is None) != (b.grad is None):
                found.append(f"{path}: grad is None {a.grad is None}, {b.grad is None}")
            elif a.grad is not None and a.grad.shape == b.grad.shape:
                found += _compare_values(f"{path}.grad", a.grad, b.grad, scale)
        return found
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i in range(len(a)) for d in _compare(f"{path}[{i}]", a[i], b[i], scale)]
    if type(a) is float and type(b) is float:
        return [] if abs(a - b) <= TOLERANCE * abs(a) or a == b else [f"{path}: {a} {b}"]
    return [] if a == b else [f"{path}: {str(a)[:100]}, converted {str(b)[:100]}"]


def _same_order(a: TensorFacts, b: TensorFacts) -> bool:
    """Whether strides differ only at axes of size 1, as they may in gradients of weights."""
    pairs = zip(a.shape, a.stride, b.stride, strict=True) if a.shape == b.shape else ()
    return a.shape == b.shape and all(n == 1 or s == t for n, s, t in pairs)


def _compare_values(path: str, a: Tensor, b: Tensor, scale: float) -> list[str]:
    if not a.is_floating_point():
        return [] if torch.equal(a, b) else [f"{path}: {a.tolist()}, converted {b.tolist()}"]
    if not torch.equal(a.isfinite(), b.isfinite()):
        return [f"{path}: finite values"]
    a, b = (t.nan_to_num(0, 0, 0).double() for t in (a, b))
    error, size = float((a - b).norm()), max(float(a.norm()), scale, 1e-6)
    return [] if error <= TOLERANCE * size else [f"{path}: relative error {error / size:.1e}"]


def tensors_of(model: nn.Module, outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns outputs, gradients of the parameters, and buffers."""
    return [*outputs, *(p.grad for p in model.parameters()), *model.buffers()]


def train_step(model: nn.Module, x: Tensor, call: Callable | None = None) -> list[Tensor | None]:
    """Returns `tensors_of` a training step; its forward is `call`, or the model's."""
    torch.manual_seed(0)  # for dropout
    model.zero_grad()
    y = model(x) if call is None else call(x)
    y.square().mean().backward()
    return tensors_of(model, (y,))


class Copies(TorchDispatchMode):
    """Counts copies of images into other memory formats."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.clone.default and y.dim() == 4:
            self.count += (args[0].stride(1) == 1) is not (y.stride(1) == 1)
        return y
