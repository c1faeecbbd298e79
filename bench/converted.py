"""Models that other people wrote, before and after `pk.convert`: `python -m bench.converted`.

For every model: how many batch norms run fused, the bytes that a forward keeps for the backward,
the time of a training step, before and after in turn, and how many graphs `torch.compile` makes of
the converted model. Weights and images are contiguous, as models are built; two more columns are
for channels_last. On a GPU, batches and images are larger, and forwards are under autocast to
bfloat16. Prints a table and writes a CSV file, from which `make report` writes the table of
docs/convert.md.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn

import preact_kernels as pk
from bench import foreign_models as foreign
from bench import measure
from bench.correctness import first_line
from bench.measure import MIB
from bench.records import CONVERTED, ConvertedRow, Records, slug


class Case(NamedTuple):
    """A model, and images for it."""

    build: Callable[[], nn.Module]
    batch: int
    image_size: int  # pixels
    counts_graphs: bool = True  # which takes minutes for a thousand layers
    gpu_batch: int = 128
    gpu_image_size: int = 224

    def images(self, device: torch.device) -> tuple[int, int]:
        """Number and size of the images on a device."""
        if device.type == "cuda":
            return self.gpu_batch, self.gpu_image_size
        return self.batch, self.image_size


CASES = {
    "1001 layers, blocks in lists": Case(lambda: foreign.DeepNet(1001), 8, 32, False, 128, 32),
    "DenseNet-BC-100-12": Case(lambda: foreign.DenseNet(100, 12), 16, 32, gpu_image_size=32),
    "PreActResNet-18": Case(lambda: foreign.FunctionalNet(), 16, 32, gpu_image_size=32),
    "WRN-28-10": Case(lambda: foreign.WideResNet(28, 10), 4, 32, gpu_image_size=32),
    "timm resnetv2_50": Case(lambda: foreign.timm_model("resnetv2_50"), 8, 128),
    "timm resnetv2_101": Case(lambda: foreign.timm_model("resnetv2_101"), 4, 128),
    "timm densenet121": Case(lambda: foreign.timm_model("densenet121"), 8, 128),
    "torchvision densenet121": Case(lambda: foreign.torchvision_models().densenet121(), 8, 128),
    "torchvision resnet50": Case(lambda: foreign.torchvision_models().resnet50(), 8, 128),
    "timm wide_resnet50_2": Case(lambda: foreign.timm_model("wide_resnet50_2"), 4, 128),
}


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context with autocast to `dtype`; without, if that is float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def forward(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The output in float32."""
    with autocast(x.device, dtype):
        return model(x).float()


