// Bottlenecks of a stage in one launch: what the forward and the backward have in common.
//
// A thread block owns an image, and keeps the residual stream, or its gradient, in registers
// from one bottleneck to the next. All thread blocks are resident: after every convolution they
// wait for each other, as a batch norm needs sums over the whole batch. Before it waits, a thread
// block adds its sums to exact sums; while it waits, it copies the next weight.
//
// A warp owns kTiles tiles of 16 pixels with all channels. A product (mma.m16n8k16) leaves columns
// 2t and 2t + 1 of rows g and g + 8 to lane 4g + t. Column n of a weight is not output channel n:
// `column_of` orders the columns so that a lane has consecutive channels. The results are then
// operands of the next product as they are, and a lane loads and stores 8 or 16 bytes at a time.
#pragma once

#include "batch_norm.cuh"

namespace preact_kernels::cuda {

constexpr int kUnits = 3;  // 1x1 from 4C to C channels, 3x3, and 1x1 from C to 4C channels

// C is the number of inner channels. It determines the size of the images, as in a ResNet for
// CIFAR.
template <int C>
struct ResidentShape {
  static constexpr int kSide = 512 / C, kPixels = kSide * kSide, kWide = 4 * C;
  static constexpr int kTiles = 64 / C;  // tiles of a warp
  static constexpr int kWarps = kPixels / (16 * kTiles), kThreads = 32 * kWarps;
  static constexpr int kHaloSide = kSide + 2;
  // Pixels from one tile of a warp to the next: tiles are above each other if a row has several.
  static constexpr int kTilesOfRow = kSide > 16 ? kSide / 16 : 1;
  static constexpr int kTileStep = 16 * kTilesOfRow;

  // Pixel i of the first tile of a warp.
  static __device__ int pixel(int warp, int i) {
    return warp / kTilesOfRow * (kTiles * kTileStep) + warp % kTilesOfRow * 16 + i;
  }
  // The pixel of the image with halo that is above and left of a pixel.
  static __device__ int corner(int pixel) { return pixel / kSide * kHaloSide + pixel % kSide; }
  // Pixels from row g of a warp's first tile to row g + 8 * half of another, without and with halo.
  static constexpr __device__ int step(int tile, int half) { return tile * kTileStep + 8 * half; }
  static constexpr __device__ int halo_step(int tile, int half) {
    return kSide >= 16 ? tile * kHaloSide + 8 * half : half * kHaloSide;
  }
};

// Offsets in shared memory, in bytes. The pitches of rows, in values, spread them over banks. The
// backward multiplies by transposed weights: the first place holds the weight of unit 2.
template <class T, int C>
struct ResidentShared {
  using Shape = ResidentShape<C>;
  // Rows and pitches of the weights of units 0, 1 and 2.
  static constexpr int kRows0 = C, kRows1 = 9 * C, kRows2 = 4 * C;
  static constexpr int kPitch0 = 4 * C + 32, kPitch1 = C + 8, kPitch2 = C == 64 ? C + 8 : C;
  static constexpr int kPitch = C + 8;  // pitch of the image with halo

  static constexpr int kWeight0 = 0;
  static constexpr int kWeight1 = kWeight0 + kRows0 * kPitch0 * int(sizeof(T));
  static constexpr int kWeight2 = kWeight1 + kRows1 * kPitch1 * int(sizeof(T));
  static constexpr int kImage = kWeight2 + kRows2 * kPitch2 * int(sizeof(T));
  static constexpr int kImageBytes = Shape::kHaloSide * Shape::kHaloSide * kPitch * int(sizeof(T));
  // Sums of the warps, [kWarps][channels] of float2.
  static constexpr int kParts = kImage + kImageBytes;
  // Rows of coefficients of units 0, 1 and 2, [kRows][channels].
  static constexpr int kRows = 6;
  static constexpr int kNorms = kParts + 8 * Shape::kWarps * Shape::kWide;
  static constexpr int kForwardBytes = kNorms + 4 * kRows * (Shape::kWide + 2 * C);
  static constexpr int kParked = kForwardBytes;  // the stream
  static constexpr int kBackwardBytes = kParked + Shape::kPixels * Shape::kWide * int(sizeof(T));

