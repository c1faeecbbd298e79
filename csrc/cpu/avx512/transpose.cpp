#define PK_AVX512
#include "../kernels/transpose.h"
