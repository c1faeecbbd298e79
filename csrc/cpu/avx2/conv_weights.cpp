#define PK_AVX2
#include "../kernels/conv_weights.h"
