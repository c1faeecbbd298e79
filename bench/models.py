"""Published models, converted, against every rival: `python -m bench.models`.

Every model is trained as it is built (NCHW) and in channels_last, with each residual block compiled
by `torch.compile`, also within an activation memory budget of 0.5, with each block under
`torch.utils.checkpoint`, and converted by `pk.convert` in each memory mode. For each: bytes that a
forward keeps for the backward, peak memory and time of a training step, in turn. Before it is
timed, the output of a converted model is compared with float64. Prints a table and writes a CSV
file; `make report` writes the tables of docs/convert.md from it. Models of packages that are not
installed are left out.
"""

import argparse
import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from bench import measure, records
from bench.contenders import inductor
from bench.records import MODELS, ModelRow, mib, number, put, slug
from testbed import norm_act_models, packages
from testbed import published_models as published


class Case(NamedTuple):
    """A model.

    Attributes:
        build: builds the model.
        shape: shape of the input.
        blocks: class of the blocks that are compiled or checkpointed, or several classes with
            spaces between them; empty: leaves these rivals out.
        gpu_shape: shape of the input on a GPU; None: the same.
        others: returns the other inputs for a batch size.
        activations: as in `pk.convert`.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    blocks: str = ""
    gpu_shape: tuple[int, ...] | None = None
    others: Callable[[int], tuple[Tensor, ...]] = lambda batch: ()
    activations: Mapping | None = None


def noise_levels(batch: int) -> tuple[Tensor, ...]:
    """Returns the other input of a diffusion model."""
    return (torch.arange(batch) * 10,)


def _noise_and_words(batch: int) -> tuple[Tensor, ...]:
    return (*noise_levels(batch), torch.randn(batch, 16, 64))


def _diffusers(name: str, options: dict, shape: tuple, gpu_shape: tuple, **others) -> Case:
    build = functools.partial(packages.diffusers, name, **options)
    return Case(build, shape, "ResnetBlock2D", gpu_shape, **others)


def _monai(name: str, options: dict, block: str, size: int = 48) -> Case:
    build = functools.partial(packages.monai, name, **options)
    return Case(build, (1, 1, size, size, size), block, (1, 1, 96, 96, 96))


def _timm(name: str, batch: int, block: str) -> Case:
    build = functools.partial(published.timm_model, name)
    return Case(build, (batch, 3, 128, 128), block, IMAGENET)


def _torchvision(name: str, block: str) -> Case:
    def build() -> nn.Module:
        return getattr(published.torchvision_models(), name)()

    return Case(build, (8, 3, 128, 128), block, IMAGENET)


CIFAR, IMAGENET = (128, 3, 32, 32), (128, 3, 224, 224)  # on a GPU
CASES = {
    "diffusers AutoencoderKL": _diffusers(
        "AutoencoderKL", packages.AUTOENCODER, (2, 3, 64, 64), (8, 3, 256, 256)
    ),
    "diffusers UNet2DModel": _diffusers(
        "UNet2DModel", packages.UNET, (4, 3, 32, 32), (16, 3, 64, 64), others=noise_levels
    ),
    "timm resnetv2_50": _timm("resnetv2_50", 8, "PreActBottleneck"),
    "torchvision resnet50": _torchvision("resnet50", "Bottleneck"),
    "torchvision densenet121": _torchvision("densenet121", "_DenseLayer"),
    "MONAI SegResNet": _monai("SegResNet", packages.SEG_RES_NET, "ResBlock"),
    "WRN-28-10": Case(lambda: published.WideResNet(28, 10), (4, 3, 32, 32), "WideBlock", CIFAR),
    "PreActResNet-18": Case(published.FunctionalNet, (16, 3, 32, 32), "FunctionalBlock", CIFAR),
    "1001 layers, blocks in lists": Case(
        lambda: published.DeepNet(1001), (8, 3, 32, 32), gpu_shape=CIFAR
    ),
    "DenseNet-BC-100-12": Case(
        lambda: published.DenseNet(100, 12), (16, 3, 32, 32), "DenseLayer", CIFAR
    ),
    "timm resnetv2_101": _timm("resnetv2_101", 4, "PreActBottleneck"),
    "timm densenet121": _timm("densenet121", 8, "DenseLayer"),
    "timm wide_resnet50_2": _timm("wide_resnet50_2", 4, "Bottleneck"),
    "timm resnetv2_50x1_bit": _timm("resnetv2_50x1_bit", 8, "PreActBottleneck"),
    "SongUNet of EDM": Case(
        lambda: norm_act_models.SongUNet(64, (1, 2, 2), 2, dropout=0.1),
        (4, 3, 32, 32),
        "UNetBlock",
        others=noise_levels,
    ),
    "robust WRN-28-10": Case(
        norm_act_models.SwishWideResNet,
        (4, 3, 32, 32),
        "SwishBlock",
        activations={norm_act_models.SwishFunction: "silu"},
    ),
    "3D-Speaker CAM-DenseNet": Case(
        lambda: norm_act_models.CAMDenseNet(counts=(3, 6, 4)), (16, 80, 300), "CAMDenseLayer"
    ),
    "diffusers UNet2DModel, scale and shift": _diffusers(
        "UNet2DModel",
        packages.UNET | {"resnet_time_scale_shift": "scale_shift"},
        (4, 3, 32, 32),
        (16, 3, 64, 64),
        others=noise_levels,
    ),
    "diffusers UNet2DConditionModel": _diffusers(
        "UNet2DConditionModel",
        packages.CONDITIONED,
        (4, 4, 32, 32),
        (16, 4, 64, 64),
        others=_noise_and_words,
    ),
    "MONAI AutoencoderKL": _monai(
        "AutoencoderKL", packages.MONAI_AUTOENCODER, "AEKLResBlock", size=32
    ),
    "MONAI BasicUNet": _monai("BasicUNet", packages.BASIC_UNET, "TwoConv"),
    "MONAI DynUNet": _monai("DynUNet", packages.DYN_UNET, "UnetBasicBlock"),
}
"""Models by name, the most important first."""


class Contender(NamedTuple):
    """A way to train a model."""

    name: str
    prepare: Callable[[nn.Module, Case], object] = lambda model, case: None  # changes the model
    channels_last: bool = True
    is_fused: bool = False
    needs_blocks: bool = False
    is_graphed: bool = False  # its step is one of `pk.graphed_step`


def _blocks(model: nn.Module, case: Case) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in case.blocks.split()]


def _compile(model: nn.Module, case: Case, budget: float) -> None:
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    for block in _blocks(model, case):
        block.compile(backend=inductor(budget), dynamic=False)


def _checkpointed(forward: Callable, *inputs: object, **options: object) -> object:
    # DenseNets append to the list of a layer's inputs before the backward runs the layer again.
    now = [list(x) if isinstance(x, list) else x for x in inputs]
    return checkpoint(forward, *now, use_reentrant=False, **options)


def _checkpoint(model: nn.Module, case: Case) -> None:
    for block in _blocks(model, case):
        forward = functools.partial(_checkpointed, block.forward)
        block.forward = forward  # type: ignore[method-assign]


def _compiled(name: str, budget: float) -> Contender:
    return Contender(name, functools.partial(_compile, budget=budget), needs_blocks=True)


def _compile_model(model: nn.Module, case: Case, budget: float) -> None:
    model.compile(backend=inductor(budget), dynamic=False)


def compiled_model(name: str, budget: float) -> Contender:
    """Returns a contender that compiles the whole model."""
    return Contender(name, functools.partial(_compile_model, budget=budget))


def _converted(name: str, memory: str, channels_last: bool = True) -> Contender:
    def prepare(model: nn.Module, case: Case) -> None:
        pk.convert(model, memory=memory, activations=case.activations)

    return Contender(name, prepare, channels_last, is_fused=True)


PLAIN = "eager, channels_last"
CONTENDERS = (
    Contender("eager", channels_last=False),
    Contender(PLAIN),
    _compiled("compile", 1.0),
    _compiled("compile, budget 0.5", 0.5),
    Contender("checkpoint", _checkpoint, needs_blocks=True),
    _converted("pk.convert", "store", channels_last=False),
    _converted("pk.convert, channels_last", "store"),
    _converted("pk.convert, rebuild, channels_last", "rebuild"),
    _converted("pk.convert, checkpoint, channels_last", "checkpoint"),
)


def in_format(t: Tensor, channels_last: bool) -> Tensor:
    """Converts images and volumes to channels_last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if not channels_last or t.dim() not in formats:
        return t
    return t.contiguous(memory_format=formats[t.dim()])


