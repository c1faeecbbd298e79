#define PK_GENERIC
#include "../kernels/conv_weights.h"
