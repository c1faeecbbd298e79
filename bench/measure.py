"""Measures times in turn, the machine and its ceilings, and the memory of a process."""

import contextlib
import ctypes
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def dtype_name(dtype: torch.dtype) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median, 20th and 80th percentile of a set of times, in ms."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    count: int

    @classmethod
    def of(cls, samples_ms: list[float]) -> "Timing":
        """Of at least one time."""
        if len(samples_ms) == 1:
            return cls(samples_ms[0], samples_ms[0], samples_ms[0], 1)
        fifths = statistics.quantiles(samples_ms, n=5, method="inclusive")
        return cls(statistics.median(samples_ms), fifths[0], fifths[3], len(samples_ms))


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceLost(RuntimeError):
    """A kernel failed and broke the GPU context: every later CUDA call of this process fails.

    Args:
        contender: which one ran.
        reason: the CUDA error.

    Attributes:
        is_recorded: the contender's row says so, and a resumed run does not try it again.
    """

    def __init__(self, contender: str, reason: str) -> None:
        super().__init__(f"{contender}: {reason}")
        self.contender, self.reason, self.is_recorded = contender, reason, False


@contextlib.contextmanager
def running(contender: str, device: torch.device) -> Iterator[None]:
    """Attributes an error that breaks the GPU context to `contender`.

    Raises:
        DeviceLost: instead of such an error; other errors pass through.
    """
    try:
        yield
    except DeviceLost:
        raise
    except Exception:
        try:
            synchronize(device)
        except RuntimeError as error:
            raise DeviceLost(contender, str(error).splitlines()[0]) from error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether PyTorch or a library found no room on the device."""
    words = "out of memory", "ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def time_once_ms(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call in ms: between CUDA events on a GPU, by the clock on a CPU."""
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
    after_round: Callable[[dict[str, Timing]], None] = lambda times: None,
    out_of_memory: Callable[[str, Exception], None] | None = None,
) -> dict[str, Timing]:
    """Times every call once per round, A B C A B C ..., so that drift affects all alike.

    Args:
        calls: by name; already warm.
        rounds: number of rounds.
        device: where the calls run.
        deadline_s: value of `time.monotonic()` after which no round starts, except the first.
        title: of the progress bar.
        after_round: called with the times so far.
        out_of_memory: called with a name and the error if there is no room for a call, which is
            then left out; None raises the error.

    Returns:
        Timings by name.
    """
    calls = dict(calls)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with tqdm(total=rounds * len(calls), desc=title, leave=False) as bar:
        for index in range(rounds):
            if index and time.monotonic() > deadline_s:
                break
            for name in list(calls):
                bar.set_postfix_str(name)
                try:
                    with running(name, device):
                        samples[name].append(time_once_ms(calls[name], device))
                except RuntimeError as error:
                    if out_of_memory is None or not is_out_of_memory(error):
                        raise
                    error.__traceback__ = None  # its frames keep tensors
                    del calls[name], samples[name]
                    out_of_memory(name, error)
                bar.update()
            after_round({name: Timing.of(times) for name, times in samples.items()})
    return {name: Timing.of(times) for name, times in samples.items()}


def cpu_model() -> str:
    """The processor's name according to Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def instruction_set(device: torch.device) -> str:
    """What the fused CPU kernels run on; an empty string elsewhere."""
    from preact_kernels.kernels import cpu

    if device.type != "cpu" or cpu.load_error():
        return ""
    return cpu.kernels().instruction_set


def source_digest() -> str:
    """A short hash of all sources."""
    digest = hashlib.sha256()
    patterns = ("preact_kernels/**/*.py", "csrc/**/*.*", "bench/*.py", "setup.py")
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def commit() -> str:
    """The short hash of the checked-out commit.

    `1a2b3c4d5e-dirty-0f1e2d3c4b`, with a hash of the sources, if tracked files differ;
    `sources-0f1e2d3c4b` without git history. PREACT_KERNELS_COMMIT overrides it.
    """
    if os.environ.get("PREACT_KERNELS_COMMIT"):
        return os.environ["PREACT_KERNELS_COMMIT"]

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        # Not the results, which are written while the commit is measured.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except (OSError, subprocess.TimeoutExpired):
        head = ""
    if not head:
        return f"sources-{source_digest()}"
    return f"{head}-dirty-{source_digest()}" if changed else head


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
        """Of this process on `device`."""
        import preact_kernels as pk
        from preact_kernels.ops import dispatch

        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        else:
            threads = torch.get_num_threads()
            capability = torch.backends.cpu.get_cpu_capability()
            name = f"{cpu_model()} {capability} ({threads} thread{'s' if threads > 1 else ''})"
        if dispatch.current() != "auto":  # measured beside the default, not in its place
            name += f", backend {dispatch.current()}"
        versions = [
            f"torch {torch.__version__}",
            f"python {platform.python_version()}",
            f"preact_kernels {pk.__version__} ({'+'.join(pk.available_backends())})",
        ]
        if device.type == "cuda":
            versions.append(f"cuda {torch.version.cuda}")
        if command is None:
            module = Path(sys.argv[0]).with_suffix("")
            module = module.parent if module.name == "__main__" else module
            prefix = "bench." if module.parent == ROOT / "bench" else ""
            command = shlex.join(["python", "-m", prefix + module.name, *sys.argv[1:]])
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
        return cls(name, ", ".join(versions), commit(), date, command)

    def stamp(self, record):
        """`record` with these columns set."""
        return dataclasses.replace(record, **dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured limits of the machine: copy bandwidth and the rate of large matrix products.

    On a GPU also the time of the smallest kernel, launched one by one and in a CUDA graph.
    """

    copy_gb_s: float
    matmul_gflop_s: dict[str, float]  # by dtype name
    launch_us: float | None = None
    graph_launch_us: float | None = None

    def floor_ms(self, bytes_moved: float, flops: float, dtype: torch.dtype) -> float:
        """The larger of bytes over bandwidth and FLOPs over matrix rate, in ms."""
        rate = self.matmul_gflop_s.get(dtype_name(dtype)) or max(self.matmul_gflop_s.values())
        return max(bytes_moved / self.copy_gb_s, flops / rate) / 1e6

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in self.matmul_gflop_s.items())
        text = f"copy {self.copy_gb_s:,.1f} GB/s; matrix product, GFLOP/s: {rates}"
        if self.launch_us is not None:
            text += f"; a kernel {self.launch_us:.2f} us, in a graph {self.graph_launch_us:.2f} us"
        return text


