// The workspace of a native call: packs weights, allocates sums, stores results.

#include "conv_launch.cuh"
#include "workspace.cuh"

namespace preact_kernels {
namespace cuda {

// A weight [K, C, R, S] of any strides.
struct UnpackedWeight {
  const void* from;
  void* to;
  int64_t stride_k, stride_c, stride_r, stride_s;
  int values, channels, taps, side;
  bool is_float32;  // else it has the dtype of the operands
};

constexpr int kMostPacked = 448;

template <int kCount>
struct PackWeightsParams {
  UnpackedWeight weights[kCount];
};
static_assert(sizeof(PackWeightsParams<kMostPacked>) <= 32764,
              "more parameters than a kernel may have");

// Packs weights [K, C, R, S] as [K][taps][C]. A row of the grid owns one weight.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
    pack_weights_kernel(const __grid_constant__ PackWeightsParams<kCount> p) {
  const UnpackedWeight& weight = p.weights[blockIdx.y];
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < weight.values; i += gridDim.x * kThreads) {
    const int c = i % weight.channels, tap = i / weight.channels % weight.taps;
    const int k = i / (weight.channels * weight.taps);
    const int64_t at = k * weight.stride_k + c * weight.stride_c +
                       tap / weight.side * weight.stride_r + tap % weight.side * weight.stride_s;
    static_cast<T*>(weight.to)[i] = weight.is_float32
                                        ? from_float<T>(static_cast<const float*>(weight.from)[at])
                                        : static_cast<const T*>(weight.from)[at];
  }
}

struct FinishStatisticsParams {
  Accumulators sums;
  float *mean, *var;  // [channels]
  int channels;
  Count pixels;
};

// Computes mean and var from sums. A thread owns a channel.
__global__ void __launch_bounds__(kThreads) finish_statistics_kernel(FinishStatisticsParams p) {
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= p.channels) return;
  ExactSum sum, squares;
  sum.load(p.sums, c, 0), squares.load(p.sums, c, 1);
  read_moments(sum, squares, p.pixels, p.mean[c], p.var[c]);
}

struct FinishGradientsParams {
  Accumulators accumulated;
  float* sums;  // [values]
  int values;
  WeightGradientPartials partials[kMostWeightGradients];
};

// Rounds sums, and adds up partial weight gradients. A row of the grid owns one weight gradient;
// the first row also the sums, one per thread.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    finish_gradients_kernel(const __grid_constant__ FinishGradientsParams p) {
  wait_for_predecessors();
  let_dependents_start();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (blockIdx.y == 0 && i < p.values) {
    p.sums[i] = static_cast<float>(read_exact(p.accumulated, i, 0));
  }
  add_up<T>(p.partials[blockIdx.y], reinterpret_cast<double*>(dynamic_shared()));
}

}  // namespace cuda

using namespace cuda;

