#include "batch_norm.h"

#include <cmath>

#include "../host/tensors.h"

namespace preact_kernels {

template <class A>
Normalisation<A>::Normalisation(const Norm& norm, int64_t channels)
    : mean(data<A>(norm.mean)), bias(data<A>(norm.bias)), scale(channels), rstd(channels) {
  const A *var = data<A>(norm.var), *weight = data<A>(norm.weight);
  for (int64_t c = 0; c < channels; ++c) {
    rstd[c] = 1 / std::sqrt(double(var[c]) + norm.eps);
    scale[c] = static_cast<A>(weight[c] * rstd[c]);
  }
}

template <class A>
InputGradient<A>::InputGradient(const AffineStep& fold, int64_t channels)
    : a(channels),
      b(channels),
      c(channels),
      mean(data<A>(fold.norm.mean)),
      in_training(fold.inv_count != 0) {
  const A *var = data<A>(fold.norm.var), *weight = data<A>(fold.norm.weight);
  const A* sums = data<A>(fold.sums);
  for (int64_t i = 0; i < channels; ++i) {
    const double rstd = 1 / std::sqrt(double(var[i]) + fold.norm.eps);
    const double scale = weight[i] * rstd;
    a[i] = static_cast<A>(scale);
    if (!in_training) continue;
    b[i] = static_cast<A>(-scale * rstd * sums[channels + i] * fold.inv_count);
    c[i] = static_cast<A>(-scale * sums[i] * fold.inv_count);
  }
}

template struct Normalisation<float>;
template struct Normalisation<double>;
template struct InputGradient<float>;
template struct InputGradient<double>;

}  // namespace preact_kernels
