// Memory of tensors: pointers into arguments, and allocation of results.
#pragma once

#include "checks.h"

// Since torch 2.12; null before.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace preact_kernels {

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
const T* data(const std::optional<Tensor>& t) {
  return t.has_value() ? data<T>(*t) : nullptr;
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls allocate(), an allocation by PyTorch. If it fails, throws PyTorch's message if torch
// exports it: the exception itself only names a function of torch.
template <class Allocate>
Tensor allocated(const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception&) {
    const auto reason = torch_exception_get_what_without_backtrace;
    if (reason != nullptr) fail(reason());
    fail(kDevice, " out of memory. If there was memory, PyTorch has printed what failed.");
  }
}

// An uninitialised tensor on the device of `like`.
inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype,
                         std::optional<torch::headeronly::MemoryFormat> format = std::nullopt) {
  return allocated([&] {
    return torch::stable::empty({sizes.begin(), sizes.size()}, dtype, std::nullopt, like.device(),
                                std::nullopt, format);
  });
}

inline Tensor new_like(const Tensor& t) {
  return allocated([&] { return torch::stable::empty_like(t); });
}

// An uninitialised tensor [N, C, H, W]. Each library defines it.
Tensor empty_nhwc(const Tensor& like, const ImageSizes& size, ScalarType dtype);
inline Tensor empty_nhwc(const Tensor& like, const ImageSizes& size) {
  return empty_nhwc(like, size, like.scalar_type());
}

// An uninitialised tensor [N, C, H, W] in the memory order of `like`.
inline Tensor empty_dense(const Tensor& like, const ImageSizes& size) {
  return is_planar(like) ? new_like(like) : empty_nhwc(like, size);
}

inline Tensor empty_statistics(const Tensor& like, int64_t count) {
  return new_tensor(like, {count}, statistics_dtype(like.scalar_type()));
}

inline Tensor empty_sums(const Tensor& like, const ImageSizes& size, bool has_rows) {
  const ScalarType dtype = statistics_dtype(like.scalar_type());
  if (has_rows) return new_tensor(like, {2, size.images, size.channels}, dtype);
  return new_tensor(like, {2, size.channels}, dtype);
}

inline Statistics new_image_statistics(const Tensor& like, const ImageSizes& size) {
  const ScalarType dtype = statistics_dtype(like.scalar_type());
  const auto table = [&] { return new_tensor(like, {size.images, size.channels}, dtype); };
  return {table(), table(), true};
}

// An empty tensor, for an output that is not wanted.
inline Tensor absent(const Tensor& like) { return new_tensor(like, {0}, like.scalar_type()); }

inline Statistics new_statistics(const Tensor& like, bool are_wanted, int64_t channels) {
  const int64_t count = are_wanted ? channels : 0;
  return {empty_statistics(like, count), empty_statistics(like, count), are_wanted};
}

}  // namespace preact_kernels
