#define PK_AVX512
#include "../kernels/bn_stats.h"
