"""The commands of `python -m preact_kernels.study`."""

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from preact_kernels.study import comparisons
from preact_kernels.study.checkpoints import CheckpointError
from preact_kernels.study.config import Config, add_arguments
from preact_kernels.study.processes import Interrupted, Processes
from preact_kernels.study.report import write_report
from preact_kernels.study.training import CHECKPOINT, train


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m preact_kernels.study",
        description="Experiments on residual blocks, after arXiv 1603.05027.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    one = commands.add_parser(
        "train",
        help="train one network",
        description="Trains one network. With --out, the same command continues a stopped run.",
    )
    one.add_argument("--out", help="folder of the run (default study-runs/<network>-<time>)")
    one.add_argument(
        "--resume", action="store_true", help="fail if there is no checkpoint in --out"
    )
    add_arguments(one)
    comparisons.add_commands(commands)
    return parser


def _train(arguments: dict) -> int:
    out, resume = arguments.pop("out"), arguments.pop("resume")
    config = Config(**arguments)
    if out is None:
        if resume:
            raise ValueError("resume: expected a folder in --out, got none")
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = f"study-runs/resnet{config.depth}-{config.placement}-{now}"
    out = Path(out)
    if resume and not (out / CHECKPOINT).exists():
        raise CheckpointError(f"resume: expected {out / CHECKPOINT}, found none")
    is_first = Processes.of_environment().is_first
    if is_first:
        print(f"out: {out}", flush=True)
    run = train(config, out)
    if is_first:
        print(f"report: {write_report(run)}")
        print(f"test accuracy: {run.history.epochs[-1].test_accuracy:.4f}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    Args:
        argv: arguments; None: the arguments of the process.
    """
    arguments = vars(_parser().parse_args(argv))
    command = arguments.pop("command")
    try:
        if command == "train":
            return _train(arguments)
        return comparisons.run(command, arguments)
    except Interrupted as stopped:
        raise SystemExit(
            f"study: stopped by {stopped}; the same command with this --out continues"
        ) from None
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        raise SystemExit(f"study: {error}") from error
