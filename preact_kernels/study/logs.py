"""CSV files and TensorBoard events of a training run."""

import contextlib
import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from preact_kernels.study.checkpoints import write_atomically
from preact_kernels.study.diagnostics import BlockRow
from preact_kernels.study.history import EpochRow, History


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """A table as CSV; floats with nine digits, None as nothing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(f"{v:.9g}" if isinstance(v, float) else "" if v is None else v for v in row)
    return text.getvalue().encode()


class Logs:
    """The files of one run: `losses.csv`, `epochs.csv`, `signal.csv` and `tensorboard/`.

    Args:
        out: the folder.
        step: where the run begins; TensorBoard drops what an earlier attempt wrote behind it.
    """

    def __init__(self, out: Path, step: int = 0) -> None:
        self.out = out
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.writer = None
        else:
            self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def add_losses(self, step: int, losses: Sequence[float]) -> None:
        """Adds the losses of the steps behind `step`."""
        if self.writer is not None:
            for i, loss in enumerate(losses, step + 1):
                self.writer.add_scalar("loss", loss, i)

    def add_epoch(self, step: int, row: EpochRow) -> None:
        """Adds the results of an epoch that ended at `step`."""
        if self.writer is not None:
            for name in ("train_loss", "train_accuracy", "test_accuracy", "seconds"):
                self.writer.add_scalar(f"epoch/{name}", getattr(row, name), step)
            self.writer.flush()

    def write(self, history: History, learning_rates: Sequence[float], per_epoch: int) -> None:
        """Rewrites the CSV files.

        Raises:
            OSError: a file cannot be written; the one from before is still there.
        """
        losses = (
            (i + 1, i // per_epoch + 1, lr, loss)
            for i, (lr, loss) in enumerate(zip(learning_rates, history.losses, strict=True))
        )
        columns = ("step", "epoch", "learning_rate", "loss")
        write_atomically(self.out / "losses.csv", csv_text(columns, losses))
        write_atomically(self.out / "epochs.csv", csv_text(EpochRow._fields, history.epochs))
        if history.signal:
            text = csv_text(BlockRow._fields, history.signal)
            write_atomically(self.out / "signal.csv", text)

    def close(self) -> None:
        """Closes the event file."""
        if self.writer is not None:
            with contextlib.suppress(OSError):  # a full disk, which has ended the run
                self.writer.close()
