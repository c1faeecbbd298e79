"""Training runs of the study: recipes, checkpoints, continuing, files, wrong input."""

import errno
import io
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from preact_kernels.study import checkpoints, config, recipes, training
from preact_kernels.study.checkpoints import CheckpointError
from preact_kernels.study.commands import main
from preact_kernels.study.config import Config
from preact_kernels.study.files import locked
from preact_kernels.study.processes import Interrupted, Processes
from preact_kernels.study.training import TrainingRun, train
from tests.torchrun import torchrun

ONE = Processes(0, 0, 1)
# Everything random: dropout, stochastic depth, order and augmentation.
SMALL = {"depth": 8, "image_size": 8, "batch": 250, "epochs": 3, "dropout": 0.2, "survival": 0.8}
ARGUMENTS = [t for k, v in SMALL.items() for t in (f"--{k.replace('_', '-')}", str(v))]


def small(**options):
    return Config(**{**SMALL, "device": "cpu", **options})


def trained(out, **options):
    return train(small(**options), out, show_progress=False)


class Killed(BaseException):
    """In place of SIGKILL."""


def killed_at(monkeypatch, step, out, **options):
    """A run that ends before `step` as if killed."""
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
    assert a.history.signal == b.history.signal
    assert a.network.state_dict().keys() == b.network.state_dict().keys()
    for name, value in a.network.state_dict().items():
        assert torch.equal(value, b.network.state_dict()[name]), name
    for name in ("losses.csv", "signal.csv"):
        assert (a.out / name).read_bytes() == (b.out / name).read_bytes()


# Training


def test_a_run_learns_and_writes_its_files(tmp_path, capsys):
    assert main(["train", *ARGUMENTS, "--out", str(tmp_path), "--diagnose-every", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{4}|1\.0000)", lines[-1])
    assert accuracy and float(accuracy[1]) > 0.3
    for name in ("checkpoint.pt", "losses.csv", "epochs.csv", "signal.csv", "report.md"):
        assert (tmp_path / name).stat().st_size
    if find_spec("tensorboard"):
        assert list((tmp_path / "tensorboard").glob("events*"))
    losses = (tmp_path / "losses.csv").read_text().splitlines()
    assert losses[0] == "step,epoch,learning_rate,loss" and len(losses) == 1 + 3 * 6
    rates = [recipes.learning_rate("warmup-cosine", 0.1, s, 18, 1) for s in range(18)]
    assert [float(line.split(",")[2]) for line in losses[1:]] == pytest.approx(rates)
    assert float(losses[-1].split(",")[-1]) < float(losses[1].split(",")[-1])
    signal_rows = (tmp_path / "signal.csv").read_text().splitlines()
    assert len(signal_rows) == 1 + 3 * 4  # blocks; steps 1, 6, 12 and 18
    report = (tmp_path / "report.md").read_text()
    pictures = re.findall(r"\]\((.*?\.png)\)", report)
    assert len(pictures) == 6 and all((tmp_path / p).exists() for p in pictures)
    assert "batch norms fused" in report
    # The same command again: nothing is left to train.
    before = (tmp_path / "checkpoint.pt").read_bytes()
    assert main(["train", *ARGUMENTS, "--out", str(tmp_path), "--diagnose-every", "6"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [
        {"autocast": "bfloat16", "float32_stream": True, "dropout": 0.0, "survival": 1.0},
        {"autocast": "float16", "clip_norm": 1.0},
        {"memory_budget": "3.5MB", "dropout": 0.0, "survival": 1.0, "depth": 20},
        {"depth_lr": 0.5, "recipe": "paper", "fused": False},
    ],
    ids=["bfloat16", "float16", "budget", "depth-lr"],
)
def test_options_train(options, tmp_path):
    run = trained(tmp_path, epochs=1, **options)
    assert all(map(math.isfinite, run.history.losses))
    assert all(p.isfinite().all() for p in run.network.parameters())
    if "memory_budget" in options:
        assert any(stage.memory != "store" for stage in run.network.stages)


def test_options_reach_the_network(monkeypatch):
    options = {
        "depth": 29,
        "variant": "imagenet",
        "block": "bottleneck",
        "width": 2,
        "stride_on": "conv1",
        "groups": 2,
        "base_width": 32,
        "survival": 0.5,
        "init": "orthogonal",
        "memory": "checkpoint",
        "segments": 2,
        "anchor_every": 3,
        "fused": False,
        "placement": "original",
        "shortcut": "dropout",
        "gate_bias": -1.0,
        "shortcut_scale": 0.25,
        "branch_scale": 0.75,
        "shortcut_dropout": 0.25,
        "norm": "group",
        "activation": "gelu",
        "dropout": 0.125,
        "residual_scale": 0.0,
        "se": True,
    }
    calls = []
    monkeypatch.setattr(config, "study_network", lambda *a, **k: calls.append((a, k)))
    config.build_network(Config(**options, float32_stream=True), 7)
    config.build_network(Config(), 7)
    (arguments, found), (_, defaults) = calls
    depth = options.pop("depth")
    assert arguments == (depth, 7)
    assert found == {**options, "residual_dtype": torch.float32}
    assert not [name for name in found if found[name] == defaults[name]]


def test_options_reach_optimizer_batches_and_convolutions(tmp_path):
    options = {"momentum": 0.5, "weight_decay": 0.25, "augment": False, "autocast": "bfloat16"}
    options["depth_lr"] = 0.5
    run = TrainingRun(small(**options), tmp_path, ONE, show_progress=False)
    for group in run.optimizer.param_groups:
        assert (group["momentum"], group["weight_decay"]) == (0.5, 0.25)
    assert run.groups[0].factor == 0.5
    assert run.batches.augment is False
    dtypes = []
    run.network.stages[0][0].conv1.register_forward_hook(lambda *a: dtypes.append(a[2].dtype))
    run.one_step()
    assert torch.bfloat16 in dtypes


def test_every_step_of_every_process_has_a_seed(tmp_path):
    seeds = {training.step_seed(3, step, rank) for step in range(1000) for rank in range(8)}
    assert len(seeds) == 8000
    found = []
    for rank in (0, 1):
        run = TrainingRun(small(batch=250), tmp_path, Processes(rank, 0, 1), show_progress=False)
        for _ in range(2):
            run.one_step()
            found.append(torch.initial_seed())
    assert found == [training.step_seed(0, step, rank) for rank in (0, 1) for step in (0, 1)]


def test_gradients_are_clipped(tmp_path):
    norms = []

    def norm(optimizer, *_):
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in parameters])))

    run = TrainingRun(small(clip_norm=0.01), tmp_path, ONE, show_progress=False)
    run.optimizer.register_step_pre_hook(norm)  # behind the hook that clips
    run.one_step()
    assert norms == pytest.approx([0.01], rel=1e-3)


