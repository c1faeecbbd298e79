// The sums of the affine step of a group norm, and the gradients of its weight and bias.

#include "on_device.h"

namespace preact_kernels {
namespace cuda {

struct PoolSumsParams {
  const float* sums;    // [2, images, channels]
  const float* weight;  // [channels], or a row for each image
  int64_t weight_stride;
  float* pooled;  // [2, images, channels]
  float* totals;  // [2, channels]
  int64_t images;
  int channels, group_channels;
  PixelRows threads;  // a column for each of some channels of a group, a row for each image
};

// pooled = the mean of weight * sums over the channels of the group blockIdx.x, for each image;
// totals = the sums over all images.
__global__ void __launch_bounds__(kThreads) pool_sums_kernel(PoolSumsParams p) {
  double* shared = reinterpret_cast<double*>(dynamic_shared());  // [2, kThreads]
  const int lanes = p.threads.columns, rows = p.threads.thread_block_pixels;
  const int lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  const int first = blockIdx.x * p.group_channels, last = first + p.group_channels;
  const int64_t second = p.images * p.channels;
  for (int64_t image = row; image - row < p.images; image += rows) {
    const int64_t at = image * p.channels;
    double mean[2] = {};
    for (int c = first + lane; c < last && image < p.images; c += lanes) {
      const double weight = p.weight[image * p.weight_stride + c];
      mean[0] += weight * p.sums[at + c];
      mean[1] += weight * p.sums[second + at + c];
    }
    // Lanes of an image are in one warp.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        mean[i] += __shfl_xor_sync(~0u, mean[i], distance);
      }
      mean[i] /= p.group_channels;
    }
    for (int c = first + lane; c < last && image < p.images; c += lanes) {
      p.pooled[at + c] = static_cast<float>(mean[0]);
      p.pooled[second + at + c] = static_cast<float>(mean[1]);
    }
  }
  for (int begin = first; begin < last; begin += lanes) {
    const int c = begin + lane;
    double total[2] = {};
    for (int64_t image = row; image < p.images && c < last; image += rows) {
      total[0] += p.sums[image * p.channels + c];
      total[1] += p.sums[second + image * p.channels + c];
    }
    sum_over_rows(total, row, p.threads, shared);
    if (row == 0 && c < last) {
      p.totals[c] = static_cast<float>(shared[threadIdx.x]);
      p.totals[p.channels + c] = static_cast<float>(shared[kThreads + threadIdx.x]);
    }
  }
}

}  // namespace cuda

using namespace cuda;

// The results of `Kernels.pool_sums`. A thread block owns a group of channels.
std::tuple<Tensor, Tensor> pool_sums(const Tensor& sums, const Tensor& weight, int64_t groups) {
  const auto check_float = [](const char* name, const Tensor& t) {
    check_tensor(name, t);
    PK_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous(), name,
             ": expected contiguous float32 values");
  };
  check_sums("sums", sums);
  check_float("sums", sums);
  check_float("weight", weight);
  PK_CHECK(sums.dim() == 3 && sums.sizes()[0] == 2, "sums: expected [2, N, C]");
  const int64_t images = sums.sizes()[1], channels = sums.sizes()[2];
  const bool has_rows = weight.dim() == 2;
  PK_CHECK(weight.numel() == (has_rows ? images : 1) * channels &&
               weight.sizes()[weight.dim() - 1] == channels,
           "weight: expected [C] or [N, C]");
  PK_CHECK(groups > 0 && channels % groups == 0, "groups: expected a divisor of the channels ",
           channels, ", got ", groups);
  const Tensor pooled = new_tensor(sums, {2, images, channels}, ScalarType::Float);
  const Tensor totals = new_tensor(sums, {2, channels}, ScalarType::Float);
  if (channels == 0) return {pooled, totals};
  const OnDeviceOf on(sums);
  const int group_channels = static_cast<int>(channels / groups);
  int lanes = 1;
  while (lanes < group_channels && lanes < 32) lanes *= 2;
  PixelRows threads{};
  threads.columns = lanes, threads.thread_block_pixels = kThreads / lanes;
  const PoolSumsParams params{data<float>(sums),
                              data<float>(weight),
                              has_rows ? channels : 0,
                              mutable_data<float>(pooled),
                              mutable_data<float>(totals),
                              images,
                              static_cast<int>(channels),
                              group_channels,
                              threads};
  launch("pool_sums", pool_sums_kernel, dim3(static_cast<unsigned>(groups)), kThreads,
         2 * kThreadBlockSumBytes, on.stream, params);
  return {pooled, totals};
}

}  // namespace preact_kernels
