"""Calls ops with random arguments, and looks for a crash, a changed input or a useless message.

    python -m tests.ops.random_calls --calls 50000 --seed 0 --namespaces preact_kernels_cpu
    python -m tests.ops.random_calls --seed 0 --namespaces preact_kernels_cpu --only 1234

A call follows from the namespace, the seed and its index alone. Every namespace runs in a process
of its own, which writes to a file what it does: a call that ends the process is known, and the
calls behind it run in a new process.

A call returns what its schema says, or raises an error that names an argument, or PyTorch's
dispatcher refuses it. A call with valid arguments returns. Inputs keep their bits.
"""

import argparse
import collections
import contextlib
import ctypes
import inspect
import json
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import preact_kernels as pk
from preact_kernels.kernels import cpu
from testbed.cuda_on_host import serve_cpu
from tests.ops.random_arguments import Sizes, Subclass, damage, described, tensors_in

FUNCTIONS = (
    pk.bn_relu,
    pk.bn_relu_conv2d,
    pk.batch_norm_act,
    pk.batch_norm_act_conv,
    pk.group_norm_act,
    pk.group_norm_act_conv,
    pk.residual_add,
    pk.backend_for,
)
# Refusals of PyTorch's own: of ops by the dispatcher and its fallbacks, of any call for numbers and
# sizes. Further lines of the messages list kernels and source files.
OF_DISPATCHER = (
    r"[\w:]+\(\) Expected a value of type '.*' for argument '\w+'",
    r"Could not run '[\w:.]+' with arguments from the '\w+' backend",
    r"There were no tensor arguments to this function",
    r" fallback doesn't currently support mutable TensorLists with (negation|conjugate) inputs",
    r"Expected Tensor but got None",  # of the same fallback, for an op without results
)
OF_PYTORCH = (
    r"value cannot be converted to type \w+ without overflow",
    r"(.*DefaultCPUAllocator: can't allocate|out of) memory",
    r"could not create a primitive descriptor",  # of a convolution with an enormous stride
)
# What no message contains: files of the sources and of the build, and internals.
INTERNALS = r"csrc|\w\.(h|cuh|cpp|cu|py|so)\b|aoti_torch|API call failed|'NoneType' object"
READ_NO_VALUES = (
    "conv_route",
    "norm_act_conv_is_served",
    "resident_run_is_served",
    "backend_for",
)
SECONDS = 20  # that a call may take
MOST_BYTES = 4 << 30  # that a process may allocate


class Parameter(NamedTuple):
    name: str
    kind: str  # as schemas print it
    is_mutated: bool


class Op(NamedTuple):
    name: str
    function: Callable
    parameters: list[Parameter]
    returns: list[str] | None  # kinds of results; None: a tensor or a str


class Namespace(NamedTuple):
    library: str  # whose rules a valid call follows: see `Sizes`
    backend: str  # that is selected
    ops: Callable[[], list[Op]]
    # Whether a tensor may have more elements than fit in memory. PyTorch's own operators, behind
    # the registered ops, would read one place for years.
    has_huge: bool = True


def registered(namespace: str) -> list[Op]:
    """Every op of a namespace of `torch.ops`."""
    ops = []
    for schema in torch._C._jit_get_all_schemas():
        prefix, _, name = schema.name.partition("::")
        if prefix == namespace:
            packet = getattr(getattr(torch.ops, namespace), name)
            parameters = [
                Parameter(a.name, str(a.type), bool(a.alias_info and a.alias_info.is_write))
                for a in schema.arguments
            ]
            returns = [str(r.type) for r in schema.returns]
            ops.append(Op(name, packet.default, parameters, returns))
    return sorted(ops)


def native(library: str) -> list[Op]:
    if library == "cpu":
        assert not cpu.load_error()
    else:
        serve_cpu.library()
    return registered(f"preact_kernels_{library}")


def functions() -> list[Op]:
    """The public functions; all parameters by name."""
    ops = []
    kinds = {Tensor: "Tensor", Tensor | None: "Optional[Tensor]"}
    for function in FUNCTIONS:
        parameters = [
            Parameter(p.name, kinds.get(p.annotation, "number"), p.name.startswith("running_"))
            for p in inspect.signature(function).parameters.values()
            if p.name != "process_group"
        ]
        ops.append(Op(function.__name__, function, parameters, None))
    return ops


