"""Benchmarks of published models: conversion and inference."""

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

from bench import converted, inference, report, rivals
from bench.measure import Machine
from bench.records import ConvertedRow, InferenceRow, RivalRow, read
from testbed import norm_act_models
from testbed import published_models as published

CPU = torch.device("cpu")


def tiny_net():
    blocks = published.FunctionalBottleneck(8, 8), published.FunctionalBottleneck(32, 8)
    return published.network_of(*blocks)


def not_installed():
    raise ModuleNotFoundError("No module named 'timm'", name="timm")


@pytest.fixture(autouse=True)
def models(monkeypatch):
    for name, build in (("tiny", tiny_net), ("missing", not_installed)):
        monkeypatch.setitem(converted.CASES, name, converted.Case(build, (4, 8)))
        monkeypatch.setitem(inference.NETWORKS, name, (build, 8))


def assert_says_where(row):
    here = Machine.of(CPU)
    found = row.device, row.versions, row.commit
    assert found == (here.device, here.versions, here.commit)
    assert row.date and row.command.startswith("python -m ")


def test_operators_of_torchvision_are_defined_only_where_its_library_does_not_load(monkeypatch):
    def refuse(*_):
        raise AssertionError("defined a second time, which ends the process")

    monkeypatch.setattr(published.importlib, "import_module", lambda name: name)
    monkeypatch.setattr(torch.library, "Library", refuse)
    assert published.torchvision_models() == "torchvision.models"


def test_models_are_measured_before_and_after_conversion(tmp_path, monkeypatch, capsys):
    options = ["--steps", "1", "--device", "cpu", "--out", str(tmp_path)]
    converted.main(["--models", "tiny", "missing", *options])
    converted.main(["--models", "tiny", *options, "--no-graphs", "--dtype", "bf16"])
    printed = capsys.readouterr().out
    assert "7 of 7" in printed and "missing: not measured, timm is not installed" in printed
    (path,) = tmp_path.iterdir()
    row, half = read(path, ConvertedRow)
    assert (row.case, row.batch, row.image_size, row.fused) == ("tiny", 4, 8, 7)
    assert row.plain_bytes > row.store_bytes >= row.rebuild_bytes > 0
    assert half.plain_bytes < 0.8 * row.plain_bytes  # images are float32 in both
    assert (row.dtype, half.dtype) == ("fp32", "bf16")
    assert (row.compiled_graphs, half.compiled_graphs) == (1, None)
    assert_says_where(row)
    with pytest.raises(FileNotFoundError):  # no rows of networks
        report.load(tmp_path)
    monkeypatch.setattr(converted, "measured", lambda row, a: pytest.fail("measured again"))
    converted.main(["--models", "tiny", *options, "--resume"])
    assert read(path, ConvertedRow) == [row, half]


def test_a_model_that_conversion_makes_wrong_gets_no_speed(tmp_path, monkeypatch):
    def convert(model, memory):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps *= 30
        return model

    monkeypatch.setattr(converted.pk, "convert", convert)
    with pytest.raises(SystemExit, match=r"tiny: .*of the plain model"):
        converted.main(["--models", "tiny", "--device", "cpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_inference_is_measured_in_all_ways(tmp_path, capsys):
    options = ["--batch", "1", "2", "--rounds", "1", "--no-compile", "--device", "cpu"]
    inference.main(["--networks", "tiny", *options, "--out", str(tmp_path)])
    options += ["--dtype", "fp64"]
    inference.main(["--networks", "resnet-20", "missing", *options, "--out", str(tmp_path)])
    assert "missing: not measured, timm is not installed" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    rows = read(path, InferenceRow)
    contenders = (
        "eager",
        "torch.fx fuse",
        "pk.fuse_for_inference",
        "pk.fuse_for_inference, converted",
    )
    cases = (("tiny", 8, "fp32"), ("resnet-20", 32, "fp64"))
    assert [(r.case, r.image_size, r.dtype, r.batch, r.contender) for r in rows] == [
        (*case, batch, contender) for case in cases for batch in (1, 2) for contender in contenders
    ]
    for row in rows:
        assert row.images_per_s == pytest.approx(row.batch / row.median_ms * 1e3, rel=1e-4)
        assert_says_where(row)
    with pytest.raises(FileNotFoundError):  # no rows of networks
        report.load(tmp_path)


def test_models_with_named_activations_are_measured_against_rivals(tmp_path, monkeypatch):
    case = rivals.Case(
        lambda: norm_act_models.SwishWideResNet(10, 1),
        lambda: (torch.randn(4, 3, 8, 8),),
        ("SwishBlock",),
        {norm_act_models.SwishFunction: "silu"},
    )
    monkeypatch.setitem(rivals.CASES, "tiny", case)
    options = ["--steps", "1", "--device", "cpu", "--out", str(tmp_path)]
    names = ["eager", "checkpoint", "pk.convert", "pk.convert, checkpoint, channels_last"]
    rivals.main(["--models", "tiny", *options, "--contenders", *names])
    (path,) = tmp_path.iterdir()
    rows = {r.contender: r for r in read(path, RivalRow)}
    eager, checkpointed, converted, both = (rows[n] for n in names)
    assert [r.fused for r in rows.values()] == ["", "", "7 of 7", "7 of 7"]
    assert eager.saved_bytes > converted.saved_bytes > both.saved_bytes
    assert eager.saved_bytes > checkpointed.saved_bytes
    assert all(r.median_ms and not r.note for r in rows.values())
