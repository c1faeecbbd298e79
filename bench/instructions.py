"""Instructions of compiled kernels, counted in their machine code, and the time to issue them.

A count is static. The instructions of a loop count as often as the loop runs, where a constant step
and bound in the code say so; in other loops they count once, except in the largest, which goes over
tiles: its instructions are counted for each tile. Of alternative branches the longest counts, or
the shorter of two with the same matrix products, as the other is for rare values. What follows the
end of a kernel, such as the rare cases of a division, does not count; the end is an exit behind the
loop over tiles, if only matrix products for rare values can follow it.

The count is too high where warps skip a branch. It is too low where a loop has no constant bound,
as in kernels whose channels are not constant. The time assumes that each of the four
schedulers of a multiprocessor issues one instruction per cycle. It ignores waiting, and that some
instructions, such as float64 ones, take more cycles.
"""

import math
import re
import subprocess
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from testbed.cuda_programs import cuobjdump

CYCLES_PER_US = 1755  # clock rate; an H100 and an H200 reach 1,980 at most
SCHEDULERS = 4  # per multiprocessor

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_BRANCH = re.compile(r"(?:@!?\w+ )?BRA\S* (?:\S+ )*?0x([0-9a-f]+)$")
_EXIT = re.compile(r"(?:@!?U?P\d )?EXIT$")
_ENDS_PATH = re.compile(r"EXIT|RET|BRX|BRA(?!\.DIV)\S* (?!\S*!?U?P\d,)")
_GUARD = re.compile(r"@!?(U?P\d)")
_RESULTS = re.compile(r"(?:@!?\w+ )?[\w.]+ (U?P\w, U?P\w),")
_COMPARISON = re.compile(r"(?:@!?\w+ )?U?ISETP\S* \w+, \w+, (U?R\d+)\S*, (0x\w+),")
_UPPER_HALF = re.compile(r"(?:@!?\w+ )?U?ISETP\S*\.EX \w+, \w+, U?R\d+, U?RZ, ")
_STEP = r"(?:@!?\w+ )?(?:VIADD|U?IADD3) {0}, (?:U?P\d, )?{0}(?:\.reuse)?, (0x\w+)\b"


class Instruction(NamedTuple):
    """An instruction, and its address."""

    address: int
    text: str


class Count(NamedTuple):
    """The instructions of a kernel that every warp issues."""

    once: int  # outside of the loop over tiles
    tile: int  # in one round of it; 0: there is none


def counts(binary: Path, kernels: Collection[str], capability: int) -> dict[str, Count]:
    """Returns the counts of kernels by their mangled names, as far as `binary` has them.

    Args:
        binary: a library or a cubin.
        kernels: mangled names.
        capability: of the machine code, 90 for 9.0.
    """
    tool = cuobjdump(of_triton=binary.suffix == ".cubin")
    if not (tool and kernels and binary.exists()):
        return {}
    wanted = ["-sass", "-arch", f"sm_{capability}", "-fun", ",".join(kernels)]
    done = subprocess.run([tool, *wanted, str(binary)], capture_output=True, text=True, check=False)
    if done.returncode:
        warnings.warn(f"{Path(tool).name} {binary.name}: {done.stderr.strip()}", stacklevel=2)
    return {name: count(code) for name, code in functions(done.stdout) if name in kernels}


