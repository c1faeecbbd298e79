"""The check of results before a benchmark: accepted and refused results, cached computations."""

import functools

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from bench import correctness
from bench.contenders import BY_NAME, Contender, Network
from bench.correctness import SMALLEST, Problem, judge, judged_network
from preact_kernels.study import data

CPU = torch.device("cpu")
BOTTLENECKS, BASIC = Network(164), Network(20)  # judged with 29 and 14 layers


def planted(name, prepare):
    return Contender(name, "everything", prepare=prepare)


def change_outputs(change):
    """Changes the output of each block's last convolution."""

    def prepare(model):
        for stage in model.stages:
            for block in stage:
                conv = getattr(block, f"conv{block.unit_count}")
                conv.register_forward_hook(lambda module, inputs, y: change(y))

    return prepare


def change_gradients(change, is_changed):
    """Changes the gradients of parameters."""

    def prepare(model):
        for parameter in model.parameters():
            if is_changed(parameter):
                parameter.register_hook(change)

    return prepare


def scale_input_gradients(model):
    """Multiplies the input gradient of every stage by 1.1."""

    def hook(stage, inputs):
        if inputs[0].requires_grad:
            inputs[0].register_hook(functools.partial(scaled, 1.1))

    for stage in model.stages:
        stage.register_forward_pre_hook(hook)


def scaled(factor, tensor):
    return tensor * factor


def without_last_channel(y):
    return torch.cat([y[:, :-1], torch.zeros_like(y[:, -1:])], 1)


def without_last_pixels(y):
    is_kept = torch.ones_like(y[:, :1]).flatten()
    is_kept[-16:] = 0
    return y * is_kept.view_as(y[:, :1])


def without_last_column(gradient):
    return torch.cat([gradient[..., :-1], torch.zeros_like(gradient[..., -1:])], -1)


FAULTS = {
    "no last channel": change_outputs(without_last_channel),
    "no last 16 pixels": change_outputs(without_last_pixels),
    "outputs x 1.05": change_outputs(functools.partial(scaled, 1.05)),
    "input gradients x 1.1": scale_input_gradients,
    "conv gradients x 1.3": change_gradients(functools.partial(scaled, 1.3), lambda p: p.ndim == 4),
    "bn gradients x 1.3": change_gradients(functools.partial(scaled, 1.3), lambda p: p.ndim == 1),
    "no last column": change_gradients(
        without_last_column, lambda p: p.ndim == 4 and p.shape[-1] == 3
    ),
}


class TF32Convolution(torch.autograd.Function):
    """A convolution that rounds its operands to TF32, as a GPU does."""

    @staticmethod
    def rounded(x):
        """Rounds `x` to 10 bits after the point, to nearest, ties to even."""
        bits = x.view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def forward(ctx, x, weight, conv):
        x, weight = TF32Convolution.rounded(x), TF32Convolution.rounded(weight)
        ctx.save_for_backward(x, weight)
        ctx.geometry = conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups
        return torch.ops.aten.convolution(x, weight, None, *ctx.geometry)

    @staticmethod
    def backward(ctx, dy):
        operands = TF32Convolution.rounded(dy), *ctx.saved_tensors
        wanted = [True, True, False]
        dx, dweight, _ = torch.ops.aten.convolution_backward(*operands, None, *ctx.geometry, wanted)
        return dx, dweight, None


def in_tf32(model):
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.forward = functools.partial(_in_tf32, module)


def _in_tf32(conv, x):
    return TF32Convolution.apply(x, conv.weight, conv)


def faulty_in_tf32(fault):
    def prepare(model):
        in_tf32(model)
        fault(model)

    return prepare


digits = functools.cache(data.load_digits)


def verdicts_of(contenders, network, dtype):
    return {c.name: judge(c, network, digits(), 4, CPU, dtype) for c in contenders}


RIGHT = [BY_NAME[n] for n in ("eager-nchw", "eager-channels-last", "fused-store", "fused-rebuild")]


@pytest.fixture(scope="module")
def bfloat16_verdicts():
    faulty = [planted(*item) for item in FAULTS.items()]
    return verdicts_of([*RIGHT, *faulty], BOTTLENECKS, torch.bfloat16)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_bfloat16(fault, bfloat16_verdicts):
    assert bfloat16_verdicts[fault].correct == "no"
    assert bfloat16_verdicts[fault].note.startswith("wrong results on resnet-29: ")
    assert "stage" in bfloat16_verdicts[fault].note


def test_right_results_are_accepted_in_bfloat16(bfloat16_verdicts):
    for contender in RIGHT:
        verdict = bfloat16_verdicts[contender.name]
        assert (verdict.correct, verdict.note) == ("yes", ""), contender.name
        assert verdict.deviations["stage conv gradients"] < 0.05, contender.name


