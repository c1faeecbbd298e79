"""Images/s of inference: `python -m bench.inference`.

Runs eager PyTorch, torch.compile, torch.fx's folding of batch norms, `pk.fuse_for_inference`, and
`pk.fuse_for_inference` after `pk.convert`, in turn, on the same model and images. The networks of
this package are the plain ones (fused=False), in place of `pk.convert` the fused ones. timm and
torchvision are needed for the others.
"""

import argparse
import copy
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import nn
from torch.fx.experimental.optimization import fuse

import preact_kernels as pk
from bench import foreign_models as foreign
from bench.measure import DTYPES, time_in_turn

BASELINE = "eager"


class Network(NamedTuple):
    """A network and the size of its images, pixels."""

    build: Callable[[], nn.Module]
    size: int


NETWORKS = {
    "resnet-20": Network(lambda: pk.preact_resnet(20, fused=False), 32),
    "resnet-164": Network(lambda: pk.preact_resnet(164, fused=False), 32),
    "wrn-28-10": Network(lambda: pk.preact_resnet(28, width=10, fused=False), 32),
    "resnetv2_50": Network(lambda: foreign.timm_model("resnetv2_50"), 224),
    "densenet121": Network(lambda: foreign.torchvision_models().densenet121(), 224),
    "resnet50": Network(lambda: foreign.torchvision_models().resnet50(), 224),
}


def calibrated(model: nn.Module, size: int) -> nn.Module:
    """`model` in evaluation mode, with statistics that keep its activations in a normal range."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(8, 3, size, size))
    return model.eval()


def contenders(name: str, model: nn.Module, *, compiles: bool) -> dict[str, nn.Module]:
    """The ways to run `model`, by name."""
    if isinstance(model, pk.PreActResNet):
        depth, *width = map(int, name.split("-")[1:])
        fused: nn.Module = pk.preact_resnet(depth, width=width[0] if width else 1)
        fused.load_state_dict(model.state_dict())
    else:
        fused = pk.convert(copy.deepcopy(model))
    found = {BASELINE: model}
    if compiles:
        found["torch.compile"] = torch.compile(copy.deepcopy(model))
    found["torch.fx fuse"] = fuse(model)
    found["pk.fuse_for_inference"] = pk.fuse_for_inference(model)
    found["pk.fuse_for_inference, converted"] = pk.fuse_for_inference(fused)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a table for every network, and writes a CSV file where --out names one."""
    parser = argparse.ArgumentParser(prog="python -m bench.inference", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16], help="images")
    parser.add_argument("--size", type=int, help="pixels, in place of each network's own")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of PyTorch on the CPU")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    rows = []
    for name in args.networks:
        torch.manual_seed(0)
        size = args.size or NETWORKS[name].size
        model = calibrated(NETWORKS[name].build(), size).to(device, DTYPES[args.dtype])
        models = contenders(name, model, compiles=not args.no_compile)
        for batch in args.batch:
            x = torch.randn(batch, 3, size, size, device=device, dtype=DTYPES[args.dtype])
            x = x.contiguous(memory_format=torch.channels_last)
            calls = {n: lambda m=m, x=x: m(x) for n, m in models.items()}
            with torch.inference_mode():
                for call in (*calls.values(), *calls.values()):
                    call()
                times = time_in_turn(calls, rounds=args.rounds, device=device, title=name)
            for contender, timing in times.items():
                ratio = times[BASELINE].median_ms / timing.median_ms
                images_per_s = batch / timing.median_ms * 1e3
                rows.append((name, size, batch, contender, timing.median_ms, images_per_s, ratio))
        headers = ("network", "pixels", "batch", "contender", "ms", "images/s", "ratio to eager")
        table = [row for row in rows if row[0] == name]
        print(tabulate(table, headers, floatfmt=("", "", "", "", ".2f", ".1f", ".2f")), flush=True)
    if args.out:
        with args.out.open("w", newline="") as file:
            csv.writer(file).writerows([headers, *rows])


if __name__ == "__main__":
    main(sys.argv[1:])
