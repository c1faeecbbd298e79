#define PK_GENERIC
#include "../kernels/norm_act.h"
