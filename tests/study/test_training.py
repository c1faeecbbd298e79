"""Training runs of the study: options, continuing, checkpoints, files, wrong input."""

import dataclasses
import errno
import io
import os
import re
import resource
import runpy
import signal
import sys
from unittest import mock

import pytest
import torch

from preact_kernels import study
from preact_kernels.study import checkpoints, config, recipes, training
from preact_kernels.study.checkpoints import CheckpointError
from preact_kernels.study.commands import main
from preact_kernels.study.config import Config
from preact_kernels.study.files import locked
from preact_kernels.study.processes import Interrupted, Processes
from preact_kernels.study.training import TrainingRun, train
from tests.oracle import assert_same_bits
from tests.torchrun import torchrun

pytestmark = pytest.mark.usefixtures("few_digits")
ONE = Processes(0, 0, 1)
# Includes everything random: dropout, stochastic depth, order and augmentation.
SMALL = {"depth": 8, "image_size": 8, "batch": 50, "epochs": 3, "dropout": 0.2, "survival": 0.8}
ARGUMENTS = [t for k, v in SMALL.items() for t in (f"--{k.replace('_', '-')}", str(v))]


def small(**options):
    return Config(**{**SMALL, "device": "cpu", **options})


def trained(out, **options):
    return train(small(**options), out, show_progress=False)


class Killed(BaseException):
    """Ends a run as SIGKILL would."""


def killed_at(monkeypatch, step, out, **options):
    """Starts a run and ends it before `step`, as if killed."""
    one_step = TrainingRun.one_step

    def interrupted(run):
        if run.step == step:
            raise Killed
        one_step(run)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TrainingRun, "one_step", interrupted)
        trained(out, **options)


def assert_same_run(a, b):
    assert a.history.losses == b.history.losses
    for x, y in zip(a.history.epochs, b.history.epochs, strict=True):
        assert x._replace(seconds=0) == y._replace(seconds=0)
    assert_same_bits(a.network.state_dict(), b.network.state_dict())
    for name in ("losses.csv", "signal.csv"):
        assert (a.out / name).read_bytes() == (b.out / name).read_bytes()


# Training


