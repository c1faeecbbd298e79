#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"

namespace preact_kernels {

// Transposes contiguous matrices [M, R, C] to [M, C, R]. A task transposes a part of a matrix that
// fits the first-level cache.
Tensor transpose(const Tensor& x) {
  constexpr int64_t kRows = 64, kColumns = 64;
  check_tensor("x", x);
  PK_CHECK(x.dim() == 3 && x.is_contiguous(), "x: expected contiguous matrices [M, R, C]");
  PK_CHECK(x.element_size() == 2 || x.element_size() == 4, "x: expected values of 2 or 4 bytes");
  const int64_t count = x.size(0), rows = x.size(1), columns = x.size(2);
  const Tensor y = new_tensor(x, {count, columns, rows}, x.scalar_type());
  const auto run = [&](auto word) {
    using W = decltype(word);
    const W* from = static_cast<const W*>(x.const_data_ptr());
    W* to = static_cast<W*>(y.mutable_data_ptr());
    const int64_t row_parts = (rows + kRows - 1) / kRows;
    const int64_t parts = row_parts * ((columns + kColumns - 1) / kColumns);
    for_tiles(count * parts, [&](int64_t i) {
      const int64_t matrix = i / parts * rows * columns;
      const int64_t r = i % row_parts * kRows, c = i % parts / row_parts * kColumns;
      PK_CALL(transpose_part, from + matrix + r * columns + c, columns, to + matrix + c * rows + r,
              rows, std::min(kRows, rows - r), std::min(kColumns, columns - c));
    });
  };
  if (x.element_size() == 2) {
    run(uint16_t{});
  } else {
    run(uint32_t{});
  }
  return y;
}

}  // namespace preact_kernels
