"""Times of the routes of a convolution on a CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

from bench import routes
from preact_kernels.kernels import cpu

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

SHAPE = (32, 16, 3, 1, 6)


class Convolutions(TorchDispatchMode):
    """Records whether the inputs of PyTorch's convolutions are in NCHW."""

    def __init__(self):
        super().__init__()
        self.are_nchw = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.are_nchw.append(args[0].is_contiguous())
        return function(*args, **(kwargs or {}))


def test_each_route_is_forced():
    run, _ = routes.trial(SHAPE, 2, torch.float32)
    for route, expected in ((routes.DIRECT, []), (routes.NHWC, [False]), (routes.NCHW, [True])):
        with routes.forced(route), Convolutions() as convolutions:
            run()
        assert convolutions.are_nchw == expected


def test_prints_every_shape(monkeypatch, capsys):
    monkeypatch.setattr(routes, "SHAPES", (SHAPE, (32, 16, 3, 2, 6)))
    routes.main(["--batch", "2", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.split()[:4] for line in lines] == [
        ["6x6x32", "16", "3x3", "1"],
        ["6x6x32", "16", "3x3", "2"],
    ]
    assert all(routes.DIRECT in line for line in lines)