  static __host__ __device__ constexpr int norm(int unit) {
    return kNorms + 4 * kRows * (unit == 0 ? 0 : Shape::kWide + (unit - 1) * C);
  }
};

// The column of output channel k of a weight, in groups of kGroup channels of which a lane has a
// quarter: channels i of the quarter of lane 4g + t are columns 2t and 2t + 1 of every eight.
template <int kGroup>
__device__ inline int column_of(int k) {
  constexpr int kQuarter = kGroup / 4;
  return k / kGroup * kGroup + k % kQuarter / 2 * 8 + k % kGroup / kQuarter * 2 + k % 2;
}

// Starts to copy a weight to the first, second or third place, in a group of copies that is empty
// if the weight is null.
template <int PLACE, class T, int C>
__device__ void copy_weight(const void* weight, T* shared) {
  using Shared = ResidentShared<T, C>;
  constexpr int kGroup = PLACE == 2 ? 32 : C, kTaps = PLACE == 1 ? 9 : 1;
  constexpr int kDepth = PLACE == 0 ? 4 * C : C, kVectors = kDepth / 8;
  constexpr int kRows = PLACE == 0 ? Shared::kRows0 : PLACE == 1 ? Shared::kRows1 : Shared::kRows2;
  constexpr int kPitch = PLACE == 0   ? Shared::kPitch0
                         : PLACE == 1 ? Shared::kPitch1
                                      : Shared::kPitch2;
  if (weight != nullptr) {
    const T* from = static_cast<const T*>(weight);
    for (int i = untraced(threadIdx.x); i < kRows * kVectors; i += ResidentShape<C>::kThreads) {
      const int row = i / kVectors, c = i % kVectors * 8, k = row / kTaps, tap = row % kTaps;
      T* to = shared + (tap * C + column_of<kGroup>(k)) * kPitch + c;
      cp_async_16(to, from + row * kDepth + c, true);
    }
  }
  cp_async_commit();
}

// Two sums of a warp for each of the channels of a lane.
template <int CHANNELS>
struct WarpSums {
  float pivot[CHANNELS] = {}, first[CHANNELS] = {}, second[CHANNELS] = {};

  __device__ void add(int c, float to_first, float to_second) {
    first[c] += to_first;
    second[c] += to_second;
  }

  // Sums and squares of the distances from a pivot. The pivot is a value of the channel: a constant
  // is exact, and a large mean does not cancel. value(c, i) is value i of VALUES of channel c.
  template <int VALUES, class Value>
  __device__ void add_distances(const Value& value) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      const float one = __shfl_sync(0xffffffffu, value(c, 0), threadIdx.x % 4);
      pivot[c] = isfinite(one) ? one : 0;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        const float d = value(c, i) - pivot[c];
        add(c, d, d * d);
      }
    }
  }

  // Adds the lanes that have the same channels. A lane then has kLeft channels, from `first_left`
  // on; lanes without `is_owner` duplicate others.
  static constexpr int kLeft = CHANNELS >= 8 ? CHANNELS / 8 : 1;
  __device__ void add_lanes() {
    add_lanes<16, CHANNELS>();
    add_lanes<8, (CHANNELS + 1) / 2>();
    add_lanes<4, (CHANNELS + 3) / 4>();
  }
  static __device__ int first_left() {
    int channel = 0;
    for (int bit = 16, half = CHANNELS / 2; half > 0 && bit >= 4; bit /= 2, half /= 2) {
      if (threadIdx.x & bit) channel += half;
    }
    return channel;
  }
  static __device__ bool is_owner() { return CHANNELS >= 8 || (threadIdx.x & 4) == 0; }

 private:
  // Exchanges sums with the lane that differs in one bit. Each keeps half of COUNT channels.
  template <int BIT, int COUNT>
  __device__ void add_lanes() {
    constexpr int kHalf = COUNT / 2;
    const bool is_upper = threadIdx.x & BIT;
    const auto exchange = [&](float& kept, float given) {
      kept += __shfl_xor_sync(0xffffffffu, given, BIT);
    };
    if constexpr (COUNT == 1) {
      exchange(first[0], first[0]);
      exchange(second[0], second[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float first_given = is_upper ? first[i] : first[kHalf + i];
        const float second_given = is_upper ? second[i] : second[kHalf + i];
        first[i] = is_upper ? first[kHalf + i] : first[i];
        second[i] = is_upper ? second[kHalf + i] : second[i];
        pivot[i] = is_upper ? pivot[kHalf + i] : pivot[i];
        exchange(first[i], first_given);
        exchange(second[i], second_given);
      }
    }
  }
};

