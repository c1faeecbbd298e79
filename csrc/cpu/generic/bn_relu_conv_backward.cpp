#define PK_GENERIC
#include "../kernels/bn_relu_conv_backward.h"
