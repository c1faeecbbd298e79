"""Small and published models for tests of conversion."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from testbed import published_models as foreign

MODES = ("store", "rebuild", "checkpoint")


def between_blocks():
    """Stochastic depth, gates and attention behind the convolutions, and biased convolutions."""
    blocks = [foreign.BranchBlock(8, 8, 1, foreign.DropPath(0.5)), foreign.Attention(32)]
    blocks += [foreign.BranchBlock(32, 8, 1, foreign.SqueezeExcite(32))]
    return foreign.network_of(*blocks, foreign.BiasedWideBlock(32, 32))


class PostActBlock(nn.Module):
    """A block of ResNet v1."""

    def __init__(self, in_channels, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(channels, affine=False)
        self.downsample = nn.Sequential(
            nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = F.dropout(self.bn2(self.conv2(out)), 0.3, self.training)
        return self.relu(out + self.downsample(x))


def post_activation():
    return foreign.network_of(PostActBlock(8, 32), PostActBlock(32, 32))


# Constructor, size of the images, number of batch norms, number of fused batch norms.
SMALL = {
    "functional-bottleneck": (
        lambda: foreign.FunctionalNet(foreign.FunctionalBottleneck, (2, 3), 8),
        16,
        15,
        15,
    ),
    "wide": (lambda: foreign.WideResNet(10, 1), 16, 7, 7),
    "dense": (lambda: foreign.DenseNet(22, 6), 16, 21, 21),
    "deep": (lambda: foreign.DeepNet(29, 8), 16, 28, 28),
    "between blocks": (between_blocks, 8, 9, 9),
    "post-activation": (post_activation, 8, 7, 5),
}


PUBLISHED = {
    "preact-resnet-18": (lambda: foreign.FunctionalNet(), 16, 16, 16),
    "wrn-28-10": (lambda: foreign.WideResNet(28, 10), 8, 25, 25),
    "densenet-bc-100-12": (lambda: foreign.DenseNet(100, 12), 8, 99, 99),
    "deep-1001": (lambda: foreign.DeepNet(1001), 8, 1000, 1000),
    "timm-resnetv2-50": (lambda: foreign.timm_model("resnetv2_50"), 64, 49, 49),
    "timm-resnetv2-101": (lambda: foreign.timm_model("resnetv2_101"), 64, 100, 100),
    "timm-densenet-121": (lambda: foreign.timm_model("densenet121"), 64, 121, 121),
    "timm-wide-resnet-50-2": (lambda: foreign.timm_model("wide_resnet50_2"), 64, 53, 33),
    "torchvision-densenet-121": (lambda: foreign.torchvision_models().densenet121(), 64, 121, 121),
    "torchvision-resnet-50": (lambda: foreign.torchvision_models().resnet50(), 64, 53, 33),
}

MODELS = SMALL | PUBLISHED


def built(name):
    """Returns a model with random affine parameters, and a batch of images for it."""
    build, size, *_ = MODELS[name]
    torch.manual_seed(1)
    try:
        model = build()
    except ImportError as error:
        pytest.skip(f"not installed: {error.name}")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return model, torch.randn(4, 3, size, size)


def small():
    """Returns a network with a run of blocks and a final batch norm, and images."""
    return built("functional-bottleneck")


class Block(nn.Module):
    """Batch norm, ReLU and convolution."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(F.relu(self.bn(x)))


class Chain(nn.Sequential):
    def forward(self, x):
        return super().forward(x)
