#define PK_AVX512
#include "../kernels/weight_stationary.h"
