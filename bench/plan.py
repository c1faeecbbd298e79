"""The tasks of `python -m bench`, the most important first."""

import argparse
import importlib.util
from collections.abc import Iterator

from bench.contenders import (
    ANCHOR,
    COUNTED_BY_DEPTH,
    DEEPEST,
    DEPTHS_COUNTED,
    GROUPS,
    MAIN_GROUPS,
    WIDE_GROUP,
    WIDE_NETWORKS,
    Network,
    is_served,
)
from bench.measure import dtype_name
from bench.network import CURVES, Task


class Plan:
    """The tasks of a run.

    Args:
        a: arguments of the command line.
        common: fields of every task.
    """

    def __init__(self, a: argparse.Namespace, common: dict) -> None:
        self.a, self.common = a, common
        self.usable = [c.name for c in a.usable]
        self.on_gpu = a.device.type == "cuda"

    @staticmethod
    def has_all(a: argparse.Namespace) -> bool:
        """Whether a run has every kind of task."""
        return not a.quick and a.contenders is None

    def task(self, kind: str, network: str, batch: int, names, group: str, dtype=None, steps=0):
        """Yields a task, or none if no contender can run."""
        dtype = dtype or self.a.dtype
        names = tuple(n for n in names if n in self.usable and is_served(n, network, batch, dtype))
        if names:
            dtype = dtype_name(dtype)
            yield Task(kind, network, batch, dtype, names, group, steps, **self.common)

    def steps(self, group: str, network: str, batch: int, dtype=None) -> Iterator[Task]:
        """Times a group of contenders, with more rounds on shallow networks."""
        is_short = network.startswith("resnet") and Network.named(network).depth < 300
        steps = 3 if group == "deepest" else self.a.steps * (3 if is_short else 1)
        if not self.on_gpu and group != "main":
            steps = max(3, steps // 2)
        yield from self.task("steps", network, batch, GROUPS[group], group, dtype, steps)

    def peaks(self, group: str, network: str, batch: int) -> Iterator[Task]:
        """Peak memory on a CPU: a process per contender."""
        names = [name for name in GROUPS[group] if name != ANCHOR or group == "main"]
        for name in () if self.on_gpu else names:
            yield from self.task("peak", network, batch, [name], f"peak memory of {name}")

    def wide(self, dtype=None) -> Iterator[Task]:
        """Wide networks."""
        device = self.a.device.type
        for network, batch in WIDE_NETWORKS[device] if self.a.is_default else ():
            yield from self.steps(WIDE_GROUP[device], network, batch, dtype)

    def rivals(self, networks: list[str]) -> Iterator[Task]:
        """Checkpointing and memory budgets on deep networks."""
        for network in networks:
            for group in ("memory rivals", "compile budgets"):
                if Network.named(network).depth >= 164:
                    yield from self.steps(group, network, self.a.batch[0])

    def curves(self) -> Iterator[Task]:
        """Training curves: the first network, and the first with bottlenecks below 300 layers."""
        if self.a.contenders is not None or not set(CURVES) <= set(self.usable):
            return
        networks = [Network.named(name) for name in self.a.networks]
        shallow = [n for n in networks if n.depth < 300 and n.block == "bottleneck"]
        for net in dict.fromkeys([*shallow[:1], networks[0]]):
            steps = self.a.curve_steps if net.depth < 300 else max(3, self.a.curve_steps // 2)
            group = f"{steps} steps of training"
            yield from self.task("curves", net.name, self.a.batch[0], CURVES, group, steps=steps)

    def ops(self) -> Iterator[Task]:
        """Single ops, at the shapes of ResNet-1001."""
        if self.has_all(self.a) and importlib.util.find_spec("pytest_benchmark"):
            from bench.ops import CASES, contenders

            rows = 2 * sum(len(contenders(case, self.a.device)) for case in CASES)
            what = "resnet-1001", self.a.batch[0], dtype_name(self.a.dtype)
            yield Task("ops", *what, ("ops",), "ops", rows, **self.common)

    def counts(self) -> Iterator[Task]:
        """Kept bytes of a single image at growing depth."""
        for depth in DEPTHS_COUNTED if self.has_all(self.a) else ():
            yield from self.task("kept", f"resnet-{depth}", 1, COUNTED_BY_DEPTH, "kept bytes")

    def tasks(self) -> Iterator[Task]:
        """All tasks. On a GPU, contenders without torch.compile come first: it takes minutes."""
        return self.gpu_tasks() if self.on_gpu else self.cpu_tasks()

    def cpu_tasks(self) -> Iterator[Task]:
        """The tasks on a CPU."""
        a, first, (foremost, *others) = self.a, self.a.batch[0], self.a.networks
        for batch in a.batch:
            yield from self.steps("main", foremost, batch)
        yield from self.curves()
        for network in others[:1] if a.other_dtype else ():
            yield from self.steps("against eager", network, first, a.other_dtype)
        yield from self.wide()
        yield from self.peaks("main", foremost, first)
        yield from self.steps("memory rivals", foremost, first)
        yield from self.peaks("memory rivals", foremost, first)
        for network in others:
            for batch in a.batch:
                yield from self.steps("main", network, batch)
        yield from self.steps("compile budgets", foremost, first)
        yield from self.peaks("compile budgets", foremost, first)
        yield from self.ops()
        yield from self.rivals(others)
        yield from self.counts()
        if a.other_dtype:
            yield from self.wide(a.other_dtype)

    def gpu_tasks(self) -> Iterator[Task]:
        """The tasks on a GPU."""
        a, (first, *batches), (foremost, *others) = self.a, self.a.batch, self.a.networks
        for group in MAIN_GROUPS:
            yield from self.steps(group, foremost, first)
        for batch in batches[:1]:
            yield from self.steps("uncompiled", foremost, batch)
        yield from self.wide()
        yield from self.ops()
        yield from self.steps("memory rivals", foremost, first)
        for batch in batches[:1]:
            yield from self.steps("compiled", foremost, batch)
        yield from self.steps("compile budgets", foremost, first)
        if a.is_default:
            yield from self.steps("deepest", *DEEPEST)
        for batch in batches[:1]:
            yield from self.steps("compiled and captured", foremost, batch)
        for batch in batches[1:]:
            for group in MAIN_GROUPS:
                yield from self.steps(group, foremost, batch)
        for batch in a.batch if a.other_dtype else ():
            for group in MAIN_GROUPS:
                yield from self.steps(group, foremost, batch, a.other_dtype)
        yield from self.curves()
        for network in others:
            for group in MAIN_GROUPS:
                for batch in a.batch:
                    yield from self.steps(group, network, batch)
        yield from self.rivals(others)
        yield from self.counts()
