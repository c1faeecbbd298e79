"""Changes of a converted model take effect."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preact_kernels as pk
from tests.convert import published_models as foreign
from tests.convert.foreign_cases import Block, built, report_of, small

pytestmark = pytest.mark.backends("cpu", slow=("reference", "triton"))


def test_hooks_added_later_run():
    model, x = small()
    plain = copy.deepcopy(model)
    pk.convert(model)
    names = ["layer1", "layer2.1", "layer2.0.bn2", "layer1.0.conv3", "layer2.0.shortcut", "linear"]
    seen = {}
    for m in (model, plain):
        for name in names:
            m.get_submodule(name).register_forward_hook(
                lambda module, args, y, key=(m is model, name): seen.__setitem__(
                    key, y.detach().clone()
                )
            )
    torch.testing.assert_close(model(x), plain(x))
    for name in names:
        torch.testing.assert_close(seen[True, name], seen[False, name])


def test_hooks_on_a_relu_run():
    model, x = built("wide")
    pk.convert(model)
    seen = []
    model.blocks[0][0].relu2.register_forward_hook(lambda *args: seen.append(args))
    model(x)
    assert len(seen) == 1


def test_modules_replaced_later_are_called():
    model, x = small()
    pk.convert(model)
    plain = pk.revert(copy.deepcopy(model))
    for m in (model, plain):
        torch.manual_seed(3)
        m.layer1[1] = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.Tanh())
        m.layer2[1].bn2 = nn.InstanceNorm2d(16)
        m.layer2[2].conv1 = nn.Conv2d(64, 16, 1, bias=True)
        m.linear = nn.Identity()
    torch.testing.assert_close(model(x), plain(x))


def test_attributes_changed_later_count():
    model = foreign.WideResNet(16, 1)
    x = torch.randn(4, 3, 16, 16)
    plain = copy.deepcopy(model)
    pk.convert(model)
    for m in (model, plain):
        for stage in m.blocks:
            for block in stage:
                block.dropout = 0.4
    torch.manual_seed(2)
    expected = plain(x)
    torch.manual_seed(2)
    torch.testing.assert_close(model(x), expected)


class ReadsStrides(nn.Module):
    def forward(self, x):
        return x.view(int(x.shape[0]), -1).mul(2).view(x.shape)


class WithParts(Block):
    """Reads attributes of several kinds."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.act = torch.relu
        self.layers = nn.Sequential(nn.Identity())
        self.parts = nn.ModuleList([nn.Identity()])
        self.pool = nn.MaxPool2d(1)
        self.square = nn.AvgPool2d(1)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mask", None)
        self.factors = {"last": [1.0, (2.0,)]}
        self.first, self.second = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())

    def forward(self, x):
        y = self.layers(self.square(self.act(super().forward(x)))) * self.scale
        for part in self.parts:
            y = part(y)
        for factor in (self.factors["last"][0], self.factors["last"][1][0]):
            y = y * factor
        if self.mask is not None:
            y = y * self.mask
        if self.pool is not None:
            y = self.pool(y)
        y = F.dropout(y, self.drop.p, self.drop.training)
        return self.first(y) if self.training else self.second(y)


CHANGES = {
    "append": lambda m: m.layers.append(nn.Tanh()),
    "append-to-list": lambda m: m.parts.append(nn.Tanh()),
    "class-attribute": lambda m: setattr(m, "scale", 0.5),
    "contents": lambda m: m.factors["last"].__setitem__(0, 3.0),
    "callable": lambda m: setattr(m, "act", torch.tanh),
    "buffer": lambda m: m.register_buffer("mask", torch.full((1,), 0.5)),
    "other-child": lambda m: setattr(m, "square", ReadsStrides()),
    "no-child": lambda m: setattr(m, "pool", None),
    "mode-of-a-child": lambda m: m.eval().drop.train(),
    "hook-in-evaluation": lambda m: m.eval().second.register_forward_hook(lambda *a: a[2] * 0),
    "forward": lambda m: setattr(m, "forward", lambda x: x * 2),
}


@pytest.mark.parametrize("again", [False, True], ids=["", "converted-again"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_later_changes_have_the_effect_of_plain_pytorch(change, again):
    model, x = WithParts(), torch.randn(2, 4, 6, 6)
    plain = copy.deepcopy(model)
    assert report_of(pk.convert(model), x).fused
    for m in (model, plain):
        change(m)
    if again:
        pk.convert(model)
    torch.manual_seed(0)
    expected = plain(x)
    torch.manual_seed(0)
    torch.testing.assert_close(model(x), expected)


def test_compiled_models_notice_changes_of_lists():
    model, x = WithParts().eval(), torch.randn(2, 4, 6, 6)
    plain = copy.deepcopy(model)
    compiled = torch.compile(pk.convert(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), plain(x))
    for m in (model, plain):
        CHANGES["contents"](m)
    torch.testing.assert_close(compiled(x), plain(x))


def test_the_report_is_that_of_the_last_call():
    model, x = pk.convert(Block()), torch.randn(2, 4, 6, 6)

    def reason_after_a_call():
        model(x)
        (site,) = pk.conversion_report(model)
        assert site.fused is not bool(site.reason)
        return site.reason

    assert not reason_after_a_call()
    hook = model.bn.register_forward_hook(lambda *args: None)
    assert pk.conversion_report(model).fused  # not called since
    assert "has hooks" in reason_after_a_call()
    hook.remove()
    assert not reason_after_a_call()
    (site,) = pk.conversion_report(pk.convert(model))
    assert "not called" in site.reason
    assert not reason_after_a_call()
