"""Arguments and checks of the kernels' functions other than convolutions.

The budget is that of `tests/oracle.py`. Eager and the float64 truth are the
specifications in `kernels/reference`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels.activations import DEFAULTS, Activation, activation_gradient
from preact_kernels.kernels import reference
from preact_kernels.kernels.contract import AffineStep, Gradient, Norm, Output
from tests.kernels.cuda_conv_cases import EPS, kernels
from tests.oracle import assert_within_budget

KINKS = torch.tensor([-3.0, 0.0, 3.0, 6.0])  # of all activations


def random_images(shape, dtype, offset=0):
    """Random numbers stored NHWC, `offset` elements behind where memory is aligned."""
    n, c, h, w = shape
    memory = torch.randn(n * c * h * w + offset).to(dtype)[offset:]
    return memory.view(n, h, w, c).permute(0, 3, 1, 2)


class Given(NamedTuple):
    """Arguments of every op, each of its own random numbers."""

    x: Tensor
    dy: Tensor
    norm: Norm
    step: AffineStep
    residual: Tensor
    y: Tensor  # a result of ReLU

    @property
    def gradient(self):
        """With the deferred step."""
        return Gradient(self.dy, self.step)

    @property
    def gradient_without_skip(self):
        return Gradient(self.dy, self.step._replace(skip=None))

    def norm_with(self, activation):
        """The norm with an activation that takes a residual."""
        return self.norm._replace(activation=activation, parameter=0.0)

    def to(self, dtype):
        """The same in another dtype."""
        norm, step = (
            type(part)(*(v.to(dtype) if isinstance(v, Tensor) else v for v in part))
            for part in (self.norm, self.step)
        )
        x, dy, residual, y = (t.to(dtype) for t in (*self[:2], *self[4:]))
        return Given(x, dy, norm, step._replace(norm=norm), residual, y)

    def image(self, index):
        """The arguments of one image of a norm with rows."""

        def part(t):
            if t.dim() == 4:
                return t[index : index + 1]
            return t[index : index + 1] if t.dim() == 2 else t

        norm = Norm(*(part(v) if isinstance(v, Tensor) else v for v in self.norm))
        skip, x, _, sums, inv_count = self.step
        sums = sums[:, index : index + 1].contiguous()
        step = AffineStep(part(skip), part(x), norm, sums, inv_count)
        return Given(*map(part, self[:2]), norm, step, *map(part, self[4:]))


def arguments(shape, dtype, inv_count=None, offset=0, rows="", activation="relu"):
    """Random arguments; the tables that `rows` names have a row for each image."""
    n, channels, h, w = shape
    count = h * w if rows else n * h * w
    x, dy, skip = (random_images(shape, dtype, offset) for _ in range(3))
    mean, var, weight, bias = (
        torch.randn(n, channels) if name in rows.split() else torch.randn(channels)
        for name in ("mean", "var", "weight", "bias")
    )
    function = DEFAULTS[activation]
    norm = Norm(mean / 3, var.abs() + 0.5, weight, bias / 2, EPS, *function)
    sums = torch.randn(2, *[n] * bool(rows), channels) * count**0.5
    inv_count = 1 / count if inv_count is None else inv_count
    step = AffineStep(skip, x, norm, sums, inv_count)
    residual, y = (random_images(shape, dtype, offset) for _ in range(2))
    return Given(x, dy, norm, step, residual, y.relu_())


OPS = {
    "bn_stats": lambda k, given: k.bn_stats(given.x),
    "norm_act_forward": lambda k, given: k.norm_act_forward(given.x, given.norm),
    "norm_act_forward with residual": lambda k, given: k.norm_act_forward(
        given.x, given.norm_with("relu"), given.residual
    ),
    "norm_act_forward with residual, identity": lambda k, given: k.norm_act_forward(
        given.x, given.norm_with("identity"), given.residual
    ),
    "norm_act_backward": lambda k, given: k.norm_act_backward(given.dy, given.x, given.norm, True),
    "norm_act_backward without g": lambda k, given: k.norm_act_backward(
        given.dy, given.x, given.norm, False
    ),
    "norm_act_backward from y": lambda k, given: k.norm_act_backward(
        given.dy, given.x, given.norm_with("relu"), True, given.y
    ),
    "norm_act_backward from y without g": lambda k, given: k.norm_act_backward(
        given.dy, given.x, given.norm_with("relu"), False, given.y
    ),
    "norm_act_recompute": lambda k, given: k.norm_act_recompute(given.dy, given.x, given.norm),
    "norm_input_gradient": lambda k, given: k.norm_input_gradient(given.gradient),
    "norm_input_gradient without skip": lambda k, given: k.norm_input_gradient(
        given.gradient_without_skip
    ),
    "norm_input_gradient activated": lambda k, given: k.norm_input_gradient(
        given.gradient_without_skip, activated=True
    ),
    "norm_input_gradient activated, with skip": lambda k, given: k.norm_input_gradient(
        given.gradient, activated=True
    ),
    "residual_add_forward": lambda k, given: k.residual_add_forward(given.x, given.dy, True),
    "residual_add_forward without statistics": lambda k, given: k.residual_add_forward(
        given.x, given.dy, False
    ),
    "residual_add_forward with bias": lambda k, given: k.residual_add_forward(
        given.x, given.dy, False, given.y[0, :, 0, 0].clone()
    ),
}
NORM_OPS = [op for op in OPS if op.startswith("norm")]


def run(kernels, op, given):
    """The results of `op` by its name and a number, without those that are None."""
    found = OPS[op](kernels, given)
    if isinstance(found, Output):
        found = (found.y, *(found.statistics or ()))
    found = found if isinstance(found, tuple) else (found,)
    return {f"{op} {i}": t for i, t in enumerate(found) if t is not None}


def true_g(given):
    """`dy * act'(p)` in float64, on the side of each kink that p takes in the dtype of x."""
    wide = given.to(torch.float64)
    p = reference.norm_act._pre_activation(wide.x, wide.norm)
    rounded = reference.norm_act._pre_activation(given.x, given.norm).double()

    def side(t):
        t, kinks = t.contiguous(), KINKS.to(t)
        return torch.bucketize(t, kinks) + torch.bucketize(t, kinks, right=True)

    p = torch.where(side(p) == side(rounded), p, rounded)
    return activation_gradient(wide.dy, p, Activation(*given.norm[5:]))


def check_ops(given, ops=tuple(OPS), backend=None):
    """As `tests.oracle.check`, of every op and its specification; returns the results.

    `backend` has the kernels under test, by default those of the CUDA library.
    """
    found, truth, errors = {}, {}, {}
    wide, g = given.to(torch.float64), true_g(given)
    xhat = reference.norm_act._normalised(wide.x, wide.norm)
    axes = (2, 3) if given.norm.has_rows else (0, 2, 3)
    sums = torch.stack([g.sum(axes), (g * xhat).sum(axes)])
    gradient = wide._replace(dy=g)
    of_g = {
        "norm_act_backward 0": g,
        "norm_act_backward 1": sums,
        "norm_act_backward without g 1": sums,
        "norm_act_recompute 1": sums,
        "norm_input_gradient activated 0": reference.norm_input_gradient(
            gradient.gradient_without_skip
        ),
        "norm_input_gradient activated, with skip 0": reference.norm_input_gradient(
            gradient.gradient
        ),
    }
    for op in ops:
        found |= run(backend or kernels(), op, given)
        expected, eager = run(reference.kernels(), op, wide), run(reference.kernels(), op, given)
        for name in expected:
            truth[name] = of_g.get(name, expected[name])
            errors[name] = float((eager[name].double() - truth[name].double()).norm())
    assert_within_budget(found, truth, errors)
    return found
