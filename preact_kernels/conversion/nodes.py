"""What the nodes of a graph call."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import fx, nn
from torch.nn import functional as F

from preact_kernels.modules.batch_norm import has_hooks

_DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_FUNCTIONS = (F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout)


_RELU_FUNCTIONS = (F.relu, F.relu_, torch.relu, torch.relu_)


def is_relu(modules: Mapping[str, nn.Module], node: fx.Node) -> bool:
    """Whether `node` is a ReLU without hooks."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return type(module) is nn.ReLU and not has_hooks(module)
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in _RELU_FUNCTIONS


def passes_on(
    modules: Mapping[str, nn.Module], node: fx.Node, *, in_evaluation: bool = False
) -> bool:
    """Whether the output of `node` is its input.

    Args:
        modules: those of the graph, by path.
        node: of the graph.
        in_evaluation: whether the modes of modules stay as they are.
    """
    if node.op == "call_module":
        return does_nothing(modules[str(node.target)], in_evaluation=in_evaluation)
    if node.op != "call_function" or node.target not in _DROPOUT_FUNCTIONS:
        return False
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    p = given.get("p", 0.5)
    is_zero = isinstance(p, int | float) and p == 0
    return is_zero or (in_evaluation and given.get("training", True) is False)


def does_nothing(module: nn.Module, *, in_evaluation: bool = False) -> bool:
    """Whether a call of `module` returns its input."""
    if type(module) in _DROPOUTS:
        is_off = (in_evaluation and not module.training) or getattr(module, "p", None) == 0
    else:
        is_off = type(module) is nn.Identity
    return is_off and not has_hooks(module)


def called_twice(modules: Mapping[str, nn.Module], graph: fx.Graph) -> set[int]:
    """Ids of the modules that a graph calls more than once, and of all modules in them."""
    called = [modules[str(n.target)] for n in graph.nodes if n.op == "call_module"]
    counts = Counter(map(id, called))
    return {id(m) for c in called if counts[id(c)] > 1 for m in c.modules()}
