#define PK_AVX2
#include "../kernels/bn_relu_conv_forward.h"
