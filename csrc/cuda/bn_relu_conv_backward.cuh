// BN-ReLU-Conv of narrow channels, backward: the gradients of input and weight in one pass over dy,
// or each in a kernel of its own.
#pragma once

#include "conv_tile.cuh"
#include "recomputed_g.cuh"

namespace preact_kernels::cuda {

// Activations are dense in NHWC order and aligned to 16 bytes, statistics [channels].
struct BnReluConvBackward {
  const void* dy;  // with a fold: the g that the fold applies to, in the dtype of operands
  AffineStepPointers fold;
  const void* x;
  NormPointers norm;
  const void* weight;  // [K][taps][C]
  void* g;             // in the dtype of operands; null where it is not stored
  void* unfolded_dy;   // null where it is not wanted
  Accumulators sums;   // of g: sum(g), sum(g * xhat)
  float* partials;     // [blocks][taps][K][C]: weight gradients of blocks
  int in_channels, out_channels;
  int tensors;  // as BackwardShared says
  TileGrid grid;
  bool is_dependent;  // as `launch` says
};

// A convolution with a fold whose g is recomputed.
struct BnReluConvBackwardRecomputed {
  BnReluConvBackward conv;  // dy is null
  RecomputedGPointers recomputed_g;
};

// The weight gradient of one warp: GROUPS groups of 16 output by 16 input channels, all taps or
// some of nine. With fewer groups than warps, several warps share a group, and each takes a slice
// of the pixels.
template <class T, int C, int GROUPS>
struct WeightGradient {
  static constexpr int kTaps = Tile<C>::kTaps, kSide = kTaps == 1 ? 1 : 3;
  // Where a warp has one group, two share its taps, so that a thread has fewer registers of sums.
  static constexpr int kTapParts = C == 16 || C == 32 ? 2 : 1;
  static constexpr int kOwnTaps = (kTaps + kTapParts - 1) / kTapParts;

  static_assert(kTapParts == 1 || GROUPS == 1);

  int in_groups, groups, slices, slice, first_group, first_tap;
  float d[GROUPS][kOwnTaps][2][4] = {};

  static __host__ __device__ int slices_of(int groups) {
    return groups * kTapParts < kWarps ? kWarps / (groups * kTapParts) : 1;
  }

  __device__ WeightGradient(int out_channels, int channels) {
    const int warp = threadIdx.x / 32 / kTapParts;
    first_tap = threadIdx.x / 32 % kTapParts * kOwnTaps;
    in_groups = channels / 16;
    groups = out_channels / 16 * in_groups;
    slices = slices_of(groups);
    slice = slices == 1 ? 0 : warp / groups;
    first_group = slices == 1 ? warp : warp % groups;
    if (slice >= slices) first_group = groups;  // this warp has no group
  }

  // d[tap][k][c] += the sum over the tile's pixels p of dy[p at the opposite tap][k] * a[p][c].
  // Only dy has a border. Operands are zero outside the image, and 0 * NaN is NaN: kMasks leaves
  // out all pairs with a pixel outside the image.
  template <bool kMasks>
  __device__ void add(const Tile<C>& tile, const T* dy, const T* activation, int pixels,
                      int out_channels, int channels) {
    const int dy_pitch = out_channels + kFullWidth<T>, pitch = channels + kFullWidth<T>;
    // The groups of a warp share the second operand where they lie below each other.
    const bool is_column = kWarps % in_groups == 0;
#pragma unroll 1
    for (int p = slice * kStep<T>; p < pixels; p += slices * kStep<T>) {
      uint32_t b[2][2];
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const int group = first_group + j * kWarps;
        if (group >= groups) break;
        const int k = group / in_groups * 16, c = group % in_groups * 16;
        if (j == 0 || !is_column) {
          load_b_by_rows<T>(b, [=](int i) { return activation + (p + i) * pitch + c; });
        }
#pragma unroll
        for (int t = 0; t < kOwnTaps; ++t) {
          const int tap = first_tap + t;
          if (tap >= kTaps) break;
          const int r = kSide - 1 - tap / kSide, s = kSide - 1 - tap % kSide;
          uint32_t a[4];
          load_a_by_rows<T>(
              a, [=](int i) { return dy + Tile<C>::halo_row(p + i, r, s) * dy_pitch + k; });
          if constexpr (kMasks) {
            const auto is_pair = [&](int i) { return tile.is_pair(p + i, r, s); };
            uint32_t masked[2][2] = {{b[0][0], b[0][1]}, {b[1][0], b[1][1]}};
            mask_depth<T>(a, masked, is_pair);
            mma<T>(d[j][t][0], a, masked[0]);
            mma<T>(d[j][t][1], a, masked[1]);
          } else {
            mma<T>(d[j][t][0], a, b[0]);
            mma<T>(d[j][t][1], a, b[1]);
          }
        }
      }
    }
  }

