"""Models of other packages with random weights, in small configurations and in published ones."""

import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from testbed.published_models import torchvision_models

AUTOENCODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (64, 128, 128),
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "latent_channels": 4,
    "sample_size": 64,
}
STABLE_DIFFUSION_AUTOENCODER = AUTOENCODER | {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "sample_size": 256,
}
UNET = {
    "sample_size": 32,
    "block_out_channels": (64, 128, 128),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
}
WIDE_UNET = {
    "sample_size": 64,
    "block_out_channels": (128, 256, 384, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D",) * 2 + ("AttnDownBlock2D",) * 2,
    "up_block_types": ("AttnUpBlock2D",) * 2 + ("UpBlock2D",) * 2,
}
CONDITIONED = {
    "sample_size": 32,
    "block_out_channels": (64, 128),
    "layers_per_block": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 64,
    "attention_head_dim": 8,
}
SEG_RES_NET = {
    "spatial_dims": 3,
    "init_filters": 16,
    "in_channels": 1,
    "out_channels": 2,
    "blocks_down": (1, 2, 2),
    "blocks_up": (1, 1),
}
PUBLISHED_SEG_RES_NET = SEG_RES_NET | {
    "init_filters": 32,
    "blocks_down": (1, 2, 2, 4),
    "blocks_up": (1, 1, 1),
}
BASIC_UNET = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "features": (16, 16, 32, 64, 128, 16),
}
DYN_UNET = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "kernel_size": (3, 3, 3, 3),
    "strides": (1, 2, 2, 2),
    "upsample_kernel_size": (2, 2, 2),
    "filters": (16, 32, 64, 128),
}
MONAI_AUTOENCODER = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 1,
    "num_res_blocks": (1, 1, 1),
    "channels": (32, 64, 64),
    "attention_levels": (False, False, False),
    "latent_channels": 3,
    "norm_num_groups": 16,
    "with_encoder_nonlocal_attn": False,
    "with_decoder_nonlocal_attn": False,
}


def _built(module: str, name: str, options: dict) -> nn.Module:
    torchvision_models()  # both packages import it
    return getattr(importlib.import_module(module), name)(**options)


def diffusers(name: str, **options) -> nn.Module:
    """A model of diffusers."""
    return _built("diffusers", name, options)


def monai(name: str, **options) -> nn.Module:
    """A network of MONAI."""
    return _built("monai.networks.nets", name, options)


class OneInput(nn.Module):
    """A model with only its first input as an argument; returns one tensor.

    The other inputs are cast to the dtype of the first one, except for integers.
    """

    def __init__(self, model: nn.Module, others: Sequence[Tensor]) -> None:
        super().__init__()
        self.model, self.others = model, others

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output of the model; packages wrap it."""
        others = [t.to(x.dtype) if t.is_floating_point() else t for t in self.others]
        y: Any = self.model(x, *others)
        y = getattr(y, "sample", y)
        return y[0] if isinstance(y, tuple) else y
