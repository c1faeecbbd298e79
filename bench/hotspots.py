"""Time of a training step by kernel: `python -m bench.hotspots`.

On a GPU these are the kernels of the device, on a CPU PyTorch's operations, without the time of
operations that they call. Also prints the step time without the profiler, the sum of the kernels,
and the floor.
"""

from collections.abc import Sequence

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import floors, measure
from bench.contenders import BY_NAME, Network, available
from bench.network import Session, Task
from bench.records import table


def hotspots(session: Session) -> tuple[list[tuple[str, int, float]], float]:
    """Profiles one training step of a task's contender after warm-up.

    Returns:
        Name, calls and ms of every kernel, longest first; and ms of the step without the profiler.
    """
    step, device = session.step(session.task.contenders[0], batches=1), session.device
    step()
    step()
    step_ms = min(measure.time_once_ms(step, device) for _ in range(3))
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as run:
        step()
        measure.synchronize(device)
    kernels = []
    for event in run.key_averages():
        if on_gpu and event.device_type == DeviceType.CUDA:
            kernels.append((event.key, event.count, event.self_device_time_total / 1e3))
        elif not on_gpu and event.self_cpu_time_total:
            kernels.append((event.key, event.count, event.self_cpu_time_total / 1e3))
    return sorted(kernels, key=lambda k: -k[2]), step_ms


def main(given: Sequence[str] | None = None) -> None:
    """Prints the longest kernels and their share of the step."""
    parser = measure.parser("bench.hotspots", __doc__, "--device")
    on_gpu = measure.default_device().type == "cuda"
    add = parser.add_argument
    add("contender", nargs="?", default="fused-store", choices=list(BY_NAME))
    add("--network", default="resnet-164")
    add("--batch", type=int, default=128 if on_gpu else 16)
    add("--dtype", choices=list(measure.DTYPES), default="bf16" if on_gpu else "fp32")
    add("--most", type=int, default=25, help="kernels in the table (25)")
    a = parser.parse_args(given)
    dtype = measure.DTYPES[a.dtype]
    try:
        network = Network.named(a.network)
        _, refused = available([a.contender], a.device)
    except ValueError as error:
        parser.error(str(error))
    for reason in refused.values():
        parser.error(reason)
    name = measure.dtype_name(dtype)
    task = Task("steps", a.network, a.batch, name, (a.contender,), "hotspots", device=str(a.device))
    kernels, step_ms = hotspots(Session(task))
    total_ms = sum(ms for _, _, ms in kernels)
    lines = [
        {
            "kernel": name[:70],
            "calls": count,
            "ms": f"{ms:.3f}",
            "us a call": f"{1e3 * ms / count:.1f}",
            "of all": f"{ms / total_ms:.1%}",
        }
        for name, count, ms in kernels[: a.most]
    ]
    rest_ms = sum(ms for _, _, ms in kernels[a.most :])
    others = {"kernel": "all others", "calls": sum(k[1] for k in kernels[a.most :])}
    print(table([*lines, {**others, "ms": f"{rest_ms:.3f}"}]))
    cost = floors.network_cost(network, a.batch, dtype)
    floor_ms = measure.measure_ceilings(a.device).floor_ms(*cost, dtype)
    print(f"{task.title.split(':')[0]}, {a.contender}: step {step_ms:.2f} ms; ", end="")
    print(f"in kernels {total_ms:.2f} ms; floor {floor_ms:.2f} ms")


if __name__ == "__main__":
    main()
