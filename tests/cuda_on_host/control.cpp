// What tests set, from Python.

#include "device.h"

// The order of threads and blocks, and how many multiprocessors launches are told of.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_set(uint64_t seed,
                                                                        int multiprocessors) {
  cuda_on_host::settings.seed = seed;
  cuda_on_host::settings.multiprocessors = multiprocessors;
}
