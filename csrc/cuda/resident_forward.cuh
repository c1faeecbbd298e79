// A run of bottlenecks in one launch, forward.
#pragma once

#include "resident_image.cuh"

namespace preact_kernels::cuda {

struct ResidentForwardUnit {
  const float *bn_weight, *bn_bias;
  const void* weight;  // [K][taps][C]
  void* input;         // where the unit's input is stored; null where it is not kept
  float eps;
};

constexpr int kMostForwardBlocks = 256;

struct ResidentForward {
  const void* x;  // [images, 4C, kSide, kSide], dense in NHWC order, as y
  void* y;
  const float *mean, *var;  // statistics of x
  Accumulators sums;        // sums of values and squares of all units' outputs, in order
  unsigned* arrived;        // zero
  Count pixels;             // pixels of the batch
  int blocks;
  bool with_statistics;  // whether statistics of y are wanted
  ResidentForwardUnit units[kMostForwardBlocks][kUnits];
};
static_assert(sizeof(ResidentForward) <= 32764, "more parameters than a kernel may have");

template <class T, int C>
struct ForwardImage : ResidentImage<T, C> {
  using Base = ResidentImage<T, C>;
  using Shape = ResidentShape<C>;
  using Place = ResidentPlace<T, C>;
  using Base::kGroups, Base::kPairs, Base::kTiles, Base::kWide;
  using Base::parts, Base::x, Base::z;

  // Mean and M2, the sum of squares around the mean, of a warp's channels.
  template <int CHANNELS>
  static __device__ void store_part(const WarpSums<CHANNELS>& sums, float2* to) {
    constexpr float kCount = 16 * kTiles;
    if (!sums.is_owner()) return;
#pragma unroll
    for (int i = 0; i < sums.kLeft; ++i) {
      const float mean = sums.first[i] / kCount, second = sums.second[i];
      // Squares of finite values may be infinite. Then so is M2, not NaN.
      const bool overflows = isinf(second) && isfinite(sums.first[i]);
      const float m2 = overflows ? second : second - sums.first[i] * mean;
      to[sums.first_left() + i] = make_float2(sums.pivot[i] + mean, m2);
    }
  }

  // z = the products, rounded. Leaves the statistics of z in `parts`.
  __device__ void round(const typename Base::Sums& sums) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        z[r][0][j] = pack_pair<T>(sums[r][j][0], sums[r][j][1]);
        z[r][1][j] = pack_pair<T>(sums[r][j][2], sums[r][j][3]);
      }
    }
    WarpSums<2 * kPairs> of_warp;
    of_warp.template add_distances<2 * kTiles>([&](int c, int i) {
      const float2 both = unpack_pair<T>(z[i / 2][i % 2][c / 2]);
      return c % 2 ? both.y : both.x;
    });
    of_warp.add_lanes();
    const Place place;
    store_part(of_warp, parts() + place.warp * C + place.t * C / 4);
  }
  // z = act(norm(z)).
  template <int UNIT>
  __device__ void activate() {
    const float* own = this->template norm<UNIT>() + Place().t * C / 4;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      float mean[2], scale[2], bias[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* channel = own + 2 * j + i;
        mean[i] = channel[0], scale[i] = channel[C], bias[i] = channel[2 * C];
      }
      Base::for_rows(
          [&](int r, int h) { z[r][h][j] = activated<T>(z[r][h][j], mean, scale, bias); });
    }
  }
  // Adds the 1x1 convolution of z to the stream. Leaves the statistics in `parts`.
  __device__ void add_to_stream() {
    this->untrace_stream();
    const Place place;
#pragma unroll
    for (int b = 0; b < kGroups; ++b) {
#pragma unroll
      for (int q = 4 * b; q < 4 * b + 4; ++q) {
        uint32_t w[kPairs];
        this->load_columns(w, place, q);
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          const float2 low = unpack_pair<T>(x[r][q][0]), high = unpack_pair<T>(x[r][q][1]);
          float sums[4] = {low.x, low.y, high.x, high.y};
          this->multiply_narrow(sums, r, w);
          x[r][q][0] = pack_pair<T>(sums[0], sums[1]);
          x[r][q][1] = pack_pair<T>(sums[2], sums[3]);
        }
      }
      WarpSums<8> of_warp;
      of_warp.template add_distances<2 * kTiles>([&](int c, int i) {
        const float2 both = unpack_pair<T>(x[i / 2][4 * b + c / 2][i % 2]);
        return c % 2 ? both.y : both.x;
      });
      of_warp.add_lanes();
      store_part(of_warp, parts() + place.warp * kWide + 32 * b + 8 * place.t);
    }
  }
};

template <class T, int C>
struct ForwardGrid : ResidentGrid<T, C> {
  using Shape = ResidentShape<C>;
  using Base = ResidentGrid<T, C>;

  const ResidentForward& run;
  const ForwardImage<T, C>& image;

