"""Published models with any norm and activation, against every rival: `python -m bench.rivals`.

Every model is trained as it is built (NCHW) and in channels_last, with each residual block compiled
by `torch.compile`, also within an activation memory budget of 0.5, with each block under
`torch.utils.checkpoint`, and converted by `pk.convert`, also in memory mode "checkpoint". For each:
bytes that a forward keeps for the backward, peak memory and time of a training step, in turn.
Prints a table and writes a CSV file; `make report` writes the tables of docs/benchmarks.md from it.
A model of a package that is not installed is left out.
"""

import argparse
import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import preact_kernels as pk
from bench import measure, records
from bench.contenders import _inductor as inductor
from bench.measure import MIB
from bench.records import RIVALS, RivalRow, put, read, slug
from testbed import norm_act_models, packages
from testbed import published_models as published


class Case(NamedTuple):
    """A model.

    Attributes:
        build: builds the model.
        inputs: makes its inputs.
        blocks: names of the classes of its residual blocks.
        activations: as in `pk.convert`.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple]
    blocks: tuple[str, ...]
    activations: Mapping | None = None


def _images(*shape: int) -> Callable[[], tuple]:
    return lambda: (torch.randn(shape),)


def _noisy(*shape: int) -> Callable[[], tuple]:
    return lambda: (torch.randn(shape), torch.arange(shape[0]) * 10)


def _conditioned(*shape: int) -> Callable[[], tuple]:
    return lambda: (*_noisy(*shape)(), torch.randn(shape[0], 16, 64))


def _unet(**options) -> Callable[[], nn.Module]:
    return lambda: packages.diffusers("UNet2DModel", **packages.UNET | options)


BY_HAND = "functions of pk, channels_last"  # blocks rewritten with them

CASES = {
    "SongUNet of EDM": Case(
        lambda: norm_act_models.SongUNet(64, (1, 2, 2), 2, dropout=0.1),
        _noisy(4, 3, 32, 32),
        ("UNetBlock",),
    ),
    "robust WRN-28-10": Case(
        norm_act_models.SwishWideResNet,
        _images(4, 3, 32, 32),
        ("SwishBlock",),
        {norm_act_models.SwishFunction: "silu"},
    ),
    "3D-Speaker CAM-DenseNet": Case(
        lambda: norm_act_models.CAMDenseNet(counts=(3, 6, 4)),
        _images(16, 80, 300),
        ("CAMDenseLayer",),
    ),
    "diffusers AutoencoderKL": Case(
        lambda: packages.diffusers("AutoencoderKL", **packages.AUTOENCODER),
        _images(2, 3, 64, 64),
        ("ResnetBlock2D",),
    ),
    "diffusers UNet2DModel": Case(_unet(), _noisy(4, 3, 32, 32), ("ResnetBlock2D",)),
    "diffusers UNet2DModel, scale and shift": Case(
        _unet(resnet_time_scale_shift="scale_shift"), _noisy(4, 3, 32, 32), ("ResnetBlock2D",)
    ),
    "diffusers UNet2DConditionModel": Case(
        lambda: packages.diffusers("UNet2DConditionModel", **packages.CONDITIONED),
        _conditioned(4, 4, 32, 32),
        ("ResnetBlock2D",),
    ),
    "MONAI SegResNet": Case(
        lambda: packages.monai("SegResNet", **packages.SEG_RES_NET),
        _images(1, 1, 48, 48, 48),
        ("ResBlock",),
    ),
    "MONAI AutoencoderKL": Case(
        lambda: packages.monai("AutoencoderKL", **packages.MONAI_AUTOENCODER),
        _images(1, 1, 32, 32, 32),
        ("AEKLResBlock",),
    ),
    "MONAI BasicUNet": Case(
        lambda: packages.monai("BasicUNet", **packages.BASIC_UNET),
        _images(1, 1, 48, 48, 48),
        ("TwoConv",),
    ),
    "MONAI DynUNet": Case(
        lambda: packages.monai("DynUNet", **packages.DYN_UNET),
        _images(1, 1, 48, 48, 48),
        ("UnetBasicBlock",),
    ),
    "timm resnetv2_50x1_bit": Case(
        lambda: published.timm_model("resnetv2_50x1_bit"),
        _images(8, 3, 128, 128),
        ("PreActBottleneck",),
    ),
}


class Contender(NamedTuple):
    """A way to train a model."""

    name: str
    prepare: Callable[[nn.Module, Case], object] = lambda model, case: None  # changes the model
    channels_last: bool = False
    is_fused: bool = False


def _blocks(model: nn.Module, case: Case) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in case.blocks]


def _compile(model: nn.Module, case: Case, budget: float = 1.0) -> None:
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    for block in _blocks(model, case):
        block.compile(backend=inductor(budget), dynamic=False)


def _checkpoint(model: nn.Module, case: Case) -> None:
    for block in _blocks(model, case):
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = forward  # type: ignore[method-assign]


def _convert(model: nn.Module, case: Case, memory: str = "store") -> None:
    pk.convert(model, memory=memory, activations=case.activations)


def _resnet_block_of_diffusers(block: Any, x: Tensor, temb: Tensor | None = None) -> Tensor:
    """`ResnetBlock2D.forward`, without up- and downsampling."""

    def unit(norm: nn.GroupNorm, conv: nn.Conv2d, x: Tensor, **others: Any) -> Tensor:
        return pk.group_norm_act_conv(
            *(x, norm.num_groups, norm.weight, norm.bias),
            conv_weight=conv.weight,
            conv_bias=conv.bias,
            padding=1,
            activation="silu",
            eps=norm.eps,
            **others,
        )

    h = unit(block.norm1, block.conv1, x)
    rows: dict[str, Tensor] = {}
    if temb is not None:
        temb = block.time_emb_proj(F.silu(temb))
        if block.time_embedding_norm == "scale_shift":
            rows = dict(zip(("scale", "shift"), temb.chunk(2, 1), strict=True))
        else:
            h = h + temb[:, :, None, None]
    shortcut = x if block.conv_shortcut is None else block.conv_shortcut(x)
    rows["residual"] = shortcut
    h = unit(block.norm2, block.conv2, h, dropout=block.dropout.p, **rows)
    return h / block.output_scale_factor


def _res_block_of_monai(block: Any, x: Tensor) -> Tensor:
    """The forward of a `ResBlock` of MONAI's SegResNet."""
    h = x
    for norm, conv in ((block.norm1, block.conv1), (block.norm2, block.conv2)):
        h = pk.group_norm_act_conv(
            *(h, norm.num_groups, norm.weight, norm.bias),
            conv_weight=conv.conv.weight,
            padding=1,
            eps=norm.eps,
            residual=x if norm is block.norm2 else None,
        )
    return h


