#define PK_AVX2
#include "../kernels/activation.h"
