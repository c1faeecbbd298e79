"""Trains with an installed wheel: `make check-wheel` runs this outside the source tree.

PATH has neither a compiler nor git. The environment has the wheel, torch and what torch depends on.
Warnings of preact_kernels are errors.
"""

import copy
import itertools
import platform
import shutil
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk

ROUNDING = torch.finfo(torch.float32).eps / 2


def check(holds, message):
    if not holds:
        sys.exit(f"check_installed.py: {message}")


def train(model, x, target):
    """Return the logits and the gradients of all parameters of one training step."""
    model = copy.deepcopy(model)
    logits = model(x)
    F.cross_entropy(logits, target).backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def is_off_kinks(model, x):
    """Whether rounding decides the sign of no input of a ReLU: there gradients jump."""
    smallest = []
    for norm in filter(lambda module: isinstance(module, nn.BatchNorm2d), model.modules()):
        norm.register_forward_hook(lambda _norm, _inputs, y: smallest.append(float(y.abs().min())))
    with torch.no_grad():
        model(x)
    return min(smallest) > 2e-5


def find_problem():
    """Return a plain network, a batch of images and their classes, off the kinks of all ReLUs."""
    for seed in itertools.count():
        torch.manual_seed(seed)
        x, target = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
        plain = pk.preact_resnet(29, fused=False)
        if is_off_kinks(copy.deepcopy(plain).double(), x.double()):
            return plain, x, target


def main():
    for program in ("c++", "cc", "gcc", "clang", "git"):
        check(shutil.which(program) is None, f"PATH: expected no {program}")
    package = Path(pk.__file__).parent
    check(Path(sys.prefix) in package.parents, f"{package} is not in this environment")
    check("cpu" in pk.available_backends(), f"backends: {pk.available_backends()}")

    plain, x, target = find_problem()
    fused = pk.preact_resnet(29)
    fused.load_state_dict(plain.state_dict())
    truth = train(copy.deepcopy(plain).double(), x.double(), target)
    # PyTorch's own error, the larger of two orders of summation.
    eager = train(plain, x, target)
    reversed_logits, reversed_gradient = train(plain, x.flip(0), target.flip(0))
    eager_runs = eager, (reversed_logits.flip(0), reversed_gradient)
    converted = pk.convert(copy.deepcopy(plain), example_inputs=(x,))
    check("cpu" in pk.backend_for(torch.empty(16, 16, 3, 3), padding=1), "cpu does not serve")
    for name, model in (("preact_resnet", fused), ("convert", converted)):
        with pk.use_backend("cpu"):
            found = train(model, x, target)
        for result, value, exact, *runs in zip(
            ("logits", "gradient"), found, truth, *eager_runs, strict=True
        ):
            own = max((run - exact).norm() for run in runs)
            error, budget = (value - exact).norm(), 2 * own + ROUNDING * exact.norm()
            check(error <= budget, f"{name}, {result}: error {error:.3g}, expected {budget:.3g}")
    print(
        f"preact_kernels {pk.__version__}: Python {platform.python_version()}, "
        f"torch {torch.__version__}, backends {', '.join(pk.available_backends())}: "
        "preact_resnet(29) and convert agree with plain PyTorch"
    )


main()
