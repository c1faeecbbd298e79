"""Compares every contender with plain PyTorch in float64 before it is timed.

The relative errors of the losses, the logits and the gradients of parameters (their root mean
square, so that every parameter counts alike) may be at most twice those of eager PyTorch in the
same dtype (the larger one of its two memory formats), plus one rounding of the dtype. No gradient
may be off by more than twice eager's worst. In float32 this is checked on up to 110 or 164 layers.
In half precision and TF32, rounding turns the gradient of so deep a network by up to 90 degrees, so
the smallest network with every kind of block is checked instead, as for other families in every
dtype.

Rounding also decides which way a ReLU near zero goes. In float32 few do, and eager may be lucky:
gradients may always be off by `ALLOWED`. In bfloat16 many do, and every block adds to that: eager's
gradients of 29 layers would be off by 0.6 of their norm, of ImageNet's 50 by 1.1, and the check
would find little. So the last batch norm of every block is scaled by `DAMPING`: 0.17 and 0.22.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from bench import measure
from bench.contenders import BY_NAME, Contender, Network, State
from preact_kernels.study import data

QUANTITIES = ("losses", "logits", "gradients", "the worst gradient")
ALLOWED = (0.0, 0.0, 5e-3, 0.5)  # of each, even if eager's error is far smaller
DAMPING = 0.1
SMALLEST = {
    "resnet": {"basic": 14, "bottleneck": 29},
    "preact-resnet": {"basic": 18, "bottleneck": 50},
    "wrn": {"basic": 16},
    "imagenet-resnet": {"basic": 18, "bottleneck": 50},
}
"""Depths of the smallest networks with every kind of block, by family.

`pk.preact_resnet` chooses that kind of block at that depth: of 20 layers, it makes basic blocks.
"""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether the results of a contender are correct, and their errors."""

    correct: str  # "yes", "no" or "another function"
    note: str  # what is wrong, or ""
    deviations: dict[str, float]  # relative error by quantity

    @property
    def may_show_speed(self) -> bool:
        """Whether the contender may be timed."""
        return self.correct != "no"


def judged_network(network: Network, dtype: torch.dtype, device: torch.device) -> Network:
    """The network on which contenders are checked before `network` is timed."""
    block = network.block
    depth = SMALLEST[network.family][block]
    is_tf32 = dtype == torch.float32 and device.type == "cuda" and torch.backends.cudnn.allow_tf32
    if network.family == "resnet" and dtype.itemsize >= 4 and not is_tf32:
        depth = min(network.depth, {"basic": 110, "bottleneck": 164}[block])
    return dataclasses.replace(network, depth=depth)


def damped_state(network: Network) -> State:
    """The network's weights, with the last batch norm of every block scaled by `DAMPING`."""
    last = "bn3.weight" if network.block == "bottleneck" else "bn2.weight"
    return {k: v * DAMPING if k.endswith(last) else v for k, v in network.state().items()}


class Results(NamedTuple):
    """What is compared, in float64."""

    losses: Tensor  # [N]
    logits: Tensor  # [N, classes]
    gradients: list[Tensor]  # of the parameters

    def deviations(self, truth: "Results") -> tuple[float, ...]:
        """Relative errors, in the order of `QUANTITIES`."""
        off = [deviation(*pair) for pair in zip(self.gradients, truth.gradients, strict=True)]
        return (
            deviation(self.losses, truth.losses),
            deviation(self.logits, truth.logits),
            math.sqrt(sum(d * d for d in off) / len(off)),
            math.nan if any(map(math.isnan, off)) else max(off),
        )


def results(
    contender: Contender,
    network: Network,
    state: State,
    images: Tensor,
    labels: Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> Results:
    """The results of one pass.

    Args:
        contender: what runs `network`.
        network: what to run.
        state: its weights.
        images: `[N, 3, H, W]` float32, of the network's image size.
        labels: `[N]` int64.
        device: where to run.
        dtype: of the activations.
    """
    model = contender.build(network, state, device, dtype)
    logits = model(contender.input(images, device, dtype))
    wide = logits.float() if dtype.itemsize < 4 else logits
    losses = F.cross_entropy(wide, labels.to(device), reduction="none")
    losses.mean().backward()
    gradients = [p.grad.double() for p in model.parameters()]
    measure.synchronize(device)  # attributes a failed kernel to this contender
    return Results(losses.detach().double(), logits.detach().double(), gradients)


def deviation(found: Tensor, truth: Tensor) -> float:
    """`|found - truth| / |truth|`, Euclidean."""
    return float((found - truth).norm() / truth.norm())


def first_line(error: Exception) -> str:
    """The type of an error and the start of its message."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}"


def judge(
    contenders: list[Contender],
    network: Network,
    images_source: data.Images,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Verdict]:
    """Checks contenders that will be timed on `network`.

    Args:
        contenders: what to check.
        network: what they will be timed on; see `judged_network`.
        images_source: source of the batch.
        batch: images in the batch.
        device: where to run.
        dtype: of the activations.

    Returns:
        Verdicts by name. If a contender raises, its verdict is "no" and names the exception.

    Raises:
        DeviceLost: a contender broke the GPU context.
    """
    network = judged_network(network, dtype, device)
    state = damped_state(network)
    images, labels = data.Batches(images_source, batch, seed=1, size=network.image_size)[0]

    def run(contender: Contender, in_dtype: torch.dtype) -> Results:
        return results(contender, network, state, images, labels, device, in_dtype)

    eager = [BY_NAME["eager-nchw"], BY_NAME["eager-channels-last"]]
    with measure.running(eager[0].name, device):
        truth = run(eager[0], torch.float64)
    own: dict[str, tuple[float, ...]] = {}
    verdicts = {}
    order = [*eager, *(c for c in contenders if c not in eager)]
    with tqdm(order, desc=f"correct on {network.name}, {dtype}", leave=False) as bar:
        for contender in bar:
            bar.set_postfix_str(contender.name)
            try:
                with measure.running(contender.name, device):
                    found = run(contender, dtype)
            except measure.DeviceLost:
                raise
            except Exception as error:  # a failed rival does not end the run
                if contender in eager:
                    raise
                verdicts[contender.name] = Verdict("no", f"failed: {first_line(error)}", {})
                continue
            deviations = found.deviations(truth)
            if contender in eager:
                own[contender.name] = deviations
            budget = [
                max(2 * max(column) + torch.finfo(dtype).eps, allowed)
                for column, allowed in zip(zip(*own.values(), strict=True), ALLOWED, strict=True)
            ]
            verdicts[contender.name] = _verdict(contender, deviations, budget, network)
    return {c.name: verdicts[c.name] for c in contenders}


def _verdict(
    contender: Contender, deviations: Sequence[float], budget: list[float], network: Network
) -> Verdict:
    by_name = dict(zip(QUANTITIES, deviations, strict=True))
    if not contender.same_function:
        return Verdict("another function", "computes another function by design", by_name)
    wrong = [
        f"{name} deviates by {found:.1e} from float64, allowed {allowed:.1e}"
        for (name, found), allowed in zip(by_name.items(), budget, strict=True)
        if not found <= allowed  # NaN is wrong
    ]
    if wrong:
        return Verdict("no", f"wrong results on {network.name}: {'; '.join(wrong)}", by_name)
    return Verdict("yes", "", by_name)
