"""The `torch.compile` backend "preact_kernels": fuses Dynamo's graph, then hands it to Inductor."""

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

from torch import Tensor, fx

from preact_kernels.conversion.deferred import Deferred
from preact_kernels.conversion.region import Region
from preact_kernels.modules.preact_stage import check_memory
from preact_kernels.torch_compat import FakeTensor, FunctionalTensor


def compile_fused(
    graph: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    **inductor_options: Any,
) -> Callable:
    """Compiles a graph from Dynamo with its BN-ReLU-Conv chains fused.

    `convert` matches chains at each call; here they are matched once, at compilation, because
    Dynamo's guards ensure that a graph fits each of its calls.

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
    if others:
        inductor_options["config_patches"] = others
    compiled: Any = compile_fx(_fused(graph, memory), list(example_inputs), **inductor_options)
    return compiled


def _fused(graph: fx.GraphModule, memory: str) -> fx.GraphModule:
    """Returns a graph that runs `graph` in a region."""
    outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]

    def run_in_region(*inputs: Any) -> Any:
        types = (FakeTensor, FunctionalTensor)
        region = Region(memory, extra_types=types, is_traced=True)
        with region:
            results = fx.Interpreter(graph).run(*inputs)
        region.finish("the end of the graph")
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
