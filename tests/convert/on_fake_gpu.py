"""Compares converted models with plain ones on a GPU of fake tensors; a test runs it as a process.

Compares dtype and strides of the output, the input's gradient and all parameters' gradients, with
and without autocast. Prints a line for each difference, and at the end the number of trainings.
"""

import copy
import os
import warnings

import torch
from torch import Tensor, nn

import preact_kernels as pk
from testbed import fake_cuda
from testbed.cuda_on_host import serve_cpu
from testbed.norm_act_models import SongUNet
from testbed.packages import OneInput
from tests.convert.models import MODES, SMALL


def _chain(dim: int, norm: type, **options) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
    norms = [norm(4, 16) if norm is nn.GroupNorm else norm(16, **options) for _ in range(3)]
    layers = [conv(3, 16, 3, padding=1), norms[0], nn.SiLU(), conv(16, 16, 3), norms[1], nn.ReLU()]
    return nn.Sequential(*layers, conv(16, 16, 1), norms[2], nn.SiLU())


def _noisy_images() -> nn.Module:
    return OneInput(SongUNet(16, (1, 2), 1, dropout=0.1), [])  # noise levels: see `compare`


# Constructor, shape of the input.
MODELS = {
    **{
        name: (SMALL[name][0], (2, 3, 8, 8))
        for name in ("wide", "between blocks", "post-activation")
    },
    "U-Net": (_noisy_images, (2, 3, 8, 8)),
    "volumes": (lambda: _chain(3, nn.GroupNorm), (1, 3, 4, 6, 6)),
    "instance norms": (lambda: _chain(2, nn.InstanceNorm2d, affine=True), (2, 3, 8, 8)),
    "sequences": (lambda: _chain(1, nn.BatchNorm1d), (2, 3, 20)),
}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
Metadata = dict[str, tuple]


def described(t: Tensor) -> tuple:
    """Returns dtype, device, shape, and the strides of axes that have any."""
    strides = [s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1]
    return t.dtype, t.device, t.shape, *strides


def trained(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Metadata:
    """Trains a model twice, and returns what the second step gives."""
    for _ in range(2):  # a converted model remembers the first forward
        model.zero_grad(set_to_none=True)
        x = x.detach().requires_grad_()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            y = model(x)
        y.float().square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {"output": y, "x": x.grad, **gradients}
    return {name: described(t) for name, t in found.items() if t is not None}


def compare(name: str, in_channels_last: bool, dtype: torch.dtype | None) -> int:
    """Prints the differences of a model; returns the number of trainings."""
    build, shape = MODELS[name]
    model = build().train()
    with fake_cuda.gpu():
        fake_cuda.to_gpu(model)
        x = torch.empty(shape, device="cuda")
        if in_channels_last:
            x = x.contiguous(memory_format=FORMATS[x.dim()])
            for p in model.parameters():
                if p.dim() == x.dim():
                    p.data = p.data.contiguous(memory_format=FORMATS[x.dim()])
        if isinstance(model, OneInput):
            model.others = [torch.arange(2, device="cuda")]
        expected = trained(copy.deepcopy(model), x, dtype)
        for memory in MODES:
            converted = pk.convert(copy.deepcopy(model), memory=memory)
            fake_cuda.accept_fake_tensors(converted)
            got = trained(converted, x, dtype)
            for key in expected.keys() | got.keys():
                if expected.get(key) != got.get(key):
                    of = f"{name}, {memory}, {dtype}, {'NHWC' if in_channels_last else 'NCHW'}"
                    print(f"{of}: {key}: expected {expected.get(key)}, got {got.get(key)}")
            if not pk.conversion_report(converted).fused:
                print(f"{name}, {memory}: nothing runs fused")
    return 1 + len(MODES)


def main() -> None:
    """Compares all models."""
    os.environ.pop("LD_PRELOAD", None)
    warnings.simplefilter("ignore")  # `copy` asks fake tensors for their addresses
    count = 0
    with serve_cpu.without_running(lambda launch: None):
        for name, (_, shape) in MODELS.items():
            count += compare(name, False, None)
            count += compare(name, len(shape) in FORMATS, torch.bfloat16)
    print(f"{count} trainings")


if __name__ == "__main__":
    main()
