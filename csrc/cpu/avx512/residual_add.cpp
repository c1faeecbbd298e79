#define PK_AVX512
#include "../kernels/residual_add.h"
