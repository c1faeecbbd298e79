"""Replace BatchNorm-ReLU-Conv in your own model, with the same `state_dict`.

Run: python examples/replace_a_block.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preact_kernels as pk


class PlainBlock(nn.Module):
    """A pre-activation block in plain PyTorch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), conv3x3(channels)
        self.bn2, self.conv2 = nn.BatchNorm2d(channels), conv3x3(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(self.bn1(x)))
        return x + self.conv2(F.relu(self.bn2(h)))


class FusedBlock(PlainBlock):
    """The same parameters; each BatchNorm-ReLU-Conv is one operation, the last with residual."""

    def forward(self, x: Tensor) -> Tensor:
        # Created in each call, so that replaced children (SyncBatchNorm, pruning) take effect.
        first = pk.BNReLUConv2d.from_modules(self.bn1, self.conv1)
        second = pk.BNReLUConv2d.from_modules(self.bn2, self.conv2)
        return second(first(x), residual=x)


def conv3x3(channels: int) -> nn.Conv2d:
    """Returns a 3x3 convolution that keeps the shape."""
    return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def network(block: type[nn.Module]) -> nn.Sequential:
    """Returns ten blocks between a stem and a classifier."""
    blocks = [block(32) for _ in range(10)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Returns the gradient of all parameters."""
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def main() -> None:
    """Compares saved bytes, gradients and running statistics of the two networks."""
    torch.manual_seed(0)
    # In float64 the difference is about 1e-15; float32, bfloat16 and float16 work as well.
    plain, fused = network(PlainBlock).double(), network(FusedBlock).double()
    fused.load_state_dict(plain.state_dict())  # strict: the keys are the same
    images, labels = torch.randn(4, 3, 32, 32).double(), torch.randint(10, (4,))

    kept = [pk.saved_bytes(model, images) / 2**20 for model in (plain, fused)]
    print(f"kept for the backward: plain {kept[0]:.1f} MiB, fused {kept[1]:.1f} MiB")
    assert kept[1] < 0.6 * kept[0]

    expected, found = (gradient(model, images, labels) for model in (plain, fused))
    difference = float((found - expected).norm() / expected.norm())
    print(f"gradients differ by {difference:.1e}")
    assert difference < 1e-12

    for name, value in plain.state_dict().items():  # running statistics too
        torch.testing.assert_close(fused.state_dict()[name], value)
    print("running statistics agree")


if __name__ == "__main__":
    main()
