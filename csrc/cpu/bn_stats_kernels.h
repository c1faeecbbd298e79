// Statistics of a tile of pixels. Included once for each instruction set.

// mean = sum(x) / pixels and squares = sum((x - mean)^2) of each channel, two passes over a tile
// that lies in the cache. The sum is taken of x - pivot, the tile's first pixel, so that large
// means cost no accuracy.
template <class T>
void tile_statistics(const T* x, int64_t pixels, int64_t channels, Accumulate<T>* mean,
                     Accumulate<T>* squares) {
  using A = Accumulate<T>;
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> centre[kVectors], sum[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) centre[v] = load(x + c + v * kLanes<A>, lanes);
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        sum[v] += load(x + p * channels + c + v * kLanes<A>, lanes) - centre[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      centre[v] += sum[v] / A(pixels);
      sum[v] = Vector<A>{};
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const Vector<A> d = load(x + p * channels + c + v * kLanes<A>, lanes) - centre[v];
        sum[v] += d * d;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      store(mean + c + v * kLanes<A>, centre[v], lanes);
      store(squares + c + v * kLanes<A>, sum[v], lanes);
    }
  });
}
