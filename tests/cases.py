"""Shapes, dtypes and inputs that every backend must get right, and plain expressions of each op."""

import collections
import importlib.metadata
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import preact_kernels as pk
from preact_kernels.accuracy.cases import randomised as randomised
from preact_kernels.activations import Activation, activation_gradient
from preact_kernels.kernels.contract import Conv, Unit
from preact_kernels.ops import dispatch as backends
from preact_kernels.ops.blocks import Stage

# Dtypes that each backend serves. It must refuse all others (`test_backend.py`).
SERVED_DTYPES = {
    "reference": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}

NAN, INF = float("nan"), float("inf")


def device_of(name: str) -> str:
    """The device that the tensors of a backend must be on."""
    (backend,) = (b for b in backends.BACKENDS if b.name == name)
    return backend.device_types[0] if backend.device_types else "cpu"


def covering(cases: Sequence[Mapping[str, int]], strength: int) -> list[int]:
    """Chooses cases in which every combination of `strength` arguments' values occurs.

    Greedy: takes the case that adds most combinations. Of equal ones, it takes the one that adds
    most combinations of one argument more, and then the one whose values were taken least.

    Args:
        cases: for each argument, a number that stands for its value.
        strength: 1 for each value, 2 for each pair of values.

    Returns:
        Indices of the chosen cases.
    """
    combinations = [
        [set(itertools.combinations(sorted(case.items()), strength + more)) for more in (0, 1)]
        for case in cases
    ]
    missing = [set().union(*(own[more] for own in combinations)) for more in (0, 1)]
    chosen, taken = [], collections.Counter()
    while missing[0]:
        gains = [
            (len(some & missing[0]), len(more & missing[1]), -sum(taken[v] for v in case.items()))
            for case, (some, more) in zip(cases, combinations, strict=True)
        ]
        best = gains.index(max(gains))
        chosen.append(best)
        taken.update(cases[best].items())
        missing = [m - c for c, m in zip(combinations[best], missing, strict=True)]
    return chosen


def unit_of(
    weight: Tensor,
    conv: Conv,
    dtype: torch.dtype | None = None,
    x_dtype: torch.dtype | None = None,
    y_dtype: torch.dtype | None = None,
) -> Unit:
    """A unit in training mode.

    Args:
        weight: weight of the convolution.
        conv: geometry.
        dtype: dtype of the products; by default that of the weight.
        x_dtype: by default that of the products.
        y_dtype: by default that of the products.
    """
    dtype = dtype or weight.dtype
    sides = x_dtype or dtype, y_dtype or dtype
    return Unit(weight.shape, conv, weight.device, dtype, *sides, weight.dtype)


class ConvCase(NamedTuple):
    """One `bn_relu_conv2d`: the shape of `x` and what `F.conv2d` takes."""

    name: str
    x: tuple[int, int, int, int]
    out_channels: int
    kernel: int | tuple[int, int] = 3
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] | str = 0
    dilation: int | tuple[int, int] = 1
    groups: int = 1
    conv_bias: bool = False
    residual: bool = False

    @property
    def conv(self) -> dict:
        """Arguments of the convolution."""
        return {n: getattr(self, n) for n in ("stride", "padding", "dilation", "groups")}


