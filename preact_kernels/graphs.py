"""Training steps as one call, and on a GPU as one CUDA graph."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, Optimizer, RMSprop

from preact_kernels.norms import process_group
from preact_kernels.torch_compat import BatchNormBase, end_allocation_to_pool

# Optimizers with an initial state of zeros (SGD only without dampening).
_BEGIN_WITH_ZEROS = (SGD, Adam, AdamW, RMSprop, Adadelta, Adamax)
_WARM_UP_STEPS = 3


class _Step:
    """Forward, loss, backward and optimizer step, without a graph."""

    def __init__(self, model, loss_fn, optimizer, example_input, example_target, scaler) -> None:
        self.model, self.loss_fn, self.optimizer, self.scaler = model, loss_fn, optimizer, scaler
        self.examples = {"input": example_input, "target": example_target}

    def gradients(self, x: Tensor, target: Tensor) -> Tensor:
        """Runs forward and backward; returns the loss."""
        loss = self.loss_fn(self.model(x), target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn: expected a tensor of one element, got {got}")
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def check(self, **tensors: Tensor) -> None:
        for name, t in tensors.items():
            example = self.examples[name]
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
            for what in ("shape", "dtype"):
                expected, got = getattr(example, what), getattr(t, what)
                if expected != got:
                    expected, got = (list(v) if what == "shape" else v for v in (expected, got))
                    raise ValueError(f"{name}: expected {what} {expected} as captured, got {got}")

    def __call__(self, input: Tensor, target: Tensor) -> Tensor:
        self.check(input=input, target=target)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradients(input, target)
        self.update()
        return loss


class _CapturedStep(_Step):
    """A step that is captured in a CUDA graph and replayed."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.static = {name: t.detach().clone() for name, t in self.examples.items()}
        self.is_training = self.model.training
        device = self.static["input"].device
        state = _State(self.model, self.optimizer)
        try:
            with torch.random.fork_rng([device]):
                self._warm_up(device)
        finally:
            state.restore()
        del state
        self.constants = [_constants(group) for group in self.optimizer.param_groups]
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.graph = torch.cuda.CUDAGraph()
        try:
            with _capture_errors(self.model), _capture(self.graph, device):
                self.loss = self._whole()
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)  # their memory was never written
            raise
        self.optimizer_state = self.optimizer.state
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        self.captured_gradients = [(p, p.grad) for p in trained]

    def _whole(self) -> Tensor:
        without_cache: contextlib.AbstractContextManager = contextlib.nullcontext()
        if torch.is_autocast_enabled("cuda"):
            # A weight cast before the capture must not be read from autocast's cache.
            dtype = torch.get_autocast_dtype("cuda")
            without_cache = torch.autocast("cuda", dtype, cache_enabled=False)
        with without_cache:
            loss = self.gradients(self.static["input"], self.static["target"])
        if self.scaler is None:
            self.update()
        return loss

    def _warm_up(self, device: torch.device) -> None:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(side), warnings.catch_warnings():
                for message in (".*constructed with capturable=True", "Synchronization debug mode"):
                    warnings.filterwarnings("ignore", message)
                for _ in range(_WARM_UP_STEPS):
                    self.optimizer.zero_grad(set_to_none=True)
                    self._whole()
                self.optimizer.zero_grad(set_to_none=True)
                # nn.SyncBatchNorm synchronises, but not in a capture.
                if not any(isinstance(m, nn.SyncBatchNorm) for m in self.model.modules()):
                    with _capture_errors(self.model), _no_synchronization():
                        self._whole()
                self.optimizer.zero_grad(set_to_none=True)  # the graph allocates gradients
        finally:
            torch.cuda.current_stream(device).wait_stream(side)

    def _follow_options(self) -> None:
        """Applies changed tensor learning rates; raises if a captured option changed."""
        groups = len(self.optimizer.param_groups)
        if groups != len(self.rates):
            raise ValueError(
                f"optimizer: expected {len(self.rates)} parameter groups as captured, got {groups}"
            )
        if self.optimizer.state is not self.optimizer_state:
            raise ValueError(
                "optimizer: expected its state as captured, got another (load_state_dict): "
                "make the step anew"
            )
        for index, group in enumerate(self.optimizer.param_groups):
            rate = self.rates[index]
            if isinstance(rate, Tensor) and group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
            captured, now = self.constants[index], _constants(group)
            for name, value in captured.items():
                if now.get(name) != value:
                    hint = "; give lr as a tensor to change it" if name == "lr" else ""
                    raise ValueError(
                        f"optimizer: expected {name} {value} as captured, got {now.get(name)}{hint}"
                    )

    def __call__(self, input: Tensor, target: Tensor) -> Tensor:
        self.check(input=input, target=target)
        if self.model.training != self.is_training:
            raise ValueError(
                f"model: expected training={self.is_training} as captured, "
                f"got {self.model.training}"
            )
        if self.scaler is None:
            self._follow_options()
        self.static["input"].copy_(input, non_blocking=True)
        self.static["target"].copy_(target, non_blocking=True)
        self.graph.replay()
        if self.scaler is not None:
            for p, gradient in self.captured_gradients:  # the user may have called zero_grad
                p.grad = gradient
            self.update()
        return self.loss.clone()