def training_step(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Forward, backward, and an optimizer step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(model, x, dtype).square().mean().backward()
        optimizer.step()

    return step


def check_equal(converted: nn.Module, plain: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    """Raises if the output in training mode misses the budget of the README."""
    with torch.no_grad():
        truth = copy.deepcopy(plain).double()(x.double())
        models = [copy.deepcopy(m) for m in (converted, plain)]
        errors = [(forward(m, x, dtype).double() - truth).norm() for m in models]
    rounding = torch.finfo(dtype).eps / 2 * truth.norm()
    if not errors[0] <= 2 * errors[1] + rounding:
        raise ArithmeticError(f"error {errors[0]:.3g}, of the plain model {errors[1]:.3g}")


def graphs(model: nn.Module, x: Tensor) -> int:
    """How many graphs `torch.compile` makes of the forward."""
    found: list[torch.fx.GraphModule] = []

    def collect(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=collect)(x)
    torch._dynamo.reset()
    return len(found)


def measured(row: ConvertedRow, a: argparse.Namespace) -> ConvertedRow:
    """The row of a model, filled in."""
    case, batch, size = CASES[row.case], row.batch, row.image_size
    torch.manual_seed(0)
    plain = case.build().to(a.device)
    x = torch.randn(batch, 3, size, size, device=a.device)
    models = {"plain": plain}
    for memory in ("store", "rebuild"):
        models[memory] = pk.convert(copy.deepcopy(plain), memory=memory)
        check_equal(models[memory], plain, x, a.dtype)
    for kind, model in models.items():
        with autocast(a.device, a.dtype):
            setattr(row, f"{kind}_bytes", pk.saved_bytes(model, x))
    report = pk.conversion_report(models["store"])  # of the forward of `saved_bytes`
    row.batch_norms, row.fused = len(report), len(report.fused)
    steps = {kind: training_step(model, x, a.dtype) for kind, model in models.items()}
    for kind in ("plain", "store"):
        model = copy.deepcopy(models[kind]).to(memory_format=torch.channels_last)
        images = x.contiguous(memory_format=torch.channels_last)
        steps[f"{kind}_channels_last"] = training_step(model, images, a.dtype)
    for step in steps.values():
        step()
    times = measure.time_in_turn(steps, rounds=a.steps, device=a.device, title=row.case)
    for kind, timing in times.items():
        setattr(row, f"{kind}_ms", timing.median_ms)
    if case.counts_graphs and not a.no_graphs:
        row.compiled_graphs = graphs(copy.deepcopy(models["store"]), x)
    return row


def table(rows: Sequence[ConvertedRow], form: str = "simple") -> str:
    """Before and after, a line for each model."""
    lines = [
        {
            "model": row.case,
            "batch": f"{row.batch} x {row.image_size}²",
            "dtype": row.dtype,
            "fused": f"{row.fused} of {row.batch_norms}",
            "kept before, MiB": f"{row.plain_bytes / MIB:,.0f}",
            "store": f"{row.store_bytes / row.plain_bytes:.2f}",
            "rebuild": f"{row.rebuild_bytes / row.plain_bytes:.2f}",
            "step before, ms": f"{row.plain_ms:,.0f}",
            "speed": f"{row.plain_ms / row.store_ms:.2f}x",
            "speed, rebuild": f"{row.plain_ms / row.rebuild_ms:.2f}x",
            "channels_last before, ms": f"{row.plain_channels_last_ms:,.0f}",
            "speed, channels_last": (
                f"{row.plain_channels_last_ms / row.store_channels_last_ms:.2f}x"
            ),
            "graphs": row.compiled_graphs,
        }
        for row in rows
    ]
    return tabulate(lines, headers="keys", tablefmt=form, disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.converted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", choices=CASES, metavar="NAME", help=f"some of: {', '.join(CASES)}"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each model (5)")
    parser.add_argument("--no-graphs", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--resume", action="store_true", help="skip what the CSV has for this commit"
    )
    parser.add_argument("--device", help="cpu or cuda (cuda where there is one)")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="fp32, or bf16 under autocast (bf16 on a GPU)"
    )
    parser.add_argument("--out", type=Path, default=measure.ROOT / "bench" / "out")
    a = parser.parse_args(arguments)
    a.device = torch.device(a.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    a.dtype_name = a.dtype or ("bf16" if a.device.type == "cuda" else "fp32")
    a.dtype = measure.DTYPES[a.dtype_name]
    machine = measure.Machine.of(a.device)
    records = Records(a.out / f"{slug(machine.device)}{CONVERTED}", ConvertedRow, keep=True)
    rows, failures = [], []
    for name in a.models or CASES:
        batch, size = CASES[name].images(a.device)
        row = machine.stamp(ConvertedRow(name, batch, size, a.dtype_name, 0, 0))
        known = records.get(row.key, machine.commit) if a.resume else None
        try:
            rows.append(known or measured(row, a))
        except ImportError as error:
            print(f"{name}: not measured, {error.name} is not installed")
            continue
        except (ArithmeticError, RuntimeError) as error:  # measure the other models
            failures.append(f"{name}: {first_line(error)}")
            print(failures[-1])
            continue
        records.put(rows[-1])
    print(table(rows))
    if failures:
        sys.exit(f"bench.converted: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
