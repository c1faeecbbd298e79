"""A training step as one CUDA graph; on a CPU, the step runs without a graph.

Run: python examples/graphed_step.py
"""

import time

import torch
from torch import Tensor
from torch.nn import functional as F

import preact_kernels as pk

STEPS = 5


def main() -> None:
    """Compares the losses of a few steps with plain PyTorch."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = pk.preact_resnet(29, block="bottleneck", fused=False).to(device)
    model = pk.preact_resnet(29, block="bottleneck").to(device)
    model.load_state_dict(plain.state_dict())
    batches = [
        (torch.randn(16, 3, 32, 32, device=device), torch.randint(10, (16,), device=device))
        for _ in range(STEPS)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    step = pk.graphed_step(model, F.cross_entropy, optimizer, *batches[0])

    def plain_step(images: Tensor, labels: Tensor) -> Tensor:
        plain_optimizer.zero_grad()
        loss = F.cross_entropy(plain(images), labels)
        loss.backward()
        plain_optimizer.step()
        return loss.detach()

    for index, (images, labels) in enumerate(batches):
        start_s = time.perf_counter()
        loss = float(step(images, labels))
        ms = (time.perf_counter() - start_s) * 1e3
        expected = float(plain_step(images, labels))
        print(f"step {index}: loss {loss:.4f} (plain {expected:.4f}), {ms:.1f} ms")
        assert abs(loss - expected) <= 1e-2 * expected
    print("captured" if device.type == "cuda" else "uncaptured: no GPU")


if __name__ == "__main__":
    main()
