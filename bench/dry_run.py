"""Records the launches of a training step without a GPU: stages run, but their kernels do not.

The backends' own code launches kernels on CPU tensors; no kernel reads or writes them. The CUDA
library is compiled for the host by testbed/cuda_on_host. Stem, head, optimizer and the update
of running statistics (a few launches per step) do not run. PyTorch's operators between two calls of
a backend run, but are not recorded: around a projection, the addition of two
gradients.
"""

import bisect
import contextlib
import itertools
import math
import runpy
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import floors, measure
from bench.contenders import Network
from bench.instructions import Count, counts, issue_us
from preact_kernels.kernels.contract import Kernels
from preact_kernels.ops import dispatch

FORWARD, BACKWARD = "forward", "backward"
BACKENDS = ("cuda", "triton")
# The GPU for which Triton's block shapes are chosen.
CAPABILITY, SHARED_BYTES = 90, 227 * 1024


class Launch(NamedTuple):
    """A launch, a fill, or an operator of PyTorch (`aten::...`); only a launch has a grid."""

    name: str
    grid: str  # blocks along each axis: "264" or "132x2"; empty: not a launch
    threads: int  # per block
    shared_bytes: int  # per block; 0: only the compiler knows
    is_dependent: bool  # may begin before the previous launch has ended
    bytes_moved: int  # size of the tensors in its arguments, each counted once
    part: int = 0  # index of the part of the stage
    direction: str = ""
    kernel: str = ""  # the name with a prefix, F1 for the first unit of a block in the forward
    code: str = ""  # identifies the compiled kernel
    tiles: int = 0  # that the blocks of each column share; 0: the kernel has no tiles
    issue_us: float | None = None  # to issue its instructions; None: not known


class Part(NamedTuple):
    """Blocks of a stage; their launches are counted together."""

    name: str
    blocks: int
    unit_bytes: int  # bytes of the inner channels of all pixels
    floor_bytes: float  # for a block, forward and backward: bench/floors.py


class StageLaunches(NamedTuple):
    """The launches of a stage, in order."""

    parts: list[Part]
    launches: list[Launch]


class _Recorded(NamedTuple):
    """A launch when it is recorded, before the sizes of its tensors are known."""

    launch: Launch
    tensors: dict[int, int | None]  # bytes by address; None: not yet known
    call: int  # number of the call of the backend
    is_of_run: bool  # the call runs blocks, not one unit


def bias_addition(y: Tensor) -> Launch:
    """The launch of PyTorch that adds the bias of a convolution of cuDNN in place."""
    return Launch("aten::add_", "", 0, 0, False, 2 * y.numel() * y.element_size())


