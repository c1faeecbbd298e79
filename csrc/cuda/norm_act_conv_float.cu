#define PK_DTYPE float
#include "conv_plans.cuh"