def test_a_run_learns_and_writes_its_files(tmp_path, capsys):
    options = ["--out", str(tmp_path), "--diagnose-every", "12", "--epochs", "4"]
    assert main(["train", *ARGUMENTS, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{4}|1\.0000)", lines[-1])
    assert accuracy and float(accuracy[1]) > 0.3
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 1 + 4
    assert list((tmp_path / "tensorboard").glob("events*"))
    losses = (tmp_path / "losses.csv").read_text().splitlines()
    assert losses[0] == "step,epoch,learning_rate,loss" and len(losses) == 1 + 4 * 6
    rates = [recipes.learning_rate("warmup-cosine", 0.1, s, 24, 1) for s in range(24)]
    assert [float(line.split(",")[2]) for line in losses[1:]] == pytest.approx(rates)
    # Blocks at steps 1, 12 and 24.
    assert len((tmp_path / "signal.csv").read_text().splitlines()) == 1 + 3 * 3
    report = (tmp_path / "report.md").read_text()
    pictures = re.findall(r"\]\((.*?\.png)\)", report)
    assert len(pictures) == 6 and all((tmp_path / p).exists() for p in pictures)
    # A second call with the same options has nothing to train.
    before = (tmp_path / "checkpoint.pt").read_bytes()
    run = trained(tmp_path, diagnose_every=12, epochs=4, device=None)
    assert f"{run.history.epochs[-1].test_accuracy:.4f}" == accuracy[1]
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_options_reach_the_network(monkeypatch):
    options = {
        **{"depth": 29, "variant": "imagenet", "block": "bottleneck", "width": 2, "groups": 2},
        **{"base_width": 32, "stride_on": "conv1", "survival": 0.5, "init": "orthogonal"},
        **{"memory": "checkpoint", "segments": 2, "anchor_every": 3, "fused": False},
        **{"placement": "original", "shortcut": "dropout", "gate_bias": -1.0},
        **{"shortcut_scale": 0.25, "branch_scale": 0.75, "shortcut_dropout": 0.25},
        **{"norm": "group", "activation": "gelu", "dropout": 0.125, "residual_scale": 0.0},
        "se": True,
    }
    calls = []
    monkeypatch.setattr(config, "study_network", lambda *a, **k: calls.append((a, k)))
    config.build_network(Config(**options, float32_stream=True), 7)
    config.build_network(Config(), 7)
    (arguments, found), (_, defaults) = calls
    assert arguments == (options.pop("depth"), 7)
    assert found == {**options, "residual_dtype": torch.float32}
    assert not [name for name in found if found[name] == defaults[name]]


def test_options_reach_optimizer_batches_stages_and_convolutions(tmp_path):
    network = {"depth": 20, "dropout": 0.0, "survival": 1.0, "memory_budget": "1.2MB"}
    options = {"autocast": "bfloat16", "float32_stream": True, "depth_lr": 0.5, "augment": False}
    recipe = {"recipe": "paper", "momentum": 0.5, "weight_decay": 0.25, "clip_norm": 0.01}
    run = TrainingRun(small(**network, **options, **recipe), tmp_path, ONE)
    for group in run.optimizer.param_groups:
        assert (group["momentum"], group["weight_decay"]) == (0.5, 0.25)
    assert run.groups[0].factor == 0.5
    assert run.batches.augment is False
    assert any(stage.memory != "store" for stage in run.network.stages)
    dtypes = []
    run.network.stages[0][0].conv1.register_forward_hook(lambda *a: dtypes.append(a[2].dtype))
    run.one_step()
    assert torch.bfloat16 in dtypes
    gradients = [p.grad for p in run.network.parameters()]
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(0.01, rel=1e-3)


def test_every_step_of_every_process_has_a_seed(tmp_path):
    seeds = {training.step_seed(3, step, rank) for step in range(1000) for rank in range(8)}
    assert len(seeds) == 8000
    run = TrainingRun(small(), tmp_path, Processes(1, 0, 1))
    for step in (0, 1):
        run.one_step()
        assert torch.initial_seed() == training.step_seed(0, step, 1)


def test_evaluation_uses_all_images_and_running_statistics(tmp_path):
    run = TrainingRun(small(epochs=1), tmp_path, ONE)
    run.one_step()
    accuracy = run.evaluate()
    logits = run.network.eval()(run.test_images.images)
    assert accuracy == float((logits.argmax(1) == run.test_images.labels).double().mean())


# Continuing


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        pytest.param({}, (3, 6, 11), id="float32"),
        pytest.param({"autocast": "float16", "epochs": 1}, (5,), id="float16"),
        pytest.param({"device": "cuda"}, (3, 6, 11), id="captured", marks=GPU),
        pytest.param({"device": "cuda", "autocast": "float16"}, (3,), id="both", marks=GPU),
    ],
)
def test_a_killed_run_continues_bit_for_bit(options, kills, monkeypatch, tmp_path):
    """Killed within epochs, at their ends, and before the first checkpoint."""
    options = {"checkpoint_every": 4, "diagnose_every": 5, "clip_norm": 0.5, **options}
    unbroken = trained(tmp_path / "unbroken", **options)
    assert unbroken.is_captured == ("device" in options)
    for step in kills:
        killed_at(monkeypatch, step, tmp_path / "broken", **options)
    continued = trained(tmp_path / "broken", **options)
    assert_same_run(continued, unbroken)
    if "autocast" in options:
        assert continued.scaler.state_dict() == unbroken.scaler.state_dict()
    if unbroken.is_captured:
        uncaptured = trained(tmp_path / "uncaptured", capture=False, **options)
        assert uncaptured.history.losses[:3] == pytest.approx(unbroken.history.losses[:3], rel=1e-3)


def test_a_run_killed_before_its_files_are_written_writes_them(monkeypatch, tmp_path):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training.Logs, "write", mock.Mock(side_effect=Killed))
        trained(tmp_path, epochs=1)
    assert not (tmp_path / "losses.csv").exists()
    trained(tmp_path, epochs=1)
    assert len((tmp_path / "losses.csv").read_text().splitlines()) == 1 + 6


def test_a_folder_takes_one_run_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="out: expected a folder that no other"):
        trained(tmp_path)


def test_a_run_that_diverges_has_a_report(undrawn, tmp_path, capsys):
    arguments = ["--lr", "1e12", "--survival", "1", "--warm-up-steps", "0", "--epochs", "1"]
    assert main(["train", *ARGUMENTS, "--out", str(tmp_path), *arguments]) == 0
    assert "the loss is not finite" in capsys.readouterr().err
    assert "nothing to plot" in (tmp_path / "report.md").read_text()


def test_a_signal_stops_a_run_with_a_checkpoint(monkeypatch, tmp_path):
    def terminate(run):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainingRun, "_set_learning_rate", terminate)
    with pytest.raises(Interrupted, match="SIGTERM"):
        trained(tmp_path, epochs=1)
    assert checkpoints.load(tmp_path / "checkpoint.pt")["step"] == 1


