#define PK_AVX512_BF16
#include "../kernels/norm_act_conv_forward.h"
