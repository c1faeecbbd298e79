// Dropout of a range of values, with one bit per value.

#include <algorithm>

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// Sets bit i % 8 of bits[i / 8] where drawn[i] is not 0; further bits are 0.
template <class T>
void range_bits(const T* drawn, uint8_t* bits, int64_t count) {
  using Word = std::conditional_t<sizeof(T) == 2, uint16_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  constexpr int kPart = 64;
  for (int64_t first = 0; first < count; first += kPart) {
    const int length = static_cast<int>(std::min<int64_t>(kPart, count - first));
    uint8_t kept[kPart] = {};
    const auto fill = [&](auto values) PK_LAMBDA {
      for (int i = 0; i < values; ++i) {
        Word word;
        std::memcpy(&word, drawn + first + i, sizeof word);
        kept[i] = word != 0;
      }
    };
    if (length == kPart) {
      fill(std::integral_constant<int, kPart>{});
    } else {
      fill(length);
    }
    for (int byte = 0; byte < (length + 7) / 8; ++byte) {
      uint64_t eight;
      std::memcpy(&eight, kept + 8 * byte, sizeof eight);
      // The highest byte of the product has the bits of the eight bytes, in order.
      bits[first / 8 + byte] = static_cast<uint8_t>((eight * 0x0102040810204080u) >> 56);
    }
  }
}

// values[i] *= noise[bits[i / 8]][i % 8].
template <class T>
void range_dropout(T* values, const uint8_t* bits, const Accumulate<T> (*noise)[8], int64_t count) {
  using A = Accumulate<T>;
  constexpr int kPart = std::max(8, kLanes<A>);
  for (int64_t first = 0; first < count; first += kPart) {
    A factors[kPart];
    const int64_t length = std::min<int64_t>(kPart, count - first);
    for (int at = 0; at < length; at += 8) {
      std::memcpy(factors + at, noise[bits[(first + at) / 8]], sizeof *noise);
    }
    const auto multiply = [&](int at, auto lanes) PK_LAMBDA {
      T* to = values + first + at;
      store(to, load(to, lanes) * load(factors + at), lanes);
    };
    for (int at = 0; at < length; at += kLanes<A>) {
      if (at + kLanes<A> <= length) {
        multiply(at, std::integral_constant<int, kLanes<A>>{});
      } else {
        multiply(at, static_cast<int>(length - at));
      }
    }
  }
}

#define PK_INSTANTIATE(T)                         \
  template decltype(range_bits<T>) range_bits<T>; \
  template decltype(range_dropout<T>) range_dropout<T>;
PK_FOR_DTYPES(PK_INSTANTIATE)

PK_END_ISA
