#define PK_AVX512_BF16
#include "../kernels/bn_relu_conv_forward.h"