CONV_CASES = (
    # Channel counts: no power of two, no multiple of 8, and the widths of the networks.
    ConvCase("1x1_channels_3_to_10", (2, 3, 6, 5), 10, 1),
    ConvCase("1x1_channels_16_to_64", (2, 16, 8, 8), 64, 1),
    ConvCase("1x1_channels_17_to_48", (3, 17, 5, 7), 48, 1, residual=True),
    ConvCase("1x1_channels_64_to_16", (2, 64, 6, 6), 16, 1, residual=True),
    ConvCase("1x1_channels_100_to_32", (2, 100, 4, 5), 32, 1, conv_bias=True),
    ConvCase("3x3_channels_3_to_17", (2, 3, 7, 5), 17, padding=1, conv_bias=True, residual=True),
    ConvCase("3x3_channels_16", (2, 16, 9, 8), 16, padding=1, residual=True),
    ConvCase("3x3_channels_64", (1, 64, 5, 4), 64, padding=1, residual=True),
    # Kernels.
    ConvCase("7x7_stride_2", (2, 3, 11, 9), 16, 7, stride=2, padding=3),
    ConvCase("5x5_channels_16_to_32", (2, 16, 4, 6), 32, 5, padding=2, residual=True),
    ConvCase("7x7_channels_16", (1, 16, 5, 9), 16, 7, padding=3),
    ConvCase("1x3_channels_16", (2, 16, 5, 6), 16, (1, 3), padding=(0, 1), residual=True),
    ConvCase("5x1_channels_32_to_16", (2, 32, 3, 6), 16, (5, 1), padding=(2, 0)),
    ConvCase("2x4_unpadded", (2, 5, 6, 7), 8, (2, 4)),
    ConvCase("kernel_of_the_image", (3, 8, 4, 4), 16, 4),
    # Strides, paddings, dilations, groups.
    ConvCase("1x1_stride_2", (2, 16, 7, 5), 32, 1, stride=2),
    ConvCase("1x1_padded", (2, 16, 4, 3), 16, 1, padding=1, conv_bias=True),
    ConvCase("3x3_stride_2", (2, 16, 7, 8), 32, stride=2, padding=1, residual=True),
    ConvCase("3x3_stride_3_by_1", (2, 6, 8, 5), 16, stride=(3, 1), padding=(0, 2)),
    ConvCase("3x3_unpadded", (2, 16, 6, 5), 16),
    ConvCase("3x3_padded_by_4", (2, 8, 3, 2), 16, padding=4),
    ConvCase("3x3_dilated_padded_by_1", (2, 16, 7, 6), 16, padding=1, dilation=2),
    ConvCase("3x3_dilated_2_by_3_strided", (2, 6, 9, 9), 10, 3, 2, (1, 3), (2, 3)),
    ConvCase("3x3_groups", (2, 32, 6, 5), 16, padding=1, groups=4, residual=True),
    ConvCase("3x3_depthwise", (2, 17, 6, 5), 34, padding=1, groups=17),
    ConvCase("same", (2, 10, 5, 6), 16, 3, padding="same", conv_bias=True, residual=True),
    ConvCase("same_dilated", (2, 8, 6, 5), 16, (3, 5), padding="same", dilation=2),
    ConvCase("same_even_kernel", (2, 8, 6, 5), 16, (2, 4), padding="same", residual=True),
    # Images.
    ConvCase("one_pixel_images", (5, 16, 1, 1), 32, padding=1, residual=True),
    ConvCase("one_pixel_images_1x1", (6, 64, 1, 1), 16, 1),
    ConvCase("one_row", (2, 16, 1, 9), 16, padding=1),
    ConvCase("one_column", (2, 16, 9, 1), 16, padding=1, residual=True),
    ConvCase("batch_1", (1, 16, 7, 5), 16, padding=1),
    ConvCase("one_channel", (2, 1, 6, 6), 1, padding=1),
    ConvCase("many_pixels", (1, 16, 29, 23), 16, padding=1, residual=True),
)

# x of the ops without a convolution: channels and pixels that do and do not fill vectors and tiles.
SHAPES = (
    (2, 3, 6, 5),
    (2, 10, 7, 6),
    (3, 17, 5, 7),
    (1, 48, 4, 5),
    (2, 100, 4, 5),
    (2, 16, 8, 8),
    (6, 64, 1, 1),
    (5, 16, 1, 1),
    (2, 16, 1, 9),
    (2, 16, 9, 1),
    (1, 16, 7, 5),
    (2, 1, 6, 6),
    (2, 32, 3, 6),
    (2, 16, 33, 31),
)


def enough(shape: tuple[int, ...]) -> int:
    """How many problems to judge together, for a norm over channels to mean something."""
    return 4 if shape[1] >= 16 else 16


def batch_norm_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, mean_over_std: float = 0.5
) -> dict[str, Tensor]:
    """`x`, affine parameters and running statistics, far from any default."""
    channels = shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "x": (torch.randn(shape) + mean_over_std).to(dtype),
        "bn_weight": torch.randn(channels, dtype=wide),
        "bn_bias": torch.randn(channels, dtype=wide) / 2,
        "running_mean": torch.randn(channels, dtype=wide) + mean_over_std,
        "running_var": torch.rand(channels, dtype=wide) + 0.5,
    }


