#define PK_DTYPE BFloat16
#include "conv_forward_launch.cuh"
