"""`convert`, `revert`, `fuse` and `conversion_report`."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, TypeVar

import torch
from torch import nn

from preact_kernels import torch_compat
from preact_kernels.conversion import user_modules
from preact_kernels.conversion.calls import (
    abandon_interrupted,
    enter,
    forget,
    is_inert,
    leave,
    outcomes,
)
from preact_kernels.conversion.named_activations import NamedActivations
from preact_kernels.conversion.norm_modules import contains_norm, is_norm
from preact_kernels.conversion.region import Region
from preact_kernels.conversion.report import ConversionReport, Site
from preact_kernels.conversion.user_modules import Conversion
from preact_kernels.conversion.verification import Example, Verifier, unchanged
from preact_kernels.modules.blocks import PreActBlock
from preact_kernels.modules.bn_relu import BNReLU2d
from preact_kernels.modules.bn_relu_conv import BNReLUConv2d
from preact_kernels.modules.norm_act import NormAct
from preact_kernels.modules.norm_act_conv import NormActConv
from preact_kernels.modules.preact_stage import PreActStage, check_memory
from preact_kernels.ops.dispatch import experimental_backend, warn_of_experimental

# Modules that run fused without conversion.
OWN = (BNReLU2d, BNReLUConv2d, NormAct, NormActConv, PreActBlock, PreActStage)

_Model = TypeVar("_Model", bound=nn.Module)


def convert(
    model: _Model,
    *,
    memory: str = "store",
    activations: Mapping[Any, str | tuple[str, float]] | None = None,
    example_inputs: object = None,
) -> _Model:
    """Makes a model run its norms, activations, convolutions and residual additions fused.

    The model's `forward` methods do not change. In a forward, norms and the activations,
    convolutions and additions after them are deferred until something else reads a result; then
    they run fused where possible. Outputs, gradients and running statistics equal plain PyTorch;
    parameters, buffers, modules and classes do not change. `convert` registers forward hooks on all
    modules that contain or call a norm. `conversion_report` lists what ran fused in the last call,
    and why the rest did not.

    Consecutive residual blocks of batch norms and ReLUs become one autograd node, as in
    `PreActStage`. A second call replaces the arguments of the first.

    Args:
        model: any module; it is changed in place.
        memory: `"store"`, `"rebuild"` or `"checkpoint"`. Runs of residual blocks of batch norms and
            ReLUs save what `PreActStage` saves. Elsewhere, `"rebuild"` keeps what convolutions,
            linear layers and unknown operations wrote, and the backward computes norms,
            activations, sums, concatenations, pooling and the like again; with `"checkpoint"` also
            convolutions and linear layers. See docs/memory.md.
        activations: names for activations that `convert` does not recognise, such as custom
            autograd functions: a dictionary from classes of modules, autograd functions and
            operators of `torch.ops` to names as in `pk.group_norm_act`. Values and gradients must
            be equal to the named activation.
        example_inputs: arguments of a call: a tensor, a tuple, or a dictionary of keywords. If
            given, copies of the model run on them, plain and converted, in training and evaluation,
            in the model's dtype and in float64, with the same random numbers. Parts of the model
            with outputs, gradients or buffers that differ by more than rounding are not converted,
            and the report says why.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not an `nn.Module`, or `activations` or `example_inputs` has the
            wrong type.
        ValueError: the memory mode or the name of an activation is unknown, or the plain model
            cannot be copied or raises on `example_inputs`.
    """
    _check_model(model)
    check_memory(memory, None, None, 1)
    example = None if example_inputs is None else Example.of(example_inputs)
    conversion = Conversion(memory, NamedActivations.of(activations))
    parts, reason = ([], "") if example is None else _differing_parts(model, conversion, example)
    revert(model)
    _convert_with(conversion, model)
    for name in parts:
        _give_back(model.get_submodule(name), reason)
    return model


def _convert_with(conversion: Conversion, model: nn.Module) -> None:
    """`convert` for checked arguments."""
    for module in model.modules():
        if _opens_region(module):
            user_modules.convert(module, conversion, enter, leave)


def _give_back(module: nn.Module, reason: str) -> None:
    revert(module)
    user_modules.give_back(module, reason)


def _differing_parts(
    model: nn.Module, conversion: Conversion, example: Example
) -> tuple[list[str], str]:
    """Returns a minimal set of modules that must run plain on the example, and the reason.

    With these modules plain, the converted model equals the plain model.
    """
    for name in _experimental_backends(model):  # the comparison hides warnings
        warn_of_experimental(name)
    try:
        plain = revert(copy.deepcopy(model))
    except Exception as error:
        raise ValueError(
            f"model: expected one that can be copied, for example_inputs: {error}"
        ) from error

    def difference(given_back: Sequence[str]) -> str:
        converted = copy.deepcopy(plain)
        _convert_with(conversion, converted)
        for name in given_back:
            _give_back(converted.get_submodule(name), "")
        return verifier.difference(converted)

    def reduced(parts: list[str], group: list[str]) -> list[str]:
        """Removes the modules of `group` that can run converted from `parts`."""
        rest = [name for name in parts if name not in group]
        if not difference(rest):
            return rest
        if len(group) == 1:
            group = _parts_of(plain, group[0])
            if not group or difference([*rest, *group]):
                return parts
            parts = [*rest, *group]
        half = (len(group) + 1) // 2
        for some in (group[:half], group[half:]):
            parts = reduced(parts, some) if some else parts
        return parts

    with torch.inference_mode(False), unchanged(model) as refusals:
        verifier = Verifier(plain, example)
        reason = verifier.refusal
        parts = [""] if reason else []
        if not reason and (different := difference([])):
            reason = f"differs from plain PyTorch on the example ({different})"
            parts = reduced([""], [""])
    return ([""], refusals[0]) if refusals else (parts, reason)


def _parts_of(model: nn.Module, name: str) -> list[str]:
    """Returns the children of a module that contain norms."""
    prefix = f"{name}." if name else ""
    return [
        prefix + child
        for child, module in model.get_submodule(name).named_children()
        if not is_norm(module) and contains_norm(module)
    ]


def revert(model: _Model) -> _Model:
    """Undoes `convert` in place, and removes its hooks and attributes.

    Use it before `torch.compile` for inference. Modules of this package do not change.

    Args:
        model: any module.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    _check_model(model)
    abandon_interrupted()
    for module in model.modules():
        user_modules.revert(module)
        outcomes.pop(module, None)
        forget(module)
    return model


