// A run of bottlenecks in one launch, backward: the gradients of the inputs of all units.
//
// The gradients of the weights are computed later, from the gradients of the outputs, which are
// stored.
#pragma once

#include "resident_image.cuh"

namespace preact_kernels::cuda {

struct ResidentBackwardUnit {
  const float *mean, *var, *bn_weight, *bn_bias;
  const void* weight;  // transposed, [C][taps][K]
  const void* input;
  void* dy;           // memory for the gradient of the unit's output; null for the last unit
  Accumulators sums;  // sums of g and of g * xhat
  float eps;
};

constexpr int kMostBackwardBlocks = 16;

struct ResidentBackward {
  const void* dy;     // gradient of the last block's output
  void* g;            // g of the first unit; null if dx is wanted
  void* dx;           // gradient of the first block's input
  unsigned* arrived;  // zero
  float inv_count;    // 1 / pixels of the batch
  int blocks;
  ResidentBackwardUnit units[kMostBackwardBlocks][kUnits];
};
static_assert(sizeof(ResidentBackward) <= 32764, "more parameters than a kernel may have");

// The rows of coefficients of a norm: of the activation, then of the gradient
//   scale * g + b * (x - mean) + c
enum NormRow { kMean, kScale, kBias, kDeviation, kB, kC };

template <class T, int C>
struct BackwardImage : ResidentImage<T, C> {
  using Base = ResidentImage<T, C>;
  using Shape = ResidentShape<C>;
  using Shared = ResidentShared<T, C>;
  using Place = ResidentPlace<T, C>;
  using Narrow = typename Base::Narrow;
  using Base::kGroups, Base::kPairs, Base::kTiles, Base::kWide;
  using Base::parts, Base::x, Base::z;

  Narrow h, g;  // the input of a unit of narrow channels, and its g

  // Pairs of the stream that a lane processes at a time: with more, 512 threads spill.
  static constexpr int kColumns = C == 16 ? 2 : 4;
  struct Pairs {
    uint32_t of[kColumns];
  };
  static __device__ Pairs load_pairs(const T* from) {
    Vector<T, 2 * kColumns> vector;
    vector.load(from);
    Pairs pairs;
    memcpy(&pairs, &vector.value, sizeof pairs);
    return pairs;
  }

  // Two neighbouring channels of rows of coefficients.
  template <int CHANNELS>
  struct Coefficients {
    const float* own;

    __device__ float2 operator[](NormRow row) const {
      return *reinterpret_cast<const float2*>(own + row * CHANNELS);
    }
  };

  // A thread's vector of the parked stream.
  __device__ uint4* parked(int r, int half, int b) const {
    return reinterpret_cast<uint4*>(this->memory + Shared::kParked) +
           ((2 * r + half) * kGroups + b) * Shape::kThreads + untraced(threadIdx.x);
  }
  // Parks the stream in shared memory. A thread later reads only what it wrote.
  __device__ void park_stream() const {
    Base::for_rows([&](int r, int half) {
#pragma unroll
      for (int b = 0; b < kGroups; ++b) *parked(r, half, b) = this->stream(r, half, b);
    });
  }

  // Returns [p > 0] * two values of da, and adds them to the sums of their channels, c and c + 1.
  template <int CHANNELS, int OF>
  static __device__ uint32_t masked(float low, float high, uint32_t input,
                                    const Coefficients<OF>& norm, WarpSums<CHANNELS>& sums, int c) {
    const float2 mean = norm[kMean], scale = norm[kScale], bias = norm[kBias];
    const uint32_t a = activated<T>(input, &mean.x, &scale.x, &bias.x);
    const uint32_t pair = pack_pair<T>(low, high) & mask_of_nonzero<T>(a);
    const float2 of_g = unpack_pair<T>(pair), of_x = unpack_pair<T>(input);
    sums.add(c, of_g.x, of_g.x * (of_x.x - mean.x));
    sums.add(c + 1, of_g.y, of_g.y * (of_x.y - mean.y));
    return pair;
  }
  // scale * g + b * (x - mean) + c, two values.
  template <int OF>
  static __device__ float2 gradient(uint32_t g, uint32_t input, const Coefficients<OF>& norm) {
    const float2 mean = norm[kMean], scale = norm[kScale], b = norm[kB], c = norm[kC];
    const float2 of_g = unpack_pair<T>(g), of_x = unpack_pair<T>(input);
    return {of_g.x * scale.x + fmaf(of_x.x - mean.x, b.x, c.x),
            of_g.y * scale.y + fmaf(of_x.y - mean.y, b.y, c.y)};
  }
  template <int CHANNELS>
  static __device__ void store_part(WarpSums<CHANNELS>& sums, float2* to) {
    sums.add_lanes();
    if (!sums.is_owner()) return;
#pragma unroll
    for (int i = 0; i < sums.kLeft; ++i) {
      to[sums.first_left() + i] = make_float2(sums.first[i], sums.second[i]);
    }
  }

