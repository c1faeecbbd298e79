"""Training curves: fused, eager and float64 on the same batches from the same weights."""

import torch
from tqdm import tqdm

from bench import measure
from bench.contenders import BY_NAME, Network
from bench.network import Session, TrainingStep
from bench.records import CurvePoint
from preact_kernels.study import data

TRUTH = "float64"


def losses(
    session: Session, contender: str, network: Network, batch: int, steps: int, dtype: torch.dtype
) -> list[float]:
    """The loss of each of `steps` training steps."""
    chosen = BY_NAME[contender]
    model = chosen.build(network, network.state(), session.device, dtype)
    batches = data.Batches(session.images, batch, seed=3, size=network.image_size)
    drawn = [batches[i] for i in range(steps)]
    inputs = [(chosen.input(x, session.device, dtype), y.to(session.device)) for x, y in drawn]
    step = TrainingStep(model, inputs)
    return [
        float(step())
        for _ in tqdm(range(steps), desc=f"{network.name}: {contender} {dtype}", leave=False)
    ]


def measure_curves(
    session: Session, network: Network, batch: int, steps: int, *, with_float64: bool
) -> None:
    """Records the losses of `fused-store` and `eager-channels-last`, and their deviations.

    Args:
        session: its `curves` get the points.
        network: what to train.
        batch: images per step.
        steps: number of steps.
        with_float64: also train in float64, and compare with that; otherwise compare with eager.
    """
    eager, fused = "eager-channels-last", "fused-store"
    name = measure.dtype_name(session.dtype)

    def point(contender: str, step: int, loss: float, truth: str, exact: float) -> CurvePoint:
        found = CurvePoint(
            case=network.name,
            contender=contender,
            dtype="float64" if contender == TRUTH else name,
            batch=batch,
            step=step,
            loss=loss,
            truth=truth,
            deviation=abs(loss - exact) / abs(exact),
        )
        return session.machine.stamp(found)

    last = point(fused, steps - 1, loss=1.0, truth=eager, exact=1.0)
    if session.curves.get(last.key, session.machine.commit):
        return
    curves = {c: losses(session, c, network, batch, steps, session.dtype) for c in (fused, eager)}
    truth = eager
    if with_float64:
        truth = TRUTH
        curves[TRUTH] = losses(session, eager, network, batch, steps, torch.float64)
    points = [
        point(contender, step, loss, truth, exact=curves[truth][step])
        for contender, curve in curves.items()
        for step, loss in enumerate(curve)
    ]
    session.curves.put(*points)
    for contender in (fused, eager):
        largest = max(p.deviation for p in points if p.contender == contender)
        if contender != truth:
            tqdm.write(
                f"  {network.name}, {steps} steps: the losses of {contender} deviate from those of "
                f"{truth} by at most {largest:.1e}"
            )
