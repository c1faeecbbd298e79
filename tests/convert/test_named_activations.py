"""Activations that the user names run fused."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from testbed.norm_act_models import SwishFunction
from tests.convert.any_norm import Net

pytestmark = pytest.mark.backends("cpu")


class SubFunction(SwishFunction):
    @staticmethod
    def forward(ctx, x):
        return SwishFunction.forward(ctx, x) * 2


class Swish(nn.Module):
    def forward(self, x):
        return SwishFunction.apply(x)


class Doubled(Swish):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(Net):
    """A network with opaque activations."""

    def __init__(self, first, second):
        super().__init__(
            lambda net, x: net.conv2(second(net.norm2(net.conv(net.act(net.norm(x))))))
        )
        self.act = nn.Sequential(first())


NAMES = [{Swish: "silu"}, {SwishFunction: "silu"}, {SwishFunction: ("elu", 1.0), Swish: "silu"}]


@pytest.mark.parametrize("names", NAMES)
def test_named_activations_run_fused(names):
    x, results = torch.randn(2, 4, 5, 6, dtype=torch.float64), []
    for first, second in ((Swish, Swish()), (Doubled, SwishFunction.apply)):
        torch.manual_seed(1)
        net = Named(first, second).double()
        for m in (net, pk.convert(net, activations=names)):
            net.zero_grad()
            y = m(x)
            y.square().sum().backward()
            results.append([y, *(p.grad for p in net.parameters() if p.grad is not None)])
        if len(names) == 1:
            torch.testing.assert_close(*results[-2:])
        sites = pk.conversion_report(net)
        is_seen = first is Swish or SwishFunction in names
        assert sites[0].fused is is_seen
    assert "forward" not in net.act[0].__dict__ and "apply" not in SwishFunction.__dict__
    assert not pk.conversion_report(pk.revert(net)).fused


def test_subclasses_of_named_functions_have_no_name():
    net, x = Named(Swish, SubFunction.apply), torch.randn(2, 4, 5, 6)
    y = net(x)
    torch.testing.assert_close(pk.convert(net, activations={SwishFunction: "silu"})(x), y)
    assert [s.fused for s in pk.conversion_report(net)] == [True, False]


def test_operators_are_named():
    with torch.library._scoped_library("preact_test", "FRAGMENT") as library:
        library.define("swish(Tensor x) -> Tensor")
        library.impl("swish", lambda x: x * torch.sigmoid(x), "CompositeImplicitAutograd")
        swish = torch.ops.preact_test.swish
        net, x = Named(Swish, swish), torch.randn(2, 4, 5, 6)
        y = net(x)
        for name in (swish, swish.default):
            pk.convert(net, activations={name: "silu"})
            torch.testing.assert_close(net(x), y)
            assert [s.fused for s in pk.conversion_report(net)] == [False, True]


def test_wrong_names_of_activations_are_refused():
    net = Named(Swish, F.silu)
    with pytest.raises(ValueError, match=r"activation: expected one of 'relu', .*got 'swish'"):
        pk.convert(net, activations={Swish: "swish"})
    with pytest.raises(TypeError, match="activations: expected classes of modules"):
        pk.convert(net, activations={F.silu: "silu"})
    assert not pk.conversion_report(net).fused


def test_a_name_that_is_wrong_is_found_on_an_example():
    net = Named(Swish, Swish())
    pk.convert(net, activations={Swish: "gelu"}, example_inputs=torch.randn(2, 4, 5, 6))
    assert not pk.conversion_report(net).fused


def test_named_functions_on_two_threads():
    """`apply` is restored when the last region ends, whichever thread it is on."""
    net = pk.convert(Named(Swish, SwishFunction.apply), activations={SwishFunction: "silu"})
    x, results = torch.randn(2, 4, 5, 6), []
    expected = net(x)

    def run():
        results.extend(net(x) for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60 and all(torch.equal(r, expected) for r in results)
    assert "apply" not in SwishFunction.__dict__
