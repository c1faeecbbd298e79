// Batch norm and ReLU over a tile of pixels. Included once for each instruction set.

// y = relu(p) for p = (x - mean) * scale + bias.
template <class T>
void tile_bn_relu(const T* x, T* y, int64_t pixels, int64_t channels,
                  const Normalisation<Accumulate<T>>& norm) {
  using A = Accumulate<T>;
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> m[kVectors], s[kVectors], b[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      m[v] = load(norm.mean + c + v * kLanes<A>, lanes);
      s[v] = load(norm.scale.data() + c + v * kLanes<A>, lanes);
      b[v] = load(norm.bias + c + v * kLanes<A>, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + c + v * kLanes<A>;
        store(y + at, relu((load(x + at, lanes) - m[v]) * s[v] + b[v]), lanes);
      }
    }
  });
}

// g = dy * [p > 0], stored where `g` is given; sums (TileSums) of g as stored.
// Runs of pixels are added up in vectors, and runs in float64.
template <class T, bool kStore>
void tile_mask(std::bool_constant<kStore>, const T* dy, const T* x, T* g, int64_t pixels,
               int64_t channels, const Normalisation<Accumulate<T>>& norm, double* sums) {
  using A = Accumulate<T>;
  constexpr int64_t kRun = 16;
  std::fill(sums, sums + 2 * channels, 0.0);
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> m[kVectors], s[kVectors], b[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      m[v] = load(norm.mean + c + v * kLanes<A>, lanes);
      s[v] = load(norm.scale.data() + c + v * kLanes<A>, lanes);
      b[v] = load(norm.bias + c + v * kLanes<A>, lanes);
    }
    for (int64_t first = 0; first < pixels; first += kRun) {
      Vector<A> run_sum[kVectors] = {}, run_product[kVectors] = {};
      for (int64_t p = first; p < std::min(first + kRun, pixels); ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = p * channels + c + v * kLanes<A>;
          const Vector<A> d = load(x + at, lanes) - m[v];
          const Vector<A> masked =
              as_stored(x, where_active(d * s[v] + b[v], load(dy + at, lanes)));
          if constexpr (kStore) store(g + at, masked, lanes);
          run_sum[v] += masked;
          run_product[v] += masked * d;
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = c + v * kLanes<A>;
        for (int i = 0; i < lanes; ++i) {
          sums[at + i] += run_sum[v][i];
          sums[channels + at + i] += run_product[v][i];
        }
      }
    }
  });
}

// dx = [dy +] a*g + b*(x - mean) + c; with kMask, g is first set to 0 where p <= 0.
template <class T, bool kMask, bool kAdd>
void tile_input_gradient(std::bool_constant<kMask>, std::bool_constant<kAdd>, const T* dy,
                         const T* g, const T* x, T* dx, int64_t pixels, int64_t channels,
                         const Normalisation<Accumulate<T>>& norm,
                         const InputGradient<Accumulate<T>>& gradient) {
  using A = Accumulate<T>;
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t first, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> m[kVectors], s[kVectors], t[kVectors], a[kVectors], b[kVectors], c[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = first + v * kLanes<A>;
      m[v] = load(norm.mean + at, lanes);
      s[v] = load(norm.scale.data() + at, lanes);
      t[v] = load(norm.bias + at, lanes);
      a[v] = load(gradient.a.data() + at, lanes);
      b[v] = load(gradient.b.data() + at, lanes);
      c[v] = load(gradient.c.data() + at, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + first + v * kLanes<A>;
        const Vector<A> d = load(x + at, lanes) - m[v];
        Vector<A> masked = load(g + at, lanes);
        if constexpr (kMask) masked = where_active(d * s[v] + t[v], masked);
        Vector<A> result = a[v] * masked;
        if (!gradient.constant) result += b[v] * d + c[v];
        if constexpr (kAdd) result += load(dy + at, lanes);
        store(dx + at, result, lanes);
      }
    }
  });
}
