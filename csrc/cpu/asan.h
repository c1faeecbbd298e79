// Tells AddressSanitizer which parts of an allocation are unused, so that it reports accesses to
// them. Without the sanitizer, both macros do nothing.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) ((void)0)
#endif
