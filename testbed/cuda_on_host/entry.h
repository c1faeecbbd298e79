// Launches a kernel for Python.
#pragma once

#include <string>

#include "cuda/device.cuh"

// An entry point returns the message of an exception, or an empty text.
#define PK_ENTRY extern "C" __attribute__((visibility("default"))) const char*

// Calls `launches`, and waits until all have run.
template <class Body>
const char* run_all(const Body& launches) {
  static std::string message;
  message.clear();
  try {
    launches();
#if defined(PK_CUDA_ON_HOST)
    cuda_on_host::synchronize();
#else
    preact_kernels::cuda::check_cuda("cudaDeviceSynchronize", cudaDeviceSynchronize());
#endif
  } catch (const std::exception& error) {
    message = error.what();
#if defined(PK_CUDA_ON_HOST)
    cuda_on_host::drop_launches();  // what was launched before holds pointers of the caller
#endif
  }
  return message.c_str();
}

template <class Params>
const char* run(const char* name, void (*kernel)(Params), unsigned thread_blocks, unsigned threads,
                size_t shared_bytes, const Params& params,
                preact_kernels::cuda::LaunchKind kind = preact_kernels::cuda::LaunchKind::kPlain) {
  return run_all([&] {
    preact_kernels::cuda::launch(name, kernel, dim3(thread_blocks), dim3(threads), shared_bytes,
                                 nullptr, params, kind);
  });
}