def of_schema() -> list[Op]:
    return registered("preact_kernels")


NAMESPACES = {
    "preact_kernels_cpu": Namespace("cpu", "auto", lambda: native("cpu")),
    "preact_kernels_cuda": Namespace("cuda", "auto", lambda: native("cuda")),
    "preact_kernels:reference": Namespace("registered", "reference", of_schema, has_huge=False),
    "preact_kernels:cpu": Namespace("registered", "cpu", of_schema, has_huge=False),
    "functions:reference": Namespace("functions", "reference", functions),
    "functions:cpu": Namespace("functions", "cpu", functions),
}


class Call(NamedTuple):
    op: Op
    arguments: dict[str, Any]
    is_native: bool
    is_valid: bool
    seed: int  # of random numbers that it draws

    @property
    def tensors(self) -> list[Tensor]:
        return [t for value in self.arguments.values() for t in tensors_in(value)]

    @property
    def has_meta(self) -> bool:
        return any(t.is_meta for t in self.tensors)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={described(v)}" for name, v in self.arguments.items())
        return f"{self.op.name}({given})"


def draw(name: str, ops: list[Op], seed: int, index: int, damages: int | None = None) -> Call:
    """The call at an index."""
    rng = Random(f"{name} {seed} {index}")
    torch.manual_seed(rng.getrandbits(32))
    op = ops[index % len(ops)]
    sizes = Sizes(rng, NAMESPACES[name].library, op.name)
    arguments = {p.name: sizes.argument(p.name, p.kind) for p in op.parameters}
    count = rng.choice([0, 1, 1, 1, 1, 2, 2, 3]) if damages is None else damages
    library = NAMESPACES[name].library
    damage(rng, arguments, count, NAMESPACES[name].has_huge)
    if library == "functions" and count > 1:
        # With a subclass PyTorch's own operators run, and check the other arguments.
        for parameter, value in arguments.items():
            if isinstance(value, Subclass):
                arguments[parameter] = value.as_subclass(Tensor)
    is_native = library in ("cpu", "cuda")
    return Call(op, arguments, is_native, count == 0, rng.getrandbits(32))


class Bits(NamedTuple):
    """What a tensor is, and its memory."""

    metadata: tuple
    address: int
    memory: bytes

    @classmethod
    def of(cls, t: Tensor) -> "Bits | None":
        """None: the tensor has no storage."""
        if t.layout != torch.strided or t.device.type != "cpu":
            return None
        storage = t.untyped_storage()
        address, count = storage.data_ptr(), storage.nbytes()
        metadata = (t.shape, t.stride(), t.storage_offset(), t.dtype)
        return cls(metadata, address, ctypes.string_at(address, count) if count else b"")


def run(call: Call) -> Any:
    """The results of a call; those of a function with its backward."""
    torch.manual_seed(call.seed)
    if call.op.returns is not None:
        return call.op.function(*call.arguments.values())
    y = call.op.function(**call.arguments)
    if isinstance(y, Tensor) and y.requires_grad:
        given = {
            is_mutated: {
                t.untyped_storage().data_ptr()
                for p in call.op.parameters
                if p.is_mutated == is_mutated
                for t in tensors_in(call.arguments[p.name])
            }
            for is_mutated in (True, False)
        }
        if not given[True] & given[False]:  # else PyTorch refuses: it reads what was written
            y.backward(torch.ones_like(y))
    return y


