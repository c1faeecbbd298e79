#define PK_DTYPE float
#include "conv_backward_launch.cuh"
#include "conv_forward_launch.cuh"
