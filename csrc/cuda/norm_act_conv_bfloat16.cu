#define PK_DTYPE BFloat16
#include "conv_plans.cuh"
