"""Plans predict to the byte, and choose the cheapest combination that fits."""

import copy
import dataclasses
import functools
import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from preact_kernels import planning
from preact_kernels.ops.memory_mode import MEMORY_MODES
from testbed.published_models import FunctionalBottleneck, FunctionalNet
from tests.cases import in_dtype, random_block, random_stage
from tests.oracle import same_bits

PLENTY = 10**15
FLOAT = torch.float32


def images(channels=3):
    return torch.randn(2, channels, 8, 8)


def in_bfloat16(model):
    model.fc.bfloat16()
    return in_dtype(model, torch.bfloat16)


def frozen(model, *names):
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def frozen_blocks(model):
    return frozen(model, "stem", "stages.0", *(f"stages.1.{i}" for i in range(3)))


def frozen_units():
    """Frozen up to the last unit of a block."""
    model = frozen(pk.preact_resnet(29), "stem", "stages.0", "stages.1")
    model.stages[1][1].conv3.requires_grad_(True)
    return model


def without_affine_parameters():
    model = pk.preact_resnet(29)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.weight = m.bias = None
    return model


def block_used_twice():
    block = random_block("basic", 10, 10)
    return pk.PreActStage([block, block, random_block("basic", 10, 10)]).bfloat16()


def hooked():
    model = pk.preact_resnet(29)
    for block in (model.stages[1][1], *model.stages[2]):
        block.register_forward_hook(lambda module, args, y: None)
    return model


def converted():
    return pk.convert(FunctionalNet(FunctionalBottleneck, (3, 3), 8))


class WithoutGradients(nn.Module):
    """A stage under `torch.no_grad`, on an input with a gradient."""

    def __init__(self):
        super().__init__()
        self.conv, self.stage = nn.Conv2d(10, 10, 1), random_stage()

    def forward(self, x):
        x = self.conv(x).contiguous(memory_format=torch.channels_last)  # not copied by the stage
        with torch.no_grad():
            y = self.stage(x)
        return y.mean() + x.square().mean()


class Autocast(nn.Sequential):
    """A model under autocast."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Headed(nn.Module):
    """A network, and a trained convolution that reads the input of its second stage."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Conv2d(64, 4, 1)

    def forward(self, x):
        x = x.contiguous(memory_format=torch.channels_last)  # which stages save as it is
        h = self.model.stages[0](self.model.stem(x))
        y = self.model.norm(self.model.stages[2](self.model.stages[1](h)))
        return self.head(h).mean() + y.mean()


