// Included before the source that registers the ops: an op ends when all of its launches have run.
#pragma once

#include <torch/csrc/stable/library.h>

#include "grid.h"

namespace cuda_on_host {

template <class Function, Function* function>
void run_op(StableIValue* stack, uint64_t arguments, uint64_t outputs) {
  try {
    torch::stable::detail::boxer<Function, function>::boxed_fn(stack, arguments, outputs);
  } catch (...) {
    try {
      synchronize();
    } catch (const std::runtime_error&) {  // the first exception counts
    }
    throw;
  }
  synchronize();
}

}  // namespace cuda_on_host

#undef TORCH_BOX
#define TORCH_BOX(function) \
  cuda_on_host::run_op<std::remove_pointer_t<decltype(function)>, (function)>
