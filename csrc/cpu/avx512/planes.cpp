#define PK_AVX512
#include "../kernels/planes.h"
