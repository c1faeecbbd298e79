"""A step in one call: the same on a CPU as written out, and replayed on a GPU."""

import contextlib
import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels.graphs import _CapturedStep, _check_capturable, _check_process_groups, _State
from preact_kernels.ops import dispatch as backends
from tests.cases import recorded_calls
from tests.oracle import assert_same_bits, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")


def batch(seed=0, count=4, side=8):
    on_cpu = {"generator": torch.Generator().manual_seed(seed), "device": "cpu"}
    images = torch.randn(count, 3, side, side, **on_cpu)
    return images.to(DEVICE), torch.randint(10, (count,), **on_cpu).to(DEVICE)


def network(**options):
    depth = 20 if options.get("block") == "bottleneck" else 8  # with runs of blocks
    return pk.preact_resnet(depth, **options).to(DEVICE)


def sgd(model, lr=0.05, **options):
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4, **options)


def written_out(model, optimizer, x, target):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
@pytest.mark.usefixtures("poisoned_memory")  # deterministic algorithms
def test_steps_equal_those_written_out(memory):
    model = network(memory=memory)
    other = copy.deepcopy(model)
    optimizer, other_optimizer = sgd(model), sgd(other)
    step = pk.graphed_step(model, F.cross_entropy, optimizer, *batch())
    for seed in range(3):
        loss = step(*batch(seed))
        assert same_bits(loss, written_out(other, other_optimizer, *batch(seed)))
        assert not loss.requires_grad
    assert_same_bits(model.state_dict(), other.state_dict())


@needs_gpu
@pytest.mark.parametrize("memory", ["store", "rebuild"])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.usefixtures("poisoned_memory")
def test_steps_of_bottlenecks_under_autocast_equal_those_written_out(backend, memory, monkeypatch):
    if backend not in pk.available_backends():
        pytest.skip(f"backend {backend} is not available")
    kernels = backends.select(backend, DEVICE, torch.bfloat16)
    calls = recorded_calls(kernels, "block_run_forward", monkeypatch)
    batches = [batch(seed, 128, 32) for seed in range(2)]
    model = network(block="bottleneck", memory=memory)
    other = copy.deepcopy(model)
    optimizer, other_optimizer = sgd(model), sgd(other)
    with pk.use_backend(backend), torch.autocast(DEVICE, torch.bfloat16):
        step = pk.graphed_step(model, F.cross_entropy, optimizer, *batches[0])
    for x, target in batches:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = step(x, target)
        # A context of its own: autocast keeps casts of weights until its end.
        with pk.use_backend(backend), torch.autocast(DEVICE, torch.bfloat16):
            expected = written_out(other, other_optimizer, x, target)
        assert same_bits(loss, expected)
    assert_same_bits(model.state_dict(), other.state_dict())
    assert calls


