"""Steps of SGD: losses keep to those of plain PyTorch."""

import copy

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk
from tests.oracle import plain_copy


def losses(network, images, targets):
    """The loss before every step, and one after the last."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    found = []
    for x, target in zip(images, targets, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    # Not in evaluation mode: after so few batches running statistics are no guide to the data.
    with torch.no_grad():
        found.append(F.cross_entropy(network(images[0]), targets[0]))
    return torch.stack(found)


@pytest.mark.backends("cpu", slow=("reference",))
@pytest.mark.parametrize(
    ("depth", "memory", "steps"),
    [
        (20, "rebuild", 3),
        (29, "checkpoint", 3),
        pytest.param(1001, "checkpoint", 1, marks=pytest.mark.slow),
    ],
)
def test_losses_in_float64_follow_those_of_plain_pytorch(depth, memory, steps, backend):
    """Deep networks at their start multiply rounding errors: a wider dtype leaves room for that."""
    network = pk.preact_resnet(depth, memory=memory).double()
    images = torch.randn(steps, 4, 3, 8, 8, dtype=torch.float64)
    targets = torch.randint(10, (steps, 4))
    expected = losses(plain_copy(network), images, targets)
    found = losses(copy.deepcopy(network), images, targets)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)
    assert expected[-1] != expected[0]
