"""Measurements of signal flow equal those by hand, and change nothing of what they measure."""

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

QUIET = BlockRow(0, 1, "stages.0.0", 1, 0.0, 1.0, 1.0, 1.0, 1.0, 5e-3, 1e-3)


def batch(dtype=torch.float32, seed=5, count=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=generator, dtype=dtype)
    return x, torch.randint(10, (count,), generator=generator)


def network(depth=29, dtype=torch.float32, build=pk.preact_resnet, **options):
    torch.manual_seed(1)
    return build(depth, **options).to(dtype)


def bits(t):
    return t.detach().reshape(-1).view(torch.uint8)


def assert_same_bits(actual, expected):
    assert list(actual) == list(expected)
    for name, t in expected.items():
        assert (actual[name] is None) == (t is None), name
        assert t is None or torch.equal(bits(actual[name]), bits(t)), name


def state_of(model):
    """Copies of everything that a measurement could change."""
    tensors = {n: t.detach().clone() for n, t in model.state_dict().items()}
    gradients = {
        f"{n}.grad": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
    }
    return {**tensors, **gradients, "rng": torch.get_rng_state()}


def hook_count(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def norm(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def rows_by_hand(model, x, target):
    """The rows, from tensors that autograd keeps."""
    outputs, handles = {}, []
    for name, block in diagnostics.blocks_of(model).items():

        def keep(module, args, y, name=name):
            y.retain_grad()
            outputs[name] = y

        handles.append(block.register_forward_hook(keep))
    F.cross_entropy(model(x), target).backward()
    rows = []
    for number, (name, y) in enumerate(outputs.items(), 1):
        parameters = dict(model.get_submodule(name).named_parameters())
        weights = [p for n, p in parameters.items() if "conv" in n or "shortcut" in n]
        of_weights, of_all = norm(p.grad for p in weights), [p.grad for p in parameters.values()]
        values = y.detach().double()
        rows.append(
            BlockRow(
                step=7,
                block=number,
                name=name,
                stage=int(name.split(".")[1]) + 1,
                activation_mean=values.mean().item(),
                activation_std=(values - values.mean()).square().mean().sqrt().item(),
                activation_gradient_norm=norm([y.grad]),
                gradient_norm=norm(of_all),
                weight_norm=norm(weights),
                gradient_to_weight=of_weights / norm(weights),
                update_to_weight=None,
            )
        )
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return rows


def assert_close(rows, expected, rel):
    assert len(rows) == len(expected)
    for row, by_hand in zip(rows, expected, strict=True):
        for name, actual, value in zip(BlockRow._fields, row, by_hand, strict=True):
            if isinstance(value, float):
                value = pytest.approx(value, rel=rel, abs=1e-12)
            assert actual == value, (row.name, name)


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_rows_equal_those_by_hand_on_the_plain_network(fused, block):
    depth = 20 if block == "basic" else 29
    plain = network(depth, torch.float64, block=block, fused=False)
    x, target = batch(torch.float64)
    expected = rows_by_hand(plain, x, target)
    model = network(depth, torch.float64, block=block, fused=fused)
    rows = diagnostics.measure(model, F.cross_entropy, x, target, step=7)
    assert_close(rows, expected, rel=1e-9)


def test_rows_are_the_same_in_every_memory_mode():
    x, target = batch()
    store, *others = (
        diagnostics.measure(network(memory=mode), F.cross_entropy, x, target)
        for mode in ("store", "rebuild", "checkpoint")
    )
    assert len(store) == 9
    assert others == [store, store]


def test_units_of_other_placements_give_the_rows_of_their_plain_form():
    x, target = batch(torch.float64)
    options = {"build": study_network, "placement": "original", "dtype": torch.float64}
    expected = rows_by_hand(network(20, **options, fused=False), x, target)
    # Norms of the projection count as other parameters, as in `rows_by_hand`: they have one axis.
    fused = network(20, **options)
    rows = diagnostics.measure(fused, F.cross_entropy, x, target, step=7)
    for row, by_hand in zip(rows, expected, strict=True):
        assert row.gradient_norm == pytest.approx(by_hand.gradient_norm, rel=1e-9)
        assert row.activation_std == pytest.approx(by_hand.activation_std, rel=1e-9)


def test_std_does_not_cancel_beside_a_large_mean():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 1))

        def forward(self, x):
            return x * self.weight + 4096.0

    model = Shift()
    x = torch.tensor([0.0, 1.0]).repeat(500).view(1, -1)
    (row,) = diagnostics.measure(model, lambda y, _: y.sum(), x, None, blocks={"shift": model})
    assert row.activation_std == pytest.approx(0.5, rel=1e-4)
    assert row.stage == 0


