"""`fuse_for_inference`: folds batch norms into the convolutions before them.

Chains that run fused already do not change. Elsewhere batch norms fold, and the remaining batch
norms and ReLUs run as PyTorch's own operators: on a CPU, calls of single fused units would be
slower, most of all at batch 1 (`python -m bench.inference`).
"""

import copy
import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from preact_kernels.conversion.convert import OWN, convert_with, revert
from preact_kernels.conversion.owners import CONVERSION
from preact_kernels.inference.tracing import Refusal, original_class, trace
from preact_kernels.modules.hooks import has_hooks

_Model = TypeVar("_Model", bound=nn.Module)

_DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_FUNCTIONS = (F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout)
_RELU_FUNCTIONS = (F.relu, F.relu_, torch.relu, torch.relu_)


def fuse_for_inference(model: _Model) -> _Model:
    """Copies a model for inference, and folds batch norms into the convolutions before them.

    Equals `copy.deepcopy(model).eval()` up to rounding. If a batch norm is the only reader of an
    `nn.Conv2d`'s output (identities and dropouts may lie between), it is folded into weight and
    bias. `nn.Identity` takes its place, or in timm's `BatchNormAct2d` the activation. It is not
    folded where that is not exact: without running statistics; if it or the convolution has hooks,
    is used more than once, or has another class (a parametrization, say); if weights are read
    elsewhere in the model or would leave the range of their dtype; and in forwards that `torch.fx`
    cannot trace or that take optional arguments. Children of such modules are folded separately if
    they have a forward; it is assumed that they are called as a whole. Methods other than `forward`
    see the folded modules.

    Chains that run fused already do not change: blocks, stages and units of this package (unless
    `fused=False`), and chains of a converted model. Ways to call it:

    - `fuse_for_inference(model)` folds all it can; the rest runs in PyTorch's operators.
    - `fuse_for_inference(convert(model))` folds batch norms without a ReLU after them. Each call
      records its operations, as in `convert`.
    - `convert(fuse_for_inference(model))` also runs the remaining BN-ReLU-Conv chains fused.

    Args:
        model: any module, on any device, with any dtypes; it does not change. Its forwards are
            traced with `torch.fx`.

    Returns:
        A copy in evaluation mode; its parameters require no gradients. `train()` on it or on a
        model around it does not change its mode: folded parameters cannot be trained. Its
        `state_dict` fits copies of equal models.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    result = _copied(model)
    converted = [(m, vars(m)[CONVERSION]) for m in _converted(result)]
    fused = {id(n) for m, _ in converted for n in m.modules() if _is_batch_norm(n)}
    revert(result)
    result.eval()
    for p in result.parameters():
        if p.is_leaf:  # parameters of scripts are not
            p.requires_grad = False
    places = Counter(id(m) for _, m in result.named_modules(remove_duplicate=False))
    kept = {i for i, count in places.items() if count > 1}
    _fold_in(result, kept, _holders(result), fused)
    for module, conversion in converted:
        convert_with(conversion, module)
    result.__dict__["train"] = functools.partial(_stay_in_evaluation_mode, result)
    return result


def _copied(model: _Model) -> _Model:
    """Returns a deep copy, also of pruned modules: their weights are results of operations."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    results = (t for t in attributes if isinstance(t, Tensor) and not t.is_leaf)
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in results})


def _stay_in_evaluation_mode(model: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces `train` of the copies."""
    return type(model).train(model, False)


def _converted(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost converted modules of a model."""
    if CONVERSION in vars(module):
        yield module
    else:
        for child in module.children():
            yield from _converted(child)


def _holders(model: nn.Module) -> dict[int, set[int]]:
    """Maps a module's id to ids of the modules in attributes (lists, say) that contain it.

    Code may call a module that it holds in an attribute, and the children of a container.
    """
    holders: dict[int, set[int]] = defaultdict(set)
    modules = list(model.modules())
    known = set(map(id, modules))
    values = [value for module in modules for value in _attributes(module)]
    seen: set[int] = set()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            for part in value.modules():
                holders[id(part)].add(id(value))
                if id(part) not in known:
                    known.add(id(part))
                    values += _attributes(part)
            if type(value) is nn.Sequential or type(value).forward is nn.Module.forward:
                values += value.children()
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple | set):
            values += value
    return holders


