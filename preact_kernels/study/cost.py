"""Step time and memory saved for backward by depth, for plain PyTorch and the memory modes."""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm

from preact_kernels.memory import saved_bytes
from preact_kernels.models.preact_resnet import preact_resnet
from preact_kernels.study.report import markdown_table

_STEPS = 3  # measured steps per kind, alternating, after one warm-up step
_KINDS = {
    "plain PyTorch": {"fused": False},
    "store": {"memory": "store"},
    "rebuild": {"memory": "rebuild"},
    "checkpoint": {"memory": "checkpoint"},
}


class Cost(NamedTuple):
    """Cost of a training step."""

    label: str
    depth: int
    step_ms: float  # median
    kept_bytes: int  # saved for backward


def measure_costs(depths: Sequence[int], batch: int, device: torch.device) -> list[Cost]:
    """Measures forward and backward of full pre-activation networks on 32x32 images."""
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    target = torch.randint(10, (batch,), device=device)
    found = []
    for depth in tqdm(depths, desc="time and memory", disable=None):
        networks = {}
        for label, options in _KINDS.items():
            torch.manual_seed(0)
            network = preact_resnet(depth, **options).to(device)  # type: ignore[arg-type]
            networks[label] = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        kept = {label: saved_bytes(network, x) for label, network in networks.items()}
        samples: dict[str, list[float]] = {label: [] for label in networks}
        for _ in range(_STEPS + 1):
            for label, network in networks.items():
                network.zero_grad()
                _wait(device)
                start_s = time.perf_counter()
                F.cross_entropy(network(x), target).backward()
                _wait(device)
                samples[label].append(1000 * (time.perf_counter() - start_s))
        found += [
            Cost(label, depth, statistics.median(samples[label][1:]), kept[label])
            for label in networks
        ]
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(costs: Sequence[Cost], batch: int) -> list[str]:
    """Formats the costs as lines of Markdown."""
    plain = {c.depth: c for c in costs if c.label == "plain PyTorch"}
    rows = [
        (
            c.depth,
            c.label,
            f"{c.step_ms:,.0f}",
            f"{plain[c.depth].step_ms / c.step_ms:.2f}x",
            f"{c.kept_bytes / 2**20:,.0f}",
            f"{c.kept_bytes / plain[c.depth].kept_bytes:.3f}",
        )
        for c in costs
    ]
    return [
        f"Forward and backward of {batch} images of 32x32 pixels in float32, full pre-activation; "
        f"medians of {_STEPS} steps in turn.",
        "",
        markdown_table(
            ("layers", "runs", "step, ms", "speed", "kept for backward, MiB", "of plain"), rows
        ),
    ]