def test_measuring_signal_flow_changes_no_bit(tmp_path):
    with_monitor = trained(tmp_path / "with", diagnose_every=2)
    without = trained(tmp_path / "without", diagnose_every=0)
    assert len(with_monitor.history.signal) == 3 * 10
    assert with_monitor.history.losses == without.history.losses


def test_evaluation_uses_all_images_and_running_statistics(tmp_path):
    run = TrainingRun(small(epochs=1), tmp_path, ONE, show_progress=False)
    for _ in range(6):
        run.one_step()
    accuracy = run.evaluate()
    network = run.network.eval()
    with torch.no_grad():
        logits = network(run.test_images.images)
    assert accuracy == float((logits.argmax(1) == run.test_images.labels).double().mean())


# Continuing


@pytest.mark.parametrize(
    ("options", "kills"),
    [({}, (3, 5, 6, 11, 12, 17)), ({"autocast": "float16", "epochs": 1}, (5,))],
    ids=["float32", "float16"],
)
def test_a_killed_run_continues_bit_for_bit(options, kills, monkeypatch, tmp_path):
    """Killed within epochs, at their ends, and before the first checkpoint."""
    options = {"checkpoint_every": 4, "diagnose_every": 5, "clip_norm": 0.5, **options}
    unbroken = trained(tmp_path / "unbroken", **options)
    for step in kills:
        killed_at(monkeypatch, step, tmp_path / "broken", **options)
    continued = trained(tmp_path / "broken", **options)
    assert_same_run(continued, unbroken)
    assert (unbroken.scaler is not None) == (options.get("autocast") == "float16")
    if unbroken.scaler is not None:
        assert continued.scaler.state_dict() == unbroken.scaler.state_dict()


def test_a_run_killed_before_its_files_are_written_writes_them(monkeypatch, tmp_path):
    unbroken = trained(tmp_path / "unbroken")

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training.Logs, "write", killed)
        trained(tmp_path / "broken", checkpoint_every=18)
    assert not (tmp_path / "broken" / "losses.csv").exists()
    assert_same_run(trained(tmp_path / "broken"), unbroken)
    (tmp_path / "broken" / "losses.csv").unlink()
    assert_same_run(trained(tmp_path / "broken"), unbroken)


def test_tensorboard_has_every_step_of_a_killed_run_once(monkeypatch, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for step in (5, 9):
        killed_at(monkeypatch, step, tmp_path, checkpoint_every=4)
    run = trained(tmp_path, checkpoint_every=4)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("loss")]
    assert [step for step, _ in found] == list(range(1, 19))
    assert [value for _, value in found] == pytest.approx(run.history.losses)


