// Tells AddressSanitizer which parts of an allocation are not in use, so that it reports accesses
// to them. Without the sanitizer, both macros are nothing.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) ((void)0)
#endif
