"""The launches and bytes of single units: `python -m bench.units --backend cuda`.

Needs no GPU: launches are recorded and do not run (bench/dry_run.py). Prints, for each unit and
direction of a training step, the kernels of this package, the operators of PyTorch that launch
kernels, and the bytes that all but convolutions move, per element of x: sizes of the tensors in
their arguments, each counted once per launch. With PyTorch's convolution, a unit's floor in half
precision is 6 bytes in the forward (statistics; norm and activation) and 12 in the backward. With
`--kernels`, also prints every launch. The columns "issue us" and "bytes us" are lower bounds as in
bench/launches.py; the first needs the compiled kernels.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preact_kernels as pk
from bench import dry_run, launches, measure, records
from bench.dry_run import BACKWARD, FORWARD, Launch
from bench.records import Measured, read, write


@dataclasses.dataclass(frozen=True)
class UnitCase:
    """A unit, and the shape of its input."""

    name: str
    shape: tuple[int, int, int, int]
    module: Callable[[int], nn.Module]  # of the channels
    has_residual: bool = False


def _conv(norm: Callable, activation: str, kernel: int, **options) -> Callable[[int], nn.Module]:
    def build(channels: int) -> nn.Module:
        conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, **options)
        return pk.NormActConv(norm(channels), activation, conv.bfloat16())

    return build


class _ResidualBlock(nn.Module):
    """`x + conv(silu(norm(conv(silu(norm(x))))))`, as in a VAE: biases, and group norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(map(_group_norm, [channels] * 2))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = conv(F.silu(norm(h)))
        return x + h


def _converted_block(channels: int) -> nn.Module:
    block = _ResidualBlock(channels)
    block.convs.bfloat16()
    return pk.convert(block)


def _basic_blocks(channels: int) -> nn.Module:
    blocks = [pk.PreActBasicBlock(channels, channels) for _ in range(2)]
    for conv in (unit[1] for block in blocks for unit in block.units()):
        conv.bfloat16()
    return pk.PreActStage(blocks)


def _converted_chain(channels: int) -> nn.Module:
    """The inside of a bottleneck of ResNet v1: `conv(relu(norm(conv(relu(norm(conv(x)))))))`."""
    convs = [nn.Conv2d(channels, channels, 3, padding=1, bias=False).bfloat16() for _ in range(3)]
    norms = [nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()) for _ in range(2)]
    return pk.convert(nn.Sequential(convs[0], norms[0], convs[1], norms[1], convs[2]))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


CASES = (
    UnitCase("GN-SiLU-Conv3", (8, 128, 256, 256), _conv(_group_norm, "silu", 3)),
    UnitCase("GN-SiLU-Conv3 + residual", (8, 128, 256, 256), _conv(_group_norm, "silu", 3), True),
    UnitCase("GN-SiLU", (8, 128, 256, 256), lambda c: pk.NormAct(_group_norm(c), "silu")),
    UnitCase("BN-ReLU-Conv3", (128, 128, 28, 28), _conv(nn.BatchNorm2d, "relu", 3, bias=False)),
    UnitCase(
        "BN-ReLU-Conv3 + residual",
        (128, 128, 28, 28),
        _conv(nn.BatchNorm2d, "relu", 3, bias=False),
        True,
    ),
    UnitCase("two GN-SiLU-Conv3 + residual, converted", (8, 128, 256, 256), _converted_block),
    UnitCase("two BN-ReLU-Conv3 behind Conv3, converted", (128, 128, 28, 28), _converted_chain),
    UnitCase("two basic blocks", (128, 128, 28, 28), _basic_blocks),
    UnitCase("BN-ReLU", (128, 512, 28, 28), lambda c: pk.NormAct(nn.BatchNorm2d(c), "relu")),
)


@dataclasses.dataclass
class UnitRow(Measured):
    """The launches of a unit in one direction of a training step."""

    unit: str
    shape: str
    dtype: str
    backend: str
    direction: str
    kernels: int  # launches of this package, with fills
    operators: int  # operators of PyTorch that launch kernels, with convolutions
    bytes_per_element: float  # of x, without convolutions
    least_us: float  # without convolutions
    issue_us: float | None = None  # to issue the instructions of the kernels; None: not known

    KEY = ("unit", "shape", "dtype", "backend", "direction")


def is_convolution(launch: Launch) -> bool:
    """Whether PyTorch's convolution runs."""
    return launch.name.startswith("aten::convolution")


def row_of(case: UnitCase, backend: str, direction: str, found: Sequence[Launch]) -> UnitRow:
    """Returns the row of a unit in one direction."""
    others = [launch for launch in found if not is_convolution(launch)]
    own = [launch for launch in found if not launch.name.startswith("aten::")]
    issue = [launch.issue_us for launch in own if launch.name != launches.FILL]
    n, c, h, w = case.shape
    return UnitRow(
        unit=case.name,
        shape="x".join(map(str, case.shape)),
        dtype="bfloat16",
        backend=backend,
        direction=direction,
        kernels=len(own),
        operators=len(found) - len(own),
        bytes_per_element=round(sum(x.bytes_moved for x in others) / (n * c * h * w), 2),
        least_us=round(sum(map(launches.least_us, others)), 2),
        issue_us=None if None in issue else round(sum(filter(None, issue)), 2),
    )


def line_of(row: UnitRow) -> dict[str, str]:
    """Formats a row."""
    return {
        "unit": f"{row.unit} {row.shape}",
        "direction": row.direction,
        "kernels": str(row.kernels),
        "of PyTorch": str(row.operators),
        "bytes an element": f"{row.bytes_per_element:.1f}",
        "bytes us": f"{row.least_us:.0f}",
        "issue us": "" if row.issue_us is None else f"{row.issue_us:.0f}",
    }


def main(given: Sequence[str] | None = None) -> None:
    """Prints the table, and writes the CSV file."""
    parser = measure.parser("bench.units", __doc__)
    parser.add_argument("--backend", choices=dry_run.BACKENDS, default="cuda")
    parser.add_argument("--kernels", action="store_true", help="print every launch")
    parser.add_argument(
        "--instructions",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count them: takes a minute to compile Triton's kernels",
    )
    parser.add_argument("--csv", type=Path, help="file for the rows; keeps rows of other backends")
    a = parser.parse_args(given)
    rows: list[UnitRow] = []
    try:
        steps = dry_run.unit_steps(CASES, a.backend, launches.multiprocessors(), a.instructions)
    except (RuntimeError, ImportError) as error:
        sys.exit(f"bench.units: {error}")
    for case, step in zip(CASES, steps, strict=True):
        for direction in (FORWARD, BACKWARD):
            found = [launch for launch in step if launch.direction == direction]
            rows.append(row_of(case, a.backend, direction, found))
            for launch in found if a.kernels else ():
                per_element = launch.bytes_moved / torch.Size(case.shape).numel()
                print(f"{case.name} {direction} {launch.name} {launch.grid}: {per_element:.2f}")
    if a.csv:
        machine = measure.Machine.of(torch.device("cpu"))
        known = read(a.csv, UnitRow) if a.csv.exists() else []
        keys = {row.key for row in rows}
        stamped = [machine.stamp(row) for row in rows]
        write(a.csv, [*(r for r in known if (r.key) not in keys), *stamped])
    print(records.table([line_of(row) for row in rows]))


if __name__ == "__main__":
    main()
