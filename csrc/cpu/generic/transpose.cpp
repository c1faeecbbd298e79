#define PK_GENERIC
#include "../kernels/transpose.h"