  // g = [p > 0] * da, with p from h. Leaves its sums in `parts`.
  template <int UNIT>
  __device__ void mask(const typename Base::Sums& da) {
    const Place place;
    WarpSums<2 * kPairs> sums;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const Coefficients<C> norm{this->template norm<UNIT>() + place.t * C / 4 + 2 * j};
      Base::for_rows([&](int r, int half) {
        const float (&products)[4] = da[r][j];
        g[r][half][j] =
            masked(products[2 * half], products[2 * half + 1], h[r][half][j], norm, sums, 2 * j);
      });
    }
    store_part(sums, parts() + place.warp * C + place.t * C / 4);
  }
  // z = the gradient of the unit's input, from g and h.
  template <int UNIT>
  __device__ void apply() {
    const Place place;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const Coefficients<C> norm{this->template norm<UNIT>() + place.t * C / 4 + 2 * j};
      Base::for_rows([&](int r, int half) {
        const float2 dy = gradient(untraced(g[r][half][j]), untraced(h[r][half][j]), norm);
        z[r][half][j] = pack_pair<T>(dy.x, dy.y);
      });
    }
  }

  // `mask` for the first unit, whose input is wide. g replaces the stream.
  __device__ void mask_stream(const void* input) {
    const Place place;
    const T* own = static_cast<const T*>(input) + place.wide();
#pragma unroll
    for (int first = 0; first < 4 * kGroups; first += kColumns) {
      const int channel = first / 4 * 32 + 2 * (first % 4);  // from `Place::wide` on
      WarpSums<2 * kColumns> sums;
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        float da[kColumns][4] = {};
#pragma unroll
        for (int q = 0; q < kColumns; ++q) {
          uint32_t w[kPairs];
          this->load_columns(w, place, first + q);
          this->multiply_narrow(da[q], r, w);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Pairs inputs = load_pairs(own + Shape::step(r, half) * kWide + channel);
#pragma unroll
          for (int q = 0; q < kColumns; ++q) {
            const Coefficients<kWide> norm{this->template norm<0>() + channel + 8 * place.t +
                                           2 * q};
            x[r][first + q][half] =
                masked(da[q][2 * half], da[q][2 * half + 1], inputs.of[q], norm, sums, 2 * q);
          }
        }
      }
      store_part(sums, parts() + place.warp * kWide + channel + 8 * place.t);
    }
  }
  // The stream becomes the gradient of the block's input: of the first unit's input, plus the
  // parked gradient of the shortcut.
  __device__ void apply_to_stream(const void* input) {
    this->untrace_stream();
    const Place place;
    const T* own = static_cast<const T*>(input) + place.wide();
#pragma unroll
    for (int first = 0; first < 4 * kGroups; first += kColumns) {
      const int channel = first / 4 * 32 + 2 * (first % 4);  // from `Place::wide` on
      Base::for_rows([&](int r, int half) {
        const Pairs of_x = load_pairs(own + Shape::step(r, half) * kWide + channel);
        const T* skip = reinterpret_cast<const T*>(parked(r, half, first / 4)) + 2 * (first % 4);
        const Pairs of_skip = load_pairs(skip);
#pragma unroll
        for (int q = 0; q < kColumns; ++q) {
          const Coefficients<kWide> norm{this->template norm<0>() + channel + 8 * place.t + 2 * q};
          uint32_t& pair = x[r][first + q][half];
          const float2 dy = gradient(pair, of_x.of[q], norm), more = unpack_pair<T>(of_skip.of[q]);
          pair = pack_pair<T>(dy.x + more.x, dy.y + more.y);
        }
      });
    }
  }

  // Prefetches this thread block's image of a tensor with CHANNELS channels.
  template <int CHANNELS>
  static __device__ void prefetch(const void* tensor) {
    constexpr int kBytes = Shape::kPixels * CHANNELS * int(sizeof(T)), kLine = 128;
    const char* own = static_cast<const char*>(tensor) + int64_t(blockIdx.x) * kBytes;
    for (int at = untraced(threadIdx.x) * kLine; at < kBytes; at += Shape::kThreads * kLine) {
      prefetch_to_l2(own + at);
    }
  }
};

template <class T, int C>
struct BackwardGrid : ResidentGrid<T, C> {
  using Shape = ResidentShape<C>;
  using Base = ResidentGrid<T, C>;
  template <int UNIT>
  static constexpr int kChannels = UNIT == 0 ? Shape::kWide : C;

  const ResidentBackward& run;
  const BackwardImage<T, C>& image;

  __device__ BackwardGrid(const ResidentBackward& run, const BackwardImage<T, C>& image)
      : Base{run.arrived, 0}, run(run), image(image) {}

