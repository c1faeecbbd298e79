"""Finds tensors that only variables hold which no running function reads again.

In `a = self.bn(x); b = F.relu(a); return self.conv(b).mean()` the variables `a` and `b` hold their
tensors while `mean` runs, but nothing reads them again.
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

from preact_kernels import call_stack


class Reference(weakref.ref):
    """A weak reference used only here; Python shares plain weak references to an object."""

    __slots__ = ()


def unread(tensors: Sequence[Tensor], outer: types.FrameType | None = None) -> list[bool]:
    """Whether each tensor is held only by variables that this thread never reads again.

    Args:
        tensors: tensors with one `Reference` each; the caller holds them only in this sequence.
        outer: a frame; it and its callers have no variables with these tensors.
    """
    holders = [0] * len(tensors)
    if not holders:
        return []
    index = {id(t): i for i, t in enumerate(tensors)}
    if not _is_watched():
        for frame in call_stack.frames_between(unread.__code__, outer):
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
                variables.clear()  # a copy that only the frame and this function hold
            del variables
    return [_is_held_by(tensors, i, count) for i, count in enumerate(holders)]


def _is_held_by(tensors: Sequence[Tensor], i: int, variables: int) -> bool:
    """Whether exactly `variables` variables, and nothing else, hold a tensor."""
    return (
        variables > 0
        and _references(tensors, i) == _OWN_REFERENCES + variables
        and tensors[i]._use_count() == 1  # type: ignore[attr-defined]  # in C++
        and weakref.getweakrefcount(tensors[i]) == 1
    )


def _references(values: Sequence[object], i: int) -> int:
    return sys.getrefcount(values[i])


_OWN_REFERENCES = _references([object()], 0)  # by the sequence and the call


def _is_watched() -> bool:
    """Whether a debugger or a profiler may read or write variables.

    Also true from Python 3.14 on: reference counts miss borrowed references on the stack.
    """
    if sys.version_info >= (3, 14):
        return True
    return sys.gettrace() is not None or sys.getprofile() is not None


@functools.lru_cache(maxsize=4096)
def live_variables(code: types.CodeType, offset: int) -> frozenset[str]:
    """Returns the variables that a function may read before it writes them.

    Args:
        code: code of the function.
        offset: offset of the running instruction.
    """
    shared = (*code.co_cellvars, *code.co_freevars)  # nested functions may read these
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
    """Returns the variables live before an instruction, given those live after it."""
    name, value = instruction.opname, instruction.argval
    if "_FAST" not in name:
        return live
    names = value if isinstance(value, tuple) else (value,)
    accesses = re.findall("LOAD|STORE|DELETE", name)  # some instructions do two accesses
    for access, variable in reversed(list(zip(accesses, names, strict=True))):
        live = live | {variable} if access == "LOAD" else live - {variable}
    return live


def _following(
    instructions: Sequence[dis.Instruction], i: int, at: dict[int, int]
) -> Iterable[int]:
    """Returns the instructions that may run after instruction `i` if it does not raise."""
    own, following = instructions[i], []
    if i + 1 < len(instructions) and not _ends(own.opname):
        following.append(i + 1)
    if own.opcode in dis.hasjrel or own.opcode in dis.hasjabs:
        following.append(at[own.argval])
    return following


def _ends(name: str) -> bool:
    """Whether the next instruction in order never runs after this one."""
    return name.startswith(("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE")) or (
        name.startswith("JUMP_") and "IF" not in name
    )


def _handlers(
    instructions: Sequence[dis.Instruction], following: Sequence[Iterable[int]], at: dict[int, int]
) -> Iterator[int]:
    """Yields the first instructions of exception handlers, which no other instruction leads to."""
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
