#define PK_DTYPE BFloat16
#define PK_FLOAT32_STREAM
#include "conv_backward_launch.cuh"
#include "conv_forward_launch.cuh"
