"""Runs tests of the CPU kernels with each instruction set, collected once.

`python -m tests.kernels.each_instruction_set generic avx2` runs each in a child process that pytest
forks when it has collected the tests, before the library has chosen an instruction set.
"""

import importlib
import itertools
import os
import sys

import pytest
import torch

from preact_kernels.kernels import cpu
from tests.cases import covering

# Limits oneDNN, which runs PyTorch's convolutions, to the same instruction set.
ONEDNN = {
    "generic": "SSE41",
    "avx2": "AVX2",
    "avx512": "AVX512_CORE",
    "avx512_bf16": "AVX512_CORE_BF16",
}
# Tests of what kernels compute.
TESTS = {
    "ops/test_bn_relu": (
        "forward_backward_and_running_statistics",
        "nan_and_inf_spread_as_in_eager",
    ),
    "ops/test_norm_act": (
        "constant_groups_are_zero_before_weight_and_bias",
        "gradients_depend_on_the_sign_of_the_rounded_pre_activation",
    ),
    "ops/test_bn_stats": ("mean_and_variance_of_many_samples",),
    "ops/test_residual_add": ("equals_the_sum_to_the_bit",),
    "ops/test_bn_relu_conv": (
        "forward_backward_and_running_statistics",
        "strips_and_packed_weights_on_the_cpu",
        "infinity_at_the_sides_of_an_odd_row",
        "nan_and_inf_spread_as_in_eager",
        "which_results_are_not_finite_for_taps_outside_of_the_image",
    ),
    "kernels/test_any_norm_act": (
        "one_pass_gives_the_bits_of_two",
        "values_and_derivatives_over_the_whole_range",
        "norm_ops_equal_their_specification",
    ),
    "kernels/test_norm_act_residual": (
        "a_residual_is_added_to_the_rounded_pre_activation",
        "the_gradient_passes_where_y_is_positive_or_nan",
        "planes_equal_their_specification",
    ),
    "kernels/test_cpu_dropout": ("masks_of_any_length",),
    "kernels/test_cpu_layout": ("every_bit_is_kept",),
    "kernels/test_cpu_depthwise": (
        "it_equals_the_gradient_of_pytorch",
        "long_rows_are_summed_in_parts",
        "taps_outside_of_the_image_are_left_out",
    ),
    "kernels/test_cpu_norm_act_conv": (
        "forward_and_backward",
        "every_activation_in_the_prologue_and_in_the_input_gradient",
    ),
    "kernels/test_cpu_winograd": (
        "shapes_that_are_served",
        "every_row_is_by_minimal_filtering",
        "weight_gradients_are_by_minimal_filtering",
        "forward_and_backward",
        "strips_of_zeros_beside_others",
        "a_value_out_of_range_stays_where_it_is_read",
        "negated_weights_negate_every_bit",
    ),
    "kernels/test_cpu_weight_stationary": (
        "forward_and_backward",
        "a_last_channel_of_a_weight_that_is_not_finite",
        "a_pixel_that_is_not_finite_stays_where_it_is_read",
        "a_weight_that_is_not_finite_stays_inside_the_image",
    ),
}
# The test of where convolutions are left to PyTorch. The other code above the kernels is the same
# for every instruction set.
ROUTES = "ops/test_backend.py::test_backend_for_says_which_convolution_runs"
# Files with products. From AVX-512 on, only products of bfloat16 differ.
OF_PRODUCTS = (
    "ops/test_bn_relu_conv",
    "kernels/test_cpu_norm_act_conv",
    "kernels/test_cpu_weight_stationary",
)
# Tests of the CPU kernels, also those that name no backend.
_NOT_CPU = "not reference and not triton and not cuda"
SELECTED = ["-m", "not slow", "-k", _NOT_CPU]
# Cases of the code that divides work into parts, which is the same for every instruction set.
_OF_PARTS = "two_groups or large_images or large_weight"


def flattened(params):
    """The arguments of a case, and each part of an argument that is a tuple."""
    for name, value in params.items():
        parts = value if type(value) is tuple else (value,)
        yield from ((f"{name} {index}", part) for index, part in enumerate(parts))


def differing(isa, items):
    """Cases in which every argument of a test takes each of its values.

    For avx512 and what follows it, only cases with products of bfloat16.
    """
    only_products = isa not in ("generic", "avx2")
    other_files = {f"{file}.py" for file in TESTS if file not in OF_PRODUCTS}
    for test, group in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        if only_products and test.partition("::")[0].removeprefix("tests/") in other_files:
            continue
        cases = {}
        for item in group:
            values = dict(flattened(item.callspec.params if hasattr(item, "callspec") else {}))
            dtypes = {v for v in values.values() if isinstance(v, torch.dtype)}
            if not only_products or not dtypes or torch.bfloat16 in dtypes:
                cases[item] = {name: id(value) for name, value in values.items()}
        # A test without arguments has one case.
        chosen = (covering([*cases.values()], 1) or [0]) if cases else ()
        yield from ([*cases][index] for index in chosen)


class EachInstructionSet:
    """A plugin whose children run the tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        importlib.import_module("torch._dynamo")  # takes seconds: once, and not in each child
        for isa in sys.argv[1:]:
            child = os.fork()
            if not child:
                os.environ["PREACT_KERNELS_CPU_ISA"] = isa
                os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN[isa]
                assert cpu.kernels().instruction_set == isa
                session.items[:] = differing(isa, session.items)
                return None  # to pytest's own loop
            session.testsfailed += os.waitpid(child, 0)[1] != 0
        return True


if __name__ == "__main__":
    files = [f"tests/{file}.py::test_{name}" for file, names in TESTS.items() for name in names]
    files.append(f"tests/{ROUTES}")
    options = ["-q", "-x", "-m", "not slow", "-k", f"{_NOT_CPU} and not ({_OF_PARTS})"]
    options += [f"-pno:{name}" for name in ("xdist", "cacheprovider")]
    status = pytest.main([*options, *files], plugins=[EachInstructionSet()])
    sys.stdout.flush()
    os._exit(status)  # an orderly end takes a second in each child
