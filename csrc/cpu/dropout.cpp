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

// Whether the values fill a range of memory, without gaps or overlap.
bool is_dense(const Tensor& t) {
  std::vector<bool> is_found(t.dim());
  for (int64_t found = 1; found < t.numel();) {
    int64_t axis = 0;
    while (axis < t.dim() && (is_found[axis] || t.size(axis) == 1 || t.stride(axis) != found)) {
      ++axis;
    }
    if (axis == t.dim()) return false;
    is_found[axis] = true;
    found *= t.size(axis);
  }
  return true;
}

}  // namespace

// Returns a bit for each value: 0 where the value is 0.
Tensor dropout_bits(const Tensor& drawn) {
  const ScalarType dtype = check_dtype("drawn", drawn);
  PK_CHECK(drawn.is_contiguous(), "drawn: expected a contiguous tensor");
  const Tensor bits = new_tensor(drawn, {(drawn.numel() + 7) / 8}, ScalarType::Byte);
  uint8_t* to = mutable_data<uint8_t>(bits);
  for_dtype(dtype, [&](auto value) {
    const auto* from = data<decltype(value)>(drawn);
    for_ranges(drawn.numel(), [&](int64_t first, int64_t count) {
      PK_CALL(range_bits, from + first, to + first / 8, count);
    });
  });
  return bits;
}

// Multiplies each value by `factor` where its bit is set, else by 0. Bits are in the order of the
// memory.
void dropout(const Tensor& values, const Tensor& bits, double factor) {
  const ScalarType dtype = check_dtype("values", values);
  PK_CHECK(is_dense(values), "values: expected a dense tensor");
  check_tensor("bits", bits);
  PK_CHECK(bits.scalar_type() == ScalarType::Byte && bits.is_contiguous(),
           "bits: expected contiguous bytes");
  check_shape("bits", bits, {(values.numel() + 7) / 8});
  const uint8_t* first_bits = data<uint8_t>(bits);
  for_dtype(dtype, [&](auto value) {
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
