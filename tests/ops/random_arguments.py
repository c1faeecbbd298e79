"""Valid and damaged arguments of ops and public functions, by the names of `contract.py`."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from preact_kernels.kernels.contract import ACTIVATIONS

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OTHER_DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
HUGE = (2**31, 2**62, 2**63 - 1, -1, -(2**31), -(2**63), 0)
IMAGES = ("x", "branch", "dy", "drawn", "values")  # [N, C, ...]
RESULTS = ("g", "skip", "step_x", "residual")  # [N, K, ...]
RUN = ("bn_weights", "bn_biases", "conv_weights", "means", "variances", "inputs", "negated")
PLANAR = (  # ops of the CPU library that take NCHW memory too
    "bn_stats",
    "group_stats",
    "norm_act_forward",
    "norm_act_backward_sums",
    "norm_act_backward_mask",
    "norm_act_backward_input",
    "norm_input_gradient",
)


class Sizes:
    """Sizes and choices of one valid call.

    Args:
        rng: draws them.
        library: whether the call must be one that a compiled library serves.
        op: the name of the op.
    """

    def __init__(self, rng: Random, library: str, op: str) -> None:
        self.rng, self.library, self.op = rng, library, op
        is_native, is_function = library in ("cpu", "cuda"), library == "functions"
        self.is_resident = op.startswith("resident_run")
        is_run = op.startswith("block_run") or self.is_resident
        multiplies = "conv" in op or is_run
        only_single = library == "cuda" or (is_native and (multiplies or op == "transpose"))
        self.dtype = rng.choice(FLOATS[:3] if only_single else FLOATS)
        self.statistics = torch.float64 if self.dtype == torch.float64 else torch.float32
        channels = (16, 32) if is_native and multiplies else (3, 16, 32)
        self.n, self.c, self.k = rng.randint(1, 3), rng.choice(channels), rng.choice(channels)
        axes = rng.randint(1, 3) if is_function and "norm_act" in op else 2
        self.image = [rng.randint(2, 6) for _ in range(axes)]
        self.kernel = [rng.choice((1, 1, 3, 3) if library == "cuda" else (1, 1, 3, 3, 5))] * axes
        self.padding = [r // 2 for r in self.kernel]
        self.stride = [1] * axes
        if max(self.kernel) > 1 and library != "cuda" and not is_run:
            self.stride = [rng.choice([1, 1, 1, 2]) for _ in range(axes)]
        if is_run or (library == "cuda" and max(self.kernel) > 1):
            self.k = self.c
        self.groups = rng.choice([g for g in (1, 2, 3, 16) if self.c % g == 0])
        conv_groups = [g for g in (1, 1, 2, 3, 16) if self.c % g == self.k % g == 0]
        self.conv_groups = 1 if is_native else rng.choice(conv_groups)
        # A row for each image: functions take them as scale and shift.
        has_rows = not is_function and not (library == "cuda" and multiplies)
        self.rows = [self.n] if has_rows and rng.random() < 0.2 else []
        self.step_rows = [self.n] if has_rows and rng.random() < 0.2 else []
        self.has_step = op == "norm_input_gradient" or rng.random() < 0.5
        self.has_skip = self.has_step and rng.random() < 0.5
        takes_planes = is_function or (library == "cpu" and op in PLANAR)
        self.planar = takes_planes and rng.random() < 0.3
        takes_all = library != "cuda" or not multiplies
        self.activation = rng.choice([*ACTIVATIONS]) if takes_all else "relu"
        self.units_per_block = rng.choice([2, 3]) if is_run else 1
        self.units = self.units_per_block * rng.randint(1, 2)
        blocks = self.units // self.units_per_block
        self.kept = [block for block in range(blocks) if rng.random() < 0.5]
        self.rebuilt = blocks - len(self.kept)
        self.rebuilds_last = blocks - 1 not in self.kept
        if self.is_resident:  # bottlenecks; no more images than multiprocessors
            self.dtype = rng.choice(FLOATS[1:3])
            self.n, self.c, self.k, self.image = rng.randint(1, 2), 256, 256, [8, 8]
            self.units_per_block, self.units = 3, 3
            self.kept = [0] * (op == "resident_run_backward" or rng.random() < 0.5)
            self.rebuilt, self.rebuilds_last = 0, False
        self.training = rng.random() < 0.6
        self.has_running = not self.training or rng.random() < 0.5

    def shape(self, name: str, index: int = 0) -> list[int]:
        """The shape of a tensor argument, of one in a list at an index."""
        n, c, k = self.n, self.c, self.k
        if self.is_resident and name == "conv_weights":
            return [[64, 256, 1, 1], [64, 64, 3, 3], [256, 64, 1, 1]][index]
        if self.is_resident and name == "inputs" and index > 0:
            return [n, 64, *self.image]
        if self.is_resident and name in RUN and index > 0:
            return [64]
        if self.op == "transpose":
            return [n, c, self.image[0]]
        if name in IMAGES:
            return [n, c, *self.image]
        if name in RESULTS or name == "y" or name == "inputs":
            return [n, k, *self.result()]
        if name == "bits":
            return [-(-math.prod(self.shape("values")) // 8)]
        if name in ("conv_weight", "conv_weights", "negated"):
            return [k, c // self.conv_groups, *self.kernel]
        if name == "conv_bias":
            return [k]
        if name in ("scale", "shift"):
            return [n, c]
        if name == "sums":
            return [2, *self.rows, c]
        if name == "step_sums":
            return [2, *self.step_rows, k]
        if name.startswith("step_"):
            return [*self.step_rows, k]
        is_vector = name in RUN or name in ("running", "batch") or name.startswith("running_")
        return [c] if is_vector else [*self.rows, c]

    def result(self) -> list[int]:
        """Height and width of a convolution's result."""
        if self.op == "norm_input_gradient":
            return self.image
        each = zip(self.image, self.kernel, self.padding, self.stride, strict=True)
        return [(size + 2 * p - r) // s + 1 for size, r, p, s in each]

    def tensor(self, name: str, index: int = 0) -> Tensor:
        """A valid tensor, of one in a list at an index."""
        shape = self.shape(name, index)
        if name == "bits":
            return torch.randint(0, 256, shape, dtype=torch.uint8)
        values = torch.rand(shape, dtype=torch.float64) + 0.5
        if len(shape) > 2:
            values = values - 1
        is_activation = len(shape) >= 3 and name != "sums" and name != "step_sums"
        if is_activation or name in ("conv_bias", "scale", "shift"):
            values = values.to(self.dtype)
        else:
            values = values.to(torch.float32 if name in ("running", "batch") else self.statistics)
        is_weight = name in ("conv_weight", "conv_weights", "negated")
        is_contiguous = self.planar or name == "drawn" or (is_weight and self.rng.random() < 0.5)
        if len(shape) == 4 and not is_contiguous:
            values = values.contiguous(memory_format=torch.channels_last)
        return values

    def count(self, name: str) -> int:
        """The length of a list of tensors."""
        if name == "inputs":
            return self.units - self.rebuilt
        if name == "negated":
            return self.rebuilt
        if name in ("means", "variances") and self.op == "block_run_forward":
            return [0, 1, self.units][self.n - 1]
        if name in ("means", "variances") and self.op == "resident_run_forward":
            return self.n - 1
        return 2 if name in ("running", "batch") else self.units

    def optional(self, name: str) -> Tensor | None:
        """A valid tensor, or None where that is valid."""
        if name == "skip":
            return self.tensor(name) if self.has_skip else None
        if name.startswith("step_"):
            return self.tensor(name) if self.has_step else None
        if name == "y":
            return self.tensor(name) if self.rebuilds_last else None
        if name == "conv_bias" and self.library == "cuda":
            return None
        if name.startswith("running_"):
            return self.tensor(name) if self.has_running else None
        return self.tensor(name) if self.rng.random() < 0.7 else None

    def number(self, name: str) -> Any:
        """A valid argument that holds no tensor."""
        rng = self.rng
        samples = self.n * math.prod(self.image)
        parameter = ACTIVATIONS[self.activation]
        if name == "eps" and self.op.startswith(("block_run", "resident_run")):
            return [1e-5] * self.units
        if name == "activation" and self.op.startswith(("batch_norm", "group_norm")):
            return (self.activation, 0.5) if parameter and rng.random() < 0.3 else self.activation
        if name == "num_groups" or (name == "groups" and self.op == "group_stats"):
            return self.groups
        values = {
            "kept_blocks": self.kept,
            "eps": 1e-5,
            "step_eps": 1e-5,
            "activation": self.activation,
            "parameter": parameter,
            "inv_count": 1 / samples,
            "step_inv_count": rng.choice([0.0, 1 / samples]),
            "momentum": 0.1,
            "factor": 2.0,
            "stride": self.stride,
            "padding": self.padding,
            "groups": self.conv_groups,
            "dilation": [1] * len(self.image),
            "units_per_block": self.units_per_block,
            "dtype": self.dtype,
            "training": self.training,
            "dropout": rng.choice([0.0, 0.5]),
            "wants_dy": self.has_step and rng.random() < 0.5,
            "device": "cpu",
        }
        return values[name] if name in values else rng.random() < 0.5

    def argument(self, name: str, kind: str) -> Any:
        """A valid argument of a parameter with a type as schemas write it."""
        if kind == "List[Tensor]":
            return [self.tensor(name, index) for index in range(self.count(name))]
        if kind == "Optional[Tensor]":
            return self.optional(name)
        return self.tensor(name) if kind == "Tensor" else self.number(name)


# Damage to a tensor. Each returns another tensor; one that fails leaves the argument as it is.


class Subclass(Tensor):
    """A subclass that changes nothing."""


def wrong_shape(rng: Random, t: Tensor) -> Tensor:
    shape = [*t.shape]
    axis = rng.randrange(len(shape)) if shape else 0
    kind = rng.randrange(7)
    if kind == 0:
        return t.select(axis, 0)
    if kind == 1:
        return t.unsqueeze(rng.randint(0, len(shape)))
    if kind == 2:
        return t.transpose(axis, rng.randrange(len(shape)))
    if kind == 3:
        return t.reshape(-1)
    shape[axis] = {4: 0, 5: 1, 6: shape[axis] + 1}[kind]
    return like(t, torch.ones(shape, dtype=t.dtype))


def like(t: Tensor, values: Tensor) -> Tensor:
    """`values` in the memory format of `t`."""
    if t.dim() == values.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last):
        return values.contiguous(memory_format=torch.channels_last)
    return values


