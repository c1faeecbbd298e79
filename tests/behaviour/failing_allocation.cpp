// Loaded in front of glibc: makes one large allocation of a process fail.

#include <atomic>
#include <cerrno>
#include <cstddef>

// glibc's own names of the functions that are replaced.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

namespace {

std::atomic<size_t> least_bytes{0};  // of an allocation that counts; 0: none does
std::atomic<long> left{0};           // allocations until the one that fails
std::atomic<size_t> failed{0};       // bytes of the one that failed

bool fails(size_t bytes) {
  const size_t least = least_bytes.load();
  if (least == 0 || bytes < least || left.fetch_sub(1) != 0) return false;
  failed = bytes;
  return true;
}

void* out_of_memory() {
  errno = ENOMEM;
  return nullptr;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// From now on, allocations of at least `least` bytes count, and fails the one after `index` others.
EXPORTED void fail_allocation(long index, size_t least) {
  left = index;
  failed = 0;
  least_bytes = least;
}

// Ends the counting. Returns the bytes of the allocation that failed, or 0.
EXPORTED size_t failed_bytes() {
  least_bytes = 0;
  return failed;
}

EXPORTED void* malloc(size_t bytes) {
  return fails(bytes) ? out_of_memory() : __libc_malloc(bytes);
}

EXPORTED void* memalign(size_t alignment, size_t bytes) {
  return fails(bytes) ? out_of_memory() : __libc_memalign(alignment, bytes);
}

EXPORTED void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

EXPORTED int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  if (fails(bytes)) return ENOMEM;
  void* found = __libc_memalign(alignment, bytes);
  if (found == nullptr) return ENOMEM;
  *memory = found;
  return 0;
}
