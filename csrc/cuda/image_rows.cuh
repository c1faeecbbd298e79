// Grids over images, for norms with rows: tables [N, C] and sums of each image. Without rows all
// pixels of the batch are one image.
#pragma once

#include <algorithm>

#include "batch_norm.cuh"
#include "reduction.cuh"

namespace preact_kernels::cuda {

// The images of a launch, blockIdx.z: thread blocks in x share the pixels of one image.
struct ImageRows {
  PixelRows rows;  // of one image
  int64_t first;   // image of the batch

  __device__ int64_t image() const { return first + blockIdx.z; }
  // Index of the image's first element.
  __device__ int64_t begin() const { return image() * (rows.pixels * rows.channels); }
  // The image's part of the memory: `lines` of partials [channels], and counters.
  __device__ GridSums part_of(const GridSums& memory, unsigned lines, unsigned counters) const {
    return {memory.partials + image() * lines * rows.channels, memory.counter + image() * counters};
  }
};

struct ImageGrid {
  PixelRows rows;  // of one image
  int64_t images;
  dim3 thread_blocks;  // thread blocks of one image

  // Calls body(images, thread blocks) for each launch, with as many images as a grid may have.
  template <class Body>
  void for_each_launch(const Body& body) const {
    constexpr int64_t kMostImages = 65535;
    for (int64_t first = 0; first < images; first += kMostImages) {
      const auto count = static_cast<unsigned>(std::min(images - first, kMostImages));
      body(ImageRows{rows, first}, dim3(thread_blocks.x, thread_blocks.y, count));
    }
  }
};

// The grid that an image would have alone (`grid_for`).
inline ImageGrid whole_images(const ImageSizes& size, bool has_rows, int width, int steps,
                              int most_columns, int thread_blocks_per_multiprocessor) {
  const ImageSizes image{has_rows ? 1 : size.images, size.channels, size.height, size.width};
  const Grid grid = grid_for(image, width, steps, most_columns, thread_blocks_per_multiprocessor);
  return {grid.rows, has_rows ? size.images : 1, grid.thread_blocks};
}

// A grid for elementwise kernels: the images share the multiprocessors.
inline ImageGrid grid_for_images(const ImageSizes& size, bool has_rows, int width, int steps,
                                 int most_columns, int thread_blocks_per_multiprocessor) {
  ImageGrid grid =
      whole_images(size, has_rows, width, steps, most_columns, thread_blocks_per_multiprocessor);
  const int64_t most = thread_blocks_per_multiprocessor * multiprocessors() / grid.thread_blocks.y;
  const int64_t share = std::max<int64_t>(1, (most + grid.images - 1) / grid.images);
  grid.thread_blocks.x = static_cast<unsigned>(std::min<int64_t>(grid.thread_blocks.x, share));
  return grid;
}

// A grid for sums. The thread blocks of an image, and so the order of its sums, do not depend on
// the other images. A thread block has a few tiles, so that adding up its threads costs little in
// comparison.
inline ImageGrid grid_for_image_sums(const ImageSizes& size, bool has_rows, int width, int steps,
                                     int most_columns, int thread_blocks_per_multiprocessor) {
  constexpr int64_t kLeastTiles = 4;
  ImageGrid grid =
      whole_images(size, has_rows, width, steps, most_columns, thread_blocks_per_multiprocessor);
  const int64_t pixels = int64_t(grid.rows.thread_block_pixels) * steps * kLeastTiles;
  const int64_t share = (grid.rows.pixels + pixels - 1) / pixels;
  if (has_rows)
    grid.thread_blocks.x = static_cast<unsigned>(std::min<int64_t>(grid.thread_blocks.x, share));
  return grid;
}

// The distance between rows in each table of a norm; 0 if all images share one row.
struct RowStrides {
  int mean, var, weight, bias;
};

// A norm whose tables may have rows.
struct ImageNorm {
  NormPointers tables;
  RowStrides strides;

  __device__ NormPointers of(int64_t image) const {
    NormPointers norm = tables;
    norm.mean += image * strides.mean, norm.var += image * strides.var;
    norm.weight += image * strides.weight;
    if (norm.bias != nullptr) norm.bias += image * strides.bias;
    return norm;
  }
};

}  // namespace preact_kernels::cuda
