"""Valid calls of ops, by the names of `contract.py`, and the same with one damaged tensor."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

IMAGES = ("x", "branch", "dy", "drawn", "values", "g", "skip", "step_x", "residual", "y", "inputs")
WEIGHTS = ("conv_weight", "conv_weights", "negated")
NUMBERS = {
    "activation": "relu",
    "parameter": 0.0,
    "groups": 1,
    "stride": [1, 1],
    "padding": [1, 1],
    "dilation": [1, 1],
    "kernel": [3, 3],
    "kept_blocks": [0],
    "factor": 2.0,
    "momentum": 0.1,
    "inv_count": 1 / 40,
    "step_inv_count": 1 / 40,
    "eps": 1e-5,
    "step_eps": 1e-5,
}


class Sizes(NamedTuple):
    """Sizes of a call; lists have an entry for each unit of a run."""

    dtype: torch.dtype
    image: tuple[int, int]
    channels: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    units_per_block: int
    counts: dict[str, int]  # lengths of other lists

    def tensor(self, name: str, index: int = 0) -> Tensor:
        """A valid tensor; `index` is its place in a list."""
        channels = self.channels[index]
        if name == "bits":
            return torch.zeros(2 * channels * self.image[0] * self.image[1] // 8, dtype=torch.uint8)
        if name not in IMAGES + WEIGHTS:
            return torch.rand((2, channels) if name.endswith("sums") else channels) + 0.5
        shape = self.weights[index] if name in WEIGHTS else (2, channels, *self.image)
        t = torch.randn(shape, dtype=self.dtype)
        return t if name == "drawn" else t.contiguous(memory_format=torch.channels_last)

    def argument(self, name: str, kind: str) -> Any:
        """A valid argument for a parameter of this schema type."""
        count = self.counts.get(name, len(self.weights))
        if kind == "List[Tensor]":
            return [self.tensor(name, index) for index in range(count)]
        if kind == "List[float]":
            return [1e-5] * count
        if "Tensor" in kind:
            return self.tensor(name)
        return (NUMBERS | self._asdict()).get(name, True)


# Two blocks, of which the second is rebuilt.
SIZES = Sizes(
    dtype=torch.float32,
    image=(4, 5),
    channels=(32, 32, 32, 32),
    weights=((32, 32, 3, 3),) * 4,
    units_per_block=2,
    counts={"inputs": 3, "negated": 1, "running": 2, "batch": 2, "factors": 2},
)
# One bottleneck, which is kept.
RESIDENT_SIZES = Sizes(
    dtype=torch.bfloat16,
    image=(8, 8),
    channels=(256, 64, 64),
    weights=((64, 256, 1, 1), (64, 64, 3, 3), (256, 64, 1, 1)),
    units_per_block=3,
    counts={"negated": 0},
)


class Call(NamedTuple):
    op: str
    function: Callable
    arguments: dict[str, Any]

    def run(self) -> Any:
        return self.function(*self.arguments.values())

    def error(self) -> str:
        """The message of the call's error, or that it returned."""
        try:
            self.run()
        except Exception as error:
            return str(error)
        return "returned"

    def changed(self, **arguments: Any) -> "Call":
        return self._replace(arguments=self.arguments | arguments)


def valid_calls(namespace: str) -> list[Call]:
    """A call of every op of a namespace of `torch.ops`, with all tensors that it can take."""
    calls = []
    for schema in torch._C._jit_get_all_schemas():
        prefix, _, op = schema.name.partition("::")
        if prefix != namespace:
            continue
        sizes = RESIDENT_SIZES if op.startswith("resident_run") else SIZES
        arguments = {a.name: sizes.argument(a.name, str(a.type)) for a in schema.arguments}
        if op == "transpose":
            arguments["x"] = arguments["x"].contiguous().flatten(2)
        elif op == "residual_add_forward":
            arguments["with_stats"] = False  # there are none with a bias
        elif op == "pool_sums":
            arguments["sums"] = torch.rand(2, 2, sizes.channels[0])
        elif op == "norm_buffers_update":
            arguments["count"] = torch.ones(1, dtype=torch.int64)
        elif op == "resident_run_forward":
            arguments |= {name: arguments[name][:1] for name in ("means", "variances")}
        elif op == "resident_run_backward":
            arguments["y"] = None
        elif op == "norm_act_conv_forward" and namespace == "preact_kernels_cuda":
            arguments["conv_bias"] = None
        calls.append(Call(op, getattr(getattr(torch.ops, namespace), op).default, arguments))
    assert calls, f"{namespace} is not loaded"
    return sorted(calls, key=lambda call: call.op)


