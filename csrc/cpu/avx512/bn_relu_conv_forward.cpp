#define PK_AVX512
#include "../kernels/bn_relu_conv_forward.h"
