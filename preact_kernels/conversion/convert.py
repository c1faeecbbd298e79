"""`convert`, `revert` and `conversion_report`."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from torch import nn

from preact_kernels.conversion.fused_calls import STAGES, StageState
from preact_kernels.conversion.fused_module import (
    OWN,
    Analysis,
    FusedModule,
    analyse,
    fused_class,
    install,
    installed_plan,
    is_leaf,
    uninstall,
)
from preact_kernels.conversion.matching import Match, Run, SingleUnit, is_norm
from preact_kernels.conversion.report import ConversionReport, Site
from preact_kernels.conversion.tracing import original_class
from preact_kernels.modules.preact_stage import check_memory

_Model = TypeVar("_Model", bound=nn.Module)


class _ModelAnalysis(NamedTuple):
    """How the modules of a model can run fused, by name, the outer ones first."""

    found: dict[str, Analysis]
    refused: dict[str, str]


def convert(model: _Model, *, memory: str = "store") -> _Model:
    """Makes a model run its BN-ReLU-Conv chains fused, and the residual additions behind them.

    Outputs, gradients and running statistics stay those of plain PyTorch. Parameters, buffers and
    modules stay the same objects, with the same `state_dict` keys in the same order; a module that
    runs fused gets a subclass of its class. Whatever cannot be fused stays as it is;
    `conversion_report` says why. The forwards of the model are traced with `torch.fx`, which calls
    them with symbolic inputs.

    Residual blocks in a row become one autograd node, as in `PreActStage`. Converting again sets
    the memory mode, and takes changes of the model into account.

    Args:
        model: any module; it is changed in place.
        memory: `"store"`, `"rebuild"` or `"checkpoint"`: what the residual blocks save for
            backward, as in `PreActStage`.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not an `nn.Module`.
        ValueError: the memory mode is unknown.
    """
    _check_model(model)
    check_memory(memory, None, None, 1)
    gaining = _gaining(_analysis(model).found)
    planned = {id(model.get_submodule(name)) for name in gaining}
    stale = [m for m in model.modules() if isinstance(m, FusedModule) and id(m) not in planned]
    changed: list[nn.Module] = []
    try:
        for name, analysis in gaining.items():
            module = model.get_submodule(name)
            if not isinstance(module, FusedModule):
                changed.append(module)
            install(module, analysis.plan)
        for module in stale:
            uninstall(module)
    except Exception:
        for module in changed:
            uninstall(module)
        raise
    for owner, norm in _first_norms(model, gaining):
        StageState.of(owner)[norm] = StageState(memory)
    return model


def revert(model: _Model) -> _Model:
    """Undoes `convert`, in place: every module gets its own class back.

    Modules of this package stay as they are.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    _check_model(model)
    for module in model.modules():
        uninstall(module)
        module.__dict__.pop(STAGES, None)
    return model


def conversion_report(model: nn.Module) -> ConversionReport:
    """Lists every batch norm of a model: whether it runs fused, and if not, why.

    Returns:
        A sequence of `Site`s with `name`, `fused` and `reason`; printed, it is a table.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    _check_model(model)
    analysis = _analysis(model)
    fused: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, OWN):
            for path, norm in module.named_modules(prefix=name):
                if is_norm(norm):
                    fused[path] = type(module).__name__
        elif (plan := installed_plan(module)) and plan.is_right_for(module):
            for path, into in plan.fused.items():
                fused.setdefault(_joined(name, path), into)
    sites = []
    for name, module in model.named_modules():
        if not is_norm(module):
            continue
        if name in fused:
            sites.append(Site(name, True, into=fused[name]))
        else:
            sites.append(Site(name, False, _reason(name, analysis)))
    return ConversionReport(sites)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")


def _analysis(model: nn.Module) -> _ModelAnalysis:
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    shared = frozenset(i for i, count in places.items() if count > 1)
    found, refused = {}, {}
    for name, module in model.named_modules():
        kind = original_class(module)
        if is_leaf(module) or kind.forward is nn.Module.forward:
            continue
        if kind.__module__.startswith("torch.") and kind is not nn.Sequential:
            refused[name] = f"{kind.__name__} is not traced"
            continue
        if "forward" in module.__dict__ or kind.__call__ is not nn.Module.__call__:
            refused[name] = f"{kind.__name__} does not run the forward of its class"
            continue
        if _reads_class(kind.forward):
            refused[name] = f"the forward of {kind.__name__} reads __class__"
            continue
        try:
            found[name] = analyse(module, shared)
            fused_class(kind)
            shared |= found[name].matches.shared
        except Exception as error:
            found.pop(name, None)
            refused[name] = f"{kind.__name__} cannot be traced: {error}"
    return _ModelAnalysis(found, refused)


def _reads_class(forward: Callable) -> bool:
    """Whether it reads `__class__`, as in `super(self.__class__, self)`: subclasses break that."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and "__class__" in code.co_names


def _gaining(found: dict[str, Analysis]) -> dict[str, Analysis]:
    """Those that fuse something which no child fuses alike."""
    gaining: dict[str, Analysis] = {}
    known: set[tuple] = set()
    for name, analysis in reversed(found.items()):
        keys = {_key(name, m) for m in analysis.matches.found}
        if not keys <= known:
            gaining[name] = analysis
        known |= keys
    return dict(reversed(gaining.items()))


def _key(name: str, m: Match) -> tuple:
    """Equal for equal matches in the graphs of several modules."""
    paths = tuple(_joined(name, str(n.target)) for n in m.nodes if n.op == "call_module")
    is_whole = isinstance(m, SingleUnit) and m.residual is None
    return type(m), paths, is_whole, isinstance(m, Run) and m.is_changed_later


def _first_norms(
    model: nn.Module, analyses: dict[str, Analysis]
) -> Iterator[tuple[nn.Module, str]]:
    """Of each run the first batch norm: its parent, and its name there."""
    for name, analysis in analyses.items():
        for m in analysis.matches.found:
            if isinstance(m, Run):
                path = _joined(name, str(m.activations[0].bn.target))
                parent, _, child = path.rpartition(".")
                yield model.get_submodule(parent), child


def _reason(norm: str, analysis: _ModelAnalysis) -> str:
    """Why a batch norm is not fused: what the outermost graph that could hold it says."""
    names = [norm]
    while names[-1]:
        names.append(names[-1].rpartition(".")[0])
    reason = ""
    for name in reversed(names[1:]):  # from the outside
        if name in analysis.refused:
            reason = analysis.refused[name]
        elif found := analysis.found.get(name):
            inner = norm.removeprefix(f"{name}." if name else "")
            if inner in found.matches.refused:
                return found.matches.refused[inner]
            if inner in found.plan.fused:
                return "the model is not converted, or has changed since"
            reason = next((r for p, r in found.opaque.items() if inner.startswith(f"{p}.")), reason)
    return reason or "no forward calls it"


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if name else path
