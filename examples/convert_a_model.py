"""Convert a network that does not use this package, and continue its training.

Run: python examples/convert_a_model.py
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preact_kernels as pk


class Block(nn.Module):
    """A pre-activation block, as many projects write it."""

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Conv2d(in_planes, planes, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x + conv2(relu(bn2(conv1(relu(bn1(x))))))`."""
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv2(F.relu(self.bn2(self.conv1(out))))
        out += shortcut
        return out


def main() -> None:
    """Trains the plain and the converted network side by side."""
    torch.manual_seed(0)
    blocks = [Block(16, 16, 1) for _ in range(6)] + [Block(16, 32, 2)]
    blocks += [Block(32, 32, 1) for _ in range(5)]
    head = (nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    plain = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), *blocks, *head)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]

    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    # The optimizer continues with the same parameters.
    pk.convert(model, memory="rebuild", example_inputs=(images,))

    kept = [pk.saved_bytes(m, images) for m in (plain, model)]
    print(
        f"kept for backward: plain {kept[0] / 2**20:.1f} MiB, converted {kept[1] / 2**20:.1f} MiB"
    )
    assert kept[1] < 0.4 * kept[0]

    for step in range(3):
        losses = []
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(m(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"step {step}: loss of plain {losses[0]:.4f}, converted {losses[1]:.4f}")
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
    print(pk.conversion_report(model))  # what ran fused in the last call

    plain.load_state_dict(pk.revert(model).state_dict(), strict=True)


if __name__ == "__main__":
    main()
