"""Compares every contender with plain PyTorch in float64 before it is timed.

The relative errors of the losses, the logits and the gradients of parameters (their root mean
square, so that every parameter counts alike) may be at most twice those of eager PyTorch in the
same dtype (the larger one of its two memory formats), plus one rounding of the dtype. No gradient
may be off by more than twice eager's worst. Weights and images are rounded to the dtype first. In
float32 this is checked on up to 110 or 164 layers. In half precision and TF32, rounding turns the
gradient of so deep a network by up to 90 degrees, so the smallest network with every kind of block
is checked instead, as for other families in every dtype.

Rounding also decides which way a ReLU near zero goes. In float32 few do, and eager may be lucky:
gradients may always be off by `ALLOWED`. In bfloat16 many do, and every block adds to that: eager's
gradients of 29 layers would be off by 0.6 of their norm, of ImageNet's 50 by 1.1, and the check
would find little. So the last batch norm of every block is scaled by `DAMPING`: 0.17 and 0.22.

That still hides faults: with damped blocks, 5% of every block's last convolution changes the logits
by less than one rounding. So in half precision and TF32 every stage of the network is compared on
its own too, without damping, on a random input and a random output gradient: its output and the
gradients of its input, its convolutions and its batch norms (the last two as root mean squares over
the parameters). The largest error over the stages counts. Batch-norm biases of `STAGE_BIAS` keep
values away from zero. In bfloat16, eager's gradients of convolutions are then off by 0.03 of their
norm, without biases by 0.12.

Under TF32, cuDNN may round the operands of convolutions to 11 bits, or not: eager may be exact
where the fused kernels round. So eager PyTorch in float16, which also has 11 bits, is a third
baseline, and one rounding is 2**-11. On 29 layers, gradients in float16 are off by 0.06, with
operands in TF32 by 0.05. Gradients in float16 do not underflow: scaling the loss by 1024 does
not change two digits of the error, on 29 layers and on ImageNet's 50.
"""

import dataclasses
import functools
import gc
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import preact_kernels as pk
from bench import measure
from bench.contenders import BY_NAME, Contender, Network, State
from preact_kernels.study import data

QUANTITIES = ("losses", "logits", "gradients", "the worst gradient")
STAGE_QUANTITIES = (
    "stage outputs",
    "stage input gradients",
    "stage conv gradients",
    "stage bn gradients",
)
ALLOWED = (0.0, 0.0, 5e-3, 0.5)  # of QUANTITIES, even if eager's error is far smaller
DAMPING = 0.1
STAGE_BIAS = 2.0  # of every batch norm of a stage that is compared on its own
EAGER = (BY_NAME["eager-nchw"], BY_NAME["eager-channels-last"])
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


def is_tf32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether convolutions may round their float32 operands to TF32."""
    return dtype == torch.float32 and device.type == "cuda" and torch.backends.cudnn.allow_tf32


def compares_stages(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every stage is compared, because rounding hides faults in a whole network."""
    return dtype.itemsize < 4 or is_tf32(dtype, device)


def judged_network(network: Network, dtype: torch.dtype, device: torch.device) -> Network:
    """The network on which contenders are checked before `network` is timed."""
    block = network.block
    depth = SMALLEST[network.family][block]
    if network.family == "resnet" and not compares_stages(dtype, device):
        depth = min(network.depth, {"basic": 110, "bottleneck": 164}[block])
    return dataclasses.replace(network, depth=depth)


def damped(state: State) -> State:
    """`state`, with the last batch norm of every block scaled by `DAMPING`."""
    is_bottleneck = any(key.endswith("bn3.weight") for key in state)
    last = "bn3.weight" if is_bottleneck else "bn2.weight"
    return {k: v * DAMPING if k.endswith(last) else v for k, v in state.items()}


def biased(state: State) -> State:
    """`state`, with batch-norm biases of `STAGE_BIAS`: only one ReLU in 40 sees a negative."""
    return {
        k: torch.full_like(v, STAGE_BIAS) if ".bn" in k and k.endswith("bias") else v
        for k, v in state.items()
    }


