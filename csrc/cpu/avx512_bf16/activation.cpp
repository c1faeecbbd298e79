#define PK_AVX512_BF16
#include "../kernels/activation.h"
