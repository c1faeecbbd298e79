"""The class of a converted module: its own class, with a forward that runs what was found fused."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from preact_kernels.conversion.matching import Match, Matches, Run, SingleUnit, is_norm, match
from preact_kernels.conversion.rewriting import rewrite
from preact_kernels.conversion.tracing import (
    Inlined,
    Trace,
    inlined_at,
    module_at,
    names_of,
    trace,
)
from preact_kernels.modules.bn_relu import BNReLU2d
from preact_kernels.modules.bn_relu_conv import BNReLUConv2d
from preact_kernels.modules.preact_block import PreActBlock
from preact_kernels.modules.preact_stage import PreActStage
from preact_kernels.ops.plain_operators import runs_plain
from preact_kernels.torch_compat import has_global_module_hook

OWN = (BNReLU2d, BNReLUConv2d, PreActBlock, PreActStage)  # fused without conversion
_PLAN = "preact_plan"


class Called(NamedTuple):
    """What a graph assumes of a module that it calls, such as an activation or a pooling."""

    names: tuple[str, ...]  # its path from the root of the graph
    kind: type
    flags: tuple

    def is_unchanged(self, root: nn.Module) -> bool:
        """Whether it has not been replaced by another kind, or set to work in place."""
        module = module_at(root, self.names)
        return type(module) is self.kind and _flags(module) == self.flags


def _flags(module: Any) -> tuple:
    return getattr(module, "inplace", None), getattr(module, "return_indices", None)


def _called(root: nn.Module, graph: fx.Graph) -> Iterator[Called]:
    """The modules of torch without children and tensors that a graph calls."""
    for path in dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "call_module"):
        module = root.get_submodule(path)
        has_state = any(True for _ in (*module.children(), *module.parameters(), *module.buffers()))
        if type(module).__module__.startswith("torch.nn.") and not has_state:
            yield Called(names_of(path), type(module), _flags(module))


class Plan(NamedTuple):
    """How the forward of a module, or of a copy of it, runs.

    Pickles as `shared` alone: generated functions cannot be pickled.
    """

    function: Callable[..., Tensor]  # in training mode; see `rewrite`
    evaluation_function: Callable[..., Tensor]  # the same where the forward does not ask
    argument_names: tuple[str, ...]  # without those that have defaults
    inlined: tuple[Inlined, ...]  # modules that the functions do not call
    called: tuple[Called, ...]  # modules without state that they do
    reads_training: tuple[tuple[str, ...], ...]  # paths of modules whose mode the forward reads
    shared: tuple[str, ...]  # paths of modules that have several places in the model
    fused: dict[str, str]  # what the batch norms run in, by path

    def __deepcopy__(self, memo: dict) -> "Plan":
        return Plan._make(copy.deepcopy(value, memo) for value in self)

    def __reduce__(self):
        return tuple, (self.shared,)

    def is_right_for(self, module: nn.Module) -> bool:
        """Whether `module` is as it was when the plan was made."""
        return all(i.is_unchanged(module) for i in self.inlined) and all(
            c.is_unchanged(module) for c in self.called
        )

    @property
    def depends_on_training(self) -> bool:
        """Whether the forward differs between training and evaluation beside its leaves."""
        return self.function is not self.evaluation_function

    def arguments(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[Tensor, ...] | None:
        """The arguments of the function for a call of `module`; None where it is not right."""
        names = self.argument_names
        if len(args) + len(kwargs) != len(names):
            return None
        if kwargs:
            if kwargs.keys() != set(names[len(args) :]):
                return None
            args = (*args, *(kwargs[name] for name in names[len(args) :]))
        if not all(isinstance(a, Tensor) for a in args) or runs_plain(*args):
            return None
        if has_global_module_hook() or not self.is_right_for(module):
            return None
        return args

    def chosen(self, module: nn.Module) -> Callable[..., Tensor] | None:
        """The forward for the present mode of `module`; None where its children's modes differ."""
        if not self.depends_on_training:
            return self.function
        for names in self.reads_training:
            child = module_at(module, names)
            if child is None or child.training != module.training:
                return None
        return self.function if module.training else self.evaluation_function


class Analysis(NamedTuple):
    """What the graph of a module showed."""

    plan: Plan
    matches: Matches  # in training mode
    opaque: dict[str, str]  # why a child was not looked into, by path


