"""Fewer runs of Python's garbage collector while a converted model runs.

A forward makes about ten objects for each operation that it defers. They live until the operations
are computed, and are freed by their reference counts. With the default threshold of a few hundred
objects the collector would visit them many times, and then all other objects of the program.
"""

import gc

# A thousand layers make fewer objects; cycles of a long forward are still collected.
THRESHOLD = 50_000

_before: tuple[int, int, int] | None = None  # the program's thresholds, while the first is raised


def raise_threshold() -> None:
    """Raises the threshold of the youngest generation, unless it is 0 (off) or as high."""
    global _before
    before = gc.get_threshold()
    if 0 < before[0] < THRESHOLD:
        _before = before
        gc.set_threshold(THRESHOLD, *before[1:])


def restore_threshold() -> None:
    """Restores the threshold, unless the program has changed it since.

    Any call may restore what another one has raised: of calls that overlap on several threads the
    first to end does, and after an interrupt that skipped the end of a call, the next one.
    """
    global _before
    before, _before = _before, None
    if before is not None and gc.get_threshold() == (THRESHOLD, *before[1:]):
        gc.set_threshold(*before)
