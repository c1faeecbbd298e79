#define PK_DTYPE Half
#include "conv_backward_launch.cuh"
#include "conv_forward_launch.cuh"