def test_a_block_that_is_called_twice_counts_the_first_time():
    block = nn.Linear(3, 3)
    model, x = nn.Sequential(block, nn.Tanh(), block), torch.randn(5, 3)
    (row,) = diagnostics.measure(model, lambda y, _: y.sum(), x, None, blocks={"shared": block})
    assert row.activation_mean == pytest.approx(block(x).mean().item(), rel=1e-4)


@pytest.mark.parametrize("fails", [False, True], ids=["success", "error"])
def test_measure_leaves_everything_as_it_was(fails):
    def loss_fn(y, target):
        if fails:
            raise ArithmeticError
        return F.cross_entropy(y, target)

    model = network(20, build=study_network, dropout=0.5)
    for index, p in enumerate(model.parameters()):
        p.grad = None if index % 3 == 0 else torch.full_like(p, 0.25)
    model.stages[1].eval()
    modes = [m.training for m in model.modules()]
    before, hooks = state_of(model), hook_count(model)
    if fails:
        with pytest.raises(ArithmeticError):
            diagnostics.measure(model, loss_fn, *batch())
    else:
        assert len(diagnostics.measure(model, loss_fn, *batch())) == 9
    assert_same_bits(state_of(model), before)
    assert [m.training for m in model.modules()] == modes
    assert hook_count(model) == hooks


def test_hooks_are_removed_if_the_model_raises():
    model = network(20)
    model.norm.register_forward_hook(lambda *_: 1 / 0)  # behind the blocks
    with pytest.raises(ZeroDivisionError):
        diagnostics.measure(model, F.cross_entropy, *batch())
    assert hook_count(model) == 1


def train(model, steps=5, monitor=None, dtype=None):
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses = {}
    if monitor is not None:
        monitor.attach(optimizer)
    for step in range(steps):
        x, target = batch(seed=step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    if monitor is not None:
        monitor.detach()
    return {**losses, **state_of(model)}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"memory": "rebuild"}, id="rebuild"),
        pytest.param({"build": study_network, "dropout": 0.5, "survival": 0.5}, id="dropout"),
        pytest.param({"build": study_network, "placement": "original"}, id="original"),
    ],
)
def test_training_gives_the_same_bits_with_a_monitor(options):
    expected = train(network(20, **options))
    model = network(20, **options)
    monitor = Monitor(model, every=2)
    assert_same_bits(train(model, monitor=monitor), expected)
    assert [row.step for row in monitor.rows] == [1] * 9 + [2] * 9 + [4] * 9


def test_training_under_autocast_gives_the_same_bits_with_a_monitor():
    expected = train(network(20), dtype=torch.bfloat16)
    model = network(20)
    monitor = Monitor(model, every=1)
    assert_same_bits(train(model, monitor=monitor, dtype=torch.bfloat16), expected)
    assert len(monitor.rows) == 5 * 9


def test_monitor_gives_the_rows_of_measure_and_the_updates_of_sgd():
    x, target = batch(torch.float64)
    model = network(dtype=torch.float64)
    measured = diagnostics.measure(model, F.cross_entropy, x, target, step=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model).attach(optimizer) as monitor:
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    expected = [
        row._replace(activation_gradient_norm=None, update_to_weight=0.01 * row.gradient_to_weight)
        for row in measured
    ]
    assert_close(monitor.rows, expected, rel=1e-9)
    assert hook_count(model) == 0


