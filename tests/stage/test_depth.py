"""A network of 10,001 layers: time to build, bytes kept, gradients."""

import copy
import time

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk

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