// relu(p) of two neighbouring values of x, rounded, with the coefficients of a Normalisation.
template <class T>
__device__ inline uint32_t activated(uint32_t x, const float* mean, const float* scale,
                                     const float* bias) {
  const float2 both = unpack_pair<T>(x);
  return pack_pair<T>(relu(fmaf(both.x - mean[0], scale[0], bias[0])),
                      relu(fmaf(both.y - mean[1], scale[1], bias[1])));
}

struct TwoSums {
  double first, second;
};

// Lets the thread blocks of a grid wait for each other.
template <class T, int C>
struct ResidentGrid {
  static constexpr int kThreads = ResidentShape<C>::kThreads;

  unsigned* arrived;
  unsigned expected;  // arrivals before a thread block goes on

  // Adds merge(c), two numbers for each channel, to `sums`, once all threads have called this.
  template <int CHANNELS, class Merge>
  __device__ void arrive(const Accumulators& sums, const Merge& merge) {
    __syncthreads();
    // A thread for each sum: adding one takes longer than merging both.
    for (int i = untraced(threadIdx.x); i < 2 * CHANNELS; i += kThreads) {
      const int value = i / CHANNELS, c = i % CHANNELS;
      const TwoSums merged = merge(c);
      add_exact(sums, c, value, value == 0 ? merged.first : merged.second);
    }
    __syncthreads();  // all have added: thread 0 says so to the other thread blocks
    if (threadIdx.x == 0) add_release(arrived, 1);
    expected += gridDim.x;
  }

  // Waits for the other thread blocks, and for the weight that the next unit multiplies by.
  __device__ void wait() const {
    if (threadIdx.x == 0) {
      while (load_acquire(arrived) < expected) {
      }
    }
    cp_async_wait<kUnits - 1>();
    __syncthreads();
  }

  // Calls body(i, c) for the channels of a thread, at most kOwn.
  template <int CHANNELS>
  static constexpr int kOwn = (CHANNELS + kThreads - 1) / kThreads;
  template <int CHANNELS, class Body>
  static __device__ void for_channels(const Body& body) {
    const int thread = untraced(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kOwn<CHANNELS>; ++i) {
      const int c = thread + i * kThreads;
      if (c < CHANNELS) body(i, c);
    }
  }
};

// The pixels and channels of a thread. Made anew at each use, so that its registers are free in
// between.
template <class T, int C>
struct ResidentPlace {
  using Shape = ResidentShape<C>;

  int warp, lane, g, t;

  __device__ ResidentPlace() {
    const int thread = untraced(threadIdx.x);
    warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  }
  // Offset in a tensor, of wide or of narrow channels, of the thread's first channels at row g of
  // its first tile.
  __device__ int wide() const { return pixel() * Shape::kWide + 8 * t; }
  __device__ int narrow() const { return pixel() * C + t * C / 4; }

 private:
  __device__ int pixel() const { return blockIdx.x * Shape::kPixels + Shape::pixel(warp, g); }
};

// An image, and the products of its convolutions.
template <class T, int C>
struct ResidentImage {
  using Shape = ResidentShape<C>;
  using Shared = ResidentShared<T, C>;
  using Place = ResidentPlace<T, C>;
  static constexpr int kTiles = Shape::kTiles, kWide = Shape::kWide;
  static constexpr int kPairs = C / 8;        // pairs of a lane's narrow channels
  static constexpr int kGroups = kWide / 32;  // groups of wide channels; a lane has 8 of each
  static constexpr int kAccess = kPairs < 4 ? kPairs : 4;  // pairs that a lane loads at a time
  using Narrow = uint32_t[kTiles][2][kPairs];
  using Sums = float[kTiles][kPairs][4];  // products

  unsigned char* memory;
  // The residual stream: pair q of group b has channels 32 * b + 8 * t + 2 * q of pixels g and
  // g + 8.
  uint32_t x[kTiles][4 * kGroups][2];
  Narrow z;  // what the next convolution of narrow channels reads