def test_monitor_reads_the_clipped_gradients():
    x, target = batch()
    model = network(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model).attach(optimizer) as monitor:
        F.cross_entropy(model(x), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    in_blocks = norm(p.grad for p in model.stages.parameters())
    assert math.hypot(*(row.gradient_norm for row in monitor.rows)) == pytest.approx(in_blocks)
    assert in_blocks < 1.01e-3


def test_of_accumulated_batches_the_first_is_measured():
    model = network(20)
    (x, target), (x2, target2) = batch(), batch(seed=6)
    first = diagnostics.measure(model, F.cross_entropy, x, target)
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, every=1).attach(optimizer)
    for images, labels in ((x, target), (x2, target2)):
        F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    assert calls == [False, True, True]
    means = [row.activation_mean for row in monitor.rows]
    assert means == pytest.approx([row.activation_mean for row in first], rel=1e-5)
    in_blocks = norm(p.grad for p in model.stages.parameters())  # of both batches
    assert math.hypot(*(row.gradient_norm for row in monitor.rows)) == pytest.approx(in_blocks)


def test_only_forwards_that_train_are_measured():
    model = network(20)
    x, _ = batch()
    monitor = Monitor(model).attach(torch.optim.SGD(model.parameters(), lr=0.01))
    with torch.no_grad():
        model(x)
    copy.deepcopy(model)(x)
    model.eval()(x)
    monitor.after_step()
    assert monitor.rows == []


def test_steps_are_counted_from_a_resumed_one():
    model = network(20)
    monitor = Monitor(model, every=50)
    monitor.step = 98
    for _ in range(3):
        monitor.before_step(batch()[0])
        monitor.after_step()
    assert monitor.step == 101
    assert {row.step for row in monitor.rows} == {100}


