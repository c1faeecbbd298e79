// The residual addition over a tile of pixels. Included once for each instruction set.

#include "bn_stats_kernels.h"

// y = x + branch.
template <class T>
void tile_residual_add(const T* x, const T* branch, T* y, int64_t values) {
  using A = Accumulate<T>;
  for_channel_blocks<A>(values, [&](auto vectors, int64_t at, auto lanes) PK_LAMBDA {
    for (int v = 0; v < decltype(vectors)::value; ++v) {
      const int64_t i = at + v * kLanes<A>;
      store(y + i, load(x + i, lanes) + load(branch + i, lanes), lanes);
    }
  });
}
