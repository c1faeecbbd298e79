"""Training runs that can stop at any moment and continue bit for bit.

All random numbers depend only on the seed and the step: weights, order and augmentation of the
images (`data.Batches`), and dropout (PyTorch is seeded at each step). Checkpoints store no random
state, so a run can continue with another number of processes.
"""

import contextlib
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from preact_kernels.conversion.convert import conversion_report
from preact_kernels.graphs import graphed_step
from preact_kernels.planning import plan_memory
from preact_kernels.study import checkpoints, data, recipes
from preact_kernels.study.checkpoints import CheckpointError
from preact_kernels.study.config import RUNNING, Config, build_network, parse_bytes
from preact_kernels.study.diagnostics import Monitor, blocks_of
from preact_kernels.study.files import locked
from preact_kernels.study.history import EpochRow, History
from preact_kernels.study.logs import Logs
from preact_kernels.study.networks import fused_parts
from preact_kernels.study.processes import Interrupted, Processes, device_of, stop_signals

CHECKPOINT = "checkpoint.pt"
_FETCH_EVERY = 10  # steps between reads of losses from the device
_EVALUATION_BATCH = 256


class _Autocast(nn.Module):
    def __init__(self, network: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.device_type, self.dtype = network, device_type, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device_type, self.dtype):
            return self.network(x)