def test_in_tf32_rounded_and_exact_operands_are_accepted_and_faults_are_found(monkeypatch):
    monkeypatch.setattr(correctness, "is_tf32", lambda dtype, device: dtype == torch.float32)
    names = ("outputs x 1.05", "conv gradients x 1.3", "bn gradients x 1.3")
    faulty = [planted(name, faulty_in_tf32(FAULTS[name])) for name in names]
    right = [*RIGHT[:3], planted("TF32", in_tf32)]
    verdicts = verdicts_of([*right, *faulty], BASIC, torch.float32)
    for contender in right:
        verdict = verdicts.pop(contender.name)
        assert (verdict.correct, verdict.note) == ("yes", ""), contender.name
        assert (verdict.deviations["logits"] > 1e-4) == (contender.name == "TF32")
    for name, verdict in verdicts.items():
        assert verdict.note.startswith("wrong results on resnet-14: "), name
        assert "stage" in verdict.note, name


def test_in_exact_float32_operands_in_tf32_and_wrong_gradients_are_refused():
    wrong = {
        "TF32": in_tf32,
        "conv gradients x 1.3": FAULTS["conv gradients x 1.3"],
        "no last channel": FAULTS["no last channel"],
        "NaN": change_gradients(functools.partial(scaled, torch.nan), lambda p: p.shape == (10,)),
    }
    contenders = [RIGHT[0], *(planted(*item) for item in wrong.items())]
    verdicts = verdicts_of(contenders, BASIC, torch.float32)
    assert verdicts.pop("eager-nchw").correct == "yes"
    assert {v.correct for v in verdicts.values()} == {"no"}
    assert "logits deviates" in verdicts["TF32"].note
    # No single gradient exceeds its limit.
    assert ": gradients deviates by 1.8e-01" in verdicts["conv gradients x 1.3"].note
    assert "the worst" not in verdicts["conv gradients x 1.3"].note
    assert ": gradients deviates by nan" in verdicts["NaN"].note


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_gradient_is_found(dtype):
    def forget(unit, model):
        getattr(model.stages[1][1], unit).weight.register_hook(torch.zeros_like)

    for unit in ("conv1", "bn2"):
        forgetful = planted(unit, functools.partial(forget, unit))
        verdict = judge(forgetful, BASIC, digits(), 4, CPU, dtype)
        assert verdict.correct == "no"
        assert "the worst gradient deviates by 1.0e+00" in verdict.note


def test_a_nan_in_one_stage_is_not_lost_among_others():
    one = torch.ones(1, dtype=torch.float64)
    found = [{"outputs": [y]} for y in (one, one * torch.nan, 2 * one)]
    deviations = correctness.deviations(found, [{"outputs": [one]}] * 3)
    assert str(deviations) == "{'outputs': nan}"


def test_truth_and_eager_are_computed_once_and_fail_every_time(monkeypatch):
    computed, results = [], Problem.results

    def counted(problem, contender, dtype):
        computed.append(contender.name)
        if failing and contender in correctness.EAGER:
            raise RuntimeError("no such thing")
        return results(problem, contender, dtype)

    monkeypatch.setattr(Problem, "results", counted)
    images, failing = digits(), True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such thing"):
            judge(BY_NAME["fused-store"], Network(8), images, 2, CPU, torch.float32)
    assert computed == ["eager-nchw"] * 2
    computed, failing = [], False
    for name in ("fused-store", "fused-rebuild", "eager-nchw"):
        judge(BY_NAME[name], Network(8), images, 2, CPU, torch.float32)
    eager = ["eager-nchw", "eager-nchw", "eager-channels-last"]
    assert computed == [*eager, "fused-store", "fused-rebuild"]


def test_rounding_decides_how_deep_a_network_is_judged(monkeypatch):
    gpu, net = torch.device("cuda"), Network(1001)
    assert judged_network(net, torch.float32, CPU).depth == 164
    assert judged_network(net, torch.bfloat16, CPU).depth == 29
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert judged_network(net, torch.float32, gpu).depth == 29
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert judged_network(net, torch.float32, gpu).depth == 164
    for family, depths in SMALLEST.items():
        for block, depth in depths.items():
            assert Network(depth, family=family).block == block


def test_a_wide_network_is_judged_on_images_of_its_size():
    net = Network(18, family="imagenet-resnet")
    problem = Problem.of(net, digits(), 1, CPU, torch.bfloat16)
    assert problem.images.shape == (1, 3, 224, 224)
    assert problem.stage_tensors[0][0].shape == (1, 64, 56, 56)
