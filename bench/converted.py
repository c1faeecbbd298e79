"""Published models before and after `pk.convert`: `python -m bench.converted`.

For every model: the number of batch norms that run fused, the bytes that a forward keeps for the
backward, the time of a training step (before and after in turn), and the number of graphs that
`torch.compile` makes of the converted model. Weights and images are contiguous, as models are
built; two columns are for channels_last. On a GPU, batches and images are larger, and forwards are
under autocast to bfloat16. Prints a table and writes a CSV file; `make report` writes the table of
docs/convert.md from it.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import preact_kernels as pk
from bench import measure, records
from bench.measure import MIB
from bench.records import CONVERTED, ConvertedRow, put, read, slug
from testbed import published_models as published


class Case(NamedTuple):
    """A model, and its images."""

    build: Callable[[], nn.Module]
    cpu: tuple[int, int]  # number and size of the images on a CPU
    gpu: tuple[int, int] = (128, 224)  # number and size of the images on a GPU
    counts_graphs: bool = True  # False for a thousand layers: it takes minutes


SMALL = (128, 32)
CASES = {
    "1001 layers, blocks in lists": Case(lambda: published.DeepNet(1001), (8, 32), SMALL, False),
    "DenseNet-BC-100-12": Case(lambda: published.DenseNet(100, 12), (16, 32), SMALL),
    "PreActResNet-18": Case(lambda: published.FunctionalNet(), (16, 32), SMALL),
    "WRN-28-10": Case(lambda: published.WideResNet(28, 10), (4, 32), SMALL),
    "timm resnetv2_50": Case(lambda: published.timm_model("resnetv2_50"), (8, 128)),
    "timm resnetv2_101": Case(lambda: published.timm_model("resnetv2_101"), (4, 128)),
    "timm densenet121": Case(lambda: published.timm_model("densenet121"), (8, 128)),
    "torchvision densenet121": Case(lambda: published.torchvision_models().densenet121(), (8, 128)),
    "torchvision resnet50": Case(lambda: published.torchvision_models().resnet50(), (8, 128)),
    "timm wide_resnet50_2": Case(lambda: published.timm_model("wide_resnet50_2"), (4, 128)),
}


def forward(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the output in float32; runs under autocast to `dtype` unless it is float32."""
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        return model(x).float()


def training_step(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a function that runs forward, backward and an optimizer step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(model, x, dtype).square().mean().backward()
        optimizer.step()

    return step


def check_equal(converted: nn.Module, plain: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    """Raises if the output in training mode exceeds the budget in the README."""
    with torch.no_grad():
        truth = copy.deepcopy(plain).double()(x.double())
        models = [copy.deepcopy(m) for m in (converted, plain)]
        errors = [(forward(m, x, dtype).double() - truth).norm() for m in models]
    rounding = torch.finfo(dtype).eps / 2 * truth.norm()
    if not errors[0] <= 2 * errors[1] + rounding:
        raise ArithmeticError(f"error {errors[0]:.3g}, of the plain model {errors[1]:.3g}")


def graphs(model: nn.Module, x: Tensor) -> int:
    """Returns the number of graphs that `torch.compile` makes of the forward."""
    counter = CompileCounter()
    torch._dynamo.reset()
    torch.compile(model, backend=counter)(x)
    torch._dynamo.reset()
    return counter.frame_count


def measured(row: ConvertedRow, a: argparse.Namespace) -> ConvertedRow:
    """Measures a model, and fills in its row."""
    case, size = CASES[row.case], row.image_size
    torch.manual_seed(0)
    plain = case.build().to(a.device)
    x = torch.randn(row.batch, 3, size, size, device=a.device)
    models = {"plain": plain}
    for memory in ("store", "rebuild"):
        models[memory] = pk.convert(copy.deepcopy(plain), memory=memory)
        check_equal(models[memory], plain, x, a.dtype)
    for kind, model in models.items():
        with torch.autocast(a.device.type, a.dtype, enabled=a.dtype != torch.float32):
            setattr(row, f"{kind}_bytes", pk.saved_bytes(model, x))
    report = pk.conversion_report(models["store"])  # reports on the forward of `saved_bytes`
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
    """Formats a table of results before and after, a line per model."""
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
    return records.table(lines, form)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = measure.parser("bench.converted", __doc__, "--device", "--out")
    add = parser.add_argument
    add("--models", nargs="+", choices=CASES, metavar="NAME", help=f"some of: {', '.join(CASES)}")
    add("--steps", type=int, default=5, help="timed steps of each model (5)")
    add("--no-graphs", action="store_true", help="without torch.compile")
    add("--resume", action="store_true", help="skip what the CSV has for this commit")
    add("--dtype", choices=("fp32", "bf16"), help="fp32, or bf16 under autocast (bf16 on a GPU)")
    a = parser.parse_args(arguments)
    dtype = a.dtype or ("bf16" if a.device.type == "cuda" else "fp32")
    a.dtype = measure.DTYPES[dtype]
    machine = measure.Machine.of(a.device)
    path = a.out / f"{slug(machine.device)}{CONVERTED}"
    known = {(r.key, r.commit): r for r in read(path, ConvertedRow)} if a.resume else {}
    rows, failures = [], []
    for name in a.models or CASES:
        images = CASES[name].gpu if a.device.type == "cuda" else CASES[name].cpu
        row = machine.stamp(ConvertedRow(name, *images, dtype, 0, 0))
        try:
            rows.append(known.get((row.key, row.commit)) or measured(row, a))
        except ImportError as error:
            print(f"{name}: not measured, {error.name} is not installed")
            continue
        except (ArithmeticError, RuntimeError) as error:  # measure the other models
            failures.append(f"{name}: {measure.first_line(error)}")
            print(failures[-1])
            continue
        put(path, rows[-1])
    print(table(rows))
    if failures:
        sys.exit(f"bench.converted: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