def _mean_square(y: Tensor, target: Tensor | None = None) -> Tensor:
    return y.float().square().mean()


class Trained:
    """One contender on one model."""

    def __init__(self, contender: Contender, case: Case, plain: nn.Module, a: argparse.Namespace):
        self.dtype, self.device = a.dtype, a.device
        self.converted = copy.deepcopy(plain).train()
        for p in self.converted.parameters():
            p.data = in_format(p.data, contender.channels_last)
        contender.prepare(self.converted, case)
        torch.manual_seed(1)
        on_gpu = a.device.type == "cuda"
        x = torch.randn((on_gpu and case.gpu_shape) or case.shape).to(a.device)
        others = [t.to(a.device) for t in case.others(len(x))]
        self.x = in_format(x, contender.channels_last)
        self.model = packages.OneInput(self.converted, others)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self._graphed: Callable[[Tensor, Tensor], Tensor] | None = None
        self._no_target = self.x.new_zeros(1)

    def autocast(self) -> torch.autocast:
        """Returns the context of a forward: autocast unless the dtype is float32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def forward(self) -> Tensor:
        """Returns the output."""
        torch.manual_seed(2)  # for dropout
        with self.autocast():
            return self.model(self.x)

    def capture(self) -> None:
        """Makes `pk.graphed_step` run all further steps, without a seed; on a GPU, captured."""
        arguments = (self.optimizer, self.x, self._no_target)
        with self.autocast():
            self._graphed = pk.graphed_step(self.model, _mean_square, *arguments)

    def loss(self) -> float:
        """Returns the loss of a forward."""
        with torch.no_grad():
            return float(_mean_square(self.forward()))

    def gradients(self) -> Tensor:
        """Computes new gradients; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = _mean_square(self.forward())
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """Runs a training step; returns the loss."""
        if self._graphed is not None:
            with self.autocast():  # on a CPU the step runs now
                return self._graphed(self.x, self._no_target)
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def peak_bytes(self) -> int:
        """Returns the peak memory of a step, minus the memory between steps."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self.step()
            return torch.cuda.max_memory_allocated(self.device) - before
        before = measure.resident_bytes()
        measure.reset_peak()
        self.step()
        return measure.peak_resident_bytes() - before

    def saved_bytes(self) -> int:
        """Returns the bytes that a forward keeps for the backward, without parameters."""
        with self.autocast():
            return pk.saved_bytes(self.model, self.x)

    def fused_norms(self) -> str:
        """Returns how many norms of a converted model run fused, of how many."""
        report = pk.conversion_report(self.converted)
        return f"{len(report.fused)} of {len(report)}"


class Expected(NamedTuple):
    """What the output of a converted model in training mode is compared with."""

    output: Tensor  # of the plain model in float64
    plain_error: float  # norm of the error of the plain model
    rounding: float  # norm of the rounding of the output

    @classmethod
    @torch.no_grad()
    def of(cls, plain: Trained) -> "Expected":
        """Runs the plain model."""
        wide = copy.deepcopy(plain.model).double()
        torch.manual_seed(2)
        output = wide(plain.x.double())
        plain_error = float((plain.forward().double() - output).norm())
        return cls(output, plain_error, torch.finfo(plain.dtype).eps / 2 * float(output.norm()))


@torch.no_grad()
def check_equal(fused: Trained, expected: Expected) -> None:
    """Raises if the output in training mode exceeds the budget in the README.

    Both have the same memory format: dropout draws its numbers in the order of the memory.
    """
    error = float((fused.forward().double() - expected.output).norm())
    if not error <= 2 * expected.plain_error + expected.rounding:
        raise ArithmeticError(f"error {error:.3g}, of the plain model {expected.plain_error:.3g}")


def measured(plain: nn.Module, rows: Sequence[ModelRow], a: argparse.Namespace) -> None:
    """Measures a model, and fills in the rows of its contenders."""
    name = rows[0].case
    case = CASES[name]
    contenders = {c.name: c for c in CONTENDERS}
    trained: dict[str, Trained] = {}
    references = [Trained(contenders[n], case, plain, a) for n in ("eager", PLAIN)]
    for row in rows:
        contender = contenders[row.contender]
        row.shape = "x".join(map(str, references[0].x.shape))
        try:
            one = Trained(contender, case, plain, a)
            if contender.is_fused:
                check_equal(one, Expected.of(references[contender.channels_last]))
                row.fused = one.fused_norms()
            one.step()
            row.saved_bytes = one.saved_bytes()
            one.step()
            row.peak_bytes = one.peak_bytes()
        except (ArithmeticError, RuntimeError) as error:
            row.note = measure.first_line(error)
            print(f"{name}, {row.contender}: {row.note}")
            continue
        trained[row.contender] = one
    steps = {n: t.step for n, t in trained.items()}
    times = measure.time_in_turn(steps, rounds=a.steps, device=a.device, title=name)
    for row in rows:
        if row.contender in times:
            row.median_ms, row.p20_ms, row.p80_ms = times[row.contender]


def line(row: ModelRow) -> dict[str, str]:
    """Returns the line of a contender in a table."""
    return {
        "model": row.case,
        "input": row.shape,
        "dtype": row.dtype,
        "contender": row.contender,
        "fused": row.fused,
        "kept, MiB": mib(row.saved_bytes),
        "peak, MiB": mib(row.peak_bytes),
        "step, ms": row.note or number(row.median_ms, ",.0f"),
    }


def table(rows: Sequence[ModelRow]) -> str:
    """Formats a line per contender."""
    return records.table([line(row) for row in rows])


def add_options(
    parser: argparse.ArgumentParser, cases: Mapping[str, Case], contenders: Sequence[str]
) -> None:
    """Adds the options of a command that trains `cases`."""
    add = parser.add_argument
    texts = f"some of: {', '.join(cases)}", f"of: {'; '.join(contenders)}"
    add("--models", nargs="+", choices=cases, metavar="NAME", help=texts[0])
    add("--contenders", nargs="+", choices=contenders, metavar="NAME", help=texts[1])
    add("--steps", type=int, default=5, help="timed steps of each contender (5)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: under autocast")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = measure.parser("bench.models", __doc__, "--device", "--out")
    names = [c.name for c in CONTENDERS]
    add_options(parser, CASES, names)
    a = parser.parse_args(arguments)
    dtype, a.dtype = a.dtype, measure.DTYPES[a.dtype]
    machine = measure.Machine.of(a.device)
    path = a.out / f"{slug(machine.device)}{MODELS}"
    failed = False
    for name in a.models or CASES:
        rows = [
            machine.stamp(ModelRow(name, c.name, "", dtype))
            for c in CONTENDERS
            if c.name in (a.contenders or names) and (CASES[name].blocks or not c.needs_blocks)
        ]
        torch.manual_seed(0)
        try:
            plain = CASES[name].build().to(a.device)
        except ImportError as error:
            print(f"{name}: not measured, {error.name} is not installed")
            continue
        measured(plain, rows, a)
        failed = failed or any(r.note for r in rows)
        put(path, *rows)
        print(table(rows), flush=True)
    if failed:
        sys.exit("bench.models: some contenders were not measured")


if __name__ == "__main__":
    main()