NETWORKS = {
    "bottleneck": lambda: pk.preact_resnet(29),
    "imagenet": lambda: pk.preact_resnet(18, variant="imagenet"),
    "evaluation": lambda: pk.preact_resnet(29).eval(),
    "wide_stream": lambda: in_bfloat16(pk.preact_resnet(47, residual_dtype=FLOAT)),
    "bfloat16": lambda: in_bfloat16(pk.preact_resnet(47)),
    "frozen": lambda: pk.preact_resnet(29).requires_grad_(False),
    "frozen_stem": lambda: frozen(pk.preact_resnet(29), "stem"),
    "stage": random_stage,
    "before_a_batch_norm": lambda: nn.Sequential(random_stage(), nn.BatchNorm2d(24)),
    "before_a_convolution": lambda: nn.Sequential(random_stage(), nn.Conv2d(24, 4, 1)),
    "frozen_blocks_beside_a_head": lambda: Headed(frozen_blocks(pk.preact_resnet(47))),
    "frozen_stage_beside_a_head": lambda: Headed(frozen(pk.preact_resnet(29), "stem", "stages.0")),
    "frozen_units": frozen_units,
    "without_affine_parameters": without_affine_parameters,
    "half_precision_norms": lambda: pk.preact_resnet(47).bfloat16(),
    "half_precision_norms_and_frozen_blocks": lambda: frozen_blocks(
        pk.preact_resnet(47, residual_dtype=FLOAT).bfloat16()
    ).eval(),
    "without_gradients": WithoutGradients,
    "a_block_used_twice": block_used_twice,
    "hooked": hooked,
    "autocast_with_a_wide_stream": lambda: Autocast(pk.preact_resnet(29, residual_dtype=FLOAT)),
    "converted": converted,
    "converted_half_precision": lambda: converted().bfloat16(),
    "converted_under_autocast": lambda: Autocast(converted()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_on_the_meta_device_gives_the_same_plan(dtype):
    model, x = random_stage(width=16), images(10).to(dtype)  # float32 weights
    found = [pk.plan_memory(model, t, PLENTY) for t in (x, x.to("meta"))]
    assert found[0] == found[1]
    assert found[0].predicted_bytes == pk.saved_bytes(found[0].apply(model), x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", MEMORY_MODES)
@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_predicted_bytes_are_what_a_forward_keeps(build, memory):
    model = build()
    weight = next(p for p in model.parameters() if p.dim() == 4)
    x = images(weight.shape[1]).to(weight.dtype)
    plan = pk.plan_memory(model, x, PLENTY)
    stages = []
    for stage in plan.stages:
        option = next(o for o in stage.options if o.memory == memory)
        stages.append(dataclasses.replace(stage, chosen=option))
    dataclasses.replace(plan, stages=tuple(stages)).apply(model)
    predicted = plan.other_bytes + sum(s.chosen.saved_bytes for s in stages)
    assert predicted == pk.saved_bytes(model, x)


def test_bytes_under_autocast():
    model, x = pk.preact_resnet(20), images()
    with torch.autocast("cpu", torch.bfloat16):
        for budget in (PLENTY, smallest(model, x)):
            plan = pk.plan_memory(model, x, budget)
            assert plan.predicted_bytes == pk.saved_bytes(plan.apply(model), x)


def smallest(model, x):
    with pytest.raises(ValueError, match=r"^budget: expected at least \d+ bytes, got 0$") as error:
        pk.plan_memory(model, x, 0)
    return int(re.search(r"least (\d+)", str(error.value))[1])


def test_every_budget_gets_the_cheapest_combination_that_fits(monkeypatch):
    monkeypatch.setattr(planning, "_options", functools.cache(planning._options))
    model, x = pk.preact_resnet(38), images()
    most = pk.plan_memory(model, x, PLENTY)
    sums = [
        (most.other_bytes + sum(o.saved_bytes for o in some), sum(o.extra_bytes for o in some))
        for some in itertools.product(*(s.options for s in most.stages))
    ]
    budgets = sorted({kept for kept, _ in sums})
    for budget in budgets:
        plan = pk.plan_memory(model, x, budget)
        assert plan.predicted_bytes <= budget
        assert plan.extra_bytes == min(extra for kept, extra in sums if kept <= budget)
    assert most.extra_bytes == 0
    assert [s.chosen.memory for s in most.stages] == ["store"] * 3
    assert smallest(model, x) == budgets[0]
    with pytest.raises(ValueError, match="budget: expected at least"):
        pk.plan_memory(model, x, budgets[0] - 1)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_an_applied_plan_keeps_its_budget(share):
    model, x = pk.preact_resnet(47), images()
    for stage in model.stages:
        stage.memory, stage.segments, stage.anchor_every = "checkpoint", 2, 1
    budget = int(share * pk.saved_bytes(pk.preact_resnet(47), x))
    plan = pk.plan_memory(model, x, budget)
    assert plan.apply(model) is model
    assert pk.saved_bytes(model, x) == plan.predicted_bytes <= budget
    found = [(s.memory, s.segments, s.anchor_every) for s in model.stages]
    assert found == [(s.chosen.memory, None, None) for s in plan.stages]


@pytest.mark.parametrize("times", [0, 2])
def test_a_stage_that_does_not_run_once_is_refused(times):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stage, self.other = bare_stage(), bare_stage()

        def forward(self, x):
            x = self.other(x)
            for _ in range(times):
                x = self.stage(x)
            return x

    with pytest.raises(ValueError, match="expected each PreActStage to run once, 'stage'"):
        pk.plan_memory(Model(), images(32), PLENTY)


def bare_stage():
    return pk.PreActStage([pk.PreActBottleneck(32, 8) for _ in range(3)])


def test_planning_changes_nothing():
    model, x = pk.preact_resnet(29, memory="checkpoint", segments=2), images()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.random.get_rng_state()
    pk.plan_memory(model, x, PLENTY)
    assert all(same_bits(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [(s.memory, s.segments) for s in model.stages] == [("checkpoint", 2)] * 3
    assert all("forward" not in vars(s) for s in model.stages)


def test_a_plan_prints_a_table_of_stages_and_modes():
    plan = pk.plan_memory(pk.preact_resnet(29), images(), PLENTY)
    lines = str(plan).splitlines()
    assert lines[0].split() == ["stage", "blocks", *MEMORY_MODES, "MiB"]
    assert [line.split()[:2] for line in lines[1:4]] == [[f"stages.{i}", "3"] for i in range(3)]
    assert all(line.count("*") == 1 for line in lines[1:4])
    assert lines[4].startswith("outside stages")


WRONG = (
    ((abs, torch.ones(1), 1), TypeError, "model: expected an nn.Module, got builtin"),
    ((nn.ReLU(), [1.0], 1), TypeError, "x: expected a torch.Tensor, got list"),
    ((nn.ReLU(), torch.ones(1), 1.0), TypeError, "budget: expected an int .*, got float"),
    ((nn.ReLU(), torch.ones(1), True), TypeError, "budget: expected an int .*, got bool"),
    ((nn.ReLU(), torch.ones(1), -1), ValueError, "budget: expected at least 0 bytes"),
    ((nn.ReLU(), torch.ones(1), 1), ValueError, "model: expected at least one PreActSta"),
)


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        pk.plan_memory(*arguments)


def post_activation():
    def block():
        return nn.Sequential(
            *(nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.MaxPool2d(3, 1, 1), nn.Conv2d(32, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()),
        )

    return nn.Sequential(nn.Conv2d(3, 8, 1), *(block() for _ in range(4)), nn.Conv2d(8, 8, 1))


def test_a_converted_network_without_stages_is_planned():
    model, x = pk.convert(post_activation()), images()
    kept = {m: pk.saved_bytes(pk.convert(model, memory=m), x) for m in MEMORY_MODES}
    assert kept["checkpoint"] < kept["rebuild"] < 0.5 * kept["store"]
    pk.convert(model, memory="rebuild")
    found = []
    for memory in MEMORY_MODES:
        plan = pk.plan_memory(model, x, kept[memory])
        assert (plan.chosen.memory if plan.chosen else "store") == memory
        plan.apply(model)
        assert pk.saved_bytes(model, x) == plan.predicted_bytes == kept[memory]
        found.append(plan.extra_bytes)
    assert 0 == found[0] < found[1] < found[2]
    assert "\nwhole network" in str(plan)
    with pytest.raises(ValueError, match=rf"at least {kept['checkpoint']} bytes"):
        pk.plan_memory(model, x, kept["checkpoint"] - 1)


class PostActBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = post_activation()[1]
        self.bn = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return F.relu(self.bn(self.conv(self.part(x))) + x)


def test_budgets_between_the_modes_choose_modules():
    torch.manual_seed(0)
    stem, blocks = nn.Conv2d(3, 8, 1), [PostActBlock() for _ in range(5)]
    plain, x = nn.Sequential(stem, *blocks, nn.Conv2d(8, 8, 1)).double(), images().double()
    model = pk.convert(copy.deepcopy(plain))
    kept = {m: pk.saved_bytes(pk.convert(copy.deepcopy(plain), memory=m), x) for m in MEMORY_MODES}
    expected = gradients_of(plain, x)
    seen, costs = set(), []
    for share in range(10, -1, -1):
        upper, lower = kept["store"], kept["checkpoint"]
        plan = pk.plan_memory(model, x, lower + share * (upper - lower) // 10)
        assert plan.apply(model) is model
        assert pk.saved_bytes(model, x) == plan.predicted_bytes <= plan.budget
        assert pk.plan_memory(model, x, plan.budget) == plan  # modes do not change a plan
        costs.append(plan.extra_bytes)
        modes = tuple(mode for _, mode in plan.modules)
        seen.add(modes)
        for found, wanted in zip(gradients_of(model, x), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
        if len(set(modes)) > 1:
            count = modes.count(plan.chosen.memory)
            assert f"first {count} of {len(modes)} modules" in str(plan)
    assert costs == sorted(costs) and len(seen) > 6
    with pytest.raises(ValueError, match="model: expected"):
        plan.apply(pk.convert(post_activation()))


def gradients_of(model, x):
    model = copy.deepcopy(model)
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def test_a_plan_for_another_model_is_refused_before_any_change():
    plan = pk.plan_memory(pk.preact_resnet(29), images(), PLENTY)
    other = pk.preact_resnet(47, memory="rebuild")
    with pytest.raises(ValueError, match=r"model: expected the stages 'stages.0' of 3 blocks"):
        plan.apply(other)
    assert all(stage.memory == "rebuild" for stage in other.stages)


def test_a_budget_below_both_whole_modes_gets_a_mixture(monkeypatch):
    saved = [0, 950, 900, 850, 800, 750, 500, 300, 400, 500, 600]  # by step

    def run(network, step):
        option = planning.StageOption("checkpoint", saved[step], step)
        modes = dict.fromkeys(network._names, "checkpoint")
        return planning._NetworkChoice(option, modes, ())

    monkeypatch.setattr(planning._Network, "_run", run)
    model, x = pk.convert(post_activation()), images()
    assert pk.plan_memory(model, x, 310).predicted_bytes == 300
    with pytest.raises(ValueError, match="at least 300 bytes"):
        pk.plan_memory(model, x, 299)
