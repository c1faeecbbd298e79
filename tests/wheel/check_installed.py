"""Trains with an installed wheel: `make check-wheel` runs this outside the source tree.

PATH has neither a compiler nor git. The environment has the wheel, torch and what torch depends on.
Warnings of preact_kernels are errors.
"""

import copy
import platform
import shutil
import sys
from pathlib import Path

import torch

import preact_kernels as pk
from preact_kernels.accuracy import oracle

PROBLEMS = 4


def check(holds, message):
    if not holds:
        sys.exit(f"check_installed.py: {message}")


def main():
    for program in ("c++", "cc", "gcc", "clang", "git"):
        check(shutil.which(program) is None, f"PATH: expected no {program}")
    package = Path(pk.__file__).parent
    check(Path(sys.prefix) in package.parents, f"{package} is not in this environment")
    check("cpu" in pk.available_backends(), f"backends: {pk.available_backends()}")
    check("cpu" in pk.backend_for(torch.empty(16, 16, 3, 3), padding=1), "cpu does not serve")

    torch.manual_seed(0)
    plain = pk.preact_resnet(29, fused=False)
    fused = pk.preact_resnet(29)
    fused.load_state_dict(plain.state_dict())
    images = [torch.randn(4, 3, 8, 8) for _ in range(PROBLEMS)]
    converted = pk.convert(copy.deepcopy(plain), example_inputs=(images[0],))
    problems = [oracle.off_kinks(plain, {"x": x}, most=10**6) for x in images]
    for name, model in (("preact_resnet", fused), ("convert", converted)):
        with pk.use_backend("cpu"):
            judgements = oracle.compare(model, plain, problems).judgements.values()
        faults = [f"{name}, {j.fault}" for j in judgements if j.fault]
        check(not faults, "\n".join(faults))
        print(f"{name}: largest share of the budget {max(j.share for j in judgements):.2f}")
    print(
        f"preact_kernels {pk.__version__}: Python {platform.python_version()}, "
        f"torch {torch.__version__}, backends {', '.join(pk.available_backends())}: "
        "preact_resnet(29) and convert agree with plain PyTorch"
    )


main()