def functions(listing: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Yields the name and the instructions of each function of a listing."""
    for part in listing.split("Function : ")[1:]:
        name, _, text = part.partition("\n")
        found = (_LINE.match(line) for line in text.splitlines())
        yield name.strip(), [Instruction(int(m[1], 16), m[2]) for m in found if m]


def count(code: Sequence[Instruction]) -> Count:
    """Counts the instructions of a kernel along its longest path."""
    rounds = {loop: _rounds([i for i in code if i.address in loop]) for loop in _loops(code)}
    of_tiles = max((loop for loop in rounds if not rounds[loop]), key=len, default=range(0))
    code = _without_rare_products(code, of_tiles)
    times = []
    for address, text in code:
        around = [rounds[loop] or 1 for loop in rounds if address in loop]
        times.append(0 if text.startswith("NOP") else math.prod(around))
    is_tile = [i.address in of_tiles for i in code]
    return Count(
        _on_a_path(code, [0 if own else n for own, n in zip(is_tile, times, strict=True)]),
        _on_a_path(
            [i for own, i in zip(is_tile, code, strict=True) if own],
            [n for own, n in zip(is_tile, times, strict=True) if own],
        ),
    )


def _without_rare_products(code: Sequence[Instruction], of_tiles: range) -> Sequence[Instruction]:
    """Returns the code up to the last exit after the loop over tiles that products follow."""
    products = [i.address for i in code if "MMA." in i.text]
    last = max(products, default=0)
    for index in reversed(range(len(code))):
        address, text = code[index]
        if of_tiles.stop <= address < last and _EXIT.match(text):
            return [*code[:index], Instruction(address, "EXIT")]
    return code


def _target(instruction: Instruction) -> int | None:
    """Returns where a branch leads; None: it is no branch."""
    found = _BRANCH.match(instruction.text)
    return int(found[1], 16) if found else None


def _loops(code: Sequence[Instruction]) -> list[range]:
    """Returns the addresses of loops: from where a branch leads back to, to the last such branch.

    Rare code after the end of a kernel may lead back too, which is no loop.
    """
    found: dict[int, int] = {}
    exits = [i.address for i in code if i.text == "EXIT"]
    for instruction in code:
        begin, end = _target(instruction), instruction.address
        if begin is not None and begin < end and not any(begin < at < end for at in exits):
            found[begin] = end + 1
    return [range(*loop) for loop in found.items()]


class _Path(NamedTuple):
    """What a path through the code has issued so far."""

    instructions: int = 0
    products: int = 0  # matrix products
    last_product: int = 0  # its address


def _usual(one: _Path | None, other: _Path | None) -> _Path | None:
    """Returns the path of two to one instruction that warps usually take."""
    if one is None or other is None:
        return one or other
    if one.products != other.products:
        return max(one, other, key=lambda path: path.products)
    have_products = one.last_product != other.last_product
    return (min if have_products else max)(one, other)


def _on_a_path(code: Sequence[Instruction], times: Sequence[int]) -> int:
    """Returns the instructions on a path that never leads back, each so many times."""
    paths: dict[int, _Path] = {}  # to what a branch leads to
    before: _Path | None = _Path()
    end: _Path | None = None
    for instruction, count in zip(code, times, strict=True):
        path = _usual(before, paths.get(instruction.address))
        if path is None:  # reached by calls alone
            continue
        is_product = "MMA." in instruction.text
        path = _Path(
            path.instructions + count,
            path.products + count * is_product,
            instruction.address if is_product else path.last_product,
        )
        target = _target(instruction)
        if target is not None and target > instruction.address:
            paths[target] = cast(_Path, _usual(path, paths.get(target)))
        before = None if _ENDS_PATH.match(instruction.text) else path
        if instruction.text == "EXIT" or target == code[0].address:
            end = _usual(path, end)
    return (end or before or _Path()).instructions


def _rounds(loop: Sequence[Instruction]) -> int | None:
    """Returns how often a loop runs, by its last comparison; None: the code does not say so.

    The comparison is of a register with a constant, to which the loop adds another. It is assumed
    that the register begins below the step: at 0, or at the index of a thread.
    """
    guard = _GUARD.match(loop[-1].text)
    for _, text in reversed(loop[:-1]):
        results = _RESULTS.match(text)
        if guard and results and guard[1] in results[1].split(", "):
            if _UPPER_HALF.match(text):  # the high half of a 64-bit comparison
                continue
            comparison = _COMPARISON.match(text)
            if comparison is None:
                return None
            step = re.compile(_STEP.format(comparison[1]))
            steps = [int(m[1], 16) for i in loop if (m := step.match(i.text))]
            is_step = len(steps) == 1 and 0 < steps[0] < 1 << 31
            return -(-int(comparison[2], 16) // steps[0]) if is_step else None
    return None


def issue_us(
    counted: Count, *, blocks: int, columns: int, tiles: int, warps: int, multiprocessors: int
) -> float:
    """Returns the time in which the busiest multiprocessor issues the instructions of a launch.

    Args:
        counted: of the kernel.
        blocks: in each column of the grid.
        columns: of the grid.
        tiles: that the blocks of a column share.
        warps: of a block.
        multiprocessors: of the GPU.
    """
    of_block = counted.once + -(-tiles // blocks) * counted.tile
    most_blocks = -(-blocks * columns // multiprocessors)
    return most_blocks * warps * of_block / (SCHEDULERS * CYCLES_PER_US)