def other_dtype(rng: Random, t: Tensor) -> Tensor:
    return t.to(rng.choice([d for d in OTHER_DTYPES if d != t.dtype]))


def other_strides(rng: Random, t: Tensor) -> Tensor:
    kind = rng.randrange(6)
    axis = rng.randrange(t.dim())
    if kind == 0:  # expanded
        return t.narrow(axis, 0, 1).expand(t.shape)
    if kind == 1:  # a part of a larger tensor
        return torch.cat([t, t], axis).narrow(axis, rng.randint(0, t.shape[axis]), t.shape[axis])
    if kind == 2:
        return t.contiguous()
    if kind == 3:
        return t.contiguous(memory_format=torch.channels_last)
    if kind == 4:  # elements overlap
        return t.as_strided(t.shape, [min(s, rng.randint(0, 2)) for s in t.stride()])
    last = t.dim() - 1
    return t.transpose(axis, last).contiguous().transpose(axis, last)


def huge(rng: Random, t: Tensor) -> Tensor:
    """More elements than fit in any memory, all in one place."""
    return t.flatten()[:1].as_strided([2 ** rng.choice([45, 62]), *t.shape[1:]], [0] * t.dim())


def at_offset(rng: Random, t: Tensor) -> Tensor:
    """A copy with the strides of `t` that does not begin its storage."""
    offset = rng.randint(1, 4)
    size = t.untyped_storage().nbytes() // t.element_size()
    whole = t.new_empty(size + offset)
    view = whole.as_strided(t.shape, t.stride(), offset)
    return view.copy_(t)


