#define PK_AMX_BF16
#include "../kernels/norm_act_conv_backward.h"