def test_memory_mode_and_plain_may_change_when_a_run_continues(monkeypatch, tmp_path):
    options = {"dropout": 0.0, "survival": 1.0, "depth": 14, "epochs": 1, "checkpoint_every": 2}
    killed_at(monkeypatch, 2, tmp_path, **options)
    killed_at(monkeypatch, 4, tmp_path, memory="rebuild", **options)
    assert len(trained(tmp_path, fused=False, **options).history.losses) == 6


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Batch norms are synchronised: losses differ from one process by rounding alone."""
    arguments = ["train", *ARGUMENTS, "--device", "cpu", "--dropout", "0", "--survival", "1"]
    losses = []
    for count in (1, 2):
        options = ["--sync-batch-norm", "--out", str(tmp_path / str(count))]
        process = torchrun(count, ["preact_kernels.study", *arguments, *options])
        assert process.returncode == 0, process.stderr
        assert re.fullmatch(r"test accuracy: \d\.\d{4}", process.stdout.splitlines()[-1])
        lines = (tmp_path / str(count) / "losses.csv").read_text().splitlines()[1:7]
        losses.append(torch.tensor([float(line.split(",")[-1]) for line in lines]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)


# Checkpoints


@pytest.fixture(scope="module")
def finished(few_digits, tmp_path_factory):
    """The checkpoint of a finished run."""
    out = tmp_path_factory.mktemp("finished")
    trained(out, epochs=1)
    return (out / "checkpoint.pt").read_bytes()


def damaged(content):
    """Changes one bit of a stored tensor."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:1000], r"checkpoint\.pt: expected a checkpoint.*cannot be read"),
        (damaged, r"checkpoint\.pt: expected a checkpoint.*is damaged"),
        ({"format": None}, "with format 'preact_kernels.study checkpoint', got None"),
        ({"version": 0}, "of version 1, got 0"),
        (
            {"config": dataclasses.asdict(small(epochs=1, depth=14, lr=0.05))},
            r"with depth 14 in place of 8, lr 0\.05 in place of 0\.1;",
        ),
        ({"images": "c"}, r"on digits \(300 images, checksum \w{8}\), got one on c$"),
        ({"step": 1}, "expected the state .*, got another: 6 losses of 1 steps"),
        ({"network": {}}, "expected the state of such a run, got another"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_stays(change, message, finished, tmp_path):
    path = tmp_path / "checkpoint.pt"
    if isinstance(change, dict):
        torch.save(torch.load(io.BytesIO(finished)) | change, path)
    else:
        path.write_bytes(change(finished))
    content = path.read_bytes()
    with pytest.raises(CheckpointError, match=message):
        trained(tmp_path, epochs=1)
    assert path.read_bytes() == content


def test_a_full_disk_loses_no_checkpoint(finished, tmp_path):
    """The second checkpoint exceeds a limit on the size of files."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(finished)
    run = TrainingRun(small(epochs=1), tmp_path, ONE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(finished) // 2, hard))
        with pytest.raises(OSError, match=r"not written \(.*the file from before is still") as e:
            run.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert e.value.errno == errno.EFBIG
    assert path.read_bytes() == finished
    assert list(tmp_path.iterdir()) == [path]
    run.checkpoint()
    checkpoints.load(path)


# Wrong input


def test_wrong_options_are_named(tmp_path):
    for arguments, message in (
        ("--data /nowhere", "data: expected a directory with CIFAR files, found none at"),
        ("--batch 5000", r"batch: expected 1 to 300 \(digits\), got 5000"),
        ("--lr nan", "lr: expected a finite number, got nan"),
        ("--lr -1", "lr: expected a positive number, got -1.0"),
        ("--epochs 0", "epochs: expected at least 1, got 0"),
        ("--memory-budget lots", "memory_budget: expected bytes such as 300MiB, got 'lots'"),
        ("--memory-budget 1", "memory_budget: budget: expected at least"),
        ("--device gpu", "device: expected one such as 'cpu'"),
        ("--resume", "resume: expected .*checkpoint.pt, found none"),
    ):
        with pytest.raises(SystemExit, match=f"study: .*{message}"):
            main(["train", *ARGUMENTS, "--out", str(tmp_path / "out"), *arguments.split()])
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="placement: expected one of 'original'"):
        Config(placement="pre")
    with pytest.raises(TypeError, match="epochs: expected int, got str"):
        Config(epochs="3")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for name in ("commands", "comparisons"):
        monkeypatch.delitem(sys.modules, f"preact_kernels.study.{name}")
    monkeypatch.delattr(study, "comparisons")
    with pytest.raises(SystemExit, match="study: expected tqdm, which is not installed: pip inst"):
        runpy.run_module("preact_kernels.study", run_name="__main__")
