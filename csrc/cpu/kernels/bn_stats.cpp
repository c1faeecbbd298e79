// Statistics of a tile of pixels.

#include <algorithm>

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// statistics = [pivot, sum(d), sum(d^2)] of each channel, for d = x - pivot (TileStatistics). The
// pivot is the mean of the first pixels. Sums few pixels first, then these sums: the error grows
// with the length of a sum.
template <class T>
void tile_statistics(const T* x, int64_t pixels, int64_t channels, Accumulate<T>* statistics) {
  using A = Accumulate<T>;
  constexpr int64_t kShortSum = 16;
  for_channel_vectors<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> pivot[kVectors], sum[kVectors] = {}, square[kVectors] = {};
    const int64_t leading = std::min(kShortSum, pixels);
    for (int v = 0; v < kVectors; ++v) {
      pivot[v] = Vector<A>{};
      for (int64_t p = 0; p < leading; ++p) {
        pivot[v] += load(x + p * channels + c + v * kLanes<A>, lanes);
      }
      pivot[v] = finite_or_zero(pivot[v] * (A(1) / A(leading)));
    }
    for (int64_t first = 0; first < pixels; first += kShortSum) {
      Vector<A> s[kVectors] = {}, q[kVectors] = {};
      for (int64_t p = first; p < std::min(first + kShortSum, pixels); ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const Vector<A> d = load(x + p * channels + c + v * kLanes<A>, lanes) - pivot[v];
          s[v] += d;
          q[v] += d * d;
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        sum[v] += s[v];
        square[v] += q[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      A* to = statistics + c + v * kLanes<A>;
      store(to, pivot[v], lanes);
      store(to + channels, sum[v], lanes);
      store(to + 2 * channels, square[v], lanes);
    }
  });
}

#define PK_INSTANTIATE(T) template decltype(tile_statistics<T>) tile_statistics<T>;
PK_FOR_DTYPES(PK_INSTANTIATE)

PK_END_ISA
