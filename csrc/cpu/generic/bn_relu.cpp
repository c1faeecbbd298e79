#define PK_GENERIC
#include "../kernels/bn_relu.h"
