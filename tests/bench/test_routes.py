"""Times of the routes of a convolution on a CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("tabulate")

from bench import routes
from preact_kernels.kernels import cpu

pytestmark = pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}")

SHAPE = routes.Shape(32, 16, 3, 1, 6)


class Convolutions(TorchDispatchMode):
    """Records whether the inputs of PyTorch's convolutions are in NCHW."""

    def __init__(self):
        super().__init__()
        self.are_nchw = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.are_nchw.append(args[0].is_contiguous())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("route", "expected"), [(routes.DIRECT, []), (routes.NHWC, [False]), (routes.NCHW, [True])]
)
def test_a_route_is_forced(route, expected):
    trial = routes.Trial(SHAPE, 2, torch.float32)
    with routes.forced(route), Convolutions() as convolutions:
        trial.run()
    assert convolutions.are_nchw == expected


def test_prints_every_shape_and_number_of_threads(monkeypatch, capsys):
    monkeypatch.setattr(routes, "SHAPES", (SHAPE, SHAPE._replace(stride=2)))
    before = torch.get_num_threads()
    routes.main(["--batch", "2", "--threads", "1", "2", "--rounds", "1"])
    assert torch.get_num_threads() == before
    lines = capsys.readouterr().out.splitlines()[3:]
    shapes = ["6x6x32 -> 16, 3x3", "6x6x32 -> 16, 3x3, stride 2"]
    assert [line.partition("  ")[0] for line in lines] == [s for s in shapes for _ in range(2)]
    assert all(routes.DIRECT in line for line in lines) and len(lines) == 4
