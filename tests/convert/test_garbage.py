"""Python's garbage collector runs less often in a forward, and as before after it."""

import gc
import threading

import pytest
import torch
from torch import nn

import preact_kernels as pk
from preact_kernels.conversion.garbage import THRESHOLD


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


class Last(nn.Module):
    """Calls a function, and returns its argument."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        self.function()
        return x


def model_of(function, units=1):
    parts = [(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)) for _ in range(units)]
    return pk.convert(nn.Sequential(*[m for unit in parts for m in unit], Last(function)))


x = torch.randn(2, 4, 4, 4)


def test_a_forward_of_many_units_collects_nothing():
    model = model_of(lambda: None, units=100)
    model(x)
    collections = []

    def count(phase, info):
        collections.append(phase)

    gc.callbacks.append(count)
    try:
        seen = []
        model[-1].function = lambda: seen.append(len(collections))
        model(x)
    finally:
        gc.callbacks.remove(count)
    assert seen == [0]


def test_the_threshold_is_raised_in_a_call_and_restored_after_it():
    seen = []
    model_of(lambda: seen.append(gc.get_threshold()))(x)
    assert seen == [(THRESHOLD, 10, 10)]
    assert gc.get_threshold() == (700, 10, 10)


def test_the_threshold_is_restored_after_an_error():
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        model_of(fail)(x)
    assert gc.get_threshold() == (700, 10, 10)


def interrupted(model):
    def interrupt():
        raise KeyboardInterrupt

    model[-1].function = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model[-1].function = lambda: None


@pytest.mark.parametrize("is_on_another_thread", [False, True])
def test_the_threshold_is_restored_by_the_call_after_an_interrupt(is_on_another_thread):
    model = model_of(lambda: None)
    if is_on_another_thread:
        thread = threading.Thread(target=interrupted, args=(model,))
        thread.start()
        thread.join()
    else:
        interrupted(model)
    model_of(lambda: None)(x)
    assert gc.get_threshold() == (700, 10, 10)


def test_revert_in_a_forward_restores_the_threshold():
    model = model_of(lambda: None)
    model[-1].function = lambda: pk.revert(model)
    model(x)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_model_in_a_model_restores_nothing():
    seen = []
    inner = model_of(lambda: None)

    def call():
        inner(x)
        seen.append(gc.get_threshold()[0])

    model_of(call)(x)
    assert seen == [THRESHOLD]
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("changed", [(900, 10, 10), (0, 10, 10)])
def test_a_change_in_the_forward_stays(changed):
    model_of(lambda: gc.set_threshold(*changed))(x)
    assert gc.get_threshold() == changed


@pytest.mark.parametrize("given", [(0, 10, 10), (100_000, 10, 10)])
def test_a_collector_that_is_off_or_runs_rarely_is_left_as_it_is(given):
    gc.set_threshold(*given)
    seen = []
    model_of(lambda: seen.append(gc.get_threshold()))(x)
    assert seen == [given] == [gc.get_threshold()]
