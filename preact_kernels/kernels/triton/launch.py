"""Launches, properties of the device, grids, and the configuration of elementwise kernels."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from preact_kernels.kernels.triton.configurations import (
    ELEMENTWISE_RESIDENT,
    TILES_OF_IMAGE,
    ConvBlocks,
    Device,
    elementwise,
)

INTERPRETED = triton.knobs.runtime.interpret  # read when kernels are defined

_IS_INTERPRETED = tl.constexpr(INTERPRETED)
_INTERPRETED_PROGRAMS = 3  # more than one, so that partial results are merged; few, for speed
_REGISTERS, _WARP = 65536, 32  # of a multiprocessor, and threads of a warp
_MOST_REGISTERS = 255  # of a thread
_MAX_INT32_INDEX = 2**31 - 2**16  # leaves room for the last tile to exceed the tensor


@triton.jit
def wait_for_predecessors():
    """Waits for the kernels before this one, and lets the next one start. Every kernel begins so.

    On compute capability 9.0 and later every kernel is launched as dependent: its programs may
    start while the kernel before it runs (programmatic dependent launch). Past this call they see
    all that earlier kernels wrote, and may overwrite all that these read: the kernel before it has
    ended, and so have those before that, for which it waited in turn. Nothing is read ahead of the
    call, as any tensor may be new: parameters come from an optimizer, packed weights from a kernel.
    """
    if not _IS_INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class PreparedLaunch(NamedTuple):
    """A compiled kernel, and what its launcher takes before and after the kernel's arguments."""

    compiled: Any  # Triton 3.9 unloads the code of a kernel that nothing refers to
    run: Callable
    before: tuple  # grid, stream, function, metadata, no hooks
    after: tuple  # compile-time constants


PreparedLaunches = dict[tuple, PreparedLaunch]


def starts_early() -> bool:
    """Whether kernels of the current device are launched as dependent: `wait_for_predecessors`."""
    return not INTERPRETED and cuda_capability_geq(9, 0)


def compile_options(constants: Mapping[str, Any], num_warps: int) -> dict[str, Any]:
    """Triton's options: a kernel has the registers that the resident programs of its grid leave.

    Without a limit ptxas spills a few registers to stay below 128, for no more resident programs.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    if starts_early():
        options["launch_pdl"] = True
    blocks = constants.get("BLOCKS")
    if isinstance(blocks, ConvBlocks):
        registers = _REGISTERS // (_WARP * num_warps * blocks.resident)
        options["maxnreg"] = min(registers // 8 * 8, _MOST_REGISTERS)
    return options


def launch_kernel(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple,
    constants: Mapping[str, Any],
    num_warps: int,
    prepared: PreparedLaunches | None = None,
    key: Hashable = None,
) -> None:
    """Launches a kernel on the current stream. Every launch of the package calls this.

    Args:
        kernel: a `triton.jit` function.
        grid: the number of programs.
        args: tensors, numbers, and tuples of them, in the order of the kernel's parameters.
        constants: the parameters that follow, by name and in order.
        num_warps: warps of a program.
        prepared: known launches in one `LaunchContext`, which save Triton's lookup of the kernel:
            12 us. A missing launch is added, except under the interpreter or where a profiler has
            set hooks, which prepared launches do not call. None: look the kernel up.
        key: launches of a kernel with one grid and one key have the same constants, warps and
            types, integers that Triton specializes alike, and tensors that all begin at multiples
            of 16 bytes.
    """
    own_key = kernel.__name__, grid, key
    with_hooks = has_launch_hooks()
    known = None if prepared is None or with_hooks else prepared.get(own_key)
    if known is not None:
        _, run, before, after = known
        run(*before, *args, *after)
        return
    compiled = kernel[grid](*args, **constants, **compile_options(constants, num_warps))
    if compiled is None or prepared is None or with_hooks:
        return
    before = *grid, current_stream(), compiled.function, compiled.packed_metadata, None, None, None
    prepared[own_key] = PreparedLaunch(compiled, compiled.run, before, tuple(constants.values()))


def current_stream() -> int:
    """The handle of the current stream of the current device."""
    driver = triton.runtime.driver.active
    return driver.get_current_stream(driver.get_current_device())


class LaunchContext(NamedTuple):
    """What a prepared launch depends on, besides its key."""

    device: torch.device
    properties: Device
    stream: int
    options: tuple  # Triton's options that select a kernel


def launch_context(x: Tensor) -> LaunchContext:
    """The context of launches on the device of `x`, the current one."""
    knobs = triton.knobs
    options = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    stream = 0 if INTERPRETED else current_stream()
    return LaunchContext(x.device, properties(x.device), stream, options)


def has_launch_hooks() -> bool:
    """Whether something, such as a profiler, has set hooks that Triton calls at launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b), without the 2 us that `triton.cdiv` takes on the host."""
    return -(-a // b)


def on_device_of(x: Tensor):
    """A context in which kernels are launched on the device of `x`."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def nhwc_strides(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Strides of a dense tensor in NHWC order, for `new_empty_strided`: faster than `empty`."""
    _, channels, height, width = shape
    return height * width * channels, 1, width * channels, channels