  // Calls visit(index in [taps][K][C], value, next value) for all values of a warp.
  template <class Visit>
  __device__ void for_pairs(int out_channels, int channels, Visit visit) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      const int group = first_group + j * kWarps;
      if (group >= groups) break;
      const int k = group / in_groups * 16 + lane / 4, c = group % in_groups * 16 + lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < kOwnTaps; ++t) {
        const int tap = first_tap + t;
        if (tap >= kTaps) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (tap * out_channels + k) * channels + c + 8 * half;
          const float (&v)[4] = d[j][t][half];
          visit(at, v[0], v[1]);
          visit(at + 8 * channels, v[2], v[3]);
        }
      }
    }
  }

  // Stores the sum of a block in `partial`. `shared` has room for [slices][taps][K][C].
  __device__ void store(int out_channels, int channels, float* shared, float* partial) const {
    const int values = kTaps * out_channels * channels;
    float* to = slices == 1 ? partial : shared + slice * values;
    for_pairs(out_channels, channels, [&](int at, float v, float w) { store_pair(to + at, v, w); });
    if (slices == 1) return;
    __syncthreads();
    for (int i = threadIdx.x * 4; i < values; i += kThreads * 4) {
      float sum[4], more[4];
      load_floats(sum, shared + i);
      for (int other = 1; other < slices; ++other) {
        load_floats(more, shared + other * values + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += more[j];
      }
      Vector<float, 4> total;
      total.pack(sum);
      total.store(partial + i);
    }
  }
};

// Shared memory of a block, in this order.
template <class Types, int C, bool kRecomputesG>
struct BackwardShared {
  using T = typename Types::T;
  static constexpr int kWidth = kFullWidth<T>;
  // Of two tiles: x is read again when the products are done, while that of the next arrives.
  static constexpr int kXParts = kParts<typename Types::X, kWidth>;
  using XAhead = VectorsAhead<typename Types::X, kWidth>;
  // Each vector of dy, or of x of a fold, is followed by those of g, unless that is recomputed, and
  // skip of the fold.
  static constexpr int kDyParts = kParts<typename Types::Y, kWidth>;
  static constexpr int kSkip = kDyParts + (kRecomputesG ? 0 : kParts<T, kWidth>);
  static constexpr int kAllParts = kSkip + kDyParts;
  using DyAhead = VectorsAhead<typename Types::Y, kWidth>;
  using GAhead = VectorsAhead<T, kWidth>;

  // Where each begins.
  int weights, dy, activation, da, norm, fold, recomputed_g, x_ahead, dy_ahead;
  int bytes;
  int dy_parts;  // of a vector in dy_ahead

  // `tensors` are those that the output's gradient is formed from: g, and x and skip of a fold. The
  // flags say which gradients are computed.
  __host__ __device__ BackwardShared(const TileGrid& grid, int in_channels, int out_channels,
                                     int tensors, bool of_input, bool of_weight) {
    const int in_row = in_channels * int(sizeof(T)) + 16;
    const int out_row = out_channels * int(sizeof(T)) + 16;
    const int pixels = Tile<C>::pixels(grid), halo_pixels = Tile<C>::halo_pixels(grid);
    weights = 0;
    dy = weights + (of_input ? Tile<C>::kTaps * out_channels * in_row : 0);
    activation = dy + halo_pixels * out_row;
    da = activation + pixels * in_row;
    norm = da + (of_input ? pixels * (in_channels + kSumsPadding) * 4 : 0);
    fold = norm + Normalisation<kWidth>::kRows * in_channels * 4;
    recomputed_g = fold + InputGradient<kWidth>::kRows * out_channels * 4;
    x_ahead = recomputed_g;
    if (kRecomputesG) x_ahead += RecomputedGShared<T>(pixels, in_channels, out_channels).bytes;
    dy_ahead = x_ahead + XAhead::bytes(pixels, in_channels, 2 * kXParts);
    dy_parts = tensors == 1 ? kDyParts : tensors == 2 ? kSkip : kAllParts;
    bytes = dy_ahead + DyAhead::bytes(halo_pixels, out_channels, dy_parts);
    // After the last tile: sums of every thread, or weight gradients of warps that share one.
    const int groups = out_channels / 16 * (in_channels / 16);
    const int slices = WeightGradient<T, C, 1>::slices_of(groups);
    const bool warps_share = of_weight && slices > 1;
    const int shared_values = slices * Tile<C>::kTaps * in_channels * out_channels;
    const int thread_sums = of_input ? 2 * kWidth * kThreads : 0;
    const int least =
        4 * (warps_share && shared_values > thread_sums ? shared_values : thread_sums);
    if (bytes < least) bytes = least;
  }
};

