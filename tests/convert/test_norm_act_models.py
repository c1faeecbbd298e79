"""Models with any norm and activation train and evaluate alike plain and converted, run fused.

`make test-packages` installs the packages of the models that are skipped without them.
"""

import collections
import copy
import importlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from torch import nn

import preact_kernels as pk
from preact_kernels.kernels.layout import CHANNELS_LAST
from testbed import norm_act_models as own
from testbed.packages import OneInput, diffusers, monai
from testbed.published_models import torchvision_models
from tests.convert.trial import Subject, assert_alike
from tests.oracle import assert_within_budget, gradient_like

pytestmark = pytest.mark.backends("cpu")


class Case(NamedTuple):
    """A model.

    build: builds it.
    shape: shape of its first input.
    fused: what its norms run as (and the reason, if there is one), counted in training mode.
    share: bytes that it keeps for the backward, as a share of those of plain PyTorch.
    others: other inputs.
    activations: as in `pk.convert`.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    fused: Mapping[str, int]
    share: float
    others: Callable[[], tuple] = tuple
    activations: Mapping | None = None


def song(**options):
    return lambda: own.SongUNet(16, (1, 2), 1, **options)


def noise():
    return (torch.tensor([0.3, 20.0]),)


def embedding():
    return (torch.randn(2, 8),)


def small_bit():
    torchvision_models()  # which timm imports
    resnetv2 = importlib.import_module("timm.models.resnetv2")
    options = {"stem_type": "fixed", "stem_chs": 32, "num_classes": 10}
    return resnetv2.ResNetV2(layers=(1, 2), channels=(128, 256), **options)


ADM = {"GN-SiLU-Conv": 3, "GN-Scale-Shift-SiLU-Dropout-Conv and residual add": 2}
SONG = {"GN-SiLU-Conv": 8, "GN-Conv": 3, "GN-SiLU; read by conv_transpose2d": 1}
OWN = {
    "SongUNet, adaptive": Case(
        song(dropout=0.1),
        (2, 3, 16, 16),
        SONG | {"GN-Scale-Shift-SiLU-Dropout-Conv and residual add": 8},
        0.42,
        noise,
    ),
    "SongUNet, DDPM++": Case(
        song(adaptive=False, skip_scale=0.5**0.5),
        (2, 3, 16, 16),
        SONG | {"GN-SiLU-Conv and residual add": 8},
        0.49,
        noise,
    ),
    "SongUNet, NCSN++": Case(
        song(adaptive=False, dropout=0.1, skip_scale=0.5**0.5, taps=(1, 3, 3, 1)),
        (2, 3, 16, 16),
        SONG | {"GN-SiLU-Dropout-Conv and residual add": 8},
        0.45,
        noise,
    ),
    "ADM, 1-D": Case(lambda: own.ADMBlocks(dims=1), (2, 3, 18), ADM, 0.31, embedding),
    "ADM, 2-D": Case(own.ADMBlocks, (2, 3, 8, 8), ADM, 0.28, embedding),
    "ADM, 3-D": Case(lambda: own.ADMBlocks(dims=3), (2, 3, 4, 5, 6), ADM, 0.27, embedding),
    "robust WideResNet": Case(
        lambda: own.SwishWideResNet(16, 1),
        (2, 3, 16, 16),
        {
            "BN-SiLU-Conv": 4,
            "BN-SiLU-Conv and residual add": 6,
            "BN-SiLU; the padding differs between two sides": 2,
            "BN-SiLU; no convolution follows": 1,
        },
        0.45,
        activations={own.SwishFunction: "silu"},
    ),
    "CAM-DenseNet": Case(
        lambda: own.CAMDenseNet(20, 8, (2, 2), 16, 10),
        (2, 20, 50),
        {
            "BN-ReLU-Conv": 6,
            "BN-ReLU; the program holds its activation": 5,
            "BN-ReLU; read by mean": 1,
        },
        0.84,
    ),
}

STEPS = torch.tensor([10, 500])
UNET = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
    "attention_head_dim": 8,
}
CONDITIONED = UNET | {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
}
VIDEO = UNET | {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": 16,
}
VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
ATTENTION = "; read by transpose"
STRIDES = "; its input is no image, or has unusual strides"
PACKAGES = {
    "diffusers AutoencoderKL": Case(
        lambda: diffusers(
            "AutoencoderKL",
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            latent_channels=4,
            sample_size=16,
        ),
        (2, 3, 16, 16),
        {"GN-SiLU-Conv": 12, "GN-SiLU-Conv and residual add": 10, ATTENTION: 1, STRIDES: 1},
        0.49,
    ),
    "diffusers UNet2DModel": Case(
        lambda: diffusers("UNet2DModel", **UNET, resnet_time_scale_shift="scale_shift"),
        (2, 3, 16, 16),
        {"GN-SiLU-Conv": 9, "GN-Scale-Shift-SiLU-Conv and residual add": 8, ATTENTION: 3},
        0.48,
        lambda: (STEPS,),
    ),
    "diffusers UNet2DConditionModel": Case(
        lambda: diffusers("UNet2DConditionModel", **CONDITIONED),
        (2, 4, 16, 16),
        {"GN-SiLU-Conv": 9, "GN-SiLU-Conv and residual add": 8, "GN-Conv": 4},
        0.8,
        lambda: (STEPS, torch.randn(2, 5, 16)),
    ),
    "diffusers UNet3DConditionModel": Case(
        lambda: diffusers("UNet3DConditionModel", **VIDEO),
        (2, 4, 3, 16, 16),
        {
            "GN-SiLU-Conv": 9,
            "GN-SiLU-Conv and residual add": 8,
            "GN-SiLU-Dropout-Conv": 24,
            STRIDES: 13,
            "; read by permute": 4,
        },
        0.85,
        lambda: (STEPS, torch.randn(2, 5, 16)),
    ),
    "diffusers AutoencoderKLHunyuanVideo": Case(
        lambda: diffusers(
            "AutoencoderKLHunyuanVideo",
            latent_channels=4,
            block_out_channels=(8, 16, 16, 16),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        (1, 3, 5, 16, 16),
        {"GN-SiLU; read by pad": 34, ATTENTION: 2},  # padding that repeats the border
        0.88,
    ),
    "MONAI SegResNet": Case(
        lambda: monai("SegResNet", **VOLUME, init_filters=8, blocks_down=(1, 2), blocks_up=(1,)),
        (1, 1, 16, 16, 16),
        {"GN-ReLU-Conv": 5, "GN-ReLU-Conv and residual add": 4},
        0.55,
    ),
    "MONAI BasicUNet": Case(
        lambda: monai("BasicUNet", **VOLUME, features=(8, 8, 8, 8, 8, 8)),
        (1, 1, 32, 32, 32),
        {
            "IN-LeakyReLU-Conv": 10,
            "IN-LeakyReLU; the program holds its activation": 4,
            "IN-LeakyReLU; read by conv_transpose3d": 4,
        },
        0.75,
    ),
    "timm ResNetV2 of BiT": Case(
        small_bit,
        (2, 3, 64, 64),
        {
            "GN-ReLU-Conv": 4,
            "GN-ReLU-Conv and residual add": 3,
            "GN-ReLU; several convolutions read its activation": 2,
            "GN-ReLU; the program holds its activation": 1,
        },
        0.81,
    ),
}

CASES = OWN | PACKAGES
# `make test-packages` runs them all; the quick suite those that need no other package.
SLOW = ("SongUNet, NCSN++", "ADM, 1-D", *(n for n in PACKAGES if not n.startswith("timm")))
names = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)


def built(case):
    """Returns a model as a function of one tensor, with random parameters; and that tensor."""
    torch.manual_seed(1)
    try:
        model = OneInput(case.build(), case.others())
    except ImportError as error:
        pytest.skip(f"not installed: {error.name}")
    for p in model.parameters():
        if p.dim() == 1:
            p.data.add_(0.3 * torch.rand_like(p))
    return model, torch.randn(case.shape)


def fused(model):
    """Counts what the norms of a model ran as, and the reasons, without lines of code."""
    texts = [f"{s.into}; {s.reason}" if s.reason else s.into for s in pk.conversion_report(model)]
    return dict(collections.Counter(re.sub(r" \(.*\)", "", t) for t in texts))


@names
def test_models_run_fused_and_keep_less(name):
    case = CASES[name]
    model, x = built(case)
    plain = pk.saved_bytes(model, x)
    pk.convert(model, activations=case.activations)
    kept = pk.saved_bytes(model, x) / plain
    assert fused(model) == case.fused
    assert abs(kept - case.share) < 0.02


def results(model, x):
    """Trains and evaluates; returns outputs, gradients, and running statistics after training."""
    model, x = copy.deepcopy(model), x.to(next(model.parameters()).dtype).requires_grad_()
    found = {}
    for mode in ("training", "evaluation"):
        torch.manual_seed(2)  # of dropout
        model.train(mode == "training").zero_grad()
        y = model(x)
        (dx,) = torch.autograd.grad(y, x, gradient_like(y), retain_graph=True)
        y.backward(gradient_like(y))
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found |= {f"{mode}, output": y.detach(), f"{mode}, gradient of the input": dx}
        found[f"{mode}, gradients of parameters"] = torch.cat(gradients)
        statistics = [b.flatten() for n, b in model.named_buffers() if "running" in n]
        found["running statistics"] = torch.cat([x.new_zeros(0), *statistics]).detach()
    return found


@names
def test_models_train_and_evaluate_alike_in_float32(name):
    """The kernels of the CPU library fuse convolutions in float32, but not in float64."""
    case = CASES[name]
    model, x = built(case)
    truth = results(copy.deepcopy(model).double(), x)
    orders = [x]
    if x.dim() > 3:
        orders.append(x.to(memory_format=CHANNELS_LAST[x.dim()]))
    eager = [results(model, order) for order in orders]
    errors = {n: max(float((e[n] - t).norm()) for e in eager) for n, t in truth.items()}
    converted = pk.convert(model, activations=case.activations)
    assert_within_budget(results(converted, x), truth, errors)


@names
def test_models_behave_alike_in_float64(name):
    case = CASES[name]
    built(case)  # or skips

    def make_input(randn):
        return randn(*case.shape).requires_grad_()

    subject = Subject(lambda: built(case)[0], make_input=make_input, ACTIVATIONS=case.activations)
    trial = assert_alike(subject, name)
    assert trial.has_fused and not trial.errors
