"""All that this package writes to the modules of users; nothing else writes to them.

| in a module | meaning | written by | removed by |
|---|---|---|---|
| `preact_conversion` | the `Conversion` | `pk.convert` | `pk.revert` |
| hooks `preact_kernels` | enter and leave a region | `pk.convert` | `pk.revert` |
| `preact_given_back` | why it runs plain | `pk.convert` with an example | `pk.revert` |
| `preact_memory` | memory mode of a stage | `MemoryPlan.apply`, in the first norm | `pk.revert` |
| `_compiled_call_impl` | leaves the region | a call of its parent | `pk.revert` |
| `forward` | defers the module | a call of its parent | the end of that call |
| other hooks | compute tensors, leave the region | a call of its parent | the end of that call |

Attributes are written to `module.__dict__`, since classes may override `__setattr__`. Copies and
pickles of a module contain the first four.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from preact_kernels.conversion.deferred import StageRunner
from preact_kernels.conversion.named_activations import NamedActivations

_CONVERSION, _GIVEN_BACK, _MEMORY = "preact_conversion", "preact_given_back", "preact_memory"
_KEY: Any = "preact_kernels"  # a name, since PyTorch's numbers may collide after unpickling


class Conversion:
    """Arguments of `Region`, shared by the modules of a converted model with one memory mode."""

    def __init__(self, memory: str = "store", activations: NamedActivations | None = None) -> None:
        self.memory = memory
        self.activations = activations or NamedActivations.of()
        self.run_stage: StageRunner | None = None
        self.extra_types: tuple[type, ...] = ()
        # Called after each forward with the work of what its backward computes again.
        self.note_work: Callable[[float], object] | None = None


def convert(module: nn.Module, conversion: Conversion, enter: Callable, leave: Callable) -> None:
    """Adds a `Conversion`, and hooks that run before and after the forward and other hooks."""
    module.__dict__[_CONVERSION] = conversion
    for name, hook in (("_forward_pre_hooks", enter), ("_forward_hooks", leave)):
        hooks = getattr(module, name)
        hooks[_KEY] = hook
        hooks.move_to_end(_KEY, last=False)
    module._forward_pre_hooks_with_kwargs[_KEY] = True
    module._forward_hooks_always_called[_KEY] = True


def conversion_of(module: nn.Module) -> Conversion | None:
    """Returns the `Conversion` of a converted module."""
    return module.__dict__.get(_CONVERSION)


def is_converted(module: nn.Module) -> bool:
    """Whether a module opens regions."""
    return _CONVERSION in module.__dict__


def is_marked(module: nn.Module) -> bool:
    """Whether a module opens regions, or must run plain."""
    own = module.__dict__
    return _CONVERSION in own or _GIVEN_BACK in own


def is_ordinary_leaf(module: nn.Module) -> bool:
    """Whether a module has no children, no backward hooks, no compiled call, and no mark."""
    own = module.__dict__
    return (
        own.get("_modules") == {}
        and not own["_backward_hooks"]
        and not own["_backward_pre_hooks"]
        and module._compiled_call_impl is None
        and _CONVERSION not in own
        and _GIVEN_BACK not in own
    )


def has_leave_hook(module: nn.Module) -> bool:
    """Whether the hook that ends a call is there; other code may have removed it."""
    return _KEY in module._forward_hooks


def put_hooks_first(module: nn.Module) -> None:
    """Moves the hooks of a converted module before those of FSDP, which puts its own first."""
    own: Any = (module._forward_pre_hooks, module._forward_hooks)
    for hooks in own:
        if len(hooks) > 1 and next(iter(hooks)) != _KEY:
            hooks.move_to_end(_KEY, last=False)


def give_back(module: nn.Module, reason: str) -> None:
    """Makes a module and its children run plain."""
    module.__dict__[_GIVEN_BACK] = reason


def why_given_back(module: nn.Module) -> str | None:
    """Returns the reason of `give_back`; None: the module may run fused."""
    return module.__dict__.get(_GIVEN_BACK)


def set_module_memory(module: nn.Module, memory: str) -> None:
    """Sets the memory mode of a converted module, without its converted children."""
    conversion = module.__dict__[_CONVERSION]
    if conversion.memory != memory:
        module.__dict__[_CONVERSION] = own = copy.copy(conversion)
        own.memory = memory


def set_memory(norm: nn.Module, memory: str) -> None:
    """Sets the memory mode of the stage that begins with a norm."""
    norm.__dict__[_MEMORY] = memory


def memory_of(norm: nn.Module | None, default: str) -> str:
    """Returns the memory mode of the stage that begins with a norm."""
    return default if norm is None else norm.__dict__.get(_MEMORY, default)


class ReplacedForward:
    """Replaces the forward of a module, unless it is replaced already."""

    def __init__(self, module: nn.Module, forward: Callable) -> None:
        self._module, self._forward = module, forward
        module.__dict__.setdefault("forward", forward)

    def remove(self) -> None:
        own = self._module.__dict__
        if own.get("forward") is self._forward:
            del own["forward"]


def add_first_hooks(module: nn.Module, before: Callable, after: Callable) -> list[Any]:
    """Adds a pre-hook and a hook to a child, ahead of its own, for one call of its parent.

    Args:
        module: the child.
        before: forward pre-hook, with keyword arguments.
        after: forward hook; does not run if the forward raises.

    Returns:
        Handles with a method `remove`.
    """
    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, prepend=True),
    ]


def add_last_hooks(module: nn.Module, before: Callable, after: Callable) -> list[Any]:
    """Like `add_first_hooks`; its hooks run after the child's own, `after` also after an error."""
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]


class ReplacedCall:
    """Runs the call of a module compiled by `nn.Module.compile` between two functions.

    Hooks would be compiled with the module. The replaced call stays after the region ends, since
    other threads may call the module.
    """

    def __init__(self, module: nn.Module, before: Callable, after: Callable) -> None:
        self._module, self._before, self._after = weakref.ref(module), before, after
        self.call = cast(Callable, module._compiled_call_impl)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None or torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        self._before(module, args, kwargs)
        try:
            return self.call(*args, **kwargs)
        finally:
            self._after(module, args, None)


def replace_compiled_call(module: nn.Module, before: Callable, after: Callable) -> None:
    """Replaces the compiled call of a module, once."""
    if not isinstance(module._compiled_call_impl, ReplacedCall):
        module.__dict__["_compiled_call_impl"] = ReplacedCall(module, before, after)


def revert(module: nn.Module) -> None:
    """Removes everything that stays between calls."""
    own = module.__dict__
    if own.pop(_CONVERSION, None) is not None:
        for name in (
            *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
            *("_forward_hooks", "_forward_hooks_always_called"),
        ):
            getattr(module, name).pop(_KEY, None)
    own.pop(_GIVEN_BACK, None)
    own.pop(_MEMORY, None)
    if isinstance(module._compiled_call_impl, ReplacedCall):
        own["_compiled_call_impl"] = module._compiled_call_impl.call
