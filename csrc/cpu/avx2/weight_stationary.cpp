#define PK_AVX2
#include "../kernels/weight_stationary.h"
