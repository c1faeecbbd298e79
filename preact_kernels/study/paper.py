"""Figures of "Identity Mappings in Deep Residual Networks", arXiv 1603.05027.

Test errors in percent, medians of five runs. None: training failed (error above 20%).
"""

PLACEMENTS = {  # table 2, CIFAR-10: ResNet-110 with basic blocks, ResNet-164 with bottlenecks
    "original": {110: 6.61, 164: 5.93},
    "bn-after-addition": {110: 8.17, 164: 6.50},
    "relu-before-addition": {110: 7.84, 164: 6.14},
    "relu-only-preactivation": {110: 6.71, 164: 5.91},
    "full-preactivation": {110: 6.37, 164: 5.46},
}

SHORTCUTS = {  # table 1, CIFAR-10, ResNet-110 with blocks of original placement
    "identity": 6.61,
    "constant-scaling, branch 1": None,
    "constant-scaling, branch 0.5": 12.35,
    "exclusive-gating, bias 0": None,
    "exclusive-gating, bias -6": 8.70,
    "shortcut-only-gating, bias 0": 12.86,
    "shortcut-only-gating, bias -6": 6.91,
    "conv1x1": 12.22,
    "dropout": None,
}

DEPTH = {  # table 3, by data set
    "cifar-10": {
        "original": {110: 6.61, 164: 5.93, 1001: 7.61},
        "full-preactivation": {110: 6.37, 164: 5.46, 1001: 4.92},
    },
    "cifar-100": {
        "original": {164: 25.16, 1001: 27.82},
        "full-preactivation": {164: 24.33, 1001: 22.71},
    },
}
