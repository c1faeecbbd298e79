"""`python -m preact_kernels.study train|placements|shortcuts|depth|signal`."""

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

_MISSING = "study: expected {name}, which is not installed: pip install 'preact-kernels[study]'"


def _parser() -> argparse.ArgumentParser:
    from preact_kernels.study import comparisons
    from preact_kernels.study.config import add_arguments

    parser = argparse.ArgumentParser(
        prog="python -m preact_kernels.study",
        description="Experiments on residual units, after arXiv 1603.05027.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    train = commands.add_parser(
        "train",
        help="train one network",
        description="Trains one network. The same command continues a run that was stopped.",
    )
    train.add_argument("--out", help="folder of the run (default study-runs/<network>-<time>)")
    train.add_argument(
        "--resume", action="store_true", help="fail if there is no checkpoint in --out"
    )
    add_arguments(train)
    comparisons.add_commands(commands)
    return parser


def _train(arguments: dict) -> int:
    from preact_kernels.study.checkpoints import CheckpointError
    from preact_kernels.study.config import Config
    from preact_kernels.study.report import write_report
    from preact_kernels.study.training import CHECKPOINT, Interrupted, Processes, train

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
    try:
        run = train(config, out)
    except Interrupted as stopped:
        if is_first:
            print(f"study: stopped by {stopped}; the same command with --out {out} continues")
        return 1
    if is_first:
        print(f"report: {write_report(run)}")
        print(f"test accuracy: {run.history.epochs[-1].test_accuracy:.4f}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    Args:
        argv: arguments; None takes those of the process.
    """
    try:
        parser = _parser()
    except ModuleNotFoundError as error:
        raise SystemExit(_MISSING.format(name=error.name)) from error
    arguments = vars(parser.parse_args(argv))
    command = arguments.pop("command")
    try:
        if command == "train":
            return _train(arguments)
        from preact_kernels.study import comparisons

        return comparisons.run(command, arguments)
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"study: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