def needs_int64(*sizes: int) -> bool:
    """Whether a tensor of one of these sizes has elements beyond the range of 32-bit indices."""
    return max(sizes) > _MAX_INT32_INDEX


def aligned(t: Tensor) -> Tensor:
    """The tensor, or a copy if it does not begin at a multiple of 16 bytes.

    Where the images of a kernel begin decides how it spreads a tile over its threads, and so the
    order of its sums: kernels that add up pixels take aligned images.
    """
    return t if t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.preserve_format)


def all_aligned(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, with a copy of each that does not begin at a multiple of 16 bytes."""
    if any(address % 16 for address in map(Tensor.data_ptr, tensors)):
        return [aligned(t) for t in tensors]
    return tensors


def aligned_rows(like: Tensor, rows: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized `[rows, elements]`; every row begins at a multiple of 16 bytes."""
    step = 16 // dtype.itemsize
    padded = ceil_div(elements, step) * step
    return like.new_empty((rows, padded), dtype=dtype)[:, :elements]


@functools.cache
def properties(device: torch.device) -> Device:
    """Properties of a GPU. Placeholders in the interpreter."""
    if INTERPRETED:
        return Device(90, 1, 227 * 1024)
    found: Any = torch.cuda.get_device_properties(device)  # its stub lacks an attribute
    return Device(
        10 * found.major + found.minor,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
    )


def persistent_programs(device: torch.device, tiles: int, columns: int, resident: int) -> int:
    """Number of programs that share the `tiles` of each grid column.

    As many as are resident on the device at once, with `resident` programs per multiprocessor. The
    order of sums depends on this number, so it is a function of the device, not of its load.
    """
    if INTERPRETED:
        return min(tiles, _INTERPRETED_PROGRAMS)
    return min(tiles, max(1, resident * properties(device).multiprocessors // columns))


class ElementwiseLaunch(NamedTuple):
    """Launch configuration of an elementwise kernel on `[images, pixels, channels]`."""

    device: torch.device
    images: int  # 1: all pixels of the batch are one image
    pixels: int  # of an image
    channels: int
    grid: tuple[int, int, int]  # a program for every tile and block of channels
    constants: dict
    num_warps: int

    def persistent_grid(self) -> tuple[int, int, int]:
        """The grid of a kernel whose programs each own several tiles, of the whole batch."""
        tiles, columns, _ = self.grid
        return persistent_programs(self.device, tiles, columns, ELEMENTWISE_RESIDENT), columns, 1

    def programs_of_image(self) -> int:
        """Programs that share the tiles of an image, in each grid column of `image_grid`."""
        return ceil_div(self.grid[0] // self.images, TILES_OF_IMAGE)

    def image_grid(self) -> tuple[int, int, int]:
        """The grid of a kernel whose programs each own several tiles of one image."""
        return self.images * self.programs_of_image(), self.grid[1], 1


@functools.cache
def _elementwise_constants(channels: int, int64: bool, is_small: bool) -> dict:
    blocks = elementwise(channels, is_small)
    return {"CHANNELS": channels, "INT64": int64, "BLOCKS": blocks}


def elementwise_launch(
    x: Tensor, by_image: bool = False, is_small: bool = False
) -> ElementwiseLaunch:
    """Launch configuration of an elementwise kernel that reads or writes tensors shaped like x.

    Args:
        x: the tensor.
        by_image: each program works on one image, with small tiles.
        is_small: small tiles, for kernels that need more registers per element.
    """
    is_small = is_small or by_image
    channels = x.shape[1]
    images = x.shape[0] if by_image else 1
    pixels = x.numel() // (images * channels)
    blocks = elementwise(channels, is_small)
    tiles, columns = (
        ceil_div(pixels, blocks.block_pixels),
        ceil_div(channels, blocks.block_channels),
    )
    return ElementwiseLaunch(
        x.device,
        images,
        pixels,
        channels,
        (images * tiles, columns, 1),
        _elementwise_constants(channels, needs_int64(x.numel()), is_small),
        blocks.num_warps,
    )