class TrainingRun:
    """A training run in a folder.

    Args:
        config: the options.
        out: the folder; a run continues from the checkpoint there.
        processes: the processes of the run.
        show_progress: draw a progress bar.

    Raises:
        CheckpointError: the checkpoint in the folder has other options or is damaged.
        FileNotFoundError: there are no images at `config.data`.
        ValueError: options contradict each other or do not match the images.
    """

    def __init__(
        self, config: Config, out: Path, processes: Processes, *, show_progress: bool = True
    ) -> None:
        self.config, self.out, self.processes = config, Path(out), processes
        self.show_progress = show_progress and processes.is_first
        self.device = device_of(config.device, processes)
        self.path = self.out / CHECKPOINT
        found = checkpoints.load(self.path) if self.path.exists() else None
        if found is not None:
            _check_same_options(self.path, found.get("config"), config)
        if self.device.type == "cuda":  # the same bits in every run
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        self.train_images = self._images(train=True)
        self.test_images = self._images(train=False)
        self.batches = data.Batches(
            self.train_images.to(self.device),
            config.batch or 0,
            seed=config.seed,
            augment=config.augment,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        self.total_steps = (config.epochs or 0) * self.batches.steps_per_epoch
        self.warm_up = recipes.warm_up_steps(config.recipe, config.warm_up_steps, self.total_steps)
        self.history = History()
        self.step = 0
        self.correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self._is_lost = False  # the loss was not finite
        self._pending: list[Tensor] = []  # losses that are still on the device
        self._train_step: Callable[[Tensor, Tensor], Tensor] | None = None
        self._build()
        if found is not None:
            self._restore(found)
        steps = int(self._summed(torch.tensor(self.step, device=self.device)))
        if steps != self.step * processes.world_size:
            raise CheckpointError(
                f"{self.path}: expected the same checkpoint in every process, got different steps"
            )

    def _images(self, *, train: bool) -> data.Images:
        return data.load(self.config.data, train=train).resized(self.config.image_size)

    def _build(self) -> None:
        config = self.config
        network = build_network(config, self.train_images.classes)
        network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.memory_budget is not None:
            x, _ = self._batch(0)
            try:
                with self.autocast():
                    plan_memory(network, x, parse_bytes(config.memory_budget)).apply(network)
            except ValueError as error:
                raise ValueError(f"memory_budget: {error}") from error
        self.network = network
        model: nn.Module = network
        self.scaler = None
        if config.autocast is not None:
            model = _Autocast(network, self.device.type, getattr(torch, config.autocast))
            if config.autocast == "float16":
                self.scaler = torch.amp.GradScaler(self.device.type)
        self.unwrapped = model
        if self.processes.world_size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
            if config.sync_batch_norm:  # in place; after DDP, which refuses it on a CPU
                self._check_synchronised()
                nn.SyncBatchNorm.convert_sync_batchnorm(network)
        self.model = model
        on_gpu = self.device.type == "cuda"
        self.is_captured = config.capture and on_gpu and self.processes.world_size == 1
        self.groups = recipes.parameter_groups(network, config.depth_lr)
        self.optimizer = recipes.sgd(
            self.groups,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            is_captured=self.is_captured and self.scaler is None,
            device=self.device,
        )
        if config.clip_norm is not None:
            self.optimizer.register_step_pre_hook(self._clip)
        self.monitor = None
        if config.diagnose_every:
            blocks = blocks_of(network)
            self.monitor = Monitor(self.unwrapped, config.diagnose_every, blocks=blocks)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.config.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.config.autocast))

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.network.parameters() if p.requires_grad)

    def description(self) -> dict[str, str]:
        config, train, test = self.config, self.train_images, self.test_images
        size = config.image_size
        return {
            "network": f"ResNet-{config.depth}, {config.placement}, {config.shortcut} shortcuts: "
            f"{len(blocks_of(self.network))} blocks, {self.parameter_count:,} parameters; "
            f"{fused_parts(self.network)}",
            "images": f"{train.name}, {len(train.labels):,} to train on and "
            f"{len(test.labels):,} to test, {size}x{size} pixels",
            "steps": f"{self.total_steps:,} of {config.batch} images, {self.step:,} done",
        }

    def _check_synchronised(self) -> None:
        sites = conversion_report(self.network)
        if self.device.type == "cpu" and len(sites.fused) < len(sites):
            raise ValueError(
                "sync_batch_norm: expected a GPU, or a network whose batch norms all run fused, "
                f"got {fused_parts(self.network)}, on a CPU"
            )

    def _clip(self, *_: object) -> None:
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip_norm or 0.0)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        x, labels = self.batches[step]
        return x.contiguous(memory_format=torch.channels_last), labels

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.correct.add_((logits.detach().argmax(1) == labels).sum())
        return F.cross_entropy(logits.float(), labels)

    def _make_step(self) -> Callable[[Tensor, Tensor], Tensor]:
        if not self.is_captured:
            return self._uncaptured_step
        correct = self.correct.clone()
        self._set_learning_rate()
        step = graphed_step(
            self.model, self._loss, self.optimizer, *self._batch(0), scaler=self.scaler
        )
        self.correct.copy_(correct)  # discard the warm-up steps of the capture
        return step

    def _uncaptured_step(self, x: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.model(x), labels)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    # Checkpoints

    def _restore(self, found: dict[str, Any]) -> None:
        expected = self._images_state()
        if (images := found.get("images")) != expected:
            raise CheckpointError(f"{self.path}: expected a run on {expected}, got one on {images}")
        try:
            self.network.load_state_dict(found["network"])
            self._restore_optimizer(found["optimizer"])
            if self.scaler is not None and found["scaler"] is not None:
                self.scaler.load_state_dict(found["scaler"])
            self.correct.fill_(found["correct"] if self.processes.is_first else 0)
            self.step = found["step"]
            self.history = History.of_state(found["history"])
            if len(self.history.losses) != self.step:
                raise ValueError(f"{len(self.history.losses)} losses of {self.step} steps")
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: expected the state of such a run, got another: {error}"
            ) from error
        if self.monitor is not None:
            self.monitor.step = self.step
            self.monitor.rows = self.history.signal
            self.monitor.warnings = self.history.warnings

    def _images_state(self) -> str:
        images = self.train_images
        return f"{images.name} ({len(images.labels)} images, checksum {images.checksum():08x})"

    def _restore_optimizer(self, state: dict[str, Any]) -> None:
        options = [(group["lr"], group["fused"]) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state)
        for group, (lr, fused) in zip(self.optimizer.param_groups, options, strict=True):
            group["lr"], group["fused"] = lr, fused  # depend on the machine, not the checkpoint

    def checkpoint(self) -> None:
        self._fetch()
        correct = int(self._summed(self.correct))
        if not self.processes.is_first:
            return
        if self.monitor is not None:
            self.history.signal = self.monitor.rows
            self.history.warnings = self.monitor.warnings
        content = {
            "config": dataclasses.asdict(self.config),
            "images": self._images_state(),
            "step": self.step,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "correct": correct,
            "history": self.history.state(),
        }
        checkpoints.save(self.path, content)

    # Steps

    def _summed(self, value: Tensor) -> Tensor:
        value = value.clone()
        if self.processes.world_size > 1:
            dist.all_reduce(value)
        return value

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        recipe, lr = self.config.recipe, self.config.lr or 0.0
        return recipes.learning_rate(recipe, lr, step, self.total_steps, self.warm_up)

    def learning_rates(self) -> list[float]:
        return [self.learning_rate(step) for step in range(len(self.history.losses))]

    def _set_learning_rate(self) -> None:
        recipes.set_learning_rate(self.optimizer, self.groups, self.learning_rate(self.step))

    def _fetch(self) -> None:
        """Reads pending losses from the device, averaged over the processes."""
        if not self._pending:
            return
        losses = self._summed(torch.stack(self._pending).double()) / self.processes.world_size
        self._pending = []
        self.history.losses += (found := losses.tolist())
        if not all(map(math.isfinite, found)) and self.processes.is_first and not self._is_lost:
            self._is_lost = True
            tqdm.write(f"study: the loss is not finite at or before step {self.step}", sys.stderr)

    def one_step(self) -> None:
        if self._train_step is None:
            self._train_step = self._make_step()
        start_s = time.perf_counter()
        x, labels = self._batch(self.step)
        self.history.input_seconds += time.perf_counter() - start_s
        torch.manual_seed(step_seed(self.config.seed, self.step, self.processes.rank))
        self._set_learning_rate()
        if self.monitor is not None:
            self.monitor.before_step(x)
        self._pending.append(self._train_step(x, labels))
        if self.monitor is not None:
            self.monitor.after_step()
        self.step += 1

    def evaluate(self) -> float:
        """Returns the test accuracy, from 0 to 1, with running statistics.

        All processes use the first one's statistics, as in `DistributedDataParallel`.
        """
        images, labels = self.test_images.images, self.test_images.labels
        own = slice(self.processes.rank, None, self.processes.world_size)
        images, labels = images[own], labels[own]
        if self.processes.world_size > 1:
            for buffer in self.network.buffers():
                dist.broadcast(buffer, 0)
        model = self.unwrapped
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        model.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(labels), _EVALUATION_BATCH):
                    part = slice(start, start + _EVALUATION_BATCH)
                    x = images[part].to(self.device, memory_format=torch.channels_last)
                    correct += (model(x).argmax(1) == labels[part].to(self.device)).sum()
        finally:
            model.train()
        return int(self._summed(correct)) / len(self.test_images.labels)

    def _end_epoch(self, seconds: float) -> EpochRow:
        self._fetch()
        per_epoch = self.batches.steps_per_epoch
        losses = self.history.losses[-per_epoch:]
        row = EpochRow(
            epoch=self.step // per_epoch,
            train_loss=sum(losses) / len(losses),
            train_accuracy=int(self._summed(self.correct)) / (per_epoch * self.batches.batch),
            test_accuracy=self.evaluate(),
            seconds=seconds,
        )
        self.correct.zero_()
        self.history.epochs.append(row)
        return row

    def run(self, logs: Logs | None = None) -> History:
        """Trains to the end; writes a checkpoint at each epoch and every `checkpoint_every` steps.

        Args:
            logs: records losses and epochs.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the checkpoint is written.
            OSError: a file cannot be written, such as to a full disk; the last checkpoint is kept.
        """
        config, history = self.config, self.history
        asked_to_stop: list[int] = []
        bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            unit="step",
            disable=None if self.show_progress else True,  # None: only without a terminal
            dynamic_ncols=True,
        )
        with bar, stop_signals(asked_to_stop, self.processes):
            start_s = time.perf_counter() - history.seconds
            logged = self.step
            if logs is not None and history.losses:  # the run may have stopped before writing logs
                logs.write(history, self.learning_rates(), self.batches.steps_per_epoch)
            while self.step < self.total_steps:
                self.one_step()
                bar.update()
                if self.step % _FETCH_EVERY == 0:
                    self._fetch()
                    bar.set_postfix(loss=f"{history.losses[-1]:.3f}", refresh=False)
                ends_epoch = self.step % self.batches.steps_per_epoch == 0
                if ends_epoch:
                    row = self._end_epoch(time.perf_counter() - start_s)
                    start_s = time.perf_counter()
                    if logs is not None:
                        logs.add_epoch(self.step, row)
                    if self.show_progress and bar.disable:
                        _print_epoch(row, config.epochs)
                history.seconds = time.perf_counter() - start_s
                every = config.checkpoint_every or self.batches.steps_per_epoch
                if ends_epoch or self.step % every == 0 or asked_to_stop:
                    self._fetch()
                    if logs is not None:
                        logs.add_losses(logged, history.losses[logged:])
                        logged = len(history.losses)
                        logs.flush()
                    self.checkpoint()
                    if logs is not None:
                        logs.write(history, self.learning_rates(), self.batches.steps_per_epoch)
                if asked_to_stop:
                    raise Interrupted(signal.Signals(asked_to_stop[0]).name)
        return history


