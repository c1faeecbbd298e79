"""Kernel launches, device properties, grids, and the configuration of elementwise kernels."""

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
    Device,
    ElementwiseTiles,
    elementwise,
    reducing,
    tiles_of_program,
)

INTERPRETED = triton.knobs.runtime.interpret  # read when kernels are defined

_IS_INTERPRETED = tl.constexpr(INTERPRETED)
_INTERPRETED_PROGRAMS = 3  # more than one, so that partial results are merged; few, for speed
_REGISTERS_PER_MULTIPROCESSOR = 65536
_THREADS_PER_WARP = 32
_MOST_REGISTERS_PER_THREAD = 255
_MAX_INT32_INDEX = 2**31 - 2**16  # leaves room for the last tile to exceed the tensor


@triton.jit
def wait_for_predecessors():
    """Waits for all earlier kernels, and lets the next one start. Every kernel begins with it.

    On compute capability 9.0 and later, all kernels use programmatic dependent launch: programs may
    start while the previous kernel runs. After this call the previous kernel has ended, and so have
    all kernels that it waited for: programs see what those wrote, and may overwrite what those
    read. Kernels read nothing before the call, since any tensor may be new: an optimizer writes
    parameters, a kernel packs weights.
    """
    if not _IS_INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class PreparedLaunch(NamedTuple):
    """A compiled kernel, and the launcher's arguments before and after the kernel's."""

    compiled: Any  # kept alive: Triton 3.9 unloads the code of unreferenced kernels
    run: Callable
    before: tuple  # grid, stream, function, metadata, no hooks
    after: tuple  # compile-time constants


PreparedLaunches = dict[tuple, PreparedLaunch]


def starts_early() -> bool:
    """Whether the current device uses dependent launches; see `wait_for_predecessors`."""
    return not INTERPRETED and cuda_capability_geq(9, 0)


def compile_options(constants: Mapping[str, Any], num_warps: int) -> dict[str, Any]:
    """Triton's options. Registers are limited to the share of each resident program.

    Without this limit, ptxas spills a few registers to stay below 128, in vain: no more programs
    become resident.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    if starts_early():
        options["launch_pdl"] = True
    config = constants.get("TILES")
    if config is not None and config.resident:
        registers = _REGISTERS_PER_MULTIPROCESSOR // (
            _THREADS_PER_WARP * num_warps * config.resident
        )
        options["maxnreg"] = min(registers // 8 * 8, _MOST_REGISTERS_PER_THREAD)
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
        prepared: known launches in one `LaunchContext`; they skip Triton's lookup of the kernel,
            which takes 12 us. A missing launch is added, except under the interpreter or if a
            profiler has set hooks, which prepared launches do not call. None: look the kernel up.
        key: launches of a kernel with equal grids and keys must have the same constants, warps and
            types, integers that Triton specializes alike, and tensors that begin at multiples of 16
            bytes.
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
    """The state that a prepared launch depends on, besides its key."""

    device: torch.device
    properties: Device
    stream: int
    options: tuple  # Triton's options that select a kernel


def launch_context(x: Tensor) -> LaunchContext:
    """The context of launches on the device of `x`, which is the current device."""
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
    """ceil(a / b); `triton.cdiv` takes 2 us on the host."""
    return -(-a // b)


def on_device_of(x: Tensor):
    """A context that launches kernels on the device of `x`."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def nhwc_strides(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Strides of a dense tensor in NHWC order for `new_empty_strided`, faster than `empty`."""
    _, channels, height, width = shape
    return height * width * channels, 1, width * channels, channels


def needs_int64(*sizes: int) -> bool:
    """Whether a tensor with one of these numbers of elements exceeds 32-bit indices."""
    return max(sizes) > _MAX_INT32_INDEX


def aligned(t: Tensor) -> Tensor:
    """Returns the tensor, or a copy if it does not begin at a multiple of 16 bytes.

    Alignment decides how Triton spreads a tile over threads, and so the order of sums: kernels that
    sum over pixels take aligned tensors.
    """
    return t if t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.preserve_format)


def all_aligned(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Applies `aligned` to each tensor."""
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

    All are resident at once, with `resident` programs per multiprocessor. The order of sums depends
    on this number, so it depends on the device only, not on its load.
    """
    if INTERPRETED:
        return min(tiles, _INTERPRETED_PROGRAMS)
    return min(tiles, max(1, resident * properties(device).multiprocessors // columns))


class ElementwiseLaunch(NamedTuple):
    """Launch configuration of an elementwise kernel on `[images, pixels, channels]`."""

    images: int  # 1: the pixels of the batch count as one image
    pixels: int  # per image
    channels: int
    grid: tuple[int, int, int]  # images * programs of an image, channel tiles
    constants: dict
    num_warps: int

    @property
    def programs(self) -> int:
        """Programs per image and channel tile."""
        return self.grid[0] // self.images


class ReducingLaunch(NamedTuple):
    """Launch configuration of an elementwise kernel that reduces images."""

    launch: ElementwiseLaunch
    tiles: int  # per program


def _elementwise_launch(
    x: Tensor, images: int, config: ElementwiseTiles, tiles: int = 1
) -> ElementwiseLaunch:
    channels = x.shape[1]
    pixels = x.numel() // (images * channels)
    programs = ceil_div(pixels, config.tile_pixels * tiles)
    return ElementwiseLaunch(
        images,
        pixels,
        channels,
        (images * programs, ceil_div(channels, config.tile_channels), 1),
        {"CHANNELS": channels, "INT64": needs_int64(x.numel()), "TILES": config},
        config.num_warps,
    )


def elementwise_launch(x: Tensor, by_image: bool = False) -> ElementwiseLaunch:
    """Launch configuration of a kernel in which each program owns one tile.

    Args:
        x: a tensor `[N, C, H, W]`, which has the shape of all tensors.
        by_image: each tile is of one image.
    """
    images = x.shape[0] if by_image else 1
    channels, pixels = x.shape[1], x.numel() // (images * x.shape[1])
    multiprocessors = properties(x.device).multiprocessors
    config = elementwise(channels, x.element_size(), images, pixels, multiprocessors)
    return _elementwise_launch(x, images, config)


def reducing_launch(x: Tensor, by_image: bool = False, is_small: bool = False) -> ReducingLaunch:
    """Launch configuration of a kernel in which each program owns consecutive tiles of an image.

    Args:
        x: a tensor `[N, C, H, W]`, which has the shape of all tensors.
        by_image: reduces each image; otherwise the batch.
        is_small: small tiles, for kernels that need many registers.
    """
    images = x.shape[0] if by_image else 1
    channels, pixels = x.shape[1], x.numel() // (images * x.shape[1])
    config = reducing(channels, x.element_size(), pixels, is_small)
    tiles = ceil_div(pixels, config.tile_pixels)
    columns = ceil_div(channels, config.tile_channels)
    if by_image:
        of_program = tiles_of_program(tiles, columns)
    else:
        programs = persistent_programs(x.device, tiles, columns, config.resident)
        of_program = ceil_div(tiles, programs)
    return ReducingLaunch(_elementwise_launch(x, images, config, of_program), of_program)
