// Launches a kernel for Python.
#pragma once

#include <string>

#include "cuda/device.cuh"

// An entry point returns what was thrown, or an empty text.
#define PK_ENTRY extern "C" __attribute__((visibility("default"))) const char*

template <class Params>
const char* run(const char* name, void (*kernel)(Params), unsigned blocks, unsigned threads,
                size_t shared_bytes, const Params& params) {
  static std::string message;
  message.clear();
  try {
    preact_kernels::cuda::launch(name, kernel, dim3(blocks), dim3(threads), shared_bytes, nullptr,
                                 params);
#if !defined(PK_CUDA_ON_HOST)
    preact_kernels::cuda::check_cuda(name, cudaDeviceSynchronize());
#endif
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}
