#define PK_AVX512
#include "../kernels/dropout.h"