class Recorder(TorchDispatchMode):
    """Records launches, and the operators of PyTorch that a backend calls.

    Convolutions are not run: their results have no values.

    Args:
        records_all: also record operators between the calls of a backend.
    """

    def __init__(self, records_all: bool = False) -> None:
        super().__init__()
        self._records_all = records_all
        self.recorded: list[_Recorded] = []
        self.calls = 0
        self.counts: dict[str, Count | None] = {}  # instructions by `Launch.code`
        self._running: str | None = None  # name of the backend's running function
        # So that no address is used twice: units are found by the addresses of tensors.
        self._kept: list[Any] = []

    def add(self, launch: Launch, tensors: dict[int, int | None]) -> None:
        """Records a launch."""
        is_of_run = (self._running or "").startswith("block_run")
        self.recorded.append(_Recorded(launch, tensors, self.calls, is_of_run))

    def update_running_stats(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        """`running_stats_update` as on a GPU, if all operators are recorded."""
        if self._records_all:
            torch._foreach_mul_(running, 1 - momentum)
            torch._foreach_add_(running, batch, alpha=momentum)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """The body runs the backend's function `name`."""
        self.calls += 1
        self._running = name
        try:
            yield
        finally:
            self._running = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        is_allocation = name.startswith(("aten::empty", "aten::new_empty"))
        is_recorded = bool(self._running) or self._records_all
        if function.namespace != "aten" or function.is_view or is_allocation or not is_recorded:
            return function(*args, **kwargs or {})
        if name == "aten::convolution":
            on_meta = [torch.empty_like(t, device="meta") for t in args[:2]]
            shape = torch.ops.aten.convolution(*on_meta, None, *args[3:]).shape
            result = torch.empty(shape, dtype=args[0].dtype, memory_format=torch.channels_last)
        elif name == "aten::convolution_backward":
            _, x, weight, *_, (wants_x, wants_weight, _) = args
            like = x if wants_x else None, weight if wants_weight else None, None
            result = [t if t is None else torch.empty_like(t) for t in like]
        else:
            result = function(*args, **kwargs or {})
        if not isinstance(result, Tensor | tuple | list | None):  # no launch
            return result
        reads = not (name.startswith("aten::new_") or name.endswith("_like"))  # its arguments
        given = (args, kwargs) if reads else ()
        self.add(Launch(name, "", 0, 0, False, 0), sizes((given, result)))
        if not self._records_all:
            self._kept.append((args, kwargs, result))
        if name == "aten::convolution" and args[2] is not None and self._records_all:
            self.add(bias_addition(result), {})
        return result


class _Calls:
    """A backend that tells the recorder of every call."""

    norm_buffers_update = Kernels.norm_buffers_update  # by the functions below

    def __init__(self, kernels: Any, recorder: Recorder) -> None:
        self._kernels, self._recorder = kernels, recorder

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        if name == "running_stats_update":  # calls PyTorch's operators, other ones on a CPU
            return self._recorder.update_running_stats
        if name == "refusal" or not callable(function):
            return function

        def call(*args, **kwargs):
            with self._recorder.call(name):
                return function(*args, **kwargs)

        return call


def sizes(arguments: Any) -> dict[int, int | None]:
    """Returns the bytes of the tensors in nested arguments, by address."""
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.numel()]
    return {t.data_ptr(): t.numel() * t.element_size() for t in tensors}


def _grid(blocks: Sequence[int]) -> str:
    """Formats the grid of a launch."""
    axes = list(blocks)
    while len(axes) > 1 and axes[-1] == 1:
        axes.pop()
    return "x".join(map(str, axes)) if blocks[0] else ""


def is_stale(library: Path, root: Path = measure.ROOT) -> bool:
    """Returns whether the CUDA library was built from other sources than those below `root`."""
    build = runpy.run_path(str(measure.ROOT / "setup.py"))
    sources, headers = build["find_cuda_files"](root)
    return build["digest"](sources + headers, root).encode() not in library.read_bytes()


