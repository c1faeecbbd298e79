"""Builds the compiled libraries; pyproject.toml has the rest of the configuration.

PREACT_KERNELS_NATIVE=0 compiles nothing. PREACT_KERNELS_CUDA=0 omits the CUDA library, 1 requires
it; by default it is built if nvcc is found. TORCH_CUDA_ARCH_LIST selects the GPUs to build for. The
build needs no GPU and no network.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import setuptools
from setuptools import Extension, setup

INCLUDE_DIRS = [os.path.abspath("csrc")]
PYPROJECT = Path(__file__).with_name("pyproject.toml").read_text()
OLDEST_SETUPTOOLS, OLDEST_TORCH = (
    tuple(map(int, re.search(rf'"{name}>=([\d.]+)"', PYPROJECT)[1].split(".")))
    for name in ("setuptools", "torch")
)
# The LibTorch stable ABI of the oldest torch: one build serves all later versions of torch, and all
# versions of Python. No flag selects a processor: the code chooses its instruction set at run time.
TARGET = "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*OLDEST_TORCH)
FLAGS = ["-O3", "-std=c++17", TARGET]
# -g0: Python's flags enable debug information, ten times the size of the code.
CXX_FLAGS = [*FLAGS, "-g0", "-fvisibility=hidden"]
NVCC_FLAGS = [*FLAGS, "-Xcompiler=-fvisibility=hidden"]
# The files of csrc/cpu/kernels that are compiled for each instruction set.
PRODUCTS_OF_STRIPS = ("activation", "norm_act_conv_backward", "norm_act_conv_forward")
CPU_KERNELS = {
    "generic": ("*",),
    "avx2": ("*",),
    "avx512": ("*",),
    "avx512_bf16": (*PRODUCTS_OF_STRIPS, "conv_weights", "weight_stationary"),
    "amx_bf16": PRODUCTS_OF_STRIPS,
}
# Names of architectures in TORCH_CUDA_ARCH_LIST, as in torch.
NAMED_ARCHITECTURES = {
    "Ampere": "8.0;8.6",
    "Ada": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.0;12.0",
}
CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"  # default; PTX runs on later GPUs


def find_files(root, *patterns):
    """Return files below a folder, relative to it."""
    return sorted(f for p in patterns for f in glob(p, root_dir=root, recursive=True))


def find_headers(root="."):
    """Return the headers of both libraries, and the kernels that the CPU library includes."""
    return find_files(root, "csrc/**/*.h", "csrc/**/*.cuh", "csrc/cpu/kernels/*.cpp")


def find_cuda_files(root="."):
    """Return the sources and the headers of the CUDA library."""
    headers = [h for h in find_headers(root) if not h.startswith("csrc/cpu/")]
    return find_files(root, "csrc/cuda/*.cpp", "csrc/cuda/*.cu"), headers


def digest(files, root="."):
    """Return a digest of the contents of files."""
    contents = (Path(root, file).read_bytes() for file in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def require(name, found, oldest):
    """Exit with one line if version `found` of a package is older than the tuple `oldest`."""
    if tuple(map(int, re.findall(r"\d+", found)[: len(oldest)])) < oldest:
        needs = ".".join(map(str, oldest))
        sys.exit(
            f"preact_kernels needs {name} {needs} or later, found {name} {found}: "
            f"pip install '{name}>={needs}'"
        )


def find_obstacle():
    """Return why nothing can be compiled here, or None."""
    if os.environ.get("PREACT_KERNELS_NATIVE") == "0":
        return "PREACT_KERNELS_NATIVE=0"
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler} not found"
    try:
        import torch.utils.cpp_extension  # noqa: F401
    except (ImportError, OSError) as error:
        return f"no torch to build against: {str(error).splitlines()[0]}"
    return None


def relative_paths():
    """Return flags that make __FILE__, a part of error messages, independent of the machine."""
    import torch

    # Longest last: the compiler uses the last matching prefix, and torch may be below the folder.
    folders = os.getcwd(), os.path.dirname(os.path.dirname(torch.__file__))
    return [f"-fmacro-prefix-map={folder}/=" for folder in sorted(folders, key=len)]


def write_cpu_kernels(isa, folder, root="."):
    """Write a source for each kernel of an instruction set, and return the paths.

    Setuptools compiles a source once, and all sources of a library with the same flags.
    """
    patterns = (f"cpu/kernels/{name}.cpp" for name in CPU_KERNELS[isa])
    folder = Path(folder, isa)
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for kernel in find_files(f"{root}/csrc", *patterns):
        source = folder / Path(kernel).name
        text = f'#define PK_{isa.upper()}\n#include "{kernel}"\n'
        if not source.exists() or source.read_text() != text:  # a new file would be compiled
            source.write_text(text)
        sources.append(str(source))
    return sources


def cpu_extension():
    """Return the CPU library, a shared object for `torch.ops.load_library`."""
    from torch.utils.cpp_extension import CppExtension

    kernels = [s for isa in CPU_KERNELS for s in write_cpu_kernels(isa, "build/cpu_kernels")]
    return CppExtension(
        "preact_kernels._cpu",
        [*kernels, *find_files(".", "csrc/cpu/*.cpp")],
        depends=find_headers(),
        include_dirs=INCLUDE_DIRS.copy(),
        # Before torch's libraries, which export some functions of a newer libstdc++.
        libraries=["stdc++"],
        extra_compile_args=[*CXX_FLAGS, *relative_paths()],
        # A kernel that an instruction set lacks is an error here, and not where it is loaded.
        extra_link_args=["-Wl,-z,defs"],
        py_limited_api=True,  # adds -DPy_LIMITED_API=0x030A0000, omits libtorch_python
    )


def cuda_targets(names):
    """Return nvcc's flags for architectures such as "8.0;9.0+PTX", "8.0 9.0" or "Hopper".

    Architectures older than 8.0 are omitted.

    Raises:
        ValueError: an architecture is neither a number nor a name, or all are older than 8.0.
    """
    cubins, ptx = [], []
    for name, numbers in NAMED_ARCHITECTURES.items():
        names = names.replace(name, numbers)
    for name in names.replace(";", " ").split():
        found = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", name)
        if not found:
            raise ValueError(
                "TORCH_CUDA_ARCH_LIST: expected compute capabilities from 8.0 on, "
                f'such as "8.0;9.0+PTX", got "{name}"'
            )
        if int(found[1]) < 8:
            continue
        arch = found[1] + found[2]
        cubins.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
        if found[3]:
            ptx.append(f"-gencode=arch=compute_{arch},code=compute_{arch}")
    if not cubins:
        raise ValueError(
            f'TORCH_CUDA_ARCH_LIST: expected a compute capability from 8.0 on, got "{names}"'
        )
    return list(dict.fromkeys(cubins + ptx))


def find_cuda_obstacle(nvcc, targets):
    """Return why `nvcc` (a path or None) cannot compile the CUDA library, or None."""
    if nvcc is None:
        return "nvcc was not found"
    import torch

    def says(flag):
        return subprocess.run([nvcc, flag], capture_output=True, text=True, check=False).stdout

    known = says("--list-gpu-arch").split()
    for target in targets:
        wanted = re.search(r"compute_\w+", target)[0]
        if wanted.rstrip("af") not in known:
            return (
                f"{nvcc} does not know {wanted}: take a later CUDA (12.8 for compute_100), or name "
                "other architectures in TORCH_CUDA_ARCH_LIST"
            )
    release = re.search(r"release (\d+)", says("--version"))
    of_torch = (torch.version.cuda or "").partition(".")[0]
    if of_torch and release and release[1] != of_torch:
        return f"{nvcc} is of CUDA {release[1]}, and torch of CUDA {torch.version.cuda}"
    return None


def cuda_extension():
    """Return the CUDA library, or None if it is disabled, or without sources or nvcc.

    To build against a CPU-only torch, too, it does not link libtorch_cuda or libcudart: libtorch.so
    loads both at run time.
    """
    wanted = os.environ.get("PREACT_KERNELS_CUDA")
    sources, headers = find_cuda_files()
    if not sources or wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    paths = ([f"{home}/bin/nvcc"] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    nvcc = next(filter(None, map(shutil.which, paths)), None)
    try:
        targets = cuda_targets(os.environ.get("TORCH_CUDA_ARCH_LIST") or CUDA_ARCHITECTURES)
        obstacle = find_cuda_obstacle(nvcc, targets)
    except ValueError as error:
        obstacle = error
    if obstacle:
        if wanted == "1":
            sys.exit(f"preact_kernels: PREACT_KERNELS_CUDA=1, but {obstacle}")
        print(f"No CUDA library is built: {obstacle}", file=sys.stderr)
        return None

    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:  # a CPU-only torch does not search for it
        cpp_extension.CUDA_HOME = os.path.dirname(os.path.dirname(nvcc))
    os.environ["PREACT_KERNELS_NVCC"] = os.environ.get("PYTORCH_NVCC", nvcc)
    os.environ["PYTORCH_NVCC"] = f"sh {shlex.quote(os.path.abspath('csrc/cuda/nvcc.sh'))}"
    names = "_".join(re.findall(r",code=(\w+)", " ".join(targets)))  # nvcc splits at commas
    defined = ["-DUSE_CUDA", f"-DPREACT_KERNELS_TARGETS={names}"]
    return Extension(
        "preact_kernels._cuda",
        sources,
        depends=headers,
        include_dirs=INCLUDE_DIRS + cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths(),
        extra_compile_args={
            # The digest ends up in library.cpp; bench/dry_run.py reads it.
            "cxx": [
                *CXX_FLAGS,
                *relative_paths(),
                f"-DPREACT_KERNELS_SOURCES={digest(sources + headers)}",
                *defined,
            ],
            # With a CPU-only torch, ninja does not track headers of .cu files: a digest does.
            "nvcc": [
                *NVCC_FLAGS,
                *(f"-Xcompiler={flag}" for flag in relative_paths()),
                f"-DPREACT_KERNELS_HEADERS={digest(headers)}",
                *defined,
                *targets,
            ],
        },
        extra_link_args=["-Wl,--no-as-needed", "-ltorch"],
        language="c++",
        py_limited_api=True,
    )


def wheel_command():
    """Return a command that builds a wheel for all Pythons: the libraries use no Python symbols."""
    from setuptools.command.bdist_wheel import bdist_wheel

    class PlatformWheel(bdist_wheel):
        def get_tag(self):
            return "py3", "none", super().get_tag()[2]

    return PlatformWheel


def native_settings():
    """Return the arguments of `setup` for the compiled libraries, if they can be built."""
    if {"egg_info", "dist_info"} & set(sys.argv):
        return {}  # metadata only: do not import torch
    obstacle = find_obstacle()
    if obstacle:
        print(f"preact_kernels: will run on the `reference` backend ({obstacle})", file=sys.stderr)
        return {}

    from torch.utils.cpp_extension import BuildExtension, is_ninja_available

    return {
        "ext_modules": [ext for ext in (cpu_extension(), cuda_extension()) if ext],
        "cmdclass": {
            "bdist_wheel": wheel_command(),
            "build_ext": BuildExtension.with_options(
                use_ninja=is_ninja_available(), no_python_abi_suffix=True
            ),
        },
    }


if __name__ == "__main__":
    require("setuptools", setuptools.__version__, OLDEST_SETUPTOOLS)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        require("torch", importlib.metadata.version("torch"), OLDEST_TORCH)
    setup(**native_settings())
