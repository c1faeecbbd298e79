"""Peak resident memory of a training step: `python -m bench.peak fused-store ...`.

Runs one contender in its own process. The result is the peak above what the process holds between
steps: it includes activations, gradients and workspace, but not libraries, weights, optimizer state
and compiled code.
"""

import argparse
import gc
import json

import torch

from bench import measure
from bench.contenders import BY_NAME, Network
from bench.network import TrainingStep


def peak_of_step(
    contender: str, network: Network, batch: int, dtype: torch.dtype
) -> dict[str, int]:
    """Runs a warm-up step, resets the peak, and runs another step.

    Returns:
        `peak_bytes` above the resident size between steps, and `peak_raw_bytes` in all.
    """
    device = torch.device("cpu")
    chosen = BY_NAME[contender]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, network.image_size, network.image_size, generator=generator)
    labels = torch.randint(network.classes, (batch,), generator=generator)
    model = chosen.build(network, network.state(), device, dtype)
    step = TrainingStep(model, [(chosen.input(images, device, dtype), labels)])
    step()
    step.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    between_steps = measure.resident_bytes()
    measure.reset_peak()
    step()
    peak = measure.peak_resident_bytes()
    return {"peak_bytes": peak - between_steps, "peak_raw_bytes": peak}


def main() -> None:
    """Prints the result as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.peak", description=__doc__)
    parser.add_argument("contender", choices=list(BY_NAME))
    parser.add_argument("--network", default="resnet-164")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--dtype", default="float32")
    a = parser.parse_args()
    dtype = getattr(torch, a.dtype)
    network = Network.named(a.network, a.classes)
    print(json.dumps(peak_of_step(a.contender, network, a.batch, dtype)))


if __name__ == "__main__":
    main()
