"""The class of a converted module: its own class, with a forward that runs what was found fused."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from preact_kernels.conversion.matching import Matches, is_norm, match
from preact_kernels.conversion.rewriting import rewrite
from preact_kernels.conversion.tracing import Inlined, Refusal, Trace, inlined_at, trace
from preact_kernels.modules.bn_relu import BNReLU2d
from preact_kernels.modules.bn_relu_conv import BNReLUConv2d
from preact_kernels.modules.preact_block import PreActBlock
from preact_kernels.modules.preact_stage import PreActStage
from preact_kernels.ops.plain_operators import runs_plain
from preact_kernels.torch_compat import has_global_module_hook

OWN = (BNReLU2d, BNReLUConv2d, PreActBlock, PreActStage)  # fused without conversion
_PLAN = "preact_plan"


class Plan(NamedTuple):
    """How the forward of a module runs."""

    function: Callable[..., Tensor]  # in training mode; see `rewrite`
    evaluation_function: Callable[..., Tensor]  # the same where the forward does not ask
    argument_count: int
    inlined: tuple[Inlined, ...]  # modules that the function does not call
    matches: Matches
    opaque: dict[str, str]  # why a child was not looked into, by path

    @property
    def depends_on_training(self) -> bool:
        """Whether the forward differs between training and evaluation beside its leaves."""
        return self.function is not self.evaluation_function

    def serves(self, args: tuple, kwargs: dict) -> bool:
        """Whether the plan is right for this call."""
        if kwargs or len(args) != self.argument_count:
            return False
        if not all(isinstance(a, Tensor) for a in args):
            return False
        return not has_global_module_hook() and all(i.is_unchanged() for i in self.inlined)

    def chosen(self, module: nn.Module) -> Callable[..., Tensor] | None:
        """The forward for the present mode of `module`; None where its children's modes differ."""
        if not self.depends_on_training:
            return self.function
        if any(i.module.training != module.training for i in self.inlined):
            return None
        return self.function if module.training else self.evaluation_function


def plan(module: nn.Module, shared: frozenset[int] = frozenset()) -> Plan:
    """Finds how `module` can run fused.

    Args:
        module: any module; it does not change.
        shared: ids of modules with several places in the model.

    Raises:
        Refusal: its forward cannot be traced.
    """
    flags = [(m, m.training) for m in module.modules()]

    def traced(training: bool) -> tuple[Callable[..., Tensor], Trace, Matches, int]:
        for m, _ in flags:
            m.__dict__["training"] = training
        found = trace(module, is_leaf)
        matches = match(module, found, shared)
        count = sum(node.op == "placeholder" for node in found.graph.nodes)
        return rewrite(found.graph, matches.found), found, matches, count

    try:
        function, found, matches, count = traced(training=True)
        evaluation_function = traced(training=False)[0] if found.reads_training else function
    finally:
        for m, flag in flags:
            m.__dict__["training"] = flag
    inlined = (*found.inlined.values(), *_absorbed(module, matches))
    return Plan(function, evaluation_function, count, inlined, matches, found.opaque)


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

    def forward(self, *args, **kwargs):
        """The original forward, fused where that gives the same results."""
        found: Plan | None = self.__dict__.get(_PLAN)
        function = None
        if found is not None and not runs_plain(*args) and found.serves(args, kwargs):
            function = found.chosen(self)
        if function is None:
            return self.original_class.forward(self, *args, **kwargs)
        return function(self, self, *args)

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(protocol)
        cls = type(self)
        if len(reduced) < 3 or reduced[1][:1] != (cls,) or not isinstance(reduced[2], dict):
            return reduced
        state = {name: value for name, value in reduced[2].items() if name != _PLAN}
        return _empty, (cls.original_class, *reduced[1][1:]), state, *reduced[3:]

    def __setstate__(self, state):
        super().__setstate__(state)
        install(self)


def _empty(original: type[nn.Module], *args) -> nn.Module:
    cls = fused_class(original)
    return cls.__new__(cls, *args)


_fused_classes: dict[type, type] = {}


def fused_class(original: type) -> type:
    """The class of converted modules whose class is `original`."""
    if original not in _fused_classes:
        members = {"original_class": original, "__module__": original.__module__}
        name = f"Fused{original.__name__}"
        _fused_classes[original] = type(name, (FusedModule, original), members)
    return _fused_classes[original]


def install(module: Any, found: Plan | None = None) -> None:
    """Makes `module` run as planned; without a plan it is made here, and may find nothing."""
    if found is None:
        try:
            found = plan(module)
        except Refusal:
            return
    if not isinstance(module, FusedModule):
        module.__class__ = fused_class(type(module))
    module.__dict__[_PLAN] = found


def uninstall(module: Any) -> None:
    """Gives `module` its original class."""
    if isinstance(module, FusedModule):
        module.__dict__.pop(_PLAN, None)
        if type(module) is fused_class(module.original_class):  # not wrapped by another library
            module.__class__ = module.original_class  # type: ignore[assignment]


def installed_plan(module: nn.Module) -> Plan | None:
    """The plan of a converted module."""
    return module.__dict__.get(_PLAN)
