"""Fused norm, activation and convolution, equal to plain PyTorch."""

from preact_kernels import torch_compat as torch_compat  # first: it refuses older torch
from preact_kernels.conversion.convert import conversion_report, convert, fuse, revert
from preact_kernels.conversion.report import ConversionReport
from preact_kernels.graphs import graphed_step
from preact_kernels.memory import saved_bytes
from preact_kernels.models.preact_resnet import PreActResNet, preact_resnet
from preact_kernels.modules.bn_relu import BNReLU2d
from preact_kernels.modules.bn_relu_conv import BNReLUConv2d
from preact_kernels.modules.norm_act import NormAct
from preact_kernels.modules.norm_act_conv import NormActConv
from preact_kernels.modules.preact_block import PreActBasicBlock, PreActBottleneck
from preact_kernels.modules.preact_stage import PreActStage
from preact_kernels.ops.dispatch import (
    BackendError,
    available_backends,
    backend_for,
    set_backend,
    use_backend,
)
from preact_kernels.ops.functions import (
    batch_norm_act,
    batch_norm_act_conv,
    bn_relu,
    bn_relu_conv2d,
    group_norm_act,
    group_norm_act_conv,
)
from preact_kernels.ops.residual_add import residual_add
from preact_kernels.planning import MemoryPlan, plan_memory

__version__ = "0.1.0"

__all__ = [
    "BNReLU2d",
    "BNReLUConv2d",
    "BackendError",
    "ConversionReport",
    "MemoryPlan",
    "NormAct",
    "NormActConv",
    "PreActBasicBlock",
    "PreActBottleneck",
    "PreActResNet",
    "PreActStage",
    "available_backends",
    "backend_for",
    "batch_norm_act",
    "batch_norm_act_conv",
    "bn_relu",
    "bn_relu_conv2d",
    "conversion_report",
    "convert",
    "fuse",
    "graphed_step",
    "group_norm_act",
    "group_norm_act_conv",
    "plan_memory",
    "preact_resnet",
    "residual_add",
    "revert",
    "saved_bytes",
    "set_backend",
    "use_backend",
]
