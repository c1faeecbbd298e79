#define PK_GENERIC
#include "../kernels/norm_act_conv_forward.h"
