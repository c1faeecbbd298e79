"""Builds the compiled libraries; everything else about the package is in pyproject.toml.

PREACT_KERNELS_NATIVE=0 compiles nothing. PREACT_KERNELS_CUDA=0 leaves the CUDA library out and =1
insists on it; by default it is built where nvcc is found. TORCH_CUDA_ARCH_LIST names the GPUs to
build for. Nothing needs a GPU or the network.
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
# The LibTorch stable ABI of the oldest torch: one build serves every later torch and every Python.
# No flag names a processor: the sources choose their instruction set when they run.
TARGET = "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*OLDEST_TORCH)
FLAGS = ["-O3", "-std=c++17", TARGET]
# -g0: Python's flags ask for debug information, ten times the size of the code.
CXX_FLAGS = [*FLAGS, "-g0", "-fvisibility=hidden"]
NVCC_FLAGS = [*FLAGS, "-Xcompiler=-fvisibility=hidden"]
# Without TORCH_CUDA_ARCH_LIST. The last comes as PTX too, for later GPUs.
NAMED_ARCHITECTURES = {
    "Ampere": "8.0;8.6",
    "Ada": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.0;12.0",
}
CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"


def find_files(root, *patterns):
    """Return files below a folder, relative to it."""
    return sorted(f for p in patterns for f in glob(p, root_dir=root, recursive=True))


def find_headers(root="."):
    """Return the headers of both libraries."""
    return find_files(root, "csrc/**/*.h", "csrc/**/*.cuh")


def find_cuda_files(root="."):
    """Return the sources and the headers of the CUDA library."""
    headers = [h for h in find_headers(root) if not h.startswith("csrc/cpu/")]
    return find_files(root, "csrc/cuda/*.cpp", "csrc/cuda/*.cu"), headers


def digest(files, root="."):
    """Return a digest of what files contain."""
    contents = (Path(root, file).read_bytes() for file in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def require(name, found, oldest):
    """Exits with one line where version `found` of a package is older than `oldest`, a tuple."""
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
    """Return the flags that make __FILE__, a part of error messages, independent of the machine."""
    import torch

    # Longest last: the compiler uses the last matching prefix, and torch may be in the tree.
    folders = os.getcwd(), os.path.dirname(os.path.dirname(torch.__file__))
    return [f"-fmacro-prefix-map={folder}/=" for folder in sorted(folders, key=len)]


def cpu_extension():
    """Return the CPU library, a shared object that `torch.ops.load_library` loads."""
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(
        "preact_kernels._cpu",
        sorted(glob("csrc/cpu/**/*.cpp", recursive=True)),
        depends=find_headers(),
        include_dirs=INCLUDE_DIRS.copy(),
        # Before torch's libraries: they export some functions of a newer libstdc++.
        libraries=["stdc++"],
        extra_compile_args=[*CXX_FLAGS, *relative_paths()],
        py_limited_api=True,  # adds -DPy_LIMITED_API=0x030A0000, leaves libtorch_python out
    )


def cuda_targets(names):
    """Return nvcc's flags for architectures such as "8.0;9.0+PTX"; a space separates too.

    Architectures older than 8.0 are left out. Names are those of torch, such as "Hopper".

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
    """Return the CUDA library, or None where it has no sources, no nvcc or is not wanted.

    It builds against a CPU-only torch too, so it names neither libtorch_cuda nor libcudart: where
    it is loaded, libtorch.so brings both.
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

    if cpp_extension.CUDA_HOME is None:  # a CPU-only torch does not look for it
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
            # In library.cpp; bench/dry_run.py looks for it.
            "cxx": [
                *CXX_FLAGS,
                *relative_paths(),
                f"-DPREACT_KERNELS_SOURCES={digest(sources + headers)}",
                *defined,
            ],
            # A CPU-only torch does not follow the headers of a .cu file: name what is in them.
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
    """Return a command that builds a wheel for every Python: the libraries use no symbol of it."""
    from setuptools.command.bdist_wheel import bdist_wheel

    class PlatformWheel(bdist_wheel):
        def get_tag(self):
            return "py3", "none", super().get_tag()[2]

    return PlatformWheel


def native_settings():
    """Return the arguments of `setup` that make the compiled libraries, where they can be made."""
    if {"egg_info", "dist_info"} & set(sys.argv):
        return {}  # metadata only: spare the import of torch
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