@contextlib.contextmanager
def cuda_launches(
    recorder: Recorder, multiprocessors: int, with_instructions: bool
) -> Iterator[Any]:
    """Yields the CUDA backend; its launches are recorded and do not run.

    All pointers in the parameters of a launch are tensors: launchers set or clear all of them.
    Counts instructions in `_cuda.so`, if it is there; it must be built from these sources.
    """
    from preact_kernels.kernels.cuda import LIBRARY, CUDAKernels
    from preact_kernels.kernels.libraries import PACKAGE
    from testbed.cuda_on_host import build, serve_cpu

    if shutil.which(build.CXX[0]) is None:
        raise RuntimeError(
            f"the CUDA library is compiled for the host, and there is no {build.CXX[0]}"
        )

    def listen(met: serve_cpu.Launch) -> None:
        words = struct.unpack(f"{len(met.params) // 8}Q", met.params[: len(met.params) // 8 * 8])
        addresses = [w for w in words if serve_cpu.tensor_at(w)]
        grid = _grid(met.thread_blocks)
        launch = Launch(
            met.name,
            grid,
            met.threads,
            met.shared_bytes,
            met.is_dependent,
            met.filled_bytes,
            code=serve_cpu.symbol_of(met.kernel) if with_instructions and met.kernel else "",
            tiles=met.tiles,
        )
        recorder.add(launch, dict.fromkeys(addresses))

    kernels = CUDAKernels(torch.ops.preact_kernels_cuda)
    serve_cpu.set_schedule(multiprocessors=multiprocessors)
    try:
        with serve_cpu.without_running(listen):
            yield kernels
            _find_sizes(recorder.recorded, serve_cpu.tensor_at)
            if with_instructions:
                library = PACKAGE / LIBRARY
                if library.exists() and is_stale(library):
                    warnings.warn(f"{LIBRARY} was built from other sources", stacklevel=2)
                symbols = {r.launch.code for r in recorder.recorded if r.launch.code}
                recorder.counts.update(counts(library, symbols, CAPABILITY))
    finally:
        serve_cpu.set_schedule()


def _find_sizes(recorded: list[_Recorded], tensor_at: Callable[[int], range | None]) -> None:
    """Fills in the bytes of tensors.

    If launches get parts of a tensor, a part ends where the next one begins.
    """
    begins = sorted({address for r in recorded for address in r.tensors})
    for r in recorded:
        for address, known in r.tensors.items():
            tensor = tensor_at(address)
            if known is None and tensor is not None:
                index = bisect.bisect_right(begins, address)
                end = min([tensor.stop, *begins[index : index + 1]])
                r.tensors[address] = end - address


@contextlib.contextmanager
def triton_launches(
    recorder: Recorder, multiprocessors: int, with_instructions: bool
) -> Iterator[Any]:
    """Yields the Triton backend; its launches are recorded and do not run.

    To count instructions, every kernel is compiled once.
    """
    from triton.runtime.jit import JITFunction

    from preact_kernels.kernels import triton as backend
    from preact_kernels.kernels.triton import launch
    from testbed.triton_driver import active_driver

    if launch.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, but the interpreter has no launches")
    kept = []  # so that no address is used twice
    compile_kernel = JITFunction.run
    driver = active_driver(CAPABILITY) if with_instructions else contextlib.nullcontext()

    def record(kernel, *args, grid, warmup, **options):
        if warmup:  # only compiles
            return
        kept.append(args)
        name = kernel.__name__.removesuffix("_kernel")
        # Only a kernel of Triton lets the next launch begin early.
        is_dependent = bool(recorder.recorded and recorder.recorded[-1].launch.grid)
        met = Launch(name, _grid(grid), 32 * options["num_warps"], 0, is_dependent, 0)
        if with_instructions:
            compiled = compile_kernel(kernel, *args, grid=grid, warmup=True, **options)
            if compiled.hash not in recorder.counts:
                recorder.counts[compiled.hash] = _count_of(compiled, kernel.__name__)
            met = met._replace(
                shared_bytes=compiled.metadata.shared,
                code=compiled.hash,
                tiles=_tiles_of(kernel, args, options),
            )
        recorder.add(met, sizes((args, options)))

    gpu = launch.Device(CAPABILITY, multiprocessors, SHARED_BYTES)
    modules = [m for name, m in sys.modules.items() if name.startswith(backend.__name__)]
    with (
        driver,
        mock.patch.object(JITFunction, "run", record),
        contextlib.ExitStack() as patches,
        mock.patch.object(launch, "current_stream", lambda: 0),
        mock.patch.object(launch, "starts_early", lambda: CAPABILITY >= 90),
    ):
        for module in (m for m in modules if hasattr(m, "properties")):
            patches.enter_context(mock.patch.object(module, "properties", lambda device: gpu))
        yield backend.kernels()


def _count_of(compiled: Any, name: str) -> Count | None:
    """Counts the instructions of a kernel of Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return counts(Path(file.name), [name], CAPABILITY).get(name)


def _tiles_of(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> int:
    """Returns the number of tiles, if programs of a Triton kernel share the pixels of a batch."""
    pixels = dict(zip(kernel.arg_names, args, strict=False)).get("pixels")
    config = options.get("TILES")
    return -(-pixels // config.tile_pixels) if pixels and config else 0


def _issue_us(launch: Launch, known: dict[str, Count | None], multiprocessors: int) -> float | None:
    """Returns the time to issue the instructions of a launch; None: not known."""
    counted = known.get(launch.code)
    if counted is None or (counted.tile and not launch.tiles):
        return None
    across, *columns = map(int, launch.grid.split("x"))
    return issue_us(
        counted,
        blocks=across,
        columns=math.prod(columns),
        tiles=launch.tiles,
        warps=-(-launch.threads // 32),
        multiprocessors=multiprocessors,
    )


def stages(
    network: Network,
    batch: int,
    dtype: torch.dtype,
    memory: str,
    device: torch.device,
) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yields the stages of a network, uninitialised, in channels_last, and their inputs.

    Batch norms are float32.
    """
    with torch.device("meta"):
        model = network.model(memory=memory)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.to(dtype)
    height = network.image_size // model.stem.stride[0]
    if isinstance(model.pool, nn.MaxPool2d):
        height //= model.pool.stride
    for stage in model.stages:
        stage.to_empty(device=device).to(memory_format=torch.channels_last)
        channels = stage[0].units()[0][1].in_channels
        x = torch.empty(batch, channels, height, height, dtype=dtype, device=device)
        yield stage, x.contiguous(memory_format=torch.channels_last).requires_grad_()
        height //= stage[0].shortcut.stride[0] if hasattr(stage[0], "shortcut") else 1


class _Unit(NamedTuple):
    """The place of a convolution in a stage."""

    block: int
    place: str  # place in the block: "1", "2", ... or "-shortcut"


Units = list[dict[int, _Unit]]
"""Units by address of a tensor; the most reliable tensors come first."""


def _units_of(stage: nn.Module, gradients: Sequence[Tensor]) -> Units:
    # By conv_weight, which may be packed elsewhere; by bn_bias; by bn_weight, which the deferred
    # affine step of the next unit reads too; by gradients, which a launch may finish for another
    # unit.
    units: Units = [{}, {}, {}, {}]
    for (name, parameter), gradient in zip(stage.named_parameters(), gradients, strict=True):
        block, module, kind = name.split(".")
        unit = _Unit(int(block), module[-1] if module[-1].isdigit() else f"-{module}")
        rank = 0 if not module.startswith("bn") else 1 if kind == "bias" else 2
        units[rank][parameter.data_ptr()] = units[3][gradient.data_ptr()] = unit
    return units


def _unit_of(launches: list[_Recorded], units: Units) -> _Unit | None:
    """Returns the unit of some launches; None: several units, or none."""
    addresses = [address for r in launches for address in r.tensors]
    for by_address in units:
        if found := list(dict.fromkeys(by_address[a] for a in addresses if a in by_address)):
            return found[0] if len(found) == 1 else None
    return None


def _placed(
    stage: nn.Module, units: Units, recorded: list[_Recorded], direction: str
) -> Iterator[Launch]:
    # The launches of a unit are a separate call, or in a call that runs many blocks.
    projected = [block.projection() is not None for block in stage]
    plain = int(len(set(projected)) > 1)  # index of the part without projections
    for _, group in itertools.groupby(recorded, lambda r: id(r) if r.is_of_run else r.call):
        launches = list(group)
        unit = _unit_of(launches, units)
        part = plain if unit is None or not projected[unit.block] else 0
        prefix = "" if unit is None else f"{direction[0].upper()}{unit.place} "
        for r in launches:
            moved = r.launch.bytes_moved or sum(n or 0 for n in r.tensors.values())
            kernel = prefix + r.launch.name
            yield r.launch._replace(
                bytes_moved=moved, part=part, direction=direction, kernel=kernel
            )


def _parts(stage: nn.Module, x: Tensor, name: str) -> list[Part]:
    """Returns the blocks with a projection, then the others."""
    height, parts = x.shape[2], {}
    for block in stage:
        (_, conv), *_ = block.units()
        itemsize, is_projected = conv.weight.element_size(), block.projection() is not None
        cost, height = floors.block_cost(block, len(x), height, itemsize)
        unit_bytes = len(x) * conv.out_channels * height**2 * itemsize
        title = f"{name} projection" if is_projected else name
        known = parts.setdefault(is_projected, Part(title, 0, unit_bytes, cost.bytes_moved))
        parts[is_projected] = known._replace(blocks=known.blocks + 1)
    return [parts[key] for key in (True, False) if key in parts]


@contextlib.contextmanager
def _recording(
    recorder: Recorder, backend: str, multiprocessors: int, with_instructions: bool
) -> Iterator[None]:
    """In the body, the recorder records what runs on the backend."""
    begin_recording = {"cuda": cuda_launches, "triton": triton_launches}[backend]
    with begin_recording(recorder, multiprocessors, with_instructions) as kernels:
        own = _Calls(kernels, recorder)
        with mock.patch.object(dispatch, "kernels_for", lambda *_: own), recorder:
            yield


def unit_steps(
    cases: Sequence[Any], backend: str, multiprocessors: int = 132, with_instructions: bool = True
) -> list[list[Launch]]:
    """Records the launches of one training step of each unit, with all operators of PyTorch.

    Args:
        cases: `bench.units.UnitCase`s.
        backend: one of `BACKENDS`.
        multiprocessors: of the GPU.
        with_instructions: count the instructions of the kernels.

    Raises:
        RuntimeError: launches of the backend cannot be recorded on this machine.
    """
    recorder, turns = Recorder(records_all=True), []
    with _recording(recorder, backend, multiprocessors, with_instructions):
        for case in cases:
            module = case.module(case.shape[1])
            x, residual = (
                torch.empty(case.shape, dtype=torch.bfloat16, memory_format=torch.channels_last)
                for _ in range(2)
            )
            begin = len(recorder.recorded)
            y = module(x.requires_grad_(), *[residual.requires_grad_()] * case.has_residual)
            turn = len(recorder.recorded)
            inputs = [x, *[residual] * case.has_residual, *module.parameters()]
            torch.autograd.grad(y, inputs, torch.empty_like(y))
            turns.append((begin, turn, len(recorder.recorded)))
    steps = []
    for begin, turn, end in turns:
        step = []
        for index, r in enumerate(recorder.recorded[begin:end], start=begin):
            moved = r.launch.bytes_moved or sum(n or 0 for n in r.tensors.values())
            launch = r.launch._replace(
                bytes_moved=moved, direction=FORWARD if index < turn else BACKWARD
            )
            step.append(
                launch._replace(issue_us=_issue_us(launch, recorder.counts, multiprocessors))
            )
        steps.append(step)
    return steps


def dry_run(
    network: Network,
    batch: int,
    dtype: torch.dtype,
    backend: str,
    memory: str = "store",
    multiprocessors: int = 132,
    with_instructions: bool = True,
) -> list[StageLaunches]:
    """Records the launches of the stages in one training step, forward and backward.

    Raises:
        RuntimeError: launches of the backend cannot be recorded on this machine.
    """
    recorder, steps = Recorder(), []
    with _recording(recorder, backend, multiprocessors, with_instructions):
        on_cpu = stages(network, batch, dtype, memory, torch.device("cpu"))
        for stage, x in on_cpu:
            begin = len(recorder.recorded)
            y = stage(x)
            turn = len(recorder.recorded)
            inputs = [x, *stage.parameters()]
            _, *gradients = torch.autograd.grad(y, inputs, torch.empty_like(y))
            directions = slice(begin, turn), slice(turn, len(recorder.recorded))
            steps.append((stage, x, _units_of(stage, gradients), directions))
    found = []
    for index, (stage, x, units, (forward, backward)) in enumerate(steps, start=1):
        launches = [
            *_placed(stage, units, recorder.recorded[forward], FORWARD),
            *_placed(stage, units, recorder.recorded[backward], BACKWARD),
        ]
        timed = [
            launch._replace(issue_us=_issue_us(launch, recorder.counts, multiprocessors))
            for launch in launches
        ]
        found.append(StageLaunches(_parts(stage, x, str(index)), timed))
    return found
