#define PK_GENERIC
#include "../kernels/activation.h"
