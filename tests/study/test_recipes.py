"""Learning rates, parameter groups and defaults of training runs."""

import math

import pytest
import torch

from preact_kernels.study import recipes
from preact_kernels.study.config import Config, parse_bytes
from preact_kernels.study.networks import study_network


def test_the_rates_of_the_paper():
    rates = [recipes.learning_rate("paper", 0.1, s, 78_000, 400) for s in range(78_000)]
    assert rates[:400] == [0.1 / 10] * 400
    changes = [s for s in range(1, 78_000) if rates[s] != rates[s - 1]]
    assert changes == [400, 82 * 390, 123 * 390]
    assert [rates[s] for s in changes] == pytest.approx([0.1, 0.01, 0.001])


def test_warm_up_and_cosine():
    rates = [recipes.learning_rate("warmup-cosine", 0.2, s, 110, 10) for s in range(111)]
    assert rates[:10] == pytest.approx([0.02 * (i + 1) for i in range(10)])
    cosine = [0.1 + 0.1 * math.cos(math.pi * i / 100) for i in range(101)]
    assert rates[10:] == pytest.approx(cosine)


def test_a_short_run_warms_up_for_a_tenth_at_most():
    assert recipes.warm_up_steps("paper", None, 78_000) == 400
    assert recipes.warm_up_steps("paper", None, 100) == 10
    assert recipes.warm_up_steps("paper", 50, 100) == 50
    assert recipes.warm_up_steps("warmup-cosine", None, 100) == 5


def test_learning_rates_rise_with_depth():
    network = study_network(20)
    groups = recipes.parameter_groups(network, 0.25)
    assert [g.name for g in groups] == ["stem", "stage 1", "stage 2", "stage 3", "head"]
    assert [g.factor for g in groups] == pytest.approx([0.25 ** (1 - i / 4) for i in range(5)])
    assert sum(len(g.parameters) for g in groups) == len(list(network.parameters()))
    device = torch.device("cpu")
    sgd = recipes.sgd(groups, momentum=0.9, weight_decay=1e-4, is_captured=False, device=device)
    recipes.set_learning_rate(sgd, groups, 0.1)
    assert [g["lr"] for g in sgd.param_groups] == pytest.approx([0.1 * g.factor for g in groups])


def test_defaults_are_a_recipe_and_bytes_are_read():
    assert (Config().epochs, Config().batch, Config().lr) == (30, 64, 0.1)
    paper = Config(recipe="paper")
    assert (paper.epochs, paper.batch, paper.momentum, paper.weight_decay) == (200, 128, 0.9, 1e-4)
    texts = ("1000", "300MiB", "1.5 GB", "64k")
    assert [parse_bytes(t) for t in texts] == [1000, 300 * 2**20, 1_500_000_000, 64_000]