  // Stores the coefficients of a unit's activation.
  template <int UNIT>
  __device__ void set_norm(const ResidentBackwardUnit& unit) const {
    Base::template for_channels<kChannels<UNIT>>([&](int, int c) {
      float* to = image.template norm<UNIT>() + c;
      const float deviation = reciprocal_std(unit.var[c], unit.eps);
      to[kMean * kChannels<UNIT>] = unit.mean[c];
      to[kScale * kChannels<UNIT>] = unit.bn_weight[c] * deviation;
      to[kBias * kChannels<UNIT>] = unit.bn_bias[c];
      to[kDeviation * kChannels<UNIT>] = deviation;
    });
  }
  // Adds the sums of a unit, which are in the image's `parts`.
  template <int UNIT>
  __device__ void arrive(const ResidentBackwardUnit& unit) {
    Base::template arrive<kChannels<UNIT>>(unit.sums, [&](int c) {
      float sum_g = 0, sum_g_x = 0;
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) {
        const float2 part = image.parts()[w * kChannels<UNIT> + c];
        sum_g += part.x, sum_g_x += part.y;
      }
      return TwoSums{sum_g,
                     sum_g_x * image.template norm<UNIT>()[kDeviation * kChannels<UNIT> + c]};
    });
  }
  // Waits for the sums of the batch, and stores the coefficients of the gradient.
  template <int UNIT>
  __device__ void wait(const ResidentBackwardUnit& unit) const {
    Base::wait();
    Base::template for_channels<kChannels<UNIT>>([&](int, int c) {
      ExactSum of_g, of_g_x;
      of_g.load(unit.sums, c, 0), of_g_x.load(unit.sums, c, 1);
      const float sum_g = float(read_exact(of_g)), sum_g_x = float(read_exact(of_g_x));
      float* of = image.template norm<UNIT>() + c;
      const float a = of[kScale * kChannels<UNIT>];
      of[kB * kChannels<UNIT>] = -a * of[kDeviation * kChannels<UNIT>] * (sum_g_x * run.inv_count);
      of[kC * kChannels<UNIT>] = -a * (sum_g * run.inv_count);
    });
    __syncthreads();
  }
};

// The bottlenecks of a run for image blockIdx.x, from the last to the first. All thread blocks of
// the grid must be resident.
template <class T, int C>
__global__ void __launch_bounds__(ResidentShape<C>::kThreads, 1)
    resident_backward_kernel(const __grid_constant__ ResidentBackward run) {
  using Sums = typename BackwardImage<T, C>::Sums;
  constexpr int kWide = ResidentShape<C>::kWide;
  BackwardImage<T, C> image{{dynamic_shared()}};
  BackwardGrid<T, C> grid(run, image);
  {
    const ResidentBackwardUnit(&units)[kUnits] = run.units[run.blocks - 1];
    copy_weight<0, T, C>(units[2].weight, image.weight0());
    copy_weight<1, T, C>(units[1].weight, image.weight1());
    copy_weight<2, T, C>(units[0].weight, image.weight2());
    image.template prefetch<C>(units[2].input);
    image.template prefetch<C>(units[1].input);
    image.clear_image();
    image.load_stream(run.dy);
    grid.template set_norm<2>(units[2]);
    static_cast<const ResidentGrid<T, C>&>(grid).wait();
  }
#pragma unroll 1
  for (int block = run.blocks - 1; block >= 0; --block) {
    const ResidentBackwardUnit(&units)[kUnits] = run.units[block];
    const bool is_first = block == 0;
    const auto next_weight = [&](int unit) {
      return is_first ? nullptr : run.units[block - 1][unit].weight;
    };
    {
      image.load_narrow(image.h, units[2].input);
      Sums da = {};
      image.template multiply_stream<false>(da);
      image.park_stream();
      image.template mask<2>(da);
    }
    grid.template arrive<2>(units[2]);
    copy_weight<0, T, C>(next_weight(2), image.weight0());
    image.template prefetch<kWide>(units[0].input);
    grid.template set_norm<1>(units[1]);
    grid.template wait<2>(units[2]);
    image.template apply<2>();
    image.store_narrow(image.z, units[1].dy);
    {
      image.load_narrow(image.h, units[1].input);
      Sums da = {};
      image.template multiply_image<true>(da);
      image.template mask<1>(da);
    }
    grid.template arrive<1>(units[1]);
    copy_weight<1, T, C>(next_weight(1), image.weight1());
    grid.template set_norm<0>(units[0]);
    grid.template wait<1>(units[1]);
    image.template apply<1>();
    image.store_narrow(image.z, units[0].dy);
    image.mask_stream(units[0].input);
    grid.template arrive<0>(units[0]);
    if (is_first && run.g != nullptr) {
      image.store_stream(run.g);
      break;
    }
    copy_weight<2, T, C>(next_weight(0), image.weight2());
    if (!is_first) {
      const ResidentBackwardUnit(&next)[kUnits] = run.units[block - 1];
      image.template prefetch<C>(next[2].input);
      image.template prefetch<C>(next[1].input);
      grid.template set_norm<2>(next[2]);
    }
    grid.template wait<0>(units[0]);
    image.apply_to_stream(units[0].input);
    image.store_stream(is_first ? run.dx : run.units[block - 1][2].dy);
  }
}

}  // namespace preact_kernels::cuda
