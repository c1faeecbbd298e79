"""The compiled libraries load with this torch, and their schemas match `ops/schema.py`."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from preact_kernels.ops.schema import SCHEMAS

PACKAGE = Path(importlib.util.find_spec("preact_kernels").origin).parent
# A library may lack these.
OPTIONAL_ARGUMENTS = {"padding", "dilation", "groups"}
OPTIONAL_OPS = {"running_stats_update"}
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
LIBRARIES = {
    "cpu": (shutil.which("c++"), "no C++ compiler"),
    "cuda": (torch.version.cuda and NVCC, "no nvcc, or a torch without CUDA that cannot load it"),
}


def schemas_of(library):
    """The arguments and results of the ops of a library, by name."""
    torch.ops.load_library(PACKAGE / f"_{library}.so")
    ops = getattr(torch.ops, f"preact_kernels_{library}")
    found = {name: getattr(ops, name) for name in SCHEMAS if hasattr(ops, name)}
    return {name: str(op.default._schema).partition("(")[2] for name, op in found.items()}


# For another process: testbed/cuda_on_host registers ops of the same names.
OF_CUDA = """
import json
from tests.behaviour.test_libraries import schemas_of
print(json.dumps(schemas_of("cuda")))
"""


def arguments_and_results(schema):
    """`(Tensor x, float eps) -> Tensor` as `[("Tensor", "x"), ("float", "eps")], "Tensor"`."""
    arguments, results = re.fullmatch(r"\((.*)\) -> (.*)", schema).groups()
    # `ops/schema.py` has the types that `torch.compile` traces numbers as.
    arguments = arguments.replace("Scalar ", "float ").replace("SymInt", "int")
    return [tuple(a.rsplit(" ", 1)) for a in arguments.split(", ")], results


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_loads_and_has_the_ops_above_it_with_their_schemas(library):
    is_expected, reason = LIBRARIES[library]
    for variable in ("PREACT_KERNELS_NATIVE", f"PREACT_KERNELS_{library.upper()}"):
        if os.environ.get(variable) == "0":
            pytest.skip(f"{variable}=0")
    if not is_expected:
        pytest.skip(reason)
    if library == "cpu":
        schemas = schemas_of("cpu")
    else:
        command = [sys.executable, "-c", OF_CUDA]
        process = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr[-2000:]
        schemas = json.loads(process.stdout)
    assert SCHEMAS.keys() - schemas.keys() <= OPTIONAL_OPS
    for name, schema in schemas.items():
        expected, results = arguments_and_results(SCHEMAS[name])
        found, found_results = arguments_and_results(f"({schema}")
        assert found_results == results, name
        lacking = [a for a in expected if a not in found]
        assert {argument for _, argument in lacking} <= OPTIONAL_ARGUMENTS, name
        assert found == [a for a in expected if a not in lacking], name


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_names_no_folder_of_its_build(library):
    file = PACKAGE / f"_{library}.so"
    if not file.exists():
        pytest.skip(f"no {file.name}")
    for folder in (Path(__file__).parents[2], Path(torch.__file__).parents[1]):
        assert os.fsencode(folder) not in file.read_bytes()