def analyse(module: nn.Module, shared: frozenset[int] = frozenset()) -> Analysis:
    """Finds how `module` can run fused.

    Args:
        module: any module; it does not change.
        shared: ids of modules with several places in the model.

    Raises:
        Refusal: its forward cannot be traced.
    """
    flags = [(m, m.training) for m in module.modules() if "training" in m.__dict__]
    called: dict[Called, None] = {}  # in order

    def traced(training: bool) -> tuple[Callable[..., Tensor], Trace, Matches, tuple[str, ...]]:
        for m, _ in flags:
            m.__dict__["training"] = training
        found = trace(module, is_leaf)
        matches = match(module, found, shared)
        names = tuple(str(n.target) for n in found.graph.nodes if n.op == "placeholder")
        function = rewrite(module, found.graph, matches.found)
        called.update(dict.fromkeys(_called(module, found.graph)))
        return function, found, matches, names

    try:
        function, found, matches, names = traced(training=True)
        inlined = [*found.inlined.values(), *_absorbed(module, matches)]
        reads, evaluation_function = found.reads_training, function
        if reads:
            evaluation_function, other, other_matches, _ = traced(training=False)
            inlined += [*other.inlined.values(), *_absorbed(module, other_matches)]
            reads = tuple(dict.fromkeys((*reads, *other.reads_training)))
    finally:
        for m, flag in flags:
            m.__dict__["training"] = flag
    paths = {m: path for path, m in module.named_modules()}
    own_shared = tuple(path for m, path in paths.items() if id(m) in matches.shared)
    fused = {str(a.bn.target): _described(m) for m in matches.found for a in m.activations}
    own = Plan(
        function,
        evaluation_function,
        names,
        tuple(inlined),
        tuple(called),
        tuple(names_of(paths[m]) for m in reads),
        own_shared,
        fused,
    )
    return Analysis(own, matches, found.opaque)


def _described(m: Match) -> str:
    if isinstance(m, SingleUnit):
        return "BN-ReLU-Conv" + (" and residual add" if m.residual is not None else "")
    if isinstance(m, Run):
        first = m.blocks[0]
        if first.is_residual:
            return f"run of {len(m.blocks)} residual blocks"
        return f"BN-ReLU-Conv, {len(first.units)} in a row"
    return "BN-ReLU"


def _absorbed(root: nn.Module, matches: Matches) -> Iterator[Inlined]:
    """The ReLUs, and the modules that do nothing, which fused functions do not call."""
    for m in matches.found:
        for node in m.nodes:
            if node.op == "call_module":
                module = root.get_submodule(str(node.target))
                if not (is_norm(module) or isinstance(module, nn.Conv2d)):
                    yield inlined_at(root, str(node.target))


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is called as it is: it is fused already, or has nothing to fuse."""
    if is_norm(module) or isinstance(module, OWN):
        return True
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return not any(is_norm(m) or isinstance(m, nn.Conv2d) for m in module.modules())


class FusedModule(nn.Module):
    """What the class of a converted module adds to its original class."""

    original_class: type[nn.Module]

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(protocol)
        cls, original = type(self), self.original_class
        if cls is not fused_class(original) or not isinstance(reduced, tuple):
            return reduced
        constructor, args, *rest = reduced
        if constructor.__module__ == "copyreg" and args[:1] == (cls,):
            return _empty, (original, *args[1:]), *rest
        return constructor, tuple(original if a is cls else a for a in args), *rest

    def __prepare_scriptable__(self):
        """For `torch.jit.script`, which compiles the original class."""
        plain = self.original_class.__new__(self.original_class)
        plain.__dict__ = {name: value for name, value in self.__dict__.items() if name != _PLAN}
        return plain

    def __setstate__(self, state):
        super().__setstate__(state)
        shared = self.__dict__.get(_PLAN, ())
        if isinstance(shared, Plan):
            return
        uninstall(self)
        with contextlib.suppress(Exception):  # it cannot be traced, or has parts not loaded yet
            ids = frozenset(id(self.get_submodule(path)) for path in shared)
            install(self, analyse(self, ids).plan)


def _fused_forward(module: Any, args: tuple, kwargs: dict) -> Any:
    """The original forward of `module`, fused where that gives the same results."""
    found: Plan | None = module.__dict__.get(_PLAN)
    own = None if found is None else found.arguments(module, args, kwargs)
    function = None if found is None or own is None else found.chosen(module)
    if function is None or own is None:
        return module.original_class.forward(module, *args, **kwargs)
    return function(module, module, *own)


def _empty(original: type[nn.Module], *args) -> nn.Module:
    cls = fused_class(original)
    return cls.__new__(cls, *args)


_fused_classes: dict[type, type] = {}


def fused_class(original: Any) -> type:
    """The class of converted modules whose class is `original`."""
    if original not in _fused_classes:

        @functools.wraps(original.forward)  # tracers and others read its signature
        def forward(self, *args, **kwargs):
            return _fused_forward(self, args, kwargs)

        members = {
            "original_class": original,
            "__module__": original.__module__,
            "forward": forward,
        }
        name = f"Fused{original.__name__}"
        _fused_classes[original] = type(name, (FusedModule, original), members)
    return _fused_classes[original]


def install(module: Any, plan: Plan) -> None:
    """Makes `module` run as planned."""
    if not isinstance(module, FusedModule):
        module.__class__ = fused_class(type(module))
    module.__dict__[_PLAN] = plan


def uninstall(module: Any) -> None:
    """Gives `module` its original class."""
    if isinstance(module, FusedModule):
        module.__dict__.pop(_PLAN, None)
        if type(module) is fused_class(module.original_class):  # not wrapped by another library
            module.__class__ = module.original_class  # type: ignore[assignment]


def installed_plan(module: nn.Module) -> Plan | None:
    """The plan of a converted module."""
    return module.__dict__.get(_PLAN) if isinstance(module, FusedModule) else None