namespace {

// Whether a weight needs no packing.
bool is_packed(const Tensor& weight, ScalarType dtype) {
  const auto size = weight.sizes(), stride = weight.strides();
  int64_t expected = 1;
  for (const int axis : {1, 3, 2, 0}) {
    if (size[axis] > 1 && stride[axis] != expected) return false;
    expected *= size[axis];
  }
  return weight.scalar_type() == dtype &&
         reinterpret_cast<uintptr_t>(weight.const_data_ptr()) % 16 == 0;
}

template <class T, int kCount>
void launch_pack_weights(const std::vector<UnpackedWeight>& weights, size_t begin, size_t end,
                         cudaStream_t stream) {
  PackWeightsParams<kCount> params{};
  int most = 0;
  for (size_t i = begin; i < end; ++i) {
    params.weights[i - begin] = weights[i];
    most = std::max(most, weights[i].values);
  }
  const int thread_blocks = std::min((most + kThreads - 1) / kThreads, 16);
  launch("pack_weights", pack_weights_kernel<T, kCount>, dim3(thread_blocks, unsigned(end - begin)),
         kThreads, 0, stream, params);
}

template <class T>
void pack_weights(Workspace& workspace, const Tensor& like, const std::vector<Tensor>& conv_weights,
                  cudaStream_t stream) {
  std::vector<UnpackedWeight> unpacked;
  std::vector<size_t> places;
  int64_t bytes = 0;
  for (const Tensor& weight : conv_weights) {
    workspace.weights.push_back(weight.const_data_ptr());
    if (is_packed(weight, workspace.dtype)) continue;
    const auto size = weight.sizes(), stride = weight.strides();
    places.push_back(workspace.weights.size() - 1);
    // Channels are multiples of 16: each begins at a multiple of 16 bytes.
    unpacked.push_back({weight.const_data_ptr(), reinterpret_cast<void*>(bytes), stride[0],
                        stride[1], stride[2], stride[3], int(weight.numel()), int(size[1]),
                        int(size[2] * size[3]), int(size[3]),
                        weight.scalar_type() == ScalarType::Float});
    bytes += weight.numel() * int64_t(sizeof(T));
  }
  if (unpacked.empty()) return;
  workspace.owners.push_back(empty_bytes(like, bytes));
  char* memory = mutable_data<char>(workspace.owners.back());
  for (size_t i = 0; i < unpacked.size(); ++i) {
    unpacked[i].to = memory + reinterpret_cast<intptr_t>(unpacked[i].to);
    workspace.weights[places[i]] = unpacked[i].to;
  }
  constexpr int kFew = 8;
  for (size_t i = 0; i < unpacked.size(); i += kMostPacked) {
    const size_t end = std::min(unpacked.size(), i + kMostPacked);
    if (end - i <= kFew) {
      launch_pack_weights<T, kFew>(unpacked, i, end, stream);
    } else {
      launch_pack_weights<T, kMostPacked>(unpacked, i, end, stream);
    }
  }
}

// Stores `sums`, which may be none, and the weight gradients of workspace.partials.
void launch_finish_gradients(Workspace& workspace, const Tensor* sums, cudaStream_t stream) {
  size_t next = 0;
  do {
    FinishGradientsParams params{workspace.sums, nullptr, 0};
    if (sums != nullptr) {
      params.sums = mutable_data<float>(*sums), params.values = int(sums->numel());
      sums = nullptr;
    }
    int thread_blocks = std::max((params.values + kThreads - 1) / kThreads, 1), rows = 0;
    for (; rows < kMostWeightGradients && next < workspace.partials.size(); ++rows, ++next) {
      params.partials[rows] = workspace.partials[next];
      const int width = workspace.partials[next].values(), columns = 4 * lanes_of_sums(width);
      thread_blocks = std::max(thread_blocks, (width + columns - 1) / columns);
    }
    if (params.values == 0 && rows == 0) return;
    rows = std::max(rows, 1);
    for_dtype(workspace.dtype, [&](auto value) {
      launch("finish_gradients", finish_gradients_kernel<decltype(value)>,
             dim3(thread_blocks, rows), kThreads, kPartialsBytes, stream, params,
             workspace.launch_kind());
    });
    workspace.has_launched = true;
  } while (next < workspace.partials.size());
  workspace.partials.clear(), workspace.partials_owners.clear();
  workspace.partials_bytes = 0;
}

// Launches the postponed weight gradients. Their partial sums join workspace.partials.
void launch_postponed(Workspace& workspace, cudaStream_t stream) {
  std::vector<bool> is_launched(workspace.postponed.size());
  for (size_t i = 0; i < workspace.postponed.size(); ++i) {
    if (is_launched[i]) continue;
    const ConvSizes conv = workspace.postponed[i].conv;
    const ConvDtypes dtypes = workspace.postponed[i].dtypes;
    std::vector<const PostponedWeightGradient*> same;
    int tensors = 0;
    for (size_t j = i; j < workspace.postponed.size(); ++j) {
      const PostponedWeightGradient& other = workspace.postponed[j];
      if (other.conv.in_channels != conv.in_channels ||
          other.conv.out_channels != conv.out_channels || other.conv.taps() != conv.taps() ||
          other.dtypes.x != dtypes.x || other.dtypes.y != dtypes.y) {
        continue;
      }
      is_launched[j] = true;
      same.push_back(&other);
      tensors = std::max(tensors, other.params.tensors);
    }
    const BackwardPlan plan = plan_norm_act_conv_backward(conv, dtypes, {tensors, false, true});
    WeightGradients gradients{};
    for (size_t j = 0; j < same.size(); ++j) {
      WeightGradientPartials partials{};
      const Tensor memory = allocate_partials(same[j]->conv_weight, plan.thread_blocks, partials);
      gradients.of[j] = same[j]->params;
      gradients.of[j].grid = plan.grid;
      gradients.of[j].partials = mutable_data<float>(memory);
      workspace.partials.push_back(partials);
      workspace.partials_owners.push_back(memory);
    }
    launch("norm_act_conv_weight_gradients", plan.weight_gradients_kernel,
           dim3(plan.thread_blocks, unsigned(same.size())), kThreads, plan.shared_bytes, stream,
           gradients, workspace.launch_kind());
    workspace.has_launched = true;
  }
  workspace.postponed.clear();
  workspace.postponed_bytes = 0;
}

}  // namespace

