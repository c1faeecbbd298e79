#define PK_AMX_BF16
#include "../kernels/activation.h"
