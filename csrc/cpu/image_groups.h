// The plan of a weight-stationary convolution: large weights, few pixels.
//
// Strips would read all weights, and add to their whole gradient, for every few pixels. Here a task
// computes some output channels for a group of images: it packs the part of their weights that fits
// a second-level cache, multiplies all pixels with it, and continues with the next part. A task of
// the weight gradient computes its part over all pixels, so there are no partial gradients to
// merge.
#pragma once

#include "conv_strips.h"

namespace preact_kernels {

// The operand of a weight-stationary product: pixels of several images with a halo, in the order
// [row][column][image]. Neighbours are the same pixel of several images, so tiles are full even in
// narrow images. The columns of the halo are zero. Its rows are neither written nor read, as taps
// in them are left out. With a stride, columns are grouped by their remainder: the columns of one
// tap are neighbours.
struct Interleaved {
  int64_t rows, columns, column_step, images, channels;

  // The distance between images in values. Not a power of two: a cache would hold few of the
  // pixels.
  int64_t step() const {
    const int64_t padded = channels + kPadding;
    return (padded & (padded - 1)) == 0 ? padded + kPadding : padded;
  }
  int64_t pitch() const { return columns * images * step(); }
  int64_t values() const { return rows * pitch(); }
  int64_t offset(int64_t row, int64_t column) const {
    const int64_t place = column % column_step * (columns / column_step) + column / column_step;
    return row * pitch() + place * images * step();
  }

 private:
  static constexpr int64_t kPadding = 32;
};

// The part of act(p) that a strip of whole images reads. Images beyond the strip's are zero: dot
// products need an even number.
inline Interleaved interleaved_input(const ConvSizes& conv, const Strip& strip, int64_t images) {
  const int64_t width = strip.in.width + 2 * conv.halo_w(), step = conv.stride.w;
  return {strip.in.rows + 2 * conv.halo_h(), (width + step - 1) / step * step, step, images,
          conv.in_channels};
}

// The gradient of the strip's output.
inline Interleaved interleaved_output(const ConvSizes& conv, const Strip& strip, int64_t images) {
  return {strip.out.rows + 2 * conv.halo_h(), strip.out.width + 2 * conv.halo_w(), 1, images,
          conv.out_channels};
}

// All groups of images of a batch. For a 1x1 kernel the batch is one image of one row, and a group
// is some of its pixels, unless a norm has rows.
struct ImageGroups {
  // Tiles stay in one column if a column has whole tiles of this many images.
  static constexpr int64_t kWholeTile = 8;

  ConvSizes conv;
  bool are_images;      // else pixels
  int64_t size, count;  // images or pixels of a group, and number of groups

  ImageGroups(const ConvSizes& conv, bool has_rows)
      : conv(conv), are_images(conv.taps() > 1 || has_rows) {
    constexpr int64_t kPixels = 1024;  // pixels of a group, approximately
    const int64_t pixels = are_images ? conv.height * conv.width : 1;
    const int64_t most = std::max<int64_t>(1, kPixels / pixels);
    const int64_t parts = (length() + most - 1) / most;
    size = (length() + parts - 1) / parts;
    if (size > kWholeTile) size = (size + kWholeTile - 1) / kWholeTile * kWholeTile;
    count = (length() + size - 1) / size;
  }

  Strip operator[](int64_t index) const {
    const int64_t first = index * size, group = std::min(size, length() - first);
    if (!are_images) {
      const Rows pixels{first, 0, 1, 1, group};
      return {pixels, pixels, 0, 0, 1};
    }
    const int64_t height = conv.out_height(), width = conv.out_width();
    return {{first * conv.height * conv.width, 0, conv.height, conv.height, conv.width},
            {first * height * width, 0, height, height, width},
            0,
            first,
            group};
  }

  int64_t length() const { return are_images ? conv.images : conv.pixels(); }
  // The images of an operand: an even number for dot products, which read pairs.
  int64_t images(const Strip& strip, bool pairs) const {
    return pairs && are_images ? (strip.images + 1) / 2 * 2 : strip.images;
  }
};

// The tiles of statistics and sums: some pixels of one image.
struct ImageTiles {
  const ImageGroups& groups;
  Rows Strip::* side;  // the input or the output
  int64_t channels;

  PixelTiles of_image(const Strip& strip) const {
    return {(strip.*side).rows * (strip.*side).width, channels};
  }
  int64_t of_group(const Strip& strip) const { return strip.images * of_image(strip).count; }
  int64_t first(int64_t group) const { return group * of_group(groups[0]); }
  int64_t count() const { return first(groups.count - 1) + of_group(groups[groups.count - 1]); }
};

// Columns [first, first + count) of a row of an image of a group.
struct RowPart {
  int64_t image, row, first, count;
};

// The products of output channels from `channel` on with all pixels of a group of images.
template <class T>
struct StationaryTask {
  const ConvSizes& conv;
  const Strip& strip;
  const Interleaved& layout;  // layout of the operand
  const ConvWeight<T>& weight;
  const PixelTiles tiles;  // tiles of an image of the result
  const void* operand = nullptr;
  int64_t in_channels = 0, out_channels = 0, channel = 0;  // channels of the product
  void* packed = nullptr;                                  // memory of weights
  Accumulate<T>* sums = nullptr;           // memory: [pixel][image][channel of the task]
  Accumulate<T>* sums_of_tiles = nullptr;  // memory of the input gradient: [tile][2][channel]
};

}  // namespace preact_kernels
