"""CSV files and TensorBoard events of a training run."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from preact_kernels.study.diagnostics import write_csv
from preact_kernels.study.files import csv_text, write_atomically
from preact_kernels.study.history import EpochRow, History


class Logs:
    """The logs of a run: `losses.csv`, `epochs.csv`, `signal.csv` and `tensorboard/`.

    Args:
        out: the folder.
        step: the step that the run continues from. TensorBoard drops later events.
    """

    def __init__(self, out: Path, step: int = 0) -> None:
        self.out, self.folder = out, out / "tensorboard"
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.writer = None
        else:
            with self._named_errors():
                self.writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno, f"{self.folder}: not written ({error.strerror or error})"
            ) from error

    def add_losses(self, step: int, losses: Sequence[float]) -> None:
        """Adds the losses of the steps after `step`."""
        if self.writer is None:
            return
        with self._named_errors():
            for i, loss in enumerate(losses, step + 1):
                self.writer.add_scalar("loss", loss, i)

    def add_epoch(self, step: int, row: EpochRow) -> None:
        """Adds the results of an epoch that ended at `step`."""
        if self.writer is None:
            return
        with self._named_errors():
            for name in ("train_loss", "train_accuracy", "test_accuracy", "seconds"):
                self.writer.add_scalar(f"epoch/{name}", getattr(row, name), step)

    def flush(self) -> None:
        """Writes the events so far; call it before each checkpoint."""
        if self.writer is not None:
            with self._named_errors():
                self.writer.flush()

    def write(self, history: History, learning_rates: Sequence[float], per_epoch: int) -> None:
        """Rewrites the CSV files.

        Raises:
            OSError: a file cannot be written; its old content is kept.
        """
        losses = (
            (i + 1, i // per_epoch + 1, lr, loss)
            for i, (lr, loss) in enumerate(zip(learning_rates, history.losses, strict=True))
        )
        columns = ("step", "epoch", "learning_rate", "loss")
        write_atomically(self.out / "losses.csv", csv_text(columns, losses))
        write_atomically(self.out / "epochs.csv", csv_text(EpochRow._fields, history.epochs))
        if history.signal:
            write_csv(self.out / "signal.csv", history.signal)

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            with contextlib.suppress(OSError):  # a full disk has ended the run already
                self.writer.close()
