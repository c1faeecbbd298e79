"""Measurements of signal flow equal a computation by hand, and do not change the model."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import preact_kernels as pk
from preact_kernels.study import diagnostics
from preact_kernels.study.diagnostics import BlockRow, Monitor, Thresholds
from preact_kernels.study.networks import study_network
from tests.oracle import assert_same_bits

QUIET = BlockRow(0, 1, "stages.0.0", 1, 0.0, 1.0, 1.0, 1.0, 1.0, 5e-3, 1e-3)


def batch(dtype=torch.float32, seed=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, 8, generator=generator, dtype=dtype)
    return x, torch.randint(10, (4,), generator=generator)


def network(depth=8, dtype=torch.float32, **options):
    torch.manual_seed(1)
    return study_network(depth, **options).to(dtype)


def sgd(model, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr)


def state_of(model):
    """Copies everything that a measurement could change."""
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    modes = torch.tensor([m.training for m in model.modules()])
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    state = {**model.state_dict(), **gradients, "modes": modes, "hooks": torch.tensor(hooks)}
    return copy.deepcopy({**state, "rng": torch.get_rng_state()})


def norm(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def rows_by_hand(model, x, target):
    """Computes the rows from tensors that autograd keeps."""
    outputs = {}
    for name, block in diagnostics.blocks_of(model).items():

        def keep(module, args, y, name=name):
            y.retain_grad()
            outputs[name] = y

        block.register_forward_hook(keep)
    F.cross_entropy(model(x), target).backward()
    rows = []
    for number, (name, y) in enumerate(outputs.items(), 1):
        block = model.get_submodule(name)
        weights = [m.weight for m in block.modules() if isinstance(m, nn.Conv2d)]
        row = QUIET._replace(step=7, block=number, name=name, stage=int(name.split(".")[1]) + 1)
        rows.append(
            row._replace(
                activation_mean=y.mean().item(),
                activation_std=y.std(correction=0).item(),
                activation_gradient_norm=norm([y.grad]),
                gradient_norm=norm(p.grad for p in block.parameters()),
                weight_norm=norm(weights),
                gradient_to_weight=norm(p.grad for p in weights) / norm(weights),
                update_to_weight=None,
            )
        )
    return rows


def assert_close(rows, expected):
    for row, by_hand in zip(rows, expected, strict=True):
        for name, actual, value in zip(BlockRow._fields, row, by_hand, strict=True):
            if isinstance(value, float):
                value = pytest.approx(value, rel=1e-9, abs=1e-12)
            assert actual == value, (row.name, name)


@pytest.mark.parametrize("options", [{"depth": 29, "memory": "rebuild"}, {"placement": "original"}])
def test_rows_equal_those_by_hand_on_the_plain_network(options):
    plain = network(**{**options, "memory": "store"}, dtype=torch.float64, fused=False)
    x, target = batch(torch.float64)
    expected = rows_by_hand(plain, x, target)
    model = network(**options, dtype=torch.float64)
    assert_close(diagnostics.measure(model, F.cross_entropy, x, target, step=7), expected)


def test_a_block_counts_the_first_time_and_its_std_does_not_cancel():
    block = nn.Linear(1, 1)
    nn.init.ones_(block.weight)
    nn.init.constant_(block.bias, 4096.0)
    model, x = nn.Sequential(block, nn.Tanh(), block), torch.tensor([[0.0], [1.0]]).repeat(500, 1)
    (row,) = diagnostics.measure(model, lambda y, _: y.sum(), x, None, blocks={"shared": block})
    assert row.activation_std == pytest.approx(0.5, rel=1e-4)
    assert (row.activation_mean, row.stage) == (4096.5, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_measure_leaves_everything_as_it_was(fails):
    model = network(20, dropout=0.5)
    for index, p in enumerate(model.parameters()):
        p.grad = None if index % 3 == 0 else torch.full_like(p, 0.25)
    model.stages[1].eval()
    if fails:
        model.norm.register_forward_hook(lambda *_: 1 / 0)  # after the blocks
    before = state_of(model)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        assert len(diagnostics.measure(model, F.cross_entropy, *batch())) == 9
    assert_same_bits(state_of(model), before)


# While training


def train(model, monitor=None, *, autocast=False, steps=4):
    torch.manual_seed(3)
    optimizer = sgd(model)
    losses = {}
    with contextlib.nullcontext() if monitor is None else monitor.attach(optimizer):
        for step in range(steps):
            x, target = batch(seed=step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
    return {**losses, **state_of(model)}


@pytest.mark.parametrize(
    ("options", "autocast"),
    [({"depth": 14, "memory": "rebuild"}, False), ({"dropout": 0.5, "survival": 0.5}, True)],
    ids=["rebuild", "dropout"],
)
def test_training_gives_the_same_bits_with_a_monitor(options, autocast):
    expected = train(network(**options), autocast=autocast)
    model = network(**options)
    monitor = Monitor(model, every=2)
    assert_same_bits(train(model, monitor, autocast=autocast), expected)
    blocks = diagnostics.blocks_of(model)
    assert [row.step for row in monitor.rows] == [step for step in (1, 2, 4) for _ in blocks]


def test_a_distributed_model_is_unwrapped_and_trains_as_without_a_monitor():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = train(DistributedDataParallel(network()), steps=2)
        model = DistributedDataParallel(network())
        assert "stages.0.0" in diagnostics.blocks_of(model)
        assert len(diagnostics.measure(model, F.cross_entropy, *batch())) == 3
        monitor = Monitor(model, every=1)
        assert_same_bits(train(model, monitor, steps=2), expected)
        assert len(monitor.rows) == 6
    finally:
        dist.destroy_process_group()


def test_monitor_gives_the_rows_of_measure_and_the_updates_of_sgd():
    x, target = batch(torch.float64)
    model = network(dtype=torch.float64)
    measured = diagnostics.measure(model, F.cross_entropy, x, target, step=1)
    optimizer = sgd(model)
    with Monitor(model).attach(optimizer) as monitor:
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    expected = [
        row._replace(activation_gradient_norm=None, update_to_weight=0.01 * row.gradient_to_weight)
        for row in measured
    ]
    assert_close(monitor.rows, expected)


def test_monitor_measures_the_first_of_accumulated_batches_and_the_clipped_gradients():
    model = network()
    first = diagnostics.measure(model, F.cross_entropy, *batch())
    optimizer = sgd(model)
    monitor = Monitor(model).attach(optimizer)
    for x, target in (batch(), batch(seed=6)):
        F.cross_entropy(model(x), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    means = [row.activation_mean for row in monitor.rows]
    assert means == pytest.approx([row.activation_mean for row in first], rel=1e-5)
    in_blocks = norm(p.grad for p in model.stages.parameters())
    assert math.hypot(*(row.gradient_norm for row in monitor.rows)) == pytest.approx(in_blocks)
    assert in_blocks < 1.01e-3


def test_monitor_measures_beside_steps_that_are_one_call_counted_from_a_resumed_one():
    x, target = batch()
    model = network()
    step = pk.graphed_step(model, F.cross_entropy, sgd(model, lr=0.0), x, target)
    monitor = Monitor(model, every=50, thresholds=Thresholds(gradient_to_weight_high=1e-9))
    monitor.step = 98
    for _ in range(3):
        monitor.before_step(x)
        step(x, target)
        monitor.after_step()
    assert {row.step for row in monitor.rows} == {100} and monitor.step == 101
    (expected, *_) = diagnostics.measure(network(), F.cross_entropy, x, target)
    assert monitor.rows[0].gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    assert monitor.warnings[0].startswith("step 100: blocks 1 to 3: gradient-to-weight ratio")


def test_frozen_weights_have_no_ratio_and_missing_gradients_count_as_zero():
    model = network(14, fused=False)
    for frozen in (model.stem, model.stages[0], model.stages[1][0].conv1.weight):
        frozen.requires_grad_(False)
    monitor = Monitor(model)
    monitor.before_step(batch()[0])
    monitor.after_step()
    assert [row.gradient_to_weight for row in monitor.rows] == [None] * 2 + [0.0] * 4
    rows = diagnostics.measure(model, F.cross_entropy, *batch())
    is_frozen = [True] * 2 + [False] * 4
    assert [row.activation_gradient_norm is None for row in rows] == is_frozen
    assert [row.gradient_norm == 0 for row in rows] == is_frozen


def test_only_forwards_that_train_are_measured_while_a_monitor_is_attached():
    model, (x, _) = network(), batch()
    optimizer = sgd(model)
    with Monitor(model).attach(optimizer) as monitor:
        with pytest.raises(ValueError, match=r"^optimizer: expected a detached monitor"):
            monitor.attach(optimizer)
        with torch.no_grad():
            model(x)
        copy.deepcopy(model)(x)
        model.eval()(x)
        optimizer.step()
        assert (monitor.step, monitor.rows) == (1, [])
    model.train()(x)
    optimizer.step()
    assert monitor.step == 1
    monitor.attach(optimizer)
    optimizer.step()
    assert monitor.step == 2


# Rows


def test_warnings_name_steps_blocks_values_and_thresholds():
    values = [  # step, standard deviation, ratio
        *((0, 1.0, 5e-3), (0, 1.0, 1e-6), (0, 1.5e3, 3e-6), (0, 1.0, 0.25), (0, 1.0, 5e-5)),
        *((0, 2e-4, None), (0, math.nan, math.inf), (0, math.nan, math.inf), (50, 1.0, 3e-6)),
    ]
    rows = [
        QUIET._replace(step=step, block=block, activation_std=std, gradient_to_weight=ratio)
        for block, (step, std, ratio) in enumerate(values, 1)
    ]
    assert diagnostics.warnings_of(rows) == [
        "blocks 2 to 3: gradient-to-weight ratio 1e-6 to 3e-6, below 1e-4: may be dead",
        "block 3: activation standard deviation 1.5e3, above 1e3: signal may explode",
        "block 4: gradient-to-weight ratio 0.25, above 0.1: may be unstable",
        "block 5: gradient-to-weight ratio 5e-5, below 1e-4: may be dead",
        "block 6: activation standard deviation 2e-4, below 1e-3: signal may vanish",
        "blocks 7 to 8: not finite: activation standard deviation, gradient-to-weight ratio",
        "step 50: block 9: gradient-to-weight ratio 3e-6, below 1e-4: may be dead",
    ]
    equal = [QUIET._replace(gradient_to_weight=v) for v in (1e-4, 1e-1)]
    assert diagnostics.warnings_of(equal) == []
    assert len(diagnostics.warnings_of(equal, Thresholds(2e-4, 5e-2))) == 2


def test_csv_has_the_rows_and_stays_if_writing_others_fails(tmp_path):
    path = tmp_path / "rows.csv"
    monitor = Monitor(network())
    row = QUIET._replace(name='a,"b"', activation_mean=1.23456e-20, update_to_weight=None)
    monitor.rows = [row, QUIET._replace(step=50, gradient_norm=math.inf)]
    monitor.write_csv(path)
    with pytest.raises(TypeError):
        diagnostics.write_csv(path, [QUIET, None])
    assert diagnostics.read_csv(path) == monitor.rows
    assert path.read_text().startswith(",".join(BlockRow._fields))
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("step,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"^path: expected columns step,.*, got 'step,loss'"):
        diagnostics.read_csv(path)


# The identity test and histograms


def test_full_preactivation_can_be_the_identity():
    """Other placements cannot: see the command `signal` in `test_comparisons.py`."""
    model = network(29, memory="rebuild")
    before = state_of(model)
    found = diagnostics.identity_test(model, batch()[0])
    assert found == {f"stages.{i}.{j}": True for i in range(3) for j in (1, 2)}
    assert_same_bits(state_of(model), before)


@pytest.mark.parametrize("limit", [None, 0.25])
def test_histograms_count_the_outputs_of_the_stages(limit):
    model = network(dropout=0.5)
    outputs = []
    for stage in model.stages:
        stage.register_forward_hook(lambda module, args, y: outputs.append(y.detach().flatten()))
    before = state_of(model)
    found = diagnostics.histograms(model, batch()[0], bins=11, limit=limit)
    assert_same_bits(state_of(model), before)
    assert list(found) == ["stages.0", "stages.1", "stages.2"]
    for (counts, edges), y in zip(found.values(), outputs, strict=True):
        end = limit or y.abs().max().item()
        expected = torch.histogram(y[y.abs() <= end].double(), 11, range=(-end, end))
        assert counts.tolist() == expected.hist.tolist()
        assert edges.tolist() == pytest.approx(expected.bin_edges.tolist())


def measured(model, loss_of=None, **options):
    return diagnostics.measure(model, lambda y, _: loss_of(y), *batch(), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: Monitor(m, 0), "every: expected at least 1, got 0"),
        (lambda m: Monitor(m, blocks={}), "blocks: expected at least one block"),
        (lambda m: Monitor(m, blocks=[m]), "blocks: expected a dict of modules"),
        (lambda m: Monitor(m).attach(m), "optimizer: expected a torch.optim.Optimizer"),
        (lambda m: diagnostics.blocks_of(m.fc), "model: expected residual blocks"),
        (lambda m: measured(m, lambda y: y), r"loss_fn: .* one element, got \[4, 10\]"),
        (lambda m: measured(m, lambda y: y.detach().sum()), "model: .* got a constant"),
        (lambda m: measured(m, blocks={"b": nn.ReLU()}), "blocks: .* the model calls"),
        (
            lambda m: diagnostics.identity_test(m, batch()[0], blocks={"stem": m.stem}),
            "blocks: expected blocks with a last_conv, got Conv2d as 'stem'",
        ),
        (lambda m: diagnostics.histograms(m, None, limit=-1.0), "limit: expected a p"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(network())