@pytest.mark.covering(1)
@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("kind", [sgd, torch.optim.Adam, torch.optim.RMSprop])
def test_steps_after_a_warm_up_that_was_undone_are_the_first(kind, has_stepped, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # of the stem and projections
    model = network()
    other = copy.deepcopy(model)
    optimizer, other_optimizer = (
        kind(m if kind is sgd else m.parameters()) for m in (model, other)
    )
    if has_stepped:
        written_out(model, optimizer, *batch(7))
        written_out(other, other_optimizer, *batch(7))
    state = _State(model, optimizer)
    for seed in range(3):
        written_out(model, optimizer, *batch(seed))
    state.restore()
    for seed in (5, 6):
        written_out(model, optimizer, *batch(seed))
        written_out(other, other_optimizer, *batch(seed))
    assert_same_bits(model.state_dict(), other.state_dict())


def test_a_scaler_skips_steps_that_are_not_finite_and_backs_off():
    model = network()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    step = pk.graphed_step(model, F.cross_entropy, optimizer, *batch(), scaler=scaler)
    step(*batch(1))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    x, target = batch(2)
    step(x * float("inf"), target)
    assert_same_bits(dict(model.named_parameters()), before)
    assert scaler.get_scale() == 512


@needs_gpu
def test_a_learning_rate_may_change_between_steps():
    model = network()
    rate = torch.tensor(0.05, device=DEVICE)
    optimizer = sgd(model, rate, fused=True)
    step = pk.graphed_step(model, F.cross_entropy, optimizer, *batch())
    step(*batch(1))
    optimizer.param_groups[0]["lr"] = 0.0
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(*batch(2))
    assert_same_bits(dict(model.named_parameters()), before)


WRONG = (
    (TypeError, {"model": abs}, "model: expected an nn.Module, got builtin_function"),
    (TypeError, {"loss_fn": 3}, "loss_fn: expected a callable, got int"),
    (TypeError, {"optimizer": nn.ReLU()}, "optimizer: expected a torch.optim.Optimizer, got ReLU"),
    (TypeError, {"example_input": [1]}, "example_input: expected a torch.Tensor, got list"),
    (TypeError, {"example_target": 1}, "example_target: expected a torch.Tensor, got int"),
    (TypeError, {"scaler": 2.0}, "scaler: expected a torch.amp.GradScaler or None, got float"),
    (
        ValueError,
        {"example_target": torch.empty(4, device="meta")},
        f"example_target: expected device {DEVICE}.* to match example_input, got meta",
    ),
)


@pytest.mark.parametrize(("error", "change", "message"), WRONG)
def test_wrong_arguments_are_named(error, change, message):
    model = network()
    arguments = {"model": model, "loss_fn": F.cross_entropy, "optimizer": sgd(model)}
    arguments |= dict(zip(("example_input", "example_target"), batch(), strict=True))
    with pytest.raises(error, match=message):
        pk.graphed_step(**(arguments | change))


def test_batches_of_another_shape_or_dtype_are_refused():
    model, (x, target) = network(), batch()
    step = pk.graphed_step(model, F.cross_entropy, sgd(model), x, target)
    with pytest.raises(ValueError, match=r"input: expected shape \[4, 3, 8, 8\] .*got \[3, 3"):
        step(x[:3], target[:3])
    with pytest.raises(
        ValueError, match=r"input: expected dtype torch.float32 .*got torch.float64"
    ):
        step(x.double(), target)
    with pytest.raises(TypeError, match=r"target: expected a torch.Tensor, got int"):
        step(x, 3)


def test_a_loss_of_several_elements_is_refused():
    model = network()
    losses = functools.partial(F.cross_entropy, reduction="none")
    with pytest.raises(ValueError, match=r"loss_fn: expected a tensor of one element, got \[4\]"):
        pk.graphed_step(model, losses, sgd(model), *batch())(*batch())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adam(p), "expected Adam.capturable=True"),
        (lambda p: torch.optim.AdamW(p, fused=True), "expected AdamW.capturable=True"),
        (lambda p: torch.optim.LBFGS(p), "without a closure, got LBFGS"),
        (lambda p: torch.optim.Adagrad(p), "got Adagrad, which has no capturable"),
        (lambda p: torch.optim.Rprop(p, capturable=True), "has stepped before, got Rprop"),
        (lambda p: torch.optim.SGD(p, torch.tensor(0.1, device=DEVICE)), "SGD.fused=True"),
        (lambda p: torch.optim.SGD(p, torch.tensor(0.1), fused=True), "lr on the GPU"),
    ],
)
def test_optimisers_that_cannot_be_captured_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        _check_capturable(make(nn.Linear(2, 2).to(DEVICE).parameters()), None)


class FakeCuda:
    """What a capture uses of `torch.cuda`, without a GPU: who calls what, and where errors arise.

    breaks: "synchronises" (the debug mode tells), "cannot be ended" (like a capture of what is not
        allowed), or "raises" (an error of Python's within a capture that can be ended).
    """

    def __init__(self, monkeypatch, breaks):
        self.breaks, self.mode, self.pools, self.is_capturing = breaks, 0, set(), False
        self.main = self.now = SimpleNamespace(name="main", device_index=0, wait_stream=id)
        side = SimpleNamespace(name="side", wait_stream=id)
        for name, fake in {
            "Stream": lambda device: side,
            "stream": self.stream,
            "current_stream": lambda device: self.now,
            "set_stream": lambda stream: setattr(self, "now", stream),
            "CUDAGraph": SimpleNamespace,
            "graph": self.graph,
            "graph_pool_handle": lambda: (0, 1),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
        end = "_cuda_endAllocateToPool", lambda index, pool: self.pools.remove(pool)
        release = "_cuda_releasePool", self.release
        for name, fake in (end, release):
            monkeypatch.setattr(torch._C, name, fake, raising=False)

    def release(self, index, pool):
        assert pool not in self.pools  # allocations to it have ended

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def graph(self, graph, pool=(0, 2)):
        self.pools.add(pool)
        before, self.now = self.now, SimpleNamespace(name="capture")
        self.is_capturing = True
        try:
            yield
        finally:
            if self.breaks == "cannot be ended":
                self.breaks = None
                raise RuntimeError("CUDA error: operation failed due to a previous error")
            self.now, self.is_capturing = before, False
            self.pools.remove(pool)

    def loss_fn(self, y, target):
        if self.breaks == "synchronises" and self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.breaks == "cannot be ended" and self.now.name == "capture":
            raise RuntimeError("CUDA error: not permitted when stream is capturing")
        return F.cross_entropy(y, target)

    def step(self, step):
        if self.breaks == "raises" and self.now.name == "capture":
            raise KeyError("a mistake")
        step()


@pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU, the tests below run instead")
@pytest.mark.parametrize(
    ("breaks", "error", "message"),
    [
        ("synchronises", ValueError, "in a CUDA graph .*, got called a synchronizing"),
        ("cannot be ended", ValueError, "in a CUDA graph .*, got CUDA error: not permitted"),
        ("raises", KeyError, "a mistake"),
    ],
)
def test_a_capture_that_fails_gives_back_what_it_took(breaks, error, message, monkeypatch):
    model = network()
    optimizer = sgd(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    x, target = batch()
    cuda = FakeCuda(monkeypatch, breaks)
    monkeypatch.setattr(optimizer, "step", functools.partial(cuda.step, optimizer.step))
    with pytest.raises(error, match=message):
        _CapturedStep(model, cuda.loss_fn, optimizer, x, target, None)
    assert cuda.now is cuda.main
    assert (cuda.mode, cuda.pools, cuda.is_capturing) == (0, set(), False)
    assert all(p.grad is None for p in model.parameters())
    if breaks == "synchronises":  # without a GPU, the body of a capture runs
        assert_same_bits(model.state_dict(), before)


@pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU, the tests below run instead")
def test_a_synchronisation_of_sync_batch_norm_is_no_error(monkeypatch):
    model = network()
    model.other = nn.SyncBatchNorm(3)
    cuda = FakeCuda(monkeypatch, "synchronises")
    step = _CapturedStep(model, cuda.loss_fn, sgd(model), *batch(), None)
    assert step.loss.isfinite()
    assert cuda.now is cuda.main


@pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU, the tests below run instead")
def test_a_capture_that_fails_names_norms_that_read_on_the_host(monkeypatch):
    model = network()
    model.averaging, model.frozen = (
        nn.BatchNorm2d(3, momentum=None),
        nn.BatchNorm2d(3, momentum=None),
    )
    model.frozen.eval()
    cuda = FakeCuda(monkeypatch, "synchronises")
    with pytest.raises(ValueError, match=r"operation; .* read num_batches_tracked: averaging$"):
        _CapturedStep(model, cuda.loss_fn, sgd(model), *batch(), None)


def test_process_groups_that_cannot_be_captured_are_named(monkeypatch):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3, process_group=object()))
    for name, found in {
        "is_initialized": lambda: True,
        "get_world_size": lambda group: 2,
        "get_backend_config": lambda group: backend,
    }.items():
        monkeypatch.setattr(torch.distributed, name, found)
    backend = "cpu:gloo,cuda:nccl"
    _check_process_groups(model)
    backend = "cpu:gloo,cuda:gloo"
    with pytest.raises(ValueError, match=r"NCCL process group of 1 .*, got cpu:gloo,cuda:gloo"):
        _check_process_groups(model)
    _check_process_groups(model.eval())