// Shared memory of a multiprocessor that holds two blocks of a 3x3 convolution of 16 or 32 channels
// in half precision: that of 9.0 and 10.0. 8.0 has 164 KB, 8.6 and 12.0 have 100 KB.
constexpr int kLargeSharedBytes = 228 * 1024;

// Blocks of a multiprocessor, which limit the registers. Where shared memory holds one, as for 64
// channels, that one has them all.
template <class Types, int C, int GROUPS>
constexpr int backward_blocks(bool has_large_shared_memory) {
  if (C == 0) return GROUPS <= 2 ? 2 : 1;
  if (C == 64) return 1;
  const bool is_small = sizeof(typename Types::T) == 2 && !Types::kHasStream;
  return GROUPS == 0 || (is_small && has_large_shared_memory) ? 2 : 1;
}

// The same of the GPU that code is compiled for; the host asks the GPU that it launches on.
#if defined(__CUDA_ARCH__)
constexpr bool kHasLargeSharedMemory = __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200;
#else
constexpr bool kHasLargeSharedMemory = true;
#endif
template <class Types, int C, int GROUPS>
constexpr int kBackwardBlocks = backward_blocks<Types, C, GROUPS>(kHasLargeSharedMemory);

// The most vectors of a thread in a tile. A 1x1 convolution beside a float32 stream, whose vectors
// are two, has fewer: so two blocks fit.
template <class Types, int C, int GROUPS>
constexpr int kBackwardVectors =
    C == 0 && Types::kHasStream && GROUPS == 2 ? 3 : kTileVectors<typename Types::T, C>;

// GROUPS of the convolutions that have kernels that recompute g.
constexpr int kRecomputedGroups = 2;

// Adds the two sums of the threads of a block to `sums`. `shared` has room for those of all
// threads.
template <int kWidth>
__device__ void add_sums(const ThreadColumn& column, int channels, float (&first)[kWidth],
                         float (&second)[kWidth], const Accumulators& sums, float* shared) {
  // Where a warp has whole pixels, it adds up theirs and stores one row of sums. Else every lane of
  // the column stores one.
  const int lane = threadIdx.x % 32, vectors = channels / kWidth;
  const bool has_whole_pixels = 32 % vectors == 0;
  if (has_whole_pixels) {
    for (int offset = 16; offset >= vectors; offset /= 2) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        first[j] += __shfl_xor_sync(0xffffffffu, first[j], offset);
        second[j] += __shfl_xor_sync(0xffffffffu, second[j], offset);
      }
    }
  }
  const int rows = has_whole_pixels ? kWarps : column.lanes;
  if (has_whole_pixels ? lane < vectors : column.is_active) {
    const int row = has_whole_pixels ? threadIdx.x / 32 : column.lane;
    float* to = shared + row * 2 * channels + column.channel;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[j] = first[j], to[channels + j] = second[j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * channels; i += kThreads) {
    float sum = 0;
#pragma unroll 8
    for (int row = 0; row < rows; ++row) sum += shared[row * 2 * channels + i];
    add_exact(sums, i % channels, i / channels, sum);
  }
}

