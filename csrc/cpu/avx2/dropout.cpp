#define PK_AVX2
#include "../kernels/dropout.h"
