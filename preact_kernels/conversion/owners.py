"""Finds the modules of a model by their parameters and buffers."""

import weakref
from typing import Any

from torch import Tensor, nn

from preact_kernels import torch_compat


class Owner:
    """A module, and the cached result of a rule for its last call.

    Attributes:
        key: properties of the arguments of the call.
        found: result of the rule for `key`.
    """

    __slots__ = ("_module", "found", "key")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.key: Any = None
        self.found: Any = None

    @property
    def module(self) -> nn.Module | None:
        """The module, while it exists."""
        return self._module()

    def has(self, t: Tensor) -> bool:
        """Whether `t` is a parameter, a buffer or (in replicas) the attribute `weight`."""
        module = self._module()
        if module is None:
            return False
        if module._parameters.get("weight") is t or module.__dict__.get("weight") is t:
            return True
        return any(o is t for o in (*module._parameters.values(), *module._buffers.values()))

    def has_no_hooks(self, weight: Tensor) -> bool:
        """Whether `weight` is the module's, and a call runs its class's forward alone."""
        module = self._module()
        if module is None:
            return False
        own = module.__dict__
        return (
            own["_parameters"].get("weight") is weight
            and "forward" not in own
            and not torch_compat.has_module_hook(module)
        )


class Owners:
    """Finds modules below `root`; searches the modules at most once per `start`."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self._root = None if root is None else weakref.ref(root)
        self._by_id: dict[int, Owner] = {}
        self._by_module: dict[int, Owner] = {}
        self._may_look = True

    def start(self) -> None:
        """Allows another search, since a new call of the model may use other parameters."""
        self._may_look = True

    def find(self, t: Tensor | None) -> Owner | None:
        """Returns the module with the parameter or buffer `t`."""
        owner = self._by_id.get(id(t))
        if owner is not None and owner.has(t):  # type: ignore[arg-type]
            return owner
        root = None if self._root is None else self._root()
        if t is None or root is None or not self._may_look:
            return None
        self._may_look = False
        for module in root.modules():
            owner = self.of(module)
            own = (*module._parameters.values(), *module._buffers.values())
            for tensor in (*own, module.__dict__.get("weight")):
                if tensor is not None:
                    self._by_id[id(tensor)] = owner
        return self.find(t)

    def of(self, module: nn.Module) -> Owner:
        """Returns the owner of a module, which may have no parameters and buffers."""
        owner = self._by_module.get(id(module))
        if owner is None or owner.module is not module:
            owner = self._by_module[id(module)] = Owner(module)
        return owner

    def is_batch_count(self, t: Tensor) -> bool:
        """Whether `t` is the `num_batches_tracked` of a batch norm."""
        if t.dim() or t.is_floating_point():
            return False
        owner = self.find(t)
        module = None if owner is None else owner.module
        return module is not None and module._buffers.get("num_batches_tracked") is t
