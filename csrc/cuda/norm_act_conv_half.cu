#define PK_DTYPE Half
#include "conv_plans.cuh"