def _attributes(module: nn.Module) -> list[object]:
    return [value for name, value in vars(module).items() if name != "_modules"]


def _fold_in(
    module: nn.Module,
    kept: set[int],
    holders: Mapping[int, set[int]],
    fused: set[int],
    is_called: bool = True,
) -> None:
    """Folds the pairs in the graph of `module`, then in the modules that it calls.

    Args:
        module: a module in evaluation mode; changed in place.
        kept: ids of modules that must not change.
        holders: see `_holders`.
        fused: ids of batch norms that are not folded if a ReLU follows: regions run both fused.
        is_called: whether its forward is called, and not its children one by one.
    """
    if _is_leaf(module):
        return
    graph = _graph(module) if is_called else None
    if graph is None:
        for child in module.children():  # a forward without a graph may index into containers
            _fold_in(child, kept, holders, fused, is_called=type(child) is not nn.Sequential)
        return
    modules = dict(module.named_modules(remove_duplicate=False))
    kept = kept | _called_twice(modules, graph) | _read_modules(modules, graph)
    called = {str(n.target) for n in graph.nodes if n.op == "call_module"}
    for conv, bn in _pairs(modules, graph, fused):
        pair = [id(modules[path]) for path in (conv, bn)]
        if kept.isdisjoint(pair) and holders.get(pair[0]) == holders.get(pair[1]):
            _fold(module, conv, bn)
            modules[bn] = module.get_submodule(bn)
    for path in called - {""}:
        _fold_in(module.get_submodule(path), kept, holders, fused)


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm of images, possibly with an activation (timm)."""
    return isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm | nn.LazyBatchNorm2d)


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, OWN):
        return bool(getattr(module, "fused", True))
    if _is_batch_norm(module) or isinstance(module, torch.jit.ScriptModule):
        return True
    return not any(_is_batch_norm(m) or isinstance(m, nn.Conv2d) for m in module.modules())


def _graph(module: nn.Module) -> fx.Graph | None:
    """Returns the graph of a module's forward; None: one graph does not describe every call."""
    kind = original_class(module)
    is_graph = issubclass(kind, fx.GraphModule)
    if kind.forward is nn.Module.forward or has_hooks(module, own_alone=True):
        return None
    if kind.__call__ is not nn.Module.__call__ and not is_graph:
        return None
    is_plain = kind is nn.Sequential or is_graph
    if kind.__module__.startswith("torch.") and not is_plain:
        return None
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is not p.empty or p.kind in variadic for p in parameters):
        return None
    try:
        return trace(module, _is_leaf)
    except Refusal:
        return None


def _read_modules(modules: Mapping[str, nn.Module], graph: fx.Graph) -> set[int]:
    """Returns ids of modules with tensors that a graph reads directly."""
    paths = {str(n.target).rpartition(".")[0] for n in graph.nodes if n.op == "get_attr"}
    return {id(modules[path]) for path in paths}


def _pairs(
    modules: Mapping[str, nn.Module], graph: fx.Graph, fused: set[int]
) -> Iterator[tuple[str, str]]:
    """Yields paths of convolutions and of the batch norms that are their only readers."""
    for node in graph.nodes:
        if node.op != "call_module" or not _is_batch_norm(modules[node.target]):
            continue
        if id(modules[node.target]) in fused and _precedes_relu(modules, node):
            continue
        source = node
        while source is node or _passes_on(modules, source):
            source = source.args[0] if source.args else None
            if not isinstance(source, fx.Node) or len(source.users) != 1:
                break
        else:
            if source.op == "call_module":
                yield source.target, node.target


def _precedes_relu(modules: Mapping[str, nn.Module], node: fx.Node) -> bool:
    """Whether only a ReLU reads the output of the batch norm `node`."""
    if _ends_with_relu(modules[str(node.target)]):
        return True
    while len(node.users) == 1:
        node = next(iter(node.users))
        if _is_relu(modules, node):
            return True
        if not _passes_on(modules, node):
            return False
    return False