  __device__ ForwardGrid(const ResidentForward& run, const ForwardImage<T, C>& image)
      : Base{run.arrived, 0}, run(run), image(image) {}

  // The sums of the values of a unit's output and of their squares.
  template <int UNIT>
  __device__ Accumulators sums_of(int block) const {
    Accumulators sums = run.sums;
    sums.words += block * (2 * C + Shape::kWide) + UNIT * C;
    return sums;
  }
  // Adds the statistics of a unit's output, which are in the image's `parts`.
  template <int UNIT>
  __device__ void arrive(int block) {
    constexpr int kChannels = UNIT == 2 ? Shape::kWide : C;
    constexpr float kCount = Shape::kPixels / Shape::kWarps;
    Base::template arrive<kChannels>(sums_of<UNIT>(block), [&](int c) {
      const float2* parts = image.parts() + c;
      const float one = parts->x, pivot = isfinite(one) ? one : 0;
      float sum = 0;
      double square = 0, rest = 0;  // a float32 might overflow
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) {
        const float2 part = parts[w * kChannels];
        const float d = part.x - pivot;
        sum += d, square += double(d) * d, rest += part.y;
      }
      const double mean = double(pivot) + double(sum) / Shape::kWarps;
      const double m2 = rest + kCount * (square - double(sum) * sum / Shape::kWarps);
      return TwoSums{Shape::kPixels * mean, Shape::kPixels * mean * mean + m2};
    });
  }
  // Waits for the statistics of a unit's input, and stores the coefficients of its norm.
  template <int UNIT>
  __device__ void wait(int block) const {
    constexpr int kChannels = UNIT == 0 ? Shape::kWide : C;
    constexpr int kOwn = Base::template kOwn<kChannels>;
    const ResidentForwardUnit& unit = run.units[block][UNIT];
    float weight[kOwn], bias[kOwn];
    Base::template for_channels<kChannels>(
        [&](int i, int c) { weight[i] = unit.bn_weight[c], bias[i] = unit.bn_bias[c]; });
    Base::wait();
    Base::template for_channels<kChannels>([&](int i, int c) {
      float mean, var;
      if (UNIT == 0 && block == 0) {
        mean = run.mean[c], var = run.var[c];
      } else {
        const Accumulators sums = UNIT == 0 ? sums_of<2>(block - 1) : sums_of<UNIT - 1>(block);
        ExactSum values, squares;
        values.load(sums, c, 0), squares.load(sums, c, 1);
        read_moments(values, squares, run.pixels, mean, var);
      }
      float* to = image.template norm<UNIT>() + c;
      to[0] = mean;
      to[kChannels] = weight[i] * reciprocal_std(var, unit.eps);
      to[2 * kChannels] = bias[i];
    });
    __syncthreads();
  }
};

// The bottlenecks of a run for image blockIdx.x. All thread blocks of the grid must be resident.
template <class T, int C>
__global__ void __launch_bounds__(ResidentShape<C>::kThreads, 1)
    resident_forward_kernel(const __grid_constant__ ResidentForward run) {
  ForwardImage<T, C> image{{dynamic_shared()}};
  ForwardGrid<T, C> grid(run, image);
  copy_weight<0, T, C>(run.units[0][0].weight, image.weight0());
  copy_weight<1, T, C>(run.units[0][1].weight, image.weight1());
  copy_weight<2, T, C>(run.units[0][2].weight, image.weight2());
  image.clear_image();
  image.load_stream(run.x);
  grid.template wait<0>(0);
#pragma unroll 1
  for (int block = 0; block < run.blocks; ++block) {
    const bool is_last = block + 1 == run.blocks;
    const ResidentForwardUnit(&units)[kUnits] = run.units[block];
    const auto next_weight = [&](int unit) {
      return is_last ? nullptr : run.units[block + 1][unit].weight;
    };
    {
      typename ForwardImage<T, C>::Sums sums = {};
      image.template multiply_stream<true>(sums);
      image.round(sums);
    }
    grid.template arrive<0>(block);
    if (units[1].input != nullptr) image.store_narrow(image.z, units[1].input);
    copy_weight<0, T, C>(next_weight(0), image.weight0());
    grid.template wait<1>(block);
    image.template activate<1>();
    {
      typename ForwardImage<T, C>::Sums sums = {};
      image.template multiply_image<false>(sums);
      image.round(sums);
    }
    grid.template arrive<1>(block);
    if (units[2].input != nullptr) image.store_narrow(image.z, units[2].input);
    copy_weight<1, T, C>(next_weight(1), image.weight1());
    grid.template wait<2>(block);
    image.template activate<2>();
    image.add_to_stream();
    if (!is_last || run.with_statistics) grid.template arrive<2>(block);
    void* kept = is_last ? run.y : run.units[block + 1][0].input;
    if (kept != nullptr) image.store_stream(kept);
    if (is_last) break;
    copy_weight<2, T, C>(next_weight(2), image.weight2());
    grid.template wait<0>(block + 1);
  }
}

}  // namespace preact_kernels::cuda
