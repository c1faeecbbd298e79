"""Images/s of inference: `python -m bench.inference`.

Runs in turn, on the same model and images: eager PyTorch, torch.compile, torch.fx's folding of
batch norms, `pk.fuse_for_inference`, and `pk.fuse_for_inference` after `pk.convert`. Networks of
this package are plain (fused=False); their fused form replaces `pk.convert`. Other networks need
timm and torchvision. Prints tables and writes a CSV file.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.fx.experimental.optimization import fuse

import preact_kernels as pk
from bench import measure, records
from bench.measure import DTYPES
from bench.records import INFERENCE, InferenceRow, put, slug
from testbed import published_models as published

BASELINE = "eager"


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # constructor, image size in pixels
    "resnet-20": (lambda: pk.preact_resnet(20, fused=False), 32),
    "resnet-164": (lambda: pk.preact_resnet(164, fused=False), 32),
    "wrn-28-10": (lambda: pk.preact_resnet(28, width=10, fused=False), 32),
    "resnetv2_50": (lambda: published.timm_model("resnetv2_50"), 224),
    "densenet121": (lambda: published.torchvision_models().densenet121(), 224),
    "resnet50": (lambda: published.torchvision_models().resnet50(), 224),
}


def calibrated(model: nn.Module, size: int) -> nn.Module:
    """Sets statistics that keep activations in a normal range; returns the model in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(8, 3, size, size))
    return model.eval()


def contenders(name: str, model: nn.Module, *, compiles: bool) -> dict[str, nn.Module]:
    """Returns the ways to run `model`, by name."""
    if isinstance(model, pk.PreActResNet):
        depth, *width = map(int, name.split("-")[1:])
        fused: nn.Module = pk.preact_resnet(depth, width=width[0] if width else 1)
        fused.to(next(model.parameters())).load_state_dict(model.state_dict())
    else:
        fused = pk.convert(copy.deepcopy(model))
    found = {BASELINE: model}
    if compiles:
        found["torch.compile"] = torch.compile(copy.deepcopy(model))
    found["torch.fx fuse"] = fuse(model)
    found["pk.fuse_for_inference"] = pk.fuse_for_inference(model)
    found["pk.fuse_for_inference, converted"] = pk.fuse_for_inference(fused)
    return found


def measured(name: str, a: argparse.Namespace) -> Iterator[InferenceRow]:
    """Measures a network; yields a row for every batch and contender."""
    torch.manual_seed(0)
    build, size = NETWORKS[name]
    size, dtype = a.size or size, DTYPES[a.dtype]
    model = calibrated(build(), size).to(a.device, dtype)
    models = contenders(name, model, compiles=not a.no_compile)
    for batch in a.batch:
        x = torch.randn(batch, 3, size, size, device=a.device, dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        calls = {n: lambda m=m, x=x: m(x) for n, m in models.items()}
        with torch.inference_mode():
            for call in (*calls.values(), *calls.values()):
                call()
            times = measure.time_in_turn(calls, rounds=a.rounds, device=a.device, title=name)
        for contender, t in times.items():
            images_per_s = batch / t.median_ms * 1e3
            yield InferenceRow(name, contender, batch, size, a.dtype, *t, images_per_s)


def table(rows: Sequence[InferenceRow]) -> str:
    """Formats a line per contender and batch, with the speed relative to eager."""
    eager_ms = {(r.case, r.batch): r.median_ms for r in rows if r.contender == BASELINE}
    lines = [
        {
            "network": r.case,
            "pixels": r.image_size,
            "batch": r.batch,
            "contender": r.contender,
            "ms": f"{r.median_ms:.2f}",
            "images/s": f"{r.images_per_s:.1f}",
            "ratio to eager": f"{eager_ms[r.case, r.batch] / r.median_ms:.2f}",
        }
        for r in rows
    ]
    return records.table(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a table for every network, and writes."""
    parser = measure.parser("bench.inference", __doc__, "--device", "--out")
    add = parser.add_argument
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    add("--batch", nargs="+", type=int, default=[1, 16], help="images")
    add("--size", type=int, help="image size in pixels (by network)")
    add("--rounds", type=int, default=15)
    add("--threads", type=int, help="threads of PyTorch on the CPU")
    add("--dtype", choices=DTYPES, default="fp32")
    add("--no-compile", action="store_true", help="leave out torch.compile")
    a = parser.parse_args(arguments)
    if a.threads:
        torch.set_num_threads(a.threads)
    machine = measure.Machine.of(a.device)
    for name in a.networks:
        try:
            rows = [machine.stamp(row) for row in measured(name, a)]
        except ImportError as error:
            print(f"{name}: not measured, {error.name} is not installed")
            continue
        put(a.out / f"{slug(machine.device)}{INFERENCE}", *rows)
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