  __device__ T* weight0() const { return reinterpret_cast<T*>(memory + Shared::kWeight0); }
  __device__ T* weight1() const { return reinterpret_cast<T*>(memory + Shared::kWeight1); }
  __device__ T* weight2() const { return reinterpret_cast<T*>(memory + Shared::kWeight2); }
  __device__ T* image() const { return reinterpret_cast<T*>(memory + Shared::kImage); }
  __device__ float2* parts() const { return reinterpret_cast<float2*>(memory + Shared::kParts); }
  template <int UNIT>
  __device__ float* norm() const {
    return reinterpret_cast<float*>(memory + Shared::norm(UNIT));
  }

  // Calls body(tile, half) for the rows of 8 pixels of a warp.
  template <class Body>
  __device__ static void for_rows(const Body& body) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) body(r, h);
    }
  }

  // Clears the image once, before z is stored in it: its halo stays zero.
  __device__ void clear_image() const {
    for (int i = threadIdx.x; i < Shared::kImageBytes / 16; i += Shape::kThreads) {
      reinterpret_cast<uint4*>(image())[i] = make_uint4(0, 0, 0, 0);
    }
  }

  // Keeps later uses of the stream from sharing what an earlier use has unpacked of it.
  __device__ void untrace_stream() {
    for_rows([&](int r, int h) {
#pragma unroll
      for (int q = 0; q < 4 * kGroups; ++q) x[r][q][h] = untraced(x[r][q][h]);
    });
  }
  // The stream at pixel 8 * h + g of a tile, channels of a group.
  __device__ uint4 stream(int r, int h, int b) const {
    return make_uint4(x[r][4 * b][h], x[r][4 * b + 1][h], x[r][4 * b + 2][h], x[r][4 * b + 3][h]);
  }
  __device__ void set_stream(int r, int h, int b, const uint4& v) {
    x[r][4 * b][h] = v.x, x[r][4 * b + 1][h] = v.y;
    x[r][4 * b + 2][h] = v.z, x[r][4 * b + 3][h] = v.w;
  }
  // Offset of these values in a tensor, from `Place::wide` on.
  static constexpr __device__ int offset(int r, int h, int b) {
    return Shape::step(r, h) * kWide + 32 * b;
  }
  __device__ void load_stream(const void* from) {
    const T* own = static_cast<const T*>(from) + Place().wide();
    for_rows([&](int r, int h) {
#pragma unroll
      for (int b = 0; b < kGroups; ++b) {
        set_stream(r, h, b, *reinterpret_cast<const uint4*>(own + offset(r, h, b)));
      }
    });
  }
  __device__ void store_stream(void* to) const {
    T* own = static_cast<T*>(to) + Place().wide();
    for_rows([&](int r, int h) {
#pragma unroll
      for (int b = 0; b < kGroups; ++b) {
        *reinterpret_cast<uint4*>(own + offset(r, h, b)) = stream(r, h, b);
      }
    });
  }

  static __device__ void load_narrow(uint32_t (&to)[kPairs], const T* from) {
#pragma unroll
    for (int j = 0; j < kPairs; j += kAccess) {
      Vector<T, 2 * kAccess> vector;
      vector.load(from + 2 * j);
      memcpy(to + j, &vector.value, 4 * kAccess);
    }
  }
  static __device__ void store_narrow(const uint32_t (&from)[kPairs], T* to) {
#pragma unroll
    for (int j = 0; j < kPairs; j += kAccess) {
      Vector<T, 2 * kAccess> vector;
      memcpy(&vector.value, from + j, 4 * kAccess);
      vector.store(to + 2 * j);
    }
  }
  static __device__ void load_narrow(Narrow& to, const void* from) {
    const T* own = static_cast<const T*>(from) + Place().narrow();
    for_rows([&](int r, int h) { load_narrow(to[r][h], own + Shape::step(r, h) * C); });
  }
  static __device__ void store_narrow(const Narrow& from, void* to) {
    T* own = static_cast<T*>(to) + Place().narrow();
    for_rows([&](int r, int h) { store_narrow(from[r][h], own + Shape::step(r, h) * C); });
  }

  // sums += the 1x1 convolution of the stream; of act(stream) if ACTIVATES.
  template <bool ACTIVATES>
  __device__ void multiply_stream(Sums& sums) {
    untrace_stream();
    const Place place;
    const float* own_norm = norm<0>() + 8 * place.t;
    const T* own_weight = weight0() + place.g * Shared::kPitch0 + 8 * place.t;
#pragma unroll
    for (int b = 0; b < kGroups; ++b) {
      uint4 both[kPairs];  // 16 bytes: with 8, rows would meet in a bank
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        both[j] = *reinterpret_cast<const uint4*>(own_weight + 8 * j * Shared::kPitch0 + 32 * b);
      }
#pragma unroll
      for (int q = 0; q < 4; q += 2) {  // a product has two pairs of channels of a lane
        const int c = 32 * b + 2 * q;
        float mean[4], scale[4], bias[4];
        if constexpr (ACTIVATES) {
          load_floats(mean, own_norm + c);
          load_floats(scale, own_norm + kWide + c);
          load_floats(bias, own_norm + 2 * kWide + c);
        }
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = i / 2 * 2;
            a[i] = x[r][4 * b + q + i / 2][i % 2];
            if constexpr (ACTIVATES) {
              a[i] = activated<T>(a[i], mean + at, scale + at, bias + at);
            }
          }
#pragma unroll
          for (int j = 0; j < kPairs; ++j) {
            const uint32_t w[2] = {q == 0 ? both[j].x : both[j].z, q == 0 ? both[j].y : both[j].w};
            mma<T>(sums[r][j], a, w);
          }
        }
      }
    }
  }

  // sums += the 3x3 convolution of z; with the opposite taps if OPPOSITE.
  template <bool OPPOSITE>
  __device__ void multiply_image(Sums& sums) const {
    {
      const Place place;
      const int inner = Shape::corner(Shape::pixel(place.warp, place.g)) + Shape::kHaloSide + 1;
      T* own = image() + inner * Shared::kPitch + place.t * C / 4;
      for_rows([&](int r, int h) {
        store_narrow(z[r][h], own + Shape::halo_step(r, h) * Shared::kPitch);
      });
    }
    __syncthreads();
    const Place place;
    const T* own = image() +
                   Shape::corner(Shape::pixel(place.warp, place.lane % 16)) * Shared::kPitch +
                   place.lane / 16 * 8;
#pragma unroll
    for (int right = 0; right < 3; ++right) {
#pragma unroll
      for (int k = 0; k < C; k += 16) {
        uint32_t w[3][kPairs / 2][2][2];
#pragma unroll
        for (int down = 0; down < 3; ++down) {
#pragma unroll
          for (int j = 0; j < kPairs / 2; ++j) {
            const int tap = 3 * down + right;
            const int row = (OPPOSITE ? 8 - tap : tap) * C + 16 * j;
            load_b_by_columns<T>(w[down][j], weight1() + row * Shared::kPitch1 + k,
                                 Shared::kPitch1);
          }
        }
        // A row of pixels is above one tile, in another and below a third.
#pragma unroll
        for (int row = 0; row < kTiles + 2; ++row) {
          uint32_t a[4];
          ldmatrix_x4(a, own + (row * Shape::kHaloSide + right) * Shared::kPitch + k);
#pragma unroll
          for (int down = 0; down < 3; ++down) {
            const int r = row - down;
            if (r < 0 || r >= kTiles) continue;
#pragma unroll
            for (int j = 0; j < kPairs; ++j) mma<T>(sums[r][j], a, w[down][j / 2][j % 2]);
          }
        }
      }
    }
  }

  // Loads eight columns, from 8 * q on, of the weight whose output is the stream, for
  // `multiply_narrow`.
  __device__ void load_columns(uint32_t (&w)[kPairs], const Place& place, int q) const {
    load_narrow(w, weight2() + (8 * q + place.g) * Shared::kPitch2 + place.t * C / 4);
  }
  // sums += z of a tile times these columns.
  __device__ void multiply_narrow(float (&sums)[4], int r, const uint32_t (&w)[kPairs]) const {
#pragma unroll
    for (int j = 0; j < kPairs; j += 2) {
      const uint32_t a[4] = {z[r][0][j], z[r][1][j], z[r][0][j + 1], z[r][1][j + 1]};
      const uint32_t columns[2] = {w[j], w[j + 1]};
      mma<T>(sums, a, columns);
    }
  }
};

}  // namespace preact_kernels::cuda
