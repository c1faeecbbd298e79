#define PK_GENERIC
#include "../kernels/dropout.h"
