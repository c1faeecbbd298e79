"""Models that do not use this package, for tests and benchmarks of conversion.

Widths and depths of published networks are arguments, so that tests can take small ones.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FunctionalBlock(nn.Module):
    """Basic block with functional activations; it has a shortcut container only if needed."""

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out += shortcut
        return out


class FunctionalBottleneck(nn.Module):
    """Bottleneck with functional activations; it has a shortcut container only if needed."""

    expansion = 4

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        width = self.expansion * planes
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, width, 1, bias=False)
        if stride != 1 or in_planes != width:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, width, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out = self.conv3(F.relu(self.bn3(out)))
        out += shortcut
        return out


class FunctionalNet(nn.Module):
    """PreActResNet for CIFAR: `(2, 2, 2, 2)` and 64 planes are PreActResNet-18."""

    def __init__(self, block=FunctionalBlock, counts=(2, 2, 2, 2), planes: int = 64) -> None:
        super().__init__()
        self.in_planes = planes
        self.conv1 = nn.Conv2d(3, planes, 3, 1, 1, bias=False)
        for index, count in enumerate(counts):
            strides = [1 if index == 0 else 2] + [1] * (count - 1)
            layer = self._make_layer(block, planes * 2**index, strides)
            setattr(self, f"layer{index + 1}", layer)
        self.linear = nn.Linear(self.in_planes, 10)

    def _make_layer(self, block, planes: int, strides: list[int]) -> nn.Sequential:
        layers = []
        for stride in strides:
            layers.append(block(self.in_planes, planes, stride))
            self.in_planes = planes * block.expansion
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        for index in range(1, 5):
            if hasattr(self, f"layer{index}"):
                out = getattr(self, f"layer{index}")(out)
        out = F.adaptive_avg_pool2d(out, 1)
        out = out.view(out.size(0), -1)
        return self.linear(out)


class WideBlock(nn.Module):
    """Block of a WideResNet: in-place ReLU modules, dropout between the convolutions."""

    def __init__(self, in_planes: int, planes: int, stride: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.dropout = dropout
        self.is_equal = in_planes == planes
        self.projection = (
            None if self.is_equal else nn.Conv2d(in_planes, planes, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_equal:
            x = self.relu1(self.bn1(x))
        else:
            out = self.relu1(self.bn1(x))
        out = self.relu2(self.bn2(self.conv1(out if self.is_equal else x)))
        if self.dropout > 0:
            out = F.dropout(out, p=self.dropout, training=self.training)
        out = self.conv2(out)
        return torch.add(x if self.is_equal else self.projection(x), out)


class WideResNet(nn.Module):
    """WRN-depth-width for CIFAR."""

    def __init__(self, depth: int = 28, width: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        count, planes = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.blocks = nn.ModuleList()
        for stage in range(3):
            blocks = [WideBlock(planes[stage], planes[stage + 1], 1 + (stage > 0), dropout)]
            blocks += [
                WideBlock(planes[stage + 1], planes[stage + 1], 1, dropout)
                for _ in range(count - 1)
            ]
            self.blocks.append(nn.Sequential(*blocks))
        self.bn = nn.BatchNorm2d(planes[3])
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(planes[3], 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        for stage in self.blocks:
            out = stage(out)
        out = self.relu(self.bn(out))
        return self.fc(out.mean((2, 3)))


class BiasedWideBlock(nn.Module):
    """Another popular wide block: biased convolutions, a dropout module, a shortcut from x."""

    def __init__(self, in_planes: int, planes: int, stride: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, padding=1, bias=True)
        self.dropout = nn.Dropout(p=dropout)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=True))

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(self.conv1(F.relu(self.bn1(x))))
        out = self.conv2(F.relu(self.bn2(out)))
        out += self.shortcut(x)
        return out


class DenseLayer(nn.Module):
    """Bottleneck layer of DenseNet-BC."""

    def __init__(self, in_planes: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat((x, out), 1)


class Transition(nn.Module):
    """Layer between two dense blocks."""

    def __init__(self, in_planes: int, planes: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_planes, planes, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv1(self.relu(self.bn1(x))), 2)


class DenseNet(nn.Module):
    """DenseNet-BC-depth-growth for CIFAR."""

    def __init__(self, depth: int = 100, growth: int = 12) -> None:
        super().__init__()
        count, planes = (depth - 4) // 6, 2 * growth
        self.conv1 = nn.Conv2d(3, planes, 3, 1, 1, bias=False)
        stages = []
        for stage in range(3):
            for _ in range(count):
                stages.append(DenseLayer(planes, growth))
                planes += growth
            if stage < 2:
                stages.append(Transition(planes, planes // 2))
                planes //= 2
        self.dense = nn.Sequential(*stages)
        self.bn1 = nn.BatchNorm2d(planes)
        self.fc = nn.Linear(planes, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.dense(self.conv1(x))))
        out = F.avg_pool2d(out, out.shape[-1])
        return self.fc(out.flatten(1))


class Residual(nn.Module):
    """`x + branch(x)`."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class DeepNet(nn.Module):
    """A pre-activation network of any depth; blocks are containers in lists."""

    def __init__(self, depth: int = 1001, planes: int = 16) -> None:
        super().__init__()
        count = (depth - 2) // 9
        self.stem = nn.Conv2d(3, planes, 3, 1, 1, bias=False)
        self.stages, self.downsamples = nn.ModuleList(), nn.ModuleList()
        width = planes
        for stage in range(3):
            inner = planes * 2**stage
            self.downsamples.append(nn.Conv2d(width, 4 * inner, 1, 1 + (stage > 0), bias=False))
            width = 4 * inner
            branches = [self._branch(width, inner) for _ in range(count)]
            self.stages.append(nn.ModuleList([Residual(b) for b in branches]))
        self.head = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(width, 10)

    @staticmethod
    def _branch(width: int, inner: int) -> nn.Sequential:
        def unit(in_planes, planes, kernel_size):
            conv = nn.Conv2d(in_planes, planes, kernel_size, padding=kernel_size // 2, bias=False)
            return nn.BatchNorm2d(in_planes), nn.ReLU(inplace=True), conv

        return nn.Sequential(*unit(width, inner, 1), *unit(inner, inner, 3), *unit(inner, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for downsample, stage in zip(self.downsamples, self.stages, strict=True):
            x = downsample(x)
            for block in stage:
                x = block(x)
        return self.fc(self.head(x).flatten(1))


def _conv_norm_silu(in_planes: int, planes: int, kernel_size=1, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_planes, planes, kernel_size, stride, kernel_size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(planes), nn.SiLU(inplace=True))


class CrossStage(nn.Module):
    """Cross-stage partial block (arXiv:1911.11929): bottlenecks on one of two projections."""

    def __init__(self, in_planes: int, planes: int, count: int, has_shortcut: bool = True) -> None:
        super().__init__()
        inner = planes // 2
        self.first, self.second = (_conv_norm_silu(in_planes, inner) for _ in range(2))
        units = [
            nn.Sequential(_conv_norm_silu(inner, inner), _conv_norm_silu(inner, inner, 3))
            for _ in range(count)
        ]
        self.units = nn.Sequential(*[Residual(u) if has_shortcut else u for u in units])
        self.last = _conv_norm_silu(2 * inner, planes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat((self.units(self.first(x)), self.second(x)), 1))


class PyramidPooling(nn.Module):
    """Spatial pyramid pooling (arXiv:1406.4729): max pooling in turn instead of in parallel."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.first = _conv_norm_silu(planes, planes // 2)
        self.last = _conv_norm_silu(2 * planes, planes)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.first(x)]
        for _ in range(3):
            maps.append(F.max_pool2d(maps[-1], 5, 1, 2))
        return self.last(torch.cat(maps, 1))


class Detector(nn.Module):
    """A YOLO-like detector: cross-stage partial blocks, top-down and bottom-up paths, three heads.

    The paths are those of PANet (arXiv:1803.01534). Returns `[N, outputs, pixels of all heads]`.
    """

    def __init__(self, planes: int = 32, counts=(1, 2, 3, 1), outputs: int = 255) -> None:
        super().__init__()
        widths = [planes * 2**i for i in range(1, 5)]
        small, middle, large = widths[1:]
        self.stem = _conv_norm_silu(3, planes, 3, 2)
        self.stages = nn.ModuleList()
        for in_planes, width, count in zip((planes, *widths), widths, counts, strict=False):
            down = _conv_norm_silu(in_planes, width, 3, 2)
            self.stages.append(nn.Sequential(down, CrossStage(width, width, count)))
        self.pooling = PyramidPooling(large)
        self.to_middle = _conv_norm_silu(large, middle)
        self.middle = CrossStage(2 * middle, middle, 1, has_shortcut=False)
        self.to_small = _conv_norm_silu(middle, small)
        self.small = CrossStage(2 * small, small, 1, has_shortcut=False)
        self.small_down = _conv_norm_silu(small, small, 3, 2)
        self.middle_again = CrossStage(2 * small, middle, 1, has_shortcut=False)
        self.middle_down = _conv_norm_silu(middle, middle, 3, 2)
        self.large = CrossStage(2 * middle, large, 1, has_shortcut=False)
        self.heads = nn.ModuleList([nn.Conv2d(width, outputs, 1) for width in widths[1:]])

    def forward(self, x: Tensor) -> Tensor:
        x, maps = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        _, small, middle, _ = maps
        from_large = self.to_middle(self.pooling(x))
        middle = self.middle(torch.cat((F.interpolate(from_large, scale_factor=2), middle), 1))
        from_middle = self.to_small(middle)
        small = self.small(torch.cat((F.interpolate(from_middle, scale_factor=2), small), 1))
        middle = self.middle_again(torch.cat((self.small_down(small), from_middle), 1))
        large = self.large(torch.cat((self.middle_down(middle), from_large), 1))
        found = zip(self.heads, (small, middle, large), strict=True)
        return torch.cat([head(y).flatten(2) for head, y in found], 2)


class DropPath(nn.Module):
    """Stochastic depth: drops the branch of some images."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        keep = torch.empty((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device)
        return x * keep.bernoulli_(1 - self.p) / (1 - self.p)


class SqueezeExcite(nn.Module):
    """Scales channels by a function of their means."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(planes, planes // 2, 1)
        self.fc2 = nn.Conv2d(planes // 2, planes, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(w))))


class Attention(nn.Module):
    """Self-attention over pixels, with control flow that cannot be traced."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(planes, 3 * planes, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] * x.shape[3] > 4096:
            raise ValueError("too many pixels")
        q, k, v = self.qkv(x).flatten(2).transpose(1, 2).chunk(3, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(1, 2).reshape(x.shape)


class BranchBlock(FunctionalBottleneck):
    """A bottleneck with a module between the last convolution and the addition."""

    def __init__(self, in_planes: int, planes: int, stride: int, after: nn.Module) -> None:
        super().__init__(in_planes, planes, stride)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv2(F.relu(self.bn2(self.conv1(out))))
        out = self.after(self.conv3(F.relu(self.bn3(out))))
        return out + shortcut


def network_of(*blocks: nn.Module) -> nn.Module:
    """Puts blocks between a stem with 8 channels and a classifier with 32."""
    stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
    head = (nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, *blocks, *head, nn.Linear(32, 10))


def replicated(model: nn.Module, copied: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copies a model as DataParallel does for each GPU: shallow, with its own tensors."""
    copies = {m: m._replicate_for_data_parallel() for m in model.modules()}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            if child is not None:
                replica._modules[name] = copies[child]
        for name, p in module._parameters.items():
            setattr(replica, name, None if p is None else copied(p.detach()))
    return copies[model]


def torchvision_models():
    """Imports `torchvision.models`, even if its operators were built for another torch.

    Raises:
        ImportError: torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")  # its own library did not load
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
    return importlib.import_module("torchvision.models")


_kept: list[object] = []  # deleting a library would remove its operators


def timm_model(name: str, **options) -> nn.Module:
    """Creates a model of timm.

    Raises:
        ImportError: timm or torchvision is not installed.
    """
    torchvision_models()
    return importlib.import_module("timm").create_model(name, **options)
