"""Tensors in lists, tuples, dictionaries and subclasses, without calling overridden methods."""

import dataclasses
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

CONTAINERS = list, tuple, dict


def items(value: Any) -> Iterable[Any]:
    """Returns the items of a list or tuple, or the values of a dictionary."""
    if isinstance(value, list):
        return list.__iter__(value)
    if isinstance(value, tuple):
        return tuple.__iter__(value)
    if isinstance(value, OrderedDict):  # its `values` calls `__getitem__`
        return [dict.__getitem__(value, key) for key in _keys(value)]
    return dict.values(value)


def tensors(values: Iterable[Any], in_objects: bool = False) -> list[Tensor]:
    """Returns the tensors in values, also in lists, tuples and dictionaries.

    Args:
        values: any values.
        in_objects: also look into deques and attributes, as `replaced` does.
    """
    found: list[Tensor] = []
    waiting = [*values]
    seen = set()
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if issubclass(kind, Tensor):
            found.append(value)
            continue
        is_container = issubclass(kind, CONTAINERS)
        if not (is_container or in_objects) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_container:
            waiting += items(value)
        if in_objects:
            waiting += _attributes(value).values()
            waiting += deque.__iter__(value) if isinstance(value, deque) else ()
    return found


def mapped(function: Callable[[Tensor], Any], value: Any, parents: tuple[int, ...] = ()) -> Any:
    """Applies a function to the tensors in a value, also in lists, tuples and dictionaries.

    Returns:
        `value` if `function` returned all tensors unchanged; else a copy, with plain lists and
        dictionaries instead of subclasses.
    """
    kind = type(value)
    if issubclass(kind, Tensor):
        return function(value)
    if not issubclass(kind, CONTAINERS) or id(value) in parents:
        return value
    parents = (*parents, id(value))
    given = [*items(value)]
    results = [mapped(function, item, parents) for item in given]
    if all(a is b for a, b in zip(results, given, strict=True)):
        return value
    if issubclass(kind, tuple):
        return _tuple_like(value, results)
    return results if issubclass(kind, list) else dict(zip(_keys(value), results, strict=True))


def replaced(function: Callable[[Tensor], Any], value: Any, parents: tuple[int, ...] = ()) -> Any:
    """Like `mapped`, but changes lists, dictionaries and attributes in place.

    Tuples with changed tensors are copied. Looks into attributes of containers, data classes and
    `SimpleNamespace`.
    """
    kind = type(value)
    if issubclass(kind, Tensor):
        return function(value)
    if id(value) in parents:
        return value
    parents = (*parents, id(value))
    if attributes := _attributes(value):
        replaced(function, attributes, parents)
    if not issubclass(kind, CONTAINERS):
        return value
    given = [*items(value)]
    results = [replaced(function, item, parents) for item in given]
    if all(a is b for a, b in zip(results, given, strict=True)):
        return value
    if issubclass(kind, tuple):
        return _tuple_like(value, results)
    if issubclass(kind, list):
        list.__setitem__(value, slice(None), results)
    else:
        for key, result in zip(_keys(value), results, strict=True):
            dict.__setitem__(value, key, result)
    return value


def _attributes(value: Any) -> dict[str, Any]:
    kind = type(value)
    has_values = issubclass(kind, (*CONTAINERS, types.SimpleNamespace))
    if not (has_values or dataclasses.is_dataclass(kind)):
        return {}
    return getattr(value, "__dict__", {})


def _keys(value: dict) -> list[Any]:
    is_ordered = isinstance(value, OrderedDict)
    return [*(OrderedDict.__iter__(value) if is_ordered else dict.__iter__(value))]


def _tuple_like(value: tuple, given: list[Any]) -> tuple:
    """Returns a tuple of the class of `value`, without calling its constructor."""
    kind = type(value)
    try:
        result = tuple.__new__(kind, given)
    except TypeError:  # a class in C, as in `torch.return_types`
        return kind(given)
    if attributes := getattr(value, "__dict__", None):
        result.__dict__.update(attributes)
    return result