_BY_HAND = {"ResnetBlock2D": _resnet_block_of_diffusers, "ResBlock": _res_block_of_monai}


def _call_by_hand(model: nn.Module, case: Case) -> None:
    for block in _blocks(model, case):
        forward = functools.partial(_BY_HAND[type(block).__name__], block)
        block.forward = forward  # type: ignore[method-assign]


CONTENDERS = (
    Contender("eager"),
    Contender("eager, channels_last", channels_last=True),
    Contender("compile", _compile, channels_last=True),
    Contender("compile, budget 0.5", functools.partial(_compile, budget=0.5), channels_last=True),
    Contender("checkpoint", _checkpoint, channels_last=True),
    Contender("pk.convert", _convert, is_fused=True),
    Contender("pk.convert, channels_last", _convert, channels_last=True, is_fused=True),
    Contender(
        "pk.convert, checkpoint, channels_last",
        functools.partial(_convert, memory="checkpoint"),
        channels_last=True,
        is_fused=True,
    ),
    Contender(BY_HAND, _call_by_hand, channels_last=True),
)


def in_format(t: Any, channels_last: bool) -> Any:
    """Converts images and volumes, or the weights of a module, to channels_last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if isinstance(t, nn.Module):
        for p in t.parameters():
            p.data = in_format(p.data, channels_last)
        return t
    if not channels_last or not isinstance(t, Tensor) or t.dim() not in formats:
        return t
    return t.contiguous(memory_format=formats[t.dim()])


class Trained:
    """One contender on one model."""

    def __init__(self, contender: Contender, case: Case, plain: nn.Module, a: argparse.Namespace):
        self.dtype, self.device = a.dtype, a.device
        self.converted = in_format(copy.deepcopy(plain), contender.channels_last).train()
        contender.prepare(self.converted, case)
        torch.manual_seed(1)
        x, *others = (t.to(a.device) for t in case.inputs())
        self.x = in_format(x, contender.channels_last)
        self.model = packages.OneInput(self.converted, others)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)

    def forward(self) -> Tensor:
        """Returns the output; runs under autocast unless the dtype is float32."""
        torch.manual_seed(2)  # of dropout
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(self.x)

    def step(self) -> None:
        """Runs a training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.forward().float().square().mean().backward()
        self.optimizer.step()

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
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return pk.saved_bytes(self.model, self.x)


