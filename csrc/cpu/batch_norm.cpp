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
InputGradient<A>::InputGradient(const AffineStep& step, int64_t channels)
    : a(channels),
      b(channels),
      c(channels),
      mean(data<A>(step.norm.mean)),
      in_training(step.inv_count != 0) {
  const A *var = data<A>(step.norm.var), *weight = data<A>(step.norm.weight);
  const A* sums = data<A>(step.sums);
  for (int64_t i = 0; i < channels; ++i) {
    const double rstd = 1 / std::sqrt(double(var[i]) + step.norm.eps);
    const double scale = weight[i] * rstd;
    a[i] = static_cast<A>(scale);
    if (!in_training) continue;
    b[i] = static_cast<A>(-scale * rstd * sums[channels + i] * step.inv_count);
    c[i] = static_cast<A>(-scale * sums[i] * step.inv_count);
  }
}

template struct Normalisation<float>;
template struct Normalisation<double>;
template struct InputGradient<float>;
template struct InputGradient<double>;

}  // namespace preact_kernels