def step_seed(seed: int, step: int, rank: int) -> int:
    """Returns the seed of a step in a process, of 32 bits, which PyTorch uses on a CPU."""
    return ((seed * 1_000_003 + step) * 4093 + rank) % 2**32


def _print_epoch(row: EpochRow, epochs: int | None) -> None:
    print(
        f"epoch {row.epoch} of {epochs}: loss {row.train_loss:.4f}, accuracy "
        f"{row.train_accuracy:.4f}, test accuracy {row.test_accuracy:.4f}, {row.seconds:.1f} s",
        flush=True,
    )


def _check_same_options(path: Path, found: object, config: Config) -> None:
    expected = dataclasses.asdict(config)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a run with options, got {found!r}")
    different = [
        f"{name} {found.get(name)!r} in place of {value!r}"
        for name, value in expected.items()
        if name not in RUNNING and found.get(name) != value
    ]
    if different:
        raise CheckpointError(
            f"{path}: expected a run with the given options, got one with {', '.join(different)}; "
            "name another folder with --out, or remove this one"
        )


def train(config: Config, out: Path, *, show_progress: bool = True) -> TrainingRun:
    """Trains in a folder, or continues a run there; the first process writes logs.

    Args:
        config: the options.
        out: the folder.
        show_progress: draw a progress bar.

    Returns:
        The finished run.

    Raises:
        Interrupted: SIGINT or SIGTERM came; the checkpoint is written.
        OSError: a file cannot be written; the last checkpoint is kept.
        RuntimeError: a step failed.
        TypeError: see `TrainingRun`.
        ValueError: see `TrainingRun`.
    """
    processes = Processes.of_environment()
    with processes.group(device_of(config.device, processes)):
        run = TrainingRun(config, out, processes, show_progress=show_progress)
        if run.show_progress:
            for name, text in run.description().items():
                print(f"{name}: {text}", flush=True)
        if not processes.is_first:
            run.run()
            return run
        with locked(run.out), Logs(run.out, run.step) as logs:
            try:
                run.run(logs)
            except (TypeError, ValueError) as error:
                raise RuntimeError("the training step failed") from error
    return run
