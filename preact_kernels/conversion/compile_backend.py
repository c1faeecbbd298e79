"""The `torch.compile` backend "preact_kernels": fuses Dynamo's graph, then calls Inductor."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx

from preact_kernels import torch_compat
from preact_kernels.conversion.deferred import Deferred, computed_arguments
from preact_kernels.conversion.region import Region
from preact_kernels.conversion.registry import RULES
from preact_kernels.conversion.report import Outcome
from preact_kernels.modules.preact_stage import check_memory
from preact_kernels.torch_compat import FakeTensor, FunctionalTensor, disable_torch_function

_logger = logging.getLogger(__name__)


def compile_fused(
    graph: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    **inductor_options: Any,
) -> Callable:
    """Compiles a graph from Dynamo with its BN-ReLU-Conv chains fused.

    `convert` matches chains at each call. Here they are matched once, at compilation, since
    Dynamo's guards ensure that a graph fits its calls. Logs what is fused, and why the rest is not,
    at level INFO.

    Args:
        graph: a graph from Dynamo.
        example_inputs: inputs of the graph.
        options: the `options` of `torch.compile`: `"memory"` as in `convert`, and options of
            Inductor.
        inductor_options: further arguments of Inductor.

    Returns:
        A compiled function of the graph's inputs.
    """
    from torch._inductor.compile_fx import compile_fx

    others = dict(options or {})
    memory = others.pop("memory", "store")
    check_memory(memory, None, None, 1)
    if _has_volumes_of_any_size(example_inputs):
        # To prefer channels_last, Inductor would have to order symbolic strides, and cannot.
        others.setdefault("layout_optimization", False)
    if others:
        inductor_options["config_patches"] = others
    outcomes: list[Outcome] = []
    fused = fused_graph(graph, memory, outcomes)
    compiled: Any = compile_fx(fused, list(example_inputs), **inductor_options)
    count = sum(bool(o.into) for o in outcomes)
    _logger.info("%d of %d norms of a graph are fused", count, len(outcomes))
    for text, times in sorted(counted(outcomes).items()):
        _logger.info("%d: %s", times, text)
    return compiled


def _has_volumes_of_any_size(inputs: Sequence[Any]) -> bool:
    has_volumes = any(isinstance(i, Tensor) and i.dim() == 5 for i in inputs)
    return has_volumes and any(isinstance(i, torch.SymInt) for i in inputs)


def counted(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Counts the norms of a graph by fused operation and reason."""
    return dict(Counter(", ".join(filter(None, (o.into, o.reason))) for o in outcomes))


def fused_graph(graph: fx.GraphModule, memory: str, outcomes: list[Outcome]) -> fx.GraphModule:
    """Returns a graph that runs `graph` in a region; a run sets `outcomes`, one per norm."""
    outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]

    def run_in_region(*inputs: Any) -> Any:
        types = (FakeTensor, FunctionalTensor)
        region = Region(memory, extra_types=types, is_traced=True)
        with region:
            results = _Interpreter(graph, region).run(*inputs)
        region.finish("the end of the graph")
        outcomes[:] = [outcome for _, outcome in region.outcomes]
        return tuple(r.preact_node.value if type(r) is Deferred else r for r in results)

    fused = fx.Graph()
    inputs = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            inputs.append(fused.placeholder(node.name))
            inputs[-1].meta = dict(node.meta)
    results = fused.call_function(run_in_region, tuple(inputs))
    fused.output(tuple(fused.call_function(getitem, (results, i)) for i in range(len(outputs))))
    return fx.GraphModule(graph, fused)


class _Interpreter(fx.Interpreter):
    """Runs a graph in a region.

    Functions that may call a custom autograd function get computed tensors, and run outside of the
    region: an autograd function does not pass on the gradient of a deferred tensor.
    """

    def __init__(self, graph: fx.GraphModule, region: Region) -> None:
        super().__init__(graph)
        self._region = region

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target in RULES or isinstance(target, BuiltinFunctionType):
            return super().call_function(target, args, kwargs)
        with disable_torch_function():
            args, kwargs = computed_arguments((args, kwargs), target)
        if not torch_compat.is_opaque(target):
            return super().call_function(target, args, kwargs)
        self._region.suspend(target)
        try:
            return super().call_function(target, args, kwargs)
        finally:
            self._region.resume(target)
