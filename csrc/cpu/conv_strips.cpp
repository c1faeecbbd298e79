#include "conv_strips.h"

#include <torch/csrc/stable/ops.h>

namespace preact_kernels {

Strips::Strips(const ConvSizes& conv, bool has_rows) : conv(conv), images(1) {
  constexpr int64_t kLeastValues = 16 * 1024, kMostValues = 48 * 1024;
  constexpr int64_t kLeastStrips = 64, kLeastImageStrips = 16, kStripsPerThread = 4;
  const int64_t widest = std::max(conv.in_channels, conv.out_channels);
  const int64_t weights = conv.taps() * conv.in_channels * conv.out_channels;
  const int64_t values = std::clamp(weights, kLeastValues, kMostValues);
  if (conv.taps() == 1) {
    constexpr int64_t kWholeTiles = 42;  // whole tiles of 6 or 14 pixels
    const int64_t most = std::min(values / widest, conv.pixels() / kLeastStrips);
    length = std::max<int64_t>(most / kWholeTiles, 1) * kWholeTiles;
    const int64_t rows = has_rows ? conv.images : 1, pixels = conv.pixels() / rows;
    per_image = (pixels + length - 1) / length;
    if (has_rows) length = (pixels + per_image - 1) / per_image;
    count = rows * per_image;
    return;
  }
  const int64_t height = conv.out_height();
  const int64_t row_values = std::max(haloed_input(conv, 1, conv.width).pitch() * conv.stride.h,
                                      haloed_output(conv, 1, conv.out_width()).pitch());
  // Tiles of kernels/winograd.h have two rows.
  const int64_t unit = Winograd::serves(conv) ? 2 : 1, units = (height + unit - 1) / unit;
  const int64_t most = std::max<int64_t>(1, (values / row_values - 2 * conv.halo_h()) / unit);
  const int64_t wanted =
      std::max((units + most - 1) / most, std::min(units, kLeastImageStrips / conv.images));
  length = (units + wanted - 1) / wanted * unit;
  per_image = (height + length - 1) / length;
  if (per_image == 1) {
    const int64_t fitting = values / (row_values * (height + 2 * conv.halo_h()));
    const int64_t least_strips = kStripsPerThread * torch::stable::get_num_threads();
    images = std::max<int64_t>(1, std::min(fitting, conv.images / least_strips));
  }
  count = (conv.images + images - 1) / images * per_image;
}

Strip Strips::operator[](int64_t index) const {
  if (conv.taps() == 1) {
    const int64_t row = index / per_image, first = index % per_image * length;
    const int64_t row_pixels = this->row_pixels(), count = std::min(length, row_pixels - first);
    const Rows pixels{row * row_pixels + first, 0, 1, 1, count};
    return {pixels, pixels, index, row, 1};
  }
  const int64_t image = index / per_image * images;
  const int64_t row = index % per_image * length, in_row = row * conv.stride.h;
  const int64_t height = conv.out_height(), width = conv.out_width();
  const int64_t rows = std::min(length, height - row);
  const int64_t in_rows = std::min(rows * conv.stride.h, conv.height - in_row);
  return {{(image * conv.height + in_row) * conv.width, in_row, in_rows, conv.height, conv.width},
          {(image * height + row) * width, row, rows, height, width},
          index * images,
          image,
          std::min(images, conv.images - image)};
}

}  // namespace preact_kernels