def _best_ms(call: Callable[[], object], device: torch.device) -> float:
    call()
    return min(time_once_ms(call, device) for _ in range(25))


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measures copy bandwidth and matrix rates.

    float32 products use TF32 if PyTorch's convolutions do. On a CPU the rate is that of a matrix
    product or of a convolution, whichever is higher: PyTorch runs them in different libraries.
    """
    on_gpu = device.type == "cuda"
    dtypes = (torch.float32, torch.bfloat16)
    copy_gb_s = measure_copy_gb_s(device)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        size = 8192 if on_gpu else 1024
        rates = {dtype_name(d): _matmul_gflop_s(size, d, device) for d in dtypes}
        if not on_gpu:
            for d in dtypes:
                rates[dtype_name(d)] = max(rates[dtype_name(d)], _conv_gflop_s(d))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return Ceilings(copy_gb_s, rates, *(_launches_us(device) if on_gpu else ()))


def measure_copy_gb_s(device: torch.device) -> float:
    """Copy bandwidth, bytes read and written, of a tensor that is larger than any cache.

    256 MiB on a CPU, 2 GiB on a GPU.
    """
    size_bytes = 2**31 if device.type == "cuda" else 2**28
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / _best_ms(lambda: target.copy_(source), device) / 1e6


def _matmul_gflop_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    b, out = torch.randn_like(a), torch.empty_like(a)
    return 2 * size**3 / _best_ms(lambda: torch.mm(a, b, out=out), device) / 1e6


def _conv_gflop_s(dtype: torch.dtype) -> float:
    """The rate of a 3x3 convolution of 128 channels on a CPU."""
    images, size, channels = 16, 16, 128
    a = torch.randn(images, channels, size, size).to(dtype, memory_format=torch.channels_last)
    conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(dtype)
    conv.to(memory_format=torch.channels_last)
    with torch.no_grad():
        best_ms = _best_ms(lambda: conv(a), torch.device("cpu"))
    return 2 * images * size**2 * channels**2 * 9 / best_ms / 1e6


def _launches_us(device: torch.device, count: int = 1000) -> tuple[float, float]:
    value = torch.zeros(1, device=device)

    def calls() -> None:
        for _ in range(count):
            value.add_(1)

    plain_ms = _best_ms(calls, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return tuple(1e3 * ms / count for ms in (plain_ms, _best_ms(graph.replay, device)))


def _status_bytes(field: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def resident_bytes() -> int:
    """Resident size of this process, after returning unused heap pages to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak resident size of this process since the last `reset_peak`.

    From VmHWM, because `ru_maxrss` of a child starts at the size of its parent.
    """
    high = _status_bytes("VmHWM")
    return high if high is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Sets the peak resident size to the current one, if the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def allocated_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that `call` allocates and its result keeps alive, also outside autograd."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
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


def run_child(arguments: list[str], timeout_s: float) -> dict:
    """Runs `python -m <arguments>` in another process; returns the JSON of its last line.

    Raises:
        RuntimeError: the process failed; the message has the end of its output.
        subprocess.TimeoutExpired: it took longer than `timeout_s`.
    """
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(
            f"{shlex.join(arguments)}: exit {done.returncode}\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])
