"""Compares every contender with plain PyTorch in float64 before it is timed.

Relative errors of losses, logits and gradients (root mean square over the parameters, each with the
same weight) may be at most twice the errors of eager PyTorch in the same dtype (the larger of its
two memory formats), plus one rounding of the dtype. No gradient's error may exceed twice eager's
worst. Errors of gradients may always be up to `ALLOWED`, because eager may be lucky. Weights and
images are rounded to the dtype first.

In float32, networks of up to 110 or 164 layers are checked. In half precision and TF32, rounding
turns the gradient of such deep networks by up to 90 degrees, so the smallest network with every
kind of block is checked, as it is for other families in every dtype. Rounding also decides the sign
of ReLU inputs near zero, more in each block, so the last batch norm of every block is scaled by
`DAMPING`: then eager's gradients in bfloat16 have a relative error of 0.2, else 0.6 to 1.1.

With damped blocks, a fault of 5% in every block is smaller than the rounding of the logits. So in
half precision and TF32 every stage is also compared alone, without damping, on a random input and a
random output gradient; batch-norm biases of `STAGE_BIAS` keep values away from zero. The largest
error of all stages counts.

Under TF32, cuDNN may or may not round the operands of convolutions to 11 bits: eager may be exact
where the fused kernels round. So eager PyTorch in float16, which also has 11 bits, is a third
baseline, and one rounding is 2**-11.
"""

import dataclasses
import functools
import gc
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench import measure
from bench.contenders import BY_NAME, Contender, Network, State
from preact_kernels.study import data

ALLOWED = {"gradients": 5e-3, "the worst gradient": 0.5}  # even if eager's error is far smaller
DAMPING = 0.1
STAGE_BIAS = 2.0  # batch-norm bias in stages that are compared alone
EAGER = (BY_NAME["eager-nchw"], BY_NAME["eager-channels-last"])
SMALLEST = {
    "resnet": {"basic": 14, "bottleneck": 29},
    "preact-resnet": {"basic": 18, "bottleneck": 50},
    "wrn": {"basic": 16},
    "imagenet-resnet": {"basic": 18, "bottleneck": 50},
}
"""Depth of the smallest network with each kind of block, by family.

At these depths `pk.preact_resnet` chooses that kind of block.
"""

digits = functools.cache(data.load_digits)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether the results of a contender are correct, and their errors."""

    correct: str  # "yes" or "no"
    note: str  # what is wrong, or ""
    deviations: dict[str, float]  # relative error by quantity


def is_tf32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether convolutions may round their float32 operands to TF32."""
    return dtype == torch.float32 and device.type == "cuda" and torch.backends.cudnn.allow_tf32


