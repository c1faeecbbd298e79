"""Steps of SGD: losses keep to those of plain PyTorch."""

import copy

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.kernels import cpu
from tests.cases import SERVED_DTYPES, recorded_calls
from tests.oracle import assert_within_budget, distance, plain_copy


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
        *(
            pytest.param(164, memory, 2, marks=pytest.mark.slow)
            for memory in ("store", "rebuild", "checkpoint")
        ),
        pytest.param(1001, "checkpoint", 1, marks=pytest.mark.slow),
    ],
)
def test_losses_in_float64_follow_those_of_plain_pytorch(depth, memory, steps, backend):
    """Deep networks at their start multiply rounding errors: a wider dtype leaves room for that."""
    if torch.float64 not in SERVED_DTYPES[backend]:
        pytest.skip(f"backend {backend} does not serve float64")
    network = pk.preact_resnet(depth, memory=memory).double()
    images = torch.randn(steps, 4, 3, 8, 8, dtype=torch.float64)
    targets = torch.randint(10, (steps, 4))
    expected = losses(plain_copy(network), images, targets)
    found = losses(copy.deepcopy(network), images, targets)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)
    assert expected[-1] != expected[0]


def trained(network, images, targets, dtype, shift=0):
    """The losses of `losses`, and the parameters after the last step."""
    network = copy.deepcopy(network).to(dtype)
    found = losses(network, images.to(dtype).roll(shift, 1), targets.roll(shift, 1))
    return {"losses": found, **{name: p.detach() for name, p in network.named_parameters()}}


@pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")
def test_steps_on_the_cpu_kernels_in_float32_keep_the_budget(monkeypatch):
    network = pk.preact_resnet(8)
    problem = torch.randn(2, 4, 3, 8, 8), torch.randint(10, (2, 4))
    plain = plain_copy(network)
    truth = trained(plain, *problem, torch.float64)
    runs = [trained(plain, *problem, torch.float32, shift) for shift in range(4)]
    errors = {name: max(distance(run[name], truth[name]) for run in runs) for name in truth}
    names = ("norm_act_conv_forward", "norm_act_conv_backward")
    calls = [recorded_calls(cpu.kernels(), name, monkeypatch) for name in names]
    with pk.use_backend("cpu"):
        found = trained(network, *problem, torch.float32)
    assert all(calls)
    assert_within_budget(found, truth, errors)