def check_equal(fused: Trained, plain: Trained) -> None:
    """Raises if the output in training mode exceeds the budget in the README.

    Both have the same memory format: dropout draws its numbers in the order of the memory.
    """
    with torch.no_grad():
        wide = copy.deepcopy(plain.model).double()
        torch.manual_seed(2)
        expected = wide(plain.x.double())
        errors = [float((t.forward().double() - expected).norm()) for t in (fused, plain)]
    rounding = torch.finfo(plain.dtype).eps / 2 * float(expected.norm())
    if not errors[0] <= 2 * errors[1] + rounding:
        raise ArithmeticError(f"error {errors[0]:.3g}, of the plain model {errors[1]:.3g}")


def measured(name: str, rows: Sequence[RivalRow], a: argparse.Namespace) -> None:
    """Measures a model, and fills in the rows of its contenders."""
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.build().to(a.device)
    contenders = {c.name: c for c in CONTENDERS}
    trained: dict[str, Trained] = {}
    references = [Trained(contenders[n], case, plain, a) for n in ("eager", "eager, channels_last")]
    for row in rows:
        contender = contenders[row.contender]
        row.shape = "x".join(map(str, references[0].x.shape))
        try:
            one = Trained(contender, case, plain, a)
            if contender.is_fused:
                check_equal(one, references[contender.channels_last])
                report = pk.conversion_report(one.converted)
                row.fused = f"{len(report.fused)} of {len(report)}"
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


def table(rows: Sequence[RivalRow], form: str = "simple") -> str:
    """Formats a table with a line per contender; shares are of the best eager contender."""
    lines = []
    for row in rows:
        eager = [r for r in rows if r.contender.startswith("eager") and r.key[0] == row.case]
        eager = [r for r in eager if r.dtype == row.dtype and r.median_ms]
        best_ms = min((r.median_ms or 0 for r in eager), default=None)
        kept = next((r.saved_bytes for r in eager), None)
        share = best = None
        if kept and row.saved_bytes is not None:
            share = row.saved_bytes / kept
        if best_ms and row.median_ms:
            best = best_ms / row.median_ms
        lines.append(
            {
                "model": row.case,
                "input": row.shape,
                "dtype": row.dtype,
                "contender": row.contender,
                "fused": row.fused,
                "kept, MiB": records.number(_mib(row.saved_bytes)),
                "of eager": records.number(share, ".2f"),
                "peak, MiB": records.number(_mib(row.peak_bytes), ",.0f"),
                "step, ms": records.number(row.median_ms, ",.0f"),
                "speed": "" if best is None else f"{best:.2f}x",
            }
        )
    return records.table(lines, form)


def _mib(count: int | None) -> float | None:
    return None if count is None else count / MIB


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = measure.parser("bench.rivals", __doc__, "--device", "--out")
    names = [c.name for c in CONTENDERS]
    add = parser.add_argument
    add("--models", nargs="+", choices=CASES, metavar="NAME", help=f"some of: {', '.join(CASES)}")
    add("--contenders", nargs="+", choices=names, metavar="NAME", help=f"of: {'; '.join(names)}")
    add("--steps", type=int, default=5, help="timed steps of each contender (5)")
    add("--resume", action="store_true", help="skip models that the CSV has for this commit")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: under autocast")
    a = parser.parse_args(arguments)
    dtype, a.dtype = a.dtype, measure.DTYPES[a.dtype]
    machine = measure.Machine.of(a.device)
    path = a.out / f"{slug(machine.device)}{RIVALS}"
    known = {(r.case, r.dtype, r.commit) for r in read(path, RivalRow)} if a.resume else set()
    failed = False
    for name in a.models or CASES:
        if (name, dtype, machine.commit) in known:
            continue
        has_calls = _BY_HAND.keys() >= set(CASES[name].blocks)
        chosen = [c for c in a.contenders or names if has_calls or c != BY_HAND]
        rows = [machine.stamp(RivalRow(name, c, "", dtype)) for c in chosen]
        try:
            measured(name, rows, a)
        except ImportError as error:
            print(f"{name}: not measured, {error.name} is not installed")
            continue
        failed = failed or any(r.note for r in rows)
        put(path, *rows)
        print(table(rows), flush=True)
    if failed:
        sys.exit("bench.rivals: some contenders were not measured")


if __name__ == "__main__":
    main()
