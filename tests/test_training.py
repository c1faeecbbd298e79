"""Steps of SGD: losses keep to those of plain PyTorch."""

import copy

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk
from tests.oracle import plain_copy, unit_roundoff


def losses(network, images, targets, *, dtype=torch.float32, channels_last=False, flip=False):
    """The loss of every step, and one of an evaluation at the end."""
    network = copy.deepcopy(network).to(dtype)
    images = images.to(dtype)
    if flip:
        images, targets = images.flip(1), targets.flip(1)
    if channels_last:
        network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    found = []
    for x, target in zip(images, targets, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.detach().double())
    network.eval()
    with torch.no_grad():
        found.append(F.cross_entropy(network(images[0]), targets[0]).double())
    return torch.stack(found)


def check_training(record, depth, batch, size, steps=3, **options):
    """`oracle.py`'s rule, with the losses of all steps as one vector."""
    network = pk.preact_resnet(depth, **options)
    plain = plain_copy(network)
    problem = torch.randn(steps, batch, 3, size, size), torch.randint(10, (steps, batch))
    orders = {"flip": True}, {"channels_last": True}, {}
    truth, errors, fused = losses(plain, *problem, dtype=torch.float64), {}, {}
    for dtype in (torch.float32, torch.float64):
        runs = [losses(plain, *problem, dtype=dtype, **order) for order in orders]
        errors[dtype] = max(float((run - truth).norm()) for run in runs)
        fused[dtype] = float((losses(network, *problem, dtype=dtype) - truth).norm())
    # float64 is its own truth, so its error is that of float32 scaled: see `oracle.py`.
    ratio = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    errors[torch.float64] += (batch * size * size) ** 0.5 * ratio * errors[torch.float32]
    record("losses in float64", truth.tolist())
    record("deviations of plain", errors)
    record("deviations of fused", fused)
    for dtype, error in errors.items():
        allowed = 2 * error + unit_roundoff(dtype) * float(truth.norm())
        assert fused[dtype] <= allowed, f"{dtype}: off by {fused[dtype]:.3g}, allowed {allowed:.3g}"
    assert truth[-1] != truth[0]


def test_29_layers(backend, record_property):
    check_training(record_property, 29, batch=8, size=16, steps=5)


def test_basic_blocks(backend, record_property):
    check_training(record_property, 20, batch=8, size=16, steps=5)


def test_29_layers_checkpointed(backend, record_property):
    check_training(record_property, 29, batch=8, size=16, memory="checkpoint")


def test_164_layers_of_small_images(backend, record_property):
    check_training(record_property, 164, batch=8, size=8, steps=2)


@pytest.mark.slow
def test_164_layers(backend, record_property):
    check_training(record_property, 164, batch=16, size=32)


@pytest.mark.slow
def test_1001_layers_checkpointed(backend, record_property):
    check_training(record_property, 1001, batch=4, size=8, steps=1, memory="checkpoint")
