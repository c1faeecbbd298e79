"""Time of a training step by kernel: `python -m bench.hotspots`.

On a GPU these are the kernels of the device, on a CPU PyTorch's operations, each without those that
it calls. Also prints the step time without the profiler, the sum of the kernels, and the floor.
"""

import argparse
from collections.abc import Sequence

import torch
from tabulate import tabulate
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import floors, measure
from bench.contenders import BY_NAME, Network, available
from bench.network import TrainingStep
from preact_kernels.study import data


def hotspots(
    contender: str, network: Network, batch: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[tuple[str, int, float]], float]:
    """Profiles one training step of a contender after warm-up.

    Returns:
        Name, calls and ms of every kernel, longest first; and ms of the step without profiler.
    """
    chosen = BY_NAME[contender]
    images = data.load_digits()
    x, labels = data.Batches(images, batch, seed=2, size=network.image_size)[0]
    model = chosen.build(network, network.state(), device, dtype)
    inputs = [(chosen.input(x, device, dtype), labels.to(device))]
    step = TrainingStep(model, inputs, graphed=chosen.graphed)
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
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m bench.hotspots", description=__doc__)
    parser.add_argument("contender", nargs="?", default="fused-store", choices=list(BY_NAME))
    parser.add_argument("--network", default="resnet-164")
    parser.add_argument("--batch", type=int, default=128 if on_gpu else 16)
    parser.add_argument(
        "--dtype", choices=list(measure.DTYPES), default="bf16" if on_gpu else "fp32"
    )
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--most", type=int, default=25, help="kernels in the table (25)")
    a = parser.parse_args(given)
    device, dtype = torch.device(a.device), measure.DTYPES[a.dtype]
    try:
        network = Network.named(a.network)
        _, refused = available([a.contender], device)
    except ValueError as error:
        parser.error(str(error))
    for reason in refused.values():
        parser.error(reason)
    kernels, step_ms = hotspots(a.contender, network, a.batch, device, dtype)
    total_ms = sum(ms for _, _, ms in kernels)
    lines = [
        [name[:70], count, f"{ms:.3f}", f"{1e3 * ms / count:.1f}", f"{ms / total_ms:.1%}"]
        for name, count, ms in kernels[: a.most]
    ]
    rest_ms = sum(ms for _, _, ms in kernels[a.most :])
    lines.append(["all others", sum(k[1] for k in kernels[a.most :]), f"{rest_ms:.3f}", "", ""])
    print(tabulate(lines, ["kernel", "calls", "ms", "us a call", "of all"], disable_numparse=True))
    floor_ms = measure.measure_ceilings(device).floor_ms(
        *floors.network_cost(network, a.batch, dtype), dtype
    )
    print(f"{a.contender}, {network.name}, batch {a.batch}, {measure.dtype_name(dtype)}: ", end="")
    print(f"step {step_ms:.2f} ms; in kernels {total_ms:.2f} ms; floor {floor_ms:.2f} ms")


if __name__ == "__main__":
    main()
