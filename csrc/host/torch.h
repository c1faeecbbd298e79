// The headers of torch's stable ABI that both libraries use, before any other of torch.
//
// Under nvcc, torch's headers include Thrust for complex numbers: half of what a file reads.
// Kernels use no types of torch: these are read as by a C++ compiler.
#pragma once

#if defined(__NVCC__)
#pragma push_macro("__CUDACC__")
#pragma push_macro("__CUDA_ARCH__")
#undef __CUDACC__
#undef __CUDA_ARCH__
#endif

#if defined(USE_CUDA) && !defined(PK_CUDA_ON_HOST)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#if defined(__NVCC__)
#pragma pop_macro("__CUDACC__")
#pragma pop_macro("__CUDA_ARCH__")
#endif