std::shared_ptr<Workspace> new_workspace(const Tensor& like, ScalarType dtype,
                                         const std::vector<Tensor>& conv_weights, int64_t sums) {
  auto workspace = std::make_shared<Workspace>();
  workspace->dtype = dtype;
  const OnDeviceOf on(like);
  if (sums > 0) {
    const int64_t bytes = sums * kSumWords * int64_t(sizeof(uint64_t));
    workspace->owners.push_back(empty_bytes(like, bytes));
    uint64_t* words = mutable_data<uint64_t>(workspace->owners.back());
    fill_zeros(words, bytes, on.stream);
    workspace->sums = {words, 0, sums};
  }
  for_dtype(dtype, [&](auto value) {
    pack_weights<decltype(value)>(*workspace, like, conv_weights, on.stream);
  });
  return workspace;
}

Accumulators sums_of(const Workspace& workspace) { return workspace.sums; }

void finish_statistics(Workspace& workspace, const Tensor& mean, const Tensor& var, int64_t count) {
  const int channels = static_cast<int>(mean.numel());
  if (channels == 0) return;
  const OnDeviceOf on(mean);
  const FinishStatisticsParams params{{workspace.sums.words, channels, workspace.sums.stride},
                                      mutable_data<float>(mean),
                                      mutable_data<float>(var),
                                      channels,
                                      Count(double(count))};
  launch("finish_statistics", finish_statistics_kernel, dim3((channels + kThreads - 1) / kThreads),
         kThreads, 0, on.stream, params);
}

Tensor allocate_partials(const Tensor& conv_weight, int thread_blocks,
                         WeightGradientPartials& partials) {
  const auto size = conv_weight.sizes(), stride = conv_weight.strides();
  partials = {nullptr,
              thread_blocks,
              mutable_data<void>(conv_weight),
              conv_weight.scalar_type() == ScalarType::Float,
              int(size[0]),
              int(size[1]),
              int(size[3]),
              stride[0],
              stride[1],
              stride[2],
              stride[3]};
  const Tensor memory = empty_bytes(conv_weight, int64_t(thread_blocks) * partials.values() * 4);
  partials.partials = data<float>(memory);
  return memory;
}

void keep_partials(Workspace& workspace, const WeightGradientPartials& partials,
                   const Tensor& memory, cudaStream_t stream) {
  workspace.partials.push_back(partials);
  workspace.partials_owners.push_back(memory);
  workspace.partials_bytes += memory.numel();
  if (workspace.partials.size() == kMostWeightGradients || workspace.partials_bytes >= kMostBytes) {
    launch_finish_gradients(workspace, nullptr, stream);
  }
}

void make_room(Workspace& workspace, int64_t bytes, cudaStream_t stream) {
  if (workspace.postponed_bytes + bytes <= kMostBytes) return;
  launch_postponed(workspace, stream);
  launch_finish_gradients(workspace, nullptr, stream);
}

void postpone(Workspace& workspace, const PostponedWeightGradient& postponed, cudaStream_t stream) {
  // The convolutions of 16 bottlenecks: 16 x 8 thread blocks or more for each of three shapes,
  // about as many as the 132 multiprocessors of an H100.
  constexpr size_t kEnough = 48;
  static_assert(kEnough <= kMostWeightGradients);
  workspace.postponed.push_back(postponed);
  workspace.postponed_bytes += postponed.bytes;
  if (workspace.postponed.size() < kEnough && workspace.postponed_bytes < kMostBytes) return;
  launch_postponed(workspace, stream);
  launch_finish_gradients(workspace, nullptr, stream);
}

void finish_gradients(Workspace& workspace, const Tensor& like, const Tensor& sums) {
  const OnDeviceOf on(like);
  launch_postponed(workspace, on.stream);
  launch_finish_gradients(workspace, &sums, on.stream);
}

}  // namespace preact_kernels