def spread(t: Tensor) -> Tensor:
    """A copy with a gap after each element."""
    return torch.stack([t, t], -1)[..., 0]


def cut_behind_an_offset(t: Tensor) -> Tensor:
    """The storage has enough bytes for a tensor that begins it."""
    t = t.new_empty(t.numel() + 1).as_strided(t.shape, t.stride(), 1).copy_(t)
    return resized(t, t.nbytes)


def resized(t: Tensor, count: int) -> Tensor:
    t.untyped_storage().resize_(count)
    return t


# Damage, and what the error says.
DAMAGE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "cut": (lambda t: resized(t.clone(), t.nbytes - 1), "a storage of"),
    "cut behind an offset": (cut_behind_an_offset, "a storage of"),
    # Enough bytes for a dense tensor.
    "cut with gaps": (lambda t: resized(spread(t), t.nbytes), "a storage of"),
    "freed": (lambda t: resized(t.clone(), 0), "a storage of"),
    "flat": (torch.flatten, r"(4 dimensions|shape|\[2, C\]|contiguous matrices|the weights of)"),
    "longer": (lambda t: torch.cat([t, t]), ""),
    "of integers": (Tensor.long, ""),
    "another float": (lambda t: t.half() if t.dtype == torch.float32 else t.float(), ""),
}
# PyTorch's dispatcher refuses sparse tensors for the registered ops, and takes meta tensors.
NATIVE_DAMAGE = DAMAGE | {
    "empty": (lambda t: t[:0], ""),
    "spread": (spread, ""),
    "sparse": (Tensor.to_sparse, "a strided tensor"),
    "quantized": (lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8), "dtype"),
    "meta": (lambda t: t.to("meta"), "a CPU tensor"),
}
TAKE_ANY_FLOAT = ("x", "g", "step_x", "residual", "conv_weight", "conv_weights", "running", "batch")

FIRST_VECTORS = ("running", "running_mean")  # others must match


def is_valid(damage: str, op: str, name: str, t: Tensor) -> bool:
    """Whether the op accepts the damaged tensor, or blames another argument."""
    if name == "count":  # one integer
        return damage in ("flat", "of integers", "spread", "cut with gaps")
    if damage == "flat":
        is_vector = t.dim() < 3 and "sums" not in name
        return is_vector or op in ("dropout_", "dropout_bits", "norm_act_conv_is_served")
    if damage == "longer":
        return t.dim() > 2 or name in FIRST_VECTORS
    if damage == "another float":
        return op.startswith("dropout") or name in TAKE_ANY_FLOAT
    if damage == "empty":
        takes_none = ("dropout_", "dropout_bits", "norm_act_conv_is_served", "transpose")
        return op in takes_none or name in FIRST_VECTORS
    return damage == "spread" and name in WEIGHTS


def replaced(tensors: list[Tensor], at: int, t: Tensor) -> list[Tensor]:
    """A copy of a list with another tensor."""
    tensors = tensors.copy()
    tensors[at] = t
    return tensors


def damaged_calls(call: Call, is_native: bool) -> Iterator[tuple[str, Call, str]]:
    """Calls that an op must refuse: what is wrong, the call, and a pattern of the message."""
    for name, value in call.arguments.items():
        is_list = isinstance(value, list)
        # In a list, damage the tensor that is read first, before anything is computed.
        at = -1 if call.op == "block_run_backward" else 0
        first = value[at] if is_list and value else value
        if not isinstance(first, Tensor):
            continue
        if call.op == "resident_run_is_served" and name in WEIGHTS:
            continue  # need not be read
        for damage, (damaged, message) in (NATIVE_DAMAGE if is_native else DAMAGE).items():
            if not is_valid(damage, call.op, name, first):
                t = damaged(first)
                changed = call.changed(**{name: replaced(value, at, t) if is_list else t})
                text = f"{call.op}, {name} {damage}"
                yield text, changed, rf"{name}(\[0\])?: expected {message}"
        if is_list:
            changed = call.changed(**{name: value[1:]})
            yield f"{call.op}, {name} shorter", changed, r"\w+: expected \d+ tensors"
