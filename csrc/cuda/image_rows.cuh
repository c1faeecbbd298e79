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
  unsigned parts;  // of the sums of an image

  __device__ int64_t image() const { return first + blockIdx.z; }
  // Index of the image's first element.
  __device__ int64_t begin() const { return image() * (rows.pixels * rows.channels); }
  // Calls body(part) for the parts of the thread block.
  template <class Body>
  __device__ void for_each_part(const Body& body) const {
    for (unsigned part = blockIdx.x; part < parts; part += gridDim.x) body(part);
  }
  // The image's part of the memory: `lines` of partials [channels], and counters.
  __device__ GridSums part_of(const GridSums& memory, unsigned lines, unsigned counters) const {
    return {memory.partials + image() * lines * rows.channels, memory.counter + image() * counters};
  }
};

struct ImageGrid {
  PixelRows rows;  // of one image
  int64_t images;
  dim3 thread_blocks;  // thread blocks of one image
  unsigned parts;      // of the sums of an image

  // Calls body(images, thread blocks) for each launch, with as many images as a grid may have.
  template <class Body>
  void for_each_launch(const Body& body) const {
    constexpr int64_t kMostImages = 65535;
    for (int64_t first = 0; first < images; first += kMostImages) {
      const auto count = static_cast<unsigned>(std::min(images - first, kMostImages));
      body(ImageRows{rows, first, parts}, dim3(thread_blocks.x, thread_blocks.y, count));
    }
  }
};

// The grid that an image would have alone (`grid_for`).
inline ImageGrid whole_images(const ImageSizes& size, bool has_rows, int width, int steps,
                              int most_columns, int thread_blocks_per_multiprocessor) {
  const ImageSizes image{has_rows ? 1 : size.images, size.channels, size.height, size.width};
  const Grid grid = grid_for(image, width, steps, most_columns, thread_blocks_per_multiprocessor);
  return {grid.rows, has_rows ? size.images : 1, grid.thread_blocks, grid.thread_blocks.x};
}

// Thread blocks for each of `columns`, so that together they fill one wave of `at_once`, the thread
// blocks that the multiprocessors run at once, or several waves if one would leave many idle. A few
// thread blocks more than a wave would take as long as another wave.
inline int64_t share_of_waves(int64_t at_once, int64_t columns) {
  constexpr int64_t kWaves = 4;
  const int64_t share = at_once / columns;
  const bool is_full = 8 * share * columns >= 7 * at_once;
  return is_full ? share : (kWaves * at_once + columns - 1) / columns;
}

// A grid for elementwise kernels: the images share the multiprocessors.
inline ImageGrid grid_for_images(const ImageSizes& size, bool has_rows, int width, int steps,
                                 int most_columns, int thread_blocks_per_multiprocessor) {
  ImageGrid grid =
      whole_images(size, has_rows, width, steps, most_columns, thread_blocks_per_multiprocessor);
  const int64_t share = share_of_waves(thread_blocks_per_multiprocessor * multiprocessors(),
                                       grid.images * grid.thread_blocks.y);
  grid.thread_blocks.x = static_cast<unsigned>(std::min<int64_t>(grid.thread_blocks.x, share));
  return grid;
}

// A grid for sums. The parts of an image's sums, and so their order, do not depend on the other
// images. A part has a few tiles, so that adding up the threads of a thread block costs little in
// comparison.
inline ImageGrid grid_for_image_sums(const ImageSizes& size, bool has_rows, int width, int steps,
                                     int most_columns, int thread_blocks_per_multiprocessor) {
  constexpr int64_t kLeastTiles = 4;
  ImageGrid grid =
      whole_images(size, has_rows, width, steps, most_columns, thread_blocks_per_multiprocessor);
  if (!has_rows) return grid;
  const int64_t pixels = int64_t(grid.rows.thread_block_pixels) * steps * kLeastTiles;
  const int64_t parts = (grid.rows.pixels + pixels - 1) / pixels;
  grid.parts = static_cast<unsigned>(std::min<int64_t>(grid.thread_blocks.x, parts));
  const int64_t share = share_of_waves(thread_blocks_per_multiprocessor * multiprocessors(),
                                       grid.images * grid.thread_blocks.y);
  grid.thread_blocks.x = static_cast<unsigned>(std::min<int64_t>(grid.parts, share));
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
