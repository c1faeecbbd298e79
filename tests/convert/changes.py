"""Changes between two steps of a model, after which nothing that was remembered may be used."""

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Calls a model on an input. Arguments: the function that usually does, the model, and the input.
Step = Callable[[Callable, nn.Module, object], object]
# Functions of a model and a source of random numbers; they return another model, or another call.
CHANGES: list[Callable[[nn.Module, random.Random], "Step | nn.Module | None"]] = []


def change(function):
    """Adds a function to `CHANGES`."""
    CHANGES.append(function)
    return function


def _one_of(net: nn.Module, kinds: type | tuple, source: random.Random) -> Iterator[nn.Module]:
    """Yields one of the modules of a class, or none."""
    found = [m for m in net.modules() if isinstance(m, kinds)]
    if found:
        yield found[source.randrange(len(found))]


def _set(name: str, value: Callable, kinds: type | tuple = _BatchNorm) -> None:
    def set_attribute(net, source):
        for module in _one_of(net, kinds, source):
            if hasattr(module, name):
                setattr(module, name, value(getattr(module, name)))

    set_attribute.__name__ = name
    CHANGES.append(set_attribute)


_set("momentum", lambda old: 0.35)
_set("momentum", lambda old: None)
_set("eps", lambda old: 0.25)
_set("training", lambda old: not old)
_set("inplace", lambda old: not old, (nn.ReLU, nn.SiLU, nn.ELU, nn.LeakyReLU))
_set("padding", lambda old: old if isinstance(old, str) else tuple(p + 1 for p in old), nn.Conv2d)
_set("num_groups", lambda old: 1, nn.GroupNorm)
_set("p", lambda old: 0.9, nn.Dropout)


def _parameter(net: nn.Module, source: random.Random) -> Iterator[tuple[nn.Module, str]]:
    found = [(m, n) for m in net.modules() for n, p in m._parameters.items() if p is not None]
    if found:
        yield found[source.randrange(len(found))]


@change
def freeze(net, source):
    for module, name in _parameter(net, source):
        module._parameters[name].requires_grad_(False)


@change
def replace_parameter(net, source):
    for module, name in _parameter(net, source):
        module._parameters[name] = nn.Parameter(module._parameters[name].detach() * 1.5)


@change
def replace_data(net, source):
    for module, name in _parameter(net, source):
        p = module._parameters[name]
        p.data = p.data * 1.5


@change
def write(net, source):
    with torch.no_grad():
        for module, name in _parameter(net, source):
            module._parameters[name].mul_(1.5)


@change
def replace_statistics(net, source):
    for module in _one_of(net, _BatchNorm, source):
        if module.running_mean is not None:
            module.running_mean = module.running_mean + 1


@change
def forget_statistics(net, source):
    for module in _one_of(net, _BatchNorm, source):
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None


def _on_leaf(register: Callable) -> Callable:
    def add_hook(net, source):
        leaves = [m for m in net.modules() if not m._modules and m is not net]
        if leaves:
            register(leaves[source.randrange(len(leaves))])

    return add_hook


def _scaled(module, args, result):
    return result * 1.5 if isinstance(result, Tensor) else None


CHANGES += [
    _on_leaf(lambda m: m.register_forward_hook(_scaled)),
    _on_leaf(lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 1.5, *args[1:]))),
]


@change
def add_hook_to_norm(net, source):
    for module in _one_of(net, _BatchNorm, source):
        module.register_forward_hook(_scaled)


@change
def replace_activation(net, source):
    for module in net.modules():
        for name, child in module._modules.items():
            if type(child) is nn.ReLU:
                module._modules[name] = nn.LeakyReLU(0.2)
                return


@change
def channels_last(net, source):
    net.to(memory_format=torch.channels_last)


@change
def copy_model(net, source):
    return copy.deepcopy(net)


@change
def pickle_model(net, source):
    return pickle.load(io.BytesIO(pickle.dumps(net)))


@change
def another_batch(net, source):
    def step(call, net, x):
        return call(net, torch.cat([x, x]) if isinstance(x, Tensor) else x)

    return step


@change
def another_format(net, source):
    def step(call, net, x):
        if isinstance(x, Tensor) and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return call(net, x)

    return step


@change
def another_gradient(net, source):
    def step(call, net, x):
        if isinstance(x, Tensor):
            x = x.detach().requires_grad_(not x.requires_grad)
        return call(net, x)

    return step


@change
def no_grad(net, source):
    return torch.no_grad()(lambda call, net, x: call(net, x))


@change
def inference(net, source):
    return torch.inference_mode()(lambda call, net, x: call(net, x))


@change
def threads(net, source):
    def step(call, net, x):
        count = torch.get_num_threads()
        torch.set_num_threads(count + 1)
        try:
            return call(net, x)
        finally:
            torch.set_num_threads(count)

    return step
