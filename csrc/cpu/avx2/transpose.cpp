#define PK_AVX2
#include "../kernels/transpose.h"
