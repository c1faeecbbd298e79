// Memory of images.
//
// PyTorch's CPU allocator calls posix_memalign, which asks glibc's heap for more than it keeps: the
// hole that a freed tensor leaves is too small for the next tensor of its size, and the heap grows
// to several times what is in use. Memory from malloc fits its holes.

#include <cstdlib>
#include <memory>

#include "asan.h"
#include "dtypes.h"
#include "thread_buffer.h"

namespace preact_kernels {

namespace {

constexpr size_t kAlignment = 64;  // as in PyTorch's allocator

// Tests set this: outputs that a kernel does not write are then NaN in every dtype.
bool is_poisoned() {
  static const char* value = std::getenv("PREACT_KERNELS_POISON");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

// The start of the allocation, which is stored in front of the first value.
void*& start_of(void* values) { return static_cast<void**>(values)[-1]; }

void* allocate(size_t bytes) {
  void* start = std::malloc(bytes + kAlignment);
  if (start == nullptr) fail_to_allocate(bytes);
  // malloc aligns to at least a pointer and its size: there is room for `start`.
  const uintptr_t address = (reinterpret_cast<uintptr_t>(start) / kAlignment + 1) * kAlignment;
  void* values = reinterpret_cast<void*>(address);
  start_of(values) = start;
  // Both ends of the allocation are unused.
  ASAN_POISON_MEMORY_REGION(start, address - reinterpret_cast<uintptr_t>(start));
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(values) + bytes,
                            reinterpret_cast<uintptr_t>(start) + kAlignment - address);
  if (is_poisoned()) std::memset(values, 0xff, bytes);
  return values;
}

void release(void* values) {
  ASAN_UNPOISON_MEMORY_REGION(&start_of(values), sizeof(void*));
  std::free(start_of(values));
}

}  // namespace

void fail_to_allocate(int64_t bytes) {
  fail("CPU out of memory. Tried to allocate ", bytes, " bytes.");
}

Tensor empty_nhwc(const Tensor& like, const ImageSizes& size, ScalarType dtype) {
  const int64_t sizes[] = {size.images, size.channels, size.height, size.width};
  int64_t bytes = for_dtype(dtype, [](auto value) { return sizeof value; });
  for (const int64_t count : sizes) {
    PK_CHECK(!__builtin_mul_overflow(bytes, count, &bytes),
             "CPU out of memory. Tried to allocate 2**63 bytes or more.");
  }
  const int64_t row = size.width * size.channels;
  const int64_t strides[] = {size.height * row, 1, row, size.channels};
  std::unique_ptr<void, void (*)(void*)> values(allocate(bytes), release);
  const Tensor t = torch::stable::from_blob(values.get(), {sizes, 4}, {strides, 4}, like.device(),
                                            dtype, release);
  values.release();  // t owns them
  return t;
}

}  // namespace preact_kernels
