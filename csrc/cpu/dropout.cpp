#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"

namespace preact_kernels {

namespace {

constexpr int64_t kRange = 16 * 1024;  // values of a task, a multiple of 8

// Calls body(first, count) for ranges that cover all values.
template <class Body>
void for_ranges(int64_t values, const Body& body) {
  for_tiles((values + kRange - 1) / kRange, [&](int64_t range) {
    body(range * kRange, std::min(kRange, values - range * kRange));
  });
}

}  // namespace

// A bit for each value: whether it is not 0.
Tensor dropout_bits(const Tensor& drawn) {
  STD_TORCH_CHECK(drawn.is_contiguous(), "drawn: expected a contiguous tensor");
  const int64_t bytes = (drawn.numel() + 7) / 8;
  const Tensor bits =
      torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt, drawn.device());
  uint8_t* to = mutable_data<uint8_t>(bits);
  for_dtype(drawn.scalar_type(), [&](auto value) {
    const auto* from = data<decltype(value)>(drawn);
    for_ranges(drawn.numel(), [&](int64_t first, int64_t count) {
      PK_CALL(range_bits, from + first, to + first / 8, count);
    });
  });
  return bits;
}

// Multiplies each value, in the order of the memory, by `factor` where its bit is set, else by 0.
void dropout(const Tensor& values, const Tensor& bits, double factor) {
  int64_t last = 0;  // offset of the last value
  for (int64_t axis = 0; axis < values.dim(); ++axis) {
    last += (values.size(axis) - 1) * values.stride(axis);
  }
  STD_TORCH_CHECK(values.numel() == 0 || last + 1 == values.numel(),
                  "values: expected a dense tensor");
  STD_TORCH_CHECK(bits.scalar_type() == ScalarType::Byte && bits.is_contiguous() &&
                      bits.numel() == (values.numel() + 7) / 8,
                  "bits: expected a bit for each of ", values.numel(), " values");
  const uint8_t* first_bits = data<uint8_t>(bits);
  for_dtype(values.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const A kept = upcast(rounded_to<T>(static_cast<A>(factor)));
    A noise[256][8];
    for (int byte = 0; byte < 256; ++byte) {
      for (int bit = 0; bit < 8; ++bit) noise[byte][bit] = (byte >> bit & 1) != 0 ? kept : A(0);
    }
    T* to = mutable_data<T>(values);
    for_ranges(values.numel(), [&](int64_t first, int64_t count) {
      PK_CALL(range_dropout, to + first, first_bits + first / 8, noise, count);
    });
  });
}

}  // namespace preact_kernels