def fault_of(call: Call) -> tuple[str, str]:
    """Runs a call. Returns "returned" or "refused", and what is wrong, or an empty string."""
    tensors = {p: tensors_in(call.arguments[p.name]) for p in call.op.parameters}
    before = {p: [*map(Bits.of, found)] for p, found in tensors.items()}
    written = {b.address for p in tensors if p.is_mutated for b in before[p] if b and b.memory}
    try:
        results = run(call)
        outcome, fault = "returned", wrong_results(call, results)
    except Exception as error:
        outcome, fault = "refused", wrong_refusal(call, error)
        written = set()
    for p, found in tensors.items():
        for was, now in zip(before[p], map(Bits.of, found), strict=True):
            if was is None or was.address in written:
                continue
            if was != now:
                fault = f"{p.name} was written by a call that {outcome} {fault}".strip()
    if outcome == "returned":
        cut = [p.name for p, found in tensors.items() if any(map(has_short_storage, found))]
        reads_values = call.op.name not in READ_NO_VALUES
        if cut and not call.has_meta and reads_values:
            fault = fault or f"returned, with a storage that is too short for {cut[0]}"
        elif call.is_native and reads_values and not written:
            fault = fault or other_results_of_copies(call, results)
    return outcome, fault


def has_short_storage(t: Tensor) -> bool:
    """Whether elements of a tensor lie beyond its storage."""
    if t.layout != torch.strided or t.device.type != "cpu" or t.numel() == 0:
        return False
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + t.storage_offset()
    return (last + 1) * t.element_size() > t.untyped_storage().nbytes()


def other_results_of_copies(call: Call, results: Any) -> str:
    """What differs where tensors are dense, and share no memory."""
    if any(t.numel() > 2**20 or has_short_storage(t) for t in call.tensors):
        return ""
    arguments = {
        name: [*map(dense_copy, v)] if isinstance(v, list) else dense_copy(v)
        for name, v in call.arguments.items()
    }
    try:
        others = run(call._replace(arguments=arguments))
    except Exception as error:
        return f"returned, but refuses dense copies: {error}"
    found, expected = (
        [Bits.of(t.detach().clone()).memory for t in tensors_in(r)] for r in (results, others)
    )
    return "" if found == expected else "returned other bits than for dense copies"