AFTER_A_FAILURE = """
import torch
from torch.nn import functional as F
import preact_kernels as pk

model = pk.preact_resnet(20).cuda()
x, target = torch.randn(4, 3, 16, 16).cuda(), torch.randint(10, (4,)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.0)
stream = torch.cuda.current_stream()

def loss_fn(y, target):
    return F.cross_entropy(F.dropout(y), target)

def loss_fn_that_synchronises(y, target):
    if {when}:
        y.detach().mean().item()
    return loss_fn(y, target)

def capture():
    return pk.graphed_step(model, loss_fn, optimizer, x, target)

steps = [capture()]
for attempt in range(2):
    try:
        pk.graphed_step(model, loss_fn_that_synchronises, optimizer, x, target)
    except ValueError as error:
        assert "expected a step that can be captured" in str(error), error
    else:
        raise SystemExit("captured")
    assert torch.cuda.current_stream() == stream
    assert all(p.grad is None for p in model.parameters())
    assert F.dropout(torch.ones(1000).cuda()).sum() > 0
    torch.cuda.synchronize()
for step in (*steps, capture()):  # weights do not change: losses differ by what is dropped
    assert len({{float(step(x, target)) for _ in range(4)}}) > 1
print("usable")
"""


@needs_gpu
@pytest.mark.parametrize("when", ["True", "torch.cuda.is_current_stream_capturing()"])
def test_after_a_capture_that_failed_the_process_can_go_on(when):
    process = subprocess.run(
        [sys.executable, "-c", AFTER_A_FAILURE.format(when=when)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout.split() == ["usable"], process.stderr[-3000:]


@needs_gpu
def test_captured_options_may_not_change():
    model = network()
    optimizer = sgd(model)
    step = pk.graphed_step(model, F.cross_entropy, optimizer, *batch())
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(ValueError, match=r"expected lr 0.05 as captured, got 0.01; give lr as a"):
        step(*batch())
    optimizer.param_groups[0]["lr"] = 0.05
    model.eval()
    with pytest.raises(ValueError, match="model: expected training=True as captured"):
        step(*batch())


@needs_gpu
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_capturable_optimisers_equal_steps_written_out(kind):
    model = network()
    other = copy.deepcopy(model)
    optimizers = [kind(m.parameters(), lr=1e-3, capturable=True) for m in (model, other)]
    step = pk.graphed_step(model, F.cross_entropy, optimizers[0], *batch())
    for seed in range(3):
        step(*batch(seed))
        written_out(other, optimizers[1], *batch(seed))
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
