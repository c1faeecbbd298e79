"""Replace BatchNorm-ReLU-Conv in a model of your own, with the same `state_dict`.

Run: python examples/replace_a_block.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preact_kernels as pk


class PlainBlock(nn.Module):
    """A pre-activation block as it is usually written."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), conv3x3(channels)
        self.bn2, self.conv2 = nn.BatchNorm2d(channels), conv3x3(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(self.bn1(x)))
        return x + self.conv2(F.relu(self.bn2(h)))


class FusedBlock(PlainBlock):
    """The same parameters; each BatchNorm-ReLU-Conv, and the addition, is one operation."""

    def forward(self, x: Tensor) -> Tensor:
        h = pk.BNReLUConv2d.from_modules(self.bn1, self.conv1)(x)
        return pk.BNReLUConv2d.from_modules(self.bn2, self.conv2)(h, residual=x)


def conv3x3(channels: int) -> nn.Conv2d:
    """A convolution that keeps the shape."""
    return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def network(block: type[nn.Module]) -> nn.Sequential:
    """Ten blocks between a stem and a classifier."""
    blocks = [block(32) for _ in range(10)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of all parameters, in float64."""
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def main() -> None:
    """Compares kept bytes, gradients and running statistics of the two networks."""
    torch.manual_seed(0)
    plain, fused, truth = network(PlainBlock), network(FusedBlock), network(PlainBlock).double()
    fused.load_state_dict(plain.state_dict())  # strict: the keys are the same
    truth.load_state_dict(plain.state_dict())
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))

    kept = [pk.saved_bytes(model, images) / 2**20 for model in (plain, fused)]
    print(f"kept for the backward: plain {kept[0]:.1f} MiB, fused {kept[1]:.1f} MiB")
    assert kept[1] < 0.6 * kept[0]

    exact = gradients(truth, images.double(), labels)
    errors = [
        float((gradients(model, images, labels) - exact).norm() / exact.norm())
        for model in (plain, fused)
    ]
    print(f"gradient, distance from float64: plain {errors[0]:.1e}, fused {errors[1]:.1e}")
    assert errors[1] <= 2 * errors[0] + torch.finfo(torch.float32).eps

    for name, expected in plain.state_dict().items():  # running statistics too
        torch.testing.assert_close(fused.state_dict()[name], expected, msg=name)
    print("same keys, gradients and running statistics")


if __name__ == "__main__":
    main()
