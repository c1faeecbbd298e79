"""The check of results before a benchmark: which results are accepted and refused."""

import torch
from torch import nn

from bench import correctness
from bench.contenders import BY_NAME, Contender, Network
from bench.correctness import SMALLEST, judge, judged_network

CPU = torch.device("cpu")


def change_outputs(change):
    """Changes the output of each block's last convolution."""

    def prepare(model):
        for stage in model.stages:
            for block in stage:
                conv = getattr(block, f"conv{block.unit_count}")
                conv.register_forward_hook(lambda module, inputs, y: change(y))

    return prepare


def scale_gradients(factor, is_changed):
    """Scales the gradients of some parameters."""

    def prepare(model):
        for parameter in model.parameters():
            if is_changed(parameter):
                parameter.register_hook(lambda gradient: gradient * factor)

    return prepare


def scale_input_gradients(model):
    for stage in model.stages:
        stage.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 1.1,))


def in_tf32(model):
    """Rounds the inputs of convolutions to the 10 bits after the point that TF32 has."""

    def rounded(x):
        bits = x.detach().view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda _, x: x[0] + (rounded(x[0]) - x[0].detach()))


FAULTS = {
    "outputs x 1.05": change_outputs(lambda y: y * 1.05),
    "input gradients x 1.1": scale_input_gradients,
    "conv gradients x 1.3": scale_gradients(1.3, lambda p: p.ndim == 4),
    "bn gradients x 1.3": scale_gradients(1.3, lambda p: p.ndim == 1),
    "one gradient is 0": lambda m: m.stages[1][1].bn2.weight.register_hook(torch.zeros_like),
}
RIGHT = {n: BY_NAME[n] for n in ("eager-channels-last", "fused-store")}


def verdicts_of(faults, dtype, network, accepted=()):
    """Judges right contenders, and ones with faults, which are refused if not `accepted`."""
    planted = {name: Contender(name, "everything", prepare=p) for name, p in faults.items()}
    verdicts = {n: judge(c, Network(20), 4, CPU, dtype) for n, c in (RIGHT | planted).items()}
    for name, verdict in verdicts.items():
        if name in {*RIGHT, *accepted}:
            assert (verdict.correct, verdict.note) == ("yes", ""), name
        else:
            assert verdict.correct == "no", name
            assert verdict.note.startswith(f"wrong results on {network}: "), name
    return verdicts


def test_every_fault_is_found_in_bfloat16_and_right_results_are_accepted():
    verdicts = verdicts_of(FAULTS, torch.bfloat16, "resnet-14")
    assert all("stage" in verdicts[name].note for name in [*FAULTS][:-1])
    assert "the worst gradient deviates by 1.0e+00" in verdicts["one gradient is 0"].note


def test_in_tf32_rounded_and_exact_operands_are_accepted_and_faults_are_found(monkeypatch):
    monkeypatch.setattr(correctness, "is_tf32", lambda dtype, device: dtype == torch.float32)

    contenders = {"TF32": in_tf32, "outputs x 1.05": FAULTS["outputs x 1.05"]}
    verdicts = verdicts_of(contenders, torch.float32, "resnet-14", accepted=["TF32"])
    assert verdicts["TF32"].deviations["logits"] > 1e-4


def test_in_exact_float32_operands_in_tf32_and_wrong_gradients_are_refused():
    wrong = {
        "TF32": in_tf32,
        "conv gradients x 1.3": FAULTS["conv gradients x 1.3"],
        "NaN": scale_gradients(torch.nan, lambda p: p.shape == (10,)),
    }
    verdicts = verdicts_of(wrong, torch.float32, "resnet-20")
    assert "logits deviates" in verdicts["TF32"].note
    assert ": gradients deviates by 1.8e-01" in verdicts["conv gradients x 1.3"].note
    assert ": gradients deviates by nan" in verdicts["NaN"].note


def test_a_nan_in_one_stage_is_not_lost_among_others():
    one = torch.ones(1, dtype=torch.float64)
    found = [{"outputs": [y]} for y in (one, one * torch.nan, 2 * one)]
    deviations = correctness.deviations(found, [{"outputs": [one]}] * 3)
    assert str(deviations) == "{'outputs': nan}"


def test_rounding_decides_how_deep_a_network_is_judged(monkeypatch):
    gpu, net = torch.device("cuda"), Network(1001)
    for allows, device, dtype, depth in (
        (True, CPU, torch.float32, 164),
        (True, CPU, torch.bfloat16, 29),
        (True, gpu, torch.float32, 29),
        (False, gpu, torch.float32, 164),
    ):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allows)
        assert judged_network(net, dtype, device).depth == depth
    for family, depths in SMALLEST.items():
        for block, depth in depths.items():
            assert Network(depth, family=family).block == block
