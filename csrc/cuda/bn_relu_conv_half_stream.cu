#define PK_DTYPE Half
#define PK_FLOAT32_STREAM
#include "conv_backward_launch.cuh"
#include "conv_forward_launch.cuh"
