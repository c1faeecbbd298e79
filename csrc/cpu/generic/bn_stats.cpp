#define PK_GENERIC
#include "../kernels/bn_stats.h"
