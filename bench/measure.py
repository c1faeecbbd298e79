"""Times of calls in turn, the machine and its ceilings, memory of a process."""

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import preact_kernels as pk
from preact_kernels.kernels import cpu, cuda
from preact_kernels.ops import dispatch

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"
MIB = 2**20

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def default_device() -> torch.device:
    """Returns a GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parser(module: str, description: str, *options: str) -> argparse.ArgumentParser:
    """Returns a parser for `python -m MODULE`, with "--device" or "--out" or both."""
    form = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=form
    )
    if "--device" in options:
        words = "cpu or cuda (cuda if there is one)"
        found.add_argument("--device", type=torch.device, default=default_device(), help=words)
    if "--out" in options:
        found.add_argument("--out", type=Path, default=OUT, help="folder of the CSV files")
    return found


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the start of its message."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}"


class Timing(NamedTuple):
    """Median, 20th and 80th percentile of a set of times."""

    median_ms: float
    p20_ms: float
    p80_ms: float

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> "Timing":
        """Computes the percentiles of at least one time."""
        return cls(*np.percentile(samples_ms, [50, 20, 80]).tolist())


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def captured(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """Captures a call in a CUDA graph, after warm-up calls; also returns the call's result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    return graph, result


def time_once_ms(call: Callable[[], object], device: torch.device) -> float:
    """Returns the time of one call in ms: by CUDA events on a GPU, by the clock on a CPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    start_s = time.perf_counter()
    call()
    return (time.perf_counter() - start_s) * 1e3


def time_in_turn(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    deadline_s: float = float("inf"),
    title: str = "",
    failed: Callable[[str, Exception], None] | None = None,
    after_round: Callable[[dict[str, Timing]], None] = lambda times: None,
) -> dict[str, Timing]:
    """Times every call once per round (A B C A B C ...), so that drift affects all equally.

    Args:
        calls: calls by name; warmed up already.
        rounds: number of rounds.
        device: device of the calls.
        deadline_s: value of `time.time()`. A round, except the first, does not start if it would
            end later, judged by the longest round so far.
        title: title of the progress bar.
        failed: called with a name and the error of a call, which is not called again; None: raise.
        after_round: called with the timings so far.

    Returns:
        Timings by name.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    times: dict[str, Timing] = {}
    longest_s = 0.0
    with tqdm(total=rounds * len(calls), desc=title, leave=False) as bar:
        for index in range(rounds):
            begin_s = time.time()
            if index and begin_s + longest_s > deadline_s:
                break
            for name in list(samples):
                bar.set_postfix_str(name, refresh=False)
                try:
                    samples[name].append(time_once_ms(calls[name], device))
                except Exception as error:
                    if failed is None:
                        raise
                    del samples[name]
                    failed(name, error)
                bar.update()
            longest_s = max(longest_s, time.time() - begin_s)
            times = {name: Timing.of(samples_ms) for name, samples_ms in samples.items()}
            after_round(times)
    return times


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Makes the system kill this process when its parent ends for any reason."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def accept_interrupts() -> None:
    """Ends ignoring SIGINT, as a process does that was started in the background.

    The processes that it starts would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_process(
    command: Sequence[str], seconds: float, grace_s: float = 5, **options
) -> int | None:
    """Runs a command; interrupts it after `seconds`, and kills it and its children after `grace_s`.

    It does not outlive this process. `options`: further arguments of `subprocess.Popen`.

    Returns:
        The exit status; None if the command ran out of time.
    """
    accept_interrupts()
    options = {"cwd": ROOT, "start_new_session": True, **options}
    process = subprocess.Popen(command, preexec_fn=_end_with_parent, **options)
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its children
        process.wait()


def instruction_set(device: torch.device) -> str:
    """Returns the instruction set of the fused CPU kernels; empty: another device."""
    return "" if device.type != "cpu" or cpu.load_error() else cpu.kernels().instruction_set


def commit() -> str:
    """Returns the short hash of the checked-out commit; "-dirty" follows if tracked files differ.

    PREACT_KERNELS_COMMIT overrides it; without git history it is "unknown".
    """
    if os.environ.get("PREACT_KERNELS_COMMIT"):
        return os.environ["PREACT_KERNELS_COMMIT"]

    def git(*args: str) -> str:
        options = {"cwd": ROOT, "capture_output": True, "text": True}
        return subprocess.run(["git", *args], check=True, **options).stdout.strip()

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        # Without the results, which are written while the commit is measured.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def own_command() -> str:
    """Returns the command line of this process."""
    module = Path(sys.argv[0]).with_suffix("")
    module = module.parent if module.name == "__main__" else module
    prefix = "bench." if module.parent == ROOT / "bench" else ""
    return shlex.join(["python", "-m", prefix + module.name, *sys.argv[1:]])


def device_name(device: torch.device) -> str:
    """Returns the GPU, or the processor, its vector instructions and PyTorch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = named[1].strip() if named else platform.machine()
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model} {capability} ({threads} thread{'s' if threads > 1 else ''})"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where results were measured: the last columns of every row."""

    device: str
    versions: str
    commit: str
    date: str
    command: str

    @classmethod
    def of(cls, device: torch.device, command: str | None = None) -> "Machine":
        """Describes this process on `device`; `command` defaults to its own."""
        name = device_name(device)
        if dispatch.current() != "auto":  # rows in addition to rows of the default backend
            name += f", backend {dispatch.current()}"
        if cuda.RESIDENT_RUNS and device.type == "cuda":
            name += ", resident runs"
        versions = [
            f"torch {torch.__version__}",
            f"python {platform.python_version()}",
            f"preact_kernels {pk.__version__} ({'+'.join(pk.available_backends())})",
        ]
        if device.type == "cuda":
            versions.append(f"cuda {torch.version.cuda}")
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
        return cls(name, ", ".join(versions), commit(), date, command or own_command())

    def stamp(self, record):
        """Returns `record` with these columns set."""
        return dataclasses.replace(record, **dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured limits of the machine: copy bandwidth and the rate of large matrix products."""

    copy_gb_s: float
    matmul_gflop_s: dict[str, float]  # by dtype name

    def floor_ms(self, bytes_moved: float, flops: float, dtype: torch.dtype) -> float:
        """Returns the larger of bytes / bandwidth and FLOPs / matrix rate, in ms."""
        rate = self.matmul_gflop_s.get(dtype_name(dtype)) or max(self.matmul_gflop_s.values())
        return max(bytes_moved / self.copy_gb_s, flops / rate) / 1e6

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in self.matmul_gflop_s.items())
        return f"copy {self.copy_gb_s:,.1f} GB/s; matrix product, GFLOP/s: {rates}"


def best_ms(call: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest of 25 times, after a warm-up call."""
    call()
    return min(time_once_ms(call, device) for _ in range(25))


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measures copy bandwidth and matrix rates.

    float32 products use TF32 if PyTorch's convolutions do. On a CPU, the rate is the higher one of
    a matrix product and a convolution: PyTorch runs them in different libraries.
    """
    on_gpu = device.type == "cuda"
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        rates = {}
        for dtype in (torch.float32, torch.bfloat16):
            rate = _matmul_gflop_s(8192 if on_gpu else 1024, dtype, device)
            rates[dtype_name(dtype)] = rate if on_gpu else max(rate, _conv_gflop_s(dtype))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    ceilings = Ceilings(measure_copy_gb_s(device), rates)
    if on_gpu:
        torch.cuda.empty_cache()  # frees memory for processes that measure while this one waits
    return ceilings


def measure_copy_gb_s(device: torch.device) -> float:
    """Measures copy bandwidth (bytes read and written) with a tensor larger than any cache.

    The tensor has 256 MiB on a CPU, 2 GiB on a GPU.
    """
    size_bytes = 2**31 if device.type == "cuda" else 2**28
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / best_ms(lambda: target.copy_(source), device) / 1e6


def _matmul_gflop_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    b, out = torch.randn_like(a), torch.empty_like(a)
    return 2 * size**3 / best_ms(lambda: torch.mm(a, b, out=out), device) / 1e6


def _conv_gflop_s(dtype: torch.dtype) -> float:
    """Measures the rate of a 3x3 convolution with 128 channels on a CPU."""
    images, size, channels = 16, 16, 128
    a = torch.randn(images, channels, size, size).to(dtype, memory_format=torch.channels_last)
    conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(dtype)
    conv.to(memory_format=torch.channels_last)
    with torch.no_grad():
        ms = best_ms(lambda: conv(a), torch.device("cpu"))
    return 2 * images * size**2 * channels**2 * 9 / ms / 1e6


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024


def resident_bytes() -> int:
    """Returns the resident size of this process, without unused heap pages."""
    _LIBC.malloc_trim(0)
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Returns the peak resident size of this process since the last `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Sets the peak resident size to the current one, if the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def map_large_allocations() -> None:
    """Lets glibc map each large allocation alone, and unmap it when it is freed.

    Then the resident size follows what is in use: there are no unused holes between tensors.
    """
    threshold, count = -3, -4  # M_MMAP_THRESHOLD, M_MMAP_MAX in malloc.h
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(threshold, 2**16)
        _LIBC.mallopt(count, 2**30)


def allocated_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Returns the bytes that `call` allocates and its result keeps alive, also outside autograd."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        del result
        return kept
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    del result
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())
