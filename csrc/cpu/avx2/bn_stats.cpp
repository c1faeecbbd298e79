#define PK_AVX2
#include "../kernels/bn_stats.h"
