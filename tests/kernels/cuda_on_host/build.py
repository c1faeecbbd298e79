"""Compiles kernels for the host, into `build/cuda_on_host/`; what is there already is used again.

    python -m tests.kernels.cuda_on_host.build

`kernels` is the CUDA library as it is, for CPU tensors; `fragments` holds the wrappers of matrix
instructions one by one, `planted` the kernels of the tests of the harness.
Each also with `sanitize`, under AddressSanitizer.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from preact_kernels.torch_compat import OLDEST_TORCH
from tests.kernels.cuda_programs import nvcc

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
OUT = ROOT / "build" / "cuda_on_host"
CXX = shlex.split(os.environ.get("CXX") or "c++")
# No fused multiply-add where the source has none: the processor that compiles decides nothing.
FLAGS = [
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-Wall", "-Wno-unknown-pragmas", "-DPK_CUDA_ON_HOST", f"-I{HERE}", f"-I{ROOT / 'csrc'}",
]  # fmt: skip
# Kernels are quick to compile, and check that accesses are aligned.
OF_KERNELS = ["-Og", "-fsanitize=alignment"]
# The harness is quick to run. The rest has no kernels.
OF_OTHERS = {
    **{name: ["-O2"] for name in ("grid", "instructions")},
    **{name: ["-O0"] for name in ("norm_act_conv", "torch_calls", "addresses")},
    "library": ["-O0", "-include", "ops.h"],
}
SANITIZE = ["-g1", "-fsanitize=address", "-fno-omit-frame-pointer"]

LIBRARIES = ("fragments", "kernels", "planted")
# Functions of torch that torch_calls.cpp stands before.
WRAPPED = ("torch_call_dispatcher", "aoti_torch_delete_tensor_object")


def _torch_flags() -> tuple[list[str], list[str]]:
    """To compile and to link against torch's stable ABI."""
    from torch.utils import cpp_extension

    include = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    (folder,) = cpp_extension.library_paths()
    return (
        [
            *include,
            "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*OLDEST_TORCH),
        ],
        [
            *(f"-Wl,--wrap={function}" for function in WRAPPED),
            *(f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch", "-ltorch_cpu", "-lc10"),
        ],
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def build(name: str, sanitize: bool = False) -> Path:
    """One of `LIBRARIES` for the host, compiled where something changed.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    compile_flags, link_flags = list(FLAGS), ["-shared"]
    sources = [HERE / "grid.cpp", HERE / "instructions.cpp"]
    if name == "kernels":
        sources += [HERE / "addresses.cpp", HERE / "torch_calls.cpp"]
        sources += sorted([*(ROOT / "csrc/cuda").glob("*.cpp"), *(ROOT / "csrc/cuda").glob("*.cu")])
        more_compile_flags, more_link_flags = _torch_flags()
        compile_flags += more_compile_flags
        link_flags += more_link_flags
    else:
        sources.append(HERE / f"{name}.cpp")
    if sanitize:
        compile_flags += SANITIZE
        link_flags += SANITIZE
    folder = OUT / (name + "_sanitized" * sanitize)
    folder.mkdir(parents=True, exist_ok=True)
    headers = [*HERE.glob("*.h")]
    for folder_of_headers in (".", "host", "cuda"):
        headers += (ROOT / "csrc" / folder_of_headers).glob("*.*h")
    around = _digest(*CXX, *compile_flags, *(h.read_text() for h in sorted(headers)))
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that test side by side
        flags_of = {s: OF_OTHERS.get(s.stem, OF_KERNELS) for s in sources}
        objects = {
            s: folder / f"{s.stem}-{_digest(around, *flags, s.read_text())}.o"
            for s, flags in flags_of.items()
        }
        library = folder / f"{name}-{_digest(*map(str, objects.values()), *link_flags)}.so"
        if library.exists():
            return library
        jobs = [
            [
                *CXX,
                *compile_flags,
                *flags,
                "-x",
                "c++",
                "-c",
                str(source),
                "-o",
                str(objects[source]),
            ]
            for source, flags in flags_of.items()
            if not objects[source].exists()
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        _run([*CXX, *map(str, objects.values()), *link_flags, "-o", str(library)])
        for path in folder.iterdir():  # of earlier sources
            if path not in (library, *objects.values()) and path.suffix in (".o", ".so"):
                path.unlink()
    return library


def build_for_gpu(capability: tuple[int, int]) -> Path:
    """`fragments` for a GPU, compiled where something changed.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    flags = ["-std=c++17", "-shared", "-Xcompiler=-fPIC", "-arch=sm_{}{}".format(*capability)]
    flags.append(f"-I{ROOT / 'csrc'}")
    source = HERE / "fragments.cpp"
    around = [source, HERE / "entry.h", ROOT / "csrc/args.h", *(ROOT / "csrc/cuda").glob("*.cuh")]
    folder = OUT / "fragments_for_gpu"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"fragments-{_digest(*flags, *(path.read_text() for path in around))}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _run([nvcc() or "nvcc", *flags, "-x", "cu", str(source), "-o", str(library)])
    return library


def sanitizer_environment() -> dict[str, str]:
    """What a process needs in its environment to load a library that was built to `sanitize`."""
    # The C++ runtime beside it, or the sanitizer does not find what throws exceptions.
    paths = [
        subprocess.check_output([*CXX, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0"}


def _run(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        Path(command[-1]).unlink(missing_ok=True)
        raise RuntimeError(f"{shlex.join(command)}\n{process.stderr}")


if __name__ == "__main__":
    if shutil.which(CXX[0]) is None:
        print(f"no {CXX[0]}: tests of the CUDA kernels on the host are skipped")
        sys.exit(0)
    for library in ("fragments", "kernels"):
        print(build(library))
