// Statistics of a tile of pixels.

#include <algorithm>

#include "../kernels.h"
#include "tile_vectors.h"

PK_BEGIN_ISA

// statistics = [pivot, sum(d), sum(d^2)] of each channel, for d = x - pivot (TileStatistics). The
// pivot is the mean of the first pixels. Sums few pixels first, then these sums: the error grows
// with the length of a sum.
template <class T>
void tile_statistics(const T* x, int64_t pixels, int64_t channels, Accumulate<T>* statistics) {
  using A = Accumulate<T>;
  constexpr int64_t kShortSum = 16;
  const int64_t leading = std::min(kShortSum, pixels);
  std::fill(statistics, statistics + 3 * channels, A(0));
  A *sums = statistics + channels, *squares = sums + channels;
  for_tile_vectors<A, 8>(leading, channels,
                         [&](auto vectors, int64_t c, auto lanes, int64_t first, int64_t count,
                             int64_t step) PK_LAMBDA {
                           for (int v = 0; v < decltype(vectors)::value; ++v) {
                             A* to = statistics + c + v * kLanes<A>;
                             Vector<A> sum = load(to, lanes);
                             for (int64_t p = 0; p < count; ++p) {
                               sum += load(x + first + p * step + v * kLanes<A>, lanes);
                             }
                             store(to, sum, lanes);
                           }
                         });
  for_channel_vectors<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    for (int v = 0; v < decltype(vectors)::value; ++v) {
      A* pivot = statistics + c + v * kLanes<A>;
      store(pivot, finite_or_zero(load(pivot, lanes) * (A(1) / A(leading))), lanes);
    }
  });
  for_tile_vectors<A, 8>(
      pixels, channels,
      [&](auto vectors, int64_t c, auto lanes, int64_t first, int64_t count, int64_t step)
          PK_LAMBDA {
            constexpr int kVectors = decltype(vectors)::value;
            Vector<A> pivot[kVectors], sum[kVectors], square[kVectors];
            for (int v = 0; v < kVectors; ++v) {
              const int64_t at = c + v * kLanes<A>;
              pivot[v] = load(statistics + at, lanes);
              sum[v] = load(sums + at, lanes);
              square[v] = load(squares + at, lanes);
            }
            for (int64_t begin = 0; begin < count; begin += kShortSum) {
              Vector<A> s[kVectors] = {}, q[kVectors] = {};
              for (int64_t p = begin; p < std::min(begin + kShortSum, count); ++p) {
                for (int v = 0; v < kVectors; ++v) {
                  const Vector<A> d = load(x + first + p * step + v * kLanes<A>, lanes) - pivot[v];
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
              const int64_t at = c + v * kLanes<A>;
              store(sums + at, sum[v], lanes);
              store(squares + at, square[v], lanes);
            }
          });
}

#define PK_INSTANTIATE(T) template decltype(tile_statistics<T>) tile_statistics<T>;
PK_FOR_DTYPES(PK_INSTANTIATE)

PK_END_ISA