def conversion_report(model: nn.Module) -> ConversionReport:
    """Lists all norms of a model: whether the last call ran fused, into what, or why not.

    Args:
        model: a module that has been called; it does not change.

    Returns:
        A sequence of `Site`s with `name`, `fused` and `reason`; it prints as a table.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    _check_model(model)
    own: dict[int, str] = {}
    given_back: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, OWN):
            own.update((id(m), type(module).__name__) for m in module.modules())
        if (why := user_modules.why_given_back(module)) is not None:
            given_back.update((id(m), why) for m in module.modules())
    converted = [m for m in model.modules() if user_modules.is_converted(m)]
    inside = {id(child) for m in converted for child in m.modules()}
    names = {id(m): name for name, m in model.named_modules()}
    sites = []
    for name, module in model.named_modules():
        if not is_norm(module):
            continue
        found = outcomes.get(module, ())
        reason = next((o.reason for o in found if not o.into), "")
        reason = given_back.get(id(module), reason)
        if found and not reason:
            into, reasons = _joined(o.into for o in found), _joined(o.reason for o in found)
            convs = _joined(names.get(id(o.conv()), "") for o in found if o.conv)
            refusals = _joined(refusal() for o in found for refusal in o.refusals)
            sites.append(Site(name, True, reasons, into, convs, refusals))
        elif id(module) in own and not reason:
            sites.append(Site(name, True, into=own[id(module)]))
        else:
            missing = "the model is not converted"
            if id(module) in inside:
                missing = "not called by a converted module since the model was converted"
            elif converted:
                missing = "not inside a converted module: convert the module that calls it"
            sites.append(Site(name, False, reason or missing))
    report = ConversionReport(sites)
    if report.fused:
        report.experimental = next(_experimental_backends(model), "")
    return report


def _experimental_backends(model: nn.Module) -> Iterator[str]:
    """Yields the names of experimental backends that run a model on its current devices."""
    placed = {(p.device.type, p.dtype) for p in model.parameters()}
    yield from filter(None, starmap(experimental_backend, placed))


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(filter(None, dict.fromkeys(texts)))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")


def _opens_region(module: nn.Module) -> bool:
    kind = type(module)
    if is_norm(module) or isinstance(module, (*OWN, torch.jit.ScriptModule)):
        return False
    if kind.forward is nn.Module.forward or kind.__module__.startswith("torch.nn.parallel"):
        return False
    return not torch_compat.is_compiled_module(module) and contains_norm(module)


@contextlib.contextmanager
def fuse(memory: str = "store") -> Iterator[None]:
    """Context manager that runs all code of this thread as if converted by `convert`.

    Args:
        memory: as in `convert`.

    Raises:
        ValueError: the memory mode is unknown.
    """
    check_memory(memory, None, None, 1)
    if torch.compiler.is_compiling() or is_inert():
        yield
        return
    region = Region(memory)
    try:
        with region:
            yield
    finally:
        region.finish("the end of pk.fuse")
