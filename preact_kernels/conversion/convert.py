"""`convert`, `revert` and `conversion_report`."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from torch import nn

from preact_kernels.conversion.fused_calls import STAGES, StageState
from preact_kernels.conversion.fused_module import (
    OWN,
    FusedModule,
    Plan,
    fused_class,
    install,
    installed_plan,
    is_leaf,
    plan,
    uninstall,
)
from preact_kernels.conversion.matching import Match, Run, SingleUnit, is_norm
from preact_kernels.conversion.report import ConversionReport, Site
from preact_kernels.conversion.tracing import original_class
from preact_kernels.modules.preact_stage import check_memory

_Model = TypeVar("_Model", bound=nn.Module)


class _Analysis(NamedTuple):
    """How the modules of a model can run fused, by name, the outer ones first."""

    plans: dict[str, Plan]
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
    plans = _gaining(_analysis(model).plans)
    planned = {id(model.get_submodule(name)) for name in plans}
    stale = [m for m in model.modules() if isinstance(m, FusedModule) and id(m) not in planned]
    changed: list[nn.Module] = []
    try:
        for name, found in plans.items():
            module = model.get_submodule(name)
            if not isinstance(module, FusedModule):
                changed.append(module)
            install(module, found)
        for module in stale:
            uninstall(module)
    except Exception:
        for module in changed:
            uninstall(module)
        raise
    for owner, norm in _first_norms(model, plans):
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
        elif found := installed_plan(module):
            for m in found.matches.found:
                for activation in m.activations:
                    fused.setdefault(_joined(name, str(activation.bn.target)), _described(m))
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


def _analysis(model: nn.Module) -> _Analysis:
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    shared = frozenset(i for i, count in places.items() if count > 1)
    plans, refused = {}, {}
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
        try:
            plans[name] = plan(module, shared)
            fused_class(kind)
            shared |= plans[name].matches.shared
        except Exception as error:
            plans.pop(name, None)
            refused[name] = f"{kind.__name__} cannot be traced: {error}"
    return _Analysis(plans, refused)


def _gaining(plans: dict[str, Plan]) -> dict[str, Plan]:
    """The plans that fuse something which no plan of a child fuses alike."""
    gaining: dict[str, Plan] = {}
    known: set[tuple] = set()
    for name, found in reversed(plans.items()):
        keys = {_key(name, m) for m in found.matches.found}
        if not keys <= known:
            gaining[name] = found
        known |= keys
    return dict(reversed(gaining.items()))


def _key(name: str, m: Match) -> tuple:
    """Equal for equal matches in the graphs of several modules."""
    paths = tuple(_joined(name, str(n.target)) for n in m.nodes if n.op == "call_module")
    is_whole = isinstance(m, SingleUnit) and m.residual is None
    return type(m), paths, is_whole, isinstance(m, Run) and m.is_changed_later


def _first_norms(model: nn.Module, plans: dict[str, Plan]) -> Iterator[tuple[nn.Module, str]]:
    """Of each run the first batch norm: its parent, and its name there."""
    for name, found in plans.items():
        for m in found.matches.found:
            if isinstance(m, Run):
                path = _joined(name, str(m.activations[0].bn.target))
                parent, _, child = path.rpartition(".")
                yield model.get_submodule(parent), child


def _reason(norm: str, analysis: _Analysis) -> str:
    """Why a batch norm is not fused: what the outermost graph that could hold it says."""
    names = [norm]
    while names[-1]:
        names.append(names[-1].rpartition(".")[0])
    reason = ""
    for name in reversed(names[1:]):  # from the outside
        if name in analysis.refused:
            reason = analysis.refused[name]
        elif found := analysis.plans.get(name):
            inner = norm.removeprefix(f"{name}." if name else "")
            if inner in found.matches.refused:
                return found.matches.refused[inner]
            if any(inner == str(a.bn.target) for m in found.matches.found for a in m.activations):
                return "the model is not converted"
            reason = next((r for p, r in found.opaque.items() if inner.startswith(f"{p}.")), reason)
    return reason or "no forward calls it"


def _described(m: Match) -> str:
    if isinstance(m, SingleUnit):
        return "BN-ReLU-Conv" + (" and residual add" if m.residual is not None else "")
    if isinstance(m, Run):
        first = m.blocks[0]
        if first.is_residual:
            return f"run of {len(m.blocks)} residual blocks"
        return f"BN-ReLU-Conv, {len(first.units)} in a row"
    return "BN-ReLU"


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if name else path
