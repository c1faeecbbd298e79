"""The Python code in README.md and docs/ runs, and prints what the pages say.

The blocks of a page are one program. In the pages of `SNIPPETS` each block runs alone, with the
names of `snippet_names`. A block ```text after a block of code is its output.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import preact_kernels as pk
from testbed.published_models import torchvision_models

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in sorted((ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
}

# Pages of snippets, with the channels of their x.
SNIPPETS = {
    "README.md": 3,
    "docs/backends.md": 3,
    "docs/convert.md": 3,
    "docs/distributed.md": 3,
    "docs/memory.md": 3,
    "docs/norms.md": 128,
    "docs/study.md": 3,
}


def snippet_names(channels):
    """The names that snippets use."""
    names = ("weight", "bias", "mean", "var", "bn_weight", "bn_bias", "running_mean", "running_var")
    model = pk.preact_resnet(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    target = torch.randint(10, (2,))

    def train():
        F.cross_entropy(model(torch.randn(2, 3, 16, 16)), target).backward()
        optimizer.step()

    return {
        **{name: torch.rand(channels) for name in names},
        "pk": pk,
        "torch": torch,
        "nn": nn,
        "F": F,
        "fully_shard": fully_shard,
        "DistributedDataParallel": DistributedDataParallel,
        "x": torch.randn(2, channels, 16, 16),
        "conv_weight": torch.randn(channels, channels, 3, 3),
        "conv_bias": torch.randn(channels),
        "shortcut": torch.randn(2, channels, 16, 16),
        "scale": torch.randn(2, channels),
        "shift": torch.randn(2, channels),
        "model": model,
        "diffusion_model": nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3)),
        "blocks": [pk.PreActBasicBlock(8, 8) for _ in range(8)],
        "Swish": type("Swish", (nn.Module,), {}),
        "LeakySwish": type("LeakySwish", (nn.Module,), {}),
        "images": torch.randn(2, 3, 16, 16),
        "labels": target,
        "optimizer": optimizer,
        "train": train,
    }


@pytest.fixture
def one_process():
    """A process group of this process, for what wraps models."""
    if torch.cuda.is_available():
        pytest.skip("the group is on the CPU")
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# A quick test of the same network: examples/memory_budget.py.
SLOW = ("docs/guides/1001-layers.md",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, text in PAGES.items()
        if BLOCK.search(text)
    ],
)
def test_the_code_of_a_page_runs(name, request, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = PAGES[name]
    if name == "docs/distributed.md":
        request.getfixturevalue("one_process")
    if name == "docs/guides/timm.md":
        torchvision_models()  # which timm imports
        pytest.importorskip("timm")
    if "cpu" not in pk.available_backends():
        pytest.skip("the pages use the backend cpu")
    names = {}
    with pk.use_backend("auto"):
        for block in BLOCK.finditer(text):
            if name in SNIPPETS:
                names = snippet_names(SNIPPETS[name])
            code = "\n" * text.count("\n", 0, block.start(1)) + block[1]  # lines of the page
            exec(compile(code, str(ROOT / name), "exec"), names)
            printed = capsys.readouterr().out
            if block[2] is not None:
                assert printed.split() == block[2].split()