// g[p][c] = [p > 0] * the sum over taps and k of dy[p at the opposite tap][k] * weight[k][c][tap],
// sum(g), sum(g * xhat), and dweight[k][c][tap] = the sum over p of dy[p at the opposite tap][k] *
// relu(p)[p][c]. A folded dy is unfolded as it is loaded, and stored where it is wanted. A block
// owns every gridDim.x-th tile of pixels with all channels, and stores its part of dweight.
// g and its sums are computed if kInput, dweight if GROUPS > 0. FoldG says whether the g of the
// fold is read or recomputed.
template <class Types, int C, int GROUPS, bool kInput, class FoldG = StoredG>
__device__ void bn_relu_conv_backward(const BnReluConvBackward& conv,
                                      const FoldG& recomputed_g = {}) {
  using T = typename Types::T;
  using X = typename Types::X;
  using Y = typename Types::Y;
  constexpr bool kRecomputesG = !std::is_same_v<FoldG, StoredG>;
  static_assert(!kRecomputesG || C == 0, "recomputes g for a 1x1 convolution");
  using Shared = BackwardShared<Types, C, kRecomputesG>;
  constexpr bool kWeight = GROUPS > 0;
  constexpr int kWidth = kFullWidth<T>;
  constexpr int kTaps = Tile<C>::kTaps;
  constexpr int kVectors = kBackwardVectors<Types, C, GROUPS>;
  constexpr int kOutVectors = C == 0 ? kVectors : kHaloVectors<T, C>;
  constexpr bool kMayMask = kWeight && kTaps > 1;  // a 1x1 convolution reads no padding
  // Two blocks of a multiprocessor leave few registers beside those of nine taps.
  constexpr bool kFewRegisters = kWeight && kTaps > 1 && kBackwardBlocks<Types, C, GROUPS> == 2;
  constexpr int kChannels = C ? C : FoldG::kChannels;
  constexpr int kOutChannels = C ? C : FoldG::kOutChannels;
  const int channels = kChannels ? kChannels : conv.in_channels;
  const int out_channels = kOutChannels ? kOutChannels : conv.out_channels;
  const int pixels = FoldG::kPixels ? FoldG::kPixels : Tile<C>::pixels(conv.grid);
  const int halo_pixels = FoldG::kPixels ? FoldG::kPixels : Tile<C>::halo_pixels(conv.grid);
  const int pitch = channels + kWidth, dy_pitch = out_channels + kWidth;
  const int sums_pitch = channels + kSumsPadding;
  const Shared shared(conv.grid, channels, out_channels, conv.tensors, kInput, kWeight);
  unsigned char* memory = dynamic_shared();
  T* weights = reinterpret_cast<T*>(memory + shared.weights);
  T* dy_tile = reinterpret_cast<T*>(memory + shared.dy);
  T* activation = reinterpret_cast<T*>(memory + shared.activation);
  float* da = reinterpret_cast<float*>(memory + shared.da);
  float* norm = reinterpret_cast<float*>(memory + shared.norm);
  float* fold = reinterpret_cast<float*>(memory + shared.fold);
  const typename Shared::DyAhead dy_ahead(memory + shared.dy_ahead, 0, shared.dy_parts);
  const typename Shared::GAhead g_ahead(memory + shared.dy_ahead, Shared::kDyParts,
                                        shared.dy_parts);
  const typename Shared::DyAhead skip_ahead(memory + shared.dy_ahead, Shared::kSkip,
                                            shared.dy_parts);

  const ThreadColumn in(channels, kWidth), out(out_channels, kWidth);
  // The thread's channel is added where they are used: pointers to it would take registers.
  const X* x = static_cast<const X*>(conv.x);
  T* g = static_cast<T*>(conv.g);
  const bool is_folded = kRecomputesG || conv.fold.x != nullptr;
  const bool has_skip = conv.fold.skip != nullptr;
  const bool reads_dy_or_x = kRecomputesG || !is_folded || conv.fold.reads_x();
  const Y* dy_or_x = static_cast<const Y*>(is_folded ? conv.fold.x : conv.dy);
  const T* fold_g = static_cast<const T*>(conv.dy);
  const Y* skip = static_cast<const Y*>(conv.fold.skip);
  WeightGradient<T, C, kWeight ? GROUPS : 1> dweight(out_channels, channels);
  float sum_g[kWidth] = {}, sum_g_x[kWidth] = {};
  const auto g_tiles = [&] {
    if constexpr (kRecomputesG) {
      return RecomputedGTiles<T, FoldG>(recomputed_g.pointers, memory + shared.recomputed_g, in);
    } else {
      return StoredG();
    }
  }();

  // The x of two tiles alternate.
  const auto x_ahead_of = [&](int step) {
    return typename Shared::XAhead(memory + shared.x_ahead, step % 2 * Shared::kXParts,
                                   2 * Shared::kXParts);
  };
  const auto index_of = [](int step) { return int(blockIdx.x + step * gridDim.x); };
  const auto copy_ahead = [&](int step) {
    const int index = index_of(step);
    if (index >= conv.grid.tiles) return;
    const auto x_ahead = x_ahead_of(step);
    const Tile<C> tile(conv.grid, index);
    if (in.is_active) {
#pragma unroll(kFewRegisters ? 1 : kVectors)
      for (int i = 0; i < kVectors; ++i) {
        const int p = in.lane + i * in.lanes;
        if (p >= pixels) break;
        const int64_t pixel = tile.pixel(p);
        x_ahead.copy(i, x + (pixel * channels + in.channel), pixel >= 0);
      }
    }
    if (out.is_active) {
#pragma unroll(kFewRegisters ? 1 : kOutVectors)
      for (int i = 0; i < kOutVectors; ++i) {
        const int p = out.lane + i * out.lanes;
        if (p >= halo_pixels) break;
        const int64_t pixel = tile.halo_pixel(p), at = pixel * out_channels + out.channel;
        if (reads_dy_or_x) dy_ahead.copy(i, dy_or_x + at, pixel >= 0);
        if (!kRecomputesG && is_folded) g_ahead.copy(i, fold_g + at, pixel >= 0);
        if (has_skip) skip_ahead.copy(i, skip + at, pixel >= 0);
      }
    }
    if constexpr (kRecomputesG) g_tiles.copy_ahead(tile);
    cp_async_commit();
  };
  if constexpr (kRecomputesG) g_tiles.load_parameters();
  if constexpr (kInput) {
    load_weights<T, kTaps>(static_cast<const T*>(conv.weight), weights, out_channels, channels);
  }
  Normalisation<kWidth>::load_parameters(conv.norm, channels, norm);
  if (is_folded) InputGradient<kWidth>::load_parameters(conv.fold, out_channels, fold);
  wait_for_predecessors();
  let_dependents_start();
  copy_ahead(0);
  if (is_folded) InputGradient<kWidth>::read_sums(conv.fold, out_channels, fold);
  if constexpr (kRecomputesG) g_tiles.read_sums();
  __syncthreads();

  for (int step = 0; index_of(step) < conv.grid.tiles; ++step) {
    const Tile<C> tile(conv.grid, index_of(step));
    NonFinite<T> non_finite;
    const auto x_ahead = x_ahead_of(step);
    cp_async_wait<0>();
    if constexpr (kRecomputesG) {
      g_tiles.form_dz(tile, activation);
      __syncthreads();  // dz is complete
      g_tiles.multiply(activation, dy_tile);
      __syncthreads();  // the products are complete, and dz may be overwritten
    }
    if (in.is_active) {
      const Normalisation<kWidth> in_norm(FromShared{}, norm, channels, in.channel);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int p = in.lane + i * in.lanes;
        if (p >= pixels) break;
        FullVector<T> a{};
        if (tile.pixel(p) >= 0) {
          a = in_norm.template activation<T>(x_ahead[i]);
          if constexpr (kMayMask) non_finite.add(a);
        }
        a.store(activation + p * pitch + in.channel);
      }
    }
    const auto form_dy = [&](auto form) {
#pragma unroll(kFewRegisters ? 1 : C == 0 || kOutVectors > 4 ? 2 : 4)
      for (int i = 0; i < kOutVectors; ++i) {
        const int p = out.lane + i * out.lanes;
        if (p >= halo_pixels) break;
        const int64_t pixel = tile.halo_pixel(p);
        FullVector<T> operand{};
        if (pixel >= 0) {
          const Vector<Y, kWidth> gradient = form(i);
          operand = as_operand<T>(gradient);
          if constexpr (kMayMask) non_finite.add(operand);
          if (conv.unfolded_dy != nullptr && Tile<C>::is_interior(p)) {
            Y* to = static_cast<Y*>(conv.unfolded_dy);
            gradient.store(to + (pixel * out_channels + out.channel));
          }
        }
        operand.store(dy_tile + p * dy_pitch + out.channel);
      }
    };
    const auto coefficients = [&] {
      return InputGradient<kWidth>(FromShared{}, fold, out_channels, out.channel);
    };
    const auto unfold = [&](const InputGradient<kWidth>& gradient, int i, const auto& g) {
      return gradient.template unfold<Y>(conv.fold, i, g, dy_ahead, skip_ahead);
    };
    if (out.is_active) {
      if constexpr (kRecomputesG) {
        const auto gradient = coefficients();
        const Normalisation<kWidth> norm_of_p(gradient.mean, gradient.a,
                                              g_tiles.bn_bias() + out.channel);
        const RecomputedGVectors<T, typename Shared::DyAhead> vectors{
            norm_of_p, dy_tile + out.lane * dy_pitch + out.channel, out.lanes * dy_pitch, dy_ahead};
        form_dy([&](int i) { return unfold(gradient, i, vectors); });
      } else if (is_folded) {
        if constexpr (kFewRegisters) {
          form_dy([&](int i) { return unfold(coefficients(), i, g_ahead); });
        } else {
          const auto gradient = coefficients();
          form_dy([&](int i) { return unfold(gradient, i, g_ahead); });
        }
      } else {
        form_dy([&](int i) { return dy_ahead[i]; });
      }
    }
    // Both tiles are complete.
    const bool masks = kMayMask ? __syncthreads_or(non_finite.any()) : (__syncthreads(), false);
    copy_ahead(step + 1);
    if constexpr (kInput) {
      multiply_weights<T, C, true>(dy_tile, weights, pixels, out_channels, channels, da,
                                   sums_pitch);
    }
    if constexpr (kWeight) {
      if (kMayMask && masks) {
        dweight.template add<true>(tile, dy_tile, activation, pixels, out_channels, channels);
      } else {
        dweight.template add<false>(tile, dy_tile, activation, pixels, out_channels, channels);
      }
    }
    __syncthreads();  // da is complete, and both tiles may be overwritten
    if (!kInput || !in.is_active) continue;
#pragma unroll(kFewRegisters ? 1 : kVectors)
    for (int i = 0; i < kVectors; ++i) {
      const int p = in.lane + i * in.lanes;
      if (p >= pixels) break;
      const int64_t pixel = tile.pixel(p);
      if (pixel < 0) continue;
      FullVector<T> stored;
      float values[kWidth], a[kWidth], mean[kWidth];
      load_floats(values, da + p * sums_pitch + in.channel);
      stored.load(activation + p * pitch + in.channel);
      stored.unpack(a);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = a[j] == 0 ? 0 : values[j];  // NaN: passes
      stored.pack(values);
      if (g != nullptr) stored.store(g + (pixel * channels + in.channel));
      stored.unpack(values);
      x_ahead[i].unpack(a);
      load_floats(mean, norm + in.channel);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum_g[j] += values[j];
        sum_g_x[j] += values[j] * (a[j] - mean[j]);
      }
    }
  }

  if constexpr (kInput) {
    if (in.is_active) {
      float rstd[kWidth];
      Normalisation<kWidth>::load_rstd(rstd, norm, channels, in.channel);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum_g_x[j] *= rstd[j];
    }
  }
  // From here on shared memory has another layout.
  float* scratch = reinterpret_cast<float*>(memory);
  __syncthreads();
  if constexpr (kInput) add_sums(in, channels, sum_g, sum_g_x, conv.sums, scratch);
  if constexpr (kWeight) {
    __syncthreads();
    const int64_t weights_of_block = int64_t(kTaps) * out_channels * channels;
    dweight.store(out_channels, channels, scratch, conv.partials + blockIdx.x * weights_of_block);
  }
}

