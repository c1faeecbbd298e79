"""Compiles kernels for the host, into `build/cuda_on_host/`; reuses what did not change.

    python -m testbed.cuda_on_host.build

`kernels` is the unchanged CUDA library, for CPU tensors; `fragments` calls the wrappers of matrix
instructions one by one; `planted` has the kernels for tests of the harness. `sanitize` adds
AddressSanitizer to each.
"""

import shutil
import sys
from pathlib import Path

from testbed import host_compiler
from testbed.cuda_programs import nvcc
from testbed.host_compiler import CXX, ROOT

HERE = Path(__file__).parent
OUT = ROOT / "build" / "cuda_on_host"
# No fused multiply-add unless the source has one: results do not depend on the processor.
FLAGS = [
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-Wall", "-Wno-unknown-pragmas", "-DPK_CUDA_ON_HOST", f"-I{HERE}", f"-I{ROOT / 'csrc'}",
]  # fmt: skip
# Kernels must compile fast, and check that accesses are aligned.
OF_KERNELS = ["-Og", "-fsanitize=alignment"]
# The harness must run fast. The other sources have no kernels.
OF_OTHERS = {
    **{name: ["-O2"] for name in ("grid", "instructions")},
    **{name: ["-O0"] for name in ("norm_act_conv", "torch_calls", "addresses")},
    "library": ["-O0", "-include", "ops.h"],
}
SANITIZE = ["-g1", "-fsanitize=address", "-fno-omit-frame-pointer"]

LIBRARIES = ("fragments", "kernels", "planted")
# Functions of torch that torch_calls.cpp wraps.
WRAPPED = ("torch_call_dispatcher", "aoti_torch_delete_tensor_object")


def build(name: str, sanitize: bool = False) -> Path:
    """Builds one of `LIBRARIES` for the host if something changed, and returns its path.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    compile_flags, link_flags = list(FLAGS), []
    sources = [HERE / "grid.cpp", HERE / "instructions.cpp"]
    if name == "kernels":
        sources += [HERE / "addresses.cpp", HERE / "torch_calls.cpp"]
        sources += sorted([*(ROOT / "csrc/cuda").glob("*.cpp"), *(ROOT / "csrc/cuda").glob("*.cu")])
        torch_compile_flags, torch_link_flags = host_compiler.torch_flags()
        compile_flags += torch_compile_flags
        link_flags += [*(f"-Wl,--wrap={function}" for function in WRAPPED), *torch_link_flags]
    else:
        sources.append(HERE / f"{name}.cpp")
    if sanitize:
        compile_flags += SANITIZE
        link_flags += SANITIZE
    flags_of = {s: [*compile_flags, *OF_OTHERS.get(s.stem, OF_KERNELS)] for s in sources}
    headers = [*HERE.glob("*.h")]
    for folder_of_headers in (".", "host", "cuda"):
        headers += (ROOT / "csrc" / folder_of_headers).glob("*.*h")
    folder = OUT / (name + "_sanitized" * sanitize)
    with host_compiler.locked(folder):
        objects = host_compiler.compile_objects(folder, flags_of, headers)
        return host_compiler.link_library(folder, name, objects, link_flags)


def build_for_gpu(capability: tuple[int, int]) -> Path:
    """Builds `fragments` for a GPU if something changed, and returns its path.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    flags = ["-std=c++17", "-shared", "-Xcompiler=-fPIC", "-arch=sm_{}{}".format(*capability)]
    flags.append(f"-I{ROOT / 'csrc'}")
    source = HERE / "fragments.cpp"
    around = [source, HERE / "entry.h", ROOT / "csrc/args.h", *(ROOT / "csrc/cuda").glob("*.cuh")]
    folder = OUT / "fragments_for_gpu"
    digest = host_compiler.digest(*flags, *(path.read_text() for path in around))
    library = folder / f"fragments-{digest}.so"
    with host_compiler.locked(folder):
        if not library.exists():
            command = [nvcc() or "nvcc", *flags, "-x", "cu", str(source), "-o", str(library)]
            host_compiler.run(command)
    return library


def sanitizer_environment() -> dict[str, str]:
    """Returns the environment of a process that loads a sanitized library."""
    return {
        **host_compiler.preloaded([host_compiler.find_file("libasan.so")]),
        "ASAN_OPTIONS": "detect_leaks=0",
    }


if __name__ == "__main__":
    if shutil.which(CXX[0]) is None:
        print(f"no {CXX[0]}: tests of the CUDA kernels on the host are skipped")
        sys.exit(0)
    for library in ("fragments", "kernels"):
        print(build(library))
