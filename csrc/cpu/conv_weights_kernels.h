// The weights of a convolution, packed. Included once for each instruction set.

#include "conv_product.h"
#include "pack_weights.h"

// Whether no weight is NaN or infinite.
template <class T>
bool is_finite(const ConvWeight<T>&, const void* packed, int64_t count) {
  return all_finite(static_cast<const Operand<T>*>(packed), count);
}
