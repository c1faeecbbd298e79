#define PK_DTYPE Half
#define PK_FLOAT32_STREAM
#include "conv_plans.cuh"