def cut_storage(rng: Random, t: Tensor) -> Tensor:
    """What FSDP and offloading leave behind: a storage that was freed or cut."""
    t = at_offset(rng, t) if rng.random() < 0.3 else t.clone()
    needed = t.untyped_storage().nbytes()
    t.untyped_storage().resize_(rng.choice([0, 0, 1, needed // 2, max(needed - 1, 0)]))
    return t


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    Tensor.to_sparse,
    Tensor.to_sparse_csr,
    Tensor.to_mkldnn,
    lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    lambda t: t.to("meta"),
)
TYPES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.detach().requires_grad_(),
    lambda t: t.as_subclass(Subclass),
    torch.nn.Parameter,
)


def other_layout(rng: Random, t: Tensor) -> Tensor:
    return rng.choice(LAYOUTS)(t)


def other_view(rng: Random, t: Tensor) -> Tensor:
    if rng.random() < 0.5:
        return torch._neg_view(t)
    return torch.complex(t.float(), t.float()).conj()


def other_type(rng: Random, t: Tensor) -> Tensor:
    return rng.choice(TYPES)(t)


def odd_values(rng: Random, t: Tensor) -> Tensor:
    value = rng.choice([math.nan, math.inf, -math.inf, 0.0, 1e30, -1.0])
    t = t.clone()
    if rng.random() < 0.5:
        return t.fill_(value)
    t.view(-1)[rng.randrange(t.numel())] = value
    return t


TENSOR_DAMAGE: tuple[Callable[[Random, Tensor], Tensor], ...] = (
    wrong_shape,
    wrong_shape,
    other_dtype,
    other_strides,
    other_strides,
    huge,
    cut_storage,
    cut_storage,
    other_layout,
    other_view,
    other_type,
    odd_values,
)


def damaged_tensor(rng: Random, t: Tensor, others: Sequence[Tensor]) -> Any:
    """Another tensor, a value of another type, or a tensor that shares memory with others."""
    kind = rng.randrange(len(TENSOR_DAMAGE) + 3)
    if kind < len(TENSOR_DAMAGE):
        return TENSOR_DAMAGE[kind](rng, t)
    if kind == len(TENSOR_DAMAGE) or not others:
        return rng.choice([None, None, 1, 1.0, "x", [], t.tolist()])
    other = rng.choice(others)
    if kind == len(TENSOR_DAMAGE) + 1:
        return other
    return other.as_strided(t.shape, t.stride(), rng.randint(0, 1))  # shares its memory


NUMBERS: dict[type, tuple] = {
    float: (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 1e-320),
    str: ("", "nonesuch", "relu\0", "RELU", "é" * 5000, "elu", "softplus"),
    torch.dtype: OTHER_DTYPES,
}


def damaged_number(rng: Random, value: Any) -> Any:
    """Another value, of the same type or not."""
    if rng.random() < 0.1:
        return rng.choice([None, 1, 1.5, True, "relu", [], [1], torch.ones(1), 2**62])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([*HUGE, value + 1, value - 1])
    if isinstance(value, list | tuple):
        return damaged_list(rng, value, lambda item: damaged_number(rng, item))
    return rng.choice(NUMBERS[type(value)]) if type(value) in NUMBERS else value


def damaged_list(rng: Random, items: Sequence, damaged: Callable[[Any], Any]) -> Any:
    """A list with another length, or with a damaged item."""
    items = list(items)
    kind = rng.randrange(8)
    if kind == 0 or not items:
        return rng.choice([[], None, [None], items * 2])
    at = rng.randrange(len(items))
    if kind == 1:
        return items[:-1]
    if kind == 2:
        return [*items, items[-1]]
    if kind == 3:
        return [*items[:at], None, *items[at + 1 :]]
    return [*items[:at], damaged(items[at]), *items[at + 1 :]]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument."""
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, Tensor)]


def damage(rng: Random, arguments: dict[str, Any], count: int, has_huge: bool) -> None:
    """Damages `count` arguments in place, at most.

    Args:
        rng: draws the damage.
        arguments: valid ones.
        count: how many are damaged.
        has_huge: whether a tensor may have more elements than fit in memory.
    """
    for name in rng.sample([*arguments], min(count, len(arguments))):
        value = arguments[name]
        others = [t for n, v in arguments.items() if n != name for t in tensors_in(v)]

        def damaged(item, others=others):
            # PyTorch cannot make everything of everything: what fails changes nothing.
            try:
                t = damaged_tensor(rng, item, others)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return item
            return item if isinstance(t, Tensor) and t.numel() > 2**31 and not has_huge else t

        if isinstance(value, Tensor):
            arguments[name] = damaged(value)
        elif tensors_in(value):
            arguments[name] = damaged_list(rng, value, damaged)
        else:
            arguments[name] = damaged_number(rng, value)


def described(value: Any) -> str:
    """Text for an argument: the metadata of tensors, and values of anything else."""
    if isinstance(value, Tensor):
        kind = "" if type(value) is Tensor else f"{type(value).__name__} "
        parts = [f"{kind}{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"]
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            parts.append(f"{value.layout}, {value.device.type}")
        else:
            parts.append(f"strides {[*value.stride()]}, offset {value.storage_offset()}")
            parts.append(f"{value.untyped_storage().nbytes()} bytes")
        parts += ["negated"] * value.is_neg() + ["conjugate"] * value.is_conj()
        parts += ["requires_grad"] * value.requires_grad
        return f"<{', '.join(parts)}>"
    if isinstance(value, list) and tensors_in(value):
        return f"[{', '.join(map(described, value))}]"
    return repr(value)[:100]
