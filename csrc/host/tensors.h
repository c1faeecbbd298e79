// Memory of tensors: pointers into arguments, and allocation of results.
#pragma once

#include "checks.h"

namespace preact_kernels {

template <class T>
const T* data(const Tensor& t) {
  const void* values = t.const_data_ptr();
  // FSDP frees weights.
  STD_TORCH_CHECK(values != nullptr || t.numel() == 0, "the storage of a tensor was freed");
  return static_cast<const T*>(values);
}
template <class T>
const T* data(const std::optional<Tensor>& t) {
  return t.has_value() ? data<T>(*t) : nullptr;
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// An activation without values. Each library defines it.
Tensor empty_nhwc(const Tensor& like, const Activation& size, ScalarType dtype);
inline Tensor empty_nhwc(const Tensor& like, const Activation& size) {
  return empty_nhwc(like, size, like.scalar_type());
}

// An activation in the order of `like`.
inline Tensor empty_dense(const Tensor& like, const Activation& size) {
  return is_planar(like) ? torch::stable::empty_like(like) : empty_nhwc(like, size);
}

inline Tensor empty_statistics(const Tensor& like, int64_t count) {
  return torch::stable::empty({&count, 1}, statistics_dtype(like.scalar_type()), std::nullopt,
                              like.device());
}

// Sums [2, C], or [2, N, C] where the norm has rows.
inline Tensor empty_sums(const Tensor& like, const Activation& size, bool has_rows) {
  const int64_t rows[] = {2, size.images, size.channels}, one_row[] = {2, size.channels};
  const auto dtype = statistics_dtype(like.scalar_type());
  if (has_rows) return torch::stable::empty({rows, 3}, dtype, std::nullopt, like.device());
  return torch::stable::empty({one_row, 2}, dtype, std::nullopt, like.device());
}

// Statistics of each image, [N, C].
inline Statistics new_image_statistics(const Tensor& like, const Activation& size) {
  const int64_t sizes[] = {size.images, size.channels};
  const auto dtype = statistics_dtype(like.scalar_type());
  const auto table = [&] {
    return torch::stable::empty({sizes, 2}, dtype, std::nullopt, like.device());
  };
  return {table(), table(), true};
}

// A tensor without values, for an output that is not wanted.
inline Tensor absent(const Tensor& like) {
  const int64_t none = 0;
  return torch::stable::empty({&none, 1}, like.scalar_type(), std::nullopt, like.device());
}

inline Statistics new_statistics(const Tensor& like, bool are_wanted, int64_t channels) {
  const int64_t count = are_wanted ? channels : 0;
  return {empty_statistics(like, count), empty_statistics(like, count), are_wanted};
}

}  // namespace preact_kernels
