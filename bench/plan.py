"""The tasks of `python -m bench`, the most important first."""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch

from bench.contenders import ANCHOR, GROUPS, MAIN_GROUPS, WIDE_GROUP, WIDE_NETWORKS, Network
from bench.measure import dtype_name
from bench.network import Task


class Item(NamedTuple):
    """A group of contenders on a network."""

    group: str
    network: str
    batch: int
    dtype: torch.dtype
    kind: str = "steps"  # as in `Task`


def tasks(a: argparse.Namespace, common: dict) -> Iterator[Task]:
    """Yields the tasks of a run.

    Args:
        a: arguments of the command line.
        common: fields of every task.
    """
    usable = [c.name for c in a.usable]
    for item in gpu_items(a) if a.device.type == "cuda" else cpu_items(a):
        names = tuple(name for name in GROUPS[item.group] if name in usable)
        what = item.network, item.batch, dtype_name(item.dtype)
        if item.kind == "peak":  # a process for each contender
            for name in names:
                if name != ANCHOR or item.group == "main":
                    yield Task("peak", *what, (name,), f"peak memory of {name}", **common)
        elif names:
            yield Task("steps", *what, names, item.group, steps_of(item, a), **common)


def steps_of(item: Item, a: argparse.Namespace) -> int:
    """Returns the timed rounds: more on shallow networks, fewer for less important groups."""
    is_short = item.network.startswith("resnet") and Network.named(item.network).depth < 300
    steps = a.steps * (3 if is_short else 1)
    is_minor = a.device.type == "cpu" and item.group != "main"
    return max(3, steps // 2) if is_minor else steps


def wide(a: argparse.Namespace, dtype: torch.dtype) -> Iterator[Item]:
    """Yields wide networks."""
    device = a.device.type
    for network, batch in WIDE_NETWORKS[device] if a.is_default else ():
        yield Item(WIDE_GROUP[device], network, batch, dtype)


def rivals(a: argparse.Namespace) -> Iterator[Item]:
    """Yields checkpointing and memory budgets on further deep networks."""
    for network in a.networks[1:]:
        for group in ("memory rivals", "compile budgets"):
            if Network.named(network).depth >= 164:
                yield Item(group, network, a.batch[0], a.dtype)


def cpu_items(a: argparse.Namespace) -> Iterator[Item]:
    """Yields the items on a CPU."""
    batch, (first, *others) = a.batch[0], a.networks
    for each in a.batch:
        yield Item("main", first, each, a.dtype)
    for network in others[:1] if a.other_dtype else ():
        yield Item("against eager", network, batch, a.other_dtype)
    yield from wide(a, a.dtype)
    yield Item("main", first, batch, a.dtype, "peak")
    for kind in ("steps", "peak"):
        yield Item("memory rivals", first, batch, a.dtype, kind)
    for network in others:
        for each in a.batch:
            yield Item("main", network, each, a.dtype)
    for kind in ("steps", "peak"):
        yield Item("compile budgets", first, batch, a.dtype, kind)
    yield from rivals(a)
    if a.other_dtype:
        yield from wide(a, a.other_dtype)


def gpu_items(a: argparse.Namespace) -> Iterator[Item]:
    """Yields the items on a GPU; groups with torch.compile, which takes minutes, come later."""
    (batch, *batches), (first, *others) = a.batch, a.networks
    for group in MAIN_GROUPS:
        yield Item(group, first, batch, a.dtype)
    for each in batches[:1]:
        yield Item("uncompiled", first, each, a.dtype)
    yield from wide(a, a.dtype)
    for group in ("memory rivals", "compile budgets"):
        yield Item(group, first, batch, a.dtype)
    for each in batches[:1]:
        for group in MAIN_GROUPS[1:]:
            yield Item(group, first, each, a.dtype)
    for each in batches[1:]:
        for group in MAIN_GROUPS:
            yield Item(group, first, each, a.dtype)
    for each in a.batch if a.other_dtype else ():
        for group in MAIN_GROUPS:
            yield Item(group, first, each, a.other_dtype)
    for network in others:
        for group in MAIN_GROUPS:
            for each in a.batch:
                yield Item(group, network, each, a.dtype)
    yield from rivals(a)
