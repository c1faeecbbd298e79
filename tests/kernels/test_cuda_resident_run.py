"""Runs of bottlenecks in few launches of the CUDA library."""

import collections
import contextlib
import re

import pytest
import torch
from torch import nn

import preact_kernels as pk
from preact_kernels.kernels import cuda
from preact_kernels.kernels.contract import Statistics
from testbed.cuda_on_host import serve_cpu
from tests.cases import Autocast, in_dtype, random_block, recorded_calls
from tests.conftest import IS_CUDA_ON_HOST, CalledOps
from tests.kernels.cuda_conv_cases import DEVICE, kernels, launches, nhwc, on_host
from tests.oracle import assert_same_bits, check, evaluate, plain_copy, same_bits

SIDES = {16: 32, 32: 16, 64: 8}  # of the images, by inner channels
FORWARD = "preact_kernels_cuda::resident_run_forward"
BACKWARD = "preact_kernels_cuda::resident_run_backward"
BY_UNITS = "preact_kernels_cuda::block_run_forward"
BACKWARD_BY_UNITS = "preact_kernels_cuda::block_run_backward"
MEMORY = ({"memory": "rebuild", "anchor_every": 2}, {"memory": "checkpoint", "segments": 2})
every_width = pytest.mark.parametrize("width", SIDES)


@pytest.fixture(autouse=True)
def resident_runs(fused_convolutions, monkeypatch):
    monkeypatch.setattr(cuda, "RESIDENT_RUNS", True)
    set_schedule()
    with pk.use_backend("cuda"):
        yield


def set_schedule(seed=0, multiprocessors=4):
    if IS_CUDA_ON_HOST:
        serve_cpu.set_schedule(seed, multiprocessors)


@contextlib.contextmanager
def by_units():
    """In this context no run is resident."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cuda, "RESIDENT_RUNS", False)
        yield


def stage_of(width, blocks=2, dtype=torch.bfloat16, **options):
    """Every batch norm has a momentum of its own, and an eps by its place in the block."""
    blocks = [random_block("bottleneck", 4 * width, width) for _ in range(blocks)]
    stage = in_dtype(pk.PreActStage(blocks, **options), dtype).to(DEVICE)
    norms = [m for m in stage.modules() if isinstance(m, nn.BatchNorm2d)]
    for place, norm in enumerate(norms, 1):
        norm.momentum = 0.5 / place
    for block in stage:
        for place, (norm, _) in enumerate(block.units(), 1):
            norm.eps = 0.04 * place
    return stage


def random_input(width, images=2, dtype=torch.bfloat16):
    side = SIDES.get(width, 8)
    return nhwc(torch.randn(images, 4 * width, side, side, device=DEVICE).to(dtype))


def recorded_run(stage, x):
    """The run of a stage's blocks, and what is wanted of it, with the statistics of its output."""
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        calls = recorded_calls(kernels(), "block_run_forward", monkeypatch)
        stage(x)
    ((run, _, wanted),) = calls
    keeps = [True] * len(wanted.block_inputs)
    return run, wanted._replace(statistics=True, block_inputs=keeps, unit_inputs=True)


def forward(run, x, wanted):
    """The tensors of a run by name."""
    found = kernels().block_run_forward(run, x, wanted)
    statistics = {f"statistics {i}": s for i, s in enumerate(found.unit_statistics)}
    statistics["statistics of y"] = found.statistics
    moments = {f"{n}, {f}": t for n, s in statistics.items() for f, t in s._asdict().items()}
    return {"y": found.y, **moments, **{f"input {i}": t for i, t in enumerate(found.inputs)}}


def with_statistics_of_x(run, mean, var):
    return run._replace(statistics=[Statistics(mean, var), *run.statistics[1:]])


def called(function):
    """The ops of the CUDA library that run blocks in a call."""
    with CalledOps() as ops:
        function()
    return ops.names & {FORWARD, BACKWARD, BY_UNITS, BACKWARD_BY_UNITS}


@pytest.mark.calls(FORWARD, BACKWARD)
@every_width
def test_results_are_within_the_budget(width):
    stage = stage_of(width)
    check(stage, plain_copy(stage), [{"x": random_input(width)} for _ in range(3)])


