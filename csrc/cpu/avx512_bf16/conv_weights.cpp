#define PK_AVX512_BF16
#include "../kernels/conv_weights.h"
