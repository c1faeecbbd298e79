"""A network of two units of any norm and activation, and a comparison with plain PyTorch."""

import re
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from tests.convert.trial import Subject, assert_alike


class Net(nn.Module):
    """Two norms and convolutions, called by a forward; images have 4 channels."""

    def __init__(self, forward, dims=2, norm=None, bias=True):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = norm or (lambda: nn.GroupNorm(2, 4))
        self.norm, self.conv = norm(), conv(4, 4, 3, padding=1, bias=bias)
        self.norm2, self.conv2 = norm(), conv(4, 4, 3, padding=1)
        self.rows = nn.Linear(4, 8)
        self.function = [forward]

    def scale_and_shift(self, x):
        """Returns two tensors [N, C, 1, ...]."""
        rows = self.rows(x.flatten(2).mean(2))
        return rows[(..., *[None] * (x.dim() - 2))].chunk(2, 1)

    def forward(self, x):
        return self.function[0](self, x)


def images(randn, size=(5, 6), channels_last=False):
    x = randn(2, 4, *size)
    if channels_last:
        x = x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()])
    return x.requires_grad_()


def assert_runs(forward, into, second="", dims=2, channels_last=False, norm=None):
    """Asserts that a forward behaves as in plain PyTorch, and what its norms ran as.

    Args:
        forward: takes the network and images.
        into: pattern of the report of the first norm: what ran fused, and the reason.
        second: likewise of the second norm.
        dims: dimensions of the images.
        channels_last: memory format of the network and the images.
        norm: builds a norm.
    """
    size = {1: (7,), 2: (5, 6), 3: (3, 4, 5)}[dims]
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}

    def before(net):
        if channels_last:
            net.to(memory_format=formats[dims])

    make_input = partial(images, size=size, channels_last=channels_last)
    trial = assert_alike(Subject(partial(Net, forward, dims, norm), before, make_input=make_input))
    for report in trial.reports:
        for site, expected in zip(report, (into, second), strict=True):
            text = f"{site.into}; {site.reason}" if site.reason else site.into
            assert re.search(expected, text), site
    return trial


def two_units(net, x, act=F.silu):
    return net.conv2(act(net.norm2(net.conv(act(net.norm(x))))))