def _averaging(model: nn.Module) -> str:
    """Names the batch norms that may read their count of batches on the host, if there are any."""
    names = [
        name or "model"
        for name, m in model.named_modules()
        if isinstance(m, BatchNormBase)
        and m.training
        and m.momentum is None
        and m.num_batches_tracked is not None
    ]
    if not names:
        return ""
    return (
        f"; PyTorch's batch norms with momentum=None read num_batches_tracked: {', '.join(names)}"
    )


@contextlib.contextmanager
def _capture_errors(model: nn.Module) -> Iterator[None]:
    """Turns errors of a capture into a `ValueError` that names the arguments."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # The last error of a broken capture only says that the capture cannot end.
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise ValueError(
            "model, loss_fn, optimizer: expected a step that can be captured in a CUDA graph "
            "(nothing read back to the host, such as .item(), and no synchronisation), got "
            f"{str(first).splitlines()[0]}{_averaging(model)}"
        ) from error


@contextlib.contextmanager
def _no_synchronization() -> Iterator[None]:
    """Makes synchronisation raise a `RuntimeError`, in all threads."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


_broken_graphs: list[torch.cuda.CUDAGraph] = []  # kept alive, as allocators may refer to them


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Captures the body; after an error, restores stream, allocator and generator."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except BaseException:
        if torch.cuda.current_stream(device) != stream:  # `torch.cuda.graph` did not restore it
            torch.cuda.set_stream(stream)
            end_allocation_to_pool(stream.device_index, pool)
            # The generator leaves capture mode only when a capture ends.
            other = torch.cuda.CUDAGraph()
            _broken_graphs.extend((graph, other))
            with contextlib.suppress(RuntimeError), torch.cuda.graph(other):
                torch.zeros(1, device=device)
            torch.cuda.set_stream(stream)
        raise


class _State:
    """Copies of parameters, buffers and optimizer state, to restore after a warm-up."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self.values = [(t, t.detach().clone()) for t in tensors]
        self.optimizer = optimizer
        self.states = {
            p: {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}
            for p, state in optimizer.state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Restores all values in place; new optimizer state becomes zero."""
        for t, value in self.values:
            t.copy_(value)
        for p, state in self.optimizer.state.items():
            before = self.states.get(p, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value.copy_(before[name]) if name in before else value.zero_()


def _constants(group: dict) -> dict:
    """Options of a parameter group that become constants of the graph."""
    return {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)}


def _check_process_groups(model: nn.Module) -> None:
    for name, module in model.named_modules():
        group = process_group(module)
        if group is not None:
            backend = torch.distributed.get_backend_config(group)
            if "nccl" not in backend:
                raise ValueError(
                    f"model: expected an NCCL process group of {name or 'model'} to capture in a "
                    f"CUDA graph, got {backend}"
                )


