"""Random models give the same results plain and converted.

`python -m tests.convert.test_random --seeds A B` tries a range of seeds, and prints the models that
differ.
"""

import argparse
import collections
import itertools
import random
import sys
import types
import warnings
from typing import NamedTuple

import pytest
import torch

import preact_kernels as pk
from tests.convert import random_model_helpers
from tests.convert.random_model_helpers import TensorFacts, facts
from tests.convert.random_models import program

TOLERANCE = 1e-7  # relative, of float64
STEPS = 3  # two of training, one of evaluation

pytestmark = pytest.mark.backends("cpu")


class Trial(NamedTuple):
    """What a model gave.

    observed: facts by name, in the order in which they were seen.
    errors: the types of the exceptions that were raised, by the step and what raised them.
    messages: of these exceptions.
    has_fused: whether a batch norm ran fused.
    """

    observed: dict[str, object]
    errors: dict[str, str]
    messages: dict[str, str]
    has_fused: bool = False


def load(text: str, name: str) -> types.ModuleType:
    """Runs the text of a program as a module that pickle finds."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    return module


def run(text: str, seed: int, is_converted: bool, noise: float = 0.0) -> Trial:
    """Builds a model from its text, converted or not, and calls it three times.

    Args:
        text: the program.
        seed: of the weights, the inputs, and the generators that the model uses.
        is_converted: whether the model runs converted, or within `pk.fuse`.
        noise: relative change of the inputs and the weights.
    """
    own = load(text, f"random_model_{'converted' if is_converted else 'plain'}")
    # The sum of gradients in two memory formats has that of the first.
    random_model_helpers.COMPARES_STRIDES_OF_GRADIENTS = "channels_last" not in text
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    trial = Trial({}, {}, {})
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        net = own.Net().double()
        for p in itertools.chain(net.parameters(), net.buffers()):
            if p.dim() == 1 and p.is_floating_point():
                p.data.add_(randn(*p.shape).abs() * 0.5)
        others = torch.Generator().manual_seed(seed + 1)
        for p in net.parameters() if noise else ():
            p.data.mul_(1 + noise * torch.randn(p.shape, generator=others, dtype=torch.float64))
        own.before(net)
        is_fused = is_converted and own.MODE == "fuse"
        if is_converted and not is_fused:
            pk.convert(net, memory=own.MEMORY)
        own.after(net)
        net = own.prepare(net)
    except Exception as error:
        _note_error(trial, "build", error)
        return trial
    has_fused = False
    for step in range(STEPS):
        if step == STEPS - 1:
            net.eval()
        x = own.make_input(lambda *shape: randn(*shape) * (1 + noise * randn(*shape)))
        net.zero_grad()
        if is_fused:
            with pk.fuse(memory=own.MEMORY):
                goes_on = _step(own, net, x, randn, trial, f"step {step}")
        else:
            goes_on = _step(own, net, x, randn, trial, f"step {step}")
        if is_converted and not is_fused:
            has_fused = has_fused or bool(pk.conversion_report(net).fused)
        if not goes_on:
            break
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.sub_(p.grad * 0.01 / (1 + p.grad.norm()))
    return trial._replace(has_fused=has_fused)


def _step(own, net, x, randn, trial, step) -> bool:
    """One call, its gradients, and the state behind; false after an error in backward."""
    seen = trial.observed
    out = None
    try:
        out = own.call(net, x)
    except Exception as error:
        _note_error(trial, f"{step}, forward", error)
    seen[f"{step}: output"] = facts(out)
    tensors = _tensors(out)
    known = [x, *tensors]
    seen[f"{step}: identity"] = [next(i for i, k in enumerate(known) if k is t) for t in known]
    seen[f"{step}: storage"] = [
        next(i for i, k in enumerate(known) if k.data_ptr() == t.data_ptr()) for t in known
    ]
    ok = _gradients(own, out, tensors, x, randn, trial, step)
    seen[f"{step}: input"] = facts(x)
    for name, p in net.named_parameters():
        seen[f"{step}: gradient of {name}"] = None if p.grad is None else facts(p.grad)
        seen[f"{step}: parameter {name}"] = p.requires_grad
    for name, b in net.named_buffers():
        seen[f"{step}: buffer {name}"] = facts(b)
    for name, m in net.named_modules():
        if not isinstance(m, torch.nn.parallel.DistributedDataParallel):  # it lists the same
            seen[f"{step}: attributes of {name}"] = facts(vars(m))
    seen[f"{step}: seen by hooks"] = list(own.log)
    own.log.clear()
    states = (random.getstate(), torch.get_rng_state().tolist())
    seen[f"{step}: random state"] = str(hash(str(states)))
    return ok


def _gradients(own, out, tensors, x, randn, trial, step) -> bool:
    wanted = [t for t in tensors if t.requires_grad]
    if not wanted:
        return True
    loss = sum((t * randn(*t.shape)).sum() for t in wanted)
    try:
        if own.GRADIENTS != "backward":
            found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
            trial.observed[f"{step}: gradients by outputs"] = facts(found)
        if own.GRADIENTS != "returned":
            loss.backward()
    except Exception as error:
        _note_error(trial, f"{step}, backward", error)
        return False
    return True


def _note_error(trial: Trial, place: str, error: Exception) -> None:
    trial.errors[place] = type(error).__name__
    trial.messages[place] = str(error).splitlines()[0][:200] if str(error) else ""


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def differences(a: Trial, b: Trial, has_checkpoint: bool = False) -> list[str]:
    """What differs between trials of the plain model and of the converted one.

    Recomputation by `torch.utils.checkpoint` updates running statistics again, unless converted.
    """
    found = []
    for key in sorted({*a.errors, *b.errors}, key=lambda k: (k != "build", k[:6], "backward" in k)):
        if a.errors.get(key) != b.errors.get(key):
            if "backward" in key and key in a.errors:
                break  # plain PyTorch refuses what works converted, or raises another error
            errors = [f"{t.errors.get(key)} {t.messages.get(key, '')}" for t in (a, b)]
            found.append(f"{key}: raised {errors[0]}, converted {errors[1]}")
            if "backward" in key:
                break  # the converted model was not called again
    steps = [f"step {i}" for i in range(1 if has_checkpoint else STEPS)]
    ended = next((s for s in steps if f"{s}, backward" in a.errors), None)
    for step in steps:
        names = [k for k in a.observed if k.startswith(step)]
        missing = set(names) ^ {k for k in b.observed if k.startswith(step)}
        if step == ended:
            names = [k for k in names if k == f"{step}: output"]
        elif missing:
            found.append(f"seen by one: {sorted(missing)}")
        if has_checkpoint:  # which also stops calling hooks as soon as nothing more is saved
            left_out = ("running", "batches", "seen by hooks")
            names = [k for k in names if not any(word in k for word in left_out)]
        scale = max([0.0, *(_norm(a.observed[k]) for k in names if "gradient of" in k)])
        for k in names:
            if k in b.observed:
                found += _compare(k, a.observed[k], b.observed[k], scale if "gradient" in k else 0)
        if step == ended:
            break
    return found


def _norm(value: object) -> float:
    return float(value.values.norm()) if isinstance(value, TensorFacts) else 0.0


def _compare(path: str, a: object, b: object, scale: float) -> list[str]:
    if isinstance(a, TensorFacts) and isinstance(b, TensorFacts):
        names = [n for n in TensorFacts._fields[:-2] if getattr(a, n) != getattr(b, n)]
        is_kept = "seen by hooks" in path or "attributes of" in path
        if is_kept and "is_plain" in names:  # not computed yet, or held by an autograd function
            names.remove("is_plain")
        if "gradient of" in path and "stride" in names and _same_order(a, b):
            names.remove("stride")
        found = [f"{path}: {n} {getattr(a, n)}, converted {getattr(b, n)}" for n in names]
        if a.shape == b.shape and a.dtype == b.dtype:
            found += _compare_values(path, a.values, b.values, scale)
            if (a.grad is None) != (b.grad is None):
                found.append(f"{path}: grad is None {a.grad is None}, {b.grad is None}")
            elif a.grad is not None and a.grad.shape == b.grad.shape:
                found += _compare_values(f"{path}.grad", a.grad, b.grad, scale)
        return found
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i in range(len(a)) for d in _compare(f"{path}[{i}]", a[i], b[i], scale)]
    if type(a) is float and type(b) is float:
        return [] if abs(a - b) <= TOLERANCE * abs(a) or a == b else [f"{path}: {a} {b}"]
    return [] if a == b else [f"{path}: {str(a)[:100]}, converted {str(b)[:100]}"]


def _same_order(a: TensorFacts, b: TensorFacts) -> bool:
    """Whether strides differ only where a size is 1, as those of gradients of weights may."""
    pairs = zip(a.shape, a.stride, b.stride, strict=True) if a.shape == b.shape else ()
    return a.shape == b.shape and all(n == 1 or s == t for n, s, t in pairs)


def _compare_values(path: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> list[str]:
    if not a.is_floating_point():
        return [] if torch.equal(a, b) else [f"{path}: {a.tolist()}, converted {b.tolist()}"]
    if not torch.equal(a.isfinite(), b.isfinite()):
        return [f"{path}: finite values"]
    a, b = (t.nan_to_num(0, 0, 0).double() for t in (a, b))
    error, size = float((a - b).norm()), max(float(a.norm()), scale, 1e-6)
    return [] if error <= TOLERANCE * size else [f"{path}: relative error {error / size:.1e}"]


def check(seed: int, text: str | None = None) -> tuple[list[str], Trial]:
    """The differences of a seed's model, and the converted trial.

    They count only where plain PyTorch repeats itself, and does not amplify rounding.
    """
    text = program(seed) if text is None else text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, converted = run(text, seed, False), run(text, seed, True)
        found = differences(plain, converted, "checkpoint(" in text)
        if "create_graph=True" in text:
            # Second derivatives have strides of their own, and take weights as they are then.
            found = [f for f in found if "seen by hooks" not in f or ": stride" not in f]
            found = [] if ".data = " in text else found
        if (".data = " in text or ".data." in text) and 'MEMORY = "store"' not in text:
            # Backward computes again, with the weights as they are then.
            found = [f for f in found if f.startswith("step 0") and "grad" not in f]
        if "in_thread(" in text:
            # Autograd counts functions for each thread; the counts decide in which order they run.
            found = [f for f in found if "seen by hooks" not in f]
        if found and differences(plain, run(text, seed, False)):
            found = []
        if found and differences(plain, run(text, seed, False, 1e-14)):
            found = []
    random_model_helpers.end_process_group()
    return found, converted


def check_range(first: int, last: int) -> None:
    failed = []
    fused = 0
    for seed in range(first, last):
        found, converted = check(seed)
        fused += converted.has_fused
        if found:
            failed.append(f"seed {seed}: {found[0]}")
    assert not failed, "\n".join(failed)
    assert fused > 0.6 * (last - first)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors are faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_random_models_are_equal():
    check_range(0, 160)


@pytest.mark.slow
def test_more_random_models_are_equal():
    check_range(1000, 2000)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1000), metavar=("A", "B"))
    parser.add_argument("--quiet", action="store_true", help="do not print the models")
    args = parser.parse_args()
    fused, failed, errors = 0, [], collections.Counter()
    for seed in range(*args.seeds):
        found, converted = check(seed)
        fused += converted.has_fused
        errors.update({next(iter(converted.errors), "no error"): 1})
        if found:
            failed.append(seed)
            if not args.quiet:
                print(program(seed))
            print(f"seed {seed}:", *found[:5], sep="\n    ", flush=True)
    tried = args.seeds[1] - args.seeds[0]
    print(f"{tried} models, {fused} with a fused batch norm, {len(failed)} differ: {failed}")
    print("first errors:", dict(errors))


if __name__ == "__main__":
    main()
