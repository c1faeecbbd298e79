"""The examples run, each in well under a minute, and find what they assert."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import preact_kernels as pk

FOLDER = Path(__file__).parents[2] / "examples"
TRAIN = FOLDER / "train_cifar.py"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {TRAIN})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs the training script.

    Returns losses, the gradients of the first step, printed accuracies, and converted models.
    """
    pytest.importorskip("sklearn")
    from preact_kernels.study import data

    load_digits = data.load_digits
    monkeypatch.delenv("PREACT_KERNELS_DATA", raising=False)
    monkeypatch.setattr(data, "load_digits", lambda *, train: load_digits(train=train).resized(16))
    cross_entropy, convert, sgd_step = F.cross_entropy, pk.convert, torch.optim.SGD.step

    def run(source, *arguments):
        losses, gradients, converted = [], [], []

        def step(optimizer):
            gradients.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])
            return sgd_step(optimizer)

        monkeypatch.setattr(torch.optim.SGD, "step", step)
        monkeypatch.setattr(
            F, "cross_entropy", lambda *args: losses.append(cross_entropy(*args)) or losses[-1]
        )
        monkeypatch.setattr(pk, "convert", lambda model: converted.append(convert(model)))
        path = tmp_path / "train.py"
        path.write_text(source)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        accuracies = re.findall(r"test accuracy (\S+)", capsys.readouterr().out)
        losses = torch.stack(losses).detach()
        return losses, gradients[0], list(map(float, accuracies)), converted

    return run


@pytest.mark.parametrize(
    ("arguments", "tolerance", "least_accuracy"),  # by chance: 0.1
    [(("--batch", "15"), 1e-3, 0.5), (("--batch", "500", "--bf16"), 1e-2, 0)],
    ids=["float32", "bfloat16"],
)
def test_training_is_the_same_without_the_line_that_fuses_it(
    train, arguments, tolerance, least_accuracy
):
    source = TRAIN.read_text()
    without, count = re.subn(r"^ +pk\.convert\(.*\n", "", source, flags=re.M)
    assert count == 1
    arguments = ("--depth", "8", "--epochs", "1", *arguments)
    losses, gradients, accuracies, (model,) = train(source, *arguments)
    plain_losses, plain_gradients, plain_accuracies, converted = train(without, *arguments)
    report = pk.conversion_report(model)
    assert not converted and len(report) == len(report.fused) > 0
    torch.testing.assert_close(losses[:3], plain_losses[:3], rtol=tolerance, atol=0)
    for gradient, plain_gradient in zip(gradients, plain_gradients, strict=True):
        assert (gradient - plain_gradient).norm() < 20 * tolerance * plain_gradient.norm()
    assert min(accuracies[-1], plain_accuracies[-1]) > least_accuracy
