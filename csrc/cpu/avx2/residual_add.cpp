#define PK_AVX2
#include "../kernels/residual_add.h"
