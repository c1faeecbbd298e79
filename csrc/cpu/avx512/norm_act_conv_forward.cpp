#define PK_AVX512
#include "../kernels/norm_act_conv_forward.h"
