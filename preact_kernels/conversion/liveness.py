"""Finds tensors that only variables hold which the running functions never read again.

In `a = self.bn(x); b = F.relu(a); return self.conv(b).mean()` the variables `a` and `b` hold their
tensors while `mean` runs, and nothing reads them any more.
"""

import bisect
import dis
import functools
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

# Names in functions that may read any variable of theirs, and of the functions that called them.
_READERS = frozenset(("locals", "vars", "dir", "eval", "exec"))
_READERS_OF_CALLERS = frozenset(("f_locals", "_getframe", "currentframe"))
_OPTIMIZED = 1  # flag of code whose variables are not in a dictionary: functions


class Reference(weakref.ref):
    """A weak reference that the program does not share: equal plain ones are one object."""

    __slots__ = ()


def unread(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether no running function of this thread reads a tensor again, and nothing else holds it.

    Args:
        tensors: each has one `Reference`. The caller holds them in this sequence alone.
    """
    holders = [0] * len(tensors)
    if not holders:
        return []
    index = {id(t): i for i, t in enumerate(tensors)}
    if not _is_watched():
        for frame in _frames():
            code = frame.f_code
            live: frozenset[str] | None = None
            variables = frame.f_locals
            for name in list(variables):
                i = index.get(id(variables[name]))
                if i is None:
                    continue
                if live is None:
                    live = live_variables(code, frame.f_lasti)
                if name not in live:
                    holders[i] += 1
            if sys.version_info < (3, 13) and _references([variables], 0) == _OWN_REFERENCES + 2:
                variables.clear()  # a copy, which nothing but the frame and this function has
            del variables
    return [_is_held_by(tensors, i, count) for i, count in enumerate(holders)]


def _is_held_by(tensors: Sequence[Tensor], i: int, variables: int) -> bool:
    """Whether that many variables hold a tensor, and nothing else."""
    return (
        variables > 0
        and _references(tensors, i) == _OWN_REFERENCES + variables
        and tensors[i]._use_count() == 1  # type: ignore[attr-defined]  # in C++
        and weakref.getweakrefcount(tensors[i]) == 1
    )


def _references(values: Sequence[object], i: int) -> int:
    return sys.getrefcount(values[i])


_OWN_REFERENCES = _references([object()], 0)  # the sequence, and what the call adds


def _is_watched() -> bool:
    """Whether a debugger or a profiler may read variables, or write those that it was shown.

    From Python 3.14 on, the evaluation stack borrows references, which the counts do not show.
    """
    if sys.version_info >= (3, 14):
        return True
    return sys.gettrace() is not None or sys.getprofile() is not None


def _frames() -> Iterator[types.FrameType]:
    """The functions that run on this thread, and name each variable that they read."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _READERS_OF_CALLERS.isdisjoint(frame.f_code.co_names):
        if frame.f_code.co_flags & _OPTIMIZED and _READERS.isdisjoint(frame.f_code.co_names):
            yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def live_variables(code: types.CodeType, offset: int) -> frozenset[str]:
    """The variables of a function that it may read before it writes them.

    Args:
        code: of the function.
        offset: of the instruction that runs.
    """
    shared = (*code.co_cellvars, *code.co_freevars)  # other functions may read these
    instructions = list(dis.get_instructions(code))
    at = {instruction.offset: i for i, instruction in enumerate(instructions)}
    following = [_following(instructions, i, at) for i in range(len(instructions))]
    live: list[frozenset[str]] = [frozenset()] * len(instructions)
    has_changed = True
    while has_changed:
        has_changed = False
        for i in reversed(range(len(instructions))):
            after = frozenset().union(*(live[j] for j in following[i]))
            before = _before(instructions[i], after)
            if before != live[i]:
                live[i], has_changed = before, True
    handlers = (live[i] for i in _handlers(instructions, following, at))
    running = bisect.bisect_right([i.offset for i in instructions], offset) - 1
    found = (live[j] for j in following[running])
    return frozenset().union(shared, *found, *handlers)


def _before(instruction: dis.Instruction, live: frozenset[str]) -> frozenset[str]:
    """The variables that are live before an instruction, given those that are live after it."""
    name, value = instruction.opname, instruction.argval
    if "_FAST" not in name:
        return live
    names = value if isinstance(value, tuple) else (value,)
    accesses = re.findall("LOAD|STORE|DELETE", name)  # some instructions do two
    for access, variable in reversed(list(zip(accesses, names, strict=True))):
        live = live | {variable} if access == "LOAD" else live - {variable}
    return live


def _following(
    instructions: Sequence[dis.Instruction], i: int, at: dict[int, int]
) -> Iterable[int]:
    """The instructions that may run after one that does not raise."""
    name = instructions[i].opname
    following = []
    if i + 1 < len(instructions) and not _ends(name):
        following.append(i + 1)
    if _jumps(instructions[i]):
        following.append(at[instructions[i].argval])
    return following


def _ends(name: str) -> bool:
    """Whether nothing but the target of an instruction may run behind it."""
    return name.startswith(("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE")) or (
        name.startswith("JUMP_") and "IF" not in name
    )


def _jumps(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs


def _handlers(
    instructions: Sequence[dis.Instruction],
    following: Sequence[Iterable[int]],
    at: dict[int, int],
) -> Iterator[int]:
    """Where the interpreter may continue after an exception: what nothing else leads to."""
    reached, waiting = {0}, [0]
    while waiting:
        new = set(following[waiting.pop()]) - reached
        reached |= new
        waiting += new
    for i, instruction in enumerate(instructions):
        if i not in reached:
            yield i
        elif instruction.opname.startswith("SETUP_"):  # Python 3.10
            yield at[instruction.argval]
