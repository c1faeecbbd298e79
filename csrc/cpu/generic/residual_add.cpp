#define PK_GENERIC
#include "../kernels/residual_add.h"
