"""Fewer runs of Python's garbage collector while a converted model runs.

A forward makes about ten objects for each operation that it defers. They live until the operations
are computed, and are freed by their reference counts. With the default threshold of a few hundred
objects the collector would visit them many times, and then all other objects of the program.
"""

import gc

# A thousand layers make fewer objects; cycles of a long forward are still collected.
THRESHOLD = 50_000


class Postponed:
    """Raises the threshold of the youngest generation until `end`.

    Of calls that overlap, on several threads, the first one raises and restores it. If an interrupt
    skips `end`, the threshold stays raised until the next call of a converted model.
    """

    def __init__(self) -> None:
        self._before = before = gc.get_threshold()
        self._raised = (THRESHOLD, *before[1:]) if 0 < before[0] < THRESHOLD else None
        if self._raised is not None:
            gc.set_threshold(*self._raised)

    def end(self) -> None:
        """Restores the threshold, unless it was changed since."""
        if self._raised is not None and gc.get_threshold() == self._raised:
            gc.set_threshold(*self._before)
