#define PK_GENERIC
#include "../kernels/weight_stationary.h"