def dense_copy(value: Any) -> Any:
    """A plain tensor with the values of one; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().as_subclass(Tensor).resolve_neg().resolve_conj().clone()


def wrong_results(call: Call, results: Any) -> str:
    if call.op.returns is None:
        return "" if isinstance(results, Tensor | str) else f"returned {type(results).__name__}"
    kinds = call.op.returns
    given = [] if not kinds else [results] if len(kinds) == 1 else [*results]
    if len(given) != len(kinds):
        return f"returned {len(given)} results"
    for kind, result in zip(kinds, given, strict=True):
        if kind in ("Tensor", "List[Tensor]"):
            if not isinstance(result, Tensor if kind == "Tensor" else list):
                return f"returned {type(result).__name__} for {kind}"
            for t in tensors_in(result):
                if t.layout != torch.strided or t.numel() > 2**30 or t.is_meta > call.has_meta:
                    return f"returned {described(t)}"
                t.detach().clone()  # reads it
    return ""


def wrong_refusal(call: Call, error: Exception) -> str:
    """What is wrong with an error."""
    text = f"{type(error).__name__}: {error}"
    message = str(error)
    if call.is_valid:
        return f"a valid call: {text}"
    refusals = OF_PYTORCH if call.op.returns is None else (*OF_DISPATCHER, *OF_PYTORCH)
    if any(re.match(pattern, message) for pattern in refusals):
        return ""
    if call.has_meta and not call.is_native:  # a fake implementation ran
        return ""
    if not isinstance(error, ValueError | TypeError | RuntimeError) or re.search(
        INTERNALS, message
    ):
        return text
    names = "|".join(p.name for p in call.op.parameters)
    is_named = re.search(rf"(?<!\w)({names})(\[\d+\])?(, \w+)*: |argument '({names})'", message)
    return "" if is_named else text


def results_of_valid_calls(name: str, ops: list[Op]) -> list:
    """Bits of the results of a valid call of every op."""
    found = []
    for index in range(len(ops)):
        call = draw(name, ops, 0, index, damages=0)
        try:
            results = run(call)
        except Exception as error:
            raise RuntimeError(f"a valid call was refused: {call}") from error
        found.append([Bits.of(t.detach().clone()).memory for t in tensors_in(results)])
    return found


@contextlib.contextmanager
def selected(name: str) -> Iterator[list[Op]]:
    """The ops of a namespace, with its backend."""
    namespace = NAMESPACES[name]
    ops = namespace.ops()
    assert ops, f"{name} has no ops"
    with pk.use_backend(namespace.backend):
        yield ops


def run_calls(
    name: str, seed: int, indices: Iterable[int], report: Callable[[int, str, str], None]
) -> None:
    """Runs calls in this process, with valid calls before and after.

    Args:
        name: of the namespace.
        seed: of the calls.
        indices: of the calls.
        report: is called with the index of a call, "started" or its outcome, and its fault.
    """
    with selected(name) as ops, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = results_of_valid_calls(name, ops)
        index = -1
        for index in indices:
            report(index, "started", "")
            report(index, *fault_of(draw(name, ops, seed, index)))
        if results_of_valid_calls(name, ops) != before:
            report(index, "returned", "valid calls give other bits after the random ones")


def run_in_a_process(name: str, seed: int, indices: range) -> Iterator[tuple[int, str, str]]:
    """The reports of calls in a process of their own; more processes if calls end them."""
    while indices:
        with tempfile.TemporaryFile() as file:
            pid = os.fork()
            if not pid:
                _run_in_child(name, seed, indices, file)
            status = os.waitpid(pid, 0)[1]
            file.seek(0)
            last = None
            for line in file:
                last = json.loads(line)
                if last[1] != "started":
                    yield last
        if status == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        if last is None or last[1] != "started":
            raise RuntimeError(f"{name}: the process ended outside of the random calls: {how}")
        yield last[0], "ended", f"ended the process: {how}"
        indices = range(last[0] + 1, indices.stop)


def _run_in_child(name: str, seed: int, indices: range, file) -> None:
    """Does not return."""

    def report(*what) -> None:
        signal.alarm(SECONDS)
        os.write(file.fileno(), json.dumps(what).encode() + b"\n")

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.set_num_threads(1)
        run_calls(name, seed, indices, report)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def summary(name: str, seed: int, calls: int) -> tuple[str, bool]:
    """Runs calls; returns a table of them and of faults, each with its first call, and if any."""
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    faults: dict[tuple[str, str], list[int]] = {}
    with selected(name) as ops:
        for index, outcome, fault in run_in_a_process(name, seed, range(calls)):
            op = ops[index % len(ops)].name
            counts[op].update([outcome, *["faults"] * bool(fault)])
            if fault:
                alike = re.sub(r"\d+", "N", fault.split("\n")[0])
                faults.setdefault((op, alike), [0, index, fault])[0] += 1
        columns = ("returned", "refused", "ended", "faults")
        lines = [f"{name:<28}{'calls':>10}" + "".join(f"{c:>10}" for c in columns)]
        for op, count in sorted(counts.items()):
            calls = sum(count[c] for c in columns[:3])
            lines.append(f"  {op:<26}{calls:>10}" + "".join(f"{count[c]:>10}" for c in columns))
        for (_, _), (count, index, fault) in sorted(faults.items()):
            call = draw(name, ops, seed, index)
            lines.append(f"\n{count} x {fault[:500]}\n  {call}")
            lines.append(f"  --seed {seed} --namespaces {name} --only {index}")
    return "\n".join(lines), bool(faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help="in each namespace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--namespaces", nargs="+", default=[*NAMESPACES], choices=NAMESPACES)
    parser.add_argument("--only", type=int, help="the index of one call to run")
    given = parser.parse_args()
    missing = {"cpu": cpu.load_error(), "cuda": "" if serve_cpu.install() else "not on the host"}
    has_faults = False
    for name in given.namespaces:
        reason = next((why for library, why in missing.items() if why and library in name), "")
        if reason:
            print(f"{name} is left out: {reason}")
            continue
        if given.only is not None:
            with selected(name) as ops:
                print(draw(name, ops, given.seed, given.only))
            for _, *found in run_in_a_process(name, given.seed, range(given.only, given.only + 1)):
                print(*found)
                has_faults |= bool(found[1])
            continue
        text, has_some = summary(name, given.seed, given.calls)
        print(text, flush=True)
        has_faults |= has_some
    sys.exit(has_faults)


if __name__ == "__main__":
    main()
