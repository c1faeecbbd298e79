"""Steps of SGD: losses keep to those of plain PyTorch."""

import copy

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk
from tests.oracle import plain_copy, unit_roundoff


def losses(
    network, images, targets, *, dtype=torch.float32, channels_last=False, shift=0, noise=None
):
    """The loss before every step, and one behind the last."""
    network = copy.deepcopy(network).to(dtype)
    images, targets = images.to(dtype).roll(shift, 1), targets.roll(shift, 1)
    if noise is not None:
        generator = torch.Generator(images.device).manual_seed(noise)
        images = images * (
            1
            + torch.finfo(dtype).eps
            * torch.randn(images.shape, generator=generator, device=images.device)
        )
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
    # Not in evaluation mode: after so few batches running statistics are no guide to the data, and
    # a deep network's logits with them are huge.
    with torch.no_grad():
        found.append(F.cross_entropy(network(images[0]), targets[0]).double())
    return torch.stack(found)


def check_training(record, depth, batch, size, steps=3, **options):
    """`oracle.py`'s rule, with the losses of all steps as one vector.

    Deep networks at their start multiply rounding errors, and a pre-activation that rounds to the
    other side of zero moves the loss more than all the rest, in some runs and not in others. So
    eager's error is the largest over orders of the batch and over images with one more rounding
    each, and that of fused the median over the orders. float64 is its own
    truth, and its error there as in `oracle.py`.
    """
    network = pk.preact_resnet(depth, **options)
    plain = plain_copy(network)
    problem = torch.randn(steps, batch, 3, size, size), torch.randint(10, (steps, batch))
    orders = [{}, {"shift": 1}, {"channels_last": True}]
    rounded = [{"noise": seed} for seed in range(4)]
    truth, eager, fused = losses(plain, *problem, dtype=torch.float64), {}, {}
    for dtype in (torch.float32, torch.float64):
        eager[dtype], fused[dtype] = (
            torch.stack([losses(n, *problem, dtype=dtype, **run) - truth for run in runs])
            for n, runs in ((plain, orders + rounded), (network, orders))
        )
    errors = {dtype: float(runs.norm(dim=1).max()) for dtype, runs in eager.items()}
    found = {dtype: float(runs.norm(dim=1).median()) for dtype, runs in fused.items()}
    ratio = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    errors[torch.float64] += (batch * size * size) ** 0.5 * ratio * errors[torch.float32]
    record("losses in float64", truth.tolist())
    record("deviations of plain", {str(dtype): error for dtype, error in errors.items()})
    record("deviations of fused", {str(dtype): error for dtype, error in found.items()})
    for dtype, error in errors.items():
        allowed = 2 * error + unit_roundoff(dtype) * float(truth.norm())
        assert found[dtype] <= allowed, f"{dtype}: off by {found[dtype]:.3g}, allowed {allowed:.3g}"
    assert truth[-1] != truth[0]


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_29_layers(backend, record_property):
    check_training(record_property, 29, batch=8, size=16, steps=4)


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_basic_blocks(backend, record_property):
    check_training(record_property, 20, batch=8, size=16, steps=4)


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_29_layers_checkpointed(backend, record_property):
    check_training(record_property, 29, batch=8, size=16, memory="checkpoint")


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
def test_164_layers_of_small_images(backend, record_property):
    check_training(record_property, 164, batch=8, size=8, steps=2)


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["rebuild", "checkpoint"])
def test_164_layers_in_modes_that_rebuild(memory, backend, record_property):
    check_training(record_property, 164, batch=8, size=8, steps=2, memory=memory)


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.slow
def test_164_layers(backend, record_property):
    check_training(record_property, 164, batch=16, size=32)


@pytest.mark.backends("cpu", slow=("reference", "triton", "cuda"))
@pytest.mark.slow
def test_1001_layers_checkpointed(backend, record_property):
    check_training(record_property, 1001, batch=4, size=8, steps=1, memory="checkpoint")
