// Memory of tensors: that of arguments, and new memory for results.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "checks.h"

namespace preact_kernels {

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

inline Tensor empty_nhwc(const Tensor& like, const Activation& size) {
  const int64_t sizes[] = {size.images, size.channels, size.height, size.width};
  return torch::stable::empty({sizes, 4}, like.scalar_type(), std::nullopt, like.device(),
                              std::nullopt, torch::headeronly::MemoryFormat::ChannelsLast);
}

inline Tensor empty_statistics(const Tensor& like, int64_t count) {
  return torch::stable::empty({&count, 1}, statistics_dtype(like.scalar_type()), std::nullopt,
                              like.device());
}

// In place of an output that is not wanted.
inline Tensor absent(const Tensor& like) {
  const int64_t none = 0;
  return torch::stable::empty({&none, 1}, like.scalar_type(), std::nullopt, like.device());
}

inline Tensor empty_sums(const Tensor& like, int64_t channels) {
  const int64_t sizes[] = {2, channels};
  return torch::stable::empty({sizes, 2}, statistics_dtype(like.scalar_type()), std::nullopt,
                              like.device());
}

}  // namespace preact_kernels