def _check_capturable(optimizer: Optimizer, scaler: object) -> None:
    if scaler is not None:
        return  # the optimizer runs outside the graph
    kind = type(optimizer)
    if kind is torch.optim.LBFGS:
        raise ValueError("optimizer: expected one that steps without a closure, got LBFGS")
    for group in optimizer.param_groups:
        has_option = "capturable" in group  # required even if fused
        can_be_captured = isinstance(optimizer, SGD) or group.get("fused")
        if not (group["capturable"] if has_option else can_be_captured):
            expected = f"{kind.__name__}(capturable=True)" if has_option else "one to be captured"
            got = "capturable=False" if has_option else f"{kind.__name__}, which has no capturable"
            raise ValueError(f"optimizer: expected {expected}, got {got}")
        is_tensor = isinstance(group.get("lr"), Tensor)
        if is_tensor and kind is SGD and not group.get("fused"):
            raise ValueError(
                "optimizer: expected SGD(fused=True) with a tensor lr, got fused=False"
            )
        if is_tensor and group["lr"].device.type != "cuda":
            raise ValueError(f"optimizer: expected lr on the GPU, got it on {group['lr'].device}")
        trained = [p for p in group["params"] if p.requires_grad]
        is_new = any(p not in optimizer.state for p in trained)
        if is_new and (kind not in _BEGIN_WITH_ZEROS or group.get("dampening")):
            names = ", ".join(o.__name__ for o in _BEGIN_WITH_ZEROS)
            raise ValueError(
                f"optimizer: expected one of {names} without dampening, or one that has stepped "
                f"before, got {kind.__name__}"
            )


def graphed_step(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: Optimizer,
    example_input: Tensor,
    example_target: Tensor,
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a training step for batches of one shape; on a GPU, captured in a CUDA graph.

    `step(input, target)` equals `optimizer.zero_grad(); loss = loss_fn(model(input), target);
    loss.backward(); optimizer.step()`, and returns the detached loss. On a CPU it runs this code.
    On a GPU it copies the batch into fixed memory and replays the graph with one launch. Warm-up
    steps run on another stream; then parameters, buffers, optimizer state and random state are
    restored. The step uses the autocast state of this call, not of later calls.

    Gradients stay in `p.grad` until the next call. A learning rate that is a tensor on the GPU may
    change between calls: in place, by a scheduler or by assignment. All other options are constants
    of the graph; changing one raises an error.

    Args:
        model: a model on one device, in the mode (training or evaluation) of the step.
        loss_fn: maps the model's output and the target to a tensor of one element.
        optimizer: an optimizer of the model's parameters. On a GPU it needs `capturable=True` if it
            has that option; SGD with a tensor lr needs `fused=True`.
        example_input: a batch with the shape and dtype of all batches.
        example_target: target of the example.
        scaler: scales the loss. It decides on the host whether to step, so the optimizer runs
            outside the graph.

    Returns:
        The step.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: model and examples are on different devices, the step cannot be captured (for
            example, a plain batch norm with `momentum=None`, or a process group without NCCL), or,
            from the step, a batch has another shape or dtype or a captured option has changed.
    """
    for name, value, kind, expected in (
        ("model", model, nn.Module, "an nn.Module"),
        ("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer"),
        ("example_input", example_input, Tensor, "a torch.Tensor"),
        ("example_target", example_target, Tensor, "a torch.Tensor"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a callable, got {type(loss_fn).__name__}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        kind = type(scaler).__name__
        raise TypeError(f"scaler: expected a torch.amp.GradScaler or None, got {kind}")
    device = example_input.device
    for name, t in (("example_target", example_target), *model.named_parameters()):
        if t.device != device:
            raise ValueError(
                f"{name}: expected device {device} to match example_input, got {t.device}"
            )
    arguments = (model, loss_fn, optimizer, example_input, example_target, scaler)
    if device.type != "cuda":
        return _Step(*arguments)
    _check_process_groups(model)
    _check_capturable(optimizer, scaler)
    return _CapturedStep(*arguments)
