#define PK_DTYPE BFloat16
#define PK_FLOAT32_STREAM
#include "conv_plans.cuh"
