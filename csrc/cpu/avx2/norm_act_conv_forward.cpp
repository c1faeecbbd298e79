#define PK_AVX2
#include "../kernels/norm_act_conv_forward.h"
