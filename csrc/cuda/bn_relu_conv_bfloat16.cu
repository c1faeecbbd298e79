#define PK_DTYPE BFloat16
#include "conv_backward_launch.cuh"
#include "conv_forward_launch.cuh"
