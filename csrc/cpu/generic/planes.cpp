#define PK_GENERIC
#include "../kernels/planes.h"
