// Transposes matrices of 2-byte or 4-byte values.

#include <algorithm>

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// Rows and columns that registers transpose at a time.
template <class W>
constexpr int kSquareRows = kLanes<float> * 4 / sizeof(W);
constexpr int kSquareColumns = kLanes<float>;

// A row of kSquareColumns words: the values of one row, or of two rows in pairs.
PK_INLINE FullBits load_words(const uint32_t* in, int64_t) {
  FullBits words;
  __builtin_memcpy(&words, in, sizeof words);
  return words;
}
PK_INLINE FullBits load_words(const uint16_t* in, int64_t step) {
  HalfBits first, second;
  __builtin_memcpy(&first, in, sizeof first);
  __builtin_memcpy(&second, in + step, sizeof second);
  return __builtin_convertvector(first, FullBits) | __builtin_convertvector(second, FullBits) << 16;
}

// out[c][r] = in[r][c] for kSquareRows rows and kSquareColumns columns.
template <class W>
PK_INLINE void transpose_square(const W* in, int64_t in_step, W* out, int64_t out_step) {
  constexpr int kRowsOfWord = 4 / sizeof(W);
  FullBits square[kSquareColumns];
#pragma GCC unroll 16
  for (int i = 0; i < kSquareColumns; ++i) {
    square[i] = load_words(in + i * kRowsOfWord * in_step, in_step);
  }
  transpose(square);
#pragma GCC unroll 16
  for (int c = 0; c < kSquareColumns; ++c) {
    __builtin_memcpy(out + c * out_step, &square[c], sizeof square[c]);
  }
}

// out[c][r] = in[r][c] for `rows` rows and `columns` columns, of larger matrices.
template <class W>
void transpose_part(const W* in, int64_t in_step, W* out, int64_t out_step, int64_t rows,
                    int64_t columns) {
  constexpr int kRows = kSquareRows<W>, kColumns = kSquareColumns;
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t row_count = std::min<int64_t>(kRows, rows - r);
    for (int64_t c = 0; c < columns; c += kColumns) {
      const int64_t column_count = std::min<int64_t>(kColumns, columns - c);
      const W* from = in + r * in_step + c;
      W* to = out + c * out_step + r;
      if (row_count == kRows && column_count == kColumns) {
        transpose_square(from, in_step, to, out_step);
        continue;
      }
      for (int64_t j = 0; j < column_count; ++j) {
        for (int64_t i = 0; i < row_count; ++i) to[j * out_step + i] = from[i * in_step + j];
      }
    }
  }
}

#define PK_INSTANTIATE(W) template decltype(transpose_part<W>) transpose_part<W>;
PK_FOR_WORDS(PK_INSTANTIATE)

PK_END_ISA
