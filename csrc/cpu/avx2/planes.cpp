#define PK_AVX2
#include "../kernels/planes.h"