@pytest.mark.calls(FORWARD)
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_memory_modes_are_within_the_budget(memory):
    """A mode decides which inputs the run keeps: some, or those inside of blocks alone."""
    stage = stage_of(64, blocks=3, **memory)
    check(stage, plain_copy(stage), [{"x": random_input(64)} for _ in range(2)])


@pytest.mark.calls(FORWARD, BACKWARD)
def test_a_run_between_others_is_within_the_budget(monkeypatch):
    """The runs around it are not resident: their blocks are narrower.

    A gradient goes into it with a step that is left to do, and comes out with one.
    """
    blocks = [random_block("bottleneck", 256, 64, base_width=w) for w in (32, 64, 64, 32)]
    stage = in_dtype(pk.PreActStage(blocks), torch.bfloat16).to(DEVICE)
    calls = recorded_calls(kernels(), "block_run_backward", monkeypatch)
    check(stage, plain_copy(stage), [{"x": random_input(64)} for _ in range(3)])
    assert {len(run.parameters) for run, dy, *_ in calls if dy.step is not None} >= {6}


@pytest.mark.calls(BACKWARD)
def test_a_long_run_takes_several_launches_backward():
    """A launch has 16 blocks at most. Rounding differs, and grows from block to block.

    Weight gradients of three shapes have a launch each.
    """
    stage = stage_of(64, blocks=17, dtype=torch.float16)
    x, dy = (random_input(64, images=1, dtype=torch.float16) for _ in range(2))
    inputs, found = {"x": x}, evaluate(stage, {"x": x}, dy)
    if IS_CUDA_ON_HOST:
        counts = collections.Counter(launches(lambda: evaluate(stage, inputs, dy)))
        assert counts["resident_run_backward"] == 2
        assert counts["norm_act_conv_weight_gradients"] == 3 * 2
    for name, expected in evaluate(plain_copy(stage), inputs, dy, dtype=torch.float32).items():
        if name.startswith("d") and expected is not None:
            error = (found[name].double() - expected.double()).norm()
            assert error <= 0.2 * expected.double().norm(), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_width
def test_inputs_and_statistics_are_those_of_the_units(width, dtype):
    """As near as two orders of the sums in a convolution, when their results are rounded."""
    stage, x = stage_of(width, dtype=dtype), random_input(width, dtype=dtype)
    run, wanted = recorded_run(stage, x)
    if dtype == torch.bfloat16:  # the statistics of x are given
        run = with_statistics_of_x(run, *(torch.rand(2, 4 * width, device=DEVICE) + 0.5))
    resident = forward(run, x, wanted)
    with by_units():
        expected = forward(run, x, wanted)
    assert resident.keys() == expected.keys() and len(expected) == 1 + 2 * 7 + 6
    of_inputs = 2.5 * torch.finfo(dtype).eps
    for name, found in resident.items():
        right = expected[name]
        assert (found.shape, found.dtype) == (right.shape, right.dtype), name
        assert found.stride() == right.stride(), name
        rtol, atol = (2e-3, 1e-3) if "statistics" in name else (of_inputs, of_inputs)
        torch.testing.assert_close(found, right, rtol=rtol, atol=atol)


