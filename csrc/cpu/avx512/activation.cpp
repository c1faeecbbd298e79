#define PK_AVX512
#include "../kernels/activation.h"
