"""Compiles variants of the CPU library, into `build/cpu_variants/`.

    python -m tests.kernels.cpu_variants.build address undefined

Variants can be combined.
"""

import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from testbed import host_compiler
from testbed.host_compiler import ROOT

HERE = Path(__file__).parent
OUT = ROOT / "build" / "cpu_variants"
# As in setup.py, but kernels are compiled fast, and still run fast enough; the rest has no kernels.
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-g1", f"-I{ROOT / 'csrc'}"]
OF_KERNELS, OF_OTHERS = ["-O1"], ["-O0"]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
ISAS = tuple(SETUP["CPU_KERNELS"])
EMULATED = ("avx512_bf16", "amx_bf16")  # by the variant `emulated`


class Variant(NamedTuple):
    """What a variant adds to the CPU library."""

    compile_flags: Sequence[str] = ()
    link_flags: Sequence[str] = ()
    sources: Mapping[str, Sequence[str]] = {}  # in this folder, each with more flags


# Those checks of UndefinedBehaviorSanitizer that take no time to compile.
UNDEFINED = [
    "-fsanitize=signed-integer-overflow,shift,bounds,integer-divide-by-zero,float-cast-overflow",
    "-fsanitize=unreachable,return,bool,enum",
]
ADDRESS = ["-fsanitize=address", "-fsanitize-recover=address"]
THREAD = ["-fsanitize=thread"]
WRAPPED = ("torch_parallel_for", "torch_get_num_threads", "__tsan_atomic64_fetch_add")
VARIANTS = {
    # Checks that are calls compile in half the time of inline ones.
    "address": Variant(
        [
            *ADDRESS,
            "-fno-omit-frame-pointer",
            "--param=asan-instrumentation-with-call-threshold=0",
        ],
        ADDRESS,
        {"planted.cpp": []},
    ),
    "undefined": Variant(UNDEFINED, UNDEFINED, {"planted.cpp": []}),
    # Products of bfloat16 in plain C++, for machines without their instructions.
    "emulated": Variant(["-DPK_EMULATED", "-Wno-psabi"]),
    "thread": Variant(
        THREAD,
        [*THREAD, *(f"-Wl,--wrap={function}" for function in WRAPPED)],
        {"planted.cpp": [], "threads.cpp": ["-O2", "-std=c++20", "-fno-sanitize=all"]},
    ),
}


def build(names: Sequence[str], isas: Sequence[str]) -> Path:
    """Builds the CPU library with these variants, if something changed. Returns its path.

    Args:
        names: names in `VARIANTS`.
        isas: instruction sets to compile kernels for. Kernels of others end the process.

    Returns:
        a file `_cpu.so` in a folder of its own.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    variants = [VARIANTS[name] for name in names]
    torch_compile_flags, torch_link_flags = host_compiler.torch_flags()
    flags = [*FLAGS, *torch_compile_flags, *(f for v in variants for f in v.compile_flags)]
    link_flags = [*torch_link_flags, *(f for v in variants for f in v.link_flags)]
    others = [HERE / "missing_kernel.cpp", *sorted((ROOT / "csrc/cpu").glob("*.cpp"))]
    headers = [ROOT / h for h in SETUP["find_headers"](ROOT) if "/cuda/" not in h]
    folder = OUT / "+".join([*names, *isas])
    with host_compiler.locked(folder):
        flags_of = {
            **{source: [*flags, *OF_OTHERS] for source in others},
            **{
                Path(source): [*flags, *_optimisation(names, isa)]
                for isa in isas
                for source in SETUP["write_cpu_kernels"](isa, folder, ROOT)
            },
            **{
                HERE / source: [*flags, *OF_OTHERS, *more]
                for variant in variants
                for source, more in variant.sources.items()
            },
        }
        objects = host_compiler.compile_objects(folder, flags_of, headers)
        link_flags += missing_kernels(objects, [isa for isa in ISAS if isa not in isas])
        library = host_compiler.link_library(folder, "cpu", objects, link_flags)
        link = folder / "package" / "_cpu.so"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    return link


def _optimisation(names: Sequence[str], isa: str) -> list[str]:
    """Emulated kernels take the compiler minutes to optimise."""
    return OF_OTHERS if "emulated" in names and isa in EMULATED else OF_KERNELS


def needed_isas(names: Sequence[str], isas: Sequence[str]) -> list[str]:
    """Instruction sets, and those that do what they have no kernels for."""
    found = set(isas)
    if "amx_bf16" in found:
        found.add("avx512_bf16")
    if "avx512_bf16" in found:
        found.add("avx2" if "emulated" in names else "avx512")
    return [isa for isa in ISAS if isa in found]


def missing_kernels(objects: Sequence[Path], isas: Sequence[str]) -> list[str]:
    """The linker's flags that define the kernels of instruction sets that are not compiled."""
    listing = subprocess.check_output(["nm", "-u", *map(str, objects)], text=True)
    namespaces = "|".join(f"{len(isa)}{isa}" for isa in isas)
    missing = re.findall(rf"\b_ZN14preact_kernels(?:{namespaces})\w+", listing) if isas else []
    return [f"-Wl,--defsym={name}=missing_kernel" for name in sorted(set(missing))]


if __name__ == "__main__":
    print(build(sys.argv[1:], needed_isas(sys.argv[1:], ["avx2"])))
