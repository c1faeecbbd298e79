#define PK_AVX512
#include "../kernels/norm_act_conv_backward.h"
