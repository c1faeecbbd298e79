// Grids over images, for norms with rows: tables [N, C] and sums of each image. Without rows all
// pixels of the batch are one image.
#pragma once

#include "batch_norm.cuh"
#include "reduction.cuh"

namespace preact_kernels::cuda {

// blockIdx.x counts the blocks of the first image, then those of the second, ...
struct ImageRows {
  PixelRows rows;   // of one image
  unsigned blocks;  // in x, of one image

  __device__ unsigned image() const { return blockIdx.x / blocks; }
  // The first element of this block's image.
  __device__ int64_t first() const { return image() * (rows.pixels * rows.channels); }
  template <int kWidth, int kSteps>
  __device__ ThreadRows<kWidth, kSteps> thread() const {
    return ThreadRows<kWidth, kSteps>(rows, blockIdx.x % blocks, blocks);
  }
  // The part of this block's image. It has `lines` of partials, of `channels`, and counters.
  __device__ GridSums part_of(const GridSums& memory, unsigned lines, unsigned counters) const {
    const int64_t image = this->image();
    return {memory.partials + image * lines * rows.channels, memory.counter + image * counters};
  }
};

struct ImageGrid {
  ImageRows images;
  dim3 blocks;
};

// A grid for `images`, each of `pixels`, channels in vectors of `width`, and at most `most_columns`
// vectors a block.
inline ImageGrid grid_for_images(const Activation& size, bool has_rows, int width, int steps,
                                 int most_columns, int blocks_per_multiprocessor) {
  const Activation image{has_rows ? 1 : size.images, size.channels, size.height, size.width};
  const auto [rows, blocks] =
      grid_for(image, width, steps, most_columns, blocks_per_multiprocessor);
  const unsigned images = has_rows ? static_cast<unsigned>(size.images) : 1;
  const unsigned most = blocks_per_multiprocessor * multiprocessors() / blocks.y;
  const unsigned share = (most + images - 1) / images;
  const unsigned blocks_x = std::max(1u, std::min(blocks.x, share));
  return {{rows, blocks_x}, dim3(images * blocks_x, blocks.y)};
}

// The same for sums: their order, and so the blocks of an image, do not depend on the other images.
// A block has a few tiles, which outweigh the addition of its threads.
inline ImageGrid grid_for_image_sums(const Activation& size, bool has_rows, int width, int steps,
                                     int most_columns, int blocks_per_multiprocessor) {
  if (!has_rows) {
    return grid_for_images(size, false, width, steps, most_columns, blocks_per_multiprocessor);
  }
  constexpr int64_t kLeastTiles = 4;
  const Activation image{1, size.channels, size.height, size.width};
  const auto [rows, blocks] =
      grid_for(image, width, steps, most_columns, blocks_per_multiprocessor);
  const int64_t pixels = int64_t(rows.block_pixels) * steps * kLeastTiles;
  const int64_t share = (rows.pixels + pixels - 1) / pixels;
  const unsigned blocks_x = std::min<int64_t>(blocks.x, share);
  return {{rows, blocks_x}, dim3(static_cast<unsigned>(size.images) * blocks_x, blocks.y)};
}

// From a row of each table of a norm to the next: 0 where all images share one.
struct RowStrides {
  int mean, var, weight, bias;
};

// A norm whose tables may have rows.
struct ImageNorm {
  NormPointers tables;
  RowStrides strides;

  __device__ NormPointers of(unsigned image) const {
    NormPointers norm = tables;
    const int64_t row = image;
    norm.mean += row * strides.mean, norm.var += row * strides.var;
    norm.weight += row * strides.weight;
    if (norm.bias != nullptr) norm.bias += row * strides.bias;
    return norm;
  }
};

}  // namespace preact_kernels::cuda
