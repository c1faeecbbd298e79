"""Train a network of 1,001 layers within a memory budget.

Run: python examples/memory_budget.py
"""

import torch
from torch.nn import functional as F

import preact_kernels as pk

BUDGET = 20 * 2**20  # bytes that a forward may save for backward


def main() -> None:
    """Plans memory modes, counts saved bytes, and runs one step."""
    torch.manual_seed(0)
    plain = pk.preact_resnet(1001, fused=False)
    model = pk.preact_resnet(1001)
    model.load_state_dict(plain.state_dict())
    images, labels = torch.randn(1, 3, 32, 32), torch.randint(10, (1,))

    plan = pk.plan_memory(model, images, BUDGET)
    print(plan)
    plan.apply(model)

    kept = {name: pk.saved_bytes(m, images) for name, m in (("plain", plain), ("planned", model))}
    for name, size in kept.items():
        print(f"{name}: keeps {size / 2**20:.1f} MiB")
    assert kept["planned"] == plan.predicted_bytes <= BUDGET < kept["plain"]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = F.cross_entropy(plain(images), labels)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    print(f"loss: plain {expected:.4f}, planned {loss:.4f}")
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)  # after 1,001 layers


if __name__ == "__main__":
    main()
