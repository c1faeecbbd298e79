"""Published models with other norms and activations, for tests and benchmarks of conversion."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# EDM and physicsnemo: SongUNet, in the forms of DDPM++, NCSN++ and ADM.


class GroupNorm(nn.Module):
    """Group norm of min(32, channels / 4) groups; casts its parameters to the dtype of x."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups, self.eps = min(32, channels // 4), eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class Conv(nn.Module):
    """Convolution that adds its bias in place; a fixed filter before it may resample images.

    Args:
        in_channels: channels of the images.
        channels: channels of the result; 0 for the filter alone.
        size: size of the kernel.
        resample: "up", "down" or an empty string.
        taps: the filter along an axis.
    """

    def __init__(
        self, in_channels: int, channels: int, size: int, resample: str = "", taps=(1, 1)
    ) -> None:
        super().__init__()
        self.resample, self.weight, self.bias = resample, None, None
        if channels:
            weight = torch.randn(channels, in_channels, size, size)
            self.weight = nn.Parameter(weight / (in_channels * size**2) ** 0.5)
            self.bias = nn.Parameter(torch.zeros(channels))
        line = torch.tensor(taps, dtype=torch.float32) / sum(taps)
        self.register_buffer("filter", (line[:, None] * line)[None, None])

    def forward(self, x: Tensor) -> Tensor:
        if self.resample:
            channels, pad = x.shape[1], (self.filter.shape[-1] - 1) // 2
            taps = self.filter.to(x.dtype).tile(channels, 1, 1, 1)
            if self.resample == "up":
                x = F.conv_transpose2d(x, taps * 4, groups=channels, stride=2, padding=pad)
            else:
                x = F.conv2d(x, taps, groups=channels, stride=2, padding=pad)
        if self.weight is not None:
            x = F.conv2d(x, self.weight.to(x.dtype), padding=self.weight.shape[-1] // 2)
            x = x.add_(self.bias.to(x.dtype).reshape(1, -1, 1, 1))
        return x


class UNetBlock(nn.Module):
    """Two units of group norm, SiLU and convolution, and self-attention.

    Args:
        in_channels: channels of the images.
        channels: channels of the result.
        embedding: channels of the embedding of the noise.
        resample: as in `Conv`.
        taps: as in `Conv`.
        attends: whether self-attention follows.
        adaptive: whether the embedding gives a scale and a shift, instead of an addition.
        dropout: of the second activation.
        skip_scale: factor of each sum.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        embedding: int,
        resample: str = "",
        taps: Sequence[int] = (1, 1),
        attends: bool = False,
        adaptive: bool = True,
        dropout: float = 0.0,
        skip_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.adaptive, self.dropout, self.skip_scale = adaptive, dropout, skip_scale
        self.norm0 = GroupNorm(in_channels)
        self.conv0 = Conv(in_channels, channels, 3, resample, taps)
        self.affine = nn.Linear(embedding, channels * (1 + adaptive))
        self.norm1 = GroupNorm(channels)
        self.conv1 = Conv(channels, channels, 3)
        self.skip = None
        if resample or in_channels != channels:
            projected = channels if in_channels != channels else 0
            self.skip = Conv(in_channels, projected, 1, resample, taps)
        if attends:
            self.norm2 = GroupNorm(channels)
            self.qkv = Conv(channels, 3 * channels, 1)
            self.proj = Conv(channels, channels, 1)
        self.attends = attends

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shortcut = x if self.skip is None else self.skip(x)
        h = self.conv0(F.silu(self.norm0(x)))
        rows = self.affine(embedding).unsqueeze(2).unsqueeze(3)
        if self.adaptive:
            scale, shift = rows.chunk(2, dim=1)
            h = F.silu(torch.addcmul(shift, self.norm1(h), scale + 1))
        else:
            h = F.silu(self.norm1(h.add_(rows)))
        h = self.conv1(F.dropout(h, p=self.dropout, training=self.training))
        x = h.add_(shortcut) * self.skip_scale
        if self.attends:
            q, k, v = self.qkv(self.norm2(x)).flatten(2).transpose(1, 2).chunk(3, dim=2)
            h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            x = self.proj(h).add_(x) * self.skip_scale
        return x


class SongUNet(nn.Module):
    """U-Net of diffusion models, called with noisy images and noise levels.

    Args:
        channels: channels of the first resolution.
        multiples: channels of each resolution, divided by `channels`.
        count: blocks of a resolution.
        attention: the resolution that has self-attention, as an index.
        in_channels: channels of the images.
        options: of `UNetBlock`.
    """

    def __init__(
        self,
        channels: int = 128,
        multiples: Sequence[int] = (2, 2, 2),
        count: int = 4,
        attention: int = 1,
        in_channels: int = 3,
        **options,
    ) -> None:
        super().__init__()
        self.channels = channels
        embedding = 4 * channels
        self.map0, self.map1 = nn.Linear(channels, embedding), nn.Linear(embedding, embedding)

        def block(width, planes, level, resample=""):
            attends = level == attention and not resample
            return UNetBlock(width, planes, embedding, resample, attends=attends, **options)

        self.stem = Conv(in_channels, channels, 3)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width, skips = channels, [channels]
        for level, multiple in enumerate(multiples):
            if level:
                self.down.append(block(width, width, level, "down"))
                skips.append(width)
            for _ in range(count):
                self.down.append(block(width, multiple * channels, level))
                width = multiple * channels
                skips.append(width)
        for level, multiple in reversed(list(enumerate(multiples))):
            if level < len(multiples) - 1:
                self.up.append(block(width, width, level, "up"))
            for _ in range(count + 1):
                self.up.append(block(width + skips.pop(), multiple * channels, level))
                width = multiple * channels
        self.norm, self.conv = GroupNorm(width), Conv(width, in_channels, 3)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        half = self.channels // 2
        frequencies = 1e-4 ** (torch.arange(half, dtype=x.dtype, device=x.device) / half)
        angles = noise[:, None].to(x.dtype) * frequencies
        embedding = torch.cat([angles.cos(), angles.sin()], dim=1)
        embedding = F.silu(self.map1(F.silu(self.map0(embedding))))
        x = self.stem(x)
        skips = [x]
        for block in self.down:
            x = block(x, embedding)
            skips.append(x)
        for block in self.up:
            if block.norm0.weight.shape[0] != x.shape[1]:
                x = torch.cat([x, skips.pop()], dim=1)
            x = block(x, embedding)
        return self.conv(F.silu(self.norm(x)))


# ADM and consistency models.


class GroupNorm32(nn.GroupNorm):
    """Group norm in float32 or float64."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return super().forward(x.to(dtype)).type(x.dtype)


class ADMBlock(nn.Module):
    """Residual block with a scale and a shift for the second norm, in 1 to 3 dimensions."""

    def __init__(
        self, in_channels: int, channels: int, embedding: int, dims: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.in_layers = nn.Sequential(
            GroupNorm32(8, in_channels), nn.SiLU(), conv(in_channels, channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedding, 2 * channels))
        self.out_layers = nn.Sequential(
            GroupNorm32(8, channels),
            nn.SiLU(),
            nn.Dropout(dropout),
            conv(channels, channels, 3, padding=1),
        )
        self.skip = nn.Identity() if in_channels == channels else conv(in_channels, channels, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.in_layers(x)
        rows = self.emb_layers(embedding).type(h.dtype)
        while rows.dim() < h.dim():
            rows = rows[..., None]
        scale, shift = rows.chunk(2, dim=1)
        norm, rest = self.out_layers[0], self.out_layers[1:]
        return self.skip(x) + rest(norm(h) * (1 + scale) + shift)


class ADMBlocks(nn.Module):
    """Two blocks between convolutions, called with images and an embedding."""

    def __init__(self, channels: int = 16, dims: int = 2) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.stem = conv(3, channels, 3, padding=1)
        self.block1 = ADMBlock(channels, 2 * channels, 8, dims)
        self.block2 = ADMBlock(2 * channels, 2 * channels, 8, dims)
        self.head = nn.Sequential(
            GroupNorm32(8, 2 * channels), nn.SiLU(), conv(2 * channels, 3, 3, padding=1)
        )

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.head(self.block2(self.block1(self.stem(x), embedding), embedding))


# Robust WideResNets.


class SwishFunction(torch.autograd.Function):
    """SiLU that saves its input."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return dy * gate * (1 + x * (1 - gate))


class Swish(nn.Module):
    """SiLU as a custom autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        return SwishFunction.apply(x)


class SwishBlock(nn.Module):
    """Block of a robust WideResNet: pads one side before stride 2; projects the activation."""

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.batchnorm_0, self.relu_0 = nn.BatchNorm2d(in_planes, momentum=0.01), Swish()
        pad = 0 if stride == 2 else 1
        self.conv_0 = nn.Conv2d(in_planes, planes, 3, stride, pad, bias=False)
        self.batchnorm_1, self.relu_1 = nn.BatchNorm2d(planes, momentum=0.01), Swish()
        self.conv_1 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.shortcut = None
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Conv2d(in_planes, planes, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu_0(self.batchnorm_0(x))
        if self.shortcut is not None:
            x = self.shortcut(out)
        if self.stride == 2:
            out = F.pad(out, (0, 1, 0, 1))
        out = self.conv_1(self.relu_1(self.batchnorm_1(self.conv_0(out))))
        return torch.add(x, out)


class SwishWideResNet(nn.Module):
    """Robust WRN-depth-width for CIFAR, with normalised inputs."""

    def __init__(self, depth: int = 28, width: int = 10) -> None:
        super().__init__()
        count, planes = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.register_buffer("mean", torch.tensor((0.4914, 0.4822, 0.4465)).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor((0.2471, 0.2435, 0.2616)).view(1, 3, 1, 1))
        self.init_conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.layer = nn.Sequential()
        for stage in range(3):
            width, wider = planes[stage : stage + 2]
            blocks = [SwishBlock(width, wider, 1 + (stage > 0))]
            blocks += [SwishBlock(wider, wider, 1) for _ in range(count - 1)]
            self.layer.append(nn.Sequential(*blocks))
        self.batchnorm, self.relu = nn.BatchNorm2d(planes[3], momentum=0.01), Swish()
        self.logits = nn.Linear(planes[3], 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(self.init_conv((x - self.mean) / self.std))
        out = F.avg_pool2d(self.relu(self.batchnorm(out)), out.shape[-1])
        return self.logits(out.flatten(1))


# CAM++ of 3D-Speaker: 1-D, over time.


def _bn_relu(channels: int) -> nn.Sequential:
    named = {"batchnorm": nn.BatchNorm1d(channels), "relu": nn.ReLU(inplace=True)}
    layers = nn.Sequential()
    for name, layer in named.items():
        layers.add_module(name, layer)
    return layers


class CAMLayer(nn.Module):
    """Convolution with channels gated by means over the sequence and over its segments."""

    def __init__(self, in_channels: int, channels: int, dilation: int, segment: int) -> None:
        super().__init__()
        self.segment = segment
        self.linear_local = nn.Conv1d(
            in_channels, channels, 3, padding=dilation, dilation=dilation, bias=False
        )
        self.linear1 = nn.Conv1d(in_channels, in_channels // 2, 1)
        self.relu = nn.ReLU(inplace=True)
        self.linear2 = nn.Conv1d(in_channels // 2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear_local(x)
        means = F.avg_pool1d(x, self.segment, self.segment, ceil_mode=True)
        means = means.repeat_interleave(self.segment, dim=-1)[..., : x.shape[-1]]
        context = self.relu(self.linear1(x.mean(-1, keepdim=True) + means))
        return y * torch.sigmoid(self.linear2(context))


class CAMDenseLayer(nn.Module):
    """Bottleneck of a dense block: BN-ReLU-Conv1d, then BN-ReLU and a gated convolution."""

    def __init__(self, in_channels: int, growth: int, dilation: int, segment: int) -> None:
        super().__init__()
        self.nonlinear1 = _bn_relu(in_channels)
        self.linear1 = nn.Conv1d(in_channels, 4 * growth, 1, bias=False)
        self.nonlinear2 = _bn_relu(4 * growth)
        self.cam_layer = CAMLayer(4 * growth, growth, dilation, segment)

    def forward(self, x: Tensor) -> Tensor:
        y = self.cam_layer(self.nonlinear2(self.linear1(self.nonlinear1(x))))
        return torch.cat([x, y], dim=1)


class TransitLayer(nn.Module):
    """BN-ReLU-Conv1d between dense blocks."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.nonlinear = _bn_relu(in_channels)
        self.linear = nn.Conv1d(in_channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.nonlinear(x))


class CAMDenseNet(nn.Module):
    """Dense network over features `[N, features, length]`; returns embeddings of speakers.

    Args:
        features: channels of the input.
        growth: channels that a layer adds.
        counts: layers of each dense block.
        channels: channels of the first block.
        segment: length of a segment of `CAMLayer`.
    """

    def __init__(
        self,
        features: int = 80,
        growth: int = 32,
        counts: Sequence[int] = (12, 24, 16),
        channels: int = 128,
        segment: int = 100,
    ) -> None:
        super().__init__()
        self.tdnn = nn.Conv1d(features, channels, 5, stride=2, padding=2, bias=False)
        self.nonlinear = _bn_relu(channels)
        self.dense = nn.Sequential()
        for index, count in enumerate(counts):
            for _ in range(count):
                self.dense.append(CAMDenseLayer(channels, growth, 1 + (index > 0), segment))
                channels += growth
            self.dense.append(TransitLayer(channels, channels // 2))
            channels //= 2
        self.out_nonlinear = _bn_relu(channels)
        self.embedding = nn.Linear(2 * channels, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.out_nonlinear(self.dense(self.nonlinear(self.tdnn(x))))
        return self.embedding(torch.cat([x.mean(-1), x.std(-1)], dim=1))
