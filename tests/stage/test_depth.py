"""Networks of 164 to 10,001 layers: gradients of every mode, time to build, bytes kept."""

import copy
import time

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.ops.memory_mode import MEMORY_MODES
from tests.oracle import plain_copy, unit_roundoff

pytestmark = pytest.mark.slow
MIB = 2**20


def test_10001_layers_build_print_copy_and_train_one_image(record_property):
    start_s = time.monotonic()
    network = pk.preact_resnet(10_001, memory="rebuild")
    built_s = time.monotonic() - start_s
    record_property("built in, s", built_s)
    assert built_s < 30
    assert sum(len(stage) for stage in network.stages) == 3333
    assert len(network.state_dict()) == 60_005
    assert repr(network)
    x, target = torch.randn(1, 3, 32, 32), torch.tensor([3])
    kept = pk.saved_bytes(network, x)
    record_property("kept, MiB", kept / MIB)
    # 2 of a bottleneck's 12 C elements a pixel, the statistics, and what is at the stages' ends.
    inner = 1111 * 2 * (16 * 32**2 + 32 * 16**2 + 64 * 8**2) * 4
    statistics = 1111 * 2 * 6 * (16 + 32 + 64) * 4
    assert kept < 1.02 * (inner + statistics)
    for memory in ("rebuild", "checkpoint"):
        for stage in network.stages:
            stage.memory = memory
        network.zero_grad()
        F.cross_entropy(network(x), target).backward()
        assert all(p.grad.isfinite().all() for p in network.parameters())
    assert len(copy.deepcopy(network.stages[0])) == 1111


def gradient(model, x, target):
    model.zero_grad()
    F.cross_entropy(model(x), target).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def test_gradients_of_every_mode_are_as_near_to_float64_as_eager(record_property):
    """`oracle.py`'s rule for the gradient of 164 layers as one vector."""
    x, target = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    network = pk.preact_resnet(164)
    plain = plain_copy(network)

    truth = gradient(copy.deepcopy(plain).double(), x.double(), target)
    nhwc = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    nhwc_x = x.contiguous(memory_format=torch.channels_last)
    own = [gradient(plain, x, target), gradient(nhwc, nhwc_x, target)]
    allowed = 2 * max(float((g - truth).norm()) for g in own)
    allowed += unit_roundoff(torch.float32) * float(truth.norm())
    errors = {}
    for memory in MEMORY_MODES:
        for stage in network.stages:
            stage.memory = memory
        errors[memory] = float((gradient(network, x, target) - truth).norm())
    record_property("errors", errors | {"allowed": allowed})
    assert all(error <= allowed for error in errors.values()), (errors, allowed)