def test_monitor_measures_beside_a_step_that_is_one_call():
    x, target = batch()
    model, plain = network(20), network(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = pk.graphed_step(model, F.cross_entropy, optimizer, x, target)
    monitor = Monitor(model, every=1, thresholds=Thresholds(gradient_to_weight_high=1e-9))
    monitor.before_step(x)
    step(x, target)
    monitor.after_step()
    (expected, *_) = diagnostics.measure(plain, F.cross_entropy, x, target)
    assert monitor.rows[0].gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    assert monitor.warnings[0].startswith("step 1: blocks 1 to 9: gradient-to-weight ratio")


def test_frozen_weights_have_no_ratio_and_missing_gradients_count_as_zero():
    model = network(20, fused=False)
    model.stem.requires_grad_(False)
    model.stages[0].requires_grad_(False)
    model.stages[1][0].conv1.weight.requires_grad_(False)
    monitor = Monitor(model)
    monitor.before_step(batch()[0])
    monitor.after_step()
    ratios = [row.gradient_to_weight for row in monitor.rows]
    assert ratios == [None] * 3 + [0.0] * 6
    rows = diagnostics.measure(model, F.cross_entropy, *batch())
    assert [row.activation_gradient_norm is None for row in rows] == [True] * 3 + [False] * 6
    assert [row.gradient_norm == 0 for row in rows] == [True] * 3 + [False] * 6


def test_distributed_model_is_unwrapped_and_trains_as_without_a_monitor():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = train(DistributedDataParallel(network(20)), steps=2)
        model = DistributedDataParallel(network(20))
        assert next(iter(diagnostics.blocks_of(model))) == "stages.0.0"
        assert len(diagnostics.measure(model, F.cross_entropy, *batch())) == 9
        monitor = Monitor(model, every=1)
        assert_same_bits(train(model, steps=2, monitor=monitor), expected)
        assert len(monitor.rows) == 18
    finally:
        dist.destroy_process_group()


def test_warnings_name_blocks_values_and_thresholds():
    rows = [QUIET._replace(block=i) for i in range(1, 9)]
    for index, ratio in ((1, 1e-6), (2, 3e-6), (3, 2.04e-6), (5, 5e-5), (6, 0.25)):
        rows[index] = rows[index]._replace(gradient_to_weight=ratio)
    rows[2] = rows[2]._replace(activation_std=1.5e3)
    rows[7] = rows[7]._replace(activation_std=2e-4, gradient_to_weight=None)
    assert diagnostics.warnings_of(rows) == [
        "blocks 2 to 4: gradient-to-weight ratio 1e-6 to 3e-6, below 1e-4: may be dead",
        "block 3: activation standard deviation 1.5e3, above 1e3: signal may explode",
        "block 6: gradient-to-weight ratio 5e-5, below 1e-4: may be dead",
        "block 7: gradient-to-weight ratio 0.25, above 0.1: may be unstable",
        "block 8: activation standard deviation 2e-4, below 1e-3: signal may vanish",
    ]


def test_warnings_of_several_steps_begin_with_the_step():
    rows = [
        QUIET._replace(step=step, block=block, gradient_to_weight=3e-6)
        for step, block in ((50, 12), (100, 12), (100, 13))
    ]
    verdict = "gradient-to-weight ratio 3e-6, below 1e-4: may be dead"
    assert diagnostics.warnings_of(rows) == [
        f"step 50: block 12: {verdict}",
        f"step 100: blocks 12 to 13: {verdict}",
    ]


def test_values_that_are_not_finite_are_named_once():
    rows = [
        QUIET._replace(block=i, activation_std=math.nan, gradient_to_weight=math.inf)
        for i in (1, 2)
    ]
    assert diagnostics.warnings_of(rows) == [
        "blocks 1 to 2: not finite: activation standard deviation, gradient-to-weight ratio"
    ]


def test_thresholds_are_not_crossed_by_equal_values_and_can_be_set():
    rows = [QUIET._replace(gradient_to_weight=v) for v in (1e-4, 1e-1)]
    assert diagnostics.warnings_of(rows) == []
    assert len(diagnostics.warnings_of(rows, Thresholds(2e-4, 5e-2))) == 2


def test_csv_gives_back_the_rows(tmp_path):
    path = tmp_path / "rows.csv"
    monitor = Monitor(network(20))
    monitor.rows = [
        QUIET._replace(name='a,"b"', activation_mean=1.23456e-20, update_to_weight=None),
        QUIET._replace(step=50, gradient_norm=math.inf, gradient_to_weight=None),
    ]
    monitor.write_csv(path)
    assert path.read_text().splitlines()[0] == ",".join(BlockRow._fields)
    assert diagnostics.read_csv(path) == monitor.rows
    diagnostics.write_csv(path, [QUIET._replace(activation_mean=math.nan)])
    assert math.isnan(diagnostics.read_csv(path)[0].activation_mean)


def test_csv_stays_if_writing_another_fails(tmp_path):
    path = tmp_path / "rows.csv"
    diagnostics.write_csv(path, [QUIET])
    with pytest.raises(TypeError):
        diagnostics.write_csv(path, [QUIET, None])
    assert diagnostics.read_csv(path) == [QUIET]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]


def test_csv_with_other_columns_is_an_error(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("step,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"^path: expected columns step,.*, got 'step,loss'"):
        diagnostics.read_csv(path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"depth": 29}, True, id="bottleneck"),
        pytest.param({"depth": 29, "fused": False}, True, id="plain"),
        pytest.param({"depth": 20, "memory": "rebuild"}, True, id="basic"),
        pytest.param({"placement": "original"}, False, id="original"),
        pytest.param({"placement": "bn-after-addition"}, False, id="bn-after-addition"),
        pytest.param({"placement": "relu-before-addition"}, False, id="relu-before-addition"),
        pytest.param({"placement": "relu-only-preactivation"}, False, id="relu-only"),
        pytest.param({"shortcut": "shortcut-only-gating"}, False, id="gated"),
        pytest.param({"shortcut": "constant-scaling"}, False, id="scaled"),
    ],
)
def test_only_full_preactivation_with_identity_shortcuts_can_be_the_identity(options, expected):
    options = {"depth": 20, **options}
    model = network(build=study_network, **options)
    before, hooks = state_of(model), hook_count(model)
    found = diagnostics.identity_test(model, batch()[0])
    widens = options["depth"] == 29  # a bottleneck's first block
    names = [f"stages.{i}.{j}" for i in range(3) for j in range(3) if j or not (i or widens)]
    assert found == dict.fromkeys(names, expected)
    assert_same_bits(state_of(model), before)
    assert hook_count(model) == hooks


