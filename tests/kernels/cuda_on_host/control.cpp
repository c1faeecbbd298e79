// What tests set, from Python.

#include "device.h"

// The order of threads and blocks, how many multiprocessors launches are told of, and how many
// blocks run at once.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_set(uint64_t seed,
                                                                        int multiprocessors,
                                                                        int resident_blocks) {
  cuda_on_host::settings.seed = seed;
  cuda_on_host::settings.multiprocessors = multiprocessors;
  cuda_on_host::settings.resident_blocks = resident_blocks;
}

// The shared memory that a block may have.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_limit_shared(size_t bytes) {
  cuda_on_host::settings.most_shared_bytes = bytes;
}

// How many dependent launches have started while the one ahead had not begun.
extern "C" __attribute__((visibility("default"))) int64_t cuda_on_host_early_starts() {
  return cuda_on_host::settings.early_starts;
}

// What is called in place of every launch and fill; null runs them again.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_listen(
    void (*listener)(const cuda_on_host::Launch*)) {
  cuda_on_host::settings.listener = listener;
}
