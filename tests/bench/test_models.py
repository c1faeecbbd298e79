"""Published models, converted, against rivals."""

import copy

import pytest
import torch

from bench import models
from bench.measure import Machine
from bench.records import ModelRow, read
from testbed import norm_act_models


def not_installed():
    raise ModuleNotFoundError("No module named 'timm'", name="timm")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Measures models with the command; returns the rows by model and contender."""
    tiny = models.Case(
        lambda: norm_act_models.SwishWideResNet(10, 1),
        (4, 3, 8, 8),
        "SwishBlock",
        activations={norm_act_models.SwishFunction: "silu"},
    )
    monkeypatch.setitem(models.CASES, "tiny", tiny)
    monkeypatch.setitem(models.CASES, "no blocks", tiny._replace(blocks=""))
    monkeypatch.setitem(models.CASES, "missing", models.Case(not_installed, (4, 3, 8, 8)))

    def run(*options):
        models.main(["--steps", "1", "--device", "cpu", "--out", str(tmp_path), *options])
        (path,) = tmp_path.iterdir()
        return {(r.case, r.contender): r for r in read(path, ModelRow)}

    return run


def test_converted_models_keep_less_and_rows_say_where(measured, capsys):
    names = [c.name for c in models.CONTENDERS if not c.name.startswith("compile")]
    rows = measured("--models", "tiny", "missing", "no blocks", "--contenders", *names)
    printed = capsys.readouterr().out
    assert "missing: not measured, timm is not installed" in printed and "7 of 7" in printed
    assert list(rows)[: len(names)] == [("tiny", name) for name in names]
    assert ("no blocks", "pk.convert") in rows and ("no blocks", "checkpoint") not in rows
    own = {name: rows["tiny", name] for name in names}
    for name, row in own.items():
        assert row.median_ms and row.peak_bytes is not None and not row.note
        assert row.fused == ("7 of 7" if "convert" in name else "")
    kept = {name: row.saved_bytes for name, row in own.items()}
    assert kept["eager"] > kept["pk.convert"] > kept["pk.convert, checkpoint, channels_last"]
    assert kept["eager"] > kept["checkpoint"]
    assert own["eager"].device == Machine.of(torch.device("cpu")).device


class ListBlock(torch.nn.Linear):
    def forward(self, inputs):
        return super().forward(torch.cat(inputs, 1))


class ListNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(ListBlock(3 * i, 3) for i in (1, 2))

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def test_a_checkpointed_block_recomputes_with_the_list_that_it_was_given():
    plain, x = ListNet(), torch.randn(2, 3)
    checkpointed = copy.deepcopy(plain)
    models._checkpoint(checkpointed, models.Case(ListNet, x.shape, "OtherBlock ListBlock"))
    assert models.pk.saved_bytes(checkpointed, x) < models.pk.saved_bytes(plain, x)
    for net in (plain, checkpointed):
        net(x).square().sum().backward()
    for ours, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_model_that_conversion_makes_wrong_gets_no_speed(measured, monkeypatch):
    convert = models.pk.convert

    def wrong(model, **options):
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eps *= 1e4
        return convert(model, **options)

    monkeypatch.setattr(models.pk, "convert", wrong)
    with pytest.raises(SystemExit, match="some contenders were not measured"):
        measured("--models", "tiny", "--contenders", "eager", "pk.convert")
    row = measured("--models", "tiny", "--contenders", "eager")["tiny", "pk.convert"]
    assert (row.median_ms, row.saved_bytes) == (None, None)
    assert row.note.startswith("ArithmeticError: error ")


def test_a_contender_compiles_and_its_missing_import_is_an_error(measured, monkeypatch):
    compile_within_budget = models.inductor(0.5)
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        graph = torch.fx.symbolic_trace(torch.nn.ReLU())
        assert callable(compile_within_budget(graph, [torch.randn(3)]))

    def missing(*_, **__):
        raise ModuleNotFoundError("no module", name="inductor")

    monkeypatch.setattr(models.pk, "convert", missing)
    with pytest.raises(ModuleNotFoundError):
        measured("--models", "tiny", "--contenders", "eager", "pk.convert")