def conv_inputs(case: ConvCase, dtype: torch.dtype = torch.float32, **options) -> dict:
    """All tensors of a `bn_relu_conv2d`; the convolution's in the dtype of `x`."""
    inputs = batch_norm_inputs(case.x, dtype, **options)
    kernel = (case.kernel,) * 2 if isinstance(case.kernel, int) else case.kernel
    fan_in = case.x[1] // case.groups * kernel[0] * kernel[1]
    weight = torch.randn(case.out_channels, case.x[1] // case.groups, *kernel)
    inputs["conv_weight"] = (weight / fan_in**0.5).to(dtype)
    inputs["conv_bias"] = torch.randn(case.out_channels).to(dtype) if case.conv_bias else None
    inputs["residual"] = None
    if case.residual:
        shape = plain_bn_relu_conv2d(**inputs, training=False, **case.conv).shape
        inputs["residual"] = torch.randn(shape).to(dtype)
    return inputs


def plain_bn_relu(
    x, bn_weight, bn_bias, running_mean=None, running_var=None, *, training, momentum=0.1, eps=1e-5
):
    """What `pk.bn_relu` equals."""
    running = running_mean, running_var
    return F.relu(plain_batch_norm(x, *running, bn_weight, bn_bias, training, momentum, eps))


def plain_batch_norm(x, mean, var, weight, bias, *options):
    """`F.batch_norm`, whose backward on a GPU fails if there is a bias and no weight."""
    if x.is_cuda and weight is None and bias is not None:
        weight = torch.ones_like(bias)
    return F.batch_norm(x, mean, var, weight, bias, *options)


def plain_group_norm(x, num_groups, weight=None, bias=None, eps=1e-5):
    """`F.group_norm`; a GPU takes half precision with float32 parameters in autocast alone."""
    is_mixed = any(t is not None and t.dtype != x.dtype for t in (weight, bias))
    if is_mixed and x.is_cuda and not torch.is_autocast_enabled("cuda"):
        return F.group_norm(x.float(), num_groups, weight, bias, eps).to(x.dtype)
    return F.group_norm(x, num_groups, weight, bias, eps)


def served_by_vectors(
    activation: str, values: Sequence[float], dtype: torch.dtype = torch.float32
) -> list[float]:
    """The values for which PyTorch's vectors and scalars agree, rounded to `dtype`.

    Its float32 vectors of AVX-512 make infinity of the gelu of the largest numbers, and NaN of that
    of infinity.
    """
    if activation != "gelu":
        return list(values)
    p = torch.tensor(values, dtype=dtype).float()
    alone = torch.stack([F.gelu(value) for value in p])
    is_same = F.gelu(p.repeat(64))[: len(p)].isclose(alone, 1e-3, equal_nan=True)
    return [value for value, same in zip(values, is_same, strict=True) if same]


# By id: an argument `activation` of the public functions, and the function that it stands for.
# Parameters are exact in half precision.
ACTIVATIONS: dict[str, tuple[str | tuple[str, float], Callable[[Tensor], Tensor]]] = {
    "relu": ("relu", F.relu),
    "leaky_relu": ("leaky_relu", F.leaky_relu),
    "leaky_relu_0.25": (("leaky_relu", 0.25), partial(F.leaky_relu, negative_slope=0.25)),
    "leaky_relu_-0.5": (("leaky_relu", -0.5), partial(F.leaky_relu, negative_slope=-0.5)),
    "identity": ("identity", lambda p: p),
    "relu6": ("relu6", F.relu6),
    "silu": ("silu", F.silu),
    "gelu": ("gelu", F.gelu),
    "gelu_tanh": ("gelu_tanh", partial(F.gelu, approximate="tanh")),
    "elu": ("elu", F.elu),
    "elu_2": (("elu", 2.0), partial(F.elu, alpha=2.0)),
    "hardswish": ("hardswish", F.hardswish),
    "mish": ("mish", F.mish),
    "softplus": ("softplus", F.softplus),
    "softplus_4": (("softplus", 4.0), partial(F.softplus, beta=4.0)),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "tanh": ("tanh", torch.tanh),
    "softsign": ("softsign", F.softsign),
}
needs_entry_points = pytest.mark.skipif(
    "preact_kernels" not in importlib.metadata.entry_points(group="torch_dynamo_backends").names,
    reason="the package is not installed, so torch.compile does not know the backend by name",
)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def gradient_on_gpu(dy: Tensor, p: Tensor, activation: Activation) -> Tensor:
    """`dy * act'(p)` by PyTorch's operators, which on a GPU pass `dy` where p is NaN."""
    g = activation_gradient(dy, p, activation)
    if p.device.type == "cuda" or activation.name not in ("relu6", "elu", "hardswish"):
        return g
    return torch.where(p.isnan(), dy, g)


# Names of the scale and the shift that a call is given.
MODULATIONS = {"": (), "scale": ("scale",), "shift": ("shift",), "both": ("scale", "shift")}
every_modulation = pytest.mark.parametrize("modulation", MODULATIONS.values(), ids=MODULATIONS)


class NormCase(NamedTuple):
    """A norm of `x`: a group norm, or a batch norm if there are no groups."""

    x: tuple[int, ...]
    num_groups: int | None = None

    def __str__(self) -> str:
        norm = "batch" if self.num_groups is None else f"{self.num_groups}_groups"
        return f"{'x'.join(map(str, self.x))}-{norm}"

    @property
    def norm(self) -> dict:
        """Arguments of the norm."""
        if self.num_groups is None:
            return {"training": True}
        return {"num_groups": self.num_groups}

    @property
    def norm_act(self) -> Callable[..., Tensor]:
        """The function under test."""
        function = pk.batch_norm_act if self.num_groups is None else pk.group_norm_act
        return partial(function, **self.norm)


NORM_CASES = (
    # Images, of one group, of one channel a group, and of channels that fill no vector.
    NormCase((2, 3, 6, 5), 1),
    NormCase((2, 10, 7, 6), 5),
    NormCase((3, 17, 5, 7), 17),
    NormCase((2, 16, 9, 3), 4),
    NormCase((2, 48, 4, 5), 8),
    NormCase((2, 100, 4, 5), 25),
    NormCase((3, 64, 5, 4), 32),
    NormCase((2, 16, 29, 23), 8),
    NormCase((5, 16, 1, 1), 4),
    NormCase((2, 1, 6, 6), 1),
    NormCase((1, 6, 7, 5), 3),
    NormCase((2, 10, 7, 6)),
    NormCase((3, 32, 5, 4)),
    # Rows of features, sequences and volumes.
    NormCase((7, 12), 3),
    NormCase((9, 10)),
    NormCase((3, 12, 11), 2),
    NormCase((3, 10, 11)),
    NormCase((2, 8, 3, 4, 5), 2),
    NormCase((2, 6, 2, 3, 4)),
)


def norm_inputs(
    case: NormCase,
    dtype: torch.dtype = torch.float32,
    modulation: Sequence[str] = (),
    mean_over_std: float = 0.5,
    params_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """All tensors of `norm_act`; the running statistics of a batch norm too.

    Args:
        case: the norm.
        dtype: dtype of `x`, scale and shift.
        modulation: names of scale and shift, where they are given.
        mean_over_std: mean of `x` in standard deviations.
        params_dtype: dtype of weight, bias and running statistics; None: float32, or float64
            beside float64.
    """
    n, channels = case.x[:2]
    params_dtype = params_dtype or torch.promote_types(dtype, torch.float32)
    inputs = {
        "x": (torch.randn(case.x) + mean_over_std).to(dtype),
        "weight": torch.randn(channels).to(params_dtype),
        "bias": (torch.randn(channels) / 2).to(params_dtype),
    }
    if case.num_groups is None:
        inputs["running_mean"] = (torch.randn(channels) + mean_over_std).to(params_dtype)
        inputs["running_var"] = (torch.rand(channels) + 0.5).to(params_dtype)
    for index, name in enumerate(modulation):  # one of each shape
        shape = (n, channels) if index else (n, channels, *[1] * (len(case.x) - 2))
        inputs[name] = (torch.randn(shape) / 2).to(dtype)
    return inputs


def modulate(h: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """`h * (1 + scale) + shift`."""
    shape = (*h.shape[:2], *[1] * (h.dim() - 2))
    h = h if scale is None else h * (1 + scale.view(shape))
    return h if shift is None else h + shift.view(shape)


def plain_norm_act(
    x,
    weight=None,
    bias=None,
    running_mean=None,
    running_var=None,
    *,
    num_groups=None,
    activation="relu",
    scale=None,
    shift=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
):
    """What `pk.group_norm_act` and `pk.batch_norm_act` equal; `activation` is a key above."""
    if num_groups is None:
        running = running_mean, running_var
        h = plain_batch_norm(x, *running, weight, bias, training, momentum, eps)
    else:
        h = plain_group_norm(x, num_groups, weight, bias, eps)
    return ACTIVATIONS[activation][1](modulate(h, scale, shift))


def conv_function(weight: Tensor) -> Callable[..., Tensor]:
    """The convolution of a weight."""
    return (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]


def plain_norm_act_conv(
    x,
    weight=None,
    bias=None,
    running_mean=None,
    running_var=None,
    *,
    conv_weight,
    conv_bias=None,
    residual=None,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    dropout=0.0,
    training=True,
    **norm,
):
    """What `pk.group_norm_act_conv` and `pk.batch_norm_act_conv` equal."""
    a = plain_norm_act(x, weight, bias, running_mean, running_var, training=training, **norm)
    conv_weight = conv_weight.to(a.dtype)
    conv_bias = None if conv_bias is None else conv_bias.to(a.dtype)
    a = F.dropout(a, dropout, training) if dropout else a
    y = conv_function(conv_weight)(a, conv_weight, conv_bias, stride, padding, dilation, groups)
    return y if residual is None else y + residual


class NormConvCase(NamedTuple):
    """A norm, and the convolution behind it."""

    norm: NormCase
    out_channels: int
    kernel: int | tuple[int, ...] = 3
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] | str = 1
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    conv_bias: bool = False
    residual: bool = False

    @property
    def kernel_size(self) -> tuple[int, ...]:
        axes = len(self.norm.x) - 2
        return (self.kernel,) * axes if isinstance(self.kernel, int) else self.kernel

    @property
    def conv(self) -> dict:
        """Arguments of the convolution."""
        return {n: getattr(self, n) for n in ("stride", "padding", "dilation", "groups")}

    @property
    def fused(self) -> Callable[..., Tensor]:
        """The function under test."""
        name = "batch" if self.norm.num_groups is None else "group"
        function = getattr(pk, f"{name}_norm_act_conv")
        return partial(function, **self.norm.norm, **self.conv)

    @property
    def plain(self) -> Callable[..., Tensor]:
        """What it equals."""
        return partial(plain_norm_act_conv, **self.norm.norm, **self.conv)


NORM_CONV_CASES = {
    "3x3": NormConvCase(NormCase((2, 16, 6, 5), 4), 32, conv_bias=True, residual=True),
    "3x3_wide": NormConvCase(NormCase((1, 64, 5, 4), 32), 64),
    "1x1": NormConvCase(NormCase((2, 32, 6, 5), 8), 16, 1, padding=0, residual=True),
    "channels_10_to_17": NormConvCase(NormCase((3, 10, 5, 6), 5), 17, residual=True),
    "channels_17_to_3": NormConvCase(NormCase((3, 17, 5, 7), 17), 3, conv_bias=True),
    "channels_3": NormConvCase(NormCase((2, 3, 7, 5), 1), 10),
    "strided": NormConvCase(NormCase((2, 16, 7, 8), 4), 16, stride=2, conv_bias=True),
    "1x1_strided": NormConvCase(NormCase((2, 16, 7, 5), 4), 32, 1, stride=2, padding=0),
    "7x7": NormConvCase(NormCase((2, 8, 9, 11), 2), 6, 7, stride=2, padding=3),
    "groups_and_dilation": NormConvCase(
        NormCase((2, 24, 8, 7), 6), 12, padding=(2, 1), dilation=(2, 1), groups=3, residual=True
    ),
    "same": NormConvCase(NormCase((2, 8, 5, 6), 4), 6, padding="same", dilation=2, conv_bias=True),
    "same_even": NormConvCase(NormCase((2, 8, 5, 6), 2), 6, (2, 4), padding="same", residual=True),
    "one_pixel": NormConvCase(NormCase((5, 16, 1, 1), 4), 16),
    "batch": NormConvCase(NormCase((3, 16, 6, 5)), 32, conv_bias=True, residual=True),
    "batch_1x1": NormConvCase(NormCase((3, 16, 6, 5)), 16, 1, padding=0),
    "1d": NormConvCase(NormCase((3, 12, 11), 2), 8, conv_bias=True, residual=True),
    "1d_strided": NormConvCase(NormCase((3, 16, 12), 16), 16, stride=2, padding=2, dilation=2),
    "1d_same_even": NormConvCase(NormCase((3, 6, 9), 3), 8, 4, padding="same"),
    "1d_groups_batch": NormConvCase(NormCase((3, 12, 11)), 8, 5, padding="valid", groups=4),
    "3d": NormConvCase(NormCase((2, 8, 3, 4, 5), 2), 6, conv_bias=True, residual=True),
    "3d_strided": NormConvCase(
        NormCase((2, 12, 5, 4, 3), 3), 8, (1, 3, 2), stride=(2, 1, 1), padding=(0, 1, 1), groups=2
    ),
    "3d_batch": NormConvCase(NormCase((2, 6, 2, 3, 4)), 8, padding="same"),
}


def norm_conv_inputs(
    case: NormConvCase,
    dtype: torch.dtype = torch.float32,
    modulation: Sequence[str] = (),
    conv_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Tensor | None]:
    """All tensors of `norm_act_conv`; the convolution's in `conv_dtype`, by default that of `x`."""
    inputs: dict[str, Tensor | None] = {**norm_inputs(case.norm, dtype, modulation, **options)}
    per_group = case.norm.x[1] // case.groups
    weight = torch.randn(case.out_channels, per_group, *case.kernel_size)
    inputs["conv_weight"] = (weight / weight[0].numel() ** 0.5).to(conv_dtype or dtype)
    if case.conv_bias:
        inputs["conv_bias"] = torch.randn(case.out_channels).to(conv_dtype or dtype)
    if case.residual:
        shape = case.plain(**inputs).shape
        inputs["residual"] = torch.randn(shape).to(dtype)
    return inputs


def rounded_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """`F.conv2d`, for half precision in float32 and rounded once, as in a fused kernel.

    On a CPU it takes a small part of the time, and its error is not larger.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        return F.conv2d(x, weight, bias, *geometry)
    wide = (None if t is None else t.float() for t in (x, weight, bias))
    return F.conv2d(*wide, *geometry).to(x.dtype)


def conv2d_inside_the_image(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride, padding, dilation=1, groups=1
) -> Tensor:
    """`F.conv2d`, in which a tap outside of the image adds nothing, not even 0 times infinity.

    In PyTorch that depends on the processor.
    """
    assert dilation == groups == 1
    strides, paddings = (v if isinstance(v, tuple) else (v, v) for v in (stride, padding))
    sides = [*zip(x.shape[2:], weight.shape[2:], strides, paddings, strict=True)]
    sizes = [(length + 2 * p - taps) // step + 1 for length, taps, step, p in sides]
    y = torch.zeros(len(x), len(weight), *sizes, dtype=x.dtype)
    for tap in itertools.product(*map(range, weight.shape[2:])):
        read, missing = [], []
        for t, size, (length, _, step, p) in zip(tap, sizes, sides, strict=True):
            outputs = [i for i in range(size) if 0 <= i * step + t - p < length]
            read.append([i * step + t - p for i in outputs])
            missing.append((outputs[0], size - 1 - outputs[-1]) if outputs else None)
        if None not in missing:
            a = x[:, :, read[0]][..., read[1]]
            part = torch.einsum("nchw,kc->nkhw", a, weight[(..., *tap)])
            y = y + F.pad(part, (*missing[1], *missing[0]))
    return y if bias is None else y + bias.view(-1, 1, 1)


def plain_bn_relu_conv2d(
    x,
    conv_weight,
    *args,
    conv_bias=None,
    residual=None,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    conv2d=F.conv2d,
    **norm,
):
    """What `pk.bn_relu_conv2d` equals."""
    a = plain_bn_relu(x, *args, **norm)
    y = conv2d(a, conv_weight, conv_bias, stride, padding, dilation, groups)
    return y if residual is None else y + residual


def random_block(kind: str = "bottleneck", *args, **options) -> nn.Module:
    """A block with parameters and running statistics far from any default."""
    kinds = {"basic": pk.PreActBasicBlock, "bottleneck": pk.PreActBottleneck}
    return randomised(kinds[kind](*args, **options))


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convolutions in `dtype`, norms in float32 (float64 beside float64), as is usual."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            child.to(dtype)
        elif isinstance(child, (nn.BatchNorm2d, nn.GroupNorm)):
            child.to(torch.promote_types(dtype, torch.float32))
    return module


def random_stage(kind: str = "bottleneck", width: int = 6, **options) -> nn.Module:
    """Four blocks for 10 channels: projected, strided, and two with bare shortcuts."""
    expansion = 4 if kind == "bottleneck" else 1
    blocks = [random_block(kind, 10, 8), random_block(kind, 8 * expansion, width, 2)]
    blocks += [random_block(kind, width * expansion, width) for _ in range(2)]
    return pk.PreActStage(blocks, **options)


def recorded_calls(kernels: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of every later call of a backend's function."""
    function, calls = getattr(kernels, name), []

    def recorded(*arguments, **options):
        calls.append(arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(kernels, name, recorded)
    return calls


def unit_by_unit(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """A call for which no backend has whole runs of blocks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Stage, "_is_runnable", lambda *_: False)
        return function(*args, **kwargs)


def record_rebuilt(record: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `record` with each input that a backward rebuilds."""
    function = Stage.rebuilt_input

    def recorded(*arguments):
        x = function(*arguments)
        record(x)
        return x

    monkeypatch.setattr(Stage, "rebuilt_input", recorded)


def rebuilt(stage: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs that a backward rebuilds, the last block's first, after one on `x`.

    No blocks run in one call then, which gives the same bits (tests/stage/test_preact_stage.py).
    """
    found: list[Tensor] = []
    record_rebuilt(found.append, monkeypatch)
    unit_by_unit(lambda: stage(x).sum().backward())
    return found


class CalledOps(TorchDispatchMode):
    """The names of all ops that are called, as `namespace::name`."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name().partition(".")[0])
        return function(*args, **kwargs or {})


class Autocast(nn.Module):
    """A module or function under bfloat16 autocast, and as it is for float64."""

    def __init__(self, module: nn.Module | None = None, function: Callable | None = None) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        enabled = x.dtype != torch.float64
        with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
            return (self.module or self.function)(x=x, **inputs)


class Repeated(nn.Module):
    """A module called three times, with a third of the columns each."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.module(part) for part in x.chunk(3, 3))


def small_network(memory: str = "store") -> nn.Module:
    """A network of two stages for 10 channels."""
    first = [random_block("basic", 10, 6), *(random_block("basic", 6, 6) for _ in range(2))]
    stages = [pk.PreActStage(first, memory), pk.PreActStage([random_block("basic", 6, 6, 2)])]
    stem = nn.Conv2d(10, 10, 3, padding=1, bias=False)
    return pk.PreActResNet(stem, nn.Identity(), stages, 6, 5)


def norm_act_conv(norm: nn.Module, dropout: float = 0.0) -> nn.Module:
    """A unit with SiLU for 10 channels."""
    conv = nn.Conv2d(10, 16, 3, padding=1)
    return randomised(pk.NormActConv(norm, nn.SiLU(), conv, dropout))


# Every module, for images of 10 channels, and every memory mode.
EVERY_MODULE = {
    "bn_relu": lambda: randomised(pk.BNReLU2d(10)),
    "bn_relu_conv": lambda: randomised(pk.BNReLUConv2d(10, 16, 3, padding=1, bias=True)),
    "norm_act": lambda: randomised(pk.NormAct(nn.GroupNorm(5, 10), nn.GELU())),
    "norm_act_conv": lambda: norm_act_conv(nn.GroupNorm(5, 10)),
    "batch_norm_act_conv": lambda: norm_act_conv(nn.BatchNorm2d(10)),
    "basic_block": lambda: random_block("basic", 10, 8, 2),
    "bottleneck": lambda: random_block("bottleneck", 10, 8, 2),
    "stage": random_stage,
    "rebuilt_stage": lambda: random_stage(memory="rebuild"),
    "checkpointed_stage": lambda: random_stage(memory="checkpoint"),
    "float32_stream": lambda: pk.PreActStage(
        [random_block("basic", 10, 8, 2), random_block("basic", 8, 8)], residual_dtype=torch.float32
    ),
    "network": small_network,
    "rebuilt_network": lambda: small_network("rebuild"),
    "checkpointed_network": lambda: small_network("checkpoint"),
}
