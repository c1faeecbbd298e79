#define PK_DTYPE Half
#include "conv_forward_launch.cuh"