def test_a_folder_takes_one_run_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="out: expected a folder that no other"):
        trained(tmp_path)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_run_that_diverges_has_a_report(tmp_path, capsys):
    arguments = ["--lr", "1e12", "--survival", "1", "--warm-up-steps", "0"]
    assert main(["train", *ARGUMENTS, "--out", str(tmp_path), *arguments]) == 0
    printed = capsys.readouterr()
    assert re.fullmatch(r"test accuracy: 0\.\d{4}", printed.out.splitlines()[-1])
    assert "the loss is not finite" in printed.err
    assert "nothing to plot" in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"autocast": "bfloat16"}, {"autocast": "float16"}])
def test_captured_steps_continue_bit_for_bit(options, monkeypatch, tmp_path):
    options = {"device": "cuda", "checkpoint_every": 4, "diagnose_every": 5, **options}
    unbroken = trained(tmp_path / "unbroken", clip_norm=0.5, **options)
    assert unbroken.is_captured
    for step in (3, 6, 11):
        killed_at(monkeypatch, step, tmp_path / "broken", clip_norm=0.5, **options)
    assert_same_run(trained(tmp_path / "broken", clip_norm=0.5, **options), unbroken)
    uncaptured = trained(tmp_path / "uncaptured", clip_norm=0.5, capture=False, **options)
    assert uncaptured.history.losses[:3] == pytest.approx(unbroken.history.losses[:3], rel=1e-3)


@pytest.mark.slow
def test_a_run_killed_ten_times_at_random_moments_continues_bit_for_bit(tmp_path):
    """With SIGKILL, which may come within a write."""
    arguments = [*ARGUMENTS, "--device", "cpu", "--checkpoint-every", "1", "--epochs", "40"]

    def start(out):
        command = [sys.executable, "-m", "preact_kernels.study", "train", *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([*command, "--out", str(tmp_path / out)], **quiet)

    assert start("unbroken").wait() == 0
    path = tmp_path / "broken" / "checkpoint.pt"
    draws = random.Random(0)
    for _ in range(10):
        before = path.stat().st_mtime_ns if path.exists() else 0
        process = start("broken")
        while not path.exists() or path.stat().st_mtime_ns == before:
            assert process.poll() is None, "ended before it was killed"
            time.sleep(0.001)
        time.sleep(draws.uniform(0, 0.2))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert start("broken").wait() == 0
    for name in ("losses.csv", "signal.csv"):
        same = [(tmp_path / out / name).read_bytes() for out in ("broken", "unbroken")]
        assert same[0] == same[1]
    broken, unbroken = (
        checkpoints.load(tmp_path / out / "checkpoint.pt") for out in ("broken", "unbroken")
    )
    for name, value in unbroken["network"].items():
        assert torch.equal(broken["network"][name], value)
    rows = [[row[:-1] for row in c["history"]["epochs"]] for c in (broken, unbroken)]
    assert rows[0] == rows[1]


def test_a_signal_stops_a_run_with_a_checkpoint(monkeypatch, tmp_path, capsys):
    one_step = TrainingRun.one_step

    def stopped(run):
        one_step(run)
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="SIGTERM"):
        patch.setattr(TrainingRun, "one_step", stopped)
        trained(tmp_path / "broken")
    assert checkpoints.load(tmp_path / "broken" / "checkpoint.pt")["step"] == 2
    assert_same_run(trained(tmp_path / "broken"), trained(tmp_path / "unbroken"))


def test_memory_mode_and_plain_may_change_when_a_run_continues(monkeypatch, tmp_path):
    options = {"dropout": 0.0, "survival": 1.0, "depth": 14}
    killed_at(monkeypatch, 7, tmp_path, **options)
    run = trained(tmp_path, memory="rebuild", **options)
    assert len(run.history.losses) == 18
    killed_at(monkeypatch, 7, tmp_path / "b", **options)
    assert len(trained(tmp_path / "b", fused=False, **options).history.losses) == 18