def compares_stages(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every stage is compared, because rounding hides faults in a whole network."""
    return dtype.itemsize < 4 or is_tf32(dtype, device)


def judged_network(network: Network, dtype: torch.dtype, device: torch.device) -> Network:
    """Returns the network that is checked before `network` is timed."""
    block = network.block
    depth = SMALLEST[network.family][block]
    if network.family == "resnet" and not compares_stages(dtype, device):
        depth = min(network.depth, {"basic": 110, "bottleneck": 164}[block])
    return dataclasses.replace(network, depth=depth)


def damped(state: State) -> State:
    """Returns `state` with the last batch norm of every block scaled by `DAMPING`."""
    is_bottleneck = any(key.endswith("bn3.weight") for key in state)
    last = "bn3.weight" if is_bottleneck else "bn2.weight"
    return {k: v * DAMPING if k.endswith(last) else v for k, v in state.items()}


def biased(state: State) -> State:
    """Returns `state` with batch-norm biases of `STAGE_BIAS`: one ReLU input in 40 is negative."""
    return {
        k: torch.full_like(v, STAGE_BIAS) if ".bn" in k and k.endswith("bias") else v
        for k, v in state.items()
    }


Results = list[dict[str, list[Tensor]]]
"""Tensors by quantity, in float64 on the CPU: for the network, then for each stage."""


def deviations(found: Results, truth: Results) -> dict[str, float]:
    """Returns `|found - truth| / |truth|` by quantity, NaN if one is NaN.

    It is the root mean square over the tensors of a quantity, and the largest over the stages.
    """
    worst: dict[str, float] = {}
    for one, exact in zip(found, truth, strict=True):
        for name, tensors in one.items():
            pairs = zip(tensors, exact[name], strict=True)
            off = [float((f - t).norm() / t.norm()) for f, t in pairs]
            mean = math.sqrt(sum(o * o for o in off) / len(off))
            worst[name] = float(np.maximum(mean, worst.get(name, 0.0)))  # keeps NaN
            if name == "gradients":
                worst["the worst gradient"] = max(off)
    return worst


@dataclasses.dataclass(frozen=True)
class Problem:
    """Weights and inputs for every contender, rounded to the dtype that is checked."""

    network: Network
    device: torch.device
    state: State  # weights of the network
    images: Tensor  # [N, 3, H, W]
    labels: Tensor  # [N] int64
    stage_tensors: list[tuple[Tensor, Tensor]]  # input and output gradient of each stage

    @classmethod
    def of(
        cls, network: Network, batch: int, device: torch.device, dtype: torch.dtype
    ) -> "Problem":
        """Creates the problem for checks in `dtype`."""
        images, labels = data.Batches(digits(), batch, seed=1, size=network.image_size)[0]
        state = {
            name: value.to(dtype).to(value.dtype) if value.ndim > 1 else value
            for name, value in network.state().items()
        }
        stage_tensors = []
        if compares_stages(dtype, device):
            generator = torch.Generator().manual_seed(2)
            stage_tensors = [
                (
                    torch.randn(x_shape, generator=generator).to(dtype),
                    torch.randn(y_shape, generator=generator).to(dtype),
                )
                for x_shape, y_shape in stage_shapes(network, batch)
            ]
        return cls(network, device, state, images.to(dtype), labels, stage_tensors)

    def results(self, contender: Contender, dtype: torch.dtype) -> Results:
        """Computes the results of `contender` with activations of `dtype`."""
        found = [self._network_results(contender, dtype)]
        if self.stage_tensors:
            found += self._stage_results(contender, dtype)
        measure.synchronize(self.device)  # a kernel that failed raises here
        gc.collect()  # compiled and patched models are in reference cycles
        return found

    def _network_results(self, contender: Contender, dtype: torch.dtype) -> dict:
        model = contender.build(self.network, damped(self.state), self.device, dtype)
        logits = model(contender.input(self.images, self.device, dtype))
        wide = logits.float() if dtype.itemsize < 4 else logits
        losses = F.cross_entropy(wide, self.labels.to(self.device), reduction="none")
        losses.mean().backward()
        gradients = [_exact(p.grad) for p in model.parameters()]
        return {"losses": [_exact(losses)], "logits": [_exact(logits)], "gradients": gradients}

    def _stage_results(self, contender: Contender, dtype: torch.dtype) -> Iterator[dict]:
        model = contender.build(self.network, biased(self.state), self.device, dtype)
        for stage, tensors in zip(model.stages, self.stage_tensors, strict=True):
            # Copies, because a contender may change its input.
            x, dy = (contender.input(t, self.device, dtype).clone() for t in tensors)
            y = stage(x.requires_grad_())
            dx, *found = torch.autograd.grad(y, [x, *stage.parameters()], dy)
            gradients = [_exact(g) for g in found]
            yield {
                "stage outputs": [_exact(y)],
                "stage input gradients": [_exact(dx)],
                "stage conv gradients": [g for g in gradients if g.ndim == 4],
                "stage bn gradients": [g for g in gradients if g.ndim == 1],
            }


def stage_shapes(network: Network, batch: int) -> list[tuple[torch.Size, torch.Size]]:
    """Returns the shapes of input and output of every stage."""
    shapes = []
    with torch.device("meta"):
        model = network.model(fused=False)
        for stage in model.stages:
            stage.register_forward_hook(lambda _, x, y: shapes.append((x[0].shape, y.shape)))
        model(torch.empty(batch, 3, network.image_size, network.image_size))
    return shapes


def _exact(found: Tensor) -> Tensor:
    return found.detach().double().cpu()


def judge(
    contender: Contender,
    network: Network,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Verdict:
    """Checks a contender before it is timed on `network`, with activations of `dtype`.

    Runs `judged_network(network, ...)`. Errors of the contender are not caught.
    """
    network = judged_network(network, dtype, device)
    expected = _expected(network, batch, device, dtype, is_tf32(dtype, device))
    if contender in EAGER:
        found = expected.eager[contender.name]
    else:
        found = deviations(expected.problem.results(contender, dtype), expected.truth)
    wrong = [
        f"{name} deviates by {off:.1e} from float64, allowed {expected.budget[name]:.1e}"
        for name, off in found.items()
        if not off <= expected.budget[name]  # NaN is wrong
    ]
    if wrong:
        return Verdict("no", f"wrong results on {network.name}: {'; '.join(wrong)}", found)
    return Verdict("yes", "", found)


class Expected(NamedTuple):
    """Results and errors that contenders are compared with."""

    problem: Problem
    truth: Results
    eager: dict[str, dict[str, float]]  # errors of eager PyTorch, by contender and quantity
    budget: dict[str, float]  # allowed errors, by quantity


@functools.lru_cache(maxsize=1)  # `judge` is called for one contender at a time
def _expected(
    network: Network, batch: int, device: torch.device, dtype: torch.dtype, in_tf32: bool
) -> Expected:
    problem = Problem.of(network, batch, device, dtype)
    truth = problem.results(EAGER[0], torch.float64)
    eager = {c.name: deviations(problem.results(c, dtype), truth) for c in EAGER}
    baselines, rounding = list(eager.values()), torch.finfo(dtype).eps
    if in_tf32:
        baselines.append(deviations(problem.results(EAGER[-1], torch.float16), truth))
        rounding = 2.0**-11
    budget = {
        name: max(2 * max(errors[name] for errors in baselines) + rounding, ALLOWED.get(name, 0.0))
        for name in baselines[0]
    }
    return Expected(problem, truth, eager, budget)
