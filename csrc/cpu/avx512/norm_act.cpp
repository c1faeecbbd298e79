#define PK_AVX512
#include "../kernels/norm_act.h"