// One convolution: g, and dweight if GROUPS > 0.
template <class Types, int C, int GROUPS>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<Types, C, GROUPS>)
    bn_relu_conv_backward_kernel(const __grid_constant__ BnReluConvBackward conv) {
  bn_relu_conv_backward<Types, C, GROUPS, true>(conv);
}

// The same of the last convolution of a bottleneck of the inner width CHANNELS, where the g of its
// fold is recomputed.
template <class Types, int CHANNELS, int GROUPS>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<Types, 0, GROUPS>)
    bn_relu_conv_backward_recomputed_kernel(
        const __grid_constant__ BnReluConvBackwardRecomputed p) {
  constexpr int kVectors = kBackwardVectors<Types, 0, kRecomputedGroups>;
  constexpr int kPixels = pixels_of_tile<typename Types::T>(4 * CHANNELS, kVectors);
  bn_relu_conv_backward<Types, 0, GROUPS, true>(
      p.conv, RecomputedGOfWidth<CHANNELS, kPixels>{p.recomputed_g});
}

// The weight gradients of several convolutions, each in a row of the grid.
constexpr int kMostWeightGradients = 64;
struct WeightGradients {
  BnReluConvBackward of[kMostWeightGradients];
};
static_assert(sizeof(WeightGradients) <= 32764, "more parameters than a kernel may have");

template <class Types, int C, int GROUPS>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<Types, C, GROUPS>)
    bn_relu_conv_weight_gradients_kernel(const __grid_constant__ WeightGradients convs) {
  bn_relu_conv_backward<Types, C, GROUPS, false>(convs.of[blockIdx.y]);
}

}  // namespace preact_kernels::cuda
