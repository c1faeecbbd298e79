// Ops with the faults that the sanitizers must report.

#include <torch/csrc/stable/library.h>

#include "cpu/dtypes.h"
#include "cpu/parallel.h"
#include "cpu/thread_buffer.h"

using namespace preact_kernels;

// AddressSanitizer reports an instruction once, so each site is a function of its own.
constexpr int kSites = 4;
template <int kSite>
int64_t read_at_site(const volatile uint8_t* memory, int64_t offset) {
  return memory[offset];
}

// Reads the byte at `offset` from the first value of a tensor, at site `site`.
static int64_t read_byte(const Tensor& t, int64_t offset, int64_t site) {
  constexpr decltype(&read_at_site<0>) kReads[kSites] = {read_at_site<0>, read_at_site<1>,
                                                         read_at_site<2>, read_at_site<3>};
  return kReads[site](static_cast<const volatile uint8_t*>(t.const_data_ptr()), offset);
}

// Reads the last byte of a tensor, even if its storage lacks it; 0 if the storage was freed.
static int64_t read_last(const Tensor& x) {
  int64_t last = 0;  // offset of the last value
  for (int64_t axis = 0; axis < x.dim(); ++axis) last += (x.size(axis) - 1) * x.stride(axis);
  const auto* memory = static_cast<const volatile uint8_t*>(x.const_data_ptr());
  const bool is_freed = reinterpret_cast<uintptr_t>(memory) < 4096;  // 0 and the storage's offset
  return is_freed || x.numel() == 0 ? 0 : memory[(last + 1) * int64_t(x.element_size()) - 1];
}

// Reads the byte at `offset` in a buffer of `bytes` bytes that had `earlier_bytes` bytes before.
static int64_t read_buffer(int64_t earlier_bytes, int64_t bytes, int64_t offset) {
  thread_buffer<uint8_t, Use::kScratch>(earlier_bytes);
  const volatile uint8_t* buffer = thread_buffer<uint8_t, Use::kScratch>(bytes);
  return buffer[offset];
}

// Every tile writes the value at its index modulo `values`.
static void write_tiles(const Tensor& t, int64_t tiles, int64_t values) {
  volatile float* written = static_cast<float*>(t.mutable_data_ptr());
  for_tiles(tiles, [&](int64_t tile) { written[tile % values] = 1; });
}

static int64_t multiply(int64_t a, int64_t b) { return a * b; }
static int64_t add(int64_t a, int64_t b) { return a + b; }

STABLE_TORCH_LIBRARY(preact_kernels_planted, m) {
  m.def("read_byte(Tensor t, int offset, int site) -> int");
  m.def("read_last(Tensor x) -> int");
  m.def("read_buffer(int earlier_bytes, int bytes, int offset) -> int");
  m.def("add(int a, int b) -> int");
  m.def("multiply(int a, int b) -> int");
  m.def("write_tiles(Tensor(a!) t, int tiles, int values) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_planted, CompositeExplicitAutograd, m) {
  m.impl("read_byte", TORCH_BOX(&read_byte));
  m.impl("read_last", TORCH_BOX(&read_last));
  m.impl("read_buffer", TORCH_BOX(&read_buffer));
  m.impl("add", TORCH_BOX(&add));
  m.impl("multiply", TORCH_BOX(&multiply));
  m.impl("write_tiles", TORCH_BOX(&write_tiles));
}
