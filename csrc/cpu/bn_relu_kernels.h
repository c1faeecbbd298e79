// Batch norm and ReLU over a tile of pixels. Included once for each instruction set.

// y = relu(x * scale + shift).
template <class T>
void tile_bn_relu(const T* x, T* y, int64_t pixels, int64_t channels, const Accumulate<T>* scale,
                  const Accumulate<T>* shift) {
  using A = Accumulate<T>;
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> s[kVectors], b[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      s[v] = load(scale + c + v * kLanes<A>, lanes);
      b[v] = load(shift + c + v * kLanes<A>, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + c + v * kLanes<A>;
        store(y + at, relu(load(x + at, lanes) * s[v] + b[v]), lanes);
      }
    }
  });
}

// g = dy * [p > 0], stored where `g` is given; sums = [sum(g), sum(g * xhat)] of g as stored.
template <class T, bool kStore>
void tile_mask(std::bool_constant<kStore>, const T* dy, const T* x, T* g, int64_t pixels,
               int64_t channels, const Accumulate<T>* scale, const Accumulate<T>* shift,
               const Accumulate<T>* mean, const Accumulate<T>* rstd, Accumulate<T>* sums) {
  using A = Accumulate<T>;
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> s[kVectors], b[kVectors], m[kVectors], sum[kVectors] = {}, product[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) {
      s[v] = load(scale + c + v * kLanes<A>, lanes);
      b[v] = load(shift + c + v * kLanes<A>, lanes);
      m[v] = load(mean + c + v * kLanes<A>, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + c + v * kLanes<A>;
        const Vector<A> value = load(x + at, lanes);
        const Vector<A> masked = where_active(value * s[v] + b[v], load(dy + at, lanes));
        if constexpr (kStore) store(g + at, masked, lanes);
        sum[v] += masked;
        product[v] += masked * (value - m[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = c + v * kLanes<A>;
      store(sums + at, sum[v], lanes);
      store(sums + channels + at, product[v] * load(rstd + at, lanes), lanes);
    }
  });
}

// dx = [dy +] a*g + b*(x - mean) + c; with kMask, g is first set to 0 where p <= 0.
template <class T, bool kMask, bool kAdd>
void tile_input_gradient(std::bool_constant<kMask>, std::bool_constant<kAdd>, const T* dy,
                         const T* g, const T* x, T* dx, int64_t pixels, int64_t channels,
                         const Accumulate<T>* scale, const Accumulate<T>* shift,
                         const Accumulate<T>* mean, const Accumulate<T>* a, const Accumulate<T>* b,
                         const Accumulate<T>* c) {
  using A = Accumulate<T>;
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t first, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> s[kVectors], t[kVectors], m[kVectors], va[kVectors], vb[kVectors], vc[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = first + v * kLanes<A>;
      if constexpr (kMask) {
        s[v] = load(scale + at, lanes);
        t[v] = load(shift + at, lanes);
      }
      m[v] = load(mean + at, lanes);
      va[v] = load(a + at, lanes);
      vb[v] = load(b + at, lanes);
      vc[v] = load(c + at, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + first + v * kLanes<A>;
        const Vector<A> value = load(x + at, lanes);
        Vector<A> gradient = load(g + at, lanes);
        if constexpr (kMask) gradient = where_active(value * s[v] + t[v], gradient);
        Vector<A> result = va[v] * gradient + (vb[v] * (value - m[v]) + vc[v]);
        if constexpr (kAdd) result += load(dy + at, lanes);
        store(dx + at, result, lanes);
      }
    }
  });
}
