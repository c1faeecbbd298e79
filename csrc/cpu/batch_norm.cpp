#include "batch_norm.h"

#include <cmath>

#include "../host/tensors.h"
#include "parallel.h"

namespace preact_kernels {

namespace {

// The distance between the rows of a table [N, C]; 0 for [C].
int64_t row_stride(const Tensor& t) { return t.dim() == 2 ? t.sizes()[1] : 0; }

template <class Body>
void for_norm_rows(int64_t rows, int64_t channels, const Body& body) {
  if (rows == 1) {
    body(0);
  } else {
    for_rows(rows, channels, body);
  }
}

}  // namespace

template <class A>
Normalisation<A>::Normalisation(const Norm& norm, int64_t channels)
    : has_rows(norm.has_rows()),
      mean_(data<A>(norm.mean)),
      bias_(data<A>(norm.bias)),
      mean_stride_(row_stride(norm.mean)),
      bias_stride_(norm.bias.has_value() ? row_stride(*norm.bias) : 0),
      scale_stride_(std::max(row_stride(norm.var), row_stride(norm.weight))),
      activation_(norm.activation) {
  const A *var = data<A>(norm.var), *weight = data<A>(norm.weight);
  const int64_t var_stride = row_stride(norm.var), weight_stride = row_stride(norm.weight);
  const int64_t rows =
      scale_stride_ == 0 ? 1 : (var_stride != 0 ? norm.var : norm.weight).sizes()[0];
  scale_.resize(rows * channels);
  rstd_.resize(rows * channels);
  for_norm_rows(rows, channels, [&](int64_t row) {
    for (int64_t c = 0; c < channels; ++c) {
      const double rstd = 1 / std::sqrt(double(var[row * var_stride + c]) + norm.eps);
      rstd_[row * channels + c] = rstd;
      scale_[row * channels + c] = static_cast<A>(weight[row * weight_stride + c] * rstd);
    }
  });
}

template <class A>
InputGradient<A>::InputGradient(const AffineStep& step, int64_t channels)
    : mean_(data<A>(step.norm.mean)),
      mean_stride_(row_stride(step.norm.mean)),
      stride_(step.has_rows() ? channels : 0),
      in_training_(step.inv_count != 0) {
  const A *var = data<A>(step.norm.var), *weight = data<A>(step.norm.weight);
  const int64_t var_stride = row_stride(step.norm.var);
  const int64_t weight_stride = row_stride(step.norm.weight);
  const bool has_rows = step.has_rows();
  const int64_t rows = has_rows ? step.sums.sizes()[1] : 1;
  const A *sums = data<A>(step.sums), *products = sums + rows * channels;
  a_.resize(rows * channels);
  b_.resize(rows * channels);
  c_.resize(rows * channels);
  for_norm_rows(rows, channels, [&](int64_t row) {
    for (int64_t i = 0; i < channels; ++i) {
      const int64_t at = row * channels + i;
      const double rstd = 1 / std::sqrt(double(var[row * var_stride + i]) + step.norm.eps);
      const double scale = weight[row * weight_stride + i] * rstd;
      a_[at] = static_cast<A>(scale);
      if (!in_training_) continue;
      const double pooled = has_rows ? rstd : scale;  // pooled sums contain the weight
      b_[at] = static_cast<A>(-pooled * rstd * products[at] * step.inv_count);
      c_[at] = static_cast<A>(-pooled * sums[at] * step.inv_count);
    }
  });
}

template <class A>
void merge_groups(const A* tiles, const PixelTiles& sizes, int64_t channels, int64_t groups,
                  A* mean_out, A* var_out) {
  const int64_t size = channels / groups;
  const double count = static_cast<double>(sizes.pixels * size);
  // The first pivot of each channel's group, its mean, and sums over tiles.
  std::vector<double> origin(channels), mean(channels), sums(channels), squares(channels);
  const auto fill = [&](auto* to, int64_t group, double value) {
    using Value = std::remove_pointer_t<decltype(to)>;
    std::fill_n(to + group * size, size, static_cast<Value>(value));
  };
  const auto total = [&](const std::vector<double>& of_channels, int64_t group) {
    double sum = 0;
    for (int64_t c = group * size; c < (group + 1) * size; ++c) sum += of_channels[c];
    return sum;
  };
  for (int64_t i = 0; i < groups; ++i) fill(origin.data(), i, tiles[i * size]);
  for (int64_t t = 0; t < sizes.count; ++t) {
    const A *pivot = tiles + t * 3 * channels, *sum = pivot + channels;
    const double n = static_cast<double>(sizes.length(t));
    for (int64_t c = 0; c < channels; ++c) sums[c] += n * (pivot[c] - origin[c]) + sum[c];
  }
  for (int64_t i = 0; i < groups; ++i) {
    const double value = origin[i * size] + total(sums, i) / count;
    fill(mean.data(), i, value);
    fill(mean_out, i, value);
  }
  for (int64_t t = 0; t < sizes.count; ++t) {
    const A *pivot = tiles + t * 3 * channels, *sum = pivot + channels, *square = sum + channels;
    const double n = static_cast<double>(sizes.length(t));
    for (int64_t c = 0; c < channels; ++c) {
      squares[c] += squares_around(mean[c], pivot[c], sum[c], square[c], sum[c] / n, n);
    }
  }
  for (int64_t i = 0; i < groups; ++i) fill(var_out, i, variance_of(total(squares, i), count));
}

template <class A>
void merge_sums(const double* tiles, int64_t count, int64_t channels, const double* rstd, A* out,
                A* products) {
  std::vector<double> total(2 * channels);
  for (int64_t t = 0; t < count; ++t) {
    const double* p = tiles + t * 2 * channels;
    for (int64_t i = 0; i < 2 * channels; ++i) total[i] += p[i];
  }
  for (int64_t c = 0; c < channels; ++c) {
    out[c] = static_cast<A>(total[c]);
    products[c] = static_cast<A>(total[channels + c] * rstd[c]);
  }
}

template <class A>
void TileSums<A>::merge(const Normalisation<A>& norm, int64_t images, A* out) {
  const int64_t rows = norm.has_rows ? images : 1, of_row = tiles / rows;
  for_norm_rows(rows, of_row * channels, [&](int64_t row) {
    A* to = out + row * channels;
    merge_sums(tile(row * of_row), of_row, channels, norm.rstd(row), to, to + rows * channels);
  });
}

#define PK_INSTANTIATE(A)                                                               \
  template class Normalisation<A>;                                                      \
  template class InputGradient<A>;                                                      \
  template struct TileSums<A>;                                                          \
  template void merge_groups<A>(const A*, const PixelTiles&, int64_t, int64_t, A*, A*); \
  template void merge_sums<A>(const double*, int64_t, int64_t, const double*, A*, A*);
PK_INSTANTIATE(float)
PK_INSTANTIATE(double)

}  // namespace preact_kernels
