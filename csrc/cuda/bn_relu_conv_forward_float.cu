#define PK_DTYPE float
#include "conv_forward_launch.cuh"
