"""Training curves: the same batches from the same weights, fused, eager and in float64."""

import torch
from tqdm import tqdm

from bench import data, measure
from bench.contenders import BY_NAME, Network
from bench.network import Session, TrainingStep
from bench.records import CurvePoint

TRUTH = "float64"


def losses(
    session: Session, contender: str, network: Network, batch: int, steps: int, dtype: torch.dtype
) -> list[float]:
    """The loss of each of `steps` training steps; batches and weights are the same for all."""
    chosen = BY_NAME[contender]
    model = chosen.build(network, network.state(), session.device, dtype)
    stream = data.batches(session.images, batch, seed=3, size=network.image_size)
    drawn = [next(stream) for _ in range(steps)]
    inputs = [(chosen.input(x, session.device, dtype), y.to(session.device)) for x, y in drawn]
    step = TrainingStep(model, inputs)
    return [
        float(step())
        for _ in tqdm(range(steps), desc=f"{network.name}: {contender} {dtype}", leave=False)
    ]


def measure_curves(
    session: Session, network: Network, batch: int, steps: int, *, with_float64: bool
) -> None:
    """Records the losses of `fused-store` and `eager-channels-last`, and how far they part.

    Args:
        session: what the run shares; points go to `session.curves`.
        network: what is trained.
        batch: images a step.
        steps: how many.
        with_float64: also train in float64 and take deviations from there; otherwise from eager.
    """
    eager, fused = "eager-channels-last", "fused-store"
    name = measure.dtype_name(session.dtype)
    new = session.machine.stamp(
        CurvePoint(network.name, fused, name, batch, steps - 1, 0.0, eager, 0.0)
    )
    if session.curves.get(new.key, session.machine.commit):
        return
    curves = {c: losses(session, c, network, batch, steps, session.dtype) for c in (fused, eager)}
    truth = eager
    if with_float64:
        truth = TRUTH
        curves[TRUTH] = losses(session, eager, network, batch, steps, torch.float64)
    points = [
        CurvePoint(
            network.name,
            contender,
            "float64" if contender == TRUTH else name,
            batch,
            step,
            loss,
            truth,
            abs(loss - curves[truth][step]) / abs(curves[truth][step]),
        )
        for contender, curve in curves.items()
        for step, loss in enumerate(curve)
    ]
    session.curves.put(*map(session.machine.stamp, points))
    for contender in (fused, eager):
        largest = max(p.deviation for p in points if p.contender == contender)
        if contender != truth:
            tqdm.write(
                f"  {network.name}, {steps} steps: the losses of {contender} part from those of "
                f"{truth} by {largest:.1e} at most"
            )
