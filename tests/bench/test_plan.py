"""The tasks of a benchmark run: their order, their contenders, and what they need."""

import types

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

from bench import network
from bench.__main__ import Plan
from bench.__main__ import arguments as parsed
from bench.contenders import BY_NAME, GROUPS
from bench.measure import Ceilings


def plan_of(*options, device):
    """The plan of a run, as if the device were there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
        a = parsed(["--device", device, *options])
    a.usable = [c for c in reversed(BY_NAME.values()) if c.name != "inplace-abn"]
    session = network.Session(
        device=a.device,
        dtype=a.dtype,
        images=types.SimpleNamespace(classes=10),
        machine=None,
        ceilings=Ceilings(1000.0, {"float32": 1e5}),
        rows=[],
        curves=[],
        resume=False,
    )
    return Plan(a, session)


def planned(*options, device):
    return list(plan_of(*options, device=device).tasks())


def test_on_a_gpu_compilers_come_after_the_rest_of_the_first_batch():
    tasks = planned("--depths", "1001", "164", "--batch", "128", "64", device="cuda")
    titles = [task.title for task in tasks]
    first = [
        "resnet-1001, batch 128: uncompiled",
        "resnet-1001, batch 128: compiled",
        "resnet-1001, batch 128: compiled and captured",
        "resnet-1001, batch 64: uncompiled",
        "ops",
        "resnet-1001, batch 128: memory rivals",
        "resnet-1001, batch 64: compiled",
        "resnet-1001, batch 128: compile budgets",
        "resnet-1001, batch 64: compiled and captured",
    ]
    assert titles[: len(first)] == first
    assert tasks[0].needs_s() < 30  # no more than it takes to have a first result
    assert len(titles) == len(set(titles))


def test_on_a_gpu_everything_that_has_a_figure_to_reach_comes_before_the_rest():
    tasks = planned(device="cuda")
    titles = [task.title for task in tasks]
    in_turn = [
        "resnet-1001, batch 128: compiled and captured",
        "resnet-1001, batch 256: uncompiled",
        "imagenet-resnet-50, batch 256: wide networks",
        "wrn-28-10, batch 128: wide networks",
        "ops",
        "resnet-1001, batch 128: memory rivals",
        "resnet-1001, batch 256: compiled",
        "resnet-1001, batch 128: compile budgets",
        "resnet-10001, batch 128: deepest",
        "resnet-1001, batch 256: compiled and captured",
        "resnet-1001, batch 64: uncompiled",
        "resnet-1001, batch 128, float32: uncompiled",
        "resnet-1001, batch 64, float32: compiled and captured",
        "resnet-1001, batch 128: 10 steps of training",
        "resnet-164, batch 128: uncompiled",
        "resnet-164, batch 128: memory rivals",
    ]
    places = [titles.index(title) for title in in_turn]
    assert places == sorted(places)
    assert len(titles) == len(set(titles))
    assert not any("float32" in task.title for task in planned("--dtype", "bf16", device="cuda"))
    wide = tasks[titles.index("imagenet-resnet-50, batch 256: wide networks")]
    assert wide.needs_s() < 60  # not as long as compiling


def test_on_a_cpu_bfloat16_and_wide_networks_come_after_the_first_network():
    titles = [task.title for task in planned(device="cpu")]
    half = titles.index("resnet-164, batch 16, bfloat16: against eager")
    wide = titles.index("preact-resnet-18, batch 16: against eager")
    assert titles.index("resnet-1001, batch 16: main") < half < wide
    assert wide < titles.index("resnet-1001, batch 16: memory rivals")
    assert titles.index("resnet-1001, batch 16: compile budgets") < titles.index("ops")
    assert titles[-1] == "imagenet-resnet-50, batch 4, bfloat16: against eager"
    assert len(titles) == len(set(titles))


def test_on_a_cpu_all_contenders_are_one_group():
    titles = [task.title for task in planned("--depths", "1001", "--batch", "16", device="cpu")]
    assert titles[0] == "resnet-1001, batch 16: main"
    assert not any("compiled" in title for title in titles)
    assert len(titles) == len(set(titles))


def test_some_contenders_of_a_group_are_measured_in_its_order(monkeypatch):
    measured = []
    monkeypatch.setattr(network, "measure_group", lambda session, contenders, *_: measured.append(
        [c.name for c in contenders]
    ))  # fmt: skip
    plan = plan_of("--depths", "1001", "--batch", "128", device="cuda")
    for task in list(plan.tasks())[:2]:
        task.run()
    assert measured == [list(GROUPS[group]) for group in ("uncompiled", "compiled")]


def test_the_other_dtype_has_verdicts_of_its_own():
    plan = plan_of(device="cuda")
    net, session = plan.session.network("resnet-1001"), plan.session
    judged = network.correctness.judged_network(net, session.dtype, session.device)

    def needs_s():
        contender = [BY_NAME["fused-store"]]
        return [p._group_s(contender, net, 128) for p in (plan, plan.in_other_dtype)]

    bfloat16_s, float32_s = needs_s()
    session.verdicts["fused-store", judged, torch.bfloat16] = None
    now_s = needs_s()
    assert now_s[0] < bfloat16_s
    assert now_s[1] == float32_s
