// Shared by all launchers: device and stream of a tensor, types, pointers, memory of a grid.
#pragma once

#include "../host/launch.h"
#include "batch_norm.cuh"
#include "device.cuh"
#include "reduction.cuh"

namespace preact_kernels::cuda {

// Makes the device of `x` current during its lifetime. `stream` is its current stream.
class OnDeviceOf {
 public:
#if defined(PK_CUDA_ON_HOST)
  explicit OnDeviceOf(const Tensor&) : stream(nullptr) {}
#else
  explicit OnDeviceOf(const Tensor& x) : guard_(x.get_device_index()) {
    void* current = nullptr;
    PK_CHECK(
        aoti_torch_get_current_cuda_stream(x.get_device_index(), &current) == AOTI_TORCH_SUCCESS,
        "no current stream of CUDA device ", x.get_device_index());
    stream = static_cast<cudaStream_t>(current);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;

 public:
#endif
  cudaStream_t stream;
};

// Calls body(T{}) for the storage type T.
template <class Body>
auto for_dtype(ScalarType dtype, const Body& body) {
  if (dtype == ScalarType::Float) return body(float{});
  if (dtype == ScalarType::Half) return body(Half{});
  PK_CHECK(dtype == ScalarType::BFloat16, "x: expected dtype ", kDtypes);
  return body(BFloat16{});
}
template <class Body>
auto for_dtype(const Tensor& x, const Body& body) {
  return for_dtype(x.scalar_type(), body);
}

// Pointers into the tensors of a batch norm over `pixels`. Only convolutions read the moments.
inline NormPointers pointers(const Norm& norm, int64_t pixels = 0) {
  return {data<float>(norm.mean),     data<float>(norm.var),        data<float>(norm.weight),
          data<float>(norm.bias),     static_cast<float>(norm.eps), norm.moments,
          cuda::Count(double(pixels))};
}

inline AffineStepPointers pointers(const AffineStep& step) {
  return {data<char>(step.skip),
          data<char>(step.x),
          pointers(step.norm),
          data<float>(step.sums),
          static_cast<float>(step.inv_count),
          step.accumulated};
}

// Bytes from torch's caching allocator, which reuses them in the order of the stream.
inline Tensor empty_bytes(const Tensor& like, int64_t count) {
  return new_tensor(like, {count}, ScalarType::Byte);
}

// `GridSums` and the tensor that owns the memory, which may be freed after the launch.
struct OwnedGridSums {
  Tensor owner;
  GridSums sums;

  OwnedGridSums(const Tensor& like, dim3 thread_blocks, int64_t channels, cudaStream_t stream)
      : OwnedGridSums(like, 1, 2 * int64_t(thread_blocks.x), thread_blocks.y, channels, stream) {}
  // Partials [images, lines, channels], and `counters` counters of each image.
  OwnedGridSums(const Tensor& like, int64_t images, int64_t lines, int64_t counters,
                int64_t channels, cudaStream_t stream)
      : OwnedGridSums(like, images * lines * channels * int64_t(sizeof(double)),
                      images * counters * int64_t(sizeof(unsigned)), stream) {}

 private:
  OwnedGridSums(const Tensor& like, int64_t partial_bytes, int64_t counter_bytes,
                cudaStream_t stream)
      : owner(empty_bytes(like, partial_bytes + counter_bytes)) {
    char* memory = mutable_data<char>(owner);
    sums.partials = reinterpret_cast<double*>(memory);
    sums.counter = reinterpret_cast<unsigned*>(memory + partial_bytes);
    fill_zeros(sums.counter, counter_bytes, stream);
  }
};

}  // namespace preact_kernels::cuda
