#define PK_AVX512
#include "../kernels/conv_weights.h"
