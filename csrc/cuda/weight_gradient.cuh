// The products of the weight gradient:
// dweight[k][c][tap] = the sum over pixels p of dy[p at the opposite tap][k] * relu(p)[p][c].
#pragma once

#include "conv_tile.cuh"

namespace preact_kernels::cuda {

// The weight gradient of one warp: GROUPS groups of 16 output by 16 input channels, and all or some
// of their taps. If there are fewer groups than warps, warps share a group and split its pixels.
template <class T, int C, int GROUPS>
struct WeightGradient {
  static constexpr int kTaps = Tile<C>::kTaps, kSide = kTaps == 1 ? 1 : 3;
  // If a warp has one group, two warps share its taps: fewer registers for sums.
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
  // Only dy has a halo. Operands are zero outside the image, but 0 * NaN is NaN: kMasks leaves out
  // pairs with a pixel outside.
  template <bool kMasks>
  __device__ void add(const Tile<C>& tile, const T* dy, const T* activated, int pixels,
                      int out_channels, int channels) {
    const int dy_pitch = out_channels + kFullWidth<T>, pitch = channels + kFullWidth<T>;
    // A warp's groups in one column share the second operand.
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
          load_b_by_rows<T>(b, [=](int i) { return activated + (p + i) * pitch + c; });
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

  // Stores the sum of a thread block in `partial`. `shared` has room for [slices][taps][K][C].
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

}  // namespace preact_kernels::cuda
