// The residual addition over a tile of pixels.

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// y = x + branch.
template <class T>
void tile_residual_add(const T* x, const T* branch, T* y, int64_t values) {
  using A = Accumulate<T>;
  for_channel_vectors<A>(values, [&](auto vectors, int64_t at, auto lanes) PK_LAMBDA {
    for (int v = 0; v < decltype(vectors)::value; ++v) {
      const int64_t i = at + v * kLanes<A>;
      store(y + i, load(x + i, lanes) + load(branch + i, lanes), lanes);
    }
  });
}

#define PK_INSTANTIATE(T) template decltype(tile_residual_add<T>) tile_residual_add<T>;
PK_FOR_DTYPES(PK_INSTANTIATE)

PK_END_ISA