@pytest.mark.parametrize("limit", [None, 0.5])
def test_histograms_count_the_outputs_of_the_stages(limit):
    model = network(20, build=study_network, dropout=0.5)
    outputs = {}

    def keep(name):
        def hook(module, args, y):
            outputs[name] = y.detach().flatten()

        return hook

    for i, stage in enumerate(model.stages):
        stage.register_forward_hook(keep(f"stages.{i}"))
    x, _ = batch()
    before = state_of(model)
    found = diagnostics.histograms(model, x, bins=11, limit=limit)
    assert_same_bits(state_of(model), before)
    assert list(found) == list(outputs)
    for name, (counts, edges) in found.items():
        y = outputs[name].double()
        end = limit or y.abs().max().item()
        assert edges.tolist() == pytest.approx([-end + 2 * end * i / 11 for i in range(12)])
        inside = y[y.abs() <= end]
        expected = torch.histogram(inside, 11, range=(-end, end)).hist
        assert counts.tolist() == expected.tolist()
        assert counts.sum() == inside.numel()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: Monitor(m, 0), ValueError, "every: expected at least 1, got 0"),
        (lambda m: Monitor(m, True), TypeError, "every: expected an int, got bool"),
        (lambda m: Monitor(m, 2.0), TypeError, "every: expected an int, got float"),
        (lambda m: Monitor(m, blocks={}), ValueError, "blocks: expected at least one block"),
        (lambda m: Monitor(m, blocks=[m]), TypeError, "blocks: expected a dict of modules"),
        (lambda m: Monitor(None), TypeError, "model: expected an nn.Module, got NoneType"),
        (lambda m: Monitor(m).attach(m), TypeError, "optimizer: expected a torch.optim.Optimizer"),
        (lambda m: diagnostics.blocks_of(m.fc), ValueError, "model: expected residual blocks"),
        (
            lambda m: diagnostics.measure(m, lambda y, _: y, *batch()),
            ValueError,
            r"loss_fn: expected a tensor of one element, got \[4, 10\]",
        ),
        (
            lambda m: diagnostics.measure(m, lambda y, _: y.detach().sum(), *batch()),
            ValueError,
            "model: expected a loss that depends on parameters, got a constant",
        ),
        (
            lambda m: diagnostics.measure(
                m, F.cross_entropy, *batch(), blocks={"other": nn.Conv2d(1, 1, 1)}
            ),
            ValueError,
            "blocks: expected blocks that the model calls",
        ),
        (
            lambda m: diagnostics.identity_test(m, batch()[0], blocks={"stem": m.stem}),
            ValueError,
            "blocks: expected blocks with a last_conv, got Conv2d as 'stem'",
        ),
        (
            lambda m: diagnostics.histograms(m, batch()[0], bins=0),
            ValueError,
            "bins: expected at least 1, got 0",
        ),
        (
            lambda m: diagnostics.histograms(m, batch()[0], limit=-1.0),
            ValueError,
            "limit: expected a positive number or None, got -1.0",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call(network(20))


def test_a_monitor_is_attached_once_and_detached_at_the_end():
    model = network(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model).attach(optimizer) as monitor:
        optimizer.step()
        with pytest.raises(ValueError, match=r"^optimizer: expected a detached monitor"):
            monitor.attach(optimizer)
    optimizer.step()
    assert monitor.step == 1
    monitor.attach(optimizer)
    optimizer.step()
    assert monitor.step == 2