class StageResults(NamedTuple):
    """Results of one stage, in float64 on the CPU."""

    output: Tensor  # [N, C, H, W]
    input_gradient: Tensor  # [N, C', H', W']
    conv_gradients: list[Tensor]
    bn_gradients: list[Tensor]

    def deviations(self, truth: "StageResults") -> tuple[float, ...]:
        """Relative errors, in the order of `STAGE_QUANTITIES`."""
        return (
            deviation(self.output, truth.output),
            deviation(self.input_gradient, truth.input_gradient),
            root_mean_square(deviation_of_each(self.conv_gradients, truth.conv_gradients)),
            root_mean_square(deviation_of_each(self.bn_gradients, truth.bn_gradients)),
        )


class Results(NamedTuple):
    """What is compared, in float64 on the CPU."""

    losses: Tensor  # [N]
    logits: Tensor  # [N, classes]
    gradients: list[Tensor]  # of the parameters
    stages: list[StageResults]  # empty if they are not compared

    def deviations(self, truth: "Results") -> dict[str, float]:
        """Relative errors by quantity; those of stages are the largest over the stages."""
        off = deviation_of_each(self.gradients, truth.gradients)
        whole = (
            deviation(self.losses, truth.losses),
            deviation(self.logits, truth.logits),
            root_mean_square(off),  # NaN if one is
            max(off),
        )
        by_name = dict(zip(QUANTITIES, whole, strict=True))
        each = [s.deviations(t) for s, t in zip(self.stages, truth.stages, strict=True)]
        if each:
            worst = torch.tensor(each, dtype=torch.float64).amax(0)  # NaN if one is
            by_name |= zip(STAGE_QUANTITIES, worst.tolist(), strict=True)
        return by_name


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every contender computes. Its numbers are rounded to the dtype that is checked."""

    network: Network
    device: torch.device
    state: State  # weights of the network
    images: Tensor  # [N, 3, H, W]
    labels: Tensor  # [N] int64
    stage_tensors: list[tuple[Tensor, Tensor]]  # input and output gradient of each stage

    @classmethod
    def of(
        cls,
        network: Network,
        images_source: data.Images,
        batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "Problem":
        """The problem on which contenders are checked in `dtype`."""
        images, labels = data.Batches(images_source, batch, seed=1, size=network.image_size)[0]
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
        """What `contender` computes with activations of `dtype`."""
        with measure.running(contender.name, self.device):
            found = Results(*self._network_results(contender, dtype), [])
            if self.stage_tensors:
                found.stages.extend(self._stage_results(contender, dtype))
            measure.synchronize(self.device)  # attributes a failed kernel to this contender
        gc.collect()  # compiled and patched models are in reference cycles
        return found

    def _network_results(
        self, contender: Contender, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        model = contender.build(self.network, damped(self.state), self.device, dtype)
        logits = model(contender.input(self.images, self.device, dtype))
        wide = logits.float() if dtype.itemsize < 4 else logits
        losses = F.cross_entropy(wide, self.labels.to(self.device), reduction="none")
        losses.mean().backward()
        return _exact(losses), _exact(logits), [_exact(p.grad) for p in model.parameters()]

    def _stage_results(self, contender: Contender, dtype: torch.dtype) -> Iterator[StageResults]:
        model = contender.build(self.network, biased(self.state), self.device, dtype)
        (resnet,) = (m for m in model.modules() if isinstance(m, pk.PreActResNet))
        for stage, tensors in zip(resnet.stages, self.stage_tensors, strict=True):
            # Copies: a contender that changes them must not change those of the next.
            x, dy = (contender.input(t, self.device, dtype).clone() for t in tensors)
            yield stage_results(stage, x, dy)


def stage_shapes(network: Network, batch: int) -> list[tuple[torch.Size, torch.Size]]:
    """The shapes of the input and of the output of every stage."""
    shapes = []
    with torch.device("meta"):
        model = network.model(fused=False)
        for stage in model.stages:
            stage.register_forward_hook(lambda _, x, y: shapes.append((x[0].shape, y.shape)))
        model(torch.empty(batch, 3, network.image_size, network.image_size))
    return shapes


def stage_results(stage: nn.Module, x: Tensor, dy: Tensor) -> StageResults:
    """The results of a stage on the input `x` and the output gradient `dy`."""
    parameters = list(stage.parameters())
    x.requires_grad_()
    y = stage(x)
    # Not `y.backward`: DistributedDataParallel would count its gradients.
    dx, *found = torch.autograd.grad(y, [x, *parameters], dy)
    gradients = [_exact(g) for g in found]
    return StageResults(
        _exact(y),
        _exact(dx),
        [g for g in gradients if g.ndim == 4],
        [g for g in gradients if g.ndim == 1],
    )


def _exact(found: Tensor) -> Tensor:
    return found.detach().double().cpu()


def deviation(found: Tensor, truth: Tensor) -> float:
    """`|found - truth| / |truth|`, Euclidean."""
    return float((found - truth).norm() / truth.norm())


def deviation_of_each(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """The deviations of several tensors."""
    return [deviation(*pair) for pair in zip(found, truth, strict=True)]


def root_mean_square(values: Sequence[float]) -> float:
    """The root of the mean of the squares."""
    return math.sqrt(sum(v * v for v in values) / len(values))


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
    expected = _expected(network, images_source, batch, device, dtype, is_tf32(dtype, device))
    verdicts = {}
    with tqdm(contenders, desc=f"correct on {network.name}, {dtype}", leave=False) as bar:
        for contender in bar:
            bar.set_postfix_str(contender.name)
            if contender in EAGER:
                deviations = expected.eager[contender.name]
            else:
                try:
                    found = expected.problem.results(contender, dtype)
                    deviations = found.deviations(expected.truth)
                except measure.DeviceLost:
                    raise
                except Exception as error:  # a failed rival does not end the run
                    reason = f"failed: {first_line(error)}"
                    verdicts[contender.name] = Verdict("no", reason, {})
                    continue
            verdicts[contender.name] = _verdict(contender, deviations, expected.budget, network)
    return verdicts


class Expected(NamedTuple):
    """What contenders are compared with."""

    problem: Problem
    truth: Results
    eager: dict[str, dict[str, float]]  # errors of eager PyTorch, by contender and quantity
    budget: dict[str, float]  # allowed errors, by quantity


@functools.lru_cache(maxsize=1)  # on a GPU, `judge` is called for one contender at a time
def _expected(
    network: Network,
    images_source: data.Images,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    in_tf32: bool,
) -> Expected:
    problem = Problem.of(network, images_source, batch, device, dtype)
    truth = problem.results(EAGER[0], torch.float64)
    eager = {c.name: problem.results(c, dtype).deviations(truth) for c in EAGER}
    baselines, rounding = list(eager.values()), torch.finfo(dtype).eps
    if in_tf32:
        baselines.append(problem.results(EAGER[-1], torch.float16).deviations(truth))
        rounding = 2.0**-11
    allowed = dict(zip(QUANTITIES, ALLOWED, strict=True))
    budget = {
        name: max(2 * max(errors[name] for errors in baselines) + rounding, allowed.get(name, 0.0))
        for name in baselines[0]
    }
    return Expected(problem, truth, eager, budget)


def _verdict(
    contender: Contender, deviations: dict[str, float], budget: dict[str, float], network: Network
) -> Verdict:
    if not contender.same_function:
        return Verdict("another function", "computes another function by design", deviations)
    wrong = [
        f"{name} deviates by {found:.1e} from float64, allowed {budget[name]:.1e}"
        for name, found in deviations.items()
        if not found <= budget[name]  # NaN is wrong
    ]
    if wrong:
        return Verdict("no", f"wrong results on {network.name}: {'; '.join(wrong)}", deviations)
    return Verdict("yes", "", deviations)