@pytest.mark.slow
def test_synchronised_batch_norms_that_run_plain_need_a_gpu(tmp_path):
    arguments = ["train", *ARGUMENTS, "--device", "cpu", "--placement", "original"]
    arguments += ["--sync-batch-norm", "--out", str(tmp_path / "out")]
    process = torchrun(2, ["preact_kernels.study", *arguments])
    assert process.returncode != 0
    assert "sync_batch_norm: expected a GPU, or a network whose batch" in process.stderr


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Losses are those of one process but for rounding: batch norms are synchronised."""
    arguments = ["train", *ARGUMENTS, "--device", "cpu", "--dropout", "0", "--survival", "1"]
    arguments += ["--sync-batch-norm", "--out", str(tmp_path / "two")]
    process = torchrun(2, ["preact_kernels.study", *arguments])
    assert process.returncode == 0, process.stderr
    assert re.fullmatch(r"test accuracy: \d\.\d{4}", process.stdout.splitlines()[-1])
    one = trained(tmp_path / "one", dropout=0.0, survival=1.0, sync_batch_norm=True)
    two = (tmp_path / "two" / "losses.csv").read_text().splitlines()[1:]
    found = torch.tensor([float(line.split(",")[-1]) for line in two])
    torch.testing.assert_close(found[:6], torch.tensor(one.history.losses[:6]), rtol=1e-3, atol=0)


# Checkpoints


@pytest.fixture
def finished(tmp_path):
    """The checkpoint of a finished run."""
    trained(tmp_path, epochs=1)
    return tmp_path / "checkpoint.pt"


def damaged(content):
    """`content` with one bit of a stored tensor changed."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def foreign(_):
    buffer = io.BytesIO()
    torch.save({"state_dict": {}}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[: len(content) // 2], "cannot be read"),
        (damaged, "is damaged"),
        (lambda _: b"", "cannot be read"),
        (lambda _: b"hello", "cannot be read"),
        (foreign, "with format 'preact_kernels.study checkpoint', got None"),
    ],
    ids=["truncated", "bit", "empty", "text", "foreign"],
)
def test_a_file_that_is_no_checkpoint_is_refused_and_stays(change, message, finished):
    content = change(finished.read_bytes())
    finished.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"checkpoint\.pt: expected a checkpoint.*{message}"):
        trained(finished.parent, epochs=1)
    assert finished.read_bytes() == content


def test_a_checkpoint_of_other_options_is_refused_and_stays(finished):
    content = finished.read_bytes()
    with pytest.raises(CheckpointError, match=r"with depth 8 in place of 14, lr 0\.1 in place"):
        trained(finished.parent, epochs=1, depth=14, lr=0.05)
    assert finished.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"images": "cifar-10"},
            r"run on digits \(1500 images, checksum \w{8}\), got one on cifar",
        ),
        ({"config": "depth 8"}, "expected a run with options, got 'depth 8'"),
        ({"step": 1}, "expected the state of such a run, got another: 6 losses of 1 steps"),
        ({"history": {}}, "expected the state of such a run, got another"),
        ({"network": {}}, "expected the state of such a run, got another"),
        ({"version": 0}, "of version 1, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_something_else_is_refused(change, message, finished):
    torch.save(torch.load(finished) | change, finished)
    content = finished.read_bytes()
    with pytest.raises(CheckpointError, match=message):
        trained(finished.parent, epochs=1)
    assert finished.read_bytes() == content


def test_a_full_disk_loses_no_checkpoint(finished):
    """A limit on the size of files, which the second checkpoint exceeds."""
    run = TrainingRun(small(epochs=1), finished.parent, ONE, show_progress=False)
    content = finished.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, hard))
        with pytest.raises(OSError, match=r"not written \(.*the file from before is still") as e:
            run.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert e.value.errno == errno.EFBIG
    assert finished.read_bytes() == content
    assert not list(finished.parent.glob(".*partial*"))
    run.checkpoint()
    checkpoints.load(finished)


# Wrong input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere"], "data: expected a directory with CIFAR files, found none at"),
        (["--depth", "21"], r"depth: expected 6n\+2"),
        (["--batch", "5000"], r"batch: expected 1 to 1500 \(digits\), got 5000"),
        (["--lr", "nan"], "lr: expected a finite number, got nan"),
        (["--lr", "-1"], "lr: expected a positive number, got -1.0"),
        (["--epochs", "0"], "epochs: expected at least 1, got 0"),
        (["--memory-budget", "lots"], "memory_budget: expected bytes such as 300MiB, got 'lots'"),
        (["--memory-budget", "1"], "memory_budget: model: expected at least one PreActStage"),
        (["--memory", "rebuild"], "memory: expected 'store' beside options of units"),
        (["--device", "gpu"], "device: expected one such as 'cpu'"),
        (["--resume"], "resume: expected .*checkpoint.pt, found none"),
    ],
)
def test_wrong_options_are_named(arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=f"study: .*{message}"):
        main(["train", *ARGUMENTS, "--out", str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()


def test_an_unknown_variant_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--placement", "pre"])
    message = capsys.readouterr().err
    assert "'original'" in message and "'full-preactivation'" in message
    with pytest.raises(ValueError, match="placement: expected one of 'original'"):
        Config(placement="pre")
    with pytest.raises(TypeError, match="epochs: expected int, got str"):
        Config(epochs="3")


def test_a_missing_package_is_named():
    code = """
import runpy, sys
sys.modules["matplotlib"] = None
runpy.run_module("preact_kernels.study", run_name="__main__")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1
    assert "study: expected matplotlib, which is not installed: pip install" in process.stderr
