"""Keeps images in channels_last order within a converted forward, as the kernels take them.

Plain PyTorch keeps the memory format of its input from layer to layer. If that is NCHW, each fused
call would convert its input, and its result back. So the graph converts its inputs once, and a
tensor goes back to NCHW only where its strides could be seen: by views, by modules of other
libraries, and by the caller.
"""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from preact_kernels.conversion import fused_calls
from preact_kernels.ops import layout

# They compute the same for any strides, and their results keep the memory format. Dropout is not
# among them: it draws numbers in the order of memory.
_MODULES = (
    nn.modules.activation.ReLU,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.conv._ConvNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.GELU,
    nn.Identity,
    nn.SiLU,
)
_FUNCTIONS = {
    F.adaptive_avg_pool2d,
    F.avg_pool2d,
    F.max_pool2d,
    F.relu,
    F.silu,
    fused_calls.bn_relu,
    fused_calls.stage,
    fused_calls.unit,
    operator.add,
    operator.iadd,
    operator.mul,
    torch.add,
    torch.cat,
    torch.mul,
    torch.relu,
    torch.sigmoid,
}
_METHODS = {"add", "add_", "clone", "mul", "mul_", "relu", "relu_", "sigmoid"}
_READS_NO_STRIDES = {"dim", "size"}


def keep_channels_last(root: nn.Module, graph: fx.Graph, inputs: Iterable[fx.Node]) -> None:
    """Adds the conversions to a graph with fused calls, where it reads `inputs`.

    Args:
        root: the module that was traced.
        graph: changed in place.
        inputs: the placeholders of the module's arguments.
    """
    inputs = list(inputs)
    # Its weight has the memory format of the model.
    conv = next((n for n, m in root.named_modules() if isinstance(m, nn.Conv2d)), None)
    if conv is None or any(_changes_in_place(n) for x in inputs for n in x.users):
        return
    at_start = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(at_start):
        weight = graph.get_attr(f"{conv}.weight")
        is_nchw = graph.call_function(are_contiguous, (weight, *inputs))
        begun = {x: graph.call_function(to_channels_last, (x, is_nchw)) for x in inputs}
    may_be_nhwc = set(begun.values())
    for node in list(graph.nodes):
        if node in may_be_nhwc or node is is_nchw:
            continue
        if _keeps_format(root, node):
            for x, converted in begun.items():
                node.replace_input_with(x, converted)
            if any(n in may_be_nhwc for n in node.all_input_nodes):
                may_be_nhwc.add(node)
        elif not (node.op == "call_method" and node.target in _READS_NO_STRIDES):
            for read in [n for n in node.all_input_nodes if n in may_be_nhwc]:
                with graph.inserting_before(node):
                    back = graph.call_function(to_contiguous, (read, is_nchw))
                node.replace_input_with(read, back)


def _keeps_format(root: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(root.get_submodule(str(node.target)), _MODULES)
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    return node.op == "call_method" and node.target in _METHODS


def _changes_in_place(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return name.endswith("_") or node.target is operator.iadd or bool(node.kwargs.get("inplace"))


def are_contiguous(*tensors: Tensor) -> bool:
    """Whether none of them is in channels_last order."""
    return not any(map(layout.is_channels_last, tensors))


def to_channels_last(x: Tensor, is_nchw: bool) -> Tensor:
    """`x` in channels_last order, where the model runs in NCHW."""
    return layout.nhwc(x) if is_nchw and x.dim() == 4 else x


def to_contiguous(x: Tensor, is_nchw: bool) -> Tensor:
    """`x` as a model that runs in NCHW gives it."""
    return x.contiguous() if is_nchw and x.dim() == 4 else x