@every_width
def test_statistics_are_those_of_the_stored_inputs(width):
    """Also of channels that are constant, and of those with a mean of 1000 deviations.

    x has such channels, which the first block does not change, and so has its inner input.
    """
    stage, x = stage_of(width, dtype=torch.float16), random_input(width, dtype=torch.float16)
    block, channels = stage[0], slice(3, None, 7)
    with torch.no_grad():
        block.conv3.weight[channels] = 0  # y = x there
        x[:, channels] += 1000
        x[:, 10] = 1000
        block.bn1.bias[:2] = torch.tensor([1000.0, 512.0])
        block.bn1.weight[:2] = torch.tensor([1.0, 0.0])
        block.conv1.weight[:2] = 0
        block.conv1.weight[0, 0] = block.conv1.weight[1, 1] = 1
    run, wanted = recorded_run(stage, x)
    found = forward(run, x, wanted)
    inputs = {str(i): found[f"input {i}"] for i in range(6)} | {"of y": found["y"]}
    for name, stored in inputs.items():
        exact = torch.var_mean(stored.double(), (0, 2, 3), correction=0)
        var, mean = (found[f"statistics {name}, {f}"].double() for f in ("var", "mean"))
        torch.testing.assert_close(var, exact[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(mean, exact[1], rtol=1e-6, atol=1e-6)
    assert (found["statistics 3, var"] == 0).nonzero().tolist() == [[10]]
    assert (found["statistics 1, var"] == 0).nonzero().tolist() == [[1]]
    assert (found["statistics 1, mean"][0] - 1000).abs() < 1


@on_host
@pytest.mark.parametrize("width", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_schedules_change_no_bit(width):
    """Nor does the order of images, where the statistics of x, of another kernel, are given."""
    stage, x = stage_of(width), random_input(width)
    run, wanted = recorded_run(stage, x)
    run = with_statistics_of_x(run, *torch.ones(2, 4 * width, device=DEVICE))
    results, expected = evaluate(stage, {"x": x}), forward(run, x, wanted)
    set_schedule(2)
    assert_same_bits(evaluate(stage, {"x": x}), results)
    turned = forward(run, nhwc(x.flip(0)), wanted)
    for name, t in turned.items():
        assert same_bits(t.flip(0) if t.dim() == 4 else t, expected[name]), name


@pytest.mark.parametrize(
    ("where", "value"),
    [("x", torch.nan), ("inside", torch.inf), ("y", -torch.inf), ("dy", torch.inf)],
)
def test_what_is_not_finite_spreads_as_by_units(where, value):
    stage, x = stage_of(64, blocks=2 if where == "inside" else 1), random_input(64)
    dy = random_input(64)
    with torch.no_grad():
        if where == "inside":  # a channel of a product, whose mean is then infinite
            stage[0].bn1.bias[0] = 100
            stage[0].conv1.weight[5] = 0
            stage[0].conv1.weight[5, 0] = value
        elif where == "y":
            stage[0].conv3.weight[5] = value
        else:
            {"x": x, "dy": dy}[where][1, 5, 3, 4] = value
    run, wanted = recorded_run(stage, x)

    def results():
        if where != "dy":
            return forward(run, x, wanted)
        found = evaluate(stage, {"x": x}, dy)
        return {n: t for n, t in found.items() if n.startswith("d") and t is not None}

    found = results()
    with by_units():
        expected = results()
    kinds = (torch.isnan, torch.isposinf, torch.isneginf) if where != "dy" else (torch.isfinite,)
    for kind in kinds:
        for name, t in found.items():
            assert torch.equal(kind(t), kind(expected[name])), (kind, name)
    are_finite = [t.isfinite().all().item() for t in found.values()]
    assert not all(are_finite)
    if where != "x":
        assert any(t.isfinite().any() for t in found.values())


def test_other_memory_of_x_and_of_weights_changes_no_bit():
    """x at an odd address; weights in NHWC order, in float32, not aligned."""
    stage, x = stage_of(64), random_input(64)
    run, wanted = recorded_run(stage, x)
    expected = forward(run, x, wanted)
    memory = x.new_empty(x.numel() + 1)
    shifted = memory[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
    assert shifted.data_ptr() % 16 != 0
    assert_same_bits(forward(run, shifted, wanted), expected)

    def at_offset(weight):
        return weight.new_empty(weight.numel() + 1)[1:].view(weight.shape).copy_(weight)

    for change in (nhwc, torch.Tensor.float, at_offset):
        parameters = [p._replace(conv_weight=change(p.conv_weight)) for p in run.parameters]
        assert_same_bits(forward(run._replace(parameters=parameters), x, wanted), expected)


def test_float32_weights_under_autocast_are_served_where_x_is_half():
    stage = stage_of(64, dtype=torch.float32)
    x = random_input(64)
    module = Autocast(stage)
    assert called(lambda: module(x=x)) == {FORWARD}
    check(module, plain_copy(module), {"x": random_input(64)}, draws=1)
    assert called(lambda: module(x=x.float())) == set()


def too_many_images():
    if IS_CUDA_ON_HOST:
        set_schedule(multiprocessors=1)
        return 2
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count + 1


def single(*block, **options):
    return in_dtype(pk.PreActStage([random_block(*block, **options)]), torch.bfloat16).to(DEVICE)


def one_image(width=64, repeats=(1, 1, 1, 1)):
    return nhwc(random_input(width, 1).repeat(repeats))


# A stage and its input that the kernel does not serve.
NOT_SERVED = {
    "evaluation": lambda: (stage_of(64, 1).eval(), one_image()),
    "float32": lambda: (stage_of(64, 1, torch.float32), one_image().float()),
    "float32 stream": lambda: (
        stage_of(64, 1, residual_dtype=torch.float32),
        one_image().float(),
    ),
    "higher images": lambda: (stage_of(64, 1), one_image(repeats=(1, 1, 2, 1))),
    "wider images": lambda: (stage_of(64, 1), one_image(repeats=(1, 1, 1, 2))),
    "many images": lambda: (stage_of(64, 1), random_input(64, too_many_images())),
    "basic blocks": lambda: (single("basic", 64, 64), nhwc(one_image()[:, :64])),
    "narrow inside": lambda: (single("bottleneck", 256, 64, base_width=32), one_image()),
    "few channels": lambda: (stage_of(48, 1), one_image(48)),
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_other_runs_are_those_of_the_units(name):
    stage, x = NOT_SERVED[name]()
    assert not called(lambda: evaluate(stage, {"x": x})) & {FORWARD, BACKWARD}


def is_served(x, weights):
    return torch.ops.preact_kernels_cuda.resident_run_is_served(x, weights, 3, x.dtype, False)


def test_256_blocks_are_served_where_shared_memory_holds_them():
    run, _ = recorded_run(stage_of(64, blocks=1), random_input(64))
    weights = [p.conv_weight for p in run.parameters]
    assert is_served(random_input(64), weights * 256)
    assert not is_served(random_input(64), weights * 257)
    if IS_CUDA_ON_HOST:
        serve_cpu.set_most_shared_bytes(163 * 1024)
        try:
            assert not is_served(random_input(64), weights)
        finally:
            serve_cpu.set_most_shared_bytes()


# Damage to the arguments of the op, and how its message begins: what it checks itself, and one of
# each check that it shares with `block_run_forward`.
WRONG = {
    "dtype": (lambda a: a.update(dtype=torch.float32), "dtype: "),
    "units of a block": (lambda a: a.update(units_per_block=6), "units_per_block: "),
    "no units": (
        lambda a: a.update(bn_weights=[], bn_biases=[], conv_weights=[], eps=[]),
        "units_per_block: ",
    ),
    "channels of x": (lambda a: a.update(x=nhwc(a["x"][:, :64])), "x: "),
    "image of x": (lambda a: a.update(x=nhwc(a["x"][..., :7])), "x: "),
    "many images": (lambda a: a.update(x=nhwc(a["x"].repeat(200, 1, 1, 1))), "x: "),
    "shape of a weight": (lambda a: a["conv_weights"].reverse(), "conv_weights: "),
    "shape of a norm": (lambda a: a["bn_weights"].reverse(), "bn_weights|means, .*"),
    "all statistics": (lambda a: a.update(means=[VALUES] * 6, variances=[VALUES] * 6), "means: "),
    "few eps": (lambda a: a["eps"].pop(), "eps: "),
    "a block that is not there": (lambda a: a.update(kept_blocks=[0, 2]), "kept_blocks: "),
}
VALUES = torch.ones(256, device=DEVICE)


def assert_wrong_arguments_are_named(op, arguments, wrong):
    """Each damage to the arguments is an error whose message begins as `wrong` says."""
    for name, (damage, message) in wrong.items():
        given = {n: list(v) if isinstance(v, list) else v for n, v in arguments.items()}
        damage(given)
        with pytest.raises(RuntimeError) as raised:
            op(*given.values())
        assert re.match(message, str(raised.value)), name


def test_a_wrong_argument_is_an_error_that_names_it():
    x = random_input(64)
    run, _ = recorded_run(stage_of(64), x)
    lists = map(list, zip(*run.parameters, strict=True))
    given = dict(zip(("bn_weights", "bn_biases", "conv_weights"), lists, strict=True))
    given |= {"means": [], "variances": [], "eps": run.eps}
    given |= {"units_per_block": 3, "dtype": torch.bfloat16}
    arguments = {"x": x, **given, "with_stats": True, "kept_blocks": [0], "keep_unit_inputs": True}
    op = torch.ops.preact_kernels_cuda.resident_run_forward
    assert len(op(*arguments.values())) == 3 + 12 + 5
    assert_wrong_arguments_are_named(op, arguments, WRONG)


# The same for the op of the backward.
WRONG_BACKWARD = {
    "dtype": (lambda a: a.update(dtype=torch.float32), "dtype: "),
    "shape of g": (lambda a: a.update(g=nhwc(a["g"][..., :7])), "g: "),
    "part of a step": (lambda a: a.update(skip=a["g"]), "skip: "),
    "a block that is rebuilt": (lambda a: a.update(kept_blocks=[0]), "kept_blocks: "),
    "an output": (lambda a: a.update(y=a["g"]), "y: "),
    "a negated weight": (lambda a: a.update(negated=a["conv_weights"][:1]), "negated: "),
    "no pixels": (lambda a: a.update(inv_count=0.0), "inv_count: "),
    "few inputs": (lambda a: a["inputs"].pop(), "inputs: "),
    "shape of an input": (lambda a: a["inputs"].reverse(), "inputs: "),
    "few means": (lambda a: (a["means"].pop(), a["variances"].pop()), "means: "),
    "shape of a mean": (lambda a: a["means"].reverse(), "means: "),
}


def test_a_wrong_argument_of_the_backward_is_an_error_that_names_it():
    x = random_input(64)
    run, wanted = recorded_run(stage_of(64), x)
    found = kernels().block_run_forward(run, x, wanted)
    names = ("bn_weights", "bn_biases", "conv_weights", "means", "variances")
    lists = [*zip(*run.parameters, strict=True), *zip(*found.unit_statistics, strict=True)]
    steps = ("step_x", "step_mean", "step_var", "step_weight")
    arguments = {"g": random_input(64), "skip": None, **dict.fromkeys(steps), "step_eps": 0.0}
    arguments |= {"step_sums": None, "step_inv_count": 0.0}
    arguments |= dict(zip(names, map(list, lists), strict=True))
    arguments |= {"eps": run.eps, "units_per_block": 3, "dtype": torch.bfloat16}
    arguments |= {"inputs": list(found.inputs), "kept_blocks": [0, 1], "inv_count": 1 / 128}
    arguments |= {"y": None, "negated": []}
    op = torch.ops.preact_kernels_cuda.resident_run_backward
    assert len(op(*arguments.values())) == 4 + 6 + 12
    assert_wrong_arguments_are_named(op, arguments, WRONG_BACKWARD)


@on_host
def test_a_run_has_one_launch_for_its_units_in_each_direction():
    stage, x = stage_of(64), random_input(64)
    with torch.no_grad():
        names = launches(lambda: stage(x))
    assert collections.Counter(names) == {
        "bn_stats": 1,
        "fill_zeros": 3,  # for bn_stats, sums and the counter of arrivals
        "pack_weights": 1,
        "resident_run_forward": 1,
        "finish_statistics": 1,
        "norm_buffers_update": 5,  # one for each momentum
    }
    y = stage(x.requires_grad_())
    counts = collections.Counter(launches(lambda: y.sum().backward()))
    assert counts["resident_run_backward"] == 1
    assert not {"norm_act_conv_backward", "norm_act_conv_backward_input"} & set(counts)
    assert counts["fill_zeros"] == 2 and counts["pack_weights"] == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("scale", [1e18, 1e19])
@every_width
def test_large_values_give_no_nan(scale, width):
    """The variance of a channel is right, or infinite as in eager where squares are."""
    stage, x = stage_of(width, blocks=1), random_input(width)
    with torch.no_grad():
        weight = stage[0].conv1.weight
        weight[5] *= scale / weight[5].norm()
    run, wanted = recorded_run(stage, x)
    found = forward(run, x, wanted)
    assert all(t.isfinite().all() for name, t in found.items() if name == "y" or "mean" in name)
    var = found["statistics 1, var"][5].double()
    exact = found["input 1"][:, 5].double().var(correction=0)
    assert var.isinf() if scale > 1e18 else (var - exact).abs() < 1e-4 * exact
