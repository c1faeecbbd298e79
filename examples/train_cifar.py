"""Train a pre-activation ResNet on CIFAR-10; `pk.convert` makes it run fused.

Run: python examples/train_cifar.py  # on scikit-learn's digits: half a minute on a CPU
     python examples/train_cifar.py --data ~/cifar10 --depth 110 --epochs 200 --bf16
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.study.data import Batches, load


class Block(nn.Module):
    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.is_identity = stride == 1 and in_planes == planes
        if not self.is_identity:
            self.shortcut = nn.Conv2d(in_planes, planes, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(x))
        shortcut = x if self.is_identity else self.shortcut(h)
        return shortcut + self.conv2(F.relu(self.bn2(self.conv1(h))))


def resnet(depth: int, classes: int) -> nn.Sequential:
    """Returns a ResNet v2 of 6n + 2 layers."""
    layers, in_planes = [nn.Conv2d(3, 16, 3, padding=1, bias=False)], 16
    for planes, stride in ((16, 1), (32, 2), (64, 2)):
        for index in range((depth - 2) // 6):
            layers.append(Block(in_planes, planes, 1 if index else stride))
            in_planes = planes
    head = (nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *head, nn.Linear(64, classes))


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", help="folder with CIFAR-10's binary files; none: digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=20, help="layers: 6n + 2")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    train, test = load(args.data).to(device), load(args.data, train=False).to(device)
    batches = Batches(train, args.batch, seed=0)  # shuffled, shifted; CIFAR also flipped
    steps = batches.steps_per_epoch

    model = resnet(args.depth, train.classes).to(device, memory_format=torch.channels_last)
    pk.convert(model)  # runs BatchNorm-ReLU-Conv fused; without this line, plain PyTorch
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    with autocast:
        kept = pk.saved_bytes(model, batches[0][0])
    print(f"keeps {kept / 2**20:,.0f} MiB for the backward")

    options = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), args.lr, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * steps)
    for epoch in range(args.epochs):
        model.train()
        start_s, total = time.perf_counter(), torch.zeros((), device=device)
        for step in range(epoch * steps, (epoch + 1) * steps):
            images, labels = batches[step]
            images = images.to(memory_format=torch.channels_last)
            with autocast:
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        mean_loss = float(total) / steps  # waits for a GPU to finish
        rate = steps * args.batch / (time.perf_counter() - start_s)
        model.eval()
        with torch.no_grad(), autocast:
            parts = zip(test.images.split(500), test.labels.split(500), strict=True)
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
        accuracy = right / len(test.labels)
        print(f"epoch {epoch + 1}: loss {mean_loss:.4f}, {rate:,.0f} images/s", end=", ")
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