def _fold(root: nn.Module, conv_path: str, bn_path: str) -> None:
    """Folds a batch norm into a convolution, if that is exact."""
    conv, bn = root.get_submodule(conv_path), cast(nn.BatchNorm2d, root.get_submodule(bn_path))
    if type(conv) is not nn.Conv2d or type(conv.weight) is not nn.Parameter or has_hooks(conv):
        return
    has_act = _has_activation(bn)
    if not (has_act or type(bn) in (nn.BatchNorm2d, nn.SyncBatchNorm)) or has_hooks(bn):
        return
    if has_act and not _does_nothing(cast(nn.Module, bn.drop)):
        return
    if bn.training or bn.running_mean is None or bn.num_features != conv.out_channels:
        return
    dtype = conv.weight.dtype
    wide = torch.float32 if conv.weight.device.type == "mps" else torch.float64
    folded = fuse_conv_bn_eval(copy.deepcopy(conv).to(wide), copy.deepcopy(bn).to(wide))
    weight, bias = folded.weight.to(dtype), cast(Tensor, folded.bias).to(dtype)
    if not weight.is_meta and not _is_in_range(folded.weight, weight, bias):
        return
    conv.weight = nn.Parameter(weight, requires_grad=False)
    conv.bias = nn.Parameter(bias, requires_grad=False)
    root.set_submodule(bn_path, cast(nn.Module, bn.act) if has_act else _identity(bn))


def _identity(bn: nn.BatchNorm2d) -> nn.Identity:
    """Returns the replacement of a folded batch norm, with the options that a forward may read."""
    identity = nn.Identity().eval()
    for name in bn.__constants__:
        setattr(identity, name, getattr(bn, name))
    return identity


def _is_in_range(exact: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether rounding is the only error of `weight` in each channel, and `bias` is finite."""
    error = (weight.to(exact.dtype) - exact).flatten(1).norm(dim=1)
    allowed = torch.finfo(weight.dtype).eps * exact.flatten(1).norm(dim=1)
    return bool((error <= allowed).all() and bias.isfinite().all())


def _has_activation(module: nn.Module) -> bool:
    """Whether `module` is timm's batch norm with an activation `act` behind a dropout `drop`."""
    kind = type(module)
    is_named = kind.__name__ in ("BatchNormAct2d", "SyncBatchNormAct")
    return is_named and kind.__module__.startswith("timm.")


def _ends_with_relu(module: nn.Module) -> bool:
    """Whether a call of the batch norm `module` is a batch norm and a ReLU, and nothing else."""
    return (
        _has_activation(module)
        and type(module.drop) is nn.Identity
        and type(module.act) is nn.ReLU
        and (module.running_mean is None) == (module.running_var is None)
        and not any(map(has_hooks, (module, module.drop, module.act)))
    )


def _is_relu(modules: Mapping[str, nn.Module], node: fx.Node) -> bool:
    """Whether `node` is a ReLU without hooks."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return type(module) is nn.ReLU and not has_hooks(module)
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in _RELU_FUNCTIONS


def _passes_on(modules: Mapping[str, nn.Module], node: fx.Node) -> bool:
    """Whether the output of `node` is its input, while modules stay in evaluation mode."""
    if node.op == "call_module":
        return _does_nothing(modules[str(node.target)])
    if node.op != "call_function" or node.target not in _DROPOUT_FUNCTIONS:
        return False
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    p = given.get("p", 0.5)
    is_zero = isinstance(p, int | float) and p == 0
    return is_zero or given.get("training", True) is False


def _does_nothing(module: nn.Module) -> bool:
    """Whether a call of `module` returns its input, while it stays in evaluation mode."""
    if type(module) in _DROPOUTS:
        is_off = not module.training or getattr(module, "p", None) == 0
    else:
        is_off = type(module) is nn.Identity
    return is_off and not has_hooks(module)


def _called_twice(modules: Mapping[str, nn.Module], graph: fx.Graph) -> set[int]:
    """Returns ids of modules that a graph calls more than once, and of their children."""
    called = [modules[str(n.target)] for n in graph.nodes if n.op == "call_module"]
    counts = Counter(map(id, called))
    return {id(m) for c in called if counts[id(c)] > 1 for m in c.modules()}
